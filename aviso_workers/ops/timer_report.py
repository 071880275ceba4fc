"""The report on the timers of an app: when they run next, how they ran last, and which worker leads.

Called by the command `timers ls`. The schedules are the code's; the rest is what workers have recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

from msgspec import Struct

from aviso_workers.aviso.literals import printable, time_text
from aviso_workers.backends import Admin
from aviso_workers.declare.timers import Timer, ticks_between
from aviso_workers.ops.agent_control import UNTIL_RESUMED, end_text
from aviso_workers.ops.health import PAUSED, Judgement, failing_text
from aviso_workers.state import (
    consumer_records,
    failure_records,
    lease_records,
    timer_records,
    timer_requests,
    worker_records,
)
from aviso_workers.state.failure_records import LastFailure
from aviso_workers.state.lease_records import Leader
from aviso_workers.state.timer_requests import VOID_SECONDS, Pause, Run
from aviso_workers.state.worker_records import AppWorkers

NO_LEADER = timedelta(seconds=60)
"""For so long it may be that none leads, as after the leader was killed."""
TAKES_LEAD = timedelta(seconds=12)
"""Within so long after it has started, a worker leads where no other one does."""
LAST = UNTIL_RESUMED - timedelta(seconds=1)
"""The last time at which a tick is listed: there is none after a pause without end."""


class TimerRow(Struct, frozen=True, kw_only=True):
    """The report on one timer."""

    timer: str
    schedule: str
    leader: str
    """The host and the process that run it; `none` where nobody leads, `every worker` without `leader=True`."""
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


async def of_app(admin: Admin, app: str, timers: Sequence[Timer[Any, Any]], *, ticks: int) -> list[TimerRow]:
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
            leader=leader if timer.leader and claim is not None and claim.token else None,
            workers=workers,
            failure=failures.get((app, "timers", timer.name)),
            pause=pause,
            now=now,
        )
        rows.append(
            TimerRow(
                timer=timer.name,
                schedule=timer.schedule.text,
                leader=(leader.name or "none") if timer.leader else "every worker",
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
