"""Tables and counters at work: kept in buckets and a stream of counters, tried again until a deadline, cached where
they say so. An app opens them for as long as it is connected.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TypeVar

import anyio
import msgspec
from anyio.abc import TaskGroup

from aviso_workers import clocks
from aviso_workers.backends import Backend, Message, PubAck
from aviso_workers.clocks import Clock
from aviso_workers.config import Config, streams
from aviso_workers.engine import holding, replaying
from aviso_workers.engine.provisioning import Provisioner
from aviso_workers.errors import (
    BackendError,
    ConflictError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
)
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.key_value import Entry, KeyValue
from aviso_workers.retry import Backoff, Tries
from aviso_workers.tables import Counter, Table

__all__ = ["COUNTERS", "COUNTERS_SUBJECT", "CachedBucket", "SteadyBucket", "Sums", "Tables", "bucket_of"]

T = TypeVar("T")

COUNTERS = "aviso_workers_counters"
COUNTERS_SUBJECT = "aviso_workers.counters"
TIMEOUT_SECONDS = 5.0
LONGEST_DELAY_SECONDS = 1.0
BACKOFF = Backoff(first=0.1, factor=2.0, max=LONGEST_DELAY_SECONDS, jitter=0.0)


class Tables:
    """An app's tables and counters, by name; connected while the `async with` block runs.

    Raises `RefusedError` where the server is too old for one of them, `DeclarationError` where another app uses one.
    """

    def __init__(
        self,
        tables: Mapping[str, Table[Any] | Counter],
        backend: Backend,
        *,
        app: str,
        config: Config,
        own_streams: Provisioner,
    ) -> None:
        self._tables = tables
        self._backend = backend
        self._app = app
        self._config = config
        self._own_streams = own_streams
        self._connected: list[Table[Any] | Counter] = []
        self._keeping: TaskGroup

    async def __aenter__(self) -> Tables:
        self._keeping = anyio.create_task_group()
        await self._keeping.__aenter__()
        try:
            for name, table in self._tables.items():
                self._connect(name, table)
                self._connected.append(table)
        except Exception:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._connected:
            self._connected.pop().disconnect()
        # The body's own exception is not the caches' business: it must leave as it is, not in a group.
        self._keeping.cancel_scope.cancel()
        await self._keeping.__aexit__(None, None, None)

    def _connect(self, name: str, table: Table[Any] | Counter) -> None:
        patience = self._config.notification_backend.jetstream.publish_deadline_seconds
        if isinstance(table, Counter):
            self._backend.require_server(2, 12, to=f"keep the counter {name!r}")
            spec = streams.own_stream(
                COUNTERS, f"{COUNTERS_SUBJECT}.>", self._config, max_msgs_per_subject=1, allow_msg_counter=True
            )
            prefix = f"{COUNTERS_SUBJECT}.{self._app}.{name}."
            table.connect(
                Sums(self._backend, spec, self._own_streams, prefix=prefix, patience_seconds=patience),
            )
            return
        bucket = SteadyBucket(
            self._backend, bucket_of(self._app, name), history=table.keeps_history, patience_seconds=patience
        )
        if not table.cached:
            table.connect(bucket)
            return
        cached = CachedBucket(bucket, self._backend.clock)
        table.connect(cached)
        self._keeping.start_soon(cached.keep)


def bucket_of(app: str, table: str) -> str:
    """Return the name of the bucket of an app's table."""
    return f"{app}__{table}"


