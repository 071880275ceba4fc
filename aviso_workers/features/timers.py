"""Timers at work: every worker runs its own, and of those with `singleton=True` one worker of the fleet runs all.

The leader holds a lease (`engine.leases`), and each tick is claimed before it is run, by a put on the revision of the
claim before: of two leaders, one succeeds. What was claimed is kept, and tells the next leader what was missed.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import msgspec
from msgspec import Struct, structs

from aviso_workers import clocks
from aviso_workers.aviso.codec import read_json
from aviso_workers.backends import Backend
from aviso_workers.backends.buckets import open_existing
from aviso_workers.clocks import Clock
from aviso_workers.declare import outputs, timers
from aviso_workers.declare.timers import Schedule, Tick, Timer
from aviso_workers.declare.verdicts import Failure
from aviso_workers.engine import calls
from aviso_workers.engine.key_value import RetryingKeyValue
from aviso_workers.engine.leases import Lease, Outage, drained
from aviso_workers.errors import (
    BackendError,
    ConflictError,
    NotFoundError,
    RefusedError,
    UnavailableError,
    UndecodableError,
    describe,
)
from aviso_workers.events import (
    Events,
    LeadershipChanged,
    Ticked,
    TimerRescheduled,
    Unreadable,
)
from aviso_workers.jetstream.key_value import Entry, KeyValue, compare_and_set
from aviso_workers.state import consumer_records, orders, timer_records, timer_requests
from aviso_workers.state.timer_records import Claim
from aviso_workers.state.timer_requests import Pause, Run

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
ASKED_SECONDS = 5.0
"""How often it is looked whether somebody has asked for a run."""
MAX_ERROR = 500
"""Characters of an error that are recorded."""
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
    own, led = ([timer for timer in declared if timer.singleton is one] for one in (False, True))
    control = Control(backend, app, timers={timer.name for timer in own})
    async with drained(stop, clock=clock, timeout_seconds=drain_timeout_seconds), anyio.create_task_group() as running:
        running.start_soon(control.keep_looking, stop)
        for timer in own:
            running.start_soon(_keep_ticking, timer, control, clock, events, stop, None)
        if led:
            running.start_soon(_lead, led, control, backend, app, events, stop)


async def _lead(
    led: Sequence[Timer[Any, Any]], control: Control, backend: Backend, app: str, events: Events, stop: anyio.Event
) -> None:
    """Run these whenever this worker is the leader."""
    clock = backend.clock
    bucket = timer_records.bucket_of(app)
    claims = RetryingKeyValue(backend, bucket, patience_seconds=PATIENCE_SECONDS, own=True)
    outage = Outage(bucket, clock=clock, events=events)
    lease = Lease(backend, app, events=events)
    in_doubt: defaultdict[str, dict[str, datetime]] = defaultdict(dict)
    names = {timer.name for timer in led}
    while await lease.take(stop):
        control.timers |= names
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
                running.start_soon(_keep_ticking, timer, control, clock, events, stop, of_timer)
        control.timers -= names
        outage.end()  # only a leader claims ticks
        events.emit(LeadershipChanged(leads=False, token=lease.token))


async def run_now(timer: Timer[Any, Any], *, time: datetime, clock: Clock, events: Events) -> None:
    """Run a timer once, as if it was due at this time, and emit `Ticked`. `Tick.token` is None: no leader runs it."""
    await _run(timer, Tick(timer=timer.name, time=time), clock, events)


class Control:
    """What operators have ordered for the timers of an app, as far as this worker knows: pauses, and runs at once."""

    def __init__(self, backend: Backend, app: str, *, timers: set[str]) -> None:
        self.timers = timers
        """Those that this worker runs now."""
        self.news = anyio.Event()
        """Set when a run is asked for, and when the worker stops."""
        self._backend = backend
        self._app = app
        self._bucket: KeyValue | None = None
        self._known: dict[str, Pause | None] = {}
        self._ahead = timedelta()
        """By how much the server's clock is ahead of ours, as far as is known."""
        self._again_at = -math.inf
        self._asked: dict[str, Run] = {}
        self._over: dict[str, Run] = {}
        """By timer, the last run that this worker may not take any more, because it is too old or was taken."""
        self._worker = f"{socket.gethostname()}:{os.getpid()}"
        records = consumer_records.bucket_of(app)
        self._records = RetryingKeyValue(backend, records, patience_seconds=PATIENCE_SECONDS, own=True)

    async def left_seconds(self, timer: str) -> float:
        """Return for how long the timer is paused; 0 where it is not. Where the server does not tell, what it told last
        holds; where it has told nothing yet, the timer is not paused.
        """
        if told := await self._look(timer_requests.pause_key(self._app, timer)):
            self._known[timer] = timer_requests.read_pause(*told)
        if (pause := self._known.get(timer)) is None:
            return 0.0
        if told:
            with suppress(BackendError), clocks.move_on_after(self._backend.clock, LOOK_SECONDS):
                self._ahead = await consumer_records.time(self._backend, self._app) - clocks.utc_now(
                    self._backend.clock
                )
        return max(0.0, (pause.until - clocks.utc_now(self._backend.clock) - self._ahead).total_seconds())

    async def keep_looking(self, stop: anyio.Event) -> None:
        """Look again and again which runs are asked for, until `stop`."""
        while not stop.is_set():
            if self.timers and (told := await self._look(timer_requests.runs_key(self._app))):
                found = {timer: run for timer, run in timer_requests.read_runs(*told).items() if timer in self.timers}
                self._asked = {timer: run for timer, run in found.items() if run != self._over.get(timer)}
            if self._asked:
                self.news.set()
                self.news = anyio.Event()
            await clocks.sleep_until(self._backend.clock, ASKED_SECONDS, stop)
        self.news.set()

    async def take(self, timer: str) -> Run | None:
        """Return the run of the timer that is asked for, and this worker's from now on; None where there is none, it is
        void, another worker was faster, or it cannot be recorded that it is taken.
        """
        if (asked := self._asked.pop(timer, None)) is None:
            return None
        with suppress(BackendError):
            is_open = asked.is_open(await self._records.time())
            taken = structs.replace(asked, worker=self._worker)
            is_ours = is_open and await self.record(timer, taken)
            self._over[timer] = asked
            return taken if is_ours else None
        return None

    async def record(self, timer: str, run: Run, *, taken: Run | None = None) -> bool:
        """Return whether a run could be recorded: that it is taken, where no worker has taken it or a later one, or the
        end of one that this worker has `taken`. Raises `BackendError`.
        """

        def change(runs: dict[str, Run]) -> dict[str, Run]:
            known = runs.get(timer)
            is_before = known is None or known == taken or known.asked < run.asked
            return {**runs, timer: run} if is_before else runs

        key = timer_requests.runs_key(self._app)
        before, after = await compare_and_set(self._records, key, read=timer_requests.read_runs, change=change)
        return after != before

    async def _look(self, key: str) -> tuple[Entry | None] | None:
        """Return the entry of a key, if there is one; None where the server does not tell in time, or tells what nobody
        of us has written, in the place of an order that may stand.
        """
        clock = self._backend.clock
        if not self._backend.connection.ready or clock.monotonic() < self._again_at:
            return None
        with suppress(BackendError), clocks.move_on_after(clock, LOOK_SECONDS):
            entry = await self._entry(key)
            return None if entry and entry.foreign else (None if entry is None or entry.deleted else entry,)
        self._again_at = clock.monotonic() + LOOK_AGAIN_SECONDS
        return None

    async def _entry(self, key: str) -> Entry | None:
        if self._bucket is None:
            self._bucket = await open_existing(self._backend, orders.bucket_of(self._app), own=True)
        try:
            return await self._bucket.newest(key) if self._bucket else None
        except NotFoundError:  # the bucket was deleted
            self._bucket = None
            return None


