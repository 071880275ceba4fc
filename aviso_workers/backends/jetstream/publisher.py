"""Publishing with acknowledgement: many at a time over one reply inbox, and a deadline for those of one call.

nats-py's publish_async is not used: its futures never end after a disconnect. Here a lost connection answers every
waiting publish at once with `OutcomeUnknownError`, and the engine repeats it under the same message id.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

import msgspec

from aviso_workers._fast import Arrival
from aviso_workers.aviso.topics import LONGEST_SUBJECT
from aviso_workers.backends import Outgoing, OutgoingChunk, PubAck
from aviso_workers.backends.jetstream import faults
from aviso_workers.backends.jetstream.connection import NatsConnection
from aviso_workers.backends.jetstream.inboxes import Inbox
from aviso_workers.backends.jetstream.wire import header_block, status
from aviso_workers.errors import BackendError, RefusedError, UnavailableError
from aviso_workers.jetstream import error_codes, subjects

MAX_BYTES_OF_CHARACTER = 4


class PublishAnswer(msgspec.Struct, frozen=True):
    """The server's answer to a message, or to a fast batch: its result, or, if it has a type, its progress."""

    type: str = ""
    stream: str = ""
    domain: str = ""
    seq: int = 0
    duplicate: bool = False
    val: str | None = None
    batch: str = ""
    count: int = 0
    error: dict[str, str | int] = {}


_decode_answer = msgspec.json.Decoder(PublishAnswer).decode


def decoded(data: bytes) -> PublishAnswer | None:
    """Return an answer; None where it is something else."""
    try:
        return _decode_answer(data)
    except msgspec.MsgspecError:
        return None


class JetStreamPublisher:
    """The publishing side of a connection. `open` it before use."""

    def __init__(self, connection: NatsConnection) -> None:
        self._connection = connection
        self._waiting: dict[bytes, tuple[_PendingMessages, int]] = {}
        """By the subject on which the acknowledgement comes: whose it is, and which of them."""
        self._inbox: Inbox

    async def open(self) -> None:
        self._inbox = await self._connection.open_inbox(Inbox(self._on_answers))
        self._connection.on_disconnect.add(self._on_disconnect)

    async def publish(self, outgoing: Sequence[Outgoing], *, timeout_seconds: float) -> list[PubAck | BackendError]:
        """Publish each message with an answer of its own, as `backends.Backend.publish_many` does."""
        if not self._connection.ready:
            # It would be kept and sent after the reconnect, when nobody waits for the answer any more.
            return [UnavailableError(f"{_described(each)}: {self._connection.unconnected}") for each in outgoing]
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        batch = _PendingMessages(outgoing)
        most = self._connection.nc.max_payload
        replies = [self._send(batch, index, each, most=most) for index, each in enumerate(outgoing)]
        # A cancel scope would cost as much as all the rest of a publish.
        timer = loop.call_later(timeout_seconds, batch.breaks, TimeoutError)
        try:
            if batch.missing:
                await batch.complete
        except (TimeoutError, ConnectionResetError):
            for index, each in enumerate(outgoing):
                if batch.results[index] is None:
                    batch.results[index] = self.unknown(each, sent_at)
        finally:
            timer.cancel()
            for reply in replies:
                self._waiting.pop(reply, None)
        return [result for result in batch.results if result is not None]

    async def publish_together(self, outgoing: Sequence[Outgoing], *, timeout_seconds: float) -> PubAck:
        """See `backends.Backend.publish_together`: an atomic batch (ADR-50), which the last message commits."""
        if not self._connection.ready:
            raise UnavailableError(f"{_described(outgoing[0])}: {self._connection.unconnected}")
        *others, last = _batch(outgoing, batch_id=secrets.token_hex(12))
        most = self._connection.nc.max_payload
        *encoded, _ = [encode(each, most=most) for each in (*others, last)]  # all of them, before any is sent
        for each, (subject, headers) in zip(others, encoded, strict=True):
            self._connection.wire.send(subject, each.message.data, headers=headers)
        [result] = await self.publish([last], timeout_seconds=timeout_seconds)
        if isinstance(result, PubAck):
            return result
        if result.code == error_codes.DUPLICATE_IN_BATCH:
            return PubAck(stream=last.stream, sequence=0, duplicate=True)
        raise result

    def _send(self, batch: _PendingMessages, index: int, outgoing: Outgoing, *, most: int) -> bytes:
        """Send one; returns where its acknowledgement comes."""
        try:
            subject, headers = encode(outgoing, most=most)
        except RefusedError as refused:
            batch.ends(index, refused)
            return b""
        reply = next(self._inbox.replies)
        self._waiting[reply] = batch, index
        self._connection.wire.send(subject, outgoing.message.data, reply=reply, headers=headers)
        return reply

    def unknown(self, outgoing: Outgoing, sent_at: float) -> BackendError:
        """Return what a missing answer means to what was sent at that time of the event loop."""
        try:
            self._connection.check_allowed(outgoing.message.subject, since=sent_at, answers=False)
        except RefusedError as refused:
            return refused
        return faults.outcome_unknown(_described(outgoing))

    def _on_answers(self, arrivals: Sequence[Arrival]) -> None:
        for subject, _, headers, data in arrivals:
            if found := self._waiting.get(subject):
                batch, index = found
                outgoing = batch.outgoing[index]
                if (result := self._result(outgoing, headers, data)) is None:
                    self._connection.tell_foreign(f"publish to stream {outgoing.stream}", data)
                    continue
                del self._waiting[subject]
                batch.ends(index, result)

    def _result(self, outgoing: Outgoing, headers: bytes, data: bytes) -> PubAck | BackendError | None:
        """Return what an answer says of a message; None where it is the answer to another one."""
        if headers and status(headers)[0] == "503":
            return UnavailableError(
                f"{_described(outgoing)}: no stream takes this subject, or its leader is being elected"
            )
        if (answer := decoded(data)) is None:
            return None
        is_own = answer.stream == outgoing.stream and self._connection.is_own(answer.domain)
        if error := answer.error:
            code = error.get("err_code")
            if not is_own and answer.stream and code != error_codes.WRONG_STREAM:  # which names the other stream
                return None
            if setting := error_codes.ALLOWING_SETTINGS.get(code):
                error["description"] = f"stream {outgoing.stream} does not take it, switch on its {setting}"
            return faults.from_api(_described(outgoing), error)
        if not is_own:
            return None
        total = int(answer.val) if answer.val is not None and answer.val.lstrip("-").isdecimal() else None
        return PubAck(stream=answer.stream, sequence=answer.seq, duplicate=answer.duplicate, total=total)

    def _on_disconnect(self) -> None:
        for batch, _ in self._waiting.values():
            batch.breaks(ConnectionResetError)


