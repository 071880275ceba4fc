"""Publishing many to streams that take JetStream's fast batches (ADR-50, nats-server 2.14, `allow_batched`).

`JetStreamBackend.publish_many` comes here. What goes to one stream is one batch: the messages leave at once, the last
of them commits it, and the server answers with how many it has, instead of once for each. What a batch does not have,
because it was interrupted at a message that is refused, or because the stream takes no batches, goes the ordinary way
through `publisher`, where each gets an answer of its own; under the same message id, so that nothing is stored twice.
A batch that nobody answers, because the connection was lost, may be stored in part: the engine has to repeat it.

The gap mode is `fail`: the server ends a batch at the first message that it misses or refuses, so that a count of n
means the first n. Its pacing is for those who send without end and is not heeded here: a batch is no more than what
may be under way without one.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import anyio

from aviso_workers._fast import Arrival
from aviso_workers.backends import Outgoing, OutgoingChunk, PubAck
from aviso_workers.backends.jetstream import faults
from aviso_workers.backends.jetstream.connection import NatsConnection
from aviso_workers.backends.jetstream.inboxes import Inbox
from aviso_workers.backends.jetstream.publisher import JetStreamPublisher, PublishAnswer, decoded, encode, encode_all
from aviso_workers.errors import BackendError, RefusedError
from aviso_workers.jetstream import error_codes
from aviso_workers.jetstream.info import StreamConfig

FEWEST = 10
"""The least batch has about as many answers: fewer messages are better acknowledged one by one."""
FLOW = 500
"""The server says how far it is after so many messages at the latest, and more often at first."""
START, ADD, COMMIT = 0, 1, 2


class _FastBatch:
    """Messages of one stream. It is over when there is an answer, or will be none."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.messages: list[tuple[bytes, bytes, bytes]] = []
        """Subject, header block and data of each."""
        self.places: list[int] = []
        """Of each, among those that are published together."""
        self.over = anyio.Event()
        self.answer: PublishAnswer | None = None

    def ends(self, answer: PublishAnswer) -> None:
        self.answer = answer
        self.over.set()


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
        """Return what of it can go as batches. A message that is refused before it is sent would end its batch."""
        batches: dict[str, _FastBatch] = {}
        if len(outgoing) < FEWEST or not self._connection.ready:
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
                # Of one message: there is something between us and the server that does not hand on what makes a batch.
                self._streams.discard(batch.stream)
                answer = PublishAnswer(stream=batch.stream)
            if not answer.type:
                batch.ends(answer)

    def _is_of(self, batch: _FastBatch, answer: PublishAnswer) -> bool:
        return answer.stream == batch.stream and self._connection.is_own(answer.domain)

    def _on_disconnect(self) -> None:
        for batch in self._under_way.values():
            batch.over.set()
