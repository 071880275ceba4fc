"""The JetStream backend: the only folder that knows nats-py.

`connection` owns the connection and `wire` is the short way through it; `publisher`, `consumer` and `readers` use it,
`pull_requests` asks for messages, `faults` says what an error means. Each of three modules adds verbs to those before:
`management` for streams and consumers, `readers` for reading, `admin` for what only a server is asked for.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Literal, Self

import anyio
import msgspec
from anyio.abc import TaskGroup

from aviso_workers import config
from aviso_workers.aviso.codec import Message
from aviso_workers.backends import (
    BulkKeyValue,
    ConnectionListener,
    ConsumerInfo,
    Delivery,
    ForeignListener,
    Outgoing,
    OutgoingChunk,
    PubAck,
    StreamInfo,
    buckets,
)
from aviso_workers.backends.jetstream.admin import JetStreamAdministration
from aviso_workers.backends.jetstream.connection import NatsConnection
from aviso_workers.backends.jetstream.consumer import Outbox, PullConsumer
from aviso_workers.backends.jetstream.management import JetStreamManagement
from aviso_workers.backends.jetstream.publisher import Ingester, JetStreamPublisher
from aviso_workers.clocks import Clock, LoopClock
from aviso_workers.errors import BackendError, NotFoundError, RefusedError
from aviso_workers.jetstream import error_codes, identities, plans
from aviso_workers.jetstream.identities import Identity
from aviso_workers.jetstream.plans import UPDATABLE
from aviso_workers.jetstream.specs import ConsumerSpec

LIMIT = re.compile(r"limit of (\d+)")
"""The limit in the description of MAX_ACK_PENDING_EXCEEDED."""
LEAVE_SECONDS = 2.0


class JetStreamBackend(JetStreamAdministration):
    """See `backends.Backend`. Connected while its `async with` block runs."""

    def __init__(
        self,
        settings: config.JetStream,
        *,
        on_connection: ConnectionListener | None = None,
        on_foreign: ForeignListener | None = None,
        owner: str = "",
    ) -> None:
        connection = NatsConnection(settings, on_connection=on_connection, owner=owner)
        super().__init__(connection)
        self.connection = connection
        self.clock: Clock = LoopClock()
        self._settings = settings
        self._on_foreign = on_foreign
        self._publisher = JetStreamPublisher(connection)
        self._ingester = Ingester(connection, self._publisher)
        self._outbox = Outbox(connection)
        self._made: dict[tuple[str, str], Identity] = {}
        self._marks = True
        """Whether consumers without a mark get one: not where this user may not update a consumer."""
        self._tasks: TaskGroup

    async def __aenter__(self) -> Self:
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
        if self._connection.ready:  # agents that were cancelled have given back what they held
            with anyio.move_on_after(LEAVE_SECONDS, shield=True), suppress(BackendError):
                await self._outbox.flush()
        # The body's own exception is not the tasks' business: it must leave as it is, not in an ExceptionGroup.
        self._tasks.cancel_scope.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            await self._connection.close()

    def at(self, prefix: str) -> JetStreamManagement:
        return JetStreamManagement(self._connection, prefix=prefix) if prefix else self

    def administration(self) -> JetStreamAdministration:
        return self

    async def ensure_consumer(self, stream: str, spec: ConsumerSpec) -> ConsumerInfo:
        name = spec.durable_name
        try:
            found = await self.consumer_info(stream, name)
        except NotFoundError:
            config = msgspec.to_builtins(identities.marked(spec, None))
            return await self._put_as_allowed(stream, name, config, action="create")
        updates = _updates(identities.marked(spec, found) if self._marks else spec, found)
        if not updates:
            return found
        config = {**found.config, **updates}
        if "filter_subjects" in updates:
            config.pop("filter_subject", None)  # of the two, a server takes one
        try:
            return await self._put_as_allowed(stream, name, config, action="update")
        except RefusedError:
            if _updates(spec, found):
                raise
            self._marks = False
            return found

    async def _put_as_allowed(
        self, stream: str, consumer: str, config: Mapping[str, Any], *, action: Literal["create", "update"]
    ) -> ConsumerInfo:
        """Put a consumer, with as much `max_ack_pending` as the server, the account and the stream allow."""
        try:
            return await self.put_consumer(stream, consumer, config, action=action)
        except RefusedError as error:
            if error.code != error_codes.MAX_ACK_PENDING_EXCEEDED or not (allowed := LIMIT.search(str(error))):
                raise
        config = {**config, "max_ack_pending": int(allowed[1])}
        return await self.put_consumer(stream, consumer, config, action=action)

    def _stream(self, answer: Mapping[str, Any]) -> StreamInfo:
        found = super()._stream(answer)
        self._ingester.learn(found.config)
        return found

    @asynccontextmanager
    async def consume(
        self,
        stream: str,
        consumer: str,
        *,
        deliver: Callable[[Sequence[Delivery]], None],
        capacity: Callable[[], int],
        priority: int = 0,
    ) -> AsyncIterator[PullConsumer]:
        reader = PullConsumer(
            self._connection,
            self._outbox,
            stream=stream,
            consumer=consumer,
            made=self._made,
            deliver=deliver,
            capacity=capacity,
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
        self._connection.require_server(2, 12, to="publish several notifications together")
        return await self._publisher.publish_together(outgoing, timeout_seconds=timeout_seconds)

    async def key_value(
        self, bucket: str, *, ttl_seconds: float | None = None, history: int = 1, own: bool = False
    ) -> BulkKeyValue:
        return await buckets.open_bucket(
            self,
            bucket,
            ttl_seconds=ttl_seconds,
            history=history,
            own=own,
            on_foreign=self._on_foreign,
            replicas=self._settings.replicas or 1,
        )


def _updates(spec: ConsumerSpec, found: ConsumerInfo) -> dict[str, Any]:
    """Return what is to be updated of a consumer, by field."""
    differences = plans.consumer_differences(spec, found.config)
    return {each.field: each.wanted for each in differences if each.field in UPDATABLE}


async def _within(scope: anyio.CancelScope, reader: PullConsumer) -> None:
    with scope:
        await reader.run()
