"""Publishing with acknowledgement: many at a time over one reply inbox, each with a deadline of its own.

nats-py's publish_async is not used: its futures never end after a disconnect. Here a lost connection answers every
waiting publish at once with `OutcomeUnknownError`, and the engine repeats it under the same message id.
"""

from __future__ import annotations

import asyncio

import anyio
import msgspec
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from aviso_workers.backends import PubAck
from aviso_workers.backends.jetstream import faults
from aviso_workers.backends.jetstream.connection import Connection
from aviso_workers.codec import Message
from aviso_workers.errors import RefusedError, UnavailableError

__all__ = ["Publisher"]

HEADER_FRAME = len(b"NATS/1.0\r\n\r\n")


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
        self._waiting: dict[str, asyncio.Future[Msg]] = {}
        self._count = 0
        self._inbox = ""
        self._subscription: Subscription | None = None

    async def open(self) -> None:
        self._inbox = self._connection.nc.new_inbox()
        self._subscription = await self._connection.nc.subscribe(f"{self._inbox}.*", cb=self._on_answer)
        self._connection.on_disconnect.add(self._on_disconnect)

    async def publish(self, message: Message, *, message_id: str, stream: str, timeout_seconds: float) -> PubAck:
        what = f"publish {message.subject}"
        if not self._connection.ready:
            # nats-py would buffer it and send it after the reconnect, when nobody waits for the answer any more.
            raise UnavailableError(f"{what}: not connected")
        headers = {**(message.headers or {}), "Nats-Msg-Id": message_id, "Nats-Expected-Stream": stream}
        size = len(message.data) + HEADER_FRAME + sum(len(f"{k}: {v}\r\n".encode()) for k, v in headers.items())
        if size > self._connection.nc.max_payload:
            # A server closes the connection on which it comes.
            raise RefusedError(f"{what}: {size} bytes, the server takes {self._connection.nc.max_payload}")
        self._count += 1
        token = str(self._count)
        answer = asyncio.get_running_loop().create_future()
        self._waiting[token] = answer
        sent = anyio.current_time()
        try:
            with faults.translated(what):
                await self._connection.nc.publish(
                    message.subject,
                    message.data,
                    reply=f"{self._inbox}.{token}",
                    headers=headers,
                )
            with anyio.fail_after(timeout_seconds):
                return _pub_ack(what, await answer)
        except (TimeoutError, ConnectionResetError) as error:
            self._connection.check_allowed(message.subject, since=sent)
            raise faults.outcome_unknown(what) from error
        finally:
            del self._waiting[token]

    async def _on_answer(self, message: Msg) -> None:
        answer = self._waiting.get(message.subject.rpartition(".")[2])
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _on_disconnect(self) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError("the connection was lost before the acknowledgement"))


def _pub_ack(what: str, message: Msg) -> PubAck:
    if message.headers and message.headers.get("Status") == "503":
        raise UnavailableError(f"{what}: no stream takes this subject, or its leader is being elected")
    answer = _decode_answer(message.data)
    if answer.error is not None:
        raise faults.from_api(what, answer.error)
    return PubAck(stream=answer.stream, sequence=answer.seq, duplicate=answer.duplicate)
