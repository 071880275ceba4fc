"""Not more than so many per second."""

from __future__ import annotations

import anyio

from aviso_workers.clocks import Clock

__all__ = ["RateLimit"]


class RateLimit:
    """Spaces out what waits for it, evenly: no bursts after a pause."""

    def __init__(self, clock: Clock, *, per_second: float | None) -> None:
        self._clock = clock
        self.limited = per_second is not None
        self._interval = 1 / per_second if per_second else 0.0
        self._next = 0.0
        self._turn = anyio.Lock()

    async def wait(self) -> None:
        if not self._interval:
            return
        arrived = self._clock.monotonic()
        async with self._turn:
            begin = max(arrived, self._next)
            if (seconds := begin - self._clock.monotonic()) > 0:
                await self._clock.sleep(seconds)
            self._next = begin + self._interval  # after the wait, so that one that is cancelled delays nobody
