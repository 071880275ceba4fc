"""How many deliveries an agent asks for ahead of what its workers handle: the backpressure towards the server.

`subscription` asks here for the capacity of its consumers; the buffer says here whenever a handler begins.
"""

from __future__ import annotations

from aviso_workers.backends import Consumer
from aviso_workers.clocks import Clock
from aviso_workers.engine.buffer import MOST_WAITING_BYTES, Buffer

__all__ = ["MOST_PREFETCH", "PREFETCH_SECONDS", "Prefetch"]

PREFETCH_SECONDS = 0.1
CHECKS = 8
"""How often the capacity is looked at while as many begin as are asked for at a time."""
MOST_PREFETCH = 1000
"""More at a time makes nothing faster."""


class Prefetch:
    """How much is asked for of the consumers of one agent.

    Besides what runs, that is what is begun within a tenth of a second, so that what one process hoards is soon done:
    at least `least` and at most `most`. Where notifications are large, it is as many as fit into a budget of bytes, if
    they are as large as those that wait. The budget makes nobody wait: while a worker is idle and nothing that is held
    may begin, only the number counts.

    With `order_by`, much of what is held may wait behind a few keys. Where fewer are ready to begin than there are
    workers, notifications of other keys are asked for in their place, until the server delivers no more because too
    many are not acknowledged.
    """

    def __init__(self, clock: Clock, *, workers: int, least: int, most: int = MOST_PREFETCH) -> None:
        self.workers = workers
        self._clock = clock
        self._least = self._prefetch = least
        self._most = most
        self._fills_budget = False
        """Whether there was capacity for more, but for their size."""
        self._measured_from = 0
        """How many of the buffer had begun when the rate was measured the last time."""
        self._measured_at = clock.monotonic()
        self._consumers: dict[str, Consumer] = {}
        """By stream."""

    @property
    def consumers(self) -> tuple[Consumer, ...]:
        """Those that are read now."""
        return tuple(self._consumers.values())

    def attach(self, stream: str, consumer: Consumer) -> None:
        """Add a consumer that is read from now on; it is called when there is capacity."""
        self._consumers[stream] = consumer

    def detach(self, stream: str) -> None:
        """Remove the consumer of a stream that is not read any more."""
        del self._consumers[stream]

    def pinned(self, stream: str) -> bool:
        """Return whether this worker is the one that is given everything of the stream; see `Consumer.pinned`."""
        consumer = self._consumers.get(stream)
        return consumer is not None and consumer.pinned

    def capacity(self, buffer: Buffer) -> int:
        """Return how many deliveries the buffer could be given now."""
        if buffer.gather_left:
            return min(buffer.gather_left, self._prefetch)
        capacity = self._prefetch - buffer.waiting
        if buffer.surplus and buffer.ready < self.workers:
            capacity += buffer.surplus
        if not buffer.waiting_bytes:
            return capacity
        fitting = int((MOST_WAITING_BYTES - buffer.waiting_bytes) / buffer.mean_bytes)
        self._fills_budget = fitting < capacity and not buffer.starved
        if not self._fills_budget:
            return capacity
        buffer.tell_next_begin()
        return fitting

    def note_begin(self, buffer: Buffer) -> int:
        """Note that a delivery of the buffer begins: ask for others, and measure at which rate they begin. Return how
        many more are to begin before this is called again, unless there is a surplus.
        """
        seconds = self._clock.monotonic() - self._measured_at
        if seconds >= PREFETCH_SECONDS:
            pace = int((buffer.begun - self._measured_from) * PREFETCH_SECONDS / seconds)
            self._prefetch = max(self._least, min(pace, self._most))
            self._measured_from, self._measured_at = buffer.begun, self._measured_at + seconds
        self.ask()
        return 1 if self._fills_budget else max(1, self._prefetch // CHECKS)

    def ask(self) -> None:
        """Have the consumers ask for as much as there is capacity for."""
        for consumer in self._consumers.values():
            consumer.refill()
