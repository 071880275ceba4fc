"""The JetStream backend: the only folder that knows nats-py.

`connection` owns the connection and `wire` is the short way through it; `publishing`, `ingesting`, `consuming` and
`reading` use it, `pulling` asks for messages, `faults` says what an error means, `administering` asks a server for
whatever operators' tools like to know. Streams and consumers are managed over JetStream's raw JSON, because nats-py's
classes drop the fields that they do not know.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from types import TracebackType
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskGroup

from aviso_workers import config
from aviso_workers.backends import (
    BulkKeyValue,
    Chunk,
    ConnectionListener,
    ConsumerInfo,
    Delivery,
    Outgoing,
    OutgoingChunk,
    PubAck,
    StreamInfo,
    buckets,
)
from aviso_workers.backends.jetstream import creating, reading
from aviso_workers.backends.jetstream.administering import Administration
from aviso_workers.backends.jetstream.connection import Connection
from aviso_workers.backends.jetstream.consuming import Outbox, PullConsumer
from aviso_workers.backends.jetstream.ingesting import Ingester
from aviso_workers.backends.jetstream.publishing import Publisher
from aviso_workers.clocks import Clock, LoopClock
from aviso_workers.codec import Message
from aviso_workers.errors import BackendError, NotFoundError, RefusedError
from aviso_workers.jetstream import error_codes, info, metadata, plans
from aviso_workers.jetstream.plans import UPDATABLE
from aviso_workers.jetstream.specs import ConsumerSpec, StreamSpec

__all__ = ["JetStreamBackend"]

LIMIT = re.compile(r"limit of (\d+)")
"""What the description of MAX_ACK_PENDING_EXCEEDED says is allowed."""
LEAVE_SECONDS = 2.0


class JetStreamBackend:
    """See `backends.Backend`. Connected while its `async with` block runs."""

    def __init__(self, settings: config.JetStream, *, on_connection: ConnectionListener | None = None) -> None:
        self.clock: Clock = LoopClock()
        self._settings = settings
        self._connection = Connection(settings, on_connection=on_connection)
        self._publisher = Publisher(self._connection)
        self._ingester = Ingester(self._connection, self._publisher)
        self._outbox = Outbox(self._connection)
        self._administration = Administration(self._connection)
        self._made: dict[tuple[str, str], str] = {}
        self._tasks: TaskGroup

    async def __aenter__(self) -> JetStreamBackend:
        await self._connection.open()
        await self._publisher.open()
        await self._ingester.open()
        await self._outbox.open()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._connection.watch)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.connected:  # agents that were cancelled have given back what they held
            with anyio.move_on_after(LEAVE_SECONDS, shield=True), suppress(BackendError):
                await self._outbox.flush()
        # The body's own exception is not the tasks' business: it must leave as it is, not in an ExceptionGroup.
        self._tasks.cancel_scope.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            await self._connection.close()

    @property
    def kind(self) -> str:
        return "jetstream"

    @property
    def connected(self) -> bool:
        return self._connection.ready

    @property
    def slow_because(self) -> str:
        return self._connection.wire.slow_because

    @property
    def max_payload(self) -> int:
        return self._connection.nc.max_payload

    def require_server(self, major: int, minor: int, *, to: str) -> None:
        # An older server does not answer at all to what it does not know, or passes it over.
        if self._connection.server_version < (major, minor):
            found = ".".join(map(str, self._connection.server_version))
            raise RefusedError(f"to {to}, nats-server {major}.{minor} or newer is needed; this one is {found}")

    def administration(self) -> Administration:
        return self._administration

    async def failed(self) -> None:
        await self._connection.failed()

    async def stream_info(self, stream: str) -> StreamInfo:
        return self._stream_info(await self._connection.api(f"STREAM.INFO.{stream}"))

    async def create_stream(self, spec: StreamSpec) -> StreamInfo:
        return self._stream_info(await creating.create(self._connection, spec))

    async def update_stream(self, config: Mapping[str, Any]) -> StreamInfo:
        return self._stream_info(await self._connection.api(f"STREAM.UPDATE.{config['name']}", config))

    async def purge_stream(self, stream: str, *, subject: str = "", keep: int = 0, before: int = 0) -> int:
        wanted = {"filter": subject, "keep": keep, "seq": before}
        request = {field: value for field, value in wanted.items() if value}
        return int((await self._connection.api(f"STREAM.PURGE.{stream}", request))["purged"])

    async def delete_message(self, stream: str, sequence: int, *, overwrite: bool = True) -> None:
        try:
            request = {"seq": sequence, "no_erase": not overwrite}
            await self._connection.api(f"STREAM.MSG.DELETE.{stream}", request)
        except RefusedError as error:
            if error.code != error_codes.MESSAGE_NOT_DELETED:
                raise
            # The server has one code for "no such message" and for what really failed: ask for the message itself.
            await self._connection.api(f"STREAM.MSG.GET.{stream}", {"seq": sequence})
            raise

    async def delete_stream(self, stream: str) -> None:
        await self._connection.api(f"STREAM.DELETE.{stream}")

    async def stream_names(self) -> list[str]:
        return await self._administration.pages("STREAM.NAMES", "streams")

    async def message(self, stream: str, sequence: int) -> Message | None:
        return await self._message(stream, {"seq": sequence})

    async def last_message(self, stream: str, subject: str) -> Message | None:
        return await self._message(stream, {"last_by_subj": subject})

    async def _message(self, stream: str, which: Mapping[str, Any]) -> Message | None:
        try:
            answer = await self._connection.api(f"STREAM.MSG.GET.{stream}", which)
        except NotFoundError as error:
            if error.code != error_codes.NO_MESSAGE:
                raise
            return None
        return reading.message_of(answer["message"])

    async def subject_counts(self, stream: str, *, subject: str = ">") -> dict[str, int]:
        return await self._administration.subject_counts(stream, subject)

    async def ensure_consumer(self, stream: str, spec: ConsumerSpec) -> ConsumerInfo:
        subject = f"CONSUMER.CREATE.{stream}.{spec.durable_name}"
        try:
            found = await self._connection.api(f"CONSUMER.INFO.{stream}.{spec.durable_name}")
        except NotFoundError:
            return await self._put_consumer(subject, "create", stream, msgspec.to_builtins(spec))
        differences = plans.consumer_differences(spec, found["config"])
        updates = {each.field: each.wanted for each in differences if each.field in UPDATABLE}
        if not updates:
            return info.consumer(found)
        config = {**found["config"], **updates}
        if "filter_subjects" in updates:
            config.pop("filter_subject", None)  # of the two, a server takes one
        return await self._put_consumer(subject, "update", stream, config)

    async def _put_consumer(self, subject: str, action: str, stream: str, config: dict[str, Any]) -> ConsumerInfo:
        """With the `max_ack_pending` that is allowed, where the server, the account or the stream allows less."""
        request = {"stream_name": stream, "config": config, "action": action}
        try:
            return info.consumer(await self._connection.api(subject, request))
        except RefusedError as error:
            if error.code != error_codes.MAX_ACK_PENDING_EXCEEDED or not (allowed := LIMIT.search(str(error))):
                raise
        request["config"] = {**config, "max_ack_pending": int(allowed[1])}
        return info.consumer(await self._connection.api(subject, request))

    async def consumer_info(self, stream: str, consumer: str) -> ConsumerInfo:
        return info.consumer(await self._connection.api(f"CONSUMER.INFO.{stream}.{consumer}"))

    async def consumers(self, stream: str) -> list[ConsumerInfo]:
        return [
            info.consumer(found) for found in await self._administration.pages(f"CONSUMER.LIST.{stream}", "consumers")
        ]

    async def delete_consumer(self, stream: str, consumer: str) -> None:
        await self._connection.api(f"CONSUMER.DELETE.{stream}.{consumer}")

    async def pause_consumer(self, stream: str, consumer: str, *, until: datetime | None) -> None:
        self.require_server(2, 11, to="pause a consumer")
        request = {"pause_until": until.isoformat()} if until else {}
        await self._connection.api(f"CONSUMER.PAUSE.{stream}.{consumer}", request)

    async def reset_consumer(self, stream: str, consumer: str, *, sequence: int) -> ConsumerInfo:
        self.require_server(2, 14, to="reset a consumer")
        found = await self.consumer_info(stream, consumer)  # a server does not answer about one that is missing
        config = {**found.config, "metadata": metadata.after_reset(found.config.metadata)}
        create = f"CONSUMER.CREATE.{stream}.{consumer}"
        # Before it is done: a worker that is given something again must find that it was meant to be.
        await self._connection.api(create, {"stream_name": stream, "config": config, "action": "update"})
        try:
            answer = await self._connection.api(f"CONSUMER.RESET.{stream}.{consumer}", {"seq": sequence})
        except RefusedError as error:
            if error.code != error_codes.INVALID_RESET:
                raise
            # It was made to begin later than that: one that begins there takes its place.
            await self.delete_consumer(stream, consumer)
            config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": sequence}
            config.pop("opt_start_time", None)
            request = {"stream_name": stream, "config": config, "action": "create"}
            return info.consumer(await self._connection.api(create, request))
        return info.consumer(answer)

    def _stream_info(self, answer: Mapping[str, Any]) -> StreamInfo:
        found = info.stream(answer)
        self._ingester.learn(found.config)
        return found

    @asynccontextmanager
    async def consume(
        self,
        stream: str,
        consumer: str,
        *,
        deliver: Callable[[Delivery], None],
        room: Callable[[], int],
        priority: int = 0,
    ) -> AsyncIterator[PullConsumer]:
        reader = PullConsumer(
            self._connection,
            self._outbox,
            stream=stream,
            consumer=consumer,
            made=self._made,
            deliver=deliver,
            room=room,
            priority=priority,
        )
        scope = anyio.CancelScope()
        try:
            await reader.open()
            self._tasks.start_soon(_within, scope, reader)
            yield reader
        finally:
            scope.cancel()
            with anyio.CancelScope(shield=True):
                await reader.close()

    def read(
        self,
        stream: str,
        *,
        filter_subjects: Sequence[str],
        start_sequence: int = 1,
        start_time: datetime | None = None,
        last_sequence: int | None = None,
    ) -> AsyncGenerator[Message, None]:
        return reading.read(
            self._connection,
            stream,
            filter_subjects=filter_subjects,
            start_sequence=start_sequence,
            start_time=start_time,
            last_sequence=last_sequence,
        )

    def read_chunks(
        self, stream: str, *, filter_subjects: Sequence[str], start_sequence: int, last_sequence: int
    ) -> AsyncGenerator[Chunk, None]:
        return reading.read_chunks(
            self._connection,
            stream,
            filter_subjects=filter_subjects,
            start_sequence=start_sequence,
            last_sequence=last_sequence,
        )

    async def count(
        self,
        stream: str,
        *,
        filter_subjects: Sequence[str],
        start_sequence: int = 1,
        start_time: datetime | None = None,
    ) -> int:
        return await reading.count(
            self._connection,
            stream,
            filter_subjects=filter_subjects,
            start_sequence=start_sequence,
            start_time=start_time,
        )

    async def publish(self, message: Message, *, message_id: str, stream: str, timeout_seconds: float) -> PubAck:
        outgoing = Outgoing(message, message_id, stream)
        [result] = await self._publisher.publish([outgoing], timeout_seconds=timeout_seconds)
        if isinstance(result, BackendError):
            raise result
        return result

    async def publish_many(
        self, outgoing: Sequence[Outgoing], *, timeout_seconds: float, answered: bool = False
    ) -> list[PubAck | BackendError]:
        if answered:
            return await self._publisher.publish(outgoing, timeout_seconds=timeout_seconds)
        return await self._ingester.publish(outgoing, timeout_seconds=timeout_seconds)

    async def publish_chunk(self, stream: str, chunk: OutgoingChunk, *, timeout_seconds: float) -> int:
        return await self._ingester.publish_chunk(stream, chunk, timeout_seconds=timeout_seconds)

    async def publish_together(self, outgoing: Sequence[Outgoing], *, timeout_seconds: float) -> PubAck:
        self.require_server(2, 12, to="publish several notifications together")
        return await self._publisher.publish_together(outgoing, timeout_seconds=timeout_seconds)

    async def key_value(self, bucket: str, *, ttl_seconds: float | None = None, history: int = 1) -> BulkKeyValue:
        replicas = self._settings.replicas or 1
        return await buckets.open_bucket(self, bucket, ttl_seconds=ttl_seconds, history=history, replicas=replicas)


async def _within(scope: anyio.CancelScope, reader: PullConsumer) -> None:
    with scope:
        await reader.run()
