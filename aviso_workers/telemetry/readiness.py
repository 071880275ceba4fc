"""Whether an app that runs is ready, and why not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aviso_workers.declare.agents import Agent
from aviso_workers.events import WORKER, Event, Hindrance
from aviso_workers.sessions import hindrances
from aviso_workers.telemetry.status import Health

OBSERVED = hindrances.OBSERVED
"""The facts that `Readiness.observe` is for."""


class Readiness:
    """Ready means that nothing hinders the worker (`sessions.hindrances`), and nobody stops it."""

    def __init__(self, agents: Iterable[Agent[Any, Any]]) -> None:
        self.health = Health()
        self._hindrances = hindrances.Hindrances(agent.name for agent in agents)
        self._stopping = False
        self._say()

    def observe(self, event: Event) -> None:
        """Note what hinders the worker, or does so no more; the observer of those that are `OBSERVED`."""
        self._hindrances.observe(event)
        self._say()

    def stop(self) -> None:
        self._stopping = True
        self._say()

    def _say(self) -> None:
        said = self._hindrances.found
        unready = [_text(each) for each in said if not each.is_ready]
        self.health.unready = ["stopping", *unready] if self._stopping else unready
        self.health.notes = [_text(each) for each in said if each.is_ready]


def _text(hindrance: Hindrance) -> str:
    text = hindrance.text or ""
    return text if hindrance.agent == WORKER else f"agent {hindrance.agent}: {text}"
