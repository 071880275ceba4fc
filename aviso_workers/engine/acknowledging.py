"""The end of every delivery: nothing else of the engine acks, naks, terminates or stores dead letters.

`Settler` ends the deliveries of an agent: it has a failure judged (`verdicts.decide`), stores the dead letter before
the original is terminated, counts the failure before the delivery is given back, and states the end. It judges windows
as well. It tells `outages` how calls have ended. A failure because something is away counts as no attempt.

Modules that settle a delivery without running a handler pass a `Settlement` to `settle`: delayed delivery,
`shared_filters` for what another version wants, `repeats` for what was settled before.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

import anyio
from msgspec import Struct, structs

from aviso_workers.aviso.codec import Message
from aviso_workers.aviso.literals import printable
from aviso_workers.backends import Delivery
from aviso_workers.clocks import Clock, ScheduledCall
from aviso_workers.declare import verdicts
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.retry import Backoff, RetryShare
from aviso_workers.declare.verdicts import (
    Ack,
    Again,
    DeadLetter,
    Failure,
    Nak,
    PriorRecord,
    ReadOtherwiseError,
    Settlement,
    Term,
    Verdict,
)
from aviso_workers.engine.attempts import Failures
from aviso_workers.engine.dead_letter_store import DeadLetterStore
from aviso_workers.engine.decisions import Decisions
from aviso_workers.engine.failure_recorder import LastFailures
from aviso_workers.engine.flow import Flow
from aviso_workers.engine.outages import KeyGate, Outage
from aviso_workers.engine.repeats import Repeats
from aviso_workers.engine.shields import Shield
from aviso_workers.errors import BackendError, NotFoundError, SkippedError, line_of
from aviso_workers.events import (
    UNAVAILABLE,
    Acked,
    DeadLettersRefused,
    DeadLettersStored,
    Events,
    Failed,
    Settled,
    SettledOutcome,
)
from aviso_workers.jetstream import error_codes
from aviso_workers.state import failure_records
from aviso_workers.state.failure_counts import Outcome
from aviso_workers.state.failure_records import MAX_BEHIND, Retrying

STORE_AGAIN = Backoff(first=10.0, factor=2.0, max=300.0, jitter=0.0)
"""The backoff after a dead letter could not be stored: until then the agent tries none, and the originals wait."""
FAILURE_COSTS = 12
"""How many times as much processor time as a success a failure costs, besides what its handler does."""
FAILURE_SECONDS = 0.01
"""A failure takes at most its call's time, or this where that is shorter, as on a machine that has other work."""


class _EndedCall(NamedTuple):
    """A call that has ended, or the decision to make none: of which delivery, and how long that took and waited."""

    delivery: Delivery
    record: PriorRecord
    """What was known of the delivery before."""
    started: float
    """When it began, on the agent's clock."""
    seconds: float
    waited: float


class _Outcome(NamedTuple):
    """The outcome of a delivery, its error, how many failures that makes, and when it is tried again."""

    outcome: SettledOutcome
    reason: str = ""
    error: BaseException | None = None
    attempt: int = 0
    again_in_seconds: float = 0.0


