"""The time that the engine and the in-memory backend live by: the event loop's, or a test's.

Whatever waits in the engine waits on its backend's clock, so that a test that brings a `VirtualClock` decides when an
hour is over.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Protocol

import anyio
from anyio.lowlevel import checkpoint

SKEW = timedelta(minutes=1)
"""The clocks of two machines differ by less than this. A stream whose leader changed may have messages whose store
times are that much out of order."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SHORT_WORK_TURNS = 10
NAP_SECONDS = 0.001


class ScheduledCall(Protocol):
    def when(self) -> float: ...
    def cancel(self) -> None: ...


class Clock(Protocol):
    """Seconds that never go back, the time of day, waiting, and a call at a given second."""

    def monotonic(self) -> float:
        """Seconds since some beginning."""

    def time_ns(self) -> int:
        """Nanoseconds since 1970 UTC."""

    def call_at(self, when: float, callback: Callable[[], None]) -> ScheduledCall:
        """Call back on the event loop when `monotonic` has reached `when`."""

    async def sleep(self, seconds: float) -> None: ...


def utc_now(clock: Clock) -> datetime:
    """Return the time of day, to the microsecond."""
    return datetime.fromtimestamp(clock.time_ns() // 1000 / 1e6, UTC)


@contextmanager
def move_on_after(clock: Clock, seconds: float) -> Iterator[anyio.CancelScope]:
    """Like anyio's, on this clock."""
    with anyio.CancelScope() as scope:
        timer = clock.call_at(clock.monotonic() + seconds, scope.cancel)
        try:
            yield scope
        finally:
            timer.cancel()


@contextmanager
def fail_after(clock: Clock, seconds: float) -> Iterator[anyio.CancelScope]:
    """Like anyio's, on this clock. Raises TimeoutError."""
    with move_on_after(clock, seconds) as scope:
        yield scope
    if scope.cancelled_caught:
        raise TimeoutError(f"not done within {seconds:g} s")


async def sleep_until(clock: Clock, seconds: float, event: anyio.Event) -> None:
    """Sleep; the event cuts it short."""
    with move_on_after(clock, seconds):
        await event.wait()


class LoopClock:
    """Real time: that of the event loop in which it is first asked."""

    @cached_property
    def monotonic(self) -> Callable[[], float]:
        loop = asyncio.get_running_loop()
        # That is what asyncio's own loops call, and the time is asked for several times for each notification.
        return time.monotonic if type(loop).time is asyncio.BaseEventLoop.time else loop.time

    @cached_property
    def call_at(self) -> Callable[[float, Callable[[], None]], ScheduledCall]:
        return asyncio.get_running_loop().call_at

    time_ns = staticmethod(time.time_ns)

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(max(0.0, seconds))


class VirtualClock:
    """Time that stands still until `advance` moves it."""

    def __init__(self, *, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._start_ns = (start - EPOCH) // timedelta(microseconds=1) * 1000
        self._now = 0.0
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self._count = itertools.count()

    def monotonic(self) -> float:
        return self._now

    def time_ns(self) -> int:
        return self._start_ns + round(self._now * 1e9)

    def call_at(self, when: float, callback: Callable[[], None]) -> ScheduledCall:
        timer = VirtualTimer(when, callback)
        heapq.heappush(self._timers, (when, next(self._count), timer))
        return timer

    async def sleep(self, seconds: float) -> None:
        over = anyio.Event()
        timer = self.call_at(self._now + max(0.0, seconds), over.set)
        try:
            await over.wait()
        finally:
            timer.cancel()

    async def advance(self, seconds: float) -> None:
        """Let time pass. Every call that falls due is made at its second, and what it sets going comes to
        rest before time goes on; what waits for something outside of the loop counts as being at rest.
        """
        until = self._now + seconds
        await at_rest()
        while await self.advance_to_next_call(until=until):
            pass
        self._now = max(self._now, until)  # another caller may have let more time pass meanwhile

    async def advance_to_next_call(self, *, until: float) -> bool:
        """Let time pass until the next call falls due, and make it; False where none does by `until`."""
        while self._timers and self._timers[0][2].cancelled:
            heapq.heappop(self._timers)
        if not self._timers or self._timers[0][0] > until:
            return False
        when, _, timer = heapq.heappop(self._timers)
        self._now = max(self._now, when)
        timer.fire()
        await at_rest()
        return True


class VirtualTimer:
    """A call that a `VirtualClock` owes."""

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self._when = when
        self._callback: Callable[[], None] | None = callback

    @property
    def cancelled(self) -> bool:
        return self._callback is None

    def when(self) -> float:
        return self._when

    def cancel(self) -> None:
        self._callback = None

    def fire(self) -> None:
        if self._callback is not None:
            self._callback()


async def at_rest() -> None:
    """Wait until every task of the loop waits for something."""
    # asyncio's own loop has a queue of what it is about to run, and where that is empty, nothing is at work. To ask all
    # tasks takes much longer, and is for other loops, and for work that does not end soon.
    queue = getattr(asyncio.get_running_loop(), "_ready", None)
    resting = False
    while not resting:
        for _ in range(SHORT_WORK_TURNS):
            await checkpoint()
            if queue is not None and not queue:
                return
        # anyio naps for a tenth of a second where it finds a task at work; that is cut short.
        with anyio.move_on_after(NAP_SECONDS):
            await anyio.wait_all_tasks_blocked()
            resting = True
