"""Whether an app that runs is ready, and why not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

from aviso_workers.declare.agents import Agent
from aviso_workers.events import (
    AgentDisturbed,
    AgentStarted,
    CallsFreed,
    CallsStuck,
    ConnectionChanged,
    DeadLettersRefused,
    DeadLettersStored,
    LeadershipHindered,
    LeadershipUnhindered,
    NotReadAgain,
    OfReadiness,
    ReadAgain,
)
from aviso_workers.state.dead_letter_records import RETRIES
from aviso_workers.telemetry.status import Health

__all__ = ["OBSERVED", "Readiness"]

OBSERVED = get_args(OfReadiness)
"""The facts that `Readiness.observe` is for."""
DEAD_LETTERS = "dead letters"
CALLS = "calls"
BODIES = "bodies"
"""What an agent lacks beside a stream that it reads; no stream has such a name."""


class Readiness:
    """Ready means: connected, every agent reads, also again, is not stuck and can store dead letters, this worker could
    lead, and nobody stops it.
    """

    def __init__(self, agents: Iterable[Agent[Any, Any]]) -> None:
        self.health = Health()
        self._agents = {(agent.name, ""): "has not started" for agent in agents}
        self._hindered: dict[str, str] = {}
        """By bucket, why this worker cannot lead."""
        self._connection = "not connected yet"
        self._stopping = False
        self._say()

    def observe(self, event: OfReadiness) -> None:
        match event:
            case ConnectionChanged(connected=True):
                self._connection = ""
            case ConnectionChanged(reason=reason):
                self._connection = f"not connected: {reason}"
            case AgentStarted(agent=agent, stream=stream):
                self._note_begun(agent, stream)
                self._agents.pop((agent, stream), None)
            case AgentDisturbed(agent=agent, stream=stream, error=error):
                self._note_begun(agent, stream)
                self._agents[agent, stream] = str(error)
            case DeadLettersRefused(agent=agent, error=error):
                self._agents[agent, DEAD_LETTERS] = f"dead letters cannot be stored: {error}"
            case DeadLettersStored(agent=agent):
                self._agents.pop((agent, DEAD_LETTERS), None)
            case CallsStuck(agent=agent, calls=count, in_thread=in_thread):
                what = "thread" if in_thread else "call"
                self._agents[agent, CALLS] = f"{count} {what}s are stuck" if count > 1 else f"its {what} is stuck"
            case CallsFreed(agent=agent):
                self._agents.pop((agent, CALLS), None)
            case NotReadAgain(agent=agent, sequence=sequence, error=error):
                self._agents[agent, BODIES] = f"sequence {sequence}, which waits, cannot be read again: {error}"
            case ReadAgain(agent=agent):
                self._agents.pop((agent, BODIES), None)
            case LeadershipHindered(bucket=bucket, error=error):
                self._hindered[bucket] = f"cannot lead, for lack of bucket {bucket}: {error}"
            case LeadershipUnhindered(bucket=bucket):
                self._hindered.pop(bucket, None)
        self._say()

    def stop(self) -> None:
        self._stopping = True
        self._say()

    def _note_begun(self, agent: str, stream: str) -> None:
        if stream != RETRIES:  # an agent may read what is tried again before it reads its own stream
            self._agents.pop((agent, ""), None)

    def _say(self) -> None:
        agents = (f"agent {name}: {problem}" for (name, _), problem in self._agents.items())
        said = ("stopping" if self._stopping else "", self._connection, *self._hindered.values(), *agents)
        self.health.unready = [problem for problem in said if problem]
