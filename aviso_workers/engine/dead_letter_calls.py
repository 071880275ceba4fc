"""The author's function of `on_dead_letter`: called when a dead letter is stored, before its original is settled.

It runs as an agent's own function does, and what it returns is published under ids that follow from the notification
and are none of those that the agent's function has used for it. A worker that dies meanwhile leaves the notification
to another one, which stores the dead letter and calls the function again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct

from aviso_workers.aviso.codec import Message, NotificationReader, store_time
from aviso_workers.aviso.notifications import Notification
from aviso_workers.clocks import Clock
from aviso_workers.declare import verdicts
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.retry import Backoff
from aviso_workers.declare.verdicts import GivenUp
from aviso_workers.engine import calls
from aviso_workers.engine.calls import Timeouts
from aviso_workers.engine.handlers import Outputs, awaitable
from aviso_workers.engine.outages import Outage
from aviso_workers.errors import describe
from aviso_workers.events import DeadLetterCallFailed, Events

RETRY = Backoff(first=1.0, factor=2.0, jitter=0.0)
CALLS = 3
"""The calls for one dead letter. They are few, because the notification keeps its place until the last of them."""


TURN_SECONDS = 0.5
"""How often a call asks again that has to wait because what the agent depends on is away."""


class DeadLetterCalls(Struct, eq=False, dict=True):
    """Calls the function of one agent. `running` is the agent with this function in place of its own."""

    running: Agent[Any, Any]
    readers: Sequence[NotificationReader]
    """The first that can read a notification does so."""
    outputs: Outputs
    outage: Outage
    clock: Clock
    events: Events

    def __post_init__(self) -> None:
        function = awaitable(self.running, outputs=self.outputs)
        self._function = Timeouts(self.running, clock=self.clock, events=self.events).limit(
            function, self.running.policy.timeout
        )

    async def call(
        self, message: Message, reason: str, *, attempts: int, error: BaseException, window: Any = None
    ) -> None:
        """Call the function, and again where that fails, and state each failure. `window` is what the message stands
        for, where it is a window's.
        """
        notification = self._read(message, attempts=attempts, window=window)
        given_up = GivenUp(notification=notification, reason=reason, attempts=attempts, error=describe(error))
        for tried in range(1, CALLS + 1):
            while not self.outage.begins(again=True):
                await self.clock.sleep(TURN_SECONDS)
            with self.outputs.keys() as keys:
                keys.begin_dead_letter(message, of_window=window is not None)
                failure = await calls.attempt_apart(self._call_and_publish, given_up)
            if failure is None:
                return  # which says nothing of what the agent's own function needs
            if failure.final is None:
                away = self.outage.is_unavailable(failure.error)
                self.outage.failed(failure.error, again=True, away=away)
            again = RETRY.delay_seconds(tried) if tried < CALLS and failure.final is None else 0.0
            self.events.emit(
                DeadLetterCallFailed(
                    agent=self.running.name, notification=notification.id, error=failure.error, again_in_seconds=again
                )
            )
            del failure  # the frames of its traceback lead to this one, and would keep it until the next collection
            if not again:
                return
            await self.clock.sleep(again)

    async def _call_and_publish(self, given_up: GivenUp[Any, Any]) -> None:
        returned = await self._function(given_up)
        if failure := verdicts.failure_returned(returned):
            raise failure.error
        await self.outputs.publish(returned)

    def _read(self, message: Message, *, attempts: int, window: Any) -> Notification[Any, Any]:
        for reader in () if window else self.readers:
            with suppress(BaseException):  # the author's payload type has code as well
                if notification := reader.notification(message, attempt=attempts):
                    return notification
        return Notification(
            event_type=self.running.event_type,
            identifier={},
            payload=window or message.data,
            sequence=message.sequence,
            time=store_time(message),
            time_ns=message.timestamp_ns,
            topic=message.subject,
            headers=message.headers or {},
            attempt=attempts,
        )
