"""Timers at work: every worker runs its own, and of those with `leader=True` one worker of the fleet runs all.

The leader holds a lease: a key in a bucket that forgets it, unless it is put again, within `LEASE_SECONDS`. Whoever
finds none makes one. A leader whose lease may be over stops what it runs. That alone would let a leader that was paused
run a tick beside the next one, so each tick is claimed before it is run, by a put on the revision of the claim before:
of two, one succeeds. What was claimed is kept, and tells the next leader what was missed.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import msgspec

from aviso_workers import clocks
from aviso_workers.aviso.codec import read_json
from aviso_workers.backends import Backend
from aviso_workers.clocks import Clock
from aviso_workers.declare import outputs, timers
from aviso_workers.declare.timers import Tick, Timer
from aviso_workers.declare.verdicts import Failure
from aviso_workers.engine import call_scope, calls
from aviso_workers.engine.key_value import RetryingKeyValue
from aviso_workers.errors import (
    BackendError,
    ConflictError,
    OutcomeUnknownError,
    RefusedError,
    UnavailableError,
    UndecodableError,
)
from aviso_workers.events import (
    Events,
    LeadershipChanged,
    LeadershipHindered,
    LeadershipUnhindered,
    Ticked,
    TimerRescheduled,
    Unreadable,
)
from aviso_workers.jetstream.key_value import Entry
from aviso_workers.state import timer_records
from aviso_workers.state.timer_records import LEADER, LEASE_SECONDS, Claim

__all__ = [
    "OVERDUE_SECONDS",
    "Lease",
    "drained",
    "run_now",
    "run_timers",
]

RENEW_SECONDS = 2.0
OVERDUE_SECONDS = LEASE_SECONDS + RENEW_SECONDS
"""A lease that nobody has renewed for so long is over, also where the server does not forget it: one that was put while
the server's clock was ahead is forgotten only when that time has come."""
CHECK_SECONDS = 1.0
"""How often it is looked whether there is a leader."""
LONGEST_SLEEP_SECONDS = 30.0
"""The time of day may be set while a timer waits for it."""
MOST_SKEW = timedelta(seconds=10)
"""A tick that was claimed further ahead of the bucket's own time than this was claimed by a clock that was wrong."""
AGAIN_SECONDS = 1.0
PATIENCE_SECONDS = 5.0
TRIES = 10
"""How often in a row a lease is put again that was replaced meanwhile, and not by another worker."""


async def run_timers(
    declared: Sequence[Timer[Any, Any]],
    *,
    backend: Backend,
    app: str,
    events: Events,
    stop: anyio.Event,
    drain_timeout_seconds: float,
) -> None:
    """Run them until `stop`; what runs then may take until the drain timeout is over."""
    clock = backend.clock
    async with drained(stop, clock=clock, timeout_seconds=drain_timeout_seconds), anyio.create_task_group() as running:
        for timer in declared:
            if not timer.leader:
                running.start_soon(_keep_ticking, timer, clock, events, stop, None)
        if led := [timer for timer in declared if timer.leader]:
            running.start_soon(_lead, led, backend, app, events, stop)


@asynccontextmanager
async def drained(stop: anyio.Event, *, clock: Clock, timeout_seconds: float) -> AsyncIterator[None]:
    """Cancel the block so long after `stop`."""

    async def end(scope: anyio.CancelScope) -> None:
        await stop.wait()
        await clock.sleep(timeout_seconds)
        scope.cancel()

    async with anyio.create_task_group() as ending:
        ending.start_soon(end, ending.cancel_scope)
        yield
        ending.cancel_scope.cancel()


