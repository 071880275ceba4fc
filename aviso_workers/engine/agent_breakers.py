"""An agent and its breaker: which of its failures are no attempts, what waits in an outage, and when it is halted.

`acknowledging` tells it of each failure, and of successes while the breaker is open (`breakers`). An agent whose
notifications become dead letters in a flood, as after a deploy that breaks everything, is halted: its worker begins
nothing until a person resumes the agent, or the worker ends. Each worker decides that by itself.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any, Protocol

import anyio
from msgspec import structs

from aviso_workers import clocks
from aviso_workers.aviso.literals import printable
from aviso_workers.aviso.notifications import Notification
from aviso_workers.backends import Backend, Delivery
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.outages import is_unavailable
from aviso_workers.declare.verdicts import Failure, PriorRecord
from aviso_workers.engine.breakers import LONGER, CircuitBreaker
from aviso_workers.engine.flow import Flow
from aviso_workers.errors import BackendError, line_of
from aviso_workers.events import AgentHalted, AgentResumed, Events
from aviso_workers.state import outage_records
from aviso_workers.state.outage_records import OutageRecord

__all__ = ["AgentBreaker"]

FLOOD_SECONDS = 60.0
FLOOD_SHARE = 0.1
"""The share of dead letters among what is settled that makes a flood of many of them."""
FLOOD_REASONS = frozenset({"attempts_exhausted", "undecodable", "invalid_notification"})
"""The reasons of dead letters that a deploy may be the cause of, and that no author has decided on."""
HALTED_SECONDS = outage_records.RENEW_SECONDS * LONGER
"""After how long a notification of a halted agent comes again."""
CHECK_SECONDS = 2.0
"""How often a worker that has halted its agent looks whether that is resumed."""


class Settling(Protocol):
    """What settles the deliveries of an agent (`acknowledging`)."""

    successes: int
    """How many deliveries have succeeded."""

    def give_back_waiting(self, *, delay_seconds: float) -> None:
        """Nak the deliveries whose handling has not begun."""
        ...


class AgentBreaker:
    """The breaker of one agent in one worker, to be attached to what settles its deliveries. Keep `work` running beside
    the agent.
    """

    def __init__(
        self,
        agent: Agent[Any, Any],
        circuit: CircuitBreaker,
        *,
        unavailable: tuple[type[BaseException], ...],
        flow: Flow,
        backend: Backend,
        app: str,
        events: Events,
    ) -> None:
        """`unavailable` are further exceptions that say that something is away."""
        self.agent = agent.name
        self.concurrency = flow.workers
        self._settling: Settling | None = None
        self._kinds = unavailable
        self._together = agent.form is not Notification
        """Whether a call takes several notifications."""
        self._tries = agent.policy.window is None
        """Whether the handling of a notification asks what the agent depends on. The function of a window does."""
        self._circuit = circuit
        self._buffer = flow.buffer
        self._stays = agent.policy.singleton or flow.buffer.ordered
        """Whether what waits stays with the worker, as it would come back in another order."""
        self._dead_letters: deque[tuple[float, int]] = deque(maxlen=circuit.policy.dead_letters + 1)
        """When the last ones were to be stored, and how many notifications had succeeded then."""
        self._halt: OutageRecord | None = None
        """Since when and why the agent is halted; None while it is not."""
        self._halted = anyio.Event()
        self._key = outage_records.halt_key(app, agent.name)
        self._backend = backend
        self._clock = backend.clock
        self._events = events
        circuit.add(self)

    @property
    def is_open(self) -> bool:
        """Whether nothing begins but what is tried."""
        return self._circuit.is_open

    def attach(self, settling: Settling) -> None:
        """Be told by this of failures and successes, from now on."""
        self._settling = settling

    @property
    def _successes(self) -> int:
        return self._settling.successes if self._settling is not None else 0

    def succeeded(self) -> int:
        return self._successes if self._tries else 0

    def note_success(self, delivery: Delivery) -> None:
        """Note that a delivery succeeded while the breaker is open; what began before that says nothing."""
        if self._buffer.end_try(delivery) and self.is_open:
            self._circuit.note_answer()

    def note_failure(self, delivery: Delivery, failure: Failure, *, started: float) -> float | None:
        """Note that a delivery failed, in a call that began at `started`.

        Return after how long it is to be tried again where this is no failed attempt; None where it is one.
        """
        tried = self._buffer.end_try(delivery)
        if failure.final or failure.worker_died or not self._tries:
            return None  # nothing that the author's function has called, or what counts for a window
        if failure.instruction is not None:
            if tried and self.is_open:
                self._circuit.note_answer()
            return None
        record: PriorRecord | None = delivery.record
        return self._circuit.note_failure(
            (self.agent, delivery.message.sequence, delivery.message.timestamp_ns),
            failure.error,
            away=is_unavailable(failure.error, self._kinds),
            first=record is None or not (record.failures or record.uncounted),
            tried=tried,
            call=started if self._together else None,
        )

    def stop_flood(self, reason: str, error: BaseException) -> float | None:
        """Note that a notification is to become a dead letter. Return after how long it is tried again instead, because
        there are so many that the agent is halted; None where it may become one.
        """
        if self._halt is None and reason in FLOOD_REASONS:
            now, succeeded = self._clock.monotonic(), self._successes
            self._dead_letters.append((now, succeeded))
            since, before = self._dead_letters[0]
            dead_letters = len(self._dead_letters)
            if (
                dead_letters == self._dead_letters.maxlen
                and now - since <= FLOOD_SECONDS
                and dead_letters >= FLOOD_SHARE * (dead_letters + succeeded - before)
            ):
                self._note_halt(error, dead_letters=dead_letters - 1, seconds=now - since)
        return None if self._halt is None else HALTED_SECONDS

    def spared_window_seconds(self, failure: Failure) -> float | None:
        """Return after how long the function of a window is run again that failed because something is away; None
        where its failure is an attempt. Windows are no evidence: one worker of all runs their function.
        """
        decided = failure.final or failure.instruction is not None or not is_unavailable(failure.error, self._kinds)
        return None if decided else self._circuit.intervals.max

    @property
    def can_try(self) -> bool:
        return self._tries and self._halt is None and self._buffer.can_try

    def hold_back(self, *, give_back_after_seconds: float | None = None) -> None:
        self._buffer.hold_back()
        if give_back_after_seconds is not None and self._settling is not None and not self._stays:
            self._settling.give_back_waiting(delay_seconds=give_back_after_seconds)

    def let(self, count: int) -> None:
        if self._tries and self._halt is None:
            self._buffer.let(count)

    def let_none(self) -> None:
        self._buffer.let_none()

    def let_all(self) -> None:
        if self._halt is None:
            self._buffer.let_all()

    def is_trying(self) -> bool:
        return self._buffer.is_trying()

    async def work(self) -> None:
        """Say in the shared record that the agent is halted, while it is, and resume it when a person has said there
        that it is over; never returns.
        """
        while True:
            await self._halted.wait()
            written_at: float | None = None
            while self._halt is not None:
                with suppress(BackendError):  # also where another worker has written it: it is read again
                    record, revision = await outage_records.newest(self._backend, self._key)
                    now = self._clock.monotonic()
                    if written_at is not None and record is not None and record.over:
                        self._resume()
                        break
                    if written_at is None or now - written_at >= outage_records.RENEW_SECONDS:
                        renewed = structs.replace(self._halt, written=clocks.utc_now(self._clock))
                        await outage_records.write(self._backend, renewed, key=self._key, revision=revision)
                        written_at = now
                await self._clock.sleep(CHECK_SECONDS)

    def _note_halt(self, error: BaseException, *, dead_letters: int, seconds: float) -> None:
        now, last = clocks.utc_now(self._clock), f"{type(error).__name__}: {line_of(error)}"
        reason = printable(f"{dead_letters} dead letters within {max(1.0, seconds):.0f} s, the last one: {last}")
        self._halt = OutageRecord(since=now, reason=reason, agents=(self.agent,), halted=True, written=now)
        self.hold_back(give_back_after_seconds=HALTED_SECONDS)
        self._events.emit(AgentHalted(agent=self.agent, reason=reason))
        self._halted.set()

    def _resume(self) -> None:
        self._halt, self._halted = None, anyio.Event()
        self._dead_letters.clear()
        if not self.is_open:
            self._buffer.let_all()
        self._events.emit(AgentResumed(agent=self.agent))
