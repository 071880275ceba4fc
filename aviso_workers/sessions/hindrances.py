"""What keeps a worker from being ready, as the facts say it. `/readyz` tells it (`telemetry.listeners`), and the worker
records it for operators (`worker_recorder`).
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from aviso_workers.events import CONNECTION, WORKER, AgentDisturbed, AgentStarted, Event, Hindrance, all_kinds
from aviso_workers.state import own_streams
from aviso_workers.state.own_streams import RETRIES

OBSERVED = tuple(kind for kind in all_kinds() if kind.hindrance is not Event.hindrance)
"""The facts that `Hindrances.observe` is for."""
START = ""
"""What an agent lacks that has not begun to read; no stream has such a name."""


class Hindrances:
    """A worker is ready when it is connected, every agent reads, also again, is not stuck and can store dead letters,
    and this worker could lead.
    """

    def __init__(self, agents: Iterable[str]) -> None:
        now = datetime.now(UTC)
        self._found = {(WORKER, CONNECTION): Hindrance(WORKER, CONNECTION, "not connected yet", since=now)}
        """By agent (or `WORKER`) and by what they are about."""
        for agent in agents:
            self._found[agent, START] = Hindrance(agent, START, "has not started", since=now)

    def observe(self, event: Event) -> None:
        """Note what hinders the worker, or does so no more."""
        hindrance = event.hindrance()
        assert hindrance is not None
        agent, of = hindrance.agent, hindrance.of
        if isinstance(event, AgentStarted | AgentDisturbed) and not own_streams.app_of(RETRIES, event.stream):
            self._found.pop((agent, START), None)  # an agent may read what is tried again before its own stream
        if hindrance.text is None:
            self._found.pop((agent, of), None)
        else:
            before = self._found.get((agent, of))
            self._found[agent, of] = hindrance._replace(since=before.since if before else datetime.now(UTC))

    @property
    def found(self) -> list[Hindrance]:
        """The connection first, then what else the worker lacks, then what its agents lack."""
        return sorted(self._found.values(), key=_rank)


def _rank(hindrance: Hindrance) -> tuple[bool, bool]:
    return hindrance.agent != WORKER, hindrance.of != CONNECTION
