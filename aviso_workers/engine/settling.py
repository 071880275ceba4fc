"""The end of every delivery: judged, settled, stated. The only place that acks, gives back and dead-letters."""

from __future__ import annotations

from typing import Any, Literal

import anyio

from aviso_workers import verdicts
from aviso_workers.agents import Agent
from aviso_workers.backends import Delivery
from aviso_workers.clocks import Clock
from aviso_workers.engine.dead_lettering import DeadLetters
from aviso_workers.engine.failing import Failures
from aviso_workers.engine.ordering import Line
from aviso_workers.errors import BackendError
from aviso_workers.events import Events, Settled
from aviso_workers.verdicts import Ack, Again, DeadLetter, Verdict

__all__ = ["Settler"]

DONE = Ack()
GRAVE_UNREACHABLE_SECONDS = 10.0
"""When a dead letter cannot be stored, its original comes back after this."""


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

    async def settle(self, delivery: Delivery, outcome: object, *, started: float) -> None:
        """End the delivery by what the handler returned, or the exception that it raised.

        `started` is when the handling began, on the agent's clock. A cancellation cuts off no dead letter, and what
        succeeded is acked at once.
        """
        if not self._line.holds(delivery):
            self._line.done(delivery)
            return
        seconds = self._clock.monotonic() - started
        waited = self._line.waited_seconds(delivery)
        verdict: Verdict = DONE
        error: Exception | None = None
        if isinstance(outcome, Exception):
            with anyio.CancelScope(shield=True):
                verdict, error = await self._carry_out(delivery, outcome)
        else:
            self._ack(delivery)
        self._state(delivery, verdict, error=error, seconds=seconds, waited=waited)
        if not isinstance(verdict, Again):
            await self._failures.forget(delivery)

    async def _carry_out(self, delivery: Delivery, error: Exception) -> tuple[Verdict, Exception]:
        """What became of it, and because of which error."""
        policy = self._agent.policy
        failures = await self._failures.count(delivery)
        verdict = verdicts.decide(error, failures=failures, retry=policy.retry, classifiers=self._agent.classifiers)
        match verdict:
            case Ack():
                self._ack(delivery)
            case Again(after_seconds=delay):
                await self._failures.add(delivery, before=failures, kept=self._line.ordered)
                self._give_back(delivery, delay)
            case DeadLetter(reason=reason):
                try:
                    await self._dead_letters.bury(
                        delivery.message,
                        agent=self._agent.name,
                        stream=self._stream,
                        reason=reason,
                        attempts=failures + 1,
                        error=error,
                    )
                except BackendError as unstored:
                    self._give_back(delivery, GRAVE_UNREACHABLE_SECONDS)
                    return Again(after_seconds=GRAVE_UNREACHABLE_SECONDS, reason="dead_letter_failed"), unstored
                delivery.term(reason)
                self._line.done(delivery)
        return verdict, error

    def _ack(self, delivery: Delivery) -> None:
        delivery.ack()
        self._line.done(delivery)

    def _give_back(self, delivery: Delivery, delay: float) -> None:
        if self._line.ordered:
            self._line.again(delivery, after_seconds=delay)
        else:
            delivery.nak(delay_seconds=delay)
            self._line.done(delivery)

    def _state(
        self, delivery: Delivery, verdict: Verdict, *, error: Exception | None, seconds: float, waited: float
    ) -> None:
        outcome: Literal["acked", "retried", "dead_lettered"] = "acked"
        reason = ""
        match verdict:
            case Again(reason=reason):
                outcome = "retried"
            case DeadLetter(reason=reason):
                outcome = "dead_lettered"
        self._events.emit(
            Settled(
                agent=self._agent.name,
                event_type=self._agent.event_type,
                sequence=delivery.message.sequence,
                outcome=outcome,
                reason=reason,
                seconds=seconds,
                waited_seconds=waited,
                stored_to_settled_seconds=(self._clock.time_ns() - delivery.message.timestamp_ns) / 1e9,
                num_delivered=delivery.num_delivered,
                error=error,
            )
        )
