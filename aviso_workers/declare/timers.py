"""Timers: functions that are run at certain times, and which times these are.

Pure. A timer's ticks follow from its schedule and nothing else, so that every worker of a fleet knows of the same ones
without asking; who runs them is `features.timers`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, ParamSpec, Protocol, TypeVar
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from msgspec import Struct

from aviso_workers.aviso import literals
from aviso_workers.aviso.literals import AnyDuration, Duration
from aviso_workers.clocks import EPOCH
from aviso_workers.declare import resources
from aviso_workers.declare.resources import Resource
from aviso_workers.errors import DeclarationError

P = ParamSpec("P")
R = TypeVar("R")

LATE_SECONDS = 60.0
"""A tick that is no later than this is run; beyond it, it was missed."""


class Tick(Struct, frozen=True, kw_only=True):
    """One of the times at which a timer is run."""

    timer: str
    time: datetime
    """The time at which it was due, in UTC."""
    token: int | None = None
    """The fencing token of a timer with `singleton=True`, which is greater than that of every earlier leader. A
    database that is given it can refuse a leader that was paused and does not know yet that there is another one."""


class Schedule(Protocol):
    @property
    def text(self) -> str:
        """The schedule as it is stored and logged; two schedules with the same text have the same ticks."""

    def after(self, time: datetime) -> datetime:
        """Return the first tick after this time, UTC."""


class Every(Struct, frozen=True):
    """A schedule at whole multiples of an interval since 1970 UTC."""

    interval: Duration

    @property
    def text(self) -> str:
        return f"every {int(self.interval)}s"

    def after(self, time: datetime) -> datetime:
        interval = timedelta(seconds=self.interval)
        return EPOCH + ((time - EPOCH) // interval + 1) * interval


class Cron(Struct, frozen=True):
    """A cron expression as Debian's cron reads it. A sixth field in front is for seconds.

    Where clocks are changed, an hour that is left out is made up for right after it, one that comes twice counts once.
    """

    expression: str
    timezone: ZoneInfo

    @property
    def text(self) -> str:
        return f"cron {self.expression} {self.timezone.key}"

    def after(self, time: datetime) -> datetime:
        for found in CronSim(self.expression, time.astimezone(self.timezone)):
            if (tick := found.astimezone(UTC)) > time:
                return tick
        raise DeclarationError(f"cron {self.expression!r} comes to no further time")


class Timer(Generic[P, R]):
    """A decorated function with the times at which it is run.

    A call of it runs the author's function and nothing else.
    """

    def __init__(
        self, function: Callable[P, R], *, name: str, schedule: Schedule, singleton: bool, catch_up: bool
    ) -> None:
        self.function = function
        if not inspect.iscoroutinefunction(function):
            raise DeclarationError(f"timer {name!r}: must be an async function")
        if not isinstance(singleton, bool):
            raise DeclarationError(f"timer {name!r}: singleton= must be True or False, found {singleton!r:.100}")
        what = f"timer {name!r}"
        ticks = [argument for argument, hint in resources.hints_of(what, function).items() if hint is Tick]
        self.tick_argument = ticks[0] if ticks else None
        self.needs: Mapping[str, Any] = resources.needs_of(what, function, without=ticks[:1])
        """By argument, the type of the resource that gives it."""
        self.around: Sequence[Resource] = ()
        """The resources that are opened around each tick, the outermost first; `App._timers_at_work` says it."""
        self.name = name
        self.schedule = schedule
        self.singleton = singleton
        self.catch_up = catch_up
        self.__doc__ = function.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        function: Callable[P, R] = self.function
        return function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Timer {self.name}>"


def every(interval: AnyDuration) -> Every:
    """Return the schedule of an interval such as `10m`. Raises ValueError."""
    seconds = literals.seconds_of(interval)
    if not isinstance(seconds, int):
        raise ValueError(f"the interval must be whole seconds, found {interval!r}")
    if seconds <= 0:
        raise ValueError("the interval must be longer than 0 seconds")
    return Every(Duration(seconds))


def cron(expression: str, timezone: str) -> Cron:
    """Return the schedule of a cron expression in a time zone. Raises ValueError."""
    try:
        zone = ZoneInfo(timezone)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise ValueError(
            f"no time zone {timezone!r}; say one such as Europe/Berlin, and install tzdata where a machine has none"
        ) from error
    try:
        next(CronSim(expression, EPOCH))
    except CronSimError as error:
        raise ValueError(f"cron {expression!r}: {error}") from error
    except StopIteration:
        raise ValueError(f"cron {expression!r} never comes") from None
    return Cron(expression, zone)


def next_tick(schedule: Schedule, last: datetime, *, now: datetime, catch_up: bool) -> datetime:
    """Return the tick to run after `last`; one that is not later than `now` is to be run at once.

    To catch up is to run all that were missed, the oldest first. Otherwise of those that were missed the newest is run,
    if it is not late by more than `LATE_SECONDS`.
    """
    tick = schedule.after(last)
    if catch_up or tick > now:
        return tick
    tick = schedule.after(max(last, now - timedelta(seconds=LATE_SECONDS)))
    while (later := schedule.after(tick)) <= now:
        tick = later
    return tick


def ticks_between(schedule: Schedule, first: datetime, last: datetime) -> Iterator[datetime]:
    """Yield the ticks from `first` to `last`, both included, in order."""
    tick = schedule.after(first - timedelta(microseconds=1))
    while tick <= last:
        yield tick
        tick = schedule.after(tick)
