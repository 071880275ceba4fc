"""What happens to one delivery: decoded, handled, judged, settled. The only place that acks."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import anyio

from aviso_workers import verdicts
from aviso_workers.agents import Agent
from aviso_workers.backends import Delivery
from aviso_workers.codec import NotificationReader
from aviso_workers.engine import calling
from aviso_workers.engine.dead_lettering import DeadLetters
from aviso_workers.errors import BackendError
from aviso_workers.events import Events, Settled
from aviso_workers.notifications import Notification
from aviso_workers.verdicts import Ack, DeadLetter, Retry, Verdict

__all__ = ["Handler"]

GRAVE_UNREACHABLE_SECONDS = 10.0
"""When a dead letter cannot be stored, its original comes back after this."""


class Handler:
    """Takes the deliveries of one agent to their end."""

    def __init__(
        self,
        agent: Agent[Any, Any],
        *,
        stream: str,
        reader: NotificationReader,
        dead_letters: DeadLetters,
        events: Events,
    ) -> None:
        self._agent = agent
        self._function: Callable[[Notification[Any]], Awaitable[Any]] = agent.function
        self._stream = stream
        self._reader = reader
        self._dead_letters = dead_letters
        self._events = events

    async def handle(self, delivery: Delivery) -> None:
        """Settle the delivery, whatever the author's function does. Only a cancellation leaves it, given back."""
        started = time.perf_counter()
        error: Exception | None = None
        try:
            notification = self._reader.notification(delivery.message, num_delivered=delivery.num_delivered)
            if notification is None:
                delivery.ack()  # the server's filter is wider than the agent's
                return
            await calling.call(self._function, notification)
        except anyio.get_cancelled_exc_class():
            delivery.nak()
            raise
        except Exception as raised:
            error = raised
        verdict = verdicts.decide(error, failures=delivery.num_delivered, retry=self._agent.retry)
        verdict = await self._settle(delivery, verdict, error)
        self._emit(delivery, verdict, error, time.perf_counter() - started)

    async def _settle(self, delivery: Delivery, verdict: Verdict, error: Exception | None) -> Verdict:
        """Carry the verdict out; the one returned is what became of it."""
        match verdict:
            case Ack():
                delivery.ack()
            case Retry(after_seconds=delay):
                delivery.nak(delay_seconds=delay)
            case DeadLetter(reason=reason):
                try:
                    with anyio.CancelScope(shield=True):
                        await self._dead_letters.bury(
                            delivery, agent=self._agent.name, stream=self._stream, reason=reason, error=error
                        )
                except BackendError:
                    delivery.nak(delay_seconds=GRAVE_UNREACHABLE_SECONDS)
                    return Retry(after_seconds=GRAVE_UNREACHABLE_SECONDS, reason="dead_letter_failed")
                delivery.term(reason)
        return verdict

    def _emit(self, delivery: Delivery, verdict: Verdict, error: Exception | None, seconds: float) -> None:
        outcome: Literal["acked", "retried", "dead_lettered"] = "acked"
        reason = ""
        match verdict:
            case Retry(reason=reason):
                outcome = "retried"
            case DeadLetter(reason=reason):
                outcome = "dead_lettered"
        self._events.emit(
            Settled(
                agent=self._agent.name,
                notification=f"{self._agent.event_type}@{delivery.message.sequence}",
                outcome=outcome,
                reason=reason,
                seconds=seconds,
                num_delivered=delivery.num_delivered,
                error=error,
            )
        )
