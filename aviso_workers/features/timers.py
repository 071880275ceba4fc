"""Timers at work: every worker runs its own, and of those with `leader=True` one worker of the fleet runs all.

The leader holds a lease (`engine.leases`), and each tick is claimed before it is run, by a put on the revision of the
claim before: of two leaders, one succeeds. What was claimed is kept, and tells the next leader what was missed.
"""

from __future__ import annotations

import math
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import msgspec
from msgspec import structs

from aviso_workers import clocks
from aviso_workers.aviso.codec import read_json
from aviso_workers.backends import Backend
from aviso_workers.backends.buckets import open_existing
from aviso_workers.clocks import Clock
from aviso_workers.declare import outputs, timers
from aviso_workers.declare.timers import Schedule, Tick, Timer
from aviso_workers.declare.verdicts import Failure
from aviso_workers.engine import call_scope, calls
from aviso_workers.engine.key_value import RetryingKeyValue
from aviso_workers.engine.leases import Lease, Outage, drained
from aviso_workers.errors import (
    BackendError,
    ConflictError,
    NotFoundError,
    RefusedError,
    UnavailableError,
    UndecodableError,
)
from aviso_workers.events import (
    Events,
    LeadershipChanged,
    Ticked,
    TimerRescheduled,
    Unreadable,
)
from aviso_workers.jetstream.key_value import Entry, KeyValue
from aviso_workers.state import consumer_records, timer_pauses, timer_records
from aviso_workers.state.timer_pauses import Pause
from aviso_workers.state.timer_records import Claim

__all__ = [
    "run_now",
    "run_timers",
]

LONGEST_SLEEP_SECONDS = 30.0
"""The time of day may be set while a timer waits for it."""
MAX_SKEW = timedelta(seconds=10)
"""A tick that was claimed further ahead of the bucket's own time than this was claimed by a clock that was wrong."""
AGAIN_SECONDS = 1.0
LOOK_SECONDS = 2.0
"""How long a tick waits at most to hear whether its timer is paused."""
LOOK_AGAIN_SECONDS = 30.0
"""When that is asked again after it was not answered, so that a missing right does not delay every tick."""
RESUME_SECONDS = 5.0
"""How often it is looked whether a paused timer was resumed."""
PATIENCE_SECONDS = 5.0


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
    pauses = Pauses(backend, app)
    async with drained(stop, clock=clock, timeout_seconds=drain_timeout_seconds), anyio.create_task_group() as running:
        for timer in declared:
            if not timer.leader:
                running.start_soon(_keep_ticking, timer, pauses, clock, events, stop, None)
        if led := [timer for timer in declared if timer.leader]:
            running.start_soon(_lead, led, pauses, backend, app, events, stop)


async def _lead(
    led: Sequence[Timer[Any, Any]], pauses: Pauses, backend: Backend, app: str, events: Events, stop: anyio.Event
) -> None:
    """Run these whenever this worker is the leader."""
    clock = backend.clock
    bucket = timer_records.bucket_of(app)
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
                    schedule=timer.schedule,
                    in_doubt=in_doubt[timer.name],
                    events=events,
                )
                running.start_soon(_keep_ticking, timer, pauses, clock, events, stop, of_timer)
        outage.end()  # only a leader claims ticks
        events.emit(LeadershipChanged(leads=False, token=lease.token))


async def run_now(timer: Timer[Any, Any], *, time: datetime, clock: Clock, events: Events) -> None:
    """Run a timer once, as if it was due at this time, and emit `Ticked`. `Tick.token` is None: no leader runs it."""
    await _run(timer, Tick(timer=timer.name, time=time), clock, events)


class Pauses:
    """Which timers of an app are paused, as far as this worker knows."""

    def __init__(self, backend: Backend, app: str) -> None:
        self._backend = backend
        self._app = app
        self._bucket: KeyValue | None = None
        self._known: dict[str, Pause | None] = {}
        self._again_at = -math.inf

    async def left_seconds(self, timer: str) -> float:
        """Return for how long the timer is paused; 0 where it is not. Where the server does not tell, what it told last
        holds; where it has told nothing yet, the timer is not paused.
        """
        clock = self._backend.clock
        if self._backend.connection.ready and clock.monotonic() >= self._again_at and not await self._look(timer):
            self._again_at = clock.monotonic() + LOOK_AGAIN_SECONDS
        pause = self._known.get(timer)
        return 0.0 if pause is None else max(0.0, (pause.until - clocks.utc_now(clock)).total_seconds())

    async def _look(self, timer: str) -> bool:
        """Return whether the server has told."""
        with suppress(BackendError), clocks.move_on_after(self._backend.clock, LOOK_SECONDS):
            self._known[timer] = await self._read(timer)
            return True
        return False

    async def _read(self, timer: str) -> Pause | None:
        if self._bucket is None:
            self._bucket = await open_existing(self._backend, consumer_records.BUCKET, own=True)
        try:
            entry = await self._bucket.get(timer_pauses.key_of(self._app, timer)) if self._bucket else None
        except NotFoundError:  # the bucket was deleted
            self._bucket = entry = None
        return timer_pauses.read(entry)


