"""One agent at work: what it has asked for, who works on it, and how it ends.

`supervising` owns it. Its workers outlive a lost consumer: what runs goes on while the consumer is opened anew.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import anyio

from aviso_workers import clocks
from aviso_workers.backends import Consumer
from aviso_workers.clocks import Clock
from aviso_workers.engine import acknowledging
from aviso_workers.engine.ordering import MOST_WAITING_BYTES, Line
from aviso_workers.engine.redeliveries import Redeliveries
from aviso_workers.engine.shielding import Shield
from aviso_workers.engine.threads import Threads

__all__ = ["MOST_PREFETCH", "AgentRun", "Form"]

BEATS = 3
"""How often what is held is reported in progress while one `ack_wait` passes."""
PREFETCH_SECONDS = 0.1
CHECKS = 8
"""How often the room is looked at while as many begin as are asked for at a time."""
MOST_PREFETCH = 1000
"""More at a time makes nothing faster."""


class Form(Protocol):
    """A call form: `handling`, `batching` or `streaming`."""

    async def work(self) -> None:
        """Take from the line and settle, until the line is closed."""


class AgentRun:
    """What brings an agent its deliveries, and the form that handles them.

    Besides what runs it asks for what is begun within a tenth of a second, so that what one process hoards is soon
    done: at least for `prefetch` and at most for `most_prefetch`. Where notifications are large, it asks for as many as
    fit into a budget of bytes, if they are as large as those that wait. The budget makes nobody wait: while a worker is
    idle and nothing that is held may begin, only the number counts.

    With `order_by`, much of what is held may wait behind a few keys. Where fewer are ready to begin than there are
    workers, it asks for notifications of other keys in their place, until the server delivers no more because too many
    are not acknowledged.
    """

    def __init__(
        self,
        form: Form,
        *,
        line: Line,
        clock: Clock,
        workers: int,
        prefetch: int,
        ack_wait_seconds: float,
        most_prefetch: int = MOST_PREFETCH,
        redeliveries: Redeliveries | None = None,
        threads: Threads | None = None,
        shield: Shield | None = None,
    ) -> None:
        self.line = line
        self.line.made_room = self._refill
        self.line.on_surplus = self._ask
        self.returned = 0
        """Deliveries that were given back because the worker stops."""
        self._form = form
        self._redeliveries = redeliveries
        self._threads = threads
        self._shield = shield or Shield(clock)
        self._clock = clock
        self._workers = workers
        self._least = self._prefetch = prefetch
        self._most = most_prefetch
        self._check_after = max(1, prefetch // CHECKS)
        """The room is looked at when so many have begun."""
        self._fills_budget = False
        """Whether there was room for more, but for their size."""
        self._begun = 0
        self._begun_since = clock.monotonic()
        self._beat_seconds = ack_wait_seconds / BEATS
        self._beat_again = anyio.Event()
        self._consumers: dict[str, Consumer] = {}
        """By stream."""
        self._stopping = False

    def room(self) -> int:
        """How many deliveries could be taken now."""
        if self._stopping or self._is_stuck:
            return 0
        line = self.line
        if line.gathers:
            return min(line.gathers, self._prefetch)
        room = self._prefetch - line.waiting
        if line.surplus and line.ready < self._workers:
            room += line.surplus
        if not line.waiting_bytes:
            return room
        fitting = int((MOST_WAITING_BYTES - line.waiting_bytes) / line.mean_bytes)
        self._fills_budget = fitting < room and not line.starved
        return fitting if self._fills_budget else room

    def pinned(self, stream: str) -> bool:
        """Whether this worker is the one that is given everything of the stream; see `Consumer.pinned`."""
        consumer = self._consumers.get(stream)
        return consumer is not None and consumer.pinned

    def keep_within(self, ack_wait_seconds: float) -> None:
        """Let no such time pass from now on without a report that what is held here is in progress."""
        self._beat_seconds = ack_wait_seconds / BEATS
        self._beat_again.set()

    def attach(self, stream: str, consumer: Consumer) -> None:
        """A consumer that is read now; it is told when there is room."""
        self._consumers[stream] = consumer

    def detach(self, stream: str) -> None:
        """A consumer that is not read any more. When none is because the agent is stuck, others get what waits."""
        del self._consumers[stream]
        if self._is_stuck and not self._consumers and not self._stopping:
            acknowledging.give_back(self.line.withdraw())

    async def until_stuck(self) -> None:
        """Wait until nothing can be handled, however long."""
        if self._threads is None:
            await anyio.sleep_forever()
        else:
            await self._threads.until_stuck()

    async def until_not_stuck(self) -> None:
        if self._threads is not None:
            await self._threads.until_not_stuck()

    async def work(self, *, stop: anyio.Event, drain_timeout_seconds: float) -> None:
        """Handle what arrives until `stop`; then give back what has not begun, and finish what has.

        What still runs after the drain timeout is cancelled and given back too.
        """
        async with anyio.create_task_group() as beating:
            beating.start_soon(self._beat)
            beating.start_soon(self._shield.watch)
            try:
                with anyio.CancelScope() as draining:
                    async with anyio.create_task_group() as workers:
                        if self._redeliveries is not None:
                            workers.start_soon(self._redeliveries.work)
                        for _ in range(self._workers):
                            workers.start_soon(self._form.work)
                        await stop.wait()
                        drained_by = self._clock.monotonic() + drain_timeout_seconds
                        timer = self._clock.call_at(drained_by, partial(self._end_draining, draining))
                        self._stopping = True
                        self.line.close()
                        if self._threads is not None:
                            self._threads.close()
                        await self._stop_reading()
                        if not self.line.ordered:  # else all of it at the end, or a lane would overtake its head
                            self.returned += acknowledging.give_back(self.line.withdraw())
                    timer.cancel()
            finally:  # also where all of this is cancelled
                try:
                    await self._end_redeliveries()
                finally:
                    self.returned += acknowledging.give_back(self.line.withdraw_all())
            beating.cancel_scope.cancel()

    def _end_draining(self, draining: anyio.CancelScope) -> None:
        draining.cancel()
        self._shield.limit()

    @property
    def _is_stuck(self) -> bool:
        return self._threads is not None and self._threads.stuck

    async def _end_redeliveries(self) -> None:
        """Before what was cancelled is given back, or it would look like what ended its worker."""
        if self._redeliveries is not None:
            async with self._shield.hold():
                await self._redeliveries.end()

    async def _beat(self) -> None:
        while True:
            with clocks.move_on_after(self._clock, self._beat_seconds):
                await self._beat_again.wait()
            self._beat_again = anyio.Event()
            await self.line.beat()

    async def _stop_reading(self) -> None:
        """Before anything is given back: it would come here again."""
        for consumer in tuple(self._consumers.values()):
            await consumer.stop()

    def _refill(self) -> None:
        self._begun += 1
        if self._begun % self._check_after and not self._fills_budget and not self.line.surplus:
            return
        seconds = self._clock.monotonic() - self._begun_since
        if seconds >= PREFETCH_SECONDS:
            pace = int(self._begun * PREFETCH_SECONDS / seconds)
            self._prefetch = max(self._least, min(pace, self._most))
            self._check_after = max(1, self._prefetch // CHECKS)
            self._begun, self._begun_since = 0, self._begun_since + seconds
        self._ask()

    def _ask(self) -> None:
        for consumer in self._consumers.values():
            consumer.refill()
