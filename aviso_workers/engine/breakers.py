"""The breaker of what agents depend on: while it is away, nothing begins, and one notification at a time is tried.

An agent has one of its own, or shares that of a name with others (`depends_on`). `agent_breakers` tells it of failures,
and of successes while it is open. It takes failures for an outage as `declare.outages` says. While it is open, the
buffers of its agents hold back what they have and what comes. Of all workers of the app, one tries one notification
after each interval: the one that has written the shared record (`state.outage_records`). When one succeeds, two more
of each agent begin after each success, until all may.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from datetime import datetime
from typing import Protocol, TypeVar

import anyio

from aviso_workers import clocks, event_loops
from aviso_workers.aviso.literals import AnyDuration, printable
from aviso_workers.backends import Backend
from aviso_workers.declare.outages import Breaker, Evidence, Unavailable, retry_after_seconds
from aviso_workers.declare.retry import Backoff
from aviso_workers.errors import BackendError, ConflictError, line_of
from aviso_workers.events import Events, OutageBegan, OutageEnded
from aviso_workers.state import outage_records
from aviso_workers.state.outage_records import OutageRecord

__all__ = ["LONGER", "CircuitBreaker", "Guarded"]

T = TypeVar("T")

CHECK_SECONDS = 1.0
"""How often a worker looks whether another one has tried with success."""
SHARED_SECONDS = 3.0
"""How long a worker waits for an answer about the shared record."""
UNSHARED = Backoff(first=2.0, factor=2.0, max=30.0, jitter=0.5)
"""How long a worker that got none decides alone, by how often in a row. An election of a leader takes a few seconds."""
LONGER = 1.25
"""What failed waits so many times the interval, so that another notification is tried next."""
UNNAMED_SECONDS = 900.0
"""How long failures of any kind are taken for an outage. Then they count again, until something succeeds: notifications
that cannot be handled would keep others back without end."""
OPENED_UP_SECONDS = 5.0
"""When everything may begin again at the latest, after the first success."""


class Guarded(Protocol):
    """The agent of a breaker, which lets its notifications begin."""

    agent: str
    concurrency: int

    @property
    def can_try(self) -> bool:
        """Whether a notification is held back that `let` would let begin."""
        ...

    def hold_back(self, *, give_back_after_seconds: float | None = None) -> None:
        """Let nothing begin. What waits goes back to the server for so long, where that keeps the order."""
        ...

    def let(self, count: int) -> None: ...
    def let_none(self) -> None: ...
    def let_all(self) -> None: ...
    def is_trying(self) -> bool: ...
    def succeeded(self) -> int:
        """Return how often what the agent depends on has answered, as notifications have succeeded."""
        ...


class CircuitBreaker:
    """A breaker in one worker; `App.breaker` returns one that agents share. Keep `work` running beside each of them."""

    def __init__(self, policy: Breaker, *, key: str, backend: Backend, events: Events) -> None:
        """`key` is that of its shared record."""
        self.is_open = False
        """Whether nothing begins but what is tried. Also while it opens up slowly."""
        self.since: datetime = clocks.EPOCH
        """When it opened the last time."""
        self.reason = ""
        """The error that opened it the last time, with its class."""
        self.policy = policy
        self.intervals = policy.intervals
        self._agents: list[Guarded] = []
        self._turn = 0
        """Which of the agents is the next to try one."""
        self._working = anyio.Lock()
        self._loop = asyncio.get_running_loop()
        self._key = key
        self._backend = backend
        self._clock = backend.clock
        self._events = events
        self._evidence = Evidence(policy)
        self._by_kind = False
        """Whether it has opened because of failures which say that something is away."""
        self._opened = anyio.Event()
        self._changed = anyio.Event()
        """Set when what was tried has come to its end, another worker has succeeded, or all may begin again."""
        self._opened_at = 0.0
        self._tries = 0
        self._interval = policy.first
        self._not_before = self._tripped_until = 0.0
        self._alone_until, self._unanswered = 0.0, 0
        self._revision = 0
        """Of the shared record, as it was seen last."""
        self._seen_at = 0.0
        self._left = 0
        """How many have to succeed until everything may begin; 0 before one has."""
        self._told = False
        """Whether the shared record says that one has succeeded."""

    def add(self, agent: Guarded) -> None:
        """Add an agent, which waits with the others while the breaker is open, in place of one of the same name that
        has ended.
        """
        self._agents = [*(each for each in self._agents if each.agent != agent.agent), agent]
        if self.is_open:
            agent.hold_back()

    def note_failure(
        self, key: Hashable, error: BaseException, *, away: bool, first: bool, tried: bool, call: float | None
    ) -> float | None:
        """Note that a notification has failed, by its `key`, `away` if the error says that something is, and `tried` if
        it was let begin while the breaker is open. `first` and `call` are as for `Evidence.is_outage`.

        Return after how long it is to be tried again where this is no failed attempt; None where it is one.
        """
        if self.is_open and tried and self._by_kind and not away:
            self.note_answer()
            return None
        if not self.is_open:
            succeeded = self._succeeded
            if not self._evidence.is_outage(key, call=call, away=away, first=first, succeeded=succeeded):
                spared = away and self._evidence.spares(key, succeeded=succeeded)
                return self.intervals.delay_seconds(1) if spared else None
            self._open(error, by_kind=away)
        elif tried:
            self._left, self._told = 0, False
            self._hold_back()
            self._changed.set()
        asked = retry_after_seconds(error, clocks.utc_now(self._clock))
        self._not_before = max(self._not_before, self._clock.monotonic() + asked)
        return self._later_seconds

    def trip(self, reason: str, *, after: AnyDuration | None = None) -> None:
        """Open the breaker in this worker, if it is not open. May be called in any thread.

        With `after`, a number of seconds, a text such as `30s`, or a timedelta, nothing is tried before. Raises
        `DeclarationError` for an `after` that is no duration.
        """
        error = Unavailable(reason, after)

        def trip() -> None:
            if not self.is_open:
                self._open(error, by_kind=True)
            elif error.after:
                self._left = 0
                self._hold_back()
            self._tripped_until = self._clock.monotonic() + (error.after or 0.0)
            self._not_before = max(self._not_before, self._tripped_until)

        self._on_loop(trip)

    def reset(self) -> None:
        """Let everything begin again, in all workers of the app, if it is open. May be called in any thread."""
        self._on_loop(self.close)

    def _on_loop(self, function: Callable[[], None]) -> None:
        if event_loops.running_loop() is self._loop:
            function()
        else:
            self._loop.call_soon_threadsafe(function)

    def note_answer(self) -> None:
        """Note that what the agents depend on has answered, and let two more of each begin."""
        if not self.is_open or self._clock.monotonic() < self._tripped_until:
            return  # it was reset, or tripped, meanwhile
        if not self._left:
            self._left = 2 * sum(agent.concurrency for agent in self._agents)
            self._changed.set()
        else:
            self._left -= 1
        if self._left:
            for agent in self._agents:
                agent.let(2)
        else:
            self.close()

    def close(self, *, answered: bool = True) -> None:
        """Let everything begin, if the breaker is open."""
        if not self.is_open:
            return
        seconds = self._clock.monotonic() - self._opened_at
        self.is_open, self._left, self._not_before, self._tripped_until = False, 0, 0.0, 0.0
        self._opened = anyio.Event()
        self._changed.set()
        self._evidence = Evidence(self.policy)
        for agent in self._agents:
            agent.let_all()
            self._events.emit(OutageEnded(agent=agent.agent, seconds=seconds, tries=self._tries, answered=answered))

    async def work(self) -> None:
        """Try notifications while the breaker is open; never returns. Of several that run this, one does it."""
        async with self._working:
            while True:
                await self._opened.wait()
                await self._join()
                while self.is_open:
                    if not self._by_kind and self._clock.monotonic() - self._opened_at > UNNAMED_SECONDS:
                        self.close(answered=False)
                        self._evidence = Evidence(self.policy, answered=self._succeeded)
                    elif self._left:
                        await self._open_up()
                    elif await self._is_due() and self.is_open and not self._left:
                        await self._try_one()
                await self._tell()

    @property
    def _later_seconds(self) -> float:
        """After how long a failed notification comes again. No longer: it is held back as long as it has to be, and
        not where a worker begins anew.
        """
        return min(self._interval, outage_records.RENEW_SECONDS) * LONGER

    def _hold_back(self, *, give_back_after_seconds: float | None = None) -> None:
        for agent in self._agents:
            agent.hold_back(give_back_after_seconds=give_back_after_seconds)

    def _open(self, error: BaseException, *, by_kind: bool) -> None:
        self.is_open, self._by_kind = True, by_kind
        self.since, self._opened_at = clocks.utc_now(self._clock), self._clock.monotonic()
        self.reason = printable(f"{type(error).__name__}: {line_of(error)}")
        self._revision, self._left, self._told = 0, 0, False
        self._plan(0)
        self._hold_back(give_back_after_seconds=self._later_seconds)
        for agent in self._agents:
            self._events.emit(OutageBegan(agent=agent.agent, error=error, again_in_seconds=self._interval))
        self._opened.set()

    @property
    def _succeeded(self) -> int:
        return sum(agent.succeeded() for agent in self._agents)

    @property
    def _can_try(self) -> bool:
        return any(agent.can_try for agent in self._agents)

    @property
    def _due(self) -> float:
        """When the next one is tried. Who waits for longer says so again and again, or is not there any more."""
        return max(self._seen_at + min(self._interval, outage_records.ABANDONED_SECONDS), self._not_before)

    async def _is_due(self) -> bool:
        """Wait until it is time to try one, and return whether this worker is the one to do it. A worker that has none
        to try leaves it to others.
        """
        for agent in self._agents:
            agent.let_none()
        seconds = self._due - self._clock.monotonic() if self._can_try else CHECK_SECONDS
        await self._clock.sleep(min(max(0.0, seconds), CHECK_SECONDS))
        known = self._revision
        if record := await self._news():
            if record.over:
                if known:  # or it is an earlier outage that is over
                    self._told = True
                    self.note_answer()
                return False
            self._follow(record)
        now = self._clock.monotonic()
        if now >= self._due and self._can_try:
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
        self._interval = max(self.intervals.delay_seconds(tries + 1), self._not_before - self._seen_at)
        self._not_before = self._seen_at + self._interval

    async def _news(self) -> OutageRecord | None:
        """Return the shared record; None where there is none, or it has not changed since it was seen last."""
        found = await self._shared(lambda: outage_records.newest(self._backend, self._key))
        if found is None or found[1] == self._revision:
            return None
        record, self._revision = found
        return record

    async def _write(self, *, over: bool = False) -> bool:
        """Write the shared record, and return whether no other worker has written it meanwhile."""
        record = OutageRecord(
            since=self.since,
            reason=self.reason,
            agents=tuple(agent.agent for agent in self._agents),
            tries=self._tries,
            again_in_seconds=self._interval,
            written=clocks.utc_now(self._clock),
            over=over,
        )
        try:
            revision = await self._shared(
                lambda: outage_records.write(self._backend, record, key=self._key, revision=self._revision)
            )
        except ConflictError:
            return False
        self._revision = revision or self._revision
        self._told = over
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
        self._turn += 1
        first = self._turn % len(self._agents)
        agents = [*self._agents[first:], *self._agents[:first]]
        next((agent for agent in agents if agent.can_try), agents[0]).let(1)
        with clocks.move_on_after(self._clock, self._interval):
            await self._changed.wait()
        while not self._changed.is_set() and any(agent.is_trying() for agent in agents):
            # It takes longer than the interval.
            self._plan(self._tries)
            await self._write()  # so that no other worker tries meanwhile
            with clocks.move_on_after(self._clock, self._interval / 2):
                await self._changed.wait()
        if (
            self.is_open and not self._left and self._not_before > self._seen_at + self._interval
        ):  # it is asked to wait for longer
            self._plan(self._tries)
            await self._write()

    async def _open_up(self) -> None:
        """Wait until so many have succeeded that all may begin, or one has failed, but not for long."""
        await self._tell()
        with clocks.move_on_after(self._clock, OPENED_UP_SECONDS):
            while self._left:
                self._changed = anyio.Event()
                await self._changed.wait()
        if self._left:
            self.close()

    async def _tell(self) -> None:
        """Tell the other workers that the outage is over, unless one of them has told it."""
        if not self._told:
            await self._news()  # another worker may have written it since
            await self._write(over=True)