class Claims:
    """Which ticks of a timer were begun, by any leader."""

    def __init__(
        self,
        timer: str,
        bucket: RetryingKeyValue,
        lease: Lease,
        outage: Outage,
        *,
        schedule: Schedule,
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
        self._series: tuple[datetime | None, datetime | None] = (None, None)
        """`since` and `before` of the last claim."""
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
        claim = self._read(entry)
        self._series = (claim.since, claim.before)
        if entry.message_id in self._in_doubt:
            self._last = self._in_doubt[entry.message_id]
        else:
            self._last = entry.time if claim.time - entry.time > MAX_SKEW else claim.time
            if claim.schedule not in ("", self._schedule.text):
                await self._begin(
                    max(self._last, now - timedelta(seconds=timers.LATE_SECONDS)), revision=entry.revision
                )
                self._events.emit(
                    TimerRescheduled(timer=self._timer, schedule=self._schedule.text, before=claim.schedule)
                )
        return self._last

    async def _begin(self, time: datetime, *, revision: int) -> None:
        """Store that ticks of this schedule that are due after this time are to be run."""
        claim = Claim(time=time, schedule=self._schedule.text, since=time)
        self._series = (time, None)
        self._revision = await self._bucket.put(self._timer, msgspec.json.encode(claim), revision=revision)
        self._last = time

    def _read(self, entry: Entry) -> Claim:
        """Return the claim; one of the time at which it was stored, where it is none of ours."""
        try:
            claim = read_json(entry.value, Claim)
            return structs.replace(claim, time=claim.time.astimezone(UTC))
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
        series = self._series if self._schedule.after(self._last) == tick else (tick, self._last)
        since, before = series
        claimed = Claim(time=tick, token=self.token, schedule=self._schedule.text, since=since, before=before)
        claim, message_id = msgspec.json.encode(claimed), secrets.token_hex(12)
        self._in_doubt[message_id] = self._last  # also while this may be cancelled
        try:
            self._revision = await self._bucket.put(self._timer, claim, revision=self._revision, message_id=message_id)
        except (UnavailableError, RefusedError):
            del self._in_doubt[message_id]
            raise
        self._in_doubt.clear()  # none of the earlier ones can be stored any more, on the revision before this one
        self._last, self._series = tick, series
        self._outage.end()
        return True

    def note_failure(self, error: BackendError) -> None:
        """Note that the claims could not be read or written; that another leader was faster is no outage."""
        if not isinstance(error, ConflictError):
            self._outage.begin(error)


async def _keep_ticking(
    timer: Timer[Any, Any],
    pauses: Pauses,
    clock: Clock,
    events: Events,
    stop: anyio.Event,
    claims: Claims | None,
) -> None:
    last = None if claims else clocks.utc_now(clock)
    while not stop.is_set():
        try:
            paused_seconds = await pauses.left_seconds(timer.name)
            now = clocks.utc_now(clock)
            if last is None or last - now > MAX_SKEW:  # at first, and after the clock was set back
                last = await claims.last(now) if claims else now
            tick = timers.next_tick(timer.schedule, last, now=now, catch_up=timer.catch_up)
            if tick > now:
                seconds = min((tick - now).total_seconds(), LONGEST_SLEEP_SECONDS)
                await clocks.sleep_until(clock, seconds, stop)
                continue
            if paused_seconds:  # the tick is missed if the pause goes on
                await clocks.sleep_until(clock, min(RESUME_SECONDS, paused_seconds), stop)
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
    late = (clocks.utc_now(clock) - tick.time).total_seconds()
    given = {timer.tick_argument: tick} if timer.tick_argument else {}

    async def run(given: Mapping[str, Any]) -> None:
        async with call_scope.opened(timer, {}) as opened:
            outputs.refuse_unpublished(f"timer {timer.name!r}", await timer.function(**given, **opened))

    returned = await calls.attempt_apart(run, given)
    error = returned.error if isinstance(returned, Failure) else None
    seconds = clock.monotonic() - began
    events.emit(Ticked(timer=timer.name, time=tick.time, late_seconds=late, seconds=seconds, error=error))
    del returned, error  # the frames of the traceback lead to this one, and would be kept until the next collection
