"""The short way through nats-py: what arrives goes straight to who listens, what is sent leaves together.

nats-py gives each message a queue, a task switch and an object of its own, and each publish a coroutine. Here a
listener is called with messages that followed each other in a read of the socket, and what is sent within one turn of
the event loop becomes one write.
`NatsConnection` opens a wire with `attach` and hands it to `publisher`, `pull_requests` and `consumer`.

This file and `credentials` are the only ones that touch nats-py's private parts. They are those of the versions in
`TESTED`; where `attach` finds anything else it takes `PublicWire`, which does the same by nats-py's public names at
nats-py's speed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Protocol, TypeAlias

from anyio.lowlevel import checkpoint
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.errors import Error as NatsError
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

from aviso_workers._fast import Arrival, split

TESTED = ("2.16.",)
"""Beginnings of the nats-py versions whose private parts are those that are used here."""
PRIVATE = (
    "_ps",
    "_pending",
    "_pending_data_size",
    "_max_pending_size",
    "_flush_queue",
    "_flush_pending",
    "_transport",
    "_send_ping",
)
HEADER_LINE = b"NATS/1.0"
LINE_BREAKS = str.maketrans("\r\n", "  ")
NEVER_SECONDS = 1_000_000_000

Listener = Callable[[Sequence[Arrival]], None]
"""Called with messages in the order in which they came. Must not raise."""


Interest: TypeAlias = Subscription
"""That we listen to a subject."""


class Wire(Protocol):
    slow_because: str
    """Why this is not the short way; empty where it is."""
    acks: int
    """How many messages were acknowledged by now."""

    async def listen(self, subject: str, listener: Listener) -> Interest: ...

    def mute(self, interest: Interest) -> None:
        """Ask the server to send no more. What is on its way still arrives."""

    async def forget(self, interest: Interest) -> None:
        """End a subscription: nothing of it arrives any more."""

    def send(self, subject: bytes, data: bytes, *, reply: bytes = b"", headers: bytes = b"") -> None:
        """Publish, soon. While disconnected it is kept, as far as there is room, and dropped beyond that."""

    def ack(self, reply: bytes) -> None:
        """Acknowledge a message of a consumer, as `send` does."""

    async def ping(self, pong: asyncio.Future[bool]) -> None:
        """Send what waits and then a PING, which makes `pong` true when it is answered."""

    def abort(self) -> None:
        """Drop the socket, with what is still to be sent."""


def attach(nc: Client) -> Wire:
    """Return the wire of a client that has just connected."""
    found = version("nats-py")
    missing = [name for name in PRIVATE if not hasattr(nc, name)]
    if missing:
        return PublicWire(nc, because=f"nats-py {found} has no {missing[0]}")
    if not found.startswith(TESTED):
        return PublicWire(nc, because=f"nats-py {found} was not tested, {' '.join(TESTED)}x was")
    return _ShortWire(nc)


def cluster_size(nc: Client) -> int:
    """Return how many servers of its cluster the server tells its clients of; 0 where it is in no cluster."""
    told = getattr(nc, "_server_info", {})
    return len(told.get("connect_urls") or ("itself",)) if told.get("cluster") else 0


class Headers(Mapping[str, str]):
    """A header block, decoded when somebody looks into it. Of several values of one name it has the last."""

    __slots__ = ("_block", "_fields")

    def __init__(self, block: bytes) -> None:
        self._block = block
        self._fields: dict[str, str] | None = None

    @property
    def raw(self) -> bytes:
        """The headers' bytes, as they came over the wire."""
        return self._block

    def __getitem__(self, name: str) -> str:
        return self._decoded()[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.encode() in self._block and name in self._decoded()

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded())

    def __len__(self) -> int:
        return len(self._decoded())

    def __repr__(self) -> str:
        return repr(self._decoded())

    def _decoded(self) -> dict[str, str]:
        if self._fields is None:
            self._fields = {}
            for line in self._block.split(b"\r\n")[1:]:
                name, colon, value = line.partition(b":")
                name = name.strip()
                if colon and name.isascii() and len(name.split()) < 2:
                    self._fields[name.decode()] = value.strip().decode("utf-8", "replace")
        return self._fields


class HeaderBlocks:
    """Header blocks as `Headers`, made where somebody looks; None for an empty one."""

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Sequence[bytes]) -> None:
        self._blocks = blocks

    def __iter__(self) -> Iterator[Headers | None]:
        return (Headers(block) if block else None for block in self._blocks)