class Claims(Struct, eq=False):
    """Which ticks of a timer were begun, by any leader."""

    timer: str
    bucket: RetryingKeyValue
    lease: Lease
    outage: Outage
    schedule: Schedule
    in_doubt: dict[str, datetime]
    """By message id: the claims of which it is not known whether they were stored, and the last tick that was claimed
    before each. It is kept for the next time that this worker leads."""
    events: Events
    revision: int = 0
    claimed: datetime | None = None
    """The last tick that is known to be claimed; None before anything is known."""
    series: tuple[datetime | None, datetime | None] = (None, None)
    """`since` and `before` of the last claim."""

    @property
    def token(self) -> int:
        return self.lease.token

    async def last(self, now: datetime) -> datetime:
        """After which the next tick is to be run: `now`, where the timer is new.

        A claim that a clock made which was ahead is believed up to the time at which the bucket stored it. Otherwise a
        leader that is an hour ahead would silence its successors for an hour. A claim of our own that was in doubt and
        is stored counts as none: its tick was not run. Where the bucket was deleted since our last claim, or there is a
        foreign value in its place, that counts; where we know of none, the time when the foreign value was stored.

        A claim by another schedule tells nothing of the ticks that this one has missed: it begins now, with a tick that
        is not late by more than `LATE_SECONDS`.
        """
        entry = await self.bucket.newest(self.timer)
        if entry is None or entry.deleted:
            stored = entry.time if entry is not None and entry.foreign else now
            begin = min(self.claimed if self.claimed is not None and self.lease.held else stored, now)
            await self._begin(begin, revision=entry.revision if entry else 0)
            return begin
        self.revision = entry.revision
        claim = self._read(entry)
        self.series = (claim.since, claim.before)
        if entry.message_id in self.in_doubt:
            self.claimed = self.in_doubt[entry.message_id]
        else:
            self.claimed = entry.time if claim.time - entry.time > MAX_SKEW else claim.time
            if claim.schedule != self.schedule.text:
                await self._begin(
                    max(self.claimed, now - timedelta(seconds=timers.LATE_SECONDS)), revision=entry.revision
                )
                self.events.emit(TimerRescheduled(timer=self.timer, schedule=self.schedule.text, before=claim.schedule))
        return self.claimed

    async def _begin(self, time: datetime, *, revision: int) -> None:
        """Store that ticks of this schedule that are due after this time are to be run."""
        claim = Claim(time=time, schedule=self.schedule.text, since=time)
        self.series = (time, None)
        self.revision = await self.bucket.put(self.timer, msgspec.json.encode(claim), revision=revision)
        self.claimed = time

    def _read(self, entry: Entry) -> Claim:
        """Return the claim; one of the time at which it was stored, where it is none of ours."""
        try:
            claim = read_json(entry.value, Claim)
            return structs.replace(claim, time=claim.time.astimezone(UTC))
        except (UndecodableError, OverflowError) as error:
            self.events.emit(Unreadable(stream=f"KV_{self.bucket.name}", sequence=entry.revision, error=error))
            return Claim(time=entry.time, schedule=self.schedule.text)

    async def claim(self, tick: datetime) -> bool:
        """Return whether it is ours to run. Raises `ConflictError` where another leader has claimed one since, or where
        an earlier claim of our own was stored late.
        """
        if not self.lease.held:
            return False
        assert self.claimed is not None, "only after `last`"
        series = self.series if self.schedule.after(self.claimed) == tick else (tick, self.claimed)
        since, before = series
        made = Claim(time=tick, token=self.token, schedule=self.schedule.text, since=since, before=before)
        claim, message_id = msgspec.json.encode(made), secrets.token_hex(12)
        self.in_doubt[message_id] = self.claimed  # also while this may be cancelled
        try:
            self.revision = await self.bucket.put(self.timer, claim, revision=self.revision, message_id=message_id)
        except (UnavailableError, RefusedError):
            del self.in_doubt[message_id]
            raise
        self.in_doubt.clear()  # none of the earlier ones can be stored any more, on the revision before this one
        self.claimed, self.series = tick, series
        self.outage.end()
        return True

    def note_failure(self, error: BackendError) -> None:
        """Note that the claims could not be read or written; that another leader was faster is no outage."""
        if not isinstance(error, ConflictError):
            self.outage.begin(error)


