"""The doctor: gathers facts once, judges them by checks, and says what to do.

The command `doctor` calls `examine`. `facts` asks the servers, `checks` are data with a pure function each,
`judgements` holds one against the other, `output` writes what came of it. docs/operations/checks.md has a section for
each check.
"""

from __future__ import annotations

from msgspec import Struct, structs

from aviso_workers.backends import Admin
from aviso_workers.config import Config
from aviso_workers.errors import ConfigError
from aviso_workers.ops.doctor import facts, judgements
from aviso_workers.ops.doctor.checks import CHECKS, servers
from aviso_workers.ops.doctor.checks.servers import StreamDurability
from aviso_workers.ops.doctor.facts import Scope
from aviso_workers.ops.doctor.judgements import Result, State

__all__ = ["Report", "Scope", "State", "examine", "hurried"]


CONNECT_SECONDS = 8
"""Enough to pass over two servers of three that accept connections and say nothing."""


class Report(Struct, frozen=True, kw_only=True):
    """The report of the doctor: the result of every check, and which accidents lose messages of each stream."""

    server: str
    """The server that we were connected to, and its version."""
    results: tuple[Result, ...]
    """The results of all checks, the worst first."""
    durability: tuple[StreamDurability, ...]
    """Which accidents each stream withstands."""

    @property
    def state(self) -> State:
        return max((result.state for result in self.results), default=State.PASS)


def hurried(config: Config) -> Config:
    """Return the configuration with which the doctor connects: it waits only shortly, because a server that does not
    accept a connection soon is a finding by itself.
    """
    backend = config.notification_backend
    soon = min(CONNECT_SECONDS, backend.jetstream.timeout_seconds)
    jetstream = structs.replace(backend.jetstream, timeout_seconds=soon, retry_attempts=1)
    return structs.replace(config, notification_backend=structs.replace(backend, jetstream=jetstream))


async def examine(admin: Admin, config: Config, scope: Scope) -> Report:
    """Gather the facts, apply every check to them, and return the report. Nothing on the servers is changed.

    Raises `ConfigError` where a finding of a check that does not exist is accepted, `RefusedError` where the backend is
    not a server, `UnavailableError` where the connection is lost.
    """
    accepted, codes = config.doctor.accepted, {check.code for check in CHECKS}
    if wrong := [n for n, each in enumerate(accepted) if each.code not in codes]:
        raise ConfigError(f"doctor.accepted[{n}].code: there is no check {accepted[n].code}" for n in wrong)
    found = await facts.gather(admin, config, scope)
    return Report(
        server=f"{found.server.name} {found.server.ver}",
        results=tuple(judgements.judge(CHECKS, found)),
        durability=tuple(servers.durabilities(found)),
    )
