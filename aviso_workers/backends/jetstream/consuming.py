"""Reading a durable consumer and settling what it delivers.

One task per consumer keeps it asked for as much as there is room for: a new request goes out when it would ask for
at least as much as is still outstanding, so that there is always one on the server and never a request per message.
Settlements leave through one outbox per connection, in the order in which they were made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import anyio
import nats.errors

from aviso_workers.backends import Delivery
from aviso_workers.backends.jetstream.connection import Connection
from aviso_workers.backends.jetstream.pulling import HEARTBEAT_SECONDS, PullSubscription, Received
from aviso_workers.codec import Message
from aviso_workers.errors import BackendError, UnavailableError

__all__ = ["Outbox", "PullConsumer"]

SECOND = 1_000_000_000


class Outbox:
    """Sends settlements. `run` it in a task; `put` from anywhere on the loop."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._filled = anyio.Event()

    def put(self, reply: str, body: bytes) -> None:
        self._waiting.append((reply, body))
        if not self._filled.is_set():
            self._filled.set()

    async def run(self) -> None:
        while True:
            await self._filled.wait()
            self._filled = anyio.Event()
            await self._send()

    async def flush(self) -> None:
        """Return when the server has what was put so far. Raises `UnavailableError`."""
        await self._send()
        await self._connection.flush()

    async def _send(self) -> None:
        while self._waiting:
            reply, body = self._waiting.popleft()
            try:
                await self._connection.nc.publish(reply, body)
            except nats.errors.Error:
                # Not connected and nats-py's buffer is full: the server will deliver it again after ack_wait.
                continue


class JetStreamDelivery:
    """One message of a durable consumer."""

    __slots__ = ("_outbox", "_received")

    def __init__(self, received: Received, outbox: Outbox) -> None:
        self._received = received
        self._outbox = outbox

    @property
    def message(self) -> Message:
        return self._received.message

    @property
    def num_delivered(self) -> int:
        return self._received.num_delivered

    @property
    def num_pending(self) -> int:
        return self._received.num_pending

    def ack(self) -> None:
        self._outbox.put(self._received.reply, b"+ACK")

    def nak(self, *, delay_seconds: float = 0.0) -> None:
        body = b'-NAK {"delay":%d}' % int(delay_seconds * SECOND) if delay_seconds > 0 else b"-NAK"
        self._outbox.put(self._received.reply, body)

    def term(self, reason: str) -> None:
        self._outbox.put(self._received.reply, b"+TERM " + reason.encode())

    def in_progress(self) -> None:
        self._outbox.put(self._received.reply, b"+WPI")


class PullConsumer:
    """An open reader of a durable consumer; see `backends.Consumer`."""

    def __init__(
        self,
        connection: Connection,
        outbox: Outbox,
        *,
        stream: str,
        consumer: str,
        deliver: Callable[[Delivery], None],
        room: Callable[[], int],
    ) -> None:
        self._connection = connection
        self._outbox = outbox
        self._stream = stream
        self._consumer = consumer
        self._room = room
        self._changed = anyio.Event()
        self._ended = anyio.Event()
        self._error: BackendError = UnavailableError(f"consumer {consumer} of stream {stream} was closed")
        self._pulls = PullSubscription(
            connection,
            stream=stream,
            consumer=consumer,
            on_message=lambda received: deliver(JetStreamDelivery(received, outbox)),
            on_change=self._change,
        )

    async def open(self) -> None:
        await self._pulls.open()

    async def run(self) -> None:
        """Keep the consumer asked, until it is lost or this is cancelled."""
        try:
            while True:
                self._changed = anyio.Event()
                await self._ask()
                with anyio.move_on_after(HEARTBEAT_SECONDS):
                    await self._changed.wait()
                if self._pulls.error:
                    raise self._pulls.error
                if self._pulls.silent() and self._connection.ready:
                    await self._connection.api(f"CONSUMER.INFO.{self._stream}.{self._consumer}")
                    self._pulls.forget()
        except BackendError as error:
            self._error = error
        finally:
            self._ended.set()

    def refill(self) -> None:
        if self._wanted():
            self._change()

    async def lost(self) -> None:
        await self._ended.wait()
        raise self._error

    async def settled(self) -> None:
        await self._outbox.flush()

    async def stop(self) -> None:
        self._room = lambda: 0
        await self._pulls.close()

    async def _ask(self) -> None:
        wanted = self._wanted()
        if wanted and self._connection.ready:
            await self._pulls.ask(wanted, wait=True)

    def _wanted(self) -> int:
        """How much to ask for now; 0 where a further request would only be a small one."""
        wanted = self._room() - self._pulls.outstanding
        return wanted if wanted > 0 and wanted >= self._pulls.outstanding else 0

    def _change(self) -> None:
        if not self._changed.is_set():
            self._changed.set()
