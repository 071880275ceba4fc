"""The end of every delivery: judged, settled, stated. The only place that acks, gives back and dead-letters."""

from __future__ import annotations

from typing import Any, NamedTuple

import anyio

from aviso_workers import verdicts
from aviso_workers.agents import Agent
from aviso_workers.backends import Delivery
from aviso_workers.clocks import Clock
from aviso_workers.engine.dead_lettering import DeadLetters
from aviso_workers.engine.failing import Failures
from aviso_workers.engine.ordering import Line
from aviso_workers.errors import BackendError
from aviso_workers.events import Events, Settled, SettledOutcome
from aviso_workers.verdicts import Ack, Again, Failure

__all__ = ["Settler"]

GRAVE_UNREACHABLE_SECONDS = 10.0
"""When a dead letter cannot be stored, its original comes back after this."""


class _End(NamedTuple):
    """What became of a delivery, and because of which error."""

    outcome: SettledOutcome
    reason: str = ""
    error: BaseException | None = None


ON_ERROR = "on_error"
"""The reason of what is acked although its handler raised."""
ACKED = _End("acked")
TAKEN_OVER = _End("retried", "taken_over")


class Settler:
    """Settles the deliveries of one agent."""

    def __init__(
        self,
        agent: Agent[Any, Any],
        *,
        stream: str,
        line: Line,
        failures: Failures,
        dead_letters: DeadLetters,
        clock: Clock,
        events: Events,
    ) -> None:
        self._agent = agent
        self._stream = stream
        self._line = line
        self._failures = failures
        self._dead_letters = dead_letters
        self._clock = clock
        self._events = events

    def pass_over(self, delivery: Delivery) -> None:
        """The agent did not ask for it: the server's filter is wider than the agent's."""
        if self._line.holds(delivery):
            self._ack(delivery)
        else:
            self._line.done(delivery)

    async def settle(self, delivery: Delivery, failure: Failure | None, *, started: float) -> None:
        """End a delivery whose handling succeeded (None) or failed, and state what became of it.

        `started` is when the handling began, on the agent's clock.
        """
        waited = self._line.waited_seconds(delivery)
        if waited is None:
            self._line.done(delivery)
            return
        ended = self._clock.monotonic()
        end = ACKED
        if not delivery.held:
            end = TAKEN_OVER
            self._line.done(delivery)
        elif failure is not None:
            with anyio.CancelScope(shield=True):  # a cancellation cuts off no dead letter
                end = await self._end_failed(delivery, failure)
        else:
            self._ack(delivery)
        self._events.emit(
            Settled(
                agent=self._agent.name,
                event_type=self._agent.event_type,
                sequence=delivery.message.sequence,
                outcome=end.outcome,
                reason=end.reason,
                seconds=ended - started,
                waited_seconds=waited,
                stored_to_settled_seconds=(self._clock.time_ns() - delivery.message.timestamp_ns) / 1e9,
                num_delivered=delivery.num_delivered,
                error=end.error,
            )
        )
        if end.outcome != "retried":
            await self._failures.forget(delivery)

    async def _end_failed(self, delivery: Delivery, failure: Failure) -> _End:
        classified = verdicts.classify(failure, self._agent.classifiers)
        if isinstance(classified, Ack):
            self._ack(delivery)
            return _End("acked", ON_ERROR, failure.error)
        failures = self._failures.count(delivery)
        verdict = verdicts.decide(classified, failures=failures, retry=self._agent.policy.retry)
        error = classified.error
        if isinstance(verdict, Again):
            await self._failures.add(delivery, before=failures, kept=self._line.ordered)
            self._give_back(delivery, verdict.after_seconds)
            return _End("retried", verdict.reason, error)
        try:
            await self._dead_letters.bury(
                delivery.message,
                agent=self._agent.name,
                stream=self._stream,
                reason=verdict.reason,
                attempts=failures + 1,
                error=error,
            )
        except BackendError as unstored:
            self._give_back(delivery, GRAVE_UNREACHABLE_SECONDS)
            return _End("retried", "dead_letter_failed", unstored)
        delivery.term(verdict.reason)
        self._line.done(delivery)
        return _End("dead_lettered", verdict.reason, error)

    def _ack(self, delivery: Delivery) -> None:
        delivery.ack()
        self._line.done(delivery)

    def _give_back(self, delivery: Delivery, delay: float) -> None:
        if self._line.ordered:
            self._line.again(delivery, after_seconds=delay)
        else:
            delivery.nak(delay_seconds=delay)
            self._line.done(delivery)
