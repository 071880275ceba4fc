"""The time that the in-memory backend lives by: the event loop's, or a test's.

Redelivery, expiry and the duplicate window ask a `Clock` and nothing else, so a test that brings a
`VirtualClock` decides when an hour is over.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

import anyio
from anyio.lowlevel import checkpoint

__all__ = ["Clock", "LoopClock", "Timer", "VirtualClock"]

SHORT_WORK_TURNS = 10


class Timer(Protocol):
    def when(self) -> float: ...
    def cancel(self) -> None: ...


class Clock(Protocol):
    """Seconds that never go back, the time of day, and a call at a given second."""

    def monotonic(self) -> float:
        """Seconds since some beginning."""

    def time_ns(self) -> int:
        """Nanoseconds since 1970 UTC."""

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Call back on the event loop when `monotonic` has reached `when`."""


class LoopClock:
    """Real time."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def time_ns(self) -> int:
        return time.time_ns()

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_at(when, callback)


class VirtualClock:
    """Time that stands still until `advance` moves it."""

    def __init__(self, *, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._start_ns = int(start.timestamp()) * 1_000_000_000
        self._now = 0.0
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self._count = itertools.count()

    def monotonic(self) -> float:
        return self._now

    def time_ns(self) -> int:
        return self._start_ns + round(self._now * 1e9)

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        timer = VirtualTimer(when, callback)
        heapq.heappush(self._timers, (when, next(self._count), timer))
        return timer

    async def advance(self, seconds: float) -> None:
        """Let time pass. Every call that falls due is made at its second, and what it sets going comes to
        rest before time goes on; what waits for something outside of the loop counts as being at rest.
        """
        until = self._now + seconds
        await _all_at_rest()
        while self._timers and self._timers[0][0] <= until:
            when, _, timer = heapq.heappop(self._timers)
            self._now = max(self._now, when)
            timer.fire()
            await _all_at_rest()
        self._now = until


class VirtualTimer:
    """A call that a `VirtualClock` owes."""

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self._when = when
        self._callback: Callable[[], None] | None = callback

    def when(self) -> float:
        return self._when

    def cancel(self) -> None:
        self._callback = None

    def fire(self) -> None:
        if self._callback is not None:
            self._callback()


async def _all_at_rest() -> None:
    # anyio naps for a tenth of a second where it finds a task at work: let the short work end first.
    for _ in range(SHORT_WORK_TURNS):
        await checkpoint()
    await anyio.wait_all_tasks_blocked()
