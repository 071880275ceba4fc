"""Handing the messages of a durable consumer to its open readers, and taking their settlements.

One `Dispatcher` per durable consumer. Whatever may make a delivery possible wakes it: a new message, a
settlement, a reader with room again, a deadline. It then works on the event loop, in one go, until no
reader has room or no message is left to deliver. There is no task, and so none to supervise.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import anyio
from anyio.lowlevel import checkpoint

from aviso_workers.backends import Delivery
from aviso_workers.backends.in_memory.clock import Clock, Timer
from aviso_workers.backends.in_memory.connection import Connection
from aviso_workers.backends.in_memory.durable import Durable
from aviso_workers.backends.in_memory.stream import Stream
from aviso_workers.codec import Message
from aviso_workers.errors import UnavailableError

__all__ = ["Dispatcher", "InMemoryConsumer"]


class InMemoryConsumer:
    """An open reader of a durable consumer; see `backends.Consumer`."""

    def __init__(self, dispatcher: Dispatcher, *, deliver: Callable[[Delivery], None], room: Callable[[], int]) -> None:
        self.deliver = deliver
        self.room = room
        self.settlements_lost = 0
        self._dispatcher = dispatcher

    def refill(self) -> None:
        self._dispatcher.wake()

    async def lost(self) -> None:
        await anyio.sleep_forever()  # streams and consumers cannot be deleted here

    async def settled(self) -> None:
        await self._dispatcher.connection.reach()
        if self.settlements_lost:
            raise UnavailableError(f"in_memory: {self.settlements_lost} settlements were lost with the connection")

    async def stop(self) -> None:
        self._dispatcher.leave(self)
        await checkpoint()


class InMemoryDelivery:
    """One message of a durable consumer; see `backends.Delivery`. Settled without a connection, it is not."""

    __slots__ = ("_dispatcher", "_reader", "message", "num_delivered", "num_pending")

    def __init__(self, dispatcher: Dispatcher, reader: InMemoryConsumer, message: Message, num_delivered: int) -> None:
        self.message = message
        self.num_delivered = num_delivered
        self.num_pending = dispatcher.durable.num_pending
        self._dispatcher = dispatcher
        self._reader = reader

    def ack(self) -> None:
        if self._reaches():
            self._dispatcher.settle(self.message.sequence)

    def nak(self, *, delay_seconds: float = 0.0) -> None:
        if self._reaches():
            self._dispatcher.give_back(self.message.sequence, delay_seconds=delay_seconds)

    def term(self, reason: str) -> None:
        self.ack()

    def in_progress(self) -> None:
        if self._reaches():
            self._dispatcher.in_progress(self.message.sequence)

    def _reaches(self) -> bool:
        up = self._dispatcher.connection.up
        if not up:
            self._reader.settlements_lost += 1
        return up


class Dispatcher:
    """The readers of one durable consumer. They take turns, as far as they have room."""

    def __init__(self, stream: Stream, durable: Durable, *, connection: Connection, clock: Clock) -> None:
        self.durable = durable
        self.connection = connection
        self._stream = stream
        self._clock = clock
        self._readers: deque[InMemoryConsumer] = deque()
        self._woken = False
        self._timer: Timer | None = None

    def join(self, *, deliver: Callable[[Delivery], None], room: Callable[[], int]) -> InMemoryConsumer:
        reader = InMemoryConsumer(self, deliver=deliver, room=room)
        self._readers.append(reader)
        self._stream.watchers.add(self.wake)
        self.connection.watchers.add(self.wake)
        self.wake()
        return reader

    def leave(self, reader: InMemoryConsumer) -> None:
        if reader in self._readers:
            self._readers.remove(reader)
        if not self._readers:
            self._stream.watchers.discard(self.wake)
            self.connection.watchers.discard(self.wake)

    def settle(self, sequence: int) -> None:
        self.durable.settle(sequence)
        self.wake()

    def give_back(self, sequence: int, *, delay_seconds: float) -> None:
        now = self._clock.monotonic()
        self.durable.give_back(sequence, not_before=now + delay_seconds, now=now)
        self._look_at(now + delay_seconds)
        self.wake()

    def in_progress(self, sequence: int) -> None:
        self.durable.in_progress(sequence, self._clock.monotonic())

    def wake(self) -> None:
        if not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._woken = False
        if not self.connection.up:
            return
        self._stream.expire(self._clock.time_ns())
        now = self._clock.monotonic()
        while (reader := self._next_reader()) and (taken := self.durable.take(now)):
            message, num_delivered = taken
            self._look_at(now + self.durable.ack_wait_seconds)
            reader.deliver(InMemoryDelivery(self, reader, message, num_delivered))

    def _next_reader(self) -> InMemoryConsumer | None:
        for _ in range(len(self._readers)):
            self._readers.rotate(-1)
            if self._readers[-1].room() > 0:
                return self._readers[-1]
        return None

    def _look_at(self, deadline: float) -> None:
        """See to what is overdue at `deadline`, if not before: one timer, for the earliest deadline."""
        if self._timer is not None:
            if self._timer.when() <= deadline:
                return
            self._timer.cancel()
        self._timer = self._clock.call_at(deadline, self._on_deadline)

    def _on_deadline(self) -> None:
        self._timer = None
        following = self.durable.collect_overdue(self._clock.monotonic())
        if following is not None:
            self._look_at(following)
        self.wake()
