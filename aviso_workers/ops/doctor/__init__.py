"""The doctor: gathers facts once, judges them by checks, and says what to do.

The command `doctor` calls `examine`. `facts` asks the servers, `checks` are data with a pure function each,
`judgements` holds one against the other, `output` writes what came of it. docs/operations.md has a section for each
check.
"""

from __future__ import annotations

from msgspec import Struct, structs

from aviso_workers.backends import Admin
from aviso_workers.config import Config
from aviso_workers.ops.doctor import durability, facts, judgements
from aviso_workers.ops.doctor.checks import CHECKS
from aviso_workers.ops.doctor.durability import Standing
from aviso_workers.ops.doctor.facts import Scope
from aviso_workers.ops.doctor.judgements import Result, State

__all__ = ["Report", "Scope", "State", "examine", "hurried"]


CONNECT_SECONDS = 8
"""Enough to pass over two servers of three that accept connections and say nothing."""


class Report(Struct, frozen=True, kw_only=True):
    """What the doctor says."""

    server: str
    """Whom we were connected to."""
    results: tuple[Result, ...]
    """Of every check, the worst first."""
    standings: tuple[Standing, ...]
    """What each stream stands."""

    @property
    def state(self) -> State:
        return judgements.worst(self.results)


def hurried(config: Config) -> Config:
    """Return the configuration by which the doctor connects: a server that does not let it in soon is a finding by
    itself.
    """
    backend = config.notification_backend
    soon = min(CONNECT_SECONDS, backend.jetstream.timeout_seconds)
    jetstream = structs.replace(backend.jetstream, timeout_seconds=soon, retry_attempts=1)
    return structs.replace(config, notification_backend=structs.replace(backend, jetstream=jetstream))


async def examine(admin: Admin, config: Config, scope: Scope) -> Report:
    """Ask and judge. Changes nothing.

    Raises `RefusedError` where the backend is no server, `UnavailableError` where the connection is lost.
    """
    found = await facts.gather(admin, config, scope)
    return Report(
        server=f"{found.server.name} {found.server.ver}",
        results=tuple(judgements.judge(CHECKS, found)),
        standings=tuple(durability.standings(found)),
    )
