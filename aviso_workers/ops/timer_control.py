"""Control of timers from outside of their workers: pause and resume, and which missed ticks are to be run.

Called by the commands `timers pause|resume|catch-up`, as `agent_control` is for agents.
"""

from __future__ import annotations

import getpass
import socket
from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

from msgspec import Struct

from aviso_workers import clocks
from aviso_workers.aviso.literals import time_text
from aviso_workers.backends import Admin
from aviso_workers.declare import timers
from aviso_workers.declare.timers import LATE_SECONDS, Timer
from aviso_workers.errors import DeclarationError
from aviso_workers.ops.agent_control import UNTIL_RESUMED
from aviso_workers.state import consumer_records, timer_pauses, timer_records
from aviso_workers.state.timer_pauses import Pause

__all__ = ["CatchUp", "declared", "pause", "plan_catch_up", "resume"]

MAX_TICKS = 10_000
"""Of one catch-up."""


class CatchUp(Struct, frozen=True, kw_only=True):
    """The plan of a catch-up: the ticks of a range, each when it was due."""

    times: tuple[datetime, ...]
    """Those to run, in order."""
    begun: tuple[datetime, ...] = ()
    """Those that a leader has begun, or that are not known to be missed."""
    ahead: tuple[datetime, ...] = ()
    """Those that workers run by themselves: of the last minute, or missed ones of a timer with `catch_up`."""


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
    note: str = "",
) -> Pause:
    """Pause the timer until this time, or for so long by the server's clock, or until it is resumed: no worker runs its
    ticks. A later pause replaces an earlier one. Return the pause.

    Raises `DeclarationError` where the time is over, `BackendError`.
    """
    now = await (await consumer_records.bucket(admin)).time()
    if until is None:
        until = UNTIL_RESUMED if seconds is None else now + timedelta(seconds=seconds)
    if until <= now:
        raise DeclarationError(f"the pause would end at {time_text(until)}, which is over: say a later time")
    made = Pause(since=now, until=until, by=f"{_user()}@{socket.gethostname()}", note=note)
    await timer_pauses.write(admin, made, app=app, timer=timer)
    return made


async def resume(admin: Admin, app: str, timer: str) -> None:
    """Resume the timer. Raises `BackendError`."""
    await timer_pauses.remove(admin, app=app, timer=timer)


async def plan_catch_up(
    admin: Admin, app: str, timer: Timer[Any, Any], first: datetime, last: datetime, *, again: bool = False
) -> CatchUp:
    """Return which ticks to run of those from `first` to `last`, both included; `again`: also those that a leader has
    begun, or that workers run by themselves.

    Raises `DeclarationError` for a range that is reversed, not over, or of too many ticks, `BackendError`.
    """
    now = clocks.utc_now(admin.clock)
    if not first <= last <= now:
        raise DeclarationError(
            f"the range from {time_text(first)} to {time_text(last)} must end after it begins, and by now "
            f"({time_text(now)})"
        )
    ticks = list(islice(timers.ticks_between(timer.schedule, first, last), MAX_TICKS + 1))
    if len(ticks) > MAX_TICKS:
        raise DeclarationError(
            f"{timer.name} has more than {MAX_TICKS} ticks from {time_text(first)} to {time_text(last)}; its "
            f"{MAX_TICKS}th is that of {time_text(ticks[-2])}: say an earlier end"
        )
    claim = (await timer_records.claims(admin, app)).get(timer.name) if timer.leader and not again else None
    begun = [tick for tick in ticks if claim and claim.may_have_begun(tick)]
    late = now if again else now - timedelta(seconds=LATE_SECONDS)
    if claim and timer.catch_up:
        late = min(late, claim.time)
    ahead = [tick for tick in ticks if tick > late and tick not in begun]
    left = {*begun, *ahead}
    return CatchUp(times=tuple(tick for tick in ticks if tick not in left), begun=tuple(begun), ahead=tuple(ahead))


def _user() -> str:
    try:
        return getpass.getuser()
    except (ImportError, KeyError, OSError):  # a user without a name, as in a container
        return "unknown"