async def _lead(led: Sequence[Timer[Any, Any]], backend: Backend, app: str, events: Events, stop: anyio.Event) -> None:
    """Run these whenever this worker is the leader."""
    clock = backend.clock
    bucket = timer_records.buckets_of(app)[1]
    claims = RetryingKeyValue(backend, bucket, patience_seconds=PATIENCE_SECONDS, own=True)
    outage = Outage(bucket, clock=clock, events=events)
    lease = Lease(backend, app, events=events)
    in_doubt: defaultdict[str, dict[str, datetime]] = defaultdict(dict)
    while await lease.take(stop):
        events.emit(LeadershipChanged(leads=True, token=lease.token))
        async with lease.renewed(), anyio.create_task_group() as running:
            for timer in led:
                of_timer = Claims(
                    timer.name,
                    claims,
                    lease,
                    outage,
                    schedule=timer.schedule.text,
                    in_doubt=in_doubt[timer.name],
                    events=events,
                )
                running.start_soon(_keep_ticking, timer, clock, events, stop, of_timer)
        outage.end()  # only a leader claims ticks
        events.emit(LeadershipChanged(leads=False, token=lease.token))


async def run_now(timer: Timer[Any, Any], *, clock: Clock, events: Events) -> None:
    """Run a timer once, apart from its ticks, and emit `Ticked`. `Tick.token` is None: no leader runs it."""
    await _run(timer, Tick(timer=timer.name, time=_now(clock)), clock, events)


class Outage:
    """Whether a bucket can be used: where it could not for as long as a lease lasts, that is stated once."""

    def __init__(self, bucket: str, *, clock: Clock, events: Events) -> None:
        self._bucket = bucket
        self._clock = clock
        self._events = events
        self._since = self._last = -math.inf
        """When the outage began, and when it was last noticed."""
        self._reported = False

    def begin(self, error: BackendError) -> None:
        """Note that the bucket could not be used, or still cannot be."""
        now = self._clock.monotonic()
        if now - self._last > LONGEST_SLEEP_SECONDS:
            self._since = now  # it was used well in between, or not at all
        self._last = now
        if not self._reported and now - self._since >= LEASE_SECONDS:
            self._reported = True
            self._events.emit(LeadershipHindered(bucket=self._bucket, error=error))

    def end(self) -> None:
        """Note that the bucket was written, or is not needed for now."""
        self._last = -math.inf
        if self._reported:
            self._reported = False
            self._events.emit(LeadershipUnhindered(bucket=self._bucket))


class Lease:
    """Who leads, in the app's timers or in what `of` names. One worker at a time holds it, but for one that was paused
    and has not noticed yet."""

    def __init__(self, backend: Backend, app: str, *, of: str = LEADER, events: Events) -> None:
        self.token = 0
        """Greater with every leader."""
        self._clock = backend.clock
        bucket = timer_records.buckets_of(app)[0]
        self._bucket = RetryingKeyValue(
            backend, bucket, ttl_seconds=LEASE_SECONDS, patience_seconds=RENEW_SECONDS, own=True
        )
        self._outage = Outage(bucket, clock=backend.clock, events=events)
        self._key = of
        self._holder = f"{socket.gethostname()}:{os.getpid()}".encode()
        self._revision = 0
        self._until = 0.0
        self._in_doubt: set[str] = set()
        """The message ids of our puts since the last one that was answered of which it is not known whether they were
        stored."""
        self._seen: tuple[int, float] = (0, 0.0)
        """The revision of another worker's lease, and since when it has been that."""

    @property
    def held(self) -> bool:
        return self._clock.monotonic() < self._until

    async def take(self, stop: anyio.Event) -> bool:
        """Return when it is held; False where `stop` comes first."""
        while not stop.is_set():
            await self._put(await self._overdue())
            if self.held:
                self.token = self._revision
                self._seen = (0, 0.0)
                return True
            await clocks.sleep_until(self._clock, CHECK_SECONDS, stop)
        return False

    async def _overdue(self) -> int:
        """Return the revision of a lease that nobody has renewed for too long; 0 where there is none.

        A foreign value hides whether there is a lease, so each one counts as a renewal: the leader may be at work.
        """
        now = self._clock.monotonic()
        try:
            entry = await self._bucket.newest(self._key)
        except BackendError:
            return 0
        revision, since = self._seen
        if entry is None or (entry.deleted and not entry.foreign):
            self._seen = (0, now)
            return 0
        if entry.revision != revision:
            self._seen = (entry.revision, now)
            return 0
        return entry.revision if now - since > OVERDUE_SECONDS else 0

    @asynccontextmanager
    async def renewed(self) -> AsyncIterator[None]:
        """Cancel the block when the lease may be over. Afterwards the lease is given back."""
        async with anyio.create_task_group() as holding:
            holding.start_soon(self.hold, holding.cancel_scope)
            yield
            holding.cancel_scope.cancel()
        await self.give_back()

    async def hold(self, term: anyio.CancelScope) -> None:
        """Renew it for as long as that goes well, then cancel what depends on it."""
        while self.held:
            with clocks.move_on_after(self._clock, self._until - self._clock.monotonic()):
                await self._clock.sleep(RENEW_SECONDS)
                await self._put(self._revision)
        term.cancel()

    async def give_back(self) -> None:
        """So that the next leader need not wait until it is forgotten."""
        if self.held:
            self._until = 0.0
            try:
                await self._bucket.delete(self._key, revision=self._revision)
            except BackendError:
                return  # it is forgotten soon enough

    async def _put(self, revision: int, *, tries: int = TRIES) -> None:
        sent, message_id = self._clock.monotonic(), secrets.token_hex(12)
        try:
            self._revision = await self._bucket.put(self._key, self._holder, revision=revision, message_id=message_id)
        except ConflictError:
            if (self._in_doubt or self.held) and tries:
                await self._put_after_conflict(tries - 1)
                return
            self._until = 0.0  # it is another worker's
        except BackendError as error:
            if isinstance(error, OutcomeUnknownError):
                self._in_doubt.add(message_id)
            self._outage.begin(error)
            return  # held as long as it was
        else:
            self._in_doubt.clear()
            self._until = sent + LEASE_SECONDS
        self._outage.end()

    async def _put_after_conflict(self, tries: int) -> None:
        """Put it on the revision of our own put that was in doubt, if that is the newest one; or on that of a foreign
        value, while it is ours: no other worker has taken it then.
        """
        try:
            entry = await self._bucket.newest(self._key)
        except BackendError as error:
            self._outage.begin(error)
            return
        in_doubt, self._in_doubt = self._in_doubt, set()
        if entry is not None and (entry.message_id in in_doubt or (entry.foreign and self.held)):
            await self._put(entry.revision, tries=tries)
        else:
            self._until = 0.0  # it is another worker's
            self._outage.end()