def header_block(fields: Mapping[str, str]) -> bytes:
    """Headers as they are sent. A line break in a value becomes a space, because it would end the header."""
    lines = [
        f"{name}: {value.strip() if value.isprintable() else value.strip().translate(LINE_BREAKS)}\r\n"
        for name, value in fields.items()
    ]
    return b"NATS/1.0\r\n%b\r\n" % "".join(lines).encode()


def status(block: bytes) -> tuple[str, str]:
    """Return the status that a header block begins with, as `503`, and its description; two empty texts where it has
    none.
    """
    first = block[len(HEADER_LINE) : block.find(b"\r\n")].decode("utf-8", "replace").split(maxsplit=1)
    return (first[0], first[1].strip() if len(first) > 1 else "") if first else ("", "")


class _ShortWire:
    """The `Wire` that writes to nats-py's transport itself, which costs less for each message."""

    slow_because = ""

    def __init__(self, nc: Client) -> None:
        self._nc = nc
        self._loop = asyncio.get_running_loop()
        self._dispatcher = nc._ps = ListeningParser(nc, nc._ps)
        self._waiting: list[bytes] = []
        self.acks = 0

    async def listen(self, subject: str, listener: Listener) -> Interest:
        # Through nats-py, which subscribes again after a reconnect.
        interest = await self._nc.subscribe(subject)
        self._dispatcher.listeners[interest._id] = listener
        return interest

    def mute(self, interest: Interest) -> None:
        self._write(b"UNSUB %d\r\n" % interest._id)

    async def forget(self, interest: Interest) -> None:
        self._dispatcher.listeners.pop(interest._id, None)
        with suppress(NatsError, OSError):
            await interest.unsubscribe()

    def send(self, subject: bytes, data: bytes, *, reply: bytes = b"", headers: bytes = b"") -> None:
        if headers:
            sizes = (len(headers), len(headers) + len(data))
            self._write(b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject, reply, *sizes, headers, data))
        else:
            self._write(b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(data), data))

    def ack(self, reply: bytes) -> None:
        self.acks += 1
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting += (b"PUB ", reply, b"  4\r\n+ACK\r\n")

    async def ping(self, pong: asyncio.Future[bool]) -> None:
        self._flush()
        await self._nc._flush_pending(force_flush=True)
        if self._nc.is_connected and not pong.done():  # else it is lost, and perhaps there is another one by now
            await self._nc._send_ping(pong)

    def abort(self) -> None:
        transport = self._nc._transport
        if isinstance(transport, TcpTransport) and transport._io_writer is not None:
            with suppress(AttributeError):  # asyncio's, of a transport whose connection is lost already
                transport._io_writer.transport.abort()

    def _write(self, command: bytes) -> None:
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(command)

    def _flush(self) -> None:
        """Hand over to nats-py's buffer, in which its own commands wait as well, and wake its writer."""
        nc, waiting = self._nc, b"".join(self._waiting)
        self._waiting.clear()
        if not waiting or nc.is_closed:
            return
        if not nc.is_connected and nc._pending_data_size + len(waiting) > nc._max_pending_size:
            return  # what is not settled or acknowledged comes again
        nc._pending.append(waiting)
        nc._pending_data_size += len(waiting)
        writer = nc._flush_queue
        if nc.is_connected and writer is not None and writer.empty():
            writer.put_nowait(self._loop.create_future())


