"""Not more than so many per second."""

from __future__ import annotations

from aviso_workers.clocks import Clock

__all__ = ["Pace"]


class Pace:
    """Spaces out what waits for it, evenly: no bursts after a pause."""

    def __init__(self, clock: Clock, *, per_second: float | None) -> None:
        self._clock = clock
        self.limited = per_second is not None
        self._interval = 1 / per_second if per_second else 0.0
        self._next = 0.0

    async def wait(self) -> None:
        if not self._interval:
            return
        now = self._clock.monotonic()
        begin, self._next = max(now, self._next), max(now, self._next) + self._interval
        if begin > now:
            await self._clock.sleep(begin - now)
