"""Handing the messages of a durable consumer to its open readers, and taking their settlements.

One `Dispatcher` per durable consumer. Whatever may make a delivery possible wakes it: a new message, a
settlement, a reader with capacity again, a deadline. It then works on the event loop, in one go, until no
reader has capacity or no message is left to deliver. There is no task, and so none to supervise.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import ClassVar

import anyio
from anyio.lowlevel import checkpoint
from msgspec import Struct, field

from aviso_workers.aviso.codec import Message
from aviso_workers.aviso.literals import SECOND
from aviso_workers.backends import ConnectionListener, Delivery, Noted
from aviso_workers.backends.in_memory.account import MAX_PAYLOAD
from aviso_workers.backends.in_memory.stream import Durable, InMemoryStream
from aviso_workers.clocks import EPOCH, Clock, ScheduledCall
from aviso_workers.errors import NotFoundError, UnavailableError
from aviso_workers.jetstream import error_codes
from aviso_workers.jetstream.specs import PINNED, PRIORITIZED


class InMemoryConnection:
    """The connection that the backend plays: there is none to lose, so that a test can take it away; see
    `backends.Connection`."""

    slow_because = ""
    max_payload = MAX_PAYLOAD

    def __init__(self, listener: ConnectionListener | None) -> None:
        self.watchers: set[Callable[[], None]] = set()
        """Called after every change."""
        self.ready = False
        self.losses = 0
        self._reason = "it is not open"
        self._listener = listener

    def require_server(self, major: int, minor: int, *, to: str) -> None:
        """Do nothing: this backend has every feature, whatever the version of a server that would be needed."""

    async def failed(self) -> None:
        await anyio.sleep_forever()  # there is no server to lose

    async def reach(self) -> None:
        """Take a turn on the loop, as a request over a wire would. Raises `UnavailableError` while down."""
        await checkpoint()
        if not self.ready:
            raise UnavailableError(f"in_memory: not connected: {self._reason}")

    def open(self) -> None:
        self._change(ready=True, reason="")
        self._tell()

    def lose(self, reason: str) -> None:
        self.losses += 1
        self._change(ready=False, reason=reason)
        self._tell()

    def close(self) -> None:
        """Close the connection. The listener is not called, because this is not a loss."""
        self._change(ready=False, reason="it is closed")

    def _change(self, *, ready: bool, reason: str) -> None:
        self.ready, self._reason = ready, reason
        for watch in tuple(self.watchers):
            watch()

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener(connected=self.ready, reason=self._reason)


class InMemoryConsumer(Struct, eq=False, kw_only=True, dict=True):
    """An open reader of a durable consumer; see `backends.Consumer`."""

    dispatcher: Dispatcher
    connection: InMemoryConnection
    deliver: Callable[[Sequence[Delivery]], None]
    capacity: Callable[[], int]
    priority: int
    gone: anyio.Event = field(default_factory=anyio.Event)
    settlements_lost: int = 0

    @property
    def pinned(self) -> bool:
        return self.dispatcher.pinned is self

    @property
    def ready(self) -> bool:
        """Whether it would take a delivery now."""
        return self.connection.ready and self.capacity() > 0

    def refill(self) -> None:
        self.dispatcher.wake()

    async def lost(self) -> None:
        await self.gone.wait()
        raise NotFoundError(f"{self.dispatcher.name}: was deleted", code=error_codes.CONSUMER_NOT_FOUND)

    async def reached(self) -> None:
        await self.connection.reach()

    async def settled(self) -> None:
        await self.connection.reach()
        if self.settlements_lost:
            raise UnavailableError(f"in_memory: {self.settlements_lost} settlements were lost with the connection")

    async def stop(self) -> None:
        self.dispatcher.leave(self)
        await checkpoint()


class InMemoryDelivery(Noted, eq=False):
    """One message of a durable consumer; see `backends.Delivery`. A settlement without a connection is lost."""

    message: Message
    num_delivered: int
    _dispatcher: Dispatcher
    _reader: InMemoryConsumer
    _until: float
    _losses: int
    """How often the connection had been lost when the message was delivered."""
    can_be_read_again: ClassVar[bool] = True

    @property
    def num_pending(self) -> int:
        return self._dispatcher.durable.num_pending

    @property
    def held(self) -> bool:
        if self._until == math.inf:
            return True
        return self._dispatcher.time() < self._until and self._reader.connection.losses == self._losses

    def ack(self) -> None:
        if self._reaches():
            self._dispatcher.settle(self.message.sequence)

    def nak(self, *, delay_seconds: float = 0.0) -> None:
        if self._reaches():
            self._dispatcher.give_back(self.message.sequence, delay_seconds=delay_seconds)

    def redeliver(self) -> None:
        if self._reader.connection.ready and self._dispatcher.serving:
            self._dispatcher.give_back(self.message.sequence, delay_seconds=0.0)

    def term(self, reason: str) -> None:
        self.ack()

    def in_progress(self) -> None:
        if self._reaches():
            self._until = self._dispatcher.held_until()
            self._dispatcher.in_progress(self.message.sequence)

    def _reaches(self) -> bool:
        """Return whether a settlement reaches the consumer of this name, which may have been recreated since the
        delivery.
        """
        if not self._reader.connection.ready:
            self._reader.settlements_lost += 1
        return self._reader.connection.ready and self._dispatcher.serving and self.held


class Dispatcher:
    """The readers of one durable consumer. They take turns, as far as they have capacity and its policy lets them."""

    def __init__(self, name: str, *, clock: Clock) -> None:
        self.name = name
        self.serving = False
        self.pinned: InMemoryConsumer | None = None
        """Who is given everything, where the policy is to pin one."""
        self._unpin_at = math.inf
        self.durable: Durable
        self._stream: InMemoryStream
        self._clock = clock
        self._readers: deque[InMemoryConsumer] = deque()
        self._woken = False
        self._timer: ScheduledCall | None = None
        self._pause: ScheduledCall | None = None

    def serve(self, stream: InMemoryStream, durable: Durable) -> None:
        """Hand out this consumer's messages from now on."""
        self.serving, self._stream, self.durable = True, stream, durable

    def end(self) -> None:
        """End the delivery, because the consumer was deleted."""
        self.serving = False
        if self._pause is not None:
            self._pause.cancel()
        for reader in tuple(self._readers):
            reader.gone.set()
            self.leave(reader)

    def join(self, reader: InMemoryConsumer) -> None:
        self._readers.append(reader)
        self.durable.readers = len(self._readers)
        self._stream.watchers.add(self.wake)
        reader.connection.watchers.add(self.wake)
        self.wake()

    def leave(self, reader: InMemoryConsumer) -> None:
        if reader not in self._readers:
            return
        self._readers.remove(reader)
        self.durable.readers = len(self._readers)
        if all(other.connection is not reader.connection for other in self._readers):
            reader.connection.watchers.discard(self.wake)
        if not self._readers:
            self._stream.watchers.discard(self.wake)
        if reader.pinned and reader.connection.ready:
            self.pin(None)
            self.wake()

    def settle(self, sequence: int) -> None:
        self.durable.settle(sequence)
        self.durable.last_settled_ns = self._clock.time_ns()
        self.wake()

    def give_back(self, sequence: int, *, delay_seconds: float) -> None:
        now = self._clock.monotonic()
        self.durable.give_back(sequence, not_before=now + delay_seconds, now=now)
        self._look_at(now + delay_seconds)
        self.wake()

    def pause(self, until: datetime | None) -> float:
        """Pause the consumer until a time, and return for how many seconds. Resume it and return 0 where the time is
        over or None.
        """
        if self._pause is not None:
            self._pause.cancel()
        seconds = (until - EPOCH).total_seconds() - self._clock.time_ns() / 1e9 if until else 0.0
        if seconds <= 0:
            self._resume()
            return 0.0
        self.durable.paused_until = until
        self._pause = self._clock.call_at(self._clock.monotonic() + seconds, self._resume)
        return seconds

    def _resume(self) -> None:
        self.durable.paused_until = None
        self.wake()

    def reset(self, sequence: int) -> None:
        self.durable.reset(sequence)
        self.wake()

    def in_progress(self, sequence: int) -> None:
        self.durable.in_progress(sequence, self._clock.monotonic())

    def pin(self, reader: InMemoryConsumer | None) -> None:
        self.pinned, self._unpin_at = reader, math.inf
        self.durable.pinned_ns = self._clock.time_ns() if reader else 0

    def time(self) -> float:
        return self._clock.monotonic()

    def held_until(self) -> float:
        """Return the time until which a reader may settle a message that is delivered or reported in progress now."""
        return (
            self.time() + self.durable.ack_wait_seconds
            if self.durable.config["priority_policy"] == PINNED
            else math.inf
        )

    def wake(self) -> None:
        if not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._woken = False
        if not self.serving:
            return
        self._stream.expire(self._clock.time_ns())
        now = self._clock.monotonic()
        while (reader := self._next_reader()) and (taken := self.durable.take(now)):
            message, num_delivered = taken
            if self.durable.config["priority_policy"] == PINNED and not reader.pinned:
                self.pin(reader)
            self.durable.last_delivered_ns = self._clock.time_ns()
            self._look_at(now + self.durable.ack_wait_seconds)
            self._readers.remove(reader)
            self._readers.append(reader)  # the others come first next time
            losses = reader.connection.losses
            reader.deliver([InMemoryDelivery(message, num_delivered, self, reader, self.held_until(), losses)])

    def _next_reader(self) -> InMemoryConsumer | None:
        policy = self.durable.config["priority_policy"]
        if policy == PINNED and self.pinned and not self._is_gone(self.pinned):
            return self.pinned if self._unpin_at == math.inf else None
        ready = [reader for reader in self._readers if reader.ready]
        if policy == PRIORITIZED:
            return min(ready, key=lambda reader: reader.priority, default=None)  # the first of those that are nearest
        return ready[0] if ready else None

    def _is_gone(self, pinned: InMemoryConsumer) -> bool:
        """Return whether a pinned reader has asked for nothing for too long; it is unpinned then."""
        if pinned in self._readers and pinned.ready:
            self._unpin_at = math.inf
            return False
        self._unpin_at = min(self._unpin_at, self.time() + self.durable.config["priority_timeout"] / SECOND)
        if self.time() < self._unpin_at:
            self._look_at(self._unpin_at)
            return False
        self.pin(None)
        return True

    def _look_at(self, deadline: float) -> None:
        """Set the one timer to this deadline, unless it is set to an earlier one, to make overdue messages due."""
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
