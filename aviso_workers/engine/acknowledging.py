"""The end of every delivery: nothing else of the engine acks, naks, terminates or stores dead letters.

`Settler` ends the deliveries of an agent: it has a failure judged (`verdicts.decide`), stores the dead letter before
the original is terminated, counts the failure before the delivery is given back, and states the end. It judges windows
as well. A failure of which the agent's breaker says that it is an outage counts as no attempt.

Modules that settle a delivery without running a handler pass a `Settlement` to `settle`: delayed delivery,
`shared_filters` for what another version wants, `repeats` for what was settled before.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from msgspec import structs

from aviso_workers import clocks
from aviso_workers.aviso.codec import Message
from aviso_workers.aviso.literals import printable
from aviso_workers.backends import Delivery
from aviso_workers.clocks import Clock, ScheduledCall
from aviso_workers.declare import verdicts
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.retry import Backoff, RetryShare
from aviso_workers.declare.verdicts import (
    PARKED,
    Ack,
    Again,
    DeadLetter,
    Failure,
    Nak,
    PriorRecord,
    Settlement,
    Term,
    Verdict,
)
from aviso_workers.engine.agent_breakers import AgentBreaker
from aviso_workers.engine.attempts import Failures
from aviso_workers.engine.buffer import Buffer
from aviso_workers.engine.dead_letter_store import DeadLetterStore
from aviso_workers.engine.failure_recorder import LastFailures
from aviso_workers.engine.repeats import Repeats
from aviso_workers.engine.shields import Shield
from aviso_workers.errors import BackendError, line_of
from aviso_workers.events import (
    Acked,
    DeadLettersRefused,
    DeadLettersStored,
    Events,
    Failed,
    Settled,
    SettledOutcome,
    Suspected,
)
from aviso_workers.jetstream import answers, error_codes
from aviso_workers.state.failure_counts import ParkedRecord
from aviso_workers.state.failure_records import Retrying

__all__ = ["NO_ATTEMPT", "UNAVAILABLE", "Settler", "give_back", "leave_to_others", "settle", "settle_again"]

STORE_AGAIN = Backoff(first=10.0, factor=2.0, max=300.0, jitter=0.0)
"""The backoff after a dead letter could not be stored: until then the agent tries none, and the originals wait."""
FAILURE_COSTS = 12
"""How many times as much processor time as a success a failure costs, besides what its handler does."""
FAILURE_SECONDS = 0.01
"""A failure takes at most its call's time, or this where that is shorter, as on a machine that has other work."""


class _Outcome(NamedTuple):
    """The outcome of a delivery, its error, how many failures that makes, and when it is tried again."""

    outcome: SettledOutcome
    reason: str = ""
    error: BaseException | None = None
    attempt: int = 0
    again_in_seconds: float = 0.0


UNAVAILABLE = "unavailable"
"""The reason of `Failed` where the failure is taken for an outage, and counts as no attempt."""
UNCOUNTED = "uncounted"
"""The reason of `Failed` where the agent said `Retry(counts=False)`."""
NO_ATTEMPT = (UNAVAILABLE, UNCOUNTED)
ON_ERROR = "on_error"
"""The reason of `Settled` where an `on_error` function returned `Ack()`."""
ACKED = _Outcome("acked")
TAKEN_OVER = _Outcome("retried", "taken_over")
OTHER_VERSION = Backoff(first=0.05, factor=1.3, max=5.0, jitter=0.5)
"""When a notification that another version is to handle comes again, by how often it was delivered: about fifteen times
in the first ten seconds, because a server gives it to any worker. At equal intervals, it could be the same worker each
time."""
OnDeadLetter = Callable[..., Awaitable[None]]
"""Calls the author's function of `on_dead_letter`: see `handlers.dead_letters`."""
FRESH = PriorRecord()
"""The record of a notification that has never failed."""


def settle(delivery: Delivery, settlement: Settlement) -> None:
    """Ack, nak or terminate a delivery that no handler has run for."""
    match settlement:
        case Ack():
            delivery.ack()
        case Nak(delay_seconds=delay_seconds):
            delivery.nak(delay_seconds=delay_seconds)
        case Term(reason=reason):
            delivery.term(reason)


