"""The deliveries in flight of one agent: those that its consumers are asked for ahead of its workers, and the buffer of
those that have come. It is the backpressure towards the server.

A consumer asks for the `capacity`; whenever a handler begins, consumers that may be asked for more are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from aviso_workers.backends import Consumer, Delivery
from aviso_workers.clocks import Clock
from aviso_workers.engine.buffer import MAX_WAITING_BYTES, Buffer
from aviso_workers.engine.isolation import Isolation

__all__ = ["MAX_PREFETCH", "PREFETCH_SECONDS", "Flow"]

PREFETCH_SECONDS = 0.1
CHECKS = 8
"""How often the capacity is looked at while as many begin as are asked for at a time."""
MAX_PREFETCH = 1000
"""More at a time makes nothing faster."""


class Flow:
    """The consumers of one agent, how much is asked for of them, and the buffer of what they have delivered.

    Besides what runs, that is what is begun within a tenth of a second, so that what one process hoards is soon done:
    at least `least` and at most `most`. Where notifications are large, it is as many as fit into a budget of bytes, if
    they are as large as those that wait. The budget makes nobody wait: while a worker is idle and nothing that is held
    may begin, only the number counts.

    With `order_by`, much of what is held may wait behind a few keys. Where fewer are ready to begin than there are
    workers, notifications of other keys are asked for in their place, until the server delivers no more because too
    many are not acknowledged.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        workers: int,
        least: int,
        most: int = MAX_PREFETCH,
        key: Callable[[str], Hashable] | None = None,
        isolation: Isolation | None = None,
        on_lost: Callable[[Delivery], None] | None = None,
        make_buffer: Callable[..., Buffer] = Buffer,
    ) -> None:
        """`key`, `isolation` and `on_lost` are those of the buffer that is made."""
        self.workers = workers
        self.buffer = make_buffer(
            clock,
            key=key,
            isolation=isolation,
            on_begin=self._note_begin,
            on_surplus=self._ask,
            on_lost=on_lost,
        )
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

    def capacity(self) -> int:
        """Return how many deliveries the buffer could be given now."""
        buffer = self.buffer
        if (may_come := buffer.may_come) is not None:
            return may_come
        if buffer.gather_left:
            return min(buffer.gather_left, self._prefetch)
        capacity = self._prefetch - buffer.waiting
        if buffer.surplus and buffer.ready < self.workers:
            capacity += buffer.surplus
        if not buffer.waiting_bytes:
            return capacity
        fitting = int((MAX_WAITING_BYTES - buffer.waiting_bytes) / buffer.mean_bytes)
        self._fills_budget = fitting < capacity and not buffer.starved
        if not self._fills_budget:
            return capacity
        buffer.tell_next_begin()
        return fitting

    def _note_begin(self) -> int:
        """Note that a delivery begins: ask for others, and measure at which rate they begin. Return how many more are
        to begin before this is called again, unless there is a surplus.
        """
        begun = self.buffer.begun
        seconds = self._clock.monotonic() - self._measured_at
        if seconds >= PREFETCH_SECONDS:
            pace = int((begun - self._measured_from) * PREFETCH_SECONDS / seconds)
            self._prefetch = max(self._least, min(pace, self._most))
            self._measured_from, self._measured_at = begun, self._measured_at + seconds
        self._ask()
        return 1 if self._fills_budget else max(1, self._prefetch // CHECKS)

    def _ask(self) -> None:
        """Have the consumers ask for as much as there is capacity for."""
        for consumer in self._consumers.values():
            consumer.refill()