UNCOUNTED = "uncounted"
"""The reason of `Failed` where the agent said `Retry(counts=False)`."""
OF_OTHERS = "other_version"
"""The reason where a worker of another version is to handle it, or its output is refused by this configuration."""
NO_ATTEMPT = (UNAVAILABLE, UNCOUNTED, OF_OTHERS)
AWAY = Backoff(first=1.0, factor=2.0, max=60.0, jitter=0.5)
"""When a notification is tried again that failed because something is away. The wait grows only where others have
succeeded meanwhile: else its failure says nothing of itself, and it would come late when the outage ends."""
UNTRIED = Backoff(first=15.0, max=15.0, jitter=1 / 3)
"""The delay after which a notification comes again that was given back untried while the pace was shut."""
UNTRIED_LEAST_SECONDS = 1.0
"""What comes by itself within this time is not called back: another worker may have it already."""
MAX_UNTRIED = 10_000
"""How many of those are called back when the pace opens."""
SOON = Backoff(first=3.0, max=3.0, jitter=1 / 3)
"""How much later a retry is delivered that finds too many of its kind here while the pace opens or shuts."""
ON_ERROR = "on_error"
"""The reason of `Settled` where an `on_error` function returned `Ack()`."""
ENDS: Mapping[SettledOutcome, Outcome] = {"acked": "handled", "retried": "failed", "dead_lettered": "dead_letter"}
"""What is told of an outcome to a person who has decided about the notification."""
LONGEST_ERROR = 200
"""The most characters of an error that are recorded of a notification that is retried."""
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
        flow: Flow,
        repeats: Repeats,
        failures: Failures,
        decisions: Decisions,
        dead_letters: DeadLetterStore,
        last_failures: LastFailures,
        shield: Shield,
        clock: Clock,
        events: Events,
        outage: Outage,
        gate: KeyGate | None = None,
        on_dead_letter: OnDeadLetter | None = None,
    ) -> None:
        self.agent = agent
        self.stream = stream
        self.flow = flow
        self.failures = failures
        self.decisions = decisions
        self.dead_letters = dead_letters
        self.shield = shield
        self.clock = clock
        self.events = events
        self.outage = outage
        self._repeats = repeats
        self._last_failures = last_failures
        self._gate = gate
        """The keys of what the agent depends on, where it has keys of its own."""
        self._on_dead_letter = on_dead_letter
        self._refused: ReadOtherwiseError | None = None
        self._is_refused = anyio.Event()
        self.successes = 0
        """How many deliveries have succeeded."""
        self._acked: list[tuple[float, float, Delivery]] = []
        """The deliveries acked in this turn of the loop, with how long each was handled and how long it waited."""
        self._hear_each = events.listeners(Settled)
        self._hear_acked = events.listeners(Acked)
        self._depends = agent.policy.window is None
        """Whether the handling of a notification asks what the agent depends on. The function of a window does."""
        self._untried: deque[tuple[float, Delivery]] = deque(maxlen=MAX_UNTRIED)
        """What was given back while the pace was shut, without being tried, each with when it is delivered again."""
        self._writer = _DeadLetterWriter(self)
        outage.join(agent.name, flow if self._depends else None, most=flow.workers, on_open=self.call_back)
        self._retry_share = RetryShare()
        self._failed_at = clock.monotonic()
        self._finished = 0
        """How many deliveries had succeeded when the last one failed."""

    def _leave_untried(self) -> None:
        """Leave to others what is ready and was not tried, while the pace is shut: what lies behind it comes here, and
        a worker that is cut off keeps nothing from those that are not."""
        if self.agent.policy.singleton or self.flow.ordered:
            return  # it would come back in another order
        if not self._depends or not self.outage.pace.is_shut:
            return
        now = self.clock.monotonic()
        for delivery in self.flow.dispatch.untried():
            delay = UNTRIED.delay_seconds(1)
            delivery.nak(delay_seconds=delay)
            self.failures.note_postponed(delivery, delivery.record or FRESH)
            self._untried.append((now + delay, delivery))

    def call_back(self) -> None:
        """Have delivered at once what was given back without being tried, as the pace opens or the worker ends."""
        now = self.clock.monotonic()
        for due, delivery in self._untried:
            if due - now > UNTRIED_LEAST_SECONDS:
                delivery.redeliver()
        self._untried.clear()

    async def ack_unmatched(self, delivery: Delivery) -> None:
        """Ack a delivery that the agent did not ask for: the server's filter is wider than the agent's."""
        if self.flow.holds(delivery):
            record = delivery.record
            self._ack(delivery)
            if record is not None:
                await self.failures.forget(delivery, record)
        else:
            self.flow.finish(delivery)

    def postpone(self, delivery: Delivery, record: PriorRecord) -> bool:
        """Give a retry that is due back for later where retries have had their share of the time and something new
        waits; return whether. It counts as no attempt.
        """
        if self.flow.ordered or not delivery.num_pending:
            return False
        now = self.clock.monotonic()
        later_seconds = self._retry_share.later_seconds(now)
        if later_seconds <= 0 and self.flow.has_many_retries:
            later_seconds = (UNTRIED if self.outage.pace.is_shut else SOON).delay_seconds(1)
            self._untried.append((now + later_seconds, delivery))
        if later_seconds <= 0:
            return False
        self.failures.note_postponed(delivery, record)
        self._nak(delivery, later_seconds)
        return True

    async def judge_window(
        self,
        message: Message,
        failure: Failure,
        *,
        window: object,
        failures: int,
        away_seconds: float | None,
        stream: str,
        part: str,
    ) -> Ack | Verdict:
        """Return what becomes of a window for which the function has failed, after `failures` earlier ones, and for
        so long because something is away. That is `Again`, and no attempt, where the reason is one of `NO_ATTEMPT`.

        The dead letter of a `DeadLetter` is stored, with `message` as the original. Where that fails, it is `Again`.
        """
        self._stand(failure)
        classified = verdicts.classify(failure, self.agent.classifiers)
        if isinstance(classified, Ack):
            return classified
        record = PriorRecord(failures=failures, away_since=self._now() - away_seconds if away_seconds else 0.0)
        away = self._note_failure(classified, again=bool(failures) or away_seconds is not None)
        verdict = self._judge(classified, record, away=away)
        if isinstance(verdict, Again):
            return verdict
        try:
            await self.dead_letters.dead_letter(
                message,
                agent=self.agent.name,
                stream=stream,
                reason=verdict.reason,
                attempts=failures + 1,
                error=classified.error,
                part=part,
            )
        except BackendError:
            delay = self.agent.policy.retry.delay_seconds(failures + 1)
            return Again(after_seconds=delay, reason="dead_letter_failed")
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
        waited = self.flow.waited_seconds(delivery)
        if waited is None:
            self.flow.finish(delivery)
            return
        call = _EndedCall(delivery, delivery.record or FRESH, started, self.clock.monotonic() - started, waited)
        if not delivery.held:
            self.flow.finish(delivery)
            self._emit_settled(call, TAKEN_OVER)
        elif failure is not None:
            await self._settle_failed(call, failure)
            self._leave_untried()
        else:
            self._ack(delivery)
            self._note_acked(delivery, call.seconds, waited)
            self.decisions.note_end(delivery, "handled")
            await self._forget(call)

    def succeeded(self, delivery: Delivery, *, started: float) -> bool:
        """Ack a delivery whose handling succeeded, and return whether that could be done at once. It is left to
        `settle` where something was known of it before, which is to be forgotten, or it is not ours any more.
        """
        if delivery.record is not None or not delivery.held:
            return False
        waited = self.flow.finish(delivery)
        if waited is not None:
            delivery.ack()
            self._repeats.note(delivery)
            self._note_acked(delivery, self.clock.monotonic() - started, waited)
        return True

    def _note_acked(self, delivery: Delivery, seconds: float, waited: float) -> None:
        """Note one more for `Acked`, which is stated at the end of this turn of the event loop, as the acks leave."""
        self.successes += 1
        if self.outage.strained and self._depends:
            self.outage.succeeded(self._key(delivery))
        if self._hear_each:
            self._emit_settled(_EndedCall(delivery, delivery.record or FRESH, 0.0, seconds, waited), ACKED)
        if self._hear_acked:
            if not self._acked:
                asyncio.get_running_loop().call_soon(self._emit_acked)
            self._acked.append((seconds, waited, delivery))

    def _emit_acked(self) -> None:
        acked, now = self._acked, self.clock.time_ns()
        self._acked = []
        self.events.emit(
            Acked(
                agent=self.agent.name,
                event_type=self.agent.event_type,
                seconds=[seconds for seconds, _, _ in acked],
                waited_seconds=[waited for _, waited, _ in acked],
                stored_to_settled_seconds=[(now - each.message.timestamp_ns) / 1e9 for _, _, each in acked],
                redelivered=len([1 for _, _, each in acked if each.num_delivered > 1 or each.record is not None]),
            )
        )

    async def _settle_failed(self, call: _EndedCall, failure: Failure) -> None:
        delivery, record = call.delivery, call.record
        self._stand(failure)
        if failure.other_version and not self.flow.ordered:
            await self.failures.clear(delivery)  # or its next delivery would be handled alone
            self.failures.note_postponed(delivery, record)
            delay = leave_to_others(delivery)
            self.flow.finish(delivery)
            self._emit_settled(call, _Outcome("retried", OF_OTHERS, failure.error, again_in_seconds=delay))
            return
        classified = verdicts.classify(failure, self.agent.classifiers)
        if isinstance(classified, Ack):
            self._ack(delivery)
            self._emit_failed(call, _Outcome("acked", ON_ERROR, failure.error))
            await self._forget(call)
            return
        away = self._depends and self._note_failure(classified, again=record.tried, key=self._key(delivery))
        verdict = self._judge(classified, record, away=away)
        attempt = record.failures + (classified.final != "skipped" and not away)
        if isinstance(verdict, Again):
            if verdict.reason in NO_ATTEMPT:
                await self._spare(call, verdict, classified.error)
                return
            again_in_seconds = self._again_in_seconds(delivery, verdict.after_seconds, took_seconds=call.seconds)
            outcome = _Outcome("retried", verdict.reason, classified.error, attempt, again_in_seconds)
        elif (refused := await self._dead_letter(call, verdict, classified.error, attempt)) is None:
            return
        else:
            # Counted all the same: a redelivery without a counted failure is taken for one whose worker died.
            outcome = _Outcome("retried", "dead_letter_failed", refused.error, attempt, refused.again_in_seconds)
        await self.failures.add(
            delivery,
            before=record,
            again_in_seconds=outcome.again_in_seconds,
            kept=self.flow.ordered,
            worker_died=failure.worker_died,
            then=partial(self._retry, call, outcome),
        )

    async def _dead_letter(
        self, call: _EndedCall, verdict: DeadLetter, error: BaseException, attempts: int
    ) -> DeadLettersRefused | None:
        """Store a dead letter and terminate its delivery, and return None, or why it was not stored."""
        delivery = call.delivery
        async with self.shield.hold():
            refused = await self._writer.store(delivery, verdict, attempts=attempts, error=error)
        if refused is not None:
            return refused
        is_decided = isinstance(error, SkippedError)  # by a person: it is no failure, and the last one is over
        if not is_decided:
            self._last_failures.note("agents", self.agent.name, error)
        if self._on_dead_letter is not None:
            await self._on_dead_letter(delivery.message, verdict.reason, attempts=attempts, error=error)
        delivery.term(verdict.reason)
        self._remove(delivery)
        self._emit_failed(call, _Outcome("dead_lettered", verdict.reason, error, attempts))
        await self._forget(call, handled=is_decided)
        return None

    async def _forget(self, call: _EndedCall, *, handled: bool = True) -> None:
        """Forget the failures of a delivery that is settled: `handled` or skipped by a person, or as a dead letter."""
        if call.record.tried:
            sequence = call.delivery.message.sequence
            self._last_failures.note_settled(self.agent.name, self.stream, sequence, handled=handled)
        await self.failures.forget(call.delivery, call.record)

    def _note_failure(self, failure: Failure, *, again: bool, key: Hashable = None) -> bool:
        """Tell the outage of a failure, and return whether something is away."""
        if not failure.is_evidence:
            return False
        away = self.outage.is_unavailable(failure.error)
        if not failure.told:
            self.outage.failed(failure.error, again=again, away=away, key=key)
        return away

    def _judge(self, failure: Failure, record: PriorRecord, *, away: bool) -> Verdict:
        """Return what becomes of what has failed. It is `Again`, and no attempt, where the reason is one of
        `NO_ATTEMPT`: something is away, the author says so, or another version is to handle it.
        """
        if failure.other_version:
            return Again(after_seconds=OTHER_VERSION.max, reason=OF_OTHERS)
        if away and (not record.away_since or self._now() - record.away_since <= self.outage.patience):
            asked = self.outage.asked_seconds(failure.error)
            return Again(after_seconds=max(AWAY.delay_seconds(self._waits(record)), asked), reason=UNAVAILABLE)
        if (uncounted := verdicts.uncounted_seconds(failure)) is not None:
            return Again(after_seconds=uncounted, reason=UNCOUNTED)
        if away:
            return DeadLetter(reason=UNAVAILABLE)
        return verdicts.decide(failure, failures=record.failures, retry=self.agent.policy.retry)

    def _stand(self, failure: Failure) -> None:
        """Have the agent read nothing more, where the configuration refuses one of its outputs."""
        if isinstance(failure.error, ReadOtherwiseError):
            self._refused = failure.error
            self._is_refused.set()

    async def until_refused(self) -> None:
        """Wait until the configuration refuses an output."""
        await self._is_refused.wait()

    async def require_outputs(self) -> None:
        """Raise `RefusedError` while the configuration refuses an output that it has refused before."""
        if self._refused is not None:
            with suppress(NotFoundError):  # the stream was deleted since
                await self._refused.require()
            self._refused, self._is_refused = None, anyio.Event()

    def _waits(self, record: PriorRecord) -> int:
        """Return how often the wait has grown after failures because something is away, this failure included."""
        return record.waits + (not record.waits or self.successes > record.succeeded)

    async def _spare(self, call: _EndedCall, spared: Again, error: BaseException) -> None:
        """Have a delivery tried again whose failure is no attempt."""
        delivery, before = call.delivery, call.record
        await self.failures.clear(delivery)  # or its next delivery would be handled alone
        record = structs.replace(before, uncounted=before.uncounted + 1)
        if spared.reason == UNAVAILABLE:
            waits, since = self._waits(record), record.away_since or self._now()
            record = structs.replace(record, waits=waits, succeeded=self.successes, away_since=since)
        if not self.flow.ordered:
            self.failures.note_postponed(delivery, record)
        if record.away_since != before.away_since:
            await self.failures.note_away(delivery, record)
        self._retry(call, _Outcome("retried", spared.reason, error, record.failures, spared.after_seconds), record)

    def _retry(self, call: _EndedCall, outcome: _Outcome, record: PriorRecord) -> None:
        """Have a delivery tried again, of which this is known from now on, and state that."""
        delivery, delay = call.delivery, outcome.again_in_seconds
        delivery.record = record
        if self.flow.ordered:
            self.flow.retry_later(delivery, after_seconds=delay)
            self.decisions.note_retried(delivery, kept=True, after_seconds=delay)
        else:
            self._nak(delivery, delay)
        self._note_retried(delivery, outcome)
        self._emit_failed(call, outcome)

    def _key(self, delivery: Delivery) -> Hashable:
        """Return the values of the fields by which what the agent depends on is away; None where it has none."""
        return None if self._gate is None else self._gate.gate(delivery)

    def _now(self) -> float:
        return self.clock.time_ns() / 1e9

    def _note_retried(self, delivery: Delivery, outcome: _Outcome) -> None:
        assert outcome.error is not None
        message = structs.replace(delivery.message, data=b"", headers=None)
        attempt, handed_back = outcome.attempt, not delivery.can_be_read_again
        # Its text, and not the exception, whose frames hold what the handler had.
        error = printable(f"{type(outcome.error).__name__}: {line_of(outcome.error)}")[:LONGEST_ERROR]

        def retrying(again_at: datetime) -> Retrying:
            behind = self.flow.behind(message.sequence)
            return Retrying(
                again_at=again_at,
                stream=self.stream,
                sequence=message.sequence,
                timestamp_ns=message.timestamp_ns,
                handed_back=handed_back,
                attempt=attempt,
                attempts=self.agent.policy.retry.attempts,
                blocked=failure_records.is_blocked(attempt, self.agent.policy.retry.attempts),
                error=error,
                key=printable(self.flow.key_of(message.subject)),
                behind=len(behind),
                first_behind=tuple(behind[:MAX_BEHIND]),
            )

        again_in_seconds = outcome.again_in_seconds
        self._last_failures.note(
            "agents", self.agent.name, outcome.error, again_in_seconds=again_in_seconds, retrying=retrying
        )

    def _again_in_seconds(self, delivery: Delivery, after_seconds: float, *, took_seconds: float) -> float:
        """Return after how long to retry a notification, so that due retries leave time for what is new."""
        now, finished = self.clock.monotonic(), self.flow.finished
        # What the worker has done since the last failure was this, and what succeeded. Where it was idle, that is long.
        share = FAILURE_COSTS / (FAILURE_COSTS + finished - self._finished)
        most = max(took_seconds / self.agent.policy.concurrency, FAILURE_SECONDS)
        takes = min((now - self._failed_at) * share, most)
        self._failed_at, self._finished = now, finished
        if delivery.num_delivered > 1:
            self._retry_share.spend(now, takes)
        return self._retry_share.delay_seconds(
            now, after_seconds, takes_seconds=takes, new_wait=delivery.num_pending > 0
        )

    def _emit_failed(self, call: _EndedCall, outcome: _Outcome) -> None:
        """State what became of a delivery whose handling failed, also to a person who has decided about it."""
        self._emit_settled(call, outcome)
        end = "skipped" if isinstance(outcome.error, SkippedError) else ENDS[outcome.outcome]
        again = outcome.again_in_seconds
        self.decisions.note_end(call.delivery, end, error=outcome.error, again_in_seconds=again)

    def _emit_settled(self, call: _EndedCall, outcome: _Outcome) -> None:
        """State what became of a delivery."""
        message = call.delivery.message
        kind = Settled if outcome is ACKED else Failed
        self.events.emit(
            kind(
                agent=self.agent.name,
                event_type=self.agent.event_type,
                sequence=message.sequence,
                outcome=outcome.outcome,
                reason=outcome.reason,
                seconds=call.seconds,
                waited_seconds=call.waited,
                stored_to_settled_seconds=(self.clock.time_ns() - message.timestamp_ns) / 1e9,
                num_delivered=call.record.handed_over(call.delivery.num_delivered),
                error=outcome.error,
                attempt=outcome.attempt,
                attempts=self.agent.policy.retry.attempts,
                again_in_seconds=outcome.again_in_seconds,
            )
        )

    def _ack(self, delivery: Delivery) -> None:
        delivery.ack()
        self._remove(delivery)

    def _remove(self, delivery: Delivery) -> None:
        self._repeats.note(delivery)
        self.flow.finish(delivery)

    def _nak(self, delivery: Delivery, delay: float) -> None:
        delivery.nak(delay_seconds=delay)
        self.flow.finish(delivery)
        self.decisions.note_retried(delivery, kept=False, after_seconds=delay)


