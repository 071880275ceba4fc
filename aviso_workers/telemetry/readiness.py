"""Whether an app that runs is ready, and why not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aviso_workers.declare.agents import Agent
from aviso_workers.events import CONNECTION, WORKER, AgentDisturbed, AgentStarted, Event, Hindrance, all_kinds
from aviso_workers.state.own_streams import RETRIES
from aviso_workers.telemetry.status import Health

__all__ = ["OBSERVED", "Readiness"]

OBSERVED = tuple(kind for kind in all_kinds() if kind.hindrance is not Event.hindrance)
"""The facts that `Readiness.observe` is for."""
START = ""
"""What an agent lacks that has not begun to read; no stream has such a name."""


class Readiness:
    """Ready means: connected, every agent reads, also again, is not stuck and can store dead letters, this worker could
    lead, and nobody stops it. What hinders it, the facts say.
    """

    def __init__(self, agents: Iterable[Agent[Any, Any]]) -> None:
        self.health = Health()
        self._hindrances = {(WORKER, CONNECTION): Hindrance(WORKER, CONNECTION, "not connected yet")}
        """By agent (or `WORKER`) and by what they are about."""
        for agent in agents:
            self._hindrances[agent.name, START] = Hindrance(agent.name, START, "has not started")
        self._stopping = False
        self._say()

    def observe(self, event: Event) -> None:
        """Note what hinders the worker, or does so no more; the observer of those that are `OBSERVED`."""
        hindrance = event.hindrance()
        assert hindrance is not None
        agent, of = hindrance.agent, hindrance.of
        if isinstance(event, AgentStarted | AgentDisturbed) and event.stream != RETRIES:
            self._hindrances.pop((agent, START), None)  # an agent may read what is tried again before its own stream
        if hindrance.text is None:
            self._hindrances.pop((agent, of), None)
        else:
            self._hindrances[agent, of] = hindrance
        self._say()

    def stop(self) -> None:
        self._stopping = True
        self._say()

    def _say(self) -> None:
        said = sorted(self._hindrances.values(), key=_rank)
        unready = [_text(each) for each in said if not each.is_ready]
        self.health.unready = ["stopping", *unready] if self._stopping else unready
        self.health.notes = [_text(each) for each in said if each.is_ready]


def _text(hindrance: Hindrance) -> str:
    text = hindrance.text or ""
    return text if hindrance.agent == WORKER else f"agent {hindrance.agent}: {text}"


def _rank(hindrance: Hindrance) -> tuple[bool, bool]:
    """Return what sorts the connection before what else the worker lacks, and that before what its agents lack."""
    return hindrance.agent != WORKER, hindrance.of != CONNECTION