class Claims:
    """Which ticks of a timer were begun, by any leader."""

    def __init__(
        self,
        timer: str,
        bucket: RetryingKeyValue,
        lease: Lease,
        outage: Outage,
        *,
        schedule: str,
        in_doubt: dict[str, datetime],
        events: Events,
    ) -> None:
        """`in_doubt` is kept for the next time that this worker leads. By message id: the claims of which it is not
        known whether they were stored, and the last tick that was claimed before each.
        """
        self._timer = timer
        self._schedule = schedule
        self._bucket = bucket
        self._lease = lease
        self._outage = outage
        self._events = events
        self._revision = 0
        self._last: datetime | None = None
        """The last tick that is known to be claimed; None before anything is known."""
        self._in_doubt = in_doubt

    @property
    def token(self) -> int:
        return self._lease.token

    async def last(self, now: datetime) -> datetime:
        """After which the next tick is to be run: `now`, where the timer is new.

        A claim that a clock made which was ahead is believed up to the time at which the bucket stored it. Otherwise a
        leader that is an hour ahead would silence its successors for an hour. A claim of our own that was in doubt and
        is stored counts as none: its tick was not run. Where the bucket was deleted since our last claim, or there is a
        foreign value in its place, that counts; where we know of none, the time when the foreign value was stored.

        A claim by another schedule tells nothing of the ticks that this one has missed: it begins now, with a tick that
        is not late by more than `LATE_SECONDS`.
        """
        entry = await self._bucket.newest(self._timer)
        if entry is None or entry.deleted:
            stored = entry.time if entry is not None and entry.foreign else now
            begin = min(self._last if self._last is not None and self._lease.held else stored, now)
            await self._begin(begin, revision=entry.revision if entry else 0)
            return begin
        self._revision = entry.revision
        if entry.message_id in self._in_doubt:
            self._last = self._in_doubt[entry.message_id]
        else:
            claim = self._read(entry)
            self._last = entry.time if claim.time - entry.time > MOST_SKEW else claim.time
            if claim.schedule not in ("", self._schedule):
                await self._begin(
                    max(self._last, now - timedelta(seconds=timers.LATE_SECONDS)), revision=entry.revision
                )
                self._events.emit(TimerRescheduled(timer=self._timer, schedule=self._schedule, before=claim.schedule))
        return self._last

    async def _begin(self, time: datetime, *, revision: int) -> None:
        """Store that ticks of this schedule that are due after this time are to be run."""
        claim = Claim(time=time, schedule=self._schedule)
        self._revision = await self._bucket.put(self._timer, msgspec.json.encode(claim), revision=revision)
        self._last = time

    def _read(self, entry: Entry) -> Claim:
        """Return the claim; one of the time at which it was stored, where it is none of ours."""
        try:
            claim = read_json(entry.value, Claim)
            return Claim(time=claim.time.astimezone(UTC), token=claim.token, schedule=claim.schedule)
        except (UndecodableError, OverflowError) as error:
            self._events.emit(Unreadable(stream=f"KV_{self._bucket.name}", sequence=entry.revision, error=error))
            return Claim(time=entry.time)

    async def claim(self, tick: datetime) -> bool:
        """Return whether it is ours to run. Raises `ConflictError` where another leader has claimed one since, or where
        an earlier claim of our own was stored late.
        """
        if not self._lease.held:
            return False
        assert self._last is not None, "only after `last`"
        claimed = Claim(time=tick, token=self.token, schedule=self._schedule)
        claim, message_id = msgspec.json.encode(claimed), secrets.token_hex(12)
        self._in_doubt[message_id] = self._last  # also while this may be cancelled
        try:
            self._revision = await self._bucket.put(self._timer, claim, revision=self._revision, message_id=message_id)
        except (UnavailableError, RefusedError):
            del self._in_doubt[message_id]
            raise
        self._in_doubt.clear()  # none of the earlier ones can be stored any more, on the revision before this one
        self._last = tick
        self._outage.end()
        return True

    def note_failure(self, error: BackendError) -> None:
        """Note that the claims could not be read or written; that another leader was faster is no outage."""
        if not isinstance(error, ConflictError):
            self._outage.begin(error)


