"""One agent at work: what it has asked for, what waits, what runs.

`supervising` owns it. Its workers outlive a lost consumer: what runs goes on while the consumer is opened anew.
"""

from __future__ import annotations

import math

import anyio

from aviso_workers.backends import Consumer, Delivery
from aviso_workers.engine.handling import Handler

__all__ = ["AgentRun"]


class AgentRun:
    """The deliveries that a worker holds for one agent, from arrival to settlement.

    It has places for twice its concurrency: as many as run, and as many again that wait, so that a worker that
    becomes free finds work, and what one process hoards stays small.
    """

    def __init__(self, handler: Handler, *, concurrency: int, ack_wait_seconds: float) -> None:
        self.finished = 0
        self.returned = 0
        self._handler = handler
        self._concurrency = concurrency
        self._beat_seconds = ack_wait_seconds / 3
        self._consumer: Consumer | None = None
        self._held: set[Delivery] = set()
        self._stopping = False
        self._send, self._waiting = anyio.create_memory_object_stream[Delivery](math.inf)

    @property
    def held(self) -> int:
        """Deliveries that are not settled."""
        return len(self._held)

    def room(self) -> int:
        """How many deliveries could be taken now."""
        return 0 if self._stopping else 2 * self._concurrency - len(self._held)

    def deliver(self, delivery: Delivery) -> None:
        if self._stopping:
            self._give_back(delivery)
            return
        self._held.add(delivery)
        self._send.send_nowait(delivery)

    def attach(self, consumer: Consumer | None) -> None:
        """The consumer that is read now; it is told when there is room."""
        self._consumer = consumer

    async def work(self, *, stop: anyio.Event, drain_timeout_seconds: float) -> None:
        """Handle what arrives until `stop`; then give back what has not begun, and finish what has.

        What still runs after the drain timeout is cancelled and given back too.
        """
        with self._waiting, anyio.CancelScope() as draining:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._beat)
                async with anyio.create_task_group() as workers:
                    for _ in range(self._concurrency):
                        workers.start_soon(self._work)
                    await stop.wait()
                    draining.deadline = anyio.current_time() + drain_timeout_seconds
                    self._stop()
                tasks.cancel_scope.cancel()

    async def _work(self) -> None:
        async for delivery in self._waiting:
            try:
                await self._handler.handle(delivery)
            except anyio.get_cancelled_exc_class():
                self.returned += 1
                raise
            finally:
                self._held.discard(delivery)
            self.finished += 1
            if self._consumer:
                self._consumer.refill()

    async def _beat(self) -> None:
        """Keep the server from giving away what waits or runs here."""
        while True:
            await anyio.sleep(self._beat_seconds)
            for delivery in self._held:
                delivery.in_progress()

    def _stop(self) -> None:
        self._stopping = True
        self._send.close()
        while True:
            try:
                delivery = self._waiting.receive_nowait()
            except (anyio.WouldBlock, anyio.EndOfStream):
                return
            self._held.discard(delivery)
            self._give_back(delivery)

    def _give_back(self, delivery: Delivery) -> None:
        delivery.nak()
        self.returned += 1