async def _keep_ticking(
    timer: Timer[Any, Any],
    control: Control,
    clock: Clock,
    events: Events,
    stop: anyio.Event,
    claims: Claims | None,
) -> None:
    last = None if claims else clocks.utc_now(clock)
    while not stop.is_set():
        try:
            await _run_asked(timer, control, clock, events, claims)
            paused_seconds = await control.left_seconds(timer.name)
            now = clocks.utc_now(clock)
            if last is None or last - now > MAX_SKEW:  # at first, and after the clock was set back
                last = await claims.last(now) if claims else now
            tick = timers.next_tick(timer.schedule, last, now=now, catch_up=timer.catch_up)
            if tick > now:
                seconds = min((tick - now).total_seconds(), LONGEST_SLEEP_SECONDS)
                await clocks.sleep_until(clock, seconds, control.news)
                continue
            if paused_seconds:  # the tick is missed if the pause goes on
                await clocks.sleep_until(clock, min(RESUME_SECONDS, paused_seconds), control.news)
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


async def _run_asked(
    timer: Timer[Any, Any], control: Control, clock: Clock, events: Events, claims: Claims | None
) -> None:
    """Run the timer at once, where somebody has asked for that and no other worker was faster."""
    if run := await control.take(timer.name):
        tick = Tick(timer=timer.name, time=run.asked, token=claims.token if claims else None)
        seconds, error = await _run(timer, tick, clock, events)
        with suppress(BackendError):  # it stays recorded as taken
            ended = structs.replace(run, seconds=seconds, error=error[:MAX_ERROR])
            await control.record(timer.name, ended, taken=run)


async def _run(timer: Timer[Any, Any], tick: Tick, clock: Clock, events: Events) -> tuple[float, str]:
    """Run the timer, and return for how long, and why it failed; empty where it has not."""
    began = clock.monotonic()
    late = (clocks.utc_now(clock) - tick.time).total_seconds()
    given = {timer.tick_argument: tick} if timer.tick_argument else {}

    async def run(given: Mapping[str, Any]) -> None:
        async with calls.around(timer, {}) as opened:
            outputs.refuse_unpublished(f"timer {timer.name!r}", await timer.function(**given, **opened))

    returned = await calls.attempt_apart(run, given)
    error = returned.error if isinstance(returned, Failure) else None
    seconds = clock.monotonic() - began
    events.emit(Ticked(timer=timer.name, time=tick.time, late_seconds=late, seconds=seconds, error=error))
    said = describe(error) if error is not None else ""
    del returned, error  # the frames of the traceback lead to this one, and would be kept until the next collection
    return seconds, said