async def _keep_ticking(
    timer: Timer[Any, Any], clock: Clock, events: Events, stop: anyio.Event, claims: Claims | None
) -> None:
    last = None if claims else _now(clock)
    while not stop.is_set():
        try:
            now = _now(clock)
            if last is None or last - now > MOST_SKEW:  # at first, and after the clock was set back
                last = await claims.last(now) if claims else now
            tick = timers.next_tick(timer.schedule, last, now=now, catch_up=timer.catch_up)
            if tick > now:
                seconds = min((tick - now).total_seconds(), LONGEST_SLEEP_SECONDS)
                await clocks.sleep_until(clock, seconds, stop)
                continue
            if claims is None or await claims.claim(tick):
                token = claims.token if claims else None
                await _run(timer, Tick(timer=timer.name, time=tick, token=token), clock, events)
            last = tick
        except BackendError as error:
            # Another leader was faster, or the claims cannot be reached: see again how far they are.
            if claims is not None:
                claims.note_failure(error)
            last = None
            await clocks.sleep_until(clock, AGAIN_SECONDS, stop)


async def _run(timer: Timer[Any, Any], tick: Tick, clock: Clock, events: Events) -> None:
    began = clock.monotonic()
    late = (_now(clock) - tick.time).total_seconds()
    given = {timer.tick_argument: tick} if timer.tick_argument else {}

    async def run(given: Mapping[str, Any]) -> None:
        async with call_scope.opened(timer, {}) as opened:
            outputs.refuse_unpublished(f"timer {timer.name!r}", await timer.function(**given, **opened))

    returned = await calls.attempt_apart(run, given)
    error = returned.error if isinstance(returned, Failure) else None
    seconds = clock.monotonic() - began
    events.emit(Ticked(timer=timer.name, time=tick.time, late_seconds=late, seconds=seconds, error=error))
    del returned, error  # the frames of the traceback lead to this one, and would be kept until the next collection


def _now(clock: Clock) -> datetime:
    return datetime.fromtimestamp(clock.time_ns() / 1e9, UTC)
