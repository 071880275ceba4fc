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
from aviso_workers.ops.agent_report import failing_text
from aviso_workers.state import consumer_records, failure_records, lease_records, timer_records, timer_requests
from aviso_workers.state.timer_requests import VOID_SECONDS, Pause, Run

__all__ = ["TimerRow", "of_app", "paused_text", "run_text"]

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
    """`ok`, or since when and how it fails."""


async def of_app(admin: Admin, app: str, timers: Sequence[Timer[Any, Any]], *, ticks: int) -> list[TimerRow]:
    """Return a row for each timer, with so many next ticks. Raises `BackendError`."""
    leader = await lease_records.leader(admin, app) or "none"
    claims = await timer_records.claims(admin, app)
    noted = await consumer_records.entries(admin)
    failures = failure_records.parsed(noted)
    now = await consumer_records.time(admin)  # after that: the last tick is none of the next ones
    pauses = timer_requests.pauses(noted, now=now)
    rows = []
    for timer in timers:
        pause, claim = pauses.get((app, timer.name)), claims.get(timer.name)
        first = pause.until if pause else now
        failure = failures.get((app, "timers", timer.name))
        rows.append(
            TimerRow(
                timer=timer.name,
                schedule=timer.schedule.text,
                leader=leader if timer.leader else "every worker",
                last=claim.time if claim and claim.token else None,
                next=tuple(islice(ticks_between(timer.schedule, first, LAST), ticks)) if first <= LAST else (),
                paused=pause,
                state=failing_text(failure) if failure and failure.until > now else "ok",
            )
        )
    return rows


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
