"""At most one notification of a worker process at a time runs alone: while it does, no other handler begins.

`redeliveries` asks for it where a notification may end its process, so that nobody else's notification is taken along,
and so that it is known which one did it. All agents of a process share one `Isolation`; their buffers obey it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import anyio

from aviso_workers.backends import Delivery
from aviso_workers.clocks import Clock

__all__ = ["Isolation"]

ALONE_SECONDS = 10.0
"""After this time other handlers begin again, also while the notification still waits for others to end, or runs: one
that takes an hour must not stop its whole process. It is still the only one that runs under suspicion."""


class _Buffer(Protocol):
    @property
    def running(self) -> int: ...
    def wake(self) -> None: ...


class Isolation:
    """Which notification of this process runs alone, if one does."""

    def __init__(self, clock: Clock) -> None:
        self.closed = False
        """No handler may begin but that of `alone`."""
        self.alone: Delivery | None = None
        """The notification that waits for the others to end, or runs."""
        self._clock = clock
        self._buffers: list[_Buffer] = []
        self._turn = anyio.Lock()
        self._free = anyio.Event()
        self._ended = anyio.Event()

    def join(self, buffer: _Buffer) -> None:
        """Count what runs in this buffer, and wake it when handlers may begin again."""
        self._buffers.append(buffer)

    @asynccontextmanager
    async def of(self, delivery: Delivery) -> AsyncIterator[None]:
        """Wait for the others to end; in the block, `delivery` runs alone."""
        async with self._turn:
            self.alone = delivery
            self._free, self._ended = anyio.Event(), anyio.Event()
            self.closed = True
            reopening = self._clock.call_at(self._clock.monotonic() + ALONE_SECONDS, self._reopen)
            try:
                if self._busy():
                    await self._free.wait()
                yield
            finally:
                self.alone = None
                reopening.cancel()
                self._reopen()

    async def ended(self) -> None:
        """Wait until the notification that runs alone has come to its end, or was given back."""
        await self._ended.wait()

    def note_end(self, delivery: Delivery) -> None:
        """Note that a delivery of one of the buffers does not run any more."""
        if delivery is self.alone:
            self._ended.set()
        elif not self._busy():
            self._free.set()

    def _busy(self) -> bool:
        return any(buffer.running for buffer in self._buffers)

    def _reopen(self) -> None:
        self.closed = False
        self._free.set()
        for buffer in self._buffers:
            buffer.wake()