class _PendingMessages:
    """Messages that are published together."""

    def __init__(self, outgoing: Sequence[Outgoing]) -> None:
        self.outgoing = outgoing
        self.results: list[PubAck | BackendError | None] = [None] * len(outgoing)
        self.missing = len(outgoing)
        self.complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ends(self, index: int, result: PubAck | BackendError) -> None:
        self.results[index] = result
        self.missing -= 1
        if not self.missing and not self.complete.done():
            self.complete.set_result(None)

    def breaks(self, error: type[Exception]) -> None:
        """Stop waiting for answers, because of this error."""
        if not self.complete.done():
            self.complete.set_exception(error)


def _batch(outgoing: Sequence[Outgoing], *, batch_id: str) -> list[Outgoing]:
    """Return the messages of an atomic batch."""
    batch = []
    for number, each in enumerate(outgoing, 1):
        fields = {"Nats-Batch-Id": batch_id, "Nats-Batch-Sequence": str(number)}
        if number == len(outgoing):
            fields["Nats-Batch-Commit"] = "1"
        message = msgspec.structs.replace(each.message, headers={**(each.message.headers or {}), **fields})
        batch.append(msgspec.structs.replace(each, message=message))
    return batch


def encode(outgoing: Outgoing, *, most: int) -> tuple[bytes, bytes]:
    """Subject and header block of a message. Raises `RefusedError` where it has more bytes than `most`, or no subject.

    It must not be sent then: a server closes the connection on which it comes.
    """
    message = outgoing.message
    fields = {"Nats-Msg-Id": outgoing.message_id, "Nats-Expected-Stream": outgoing.stream}
    if message.headers and "Nats-Incr" in message.headers:  # which a server takes with no expectations beside it
        del fields["Nats-Expected-Stream"]
    headers = header_block({**message.headers, **fields} if message.headers else fields)
    size = len(headers) + len(message.data)
    if size > most:
        raise RefusedError(f"{_described(outgoing)}: {size} bytes, the server takes {most}")
    if why := subjects.why_refused(message.subject):
        raise RefusedError(f"{_described(outgoing)}: {why}")
    return message.subject.encode(), headers


def encode_all(stream: str, chunk: OutgoingChunk, *, most: int) -> list[tuple[bytes, bytes, bytes]]:
    """Subject, header block and data of each message. Raises as `encode` does, which makes the same of each."""
    ends = b"\r\nNats-Expected-Stream: %b\r\n\r\n" % stream.encode()
    headers = [b"NATS/1.0\r\nNats-Msg-Id: %b%b" % (message_id.encode(), ends) for message_id in chunk.message_ids]
    largest = max(map(len, headers)) + max(map(len, chunk.data))
    plain = _are_plain(chunk.subjects) and _are_plain(chunk.message_ids)
    short = max(map(len, chunk.subjects)) * MAX_BYTES_OF_CHARACTER <= LONGEST_SUBJECT
    if any(chunk.headers) or largest > most or not (plain and short):
        return [(*encode(each, most=most), each.message.data) for each in chunk.each(stream)]
    return list(zip([subject.encode() for subject in chunk.subjects], headers, chunk.data, strict=True))


def _are_plain(texts: Sequence[str]) -> bool:
    """Return whether there is a text each time, without spaces or line breaks."""
    joined = "".join(texts)
    return all(texts) and joined.isprintable() and " " not in joined


def _described(outgoing: Outgoing) -> str:
    return f"publish {outgoing.message.subject}"
