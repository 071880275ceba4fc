"""The facts that the engine states.

The engine emits, observers listen: metrics, logs and the test harness. Nothing in the engine asks who listens, and
no observer can change what happens. Facts carry no subject and no payload.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

__all__ = [
    "AgentDisturbed",
    "AgentStarted",
    "AgentStopped",
    "ConnectionChanged",
    "Event",
    "Events",
    "Published",
    "Settled",
    "Skipped",
    "StreamProvisioned",
    "TaskFailed",
]


class Published(Struct, frozen=True, kw_only=True):
    """A publish ended: stored, found to be stored already, or given up."""

    event_type: str
    outcome: Literal["stored", "duplicate", "failed"]
    attempts: int


class Settled(Struct, frozen=True, kw_only=True):
    """A delivery was settled; `seconds` is the time the handling took."""

    agent: str
    notification: str
    """`<event type>@<sequence>`."""
    outcome: Literal["acked", "retried", "dead_lettered"]
    reason: str
    seconds: float
    num_delivered: int
    error: Exception | None = None


class AgentStarted(Struct, frozen=True, kw_only=True):
    agent: str
    stream: str
    consumer: str


class AgentDisturbed(Struct, frozen=True, kw_only=True):
    """An agent could not go on reading and tries again after a wait."""

    agent: str
    error: Exception
    again_in_seconds: float


class AgentStopped(Struct, frozen=True, kw_only=True):
    """An agent left in order: what it was working on is finished, what it had not begun is given back."""

    agent: str
    finished: int
    returned: int


class TaskFailed(Struct, frozen=True, kw_only=True):
    """A long-running task of an app raised and is started again after a wait."""

    task: str
    error: Exception
    again_in_seconds: float


class Skipped(Struct, frozen=True, kw_only=True):
    """A replay or a watch left out a stored message that is no notification of its event type."""

    event_type: str
    sequence: int
    error: Exception


class StreamProvisioned(Struct, frozen=True, kw_only=True):
    """A stream was created or updated, or the server refused its update (`refused` says why)."""

    stream: str
    action: Literal["created", "updated", "kept"]
    differences: tuple[str, ...] = ()
    refused: str = ""


class ConnectionChanged(Struct, frozen=True, kw_only=True):
    connected: bool
    reason: str


Event = (
    Published
    | Settled
    | AgentStarted
    | AgentDisturbed
    | AgentStopped
    | TaskFailed
    | Skipped
    | StreamProvisioned
    | ConnectionChanged
)


class Events:
    """Where facts are stated and listened to. Listeners are called at once, in the order they came."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Event], None]] = []

    def listen(self, listener: Callable[[Event], None]) -> None:
        self._listeners.append(listener)

    def emit(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)