async def settle_again(repeats: Repeats, *, handle: Callable[[Delivery], None]) -> None:
    """Repeat the settlement of redeliveries that were settled here before; pass them to `handle` where the consumer was
    reset or recreated since."""
    found, settlement = await repeats.judge()
    for delivery in found:
        if settlement is None:
            handle(delivery)
        else:
            settle(delivery, settlement)


def give_back(deliveries: Sequence[Delivery], *, delay_seconds: float = 0.0) -> int:
    """Nak the deliveries of a worker that stops or waits, in this order, and return how many there are."""
    for delivery in deliveries:
        delivery.nak(delay_seconds=delay_seconds)
    return len(deliveries)


def leave_to_others(delivery: Delivery) -> float:
    """Nak a delivery that another version is to handle, and return after how many seconds it comes again."""
    delay = OTHER_VERSION.delay_seconds(delivery.num_delivered)
    delivery.nak(delay_seconds=delay)
    return delay


class Settler:
    """Settles the deliveries of one agent."""

    def __init__(
        self,
        agent: Agent[Any, Any],
        *,
        stream: str,
        buffer: Buffer,
        repeats: Repeats,
        failures: Failures,
        dead_letters: DeadLetterStore,
        last_failures: LastFailures,
        shield: Shield,
        clock: Clock,
        events: Events,
        breaker: AgentBreaker | None = None,
        on_dead_letter: OnDeadLetter | None = None,
    ) -> None:
        self._agent = agent
        self._on_dead_letter = on_dead_letter
        self._breaker = breaker
        self.successes = 0
        """How many deliveries have succeeded."""
        self._attempts = agent.policy.retry.attempts
        self._buffer = buffer
        self._repeats = repeats
        self._failures = failures
        self._last_failures = last_failures
        self._shield = shield
        self._dead_letters = dead_letters
        self._writer = _DeadLetterWriter(agent.name, dead_letters, stream=stream, clock=clock, events=events)
        if breaker is not None:
            breaker.attach(self)
        self._clock = clock
        self._events = events
        self._hear_each = events.listeners(Settled)
        self._hear_acked = events.listeners(Acked)
        self._acked: list[tuple[float, float, Delivery]] = []
        """The deliveries acked in this turn of the loop, with how long each was handled and how long it waited."""
        self._retry_share = RetryShare()
        self._failed_at = clock.monotonic()
        self._finished = 0
        """How many deliveries had succeeded when the last one failed."""

    def give_back_waiting(self, *, delay_seconds: float) -> None:
        """Nak the deliveries whose handling has not begun, for workers that can handle them."""
        give_back(self._buffer.withdraw(), delay_seconds=delay_seconds)

    def note_unsigned(self, message: Message) -> None:
        """State that a notification is suspected, where it has no headers and is a server's answer."""
        if answers.is_stored_by_reply(message):
            agent = self._agent
            self._events.emit(Suspected(event_type=agent.event_type, sequence=message.sequence, agent=agent.name))

    async def ack_unmatched(self, delivery: Delivery) -> None:
        """Ack a delivery that the agent did not ask for: the server's filter is wider than the agent's."""
        if self._buffer.holds(delivery):
            record = self._buffer.record_of(delivery)
            self._ack(delivery)
            if record is not None:
                await self._failures.forget(delivery, record)
        else:
            self._buffer.finish(delivery)

    def postpone(self, delivery: Delivery, record: PriorRecord) -> bool:
        """Give a retry that is due back for later where retries have had their share of the time and something new
        waits; return whether. It counts as no attempt.
        """
        if self._buffer.ordered or not delivery.num_pending:
            return False
        later_seconds = self._retry_share.later_seconds(self._clock.monotonic())
        if later_seconds <= 0:
            return False
        self._failures.note_postponed(delivery, record)
        delivery.nak(delay_seconds=later_seconds)
        self._buffer.finish(delivery)
        return True

    def nak_removed(self, delivery: Delivery) -> None:
        """Nak a delivery whose message has left the stream: a server delivers no such message again."""
        delivery.nak()
        self._buffer.finish(delivery)

    async def judge_window(
        self, message: Message, failure: Failure, *, window: object, failures: int, stream: str, part: str
    ) -> Ack | Verdict:
        """Return what becomes of a window for which the function has failed, after `failures` earlier ones. That is
        `Again`, and no attempt, where the reason is one of `NO_ATTEMPT`.

        The dead letter of a `DeadLetter` is stored, with `message` as the original. Where that fails, it is `Again`.
        """
        retry = self._agent.policy.retry
        classified = verdicts.classify(failure, self._agent.classifiers)
        if isinstance(classified, Ack):
            return classified
        if (uncounted := verdicts.uncounted_seconds(classified)) is not None:
            return Again(after_seconds=uncounted, reason=UNCOUNTED)
        spared = self._breaker.spared_window_seconds(classified) if self._breaker is not None else None
        if spared is not None:
            return Again(after_seconds=spared, reason=UNAVAILABLE)
        verdict = verdicts.decide(classified, failures=failures, retry=retry)
        if isinstance(verdict, Again):
            return verdict
        try:
            await self._dead_letters.dead_letter(
                message,
                agent=self._agent.name,
                stream=stream,
                reason=verdict.reason,
                attempts=failures + 1,
                error=classified.error,
                part=part,
            )
        except BackendError:
            return Again(after_seconds=retry.delay_seconds(failures + 1), reason="dead_letter_failed")
        if self._on_dead_letter is not None:
            error = classified.error
            await self._on_dead_letter(message, verdict.reason, attempts=failures + 1, error=error, window=window)
        return verdict

    async def settle(self, delivery: Delivery, failure: Failure | None, *, started: float) -> None:
        """Ack, nak or dead-letter a delivery whose handling succeeded (None) or failed, and state it.

        A delivery to be retried is given back when its failure is counted, which may be after this has returned.
        `started` is when the handling began, on the agent's clock.
        """
        if failure is None and self.succeeded(delivery, started=started):
            return
        waited = self._buffer.waited_seconds(delivery)
        if waited is None:
            self._buffer.finish(delivery)
            return
        seconds, record = self._clock.monotonic() - started, delivery.record
        if not delivery.held:
            self._buffer.finish(delivery)
            self._emit_settled(delivery, record, TAKEN_OVER, seconds, waited)
        elif failure is not None:
            await self._settle_failed(
                delivery,
                record or FRESH,
                failure,
                seconds=seconds,
                started=started,
                emit=lambda outcome: self._emit_settled(delivery, record, outcome, seconds, waited),
            )
        else:
            self._ack(delivery)
            self._note_acked(delivery, seconds, waited)
            if self._breaker is not None and self._breaker.is_open:
                self._breaker.note_success(delivery)
            await self._failures.forget(delivery, record)

    def succeeded(self, delivery: Delivery, *, started: float) -> bool:
        """Ack a delivery whose handling succeeded, and return whether that could be done at once. It is left to
        `settle` where something was known of it before, which is to be forgotten, or it is not ours any more.
        """
        if delivery.record is not None or not delivery.held:
            return False
        waited = self._buffer.finish(delivery)
        if waited is not None:
            delivery.ack()
            self._repeats.note(delivery)
            self._note_acked(delivery, self._clock.monotonic() - started, waited)
        return True

    def _note_acked(self, delivery: Delivery, seconds: float, waited: float) -> None:
        """Note one more for `Acked`, which is stated at the end of this turn of the event loop, as the acks leave."""
        self.successes += 1
        if self._hear_each:
            self._emit_settled(delivery, delivery.record, ACKED, seconds, waited)
        if self._hear_acked:
            if not self._acked:
                asyncio.get_running_loop().call_soon(self._emit_acked)
            self._acked.append((seconds, waited, delivery))

    def _emit_acked(self) -> None:
        acked, now = self._acked, self._clock.time_ns()
        self._acked = []
        self._events.emit(
            Acked(
                agent=self._agent.name,
                event_type=self._agent.event_type,
                seconds=[seconds for seconds, _, _ in acked],
                waited_seconds=[waited for _, waited, _ in acked],
                stored_to_settled_seconds=[(now - each.message.timestamp_ns) / 1e9 for _, _, each in acked],
                redelivered=len([1 for _, _, each in acked if each.num_delivered > 1 or each.record is not None]),
            )
        )

    async def _settle_failed(
        self,
        delivery: Delivery,
        record: PriorRecord,
        failure: Failure,
        *,
        seconds: float,
        started: float,
        emit: Callable[[_Outcome], None],
    ) -> None:
        if failure.other_version:
            await self._failures.clear(delivery)  # or its next delivery would be handled alone
            self._failures.note_postponed(delivery, record)
            delay = leave_to_others(delivery)
            self._buffer.finish(delivery)
            emit(_Outcome("retried", "other_version", failure.error, again_in_seconds=delay))
            return
        classified = verdicts.classify(failure, self._agent.classifiers)
        if isinstance(classified, Ack):
            self._ack(delivery)
            if self._breaker is not None and self._breaker.is_open:
                self._breaker.note_success(delivery)
            emit(_Outcome("acked", ON_ERROR, failure.error))
            await self._failures.forget(delivery, record)
            return
        verdict = verdicts.decide(classified, failures=record.failures, retry=self._agent.policy.retry)
        if (spared := self._spared(delivery, classified, verdict, started)) is not None:
            await self._failures.clear(delivery)  # or its next delivery would be handled alone
            record = structs.replace(record, uncounted=record.uncounted + 1)
            if self._buffer.ordered:
                self._buffer.note_record(delivery, record)
            else:
                self._failures.note_postponed(delivery, record)
            outcome = _Outcome("retried", spared.reason, classified.error, record.failures, spared.after_seconds)
            self._give_back(delivery, spared.after_seconds)
            self._note_retried(delivery, outcome)
            emit(outcome)
            return
        attempt = record.failures + (classified.final != "skipped")
        if isinstance(verdict, Again):
            outcome = self._again(delivery, verdict, classified.error, attempt=attempt, took_seconds=seconds)
        elif (refused := await self._dead_letter(delivery, record, verdict, classified.error, attempt, emit)) is None:
            return
        else:
            # Counted all the same: a redelivery without a counted failure is taken for one whose worker died.
            outcome = _Outcome("retried", "dead_letter_failed", refused.error, attempt, refused.again_in_seconds)

        def give_back(counted: PriorRecord) -> None:
            self._buffer.note_record(delivery, counted)
            self._give_back(delivery, outcome.again_in_seconds)
            self._note_retried(delivery, outcome)
            emit(outcome)

        if verdict is PARKED:
            await self._failures.park(delivery, self._parked(delivery, classified.error, attempts=attempt))
        await self._failures.add(
            delivery,
            before=record,
            again_in_seconds=outcome.again_in_seconds,
            kept=self._buffer.ordered,
            worker_died=failure.worker_died,
            then=give_back,
        )

    async def _dead_letter(
        self,
        delivery: Delivery,
        record: PriorRecord,
        verdict: DeadLetter,
        error: BaseException,
        attempts: int,
        emit: Callable[[_Outcome], None],
    ) -> DeadLettersRefused | None:
        """Store a dead letter and terminate its delivery, and return None, or why it was not stored."""
        async with self._shield.hold():
            refused = await self._writer.store(delivery, verdict, attempts=attempts, error=error)
        if refused is not None:
            return refused
        if self._on_dead_letter is not None:
            await self._on_dead_letter(delivery.message, verdict.reason, attempts=attempts, error=error)
        delivery.term(verdict.reason)
        self._remove(delivery)
        self._last_failures.note("agents", self._agent.name, error)
        emit(_Outcome("dead_lettered", verdict.reason, error, attempts))
        await self._failures.forget(delivery, record)
        return None

    def _again(
        self, delivery: Delivery, verdict: Again, error: BaseException, *, attempt: int, took_seconds: float
    ) -> _Outcome:
        again_in_seconds = verdict.after_seconds
        if verdict is not PARKED:
            again_in_seconds = self._again_in_seconds(delivery, again_in_seconds, took_seconds=took_seconds)
        return _Outcome("retried", verdict.reason, error, attempt, again_in_seconds)

    async def park(self, delivery: Delivery, known: ParkedRecord | None) -> None:
        """Leave a notification parked: no person has decided on it yet. `known` is what was recorded of it."""
        record = delivery.record or FRESH
        if known is None:  # it could not be recorded
            known = self._parked(delivery, None, attempts=record.failures)
        behind = self._buffer.behind(delivery.message.subject, delivery.message.sequence)
        await self._failures.park(delivery, structs.replace(known, behind=behind))
        if not self._buffer.ordered:
            self._failures.note_postponed(delivery, record)
        self._buffer.end_try(delivery)  # it was let begin in an outage, and says nothing about that
        self._give_back(delivery, PARKED.after_seconds)

    def _parked(self, delivery: Delivery, error: BaseException | None, *, attempts: int) -> ParkedRecord:
        subject, sequence = delivery.message.subject, delivery.message.sequence
        return ParkedRecord(
            since=clocks.utc_now(self._clock),
            attempts=attempts,
            error="" if error is None else printable(f"{type(error).__name__}: {line_of(error)}"),
            ordering_key=printable(self._buffer.key_of(subject)),
            behind=self._buffer.behind(subject, sequence),
        )

    def _spared(self, delivery: Delivery, failure: Failure, verdict: Verdict, started: float) -> Again | None:
        """Return after how long and why to try a delivery again whose failure is no attempt, because of an outage, of a
        flood of dead letters, or because the author says so; else None.
        """
        if (breaker := self._breaker) is not None:
            spared = breaker.note_failure(delivery, failure, started=started)
            if spared is None and isinstance(verdict, DeadLetter):
                spared = breaker.stop_flood(verdict.reason, failure.error)
            if spared is not None:
                return Again(after_seconds=spared, reason=UNAVAILABLE)
        uncounted = verdicts.uncounted_seconds(failure)
        return None if uncounted is None else Again(after_seconds=uncounted, reason=UNCOUNTED)

    def _note_retried(self, delivery: Delivery, outcome: _Outcome) -> None:
        assert outcome.error is not None
        if outcome.reason == PARKED.reason:  # it has a record of its own
            self._last_failures.note("agents", self._agent.name, outcome.error)
            return
        message = delivery.message
        known = partial(
            _retrying,
            self._buffer,
            subject=message.subject,
            sequence=message.sequence,
            attempt=outcome.attempt,
            attempts=int(self._attempts) if math.isfinite(self._attempts) else None,
            error=type(outcome.error).__name__,  # and not the exception, whose frames hold what the handler had
        )
        self._last_failures.note(
            "agents",
            self._agent.name,
            outcome.error,
            again_in_seconds=outcome.again_in_seconds,
            retrying=known,
        )

    def _again_in_seconds(self, delivery: Delivery, after_seconds: float, *, took_seconds: float) -> float:
        """Return after how long to retry a notification, so that due retries leave time for what is new."""
        now, finished = self._clock.monotonic(), self._buffer.finished
        # What the worker has done since the last failure was this, and what succeeded. Where it was idle, that is long.
        share = FAILURE_COSTS / (FAILURE_COSTS + finished - self._finished)
        most = max(took_seconds / self._agent.policy.concurrency, FAILURE_SECONDS)
        takes = min((now - self._failed_at) * share, most)
        self._failed_at, self._finished = now, finished
        if delivery.num_delivered > 1:
            self._retry_share.spend(now, takes)
        return self._retry_share.delay_seconds(
            now, after_seconds, takes_seconds=takes, new_wait=delivery.num_pending > 0
        )

    def _emit_settled(
        self, delivery: Delivery, record: PriorRecord | None, outcome: _Outcome, seconds: float, waited: float
    ) -> None:
        """State what became of a delivery that waited and was handled for so many seconds."""
        message, num_delivered = delivery.message, delivery.num_delivered
        kind = Settled if outcome is ACKED else Failed
        self._events.emit(
            kind(
                agent=self._agent.name,
                event_type=self._agent.event_type,
                sequence=message.sequence,
                outcome=outcome.outcome,
                reason=outcome.reason,
                seconds=seconds,
                waited_seconds=waited,
                stored_to_settled_seconds=(self._clock.time_ns() - message.timestamp_ns) / 1e9,
                num_delivered=num_delivered if record is None else record.handed_over(num_delivered),
                error=outcome.error,
                attempt=outcome.attempt,
                attempts=self._attempts,
                again_in_seconds=outcome.again_in_seconds,
            )
        )

    def _ack(self, delivery: Delivery) -> None:
        delivery.ack()
        self._remove(delivery)

    def _remove(self, delivery: Delivery) -> None:
        self._repeats.note(delivery)
        self._buffer.finish(delivery)

    def _give_back(self, delivery: Delivery, delay: float) -> None:
        if self._buffer.ordered:
            self._buffer.retry_later(delivery, after_seconds=delay)
        else:
            delivery.nak(delay_seconds=delay)
            self._buffer.finish(delivery)