class ListeningParser(Parser):
    """nats-py's parser, from which it takes the messages for our listeners; all else it leaves to it."""

    def __init__(self, nc: Client, before: Parser) -> None:
        super().__init__(nc)
        self.listeners: dict[int, Listener] = {}
        """By the id of the subscription."""
        self._rest = bytearray(before.buf)

    def reset(self) -> None:
        """nats-py calls it for a new connection."""
        super().reset()
        self._rest = bytearray()
        self._needed = 0
        """How many bytes make the next command whole, as far as that is known."""

    async def parse(self, data: bytes = b"") -> None:
        """Take what a read has brought. Raises nats-py's `ProtocolError`."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return
            data = bytes(self._rest)
        rest = self._rest = bytearray()
        begin = self._needed = 0
        while begin < len(data):
            sid, arrived, end, size = split(data, begin)
            if listener := self.listeners.get(sid):
                self.nc.stats["in_msgs"] += len(arrived)
                self.nc.stats["in_bytes"] += size
                _tell(listener, arrived)
                begin = end
                continue
            if not arrived:
                end = _end_of_command(data, begin)
                if not begin < end <= len(data):
                    self._needed = end - begin
                    break
            await super().parse(data[begin:end])
            if self._rest is not rest:
                return  # it was reset meanwhile: what is left is of the connection before
            begin = end
        rest += data[begin:]


def _end_of_command(data: bytes, begin: int) -> int:
    """Return where a command that begins here ends, which may be behind what has come; the beginning where that cannot
    be told yet. Raises `ProtocolError` for a message that is none of NATS's protocol.
    """
    line_end = data.find(b"\r\n", begin)
    if line_end < 0:
        return begin
    line = data[begin:line_end]
    match line.split(b" "):
        case [b"MSG", _, sid, size] | [b"MSG", _, sid, _, size]:
            head = b"0"
        case [b"HMSG", _, sid, head, size] | [b"HMSG", _, sid, _, head, size]:
            pass
        case [b"MSG" | b"HMSG", *_]:
            raise ProtocolError(f"nats: malformed {line!r}")
        case _:
            return line_end + 2
    if not (sid.isdigit() and head.isdigit() and size.isdigit()):
        raise ProtocolError(f"nats: malformed {line!r}")
    return line_end + 2 + int(size) + 2


def _tell(listener: Listener, arrived: Sequence[Arrival]) -> None:
    try:
        listener(arrived)
    except Exception as error:  # it would end nats-py's reader
        asyncio.get_running_loop().call_exception_handler({"message": "a listener failed", "exception": error})


class PublicWire:
    """See `Wire`: by public names only, and slower. What a subscription still had on its way when it was forgotten is
    lost to it, and delivered again."""

    def __init__(self, nc: Client, *, because: str) -> None:
        self.slow_because = because
        self._nc = nc
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[bytes, bytes, bytes, bytes]] = deque()
        self.acks = 0
        self._sending: asyncio.Task[None] | None = None

    async def listen(self, subject: str, listener: Listener) -> Interest:
        async def hear(message: Msg) -> None:
            headers = _block_of(message.headers) if message.headers else b""
            listener([(message.subject.encode(), message.reply.encode(), headers, message.data)])

        # No limits: nats-py drops what exceeds them, and what comes is limited by what was asked for.
        return await self._nc.subscribe(subject, cb=hear, pending_msgs_limit=0, pending_bytes_limit=0)

    def mute(self, interest: Interest) -> None:
        pass

    async def forget(self, interest: Interest) -> None:
        with suppress(NatsError, OSError):
            await interest.unsubscribe()

    def send(self, subject: bytes, data: bytes, *, reply: bytes = b"", headers: bytes = b"") -> None:
        self._waiting.append((subject, data, reply, headers))
        if self._sending is None or self._sending.done():
            self._sending = self._loop.create_task(self._send())

    def ack(self, reply: bytes) -> None:
        self.acks += 1
        self.send(reply, b"+ACK")

    async def ping(self, pong: asyncio.Future[bool]) -> None:
        if self._sending is not None:
            await self._sending
        while self._nc.pending_data_size and self._nc.is_connected:  # a PING of nats-py overtakes what waits
            await checkpoint()
        if pong.done():  # it is lost, and perhaps there is another one by now
            return
        # It never times out, because a PONG that comes after that ends nats-py's reader.
        flushing = self._loop.create_task(self._nc.flush(timeout=NEVER_SECONDS))
        flushing.add_done_callback(lambda flushed: None if pong.done() else pong.set_result(not flushed.cancelled()))
        pong.add_done_callback(lambda _: flushing.cancel())

    def abort(self) -> None:
        pass

    async def _send(self) -> None:
        while self._waiting:
            subject, data, reply, headers = self._waiting.popleft()
            fields = dict(Headers(headers)) if headers else None
            with suppress(NatsError):  # not connected, and nats-py's buffer is full
                await self._nc.publish(subject.decode(), data, reply=reply.decode(), headers=fields)


def _block_of(headers: Mapping[str, str]) -> bytes:
    """Return the header block from which nats-py made these."""
    fields = dict(headers)
    said = f"{fields.pop('Status', '')} {fields.pop('Description', '')}".strip()
    block = header_block(fields)
    return block.replace(HEADER_LINE, b"%b %b" % (HEADER_LINE, said.encode()), 1) if said else block