class _DeadLetterWriter(Struct, eq=False):
    """Stores the dead letters of one agent; after an error it tries none until a backoff has passed."""

    settler: Settler
    refusal: BackendError | None = None
    refusals: int = 0
    again_at: float = -math.inf
    """Before this time no dead letter is sent."""
    recovery_timer: ScheduledCall | None = None

    async def store(
        self, delivery: Delivery, verdict: DeadLetter, *, attempts: int, error: BaseException
    ) -> DeadLettersRefused | None:
        """Store a dead letter, and return None, or why it was not stored.

        While the backoff after an earlier one has not passed, its error is returned without a try.
        """
        now = self.settler.clock.monotonic()
        if self.refusal is not None and now < self.again_at:
            return self._refused(self.refusal, self.again_at - now)
        try:
            await self.settler.dead_letters.dead_letter(
                delivery.message,
                agent=self.settler.agent.name,
                stream=self.settler.stream,
                reason=verdict.reason,
                attempts=attempts,
                error=error,
            )
        except BackendError as refusal:
            return self._refuse(refusal)
        self._recover()
        return None

    def _refuse(self, refusal: BackendError) -> DeadLettersRefused:
        now = self.settler.clock.monotonic()
        if refusal.code == error_codes.MESSAGE_TOO_LARGE:
            delay = STORE_AGAIN.max  # this one will not be stored soon, and others can be
        elif now < self.again_at:
            return self._refused(refusal, self.again_at - now)  # under way when the first was refused
        else:
            self.refusals += 1
            delay = STORE_AGAIN.delay_seconds(self.refusals)
            self.again_at = now + delay
        self.refusal = refusal
        if self.recovery_timer is not None:
            self.recovery_timer.cancel()
        # Where the originals succeed in a later attempt, no dead letter shows that storing works again: this does.
        self.recovery_timer = self.settler.clock.call_at(now + 2 * delay, self._recover)
        refused = self._refused(refusal, delay)
        self.settler.events.emit(refused)
        return refused

    def _refused(self, refusal: BackendError, seconds: float) -> DeadLettersRefused:
        return DeadLettersRefused(agent=self.settler.agent.name, error=refusal, again_in_seconds=seconds)

    def _recover(self) -> None:
        if self.refusal is None:
            return
        self.refusal, self.refusals, self.again_at = None, 0, -math.inf
        self.settler.events.emit(DeadLettersStored(agent=self.settler.agent.name))