def _retrying(
    buffer: Buffer,
    again_at: datetime,
    *,
    subject: str,
    sequence: int,
    attempt: int,
    attempts: int | None,
    error: str,
) -> Retrying:
    return Retrying(
        again_at=again_at,
        sequence=sequence,
        attempt=attempt,
        attempts=attempts,
        error=printable(error),
        key=printable(buffer.key_of(subject)),
        behind=buffer.behind(subject, sequence),
    )


class _DeadLetterWriter:
    """Stores the dead letters of one agent; after an error it tries none until a backoff has passed."""

    def __init__(self, agent: str, dead_letters: DeadLetterStore, *, stream: str, clock: Clock, events: Events) -> None:
        self._agent = agent
        self._dead_letters = dead_letters
        self._stream = stream
        self._clock = clock
        self._events = events
        self._refusal: BackendError | None = None
        self._refusals = 0
        self._again_at = -math.inf
        """Before this time no dead letter is sent."""
        self._recovery_timer: ScheduledCall | None = None

    async def store(
        self, delivery: Delivery, verdict: DeadLetter, *, attempts: int, error: BaseException
    ) -> DeadLettersRefused | None:
        """Store a dead letter, and return None, or why it was not stored.

        While the backoff after an earlier one has not passed, its error is returned without a try.
        """
        now = self._clock.monotonic()
        if self._refusal is not None and now < self._again_at:
            return self._refused(self._refusal, self._again_at - now)
        try:
            await self._dead_letters.dead_letter(
                delivery.message,
                agent=self._agent,
                stream=self._stream,
                reason=verdict.reason,
                attempts=attempts,
                error=error,
            )
        except BackendError as refusal:
            return self._refuse(refusal)
        self._recover()
        return None

    def _refuse(self, refusal: BackendError) -> DeadLettersRefused:
        now = self._clock.monotonic()
        if refusal.code == error_codes.MESSAGE_TOO_LARGE:
            delay = STORE_AGAIN.max  # this one will not be stored soon, and others can be
        elif now < self._again_at:
            return self._refused(refusal, self._again_at - now)  # under way when the first was refused
        else:
            self._refusals += 1
            delay = STORE_AGAIN.delay_seconds(self._refusals)
            self._again_at = now + delay
        self._refusal = refusal
        if self._recovery_timer is not None:
            self._recovery_timer.cancel()
        # Where the originals succeed in a later attempt, no dead letter shows that storing works again: this does.
        self._recovery_timer = self._clock.call_at(now + 2 * delay, self._recover)
        refused = self._refused(refusal, delay)
        self._events.emit(refused)
        return refused

    def _refused(self, refusal: BackendError, seconds: float) -> DeadLettersRefused:
        return DeadLettersRefused(agent=self._agent, error=refusal, again_in_seconds=seconds)

    def _recover(self) -> None:
        if self._refusal is None:
            return
        self._refusal, self._refusals, self._again_at = None, 0, -math.inf
        self._events.emit(DeadLettersStored(agent=self._agent))
