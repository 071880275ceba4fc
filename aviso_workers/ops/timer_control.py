"""Control of timers from outside of their workers: pause and resume, and which missed ticks are to be run.

Called by the commands `timers pause|resume|catch-up|run`, as `agent_control` is for agents.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

import msgspec
from msgspec import Struct

from aviso_workers.aviso.literals import time_text
from aviso_workers.backends import Admin
from aviso_workers.declare import timers
from aviso_workers.declare.timers import LATE_SECONDS, Timer
from aviso_workers.errors import DeclarationError
from aviso_workers.jetstream.key_value import compare_and_set
from aviso_workers.ops import audit
from aviso_workers.ops.agent_control import UNTIL_RESUMED
from aviso_workers.state import consumer_records, orders, timer_records, timer_requests
from aviso_workers.state.consumer_records import KeptBy
from aviso_workers.state.timer_requests import Pause, Run

MAX_TICKS = 10_000
"""Of one catch-up."""


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
    claim = (await timer_records.claims(admin, app)).get(timer.name) if timer.leader else None
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
