"""Timers from outside of their workers: how they are, pause and resume, and which missed ticks are to be run.

Called by the commands `timers ls|pause|resume|catch-up|run`, as `agent_control` is for agents. The schedules are the
code's; the rest is what workers have recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

import msgspec
from msgspec import Struct

from aviso_workers.aviso.literals import printable, time_text
from aviso_workers.backends import Admin
from aviso_workers.declare import timers
from aviso_workers.declare.timers import LATE_SECONDS, Timer, ticks_between
from aviso_workers.errors import DeclarationError
from aviso_workers.jetstream.key_value import compare_and_set
from aviso_workers.ops import audit
from aviso_workers.ops.agent_control import UNTIL_RESUMED, end_text
from aviso_workers.ops.health import PAUSED, Judgement, failing_text
from aviso_workers.state import (
    consumer_records,
    failure_records,
    lease_records,
    orders,
    timer_records,
    timer_requests,
    worker_records,
)
from aviso_workers.state.consumer_records import KeptBy
from aviso_workers.state.failure_records import LastFailure
from aviso_workers.state.lease_records import Leader
from aviso_workers.state.timer_requests import VOID_SECONDS, Pause, Run
from aviso_workers.state.worker_records import AppWorkers

MAX_TICKS = 10_000
"""Of one catch-up."""
NO_LEADER = timedelta(seconds=60)
"""For so long it may be that none leads, as after the leader was killed."""
TAKES_LEAD = timedelta(seconds=12)
"""Within so long after it has started, a worker leads where no other one does."""
LAST = UNTIL_RESUMED - timedelta(seconds=1)
"""The last time at which a tick is listed: there is none after a pause without end."""


class PlannedTick(Struct, frozen=True):
    """A tick in the range of a catch-up."""

    time: datetime
    left_out: str = ""
    """Why it is not run; empty where it is."""


def declared(app: str, timers: Sequence[Timer[Any, Any]], timer: str) -> Timer[Any, Any]:
    """Return the timer of this name. Raises `DeclarationError`."""
    for known in timers:
        if known.name == timer:
            return known
    names = ", ".join(known.name for known in timers)
    raise DeclarationError(f"app {app!r} has no timer {timer!r}; it has: {names or 'none'}")


async def pause(
    admin: Admin,
    app: str,
    timer: str,
    *,
    until: datetime | None = None,
    seconds: float | None = None,
    by: str = "",
    note: str = "",
) -> Pause:
    """Pause the timer until this time, or for so long by the server's clock, or until it is resumed: no worker runs its
    ticks. A later pause replaces an earlier one. Return the pause.

    Raises `DeclarationError` where the time is over, `BackendError`.
    """
    bucket = await orders.bucket(admin, app)
    now = await bucket.time()
    if until is None:
        until = UNTIL_RESUMED if seconds is None else now + timedelta(seconds=seconds)
    if until <= now:
        raise DeclarationError(f"the pause would end at {time_text(until)}, which is over: say a later time")
    made = Pause(since=now, until=until, by=by or audit.this_user(), note=note)
    await bucket.put(timer_requests.pause_key(app, timer), msgspec.json.encode(made))
    return made


async def resume(admin: Admin, app: str, timer: str) -> None:
    """Resume the timer. Raises `BackendError`."""
    await timer_requests.withdraw(admin, app, timer_requests.pause_key(app, timer))


async def ask(admin: Admin, app: str, timer: str, *, by: str = "") -> Run:
    """Ask the workers of the app to run the timer at once, also where it is paused, and return what is recorded.

    Raises `DeclarationError` where somebody else has asked and no worker has taken that yet, `BackendError`.
    """
    bucket, taken = await orders.bucket(admin, app), await _runs(admin, app, "state")
    now = await bucket.time()

    def change(runs: dict[str, Run]) -> dict[str, Run]:
        known = timer_requests.with_taken(runs, taken).get(timer)
        if known and known.is_open(now):
            raise DeclarationError(f"{known.by} has asked for a run of {timer} already, and no worker has taken it yet")
        asked = max(now, known.asked + timedelta.resolution) if known else now  # no two runs have the same time
        return {**runs, timer: Run(asked=asked, by=by or audit.this_user())}

    _, runs = await compare_and_set(bucket, timer_requests.runs_key(app), read=timer_requests.read_runs, change=change)
    return runs[timer]


async def asked(admin: Admin, app: str, timer: str) -> Run | None:
    """Return the last run of the timer that somebody has asked for. Raises `BackendError`."""
    wanted, taken = await _runs(admin, app, "orders"), await _runs(admin, app, "state")
    return timer_requests.with_taken(wanted, taken).get(timer)


async def plan_catch_up(
    admin: Admin, app: str, timer: Timer[Any, Any], first: datetime, last: datetime, *, again: bool = False
) -> list[PlannedTick]:
    """Return the ticks from `first` to `last`, both included, in order. `again`: none is left out.

    Raises `DeclarationError` for a range that is reversed, not over, or of too many ticks, `BackendError`.
    """
    now = await consumer_records.time(admin, app)
    of = f"from {time_text(first)} to {time_text(last)}"
    if not first <= last <= now:
        raise DeclarationError(f"the range {of} must end after it begins, and by now ({time_text(now)})")
    ticks = list(islice(timers.ticks_between(timer.schedule, first, last), MAX_TICKS + 1))
    if len(ticks) > MAX_TICKS:
        raise DeclarationError(
            f"{timer.name} has more than {MAX_TICKS} ticks {of}; that of {time_text(ticks[-2])} is the {MAX_TICKS}th: "
            "say an earlier end"
        )
    if again:
        return [PlannedTick(tick) for tick in ticks]
    claim = (await timer_records.claims(admin, app)).get(timer.name) if timer.singleton else None
    late = now - timedelta(seconds=LATE_SECONDS)
    if claim and timer.catch_up:
        late = min(late, claim.time)

    def why_not(tick: datetime) -> str:
        if claim and claim.may_have_begun(tick):
            return "left out: a leader has begun it, or may have"
        return "left out: workers run it by themselves" if tick > late else ""

    return [PlannedTick(tick, why_not(tick)) for tick in ticks]


async def _runs(admin: Admin, app: str, kind: KeptBy) -> dict[str, Run]:
    return timer_requests.read_runs(await consumer_records.entry(admin, timer_requests.runs_key(app), kind=kind))


class TimerRow(Struct, frozen=True, kw_only=True):
    """The report on one timer."""

    timer: str
    schedule: str
    leader: str
    """The host and the process that run it; `none` where nobody leads, `every worker` with `singleton=False`."""
    last: datetime | None
    """When the last tick was due that a leader has begun; None where that is not known."""
    next: tuple[datetime, ...]
    """The next ticks, behind a pause with an end; none where the timer is paused until it is resumed."""
    paused: Pause | None = None
    """The pause that lasts."""
    state: str
    """`ok`, `paused`, or what is wrong with it and why."""
    needs: bool = False
    """Whether somebody should look at it."""


async def rows(admin: Admin, app: str, timers: Sequence[Timer[Any, Any]], *, ticks: int) -> list[TimerRow]:
    """Return a row for each timer, with so many next ticks. Raises `BackendError`."""
    leader = await lease_records.leader(admin, app)
    claims = await timer_records.claims(admin, app)
    noted = await consumer_records.entries_of(admin, app)
    failures = failure_records.parsed(noted)
    now = await consumer_records.time(admin, app)  # after that: the last tick is none of the next ones
    pauses = timer_requests.pauses(await consumer_records.entries_of(admin, app, kind="orders"), now=now)
    workers = await worker_records.of_app(admin, app)
    rows = []
    for timer in timers:
        pause, claim = pauses.get((app, timer.name)), claims.get(timer.name)
        first = pause.until if pause else now
        found = judge(
            timer.name,
            leader=leader if timer.singleton and claim is not None and claim.token else None,
            workers=workers,
            failure=failures.get((app, "timers", timer.name)),
            pause=pause,
            now=now,
        )
        rows.append(
            TimerRow(
                timer=timer.name,
                schedule=timer.schedule.text,
                leader=(leader.name or "none") if timer.singleton else "every worker",
                last=claim.time if claim and claim.token else None,
                next=tuple(islice(ticks_between(timer.schedule, first, LAST), ticks)) if first <= LAST else (),
                paused=pause,
                state=found.text,
                needs=found.needs,
            )
        )
    return rows


def judge(
    timer: str,
    *,
    leader: Leader | None,
    workers: AppWorkers,
    failure: LastFailure | None,
    pause: Pause | None,
    now: datetime,
) -> Judgement:
    """Return how a timer is. `leader` says who leads the timers of its app; None where each worker runs it by itself,
    or it has not run yet."""
    leads = leader.name if leader is not None else None
    if leader is not None and not leads and workers.living:
        started = min(each.started for each in workers.living)
        since = leader.renewed or started
        needs = now - since >= NO_LEADER and now - started >= TAKES_LEAD
        why = f"no worker leads the timers of its app since {time_text(since)}"
        return Judgement(state="no leader", since=since, why=why, needs=needs)
    leading = [each for each in workers.living if f"{each.host}:{each.process}" == leads]
    if leading and not any(each.timers is None or timer in each.timers for each in leading):
        why = f"its next tick will not run: {leads} leads, whose code does not have it"
        return Judgement(state="not run", why=why, needs=True)
    if failure is not None and failure.until > now:
        return Judgement(state="failing", since=failure.since, why=failing_text(failure), needs=True)
    if leads == "":
        heard = max((each.since(0) for each in (*workers.lost, *workers.ended)), default=None)
        last = f"; the last record of one is of {time_text(heard)}" if heard else ""
        return Judgement(state="at rest", since=heard, why=f"no worker of its app runs{last}")
    return Judgement(state=PAUSED) if pause is not None else Judgement(state="ok")


def paused_text(pause: Pause) -> str:
    """Return until when, since when and by whom a timer is paused."""
    note = f": {pause.note}" if pause.note else ""
    return printable(f"paused until {end_text(pause.until)}, since {time_text(pause.since)} by {pause.by}{note}")


def run_text(run: Run, *, void: bool) -> str:
    """Return what has become of a run that somebody has asked for; `void`: no worker may take it any more."""
    if run.seconds is not None:
        how = f"failed after {run.seconds:.1f} s: {run.error}" if run.error else f"done in {run.seconds:.1f} s"
    else:
        how = "which has not recorded its end"
    if run.worker:
        return printable(f"taken by {run.worker}, {how}")
    why = "none runs the timer, or it cannot record that, or it is too old to"
    none = f"no worker has taken it within {VOID_SECONDS:g} s, and none will: {why}"
    return none if void else "no worker has taken it yet"
