"""At most one notification of a worker process at a time runs alone: while it does, no other handler begins.

`redeliveries` asks for it where a notification may end its process, so that nobody else's notification is taken along,
and so that it is known which one did it. All agents of a process share one `Isolation`; their flows obey it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import anyio

from aviso_workers.backends import Delivery
from aviso_workers.clocks import Clock
from aviso_workers.engine.dispatch import ALONE, ASKED, RUNNING, Dispatch

ALONE_SECONDS = 10.0
"""After this time other handlers begin again, also while the notification still waits for others to end, or runs: one
that takes an hour must not stop its whole process. It is still the only one that runs under suspicion."""


class _Flow(Protocol):
    dispatch: Dispatch

    def wake(self) -> None: ...


class Isolation:
    """Which notification of this process runs alone, if one does."""

    def __init__(self, clock: Clock) -> None:
        self.alone: Delivery | None = None
        """The notification that waits for the others to end, or runs."""
        self._clock = clock
        self._flows: list[_Flow] = []
        self._turn = anyio.Lock()
        self._free = anyio.Event()
        self._ended = anyio.Event()

    def join(self, flow: _Flow) -> None:
        """Count what runs in this flow, and let nothing begin there while a notification runs alone."""
        self._flows.append(flow)

    @asynccontextmanager
    async def of(self, delivery: Delivery) -> AsyncIterator[None]:
        """Wait for the others to end; in the block, `delivery` runs alone."""
        async with self._turn:
            self.alone = delivery
            self._free, self._ended = anyio.Event(), anyio.Event()
            for flow in self._flows:
                flow.dispatch.isolate(True)
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

    def give_up(self) -> None:
        """Note that the notification which is to run alone has not begun, and will not."""
        self._ended.set()

    def look(self) -> None:
        """Note what has changed in a flow: whether others run still, and whether the notification that is to run alone
        was settled or waits. Behind an earlier one of its key, or for a limit, it gives way to others, and is decided
        on again."""
        if self.alone is None:
            return
        if self.alone.place not in (ASKED, ALONE, RUNNING):
            self._ended.set()
        if not self._busy():
            self._free.set()

    def _busy(self) -> bool:
        return any(flow.dispatch.running for flow in self._flows)

    def _reopen(self) -> None:
        self._free.set()
        for flow in self._flows:
            flow.dispatch.isolate(False)
            flow.wake()
