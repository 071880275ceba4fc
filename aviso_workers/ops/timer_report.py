"""The report on the timers of an app: when they run next, how they ran last, and which worker leads.

Called by the command `timers ls`. The schedules are the code's; the rest is what workers have recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from aviso_workers.backends import Admin
from aviso_workers.declare.timers import Timer
from aviso_workers.ops.agent_report import failing_text
from aviso_workers.state import failure_records, timer_records

__all__ = ["TimerRow", "of_app"]

SHOWN = 3
"""Next ticks."""


class TimerRow(Struct, frozen=True, kw_only=True):
    """The report on one timer."""

    timer: str
    schedule: str
    leader: str
    """The host and the process that run it; `none` where nobody leads, `every worker` without `leader=True`."""
    last: datetime | None
    """When the last tick was due that a leader has begun; None where that is not known."""
    next: tuple[datetime, ...]
    state: str
    """`ok`, or since when and how it fails."""


async def of_app(admin: Admin, app: str, timers: Sequence[Timer[Any, Any]]) -> list[TimerRow]:
    """Return a row for each timer. Raises `BackendError`."""
    leader = await timer_records.leader(admin, app) or "none"
    claimed = await timer_records.claimed(admin, app)
    failures = await failure_records.stored(admin)
    now = datetime.now(UTC)  # after that: the last tick is none of the next ones
    rows = []
    for timer in timers:
        ticks = [now]
        for _ in range(SHOWN):
            ticks.append(timer.schedule.after(ticks[-1]))
        failure = failures.get((app, "timers", timer.name))
        rows.append(
            TimerRow(
                timer=timer.name,
                schedule=timer.schedule.text,
                leader=leader if timer.leader else "every worker",
                last=claimed.get(timer.name),
                next=tuple(ticks[1:]),
                state=failing_text(failure) if failure and failure.until > now else "ok",
            )
        )
    return rows
