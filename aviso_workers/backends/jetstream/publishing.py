"""Publishing with acknowledgement: many at a time over one reply inbox, each with a deadline of its own.

nats-py's publish_async is not used: its futures never end after a disconnect. Here a lost connection answers every
waiting publish at once with `OutcomeUnknownError`, and the engine repeats it under the same message id.
"""

from __future__ import annotations

import asyncio
import itertools

import anyio
import msgspec

from aviso_workers.backends import PubAck
from aviso_workers.backends.jetstream import faults
from aviso_workers.backends.jetstream.connection import Connection
from aviso_workers.backends.jetstream.wire import header_block, status
from aviso_workers.codec import Message
from aviso_workers.errors import RefusedError, UnavailableError

__all__ = ["Publisher"]

_Arrived = tuple[bytes, bytes]
"""Headers and data of an answer."""


class _Answer(msgspec.Struct, frozen=True):
    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: dict[str, str | int] | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


class Publisher:
    """The publishing side of a connection. `open` it before use."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._waiting: dict[bytes, asyncio.Future[_Arrived]] = {}
        """By the subject on which the acknowledgement comes."""
        self._numbers = itertools.count(1)
        self._inbox = ""

    async def open(self) -> None:
        self._inbox = self._connection.nc.new_inbox()
        await self._connection.listen(f"{self._inbox}.*", self._on_answer)
        self._connection.on_disconnect.add(self._on_disconnect)

    async def publish(self, message: Message, *, message_id: str, stream: str, timeout_seconds: float) -> PubAck:
        what = f"publish {message.subject}"
        if not self._connection.ready:
            # It would be kept and sent after the reconnect, when nobody waits for the answer any more.
            raise UnavailableError(f"{what}: not connected")
        if message.subject.split() != [message.subject]:
            raise RefusedError(f"{what}: {message.subject!r} is no subject")
        headers = header_block({**(message.headers or {}), "Nats-Msg-Id": message_id, "Nats-Expected-Stream": stream})
        size = len(headers) + len(message.data)
        if size > self._connection.nc.max_payload:
            # A server closes the connection on which it comes.
            raise RefusedError(f"{what}: {size} bytes, the server takes {self._connection.nc.max_payload}")
        reply = b"%b.%d" % (self._inbox.encode(), next(self._numbers))
        answer = self._waiting[reply] = asyncio.get_running_loop().create_future()
        sent = anyio.current_time()
        try:
            self._connection.wire.send(message.subject.encode(), message.data, reply=reply, headers=headers)
            with anyio.fail_after(timeout_seconds):
                return _pub_ack(what, *await answer)
        except (TimeoutError, ConnectionResetError) as error:
            self._connection.check_allowed(message.subject, since=sent)
            raise faults.outcome_unknown(what) from error
        finally:
            del self._waiting[reply]

    def _on_answer(self, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        answer = self._waiting.get(subject)
        if answer is not None and not answer.done():
            answer.set_result((headers, data))

    def _on_disconnect(self) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError("the connection was lost before the acknowledgement"))


def _pub_ack(what: str, headers: bytes, data: bytes) -> PubAck:
    if status(headers)[0] == "503":
        raise UnavailableError(f"{what}: no stream takes this subject, or its leader is being elected")
    answer = _decode_answer(data)
    if answer.error is not None:
        raise faults.from_api(what, answer.error)
    return PubAck(stream=answer.stream, sequence=answer.seq, duplicate=answer.duplicate)
