"""Tables and counters at work: kept in buckets and a stream of counters, tried again until a deadline, cached where
they say so. An app opens them for as long as it is connected.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, TypeVar

import anyio
import msgspec
from anyio.abc import TaskGroup
from anyio.from_thread import BlockingPortal
from msgspec import Struct

from aviso_workers.backends import Backend, Message, PubAck
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.config import Config
from aviso_workers.declare.tables import Counter, Table
from aviso_workers.engine import singletons
from aviso_workers.engine.key_value import CachedKeyValue, RetryingKeyValue, retried
from aviso_workers.errors import BackendError, NotFoundError, OutcomeUnknownError, UnavailableError
from aviso_workers.features.tables.applied import AppliedNotifications
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.state import table_records
from aviso_workers.state.table_records import COUNTERS_SUBJECT

T = TypeVar("T")

TIMEOUT_SECONDS = 5.0
AGAIN_SECONDS = 10.0
"""When a server that did not answer is asked again for a longer history."""


class Tables(Struct, eq=False, dict=True):
    """An app's tables and counters, by name; connected while the `async with` block runs.

    Raises `RefusedError` where the server is too old for one of them, `DeclarationError` where another app uses one.
    """

    tables: Mapping[str, Table[Any] | Counter]
    backend: Backend
    app: str
    config: Config
    own_streams: Provisioner

    def __post_init__(self) -> None:
        self._connected: list[Table[Any] | Counter] = []
        self._keeping: TaskGroup
        self._portal: BlockingPortal

    async def __aenter__(self) -> Tables:
        self._keeping = anyio.create_task_group()
        await self._keeping.__aenter__()
        self._portal = BlockingPortal()
        await self._portal.__aenter__()
        try:
            for name, table in self.tables.items():
                self._connect(name, table)
                self._connected.append(table)
        except Exception:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._portal.__aexit__(None, None, None)  # waits for the calls of threads that are under way
        finally:
            while self._connected:
                self._connected.pop().disconnect()
            # The body's own exception is not the caches' business: it must leave as it is, not in a group.
            self._keeping.cancel_scope.cancel()
            await self._keeping.__aexit__(None, None, None)

    def _connect(self, name: str, table: Table[Any] | Counter) -> None:
        patience = self.config.notification_backend.jetstream.publish_deadline_seconds
        if isinstance(table, Counter):
            self.backend.connection.require_server(2, 12, to=f"keep the counter {name!r}")
            spec = table_records.counters_spec(self.app, self.config)
            prefix = f"{COUNTERS_SUBJECT}.{self.app}.{name}."
            table.connect(
                Counters(self.backend, spec, self.own_streams, prefix=prefix, patience_seconds=patience),
                self._portal,
            )
            return
        kind = CachedKeyValue if table.cached else RetryingKeyValue
        bucket = kind(
            self.backend,
            table_records.bucket_of(self.app, name),
            history=table.keeps_history,
            patience_seconds=patience,
        )
        table.connect(bucket, AppliedNotifications(bucket, self.backend, table=name), self._portal)
        if table.keeps_history > 1:
            self._keeping.start_soon(self._raise_history, bucket.name, table.keeps_history)
        if isinstance(bucket, CachedKeyValue):
            self._keeping.start_soon(bucket.keep_current)

    async def _raise_history(self, bucket: str, history: int) -> None:
        """Let a bucket that an older version of the app has made keep as many values as this one wants."""
        while True:
            try:
                await self.own_streams.raise_history(bucket, history)
                return
            except UnavailableError:
                await self.backend.clock.sleep(AGAIN_SECONDS)


class Counters(Struct, eq=False):
    """What one counter stands at, by key: one subject each, in a stream that adds up."""

    backend: Backend
    spec: StreamSpec
    own_streams: Provisioner
    prefix: str
    patience_seconds: float

    async def add(self, key: str, amount: int, *, message_id: str | None) -> int:
        subject = f"{self.prefix}{key}"
        once = secrets.token_hex(12) if message_id is None else f"{subject} {message_id}"
        message = Message(subject=subject, data=b"", headers={"Nats-Incr": f"{amount:+d}"})

        async def publish() -> PubAck:
            return await self.backend.publish(
                message, message_id=once, stream=self.spec.name, timeout_seconds=TIMEOUT_SECONDS
            )

        singletons.check()
        ack = await self._do(publish)
        if ack.total is not None:
            return ack.total
        try:
            return await self.get(key)  # it was added before
        except BackendError as error:
            raise OutcomeUnknownError.after(error) from error

    async def get(self, key: str) -> int:
        subject = f"{self.prefix}{key}"
        message = await self._do(lambda: self.backend.message(self.spec.name, last_by_subject=subject))
        return _total(message) if message else 0

    async def all(self) -> dict[str, int]:
        return await self._do(self._all)

    async def _all(self) -> dict[str, int]:
        last = (await self.backend.stream_info(self.spec.name)).last_sequence
        reading = self.backend.read(self.spec.name, filter_subjects=(f"{self.prefix}>",), last_sequence=last)
        async with aclosing(reading):
            return {message.subject.removeprefix(self.prefix): _total(message) async for message in reading}

    async def _do(self, deed: Callable[[], Awaitable[T]]) -> T:
        async def attempt() -> T:
            await self.own_streams.ensure(self.spec)
            try:
                return await deed()
            except (UnavailableError, NotFoundError):
                self.own_streams.forget(self.spec.name)  # it may have been deleted
                raise

        return await retried(attempt, clock=self.backend.clock, patience_seconds=self.patience_seconds)


def _total(message: Message) -> int:
    return int(msgspec.json.decode(message.data)["val"])
