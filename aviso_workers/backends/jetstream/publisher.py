"""Publishing with acknowledgement: many at a time over one reply inbox, and a deadline for those of one call.

nats-py's publish_async is not used: its futures never end after a disconnect. Here a lost connection answers every
waiting publish at once with `OutcomeUnknownError`, and the engine repeats it under the same message id.

Many go to streams that take them as JetStream's fast batches (ADR-50, nats-server 2.14, `allow_batched`): `Ingester`.
What goes to one stream is one batch: the messages leave at once, the last of them commits it, and the server answers
with how many it has, instead of once for each. What a batch does not have, because it was interrupted at a message that
is refused, or because the stream takes no batches, goes the ordinary way, where each gets an answer of its own; under
the same message id, so that nothing is stored twice. A batch that nobody answers, because the connection was lost, may
be stored in part: the engine has to repeat it.

The gap mode is `fail`: the server ends a batch at the first message that it misses or refuses, so that a count of n
means the first n. Its pacing is for those who send without end and is not heeded here: a batch is no more than what
may be under way without one.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

import anyio
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
from aviso_workers.jetstream.info import StreamConfig

MAX_BYTES_OF_CHARACTER = 4
FEWEST = 10
"""The fewest messages of a fast batch: fewer are better acknowledged one by one."""
FLOW = 500
"""The server says how far it is after so many messages at the latest, and more often at first."""
START, ADD, COMMIT = 0, 1, 2


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
        """By the subject on which an acknowledgement comes: the messages that are published together, and the index of
        its own."""
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


class _FastBatch(msgspec.Struct, eq=False):
    """Messages of one stream. It is over when there is an answer, or will be none."""

    stream: str
    messages: list[tuple[bytes, bytes, bytes]] = []
    """Subject, header block and data of each."""
    places: list[int] = []
    """The index of each message among those that are published together."""
    over: anyio.Event = msgspec.field(default_factory=anyio.Event)
    answer: PublishAnswer | None = None


class Ingester:
    """The bulk publishing of a connection. `open` it before use."""

    def __init__(self, connection: NatsConnection, publisher: JetStreamPublisher) -> None:
        self._connection = connection
        self._publisher = publisher
        self._streams: set[str] = set()
        """Those that take fast batches, as far as we know."""
        self._under_way: dict[bytes, _FastBatch] = {}
        """By id."""
        self._inbox: Inbox

    async def open(self) -> None:
        self._inbox = await self._connection.open_inbox(Inbox(self._on_answers, ending=".>"))
        self._connection.on_disconnect.add(self._on_disconnect)

    def learn(self, config: StreamConfig) -> None:
        """Take note of a stream's configuration."""
        if config.allow_batched:
            self._streams.add(config.name)
        else:
            self._streams.discard(config.name)

    async def publish(self, outgoing: Sequence[Outgoing], *, timeout_seconds: float) -> list[PubAck | BackendError]:
        """Publish in batches what can be, as `backends.Backend.publish_many` does."""
        if len(outgoing) < FEWEST:
            return await self._publisher.publish(outgoing, timeout_seconds=timeout_seconds)
        sent_at = anyio.current_time()
        results: dict[int, PubAck | BackendError] = {}
        for batch in await self._ingest(self._batches(outgoing), timeout_seconds=timeout_seconds):
            if batch.answer is None:
                results.update((place, self._publisher.unknown(outgoing[place], sent_at)) for place in batch.places)
            else:
                ack = PubAck(stream=batch.answer.stream, sequence=0)
                results.update(dict.fromkeys(batch.places[: batch.answer.count], ack))
        left = [place for place in range(len(outgoing)) if place not in results]
        if left:
            left_seconds = max(0.0, sent_at + timeout_seconds - anyio.current_time())
            answers = await self._publisher.publish([outgoing[place] for place in left], timeout_seconds=left_seconds)
            results.update(zip(left, answers, strict=True))
        return [results[place] for place in range(len(outgoing))]

    async def publish_chunk(self, stream: str, chunk: OutgoingChunk, *, timeout_seconds: float) -> int:
        """Publish a chunk as one batch, as `backends.Backend.publish_chunk` does."""
        if stream not in self._streams or len(chunk) < FEWEST or not self._connection.ready:
            return 0
        batch = _FastBatch(stream)
        try:
            batch.messages = encode_all(stream, chunk, most=self._connection.nc.max_payload)
        except RefusedError:  # of one: there is an answer for each where they are published one by one
            return 0
        await self._ingest([batch], timeout_seconds=timeout_seconds)
        if batch.answer is None:
            raise faults.outcome_unknown(f"publish {len(chunk)} messages to stream {stream}")
        return batch.answer.count

    def _batches(self, outgoing: Sequence[Outgoing]) -> list[_FastBatch]:
        """Return a batch for each stream that takes batches and has enough messages. A message that we refuse before it
        is sent is in none: it would end its batch.
        """
        batches: dict[str, _FastBatch] = {}
        if not self._connection.ready:
            return []
        most = self._connection.nc.max_payload
        for place, each in enumerate(outgoing):
            if each.stream not in self._streams:
                continue
            try:
                subject, headers = encode(each, most=most)
            except RefusedError:
                continue
            batch = batches.get(each.stream) or batches.setdefault(each.stream, _FastBatch(each.stream))
            batch.messages.append((subject, headers, each.message.data))
            batch.places.append(place)
        return [batch for batch in batches.values() if len(batch.messages) >= FEWEST]

    async def _ingest(self, batches: list[_FastBatch], *, timeout_seconds: float) -> list[_FastBatch]:
        """Send the batches; returns them when they are over, or the time is."""
        ids = [self._send(batch) for batch in batches]
        try:
            with anyio.move_on_after(timeout_seconds):
                for batch in batches:
                    await batch.over.wait()
        finally:
            for batch_id in ids:
                del self._under_way[batch_id]
        return batches

    def _send(self, batch: _FastBatch) -> bytes:
        """Returns the batch's id."""
        batch_id = secrets.token_hex(8).encode()  # a stream has one batch of an id, whoever sends to it
        self._under_way[batch_id] = batch
        prefix = b"%b.%b.%d.fail" % (self._inbox.subject.encode(), batch_id, FLOW)
        send, last = self._connection.wire.send, len(batch.messages)
        for number, (subject, headers, data) in enumerate(batch.messages, 1):
            operation = START if number == 1 else COMMIT if number == last else ADD
            send(subject, data, reply=b"%b.%d.%d.$FI" % (prefix, number, operation), headers=headers)
        return batch_id

    def _on_answers(self, arrivals: Sequence[Arrival]) -> None:
        for subject, _, _, data in arrivals:
            batch_id = subject[len(self._inbox.subject) + 1 :].partition(b".")[0]
            batch = self._under_way.get(batch_id)
            if batch is None or batch.answer:
                continue
            answer = decoded(data) if data else PublishAnswer(stream=batch.stream)  # it is a status: no stream takes it
            if answer is None or not (answer.type or self._is_of(batch, answer)):
                self._connection.tell_foreign(f"publish to stream {batch.stream}", data)
                continue
            if answer.error.get("err_code") == error_codes.FAST_BATCHES_OFF:
                self._streams.discard(batch.stream)
            if data and not (answer.type or answer.error or answer.batch):
                # The answer to one message: something between us and the server does not pass on what makes a batch.
                self._streams.discard(batch.stream)
                answer = PublishAnswer(stream=batch.stream)
            if not answer.type:
                batch.answer = answer
                batch.over.set()

    def _is_of(self, batch: _FastBatch, answer: PublishAnswer) -> bool:
        return answer.stream == batch.stream and self._connection.is_own(answer.domain)

    def _on_disconnect(self) -> None:
        for batch in self._under_way.values():
            batch.over.set()
