"""The breaker of an agent: while what it depends on is away, nothing begins, and one notification at a time is tried.

`acknowledging` tells it of failures, and of successes while it is open. It takes failures for an outage as
`declare.outages` says. While it is open, the buffer holds back what it has and what comes. Of all workers of the app,
one tries one notification after each interval: the one that has written the shared record (`state.outage_records`).
When one succeeds, two more begin after each success, until all may.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio

from aviso_workers import clocks
from aviso_workers.aviso.literals import printable
from aviso_workers.aviso.notifications import Notification
from aviso_workers.backends import Backend, Delivery
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.outages import Breaker, Evidence, is_unavailable, retry_after_seconds
from aviso_workers.declare.retry import Backoff
from aviso_workers.declare.verdicts import Failure
from aviso_workers.engine.flow import Flow
from aviso_workers.errors import BackendError, ConflictError, line_of
from aviso_workers.events import Events, OutageBegan, OutageEnded
from aviso_workers.state import outage_records
from aviso_workers.state.outage_records import OutageRecord

__all__ = ["CircuitBreaker"]

T = TypeVar("T")

CHECK_SECONDS = 1.0
"""How often a worker looks whether another one has tried with success."""
SHARED_SECONDS = 3.0
"""How long a worker waits for an answer about the shared record."""
UNSHARED = Backoff(first=2.0, factor=2.0, max=30.0, jitter=0.5)
"""How long a worker that got none decides alone, by how often in a row. An election of a leader takes a few seconds."""
LONGER = 1.25
"""What failed waits so many times the interval, so that another notification is tried next."""
OPENED_UP_SECONDS = 5.0
"""When everything may begin again at the latest, after the first success."""


class CircuitBreaker:
    """The breaker of one agent in one worker. Keep `work` running beside the agent."""

    def __init__(
        self, agent: Agent[Any, Any], policy: Breaker, *, flow: Flow, backend: Backend, app: str, events: Events
    ) -> None:
        self.is_open = False
        """Whether nothing begins but what is tried. Also while it opens up slowly."""
        self._agent = agent.name
        self._kinds = agent.policy.unavailable
        self._together = agent.form is not Notification
        """Whether a call takes several notifications."""
        self._policy = policy
        self._intervals = policy.intervals
        self._flow = flow
        self._backend = backend
        self._clock = backend.clock
        self._app = app
        self._events = events
        self._evidence = Evidence(policy)
        self._by_kind = False
        """Whether it has opened because of failures which say that something is away."""
        self._opened = anyio.Event()
        self._changed = anyio.Event()
        """Set when what was tried has come to its end, another worker has succeeded, or all may begin again."""
        self._since = clocks.EPOCH
        self._opened_at = 0.0
        self._reason = ""
        self._tries = 0
        self._interval = policy.first
        self._not_before = 0.0
        self._alone_until, self._unanswered = 0.0, 0
        self._revision = 0
        """Of the shared record, as it was seen last."""
        self._seen_at = 0.0
        self._left = 0
        """How many have to succeed until everything may begin; 0 before one has."""

    def note_success(self, delivery: Delivery) -> None:
        """Note that a delivery succeeded while the breaker is open; what began before that says nothing."""
        if self._flow.buffer.end_try(delivery):
            self._note_answer()

    def note_failure(self, delivery: Delivery, failure: Failure, *, succeeded: int, started: float) -> float | None:
        """Note that a delivery failed, after `succeeded` others in all, in a call that began at `started`.

        Return after how long it is to be tried again where this is no failed attempt; None where it is one.
        """
        tried = self._flow.buffer.end_try(delivery)
        if failure.final or failure.worker_died:
            return None  # nothing that the author's function has called
        away = is_unavailable(failure.error, self._kinds)
        answered = failure.instruction is not None or (self._by_kind and not away)
        if self.is_open and tried and answered:
            self._note_answer()
            return None
        if failure.instruction is not None:
            return None
        key = (delivery.message.sequence, delivery.message.timestamp_ns)
        if not self.is_open:
            if not self._evidence.is_outage(
                key, call=started if self._together else None, away=away, succeeded=succeeded
            ):
                spared = away and self._evidence.spares(key, succeeded=succeeded)
                return self._intervals.delay_seconds(1) if spared else None
            self._open(failure.error, by_kind=away)
        elif tried:
            self._left = 0
            self._flow.buffer.hold_back()
            self._changed.set()
        asked = retry_after_seconds(failure.error, clocks.utc_now(self._clock))
        self._not_before = max(self._not_before, self._clock.monotonic() + asked)
        # No longer: it is held back as long as it has to be, and not where a worker begins anew.
        return min(self._interval, outage_records.RENEW_SECONDS) * LONGER

    def spared_window_seconds(self, failure: Failure) -> float | None:
        """Return after how long the function of a window is run again that failed because something is away; None
        where its failure is an attempt. Windows are no evidence: one worker of all runs their function.
        """
        decided = failure.final or failure.instruction is not None or not is_unavailable(failure.error, self._kinds)
        return None if decided else self._intervals.max

    async def work(self) -> None:
        """Try notifications while the breaker is open; never returns."""
        while True:
            await self._opened.wait()
            await self._join()
            while self.is_open:
                if self._left:
                    await self._open_up()
                elif await self._is_due() and self.is_open and not self._left:
                    await self._try_one()

    def _open(self, error: BaseException, *, by_kind: bool) -> None:
        self.is_open, self._by_kind = True, by_kind
        self._since, self._opened_at = clocks.utc_now(self._clock), self._clock.monotonic()
        self._reason = printable(f"{type(error).__name__}: {line_of(error)}")
        self._revision, self._left = 0, 0
        self._plan(0)
        self._flow.buffer.hold_back()
        self._events.emit(OutageBegan(agent=self._agent, error=error, again_in_seconds=self._interval))
        self._opened.set()

    def _note_answer(self) -> None:
        """Note that what the agent depends on has answered, and let two more begin."""
        if not self._left:
            self._left = 2 * self._flow.workers
            self._changed.set()
        else:
            self._left -= 1
        if self._left:
            self._flow.buffer.let(2)
        else:
            self._close()

    def _close(self) -> None:
        seconds = self._clock.monotonic() - self._opened_at
        self.is_open, self._left, self._not_before = False, 0, 0.0
        self._opened = anyio.Event()
        self._changed.set()
        self._evidence = Evidence(self._policy)
        self._flow.buffer.let_all()
        self._events.emit(OutageEnded(agent=self._agent, seconds=seconds, tries=self._tries))

    @property
    def _due(self) -> float:
        """When the next one is tried. Who waits for longer says so again and again, or is not there any more."""
        return max(self._seen_at + min(self._interval, outage_records.ABANDONED_SECONDS), self._not_before)

    async def _is_due(self) -> bool:
        """Wait until it is time to try one, and return whether this worker is the one to do it. A worker that has none
        to try leaves it to others.
        """
        self._flow.buffer.let_none()
        seconds = self._due - self._clock.monotonic() if self._flow.buffer.can_try else CHECK_SECONDS
        await self._clock.sleep(min(max(0.0, seconds), CHECK_SECONDS))
        known = self._revision
        if record := await self._news():
            if record.over:
                if known:  # or it is an earlier outage that is over
                    self._note_answer()
                return False
            self._follow(record)
        now = self._clock.monotonic()
        if now >= self._due and self._flow.buffer.can_try:
            self._plan(self._tries + 1)
            return await self._write()
        if now - self._seen_at > outage_records.RENEW_SECONDS and now < self._not_before:
            self._interval, self._seen_at = self._not_before - now, now
            await self._write()
        return False

    async def _join(self) -> None:
        """Record the outage, or join the workers that have recorded it."""
        record = await self._news()
        if record is None or record.over or record.is_abandoned(clocks.utc_now(self._clock)):
            self._plan(0)
            await self._write()
        else:
            self._follow(record)

    def _follow(self, record: OutageRecord) -> None:
        self._tries, self._interval = max(self._tries, record.tries), record.again_in_seconds
        self._seen_at = self._clock.monotonic()

    def _plan(self, tries: int) -> None:
        """Note how often one was to be tried by now, and after how long the next one is."""
        self._tries, self._seen_at = tries, self._clock.monotonic()
        self._interval = max(self._intervals.delay_seconds(tries + 1), self._not_before - self._seen_at)
        self._not_before = self._seen_at + self._interval

    async def _news(self) -> OutageRecord | None:
        """Return the shared record; None where there is none, or it has not changed since it was seen last."""
        found = await self._shared(lambda: outage_records.newest(self._backend, app=self._app, agent=self._agent))
        if found is None or found[1] == self._revision:
            return None
        record, self._revision = found
        return record

    async def _write(self, *, over: bool = False) -> bool:
        """Write the shared record, and return whether no other worker has written it meanwhile."""
        record = OutageRecord(
            since=self._since,
            reason=self._reason,
            tries=self._tries,
            again_in_seconds=self._interval,
            written=clocks.utc_now(self._clock),
            over=over,
        )
        try:
            revision = await self._shared(
                lambda: outage_records.write(
                    self._backend, record, app=self._app, agent=self._agent, revision=self._revision
                )
            )
        except ConflictError:
            return False
        self._revision = revision or self._revision
        return True

    async def _shared(self, request: Callable[[], Awaitable[T]]) -> T | None:
        """Return what a request about the shared record returns; None where there is no answer, and for a while after
        that. Raises `ConflictError` where another worker has written the record.
        """
        if self._clock.monotonic() < self._alone_until:
            return None
        try:
            with clocks.fail_after(self._clock, SHARED_SECONDS):
                answer = await request()
        except ConflictError:
            raise
        except (BackendError, TimeoutError):
            self._unanswered += 1
            self._alone_until = self._clock.monotonic() + UNSHARED.delay_seconds(self._unanswered)
            return None
        self._unanswered = 0
        return answer

    async def _try_one(self) -> None:
        self._changed = anyio.Event()
        self._flow.buffer.let(1)
        with clocks.move_on_after(self._clock, self._interval):
            await self._changed.wait()
        while not self._changed.is_set() and self._flow.buffer.is_trying():  # it takes longer than the interval
            self._plan(self._tries)
            await self._write()  # so that no other worker tries meanwhile
            with clocks.move_on_after(self._clock, self._interval / 2):
                await self._changed.wait()
        if self._left:
            await self._write(over=True)
        elif self._not_before > self._seen_at + self._interval:  # it is asked to wait for longer
            self._plan(self._tries)
            await self._write()

    async def _open_up(self) -> None:
        """Wait until so many have succeeded that all may begin, or one has failed, but not for long."""
        with clocks.move_on_after(self._clock, OPENED_UP_SECONDS):
            while self._left:
                self._changed = anyio.Event()
                await self._changed.wait()
        if self._left:
            self._close()