class SteadyBucket:
    """A `KeyValue` that is made where it is missing, and that waits for a connection that is lost.

    Raises `OutcomeUnknownError` where it cannot be told whether a write on a condition was done.
    """

    def __init__(
        self,
        backend: Backend,
        name: str,
        *,
        history: int = 1,
        ttl_seconds: float | None = None,
        patience_seconds: float,
    ) -> None:
        self._backend = backend
        self.name = name
        self._history = history
        self._ttl_seconds = ttl_seconds
        self._patience = patience_seconds
        self._bucket: KeyValue | None = None

    async def get(self, key: str) -> Entry | None:
        return await self._do(lambda bucket: bucket.get(key))

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        revision: int | None = None,
        ttl_seconds: float | None = None,
        message_id: str | None = None,
    ) -> int:
        once = message_id or secrets.token_hex(12)
        return await self._write(
            key,
            once,
            lambda bucket: bucket.put(key, value, revision=revision, ttl_seconds=ttl_seconds, message_id=once),
        )

    async def delete(self, key: str, *, revision: int | None = None, message_id: str | None = None) -> int:
        once = message_id or secrets.token_hex(12)
        return await self._write(key, once, lambda bucket: bucket.delete(key, revision=revision, message_id=once))

    async def keys(self) -> list[str]:
        return await self._do(lambda bucket: bucket.keys())

    async def entries(self) -> list[Entry]:
        return await self._do(lambda bucket: bucket.entries())

    async def revision(self) -> int:
        return await self._do(lambda bucket: bucket.revision())

    async def changes(
        self, key: str | None = None, *, after: int = 0, until: int | None = None
    ) -> AsyncGenerator[Entry, None]:
        """Read on where reading was interrupted.

        Raises `NotFoundError` where the bucket was deleted, also where it was made anew, because its revisions begin
        again then; `BackendError` when the connection is lost for good.
        """
        created: datetime | None = None
        while True:
            try:
                bucket = await self.opened()
                created = await replaying.when_created(self._backend, f"KV_{self.name}", known=created)
                async with aclosing(bucket.changes(key, after=after, until=until)) as changes:
                    async for entry in changes:
                        after = entry.revision
                        yield entry
                return
            except UnavailableError:
                with clocks.move_on_after(self._backend.clock, LONGEST_DELAY_SECONDS):
                    await self._backend.failed()

    async def opened(self) -> KeyValue:
        """The bucket itself, which does not try again."""

        async def itself(bucket: KeyValue) -> KeyValue:
            return bucket

        return await self._do(itself)

    async def _write(self, key: str, message_id: str, write: Callable[[KeyValue], Awaitable[int]]) -> int:
        holding.check()
        in_doubt = False

        async def attempt(bucket: KeyValue) -> int:
            nonlocal in_doubt
            try:
                return await write(bucket)
            except OutcomeUnknownError:
                in_doubt = True
                raise

        try:
            return await self._do(attempt)
        except ConflictError as error:
            if not in_doubt:
                raise
            conflict = error
        # An attempt whose acknowledgement was lost may have been the one that was faster.
        async with aclosing(self.changes(key, until=await self.revision())) as changes:
            found = [entry async for entry in changes]
        if found and found[-1].message_id == message_id:
            return found[-1].revision
        raise OutcomeUnknownError(
            f"{conflict}; an acknowledgement was lost, and it cannot be told whether this write was done before"
        ) from conflict

    async def _do(self, deed: Callable[[KeyValue], Awaitable[T]]) -> T:
        async def attempt() -> T:
            if self._bucket is None:
                self._bucket = await self._backend.key_value(
                    self.name, history=self._history, ttl_seconds=self._ttl_seconds
                )
            try:
                return await deed(self._bucket)
            except (UnavailableError, NotFoundError):
                self._bucket = None  # it may have been deleted
                raise

        return await _steadily(attempt, clock=self._backend.clock, patience_seconds=self._patience)


