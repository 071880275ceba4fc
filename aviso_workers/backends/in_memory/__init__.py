"""The in-memory backend: JetStream's semantics without a server, for development and tests.

A real queue: messages are stored, limits bite, acks count, and what is not settled comes back. `stream` holds the rules
and knows no event loop, `account` holds the streams, `consumer` is the contract's face. What it does not do: outlive
its process, replicate, or keep messages by anything but limits. `num_replicas`, `storage` and `compression` are noted
and mean nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from itertools import takewhile
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.lowlevel import checkpoint

from aviso_workers import config
from aviso_workers.aviso.codec import Message
from aviso_workers.backends import (
    Administration,
    BulkKeyValue,
    Chunk,
    ConnectionListener,
    ConsumerInfo,
    Delivery,
    ForeignListener,
    Management,
    Outgoing,
    OutgoingChunk,
    PubAck,
    StreamInfo,
    buckets,
)
from aviso_workers.backends.in_memory.account import InMemoryAccount
from aviso_workers.backends.in_memory.consumer import Dispatcher, InMemoryConnection, InMemoryConsumer
from aviso_workers.clocks import EPOCH, Clock, LoopClock
from aviso_workers.errors import BackendError, RefusedError, UnavailableError
from aviso_workers.jetstream.specs import ConsumerSpec, StreamSpec
from aviso_workers.jetstream.subjects import pattern

NO_SERVER = "the in-memory backend has no server to administer; use `kind: jetstream`"


class InMemoryBackend:
    """See `backends.Backend`. Connected while its `async with` block runs. It may be entered again on the same event
    loop, and then holds what it held.
    """

    def __init__(
        self,
        settings: config.InMemory,
        *,
        clock: Clock | None = None,
        on_connection: ConnectionListener | None = None,
        on_foreign: ForeignListener | None = None,
    ) -> None:
        self.clock: Clock = clock or LoopClock()
        self._settings = settings
        self._on_foreign = on_foreign
        self._account = InMemoryAccount(settings, self.clock)
        self.connection = InMemoryConnection(on_connection)
        self._dispatchers: dict[tuple[str, str], Dispatcher] = {}

    async def __aenter__(self) -> Self:
        self.connection.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.connection.close()

    def disconnect(self, reason: str = "the test took it away") -> None:
        """Play a lost connection: requests fail, nothing is delivered, settlements are lost, readings end."""
        self.connection.lose(reason)

    def reconnect(self) -> None:
        self.connection.open()

    def peer(
        self, *, on_connection: ConnectionListener | None = None, on_foreign: ForeignListener | None = None
    ) -> InMemoryBackend:
        """Another client of the same streams, with a connection of its own."""
        peer = InMemoryBackend(self._settings, clock=self.clock, on_connection=on_connection, on_foreign=on_foreign)
        peer._account, peer._dispatchers = self._account, self._dispatchers
        return peer

    def at(self, prefix: str) -> Management:
        if prefix:
            raise RefusedError(NO_SERVER)
        return self

    def administration(self) -> Administration:
        raise RefusedError(NO_SERVER)

    @property
    def api_prefix(self) -> str:
        return ""

    async def stream_info(
        self, stream: str, *, deleted_details: bool = False, timeout_seconds: float = 0
    ) -> StreamInfo:
        if deleted_details:
            raise RefusedError(NO_SERVER)
        await self.connection.reach()
        return self._account.stream(stream).info(now_ns=self._account.now_ns)

    async def create_stream(self, spec: StreamSpec) -> StreamInfo:
        await self.connection.reach()
        return self._account.create(spec).info(now_ns=self._account.now_ns)

    async def add_stream(self, config: Mapping[str, Any]) -> StreamInfo:
        raise RefusedError(NO_SERVER)

    async def update_stream(self, config: Mapping[str, Any]) -> StreamInfo:
        await self.connection.reach()
        return self._account.update(config).info(now_ns=self._account.now_ns)

    async def purge_stream(self, stream: str, *, subject: str = "", keep: int = 0, before: int = 0) -> int:
        if keep or before:
            raise RefusedError("the in-memory backend purges a whole stream or one subject; use `kind: jetstream`")
        await self.connection.reach()
        return self._account.stream(stream).purge(subject)

    async def delete_message(self, stream: str, sequence: int, *, overwrite: bool = True) -> None:
        await self.connection.reach()
        self._account.stream(stream).delete(sequence)

    async def delete_stream(self, stream: str) -> None:
        await self.connection.reach()
        self._account.delete(stream)
        for name, consumer in self._dispatchers:
            if name == stream:
                self._dispatchers[name, consumer].end()

    async def delete_consumer(self, stream: str, consumer: str) -> None:
        await self.connection.reach()
        self._account.durable(stream, consumer)
        del self._account.stream(stream).durables[consumer]
        if (stream, consumer) in self._dispatchers:
            self._dispatchers[stream, consumer].end()

    async def stream_names(self, *, subject: str = "") -> list[str]:
        if subject:
            raise RefusedError(NO_SERVER)
        await self.connection.reach()
        return self._account.names()

    async def streams(self) -> list[StreamInfo]:
        return [await self.stream_info(name) for name in await self.stream_names()]

    async def message(
        self, stream: str, sequence: int = 0, *, next_by_subject: str = "", last_by_subject: str = ""
    ) -> Message | None:
        await self.connection.reach()
        held = self._account.stream(stream)
        if last_by_subject:
            return held.newest(last_by_subject)
        if not next_by_subject:
            return held.messages.get(sequence)
        return held.next_message(sequence, pattern([next_by_subject]))

    async def subject_counts(self, stream: str, *, subject: str = ">") -> dict[str, int]:
        await self.connection.reach()
        wanted, held = pattern([subject]), self._account.stream(stream).subjects
        return {found: len(sequences) for found, sequences in held.items() if wanted.fullmatch(found)}

    async def ensure_consumer(self, stream: str, spec: ConsumerSpec) -> ConsumerInfo:
        await self.connection.reach()
        return self._account.ensure_durable(stream, spec).info(now_ns=self._account.now_ns)

    async def consumer_info(self, stream: str, consumer: str, *, timeout_seconds: float = 0) -> ConsumerInfo:
        await self.connection.reach()
        return self._account.durable(stream, consumer).info(now_ns=self._account.now_ns)

    async def consumer_names(self, stream: str) -> list[str]:
        return [each.name for each in await self.consumers(stream)]

    async def put_consumer(self, stream: str, consumer: str, config: Mapping[str, Any], **how: Any) -> ConsumerInfo:
        raise RefusedError(NO_SERVER)

    async def unpin_consumer(self, stream: str, consumer: str, *, group: str) -> None:
        raise RefusedError(NO_SERVER)

    async def consumers(self, stream: str) -> list[ConsumerInfo]:
        await self.connection.reach()
        now_ns = self._account.now_ns
        return [durable.info(now_ns=now_ns) for durable in self._account.stream(stream).durables.values()]

    async def pause_consumer(self, stream: str, consumer: str, *, until: datetime | None) -> float:
        await self.connection.reach()
        return self._dispatcher(stream, consumer).pause(until)

    async def reset_consumer(self, stream: str, consumer: str, *, sequence: int) -> ConsumerInfo:
        await self.connection.reach()
        self._dispatcher(stream, consumer).reset(sequence)
        return self._account.durable(stream, consumer).info(now_ns=self._account.now_ns)

    @asynccontextmanager
    async def consume(
        self,
        stream: str,
        consumer: str,
        *,
        deliver: Callable[[Sequence[Delivery]], None],
        capacity: Callable[[], int],
        priority: int = 0,
    ) -> AsyncIterator[InMemoryConsumer]:
        await self.connection.reach()
        dispatcher = self._dispatcher(stream, consumer)
        reader = InMemoryConsumer(
            dispatcher=dispatcher,
            connection=self.connection,
            deliver=deliver,
            capacity=capacity,
            priority=priority,
        )
        dispatcher.join(reader)
        try:
            yield reader
        finally:
            dispatcher.leave(reader)

    async def read(
        self,
        stream: str,
        *,
        filter_subjects: Sequence[str],
        start_sequence: int = 1,
        start_time: datetime | None = None,
        last_sequence: int | None = None,
    ) -> AsyncGenerator[Message, None]:
        """Yield stored messages, as `backends.Backend.read` does. Raises `UnavailableError` where the connection was
        lost meanwhile.
        """
        await self.connection.reach()
        opened, losses = self._account.stream(stream), self.connection.losses
        wanted = pattern(filter_subjects)
        position, start_ns = _start(start_sequence, start_time)
        changed = anyio.Event()

        def wake() -> None:
            changed.set()

        opened.watchers.add(wake)
        self.connection.watchers.add(wake)
        try:
            while True:
                changed = anyio.Event()
                if self.connection.losses > losses:
                    raise UnavailableError(f"in_memory: the connection was lost while reading {stream}")
                held = self._account.stream(stream)
                if held is not opened:
                    raise UnavailableError(f"in_memory: {stream} was deleted and recreated while it was read")
                message = held.next_message(position, wanted)
                if message is None and last_sequence is None:
                    position = max(position, held.last_sequence + 1)
                    await changed.wait()
                    continue
                if message is None or (last_sequence is not None and message.sequence > last_sequence):
                    return
                position = message.sequence + 1
                if message.timestamp_ns >= start_ns:
                    await checkpoint()
                    yield message
        finally:
            opened.watchers.discard(wake)
            self.connection.watchers.discard(wake)

    async def read_chunks(
        self, stream: str, *, filter_subjects: Sequence[str], start_sequence: int, last_sequence: int
    ) -> AsyncGenerator[Chunk, None]:
        messages = self.read(
            stream, filter_subjects=filter_subjects, start_sequence=start_sequence, last_sequence=last_sequence
        )
        if found := [message async for message in messages]:
            yield Chunk(
                subjects=[message.subject for message in found],
                data=[message.data for message in found],
                headers=[message.headers for message in found],
                sequences=[message.sequence for message in found],
                timestamps_ns=[message.timestamp_ns for message in found],
            )

    async def count(
        self,
        stream: str,
        *,
        filter_subjects: Sequence[str],
        start_sequence: int = 1,
        start_time: datetime | None = None,
    ) -> int:
        await self.connection.reach()
        wanted = pattern(filter_subjects)
        position, start_ns = _start(start_sequence, start_time)
        held = self._account.stream(stream).messages.values()
        since = [each for each in held if each.sequence >= position and each.timestamp_ns >= start_ns]
        return sum(1 for each in since if wanted.fullmatch(each.subject))

    async def publish(self, message: Message, *, message_id: str, stream: str, timeout_seconds: float) -> PubAck:
        await self.connection.reach()
        return self._account.publish(Outgoing(message, message_id, stream))

    async def publish_many(
        self, outgoing: Sequence[Outgoing], *, timeout_seconds: float, answered: bool = False
    ) -> list[PubAck | BackendError]:
        results: list[PubAck | BackendError] = []
        for each in outgoing:
            try:
                result = await self.publish(
                    each.message, message_id=each.message_id, stream=each.stream, timeout_seconds=timeout_seconds
                )
                results.append(result)
            except BackendError as error:
                results.append(error)
        return results

    async def publish_chunk(self, stream: str, chunk: OutgoingChunk, *, timeout_seconds: float) -> int:
        results = await self.publish_many(list(chunk.each(stream)), timeout_seconds=timeout_seconds)
        return sum(1 for _ in takewhile(lambda result: isinstance(result, PubAck), results))

    async def publish_together(self, outgoing: Sequence[Outgoing], *, timeout_seconds: float) -> PubAck:
        await self.connection.reach()
        return self._account.publish_together(outgoing)

    async def key_value(
        self, bucket: str, *, ttl_seconds: float | None = None, history: int = 1, own: bool = False
    ) -> BulkKeyValue:
        return await buckets.open_bucket(
            self, bucket, ttl_seconds=ttl_seconds, history=history, own=own, on_foreign=self._on_foreign
        )

    def _dispatcher(self, stream: str, consumer: str) -> Dispatcher:
        """Return the dispatcher of the consumer of this name. The consumer and its stream may have been recreated."""
        dispatcher = self._dispatchers.get((stream, consumer))
        if dispatcher is None:
            dispatcher = Dispatcher(f"consumer {consumer} of stream {stream}", clock=self.clock)
        dispatcher.serve(self._account.stream(stream), self._account.durable(stream, consumer))
        self._dispatchers[stream, consumer] = dispatcher
        return dispatcher


def _start(sequence: int, time: datetime | None) -> tuple[int, int]:
    """Return the first sequence and the first time, in nanoseconds, that are wanted."""
    return (sequence, 0) if time is None else (1, (time - EPOCH) // timedelta(microseconds=1) * 1000)