class CachedBucket:
    """A bucket whose values are here as well, kept by `keep`, which reads what changes.

    While that is interrupted or has not come to the newest yet, the server is asked. So what is told is as old as the
    way from the server to here; one's own writes are told at once.
    """

    def __init__(self, bucket: SteadyBucket, clock: Clock) -> None:
        self._bucket = bucket
        self._clock = clock
        self._current = False
        self._seen = 0
        """The revision up to which the server's changes have come here."""
        self._rows: dict[str, Entry] = {}
        """The newest that is known of each key. Our own deletions are in it until the server tells of them."""
        self._changes = 0
        self.keys, self.revision, self.changes = bucket.keys, bucket.revision, bucket.changes

    @property
    def version(self) -> int | None:
        """A number that is another one when `entries` tells something else; None while the server is asked."""
        return self._changes if self._current else None

    async def keep(self) -> None:
        """Never returns."""
        while True:
            try:
                await self._follow(await self._bucket.opened())
            except BackendError:
                await self._clock.sleep(LONGEST_DELAY_SECONDS)

    async def get(self, key: str) -> Entry | None:
        if not self._current:
            return await self._bucket.get(key)
        entry = self._rows.get(key)
        return None if entry is None or entry.deleted else entry

    async def entries(self) -> list[Entry]:
        if not self._current:
            return await self._bucket.entries()
        return sorted((row for row in self._rows.values() if not row.deleted), key=lambda row: row.revision)

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        revision: int | None = None,
        ttl_seconds: float | None = None,
        message_id: str | None = None,
    ) -> int:
        try:
            stored = await self._bucket.put(
                key, value, revision=revision, ttl_seconds=ttl_seconds, message_id=message_id
            )
        except ConflictError:
            await self._look(key)
            raise
        self._note(key, stored, value)
        return stored

    async def delete(self, key: str, *, revision: int | None = None, message_id: str | None = None) -> int:
        try:
            stored = await self._bucket.delete(key, revision=revision, message_id=message_id)
        except ConflictError:
            await self._look(key)
            raise
        self._note(key, stored, None)
        return stored

    async def _follow(self, bucket: KeyValue) -> None:
        # Begun anew each time: what was forgotten during a long interruption is told of by nobody.
        self._rows, self._seen = {}, 0
        self._changes += 1
        last = await bucket.revision()
        try:
            async with aclosing(bucket.changes(until=last)) as changes:
                async for entry in changes:
                    self._learn(entry)
            self._seen, self._current = last, True
            async with aclosing(bucket.changes(after=last)) as changes:
                async for entry in changes:
                    self._learn(entry)
        finally:
            self._current = False

    async def _look(self, key: str) -> None:
        """Somebody else was faster than what comes here: see what there is."""
        newest = await self._bucket.get(key)
        if newest is None:
            self._changes += 1
            self._rows.pop(key, None)
        else:
            self._note(key, newest.revision, newest.value)

    def _learn(self, entry: Entry) -> None:
        self._seen = max(self._seen, entry.revision)
        known = self._rows.get(entry.key)
        if known is not None and known.revision > entry.revision:
            return
        self._changes += known is None or known.revision < entry.revision
        if entry.deleted:
            self._rows.pop(entry.key, None)
        else:
            self._rows[entry.key] = entry

    def _note(self, key: str, revision: int, value: bytes | None) -> None:
        known = self._rows.get(key)
        if revision > self._seen and (known is None or known.revision < revision):
            time = datetime.fromtimestamp(self._clock.time_ns() / 1e9, UTC)
            self._changes += 1
            self._rows[key] = Entry(key=key, value=value or b"", revision=revision, time=time, deleted=value is None)


class Sums:
    """What one counter stands at, by key: one subject each, in a stream that adds up."""

    def __init__(
        self, backend: Backend, spec: StreamSpec, own_streams: Provisioner, *, prefix: str, patience_seconds: float
    ) -> None:
        self._backend = backend
        self._spec = spec
        self._own_streams = own_streams
        self._prefix = prefix
        self._patience = patience_seconds

    async def add(self, key: str, amount: int, *, message_id: str | None) -> int:
        subject = f"{self._prefix}{key}"
        once = secrets.token_hex(12) if message_id is None else f"{subject} {message_id}"
        message = Message(subject=subject, data=b"", headers={"Nats-Incr": f"{amount:+d}"})

        async def publish() -> PubAck:
            return await self._backend.publish(
                message, message_id=once, stream=self._spec.name, timeout_seconds=TIMEOUT_SECONDS
            )

        holding.check()
        ack = await self._do(publish)
        return await self.get(key) if ack.total is None else ack.total

    async def get(self, key: str) -> int:
        message = await self._do(lambda: self._backend.last_message(self._spec.name, f"{self._prefix}{key}"))
        return _total(message) if message else 0

    async def all(self) -> dict[str, int]:
        return await self._do(self._all)

    async def _all(self) -> dict[str, int]:
        last = (await self._backend.stream_info(self._spec.name)).last_sequence
        reading = self._backend.read(self._spec.name, filter_subjects=(f"{self._prefix}>",), last_sequence=last)
        async with aclosing(reading):
            return {message.subject.removeprefix(self._prefix): _total(message) async for message in reading}

    async def _do(self, deed: Callable[[], Awaitable[T]]) -> T:
        async def attempt() -> T:
            await self._own_streams.ensure(self._spec)
            try:
                return await deed()
            except (UnavailableError, NotFoundError):
                self._own_streams.forget(self._spec.name)  # it may have been deleted
                raise

        return await _steadily(attempt, clock=self._backend.clock, patience_seconds=self._patience)


async def _steadily(attempt: Callable[[], Awaitable[T]], *, clock: Clock, patience_seconds: float) -> T:
    """What the attempt returns, which is repeated where that may help, until the time is over.

    `NotFoundError` says that what it works on was deleted: the next attempt makes it anew.
    """
    tries = Tries(BACKOFF, until=clock.monotonic() + patience_seconds)
    while True:
        try:
            return await attempt()
        except (UnavailableError, OutcomeUnknownError, NotFoundError):
            if (delay := tries.next_wait(clock.monotonic())) is None:
                raise
        await clock.sleep(delay)


def _total(message: Message) -> int:
    return int(msgspec.json.decode(message.data)["val"])
