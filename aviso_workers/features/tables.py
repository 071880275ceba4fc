"""Tables and counters at work: kept in buckets and a stream of counters, tried again until a deadline, cached where
they say so. An app opens them for as long as it is connected.

With `once=`, each notification updates a key once. The entry of the key lists the notifications in a header beside the
value, so that one write stores both: of each agent the newest few. Older ones are on pages of each key and agent
(`features.seen`), which the bucket forgets `KEPT_SECONDS` after they were written last.

That a consumer has settled a notification does not allow to forget it, as it does for windows: a handler may fail after
its update, and the dead letter may be handed back weeks later.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from types import TracebackType
from typing import Any, TypeVar

import anyio
import msgspec
from anyio.abc import TaskGroup
from msgspec import Struct

from aviso_workers.aviso.codec import read_json, read_number
from aviso_workers.aviso.notifications import Notification
from aviso_workers.backends import Backend, Message, PubAck
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.config import Config
from aviso_workers.declare.seen import SeenList
from aviso_workers.declare.tables import PAGES, Counter, Table
from aviso_workers.engine import publisher, singletons
from aviso_workers.engine.key_value import CachedKeyValue, RetryingKeyValue, retried
from aviso_workers.errors import BackendError, DeclarationError, NotFoundError, OutcomeUnknownError, UnavailableError
from aviso_workers.features.seen import SeenPages
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.state import table_records
from aviso_workers.state.dead_letter_records import RETRIED
from aviso_workers.state.table_records import COUNTERS_SUBJECT

DAY_SECONDS = 86400.0
KEPT_SECONDS = 31 * DAY_SECONDS
CERTAIN_SECONDS = 30 * DAY_SECONDS
"""The page of a notification is certainly kept until its dead letter is as old as this; clocks may differ by a day."""
LISTED = 64
"""A header lists at most so many notifications of an agent; when it is full, the older half is moved to pages."""
DIGEST_BYTES = 16
T = TypeVar("T")
TIMEOUT_SECONDS = 5.0
AGAIN_SECONDS = 10.0
"""When a server that did not answer is asked again for a longer history."""


class AppliedHeader(Struct, frozen=True):
    """The header of a key."""

    generation: str
    """Made where the key has no header, as after a `put`. Its pages carry it, so that older pages are not read."""
    agents: dict[str, SeenList]
    """By name."""


class AppliedNotifications:
    """Remembers for which notifications the keys of one table were updated; see `declare.tables.Applied`."""

    def __init__(self, bucket: RetryingKeyValue, backend: Backend, *, table: str) -> None:
        self._bucket = bucket
        self._backend = backend
        self._table = table

    @contextmanager
    def once(self, key: str, notification: Notification[Any]) -> Iterator[None]:
        """Let the update of a key for this notification be made within the block.

        Raises `DeclarationError` where it is not the notification that an agent handles now or has given up now, or
        where the same call has updated the key for it before: a second update could not be told from a repeat of the
        first.
        """
        if not isinstance(notification, Notification):
            raise DeclarationError(
                f"table {self._table!r}: once= takes the notification that an agent handles now, found "
                f"{notification!r:.100}"
            )
        handling = publisher.handling()
        if handling is not None and not notification.sequence:
            raise DeclarationError(
                f"table {self._table!r}: once= takes a notification of a stream, found {notification.id}, which stands "
                "for a window: let the update write the same value however often it is made"
            )
        if handling is None or not handling.handles(notification.sequence, notification.topic):
            raise DeclarationError(
                f"table {self._table!r}: once= takes the notification that an agent handles now, found "
                f"{notification.id}: call update in the agent's function, and in tests let the harness run it"
            )
        update = (self._table, key, notification.sequence)
        if update in handling.updates:
            raise DeclarationError(
                f"table {self._table!r}, key {key!r}: updated before with once={notification.id}, in the same call: "
                "let one function make the whole change"
            )
        handling.updates.add(update)
        try:
            yield
        except BaseException:
            handling.updates.discard(update)
            raise

    async def added(self, key: str, header: str, notification: Notification[Any]) -> str | None:
        """Return the header that the key has after the update for this notification.

        None where the update was applied before. Raises `OutcomeUnknownError` where it is not known any more whether it
        was.
        """
        handling = publisher.handling()
        assert handling is not None, "only within `once`"
        known = read_json(header.encode(), AppliedHeader) if header else AppliedHeader(secrets.token_hex(4), {})
        listed = known.agents.get(handling.agent, SeenList())
        this = (notification.sequence, notification.time.timestamp())
        digest = hashlib.blake2b(key.encode(), digest_size=DIGEST_BYTES).hexdigest()
        prefix = f"{PAGES}{handling.agent}.{digest}.{known.generation}."
        pages = SeenPages(
            bucket=self._bucket,
            backend=self._backend,
            prefix=prefix,
            stream=handling.stream,
            listed=LISTED,
            ttl_seconds=KEPT_SECONDS,
        )
        if await pages.find(listed, this) is not None:
            return None
        if listed.may_have_left_out(this):
            self._require_known(notification)
        listed = (await pages.shortened(listed)).plus(this)
        return msgspec.json.encode(AppliedHeader(known.generation, {**known.agents, handling.agent: listed})).decode()

    def _require_known(self, notification: Notification[Any]) -> None:
        """Raise `OutcomeUnknownError` where the bucket may have forgotten the page of this notification."""
        retried = notification.headers.get(RETRIED, "")
        if not retried:
            return  # a redelivery comes long before a page is forgotten
        dead_lettered = read_number(retried.rpartition(".")[2]) / 1e9
        if self._backend.clock.time_ns() / 1e9 - dead_lettered > CERTAIN_SECONDS:
            raise OutcomeUnknownError(
                f"table {self._table!r}: whether the update for {notification.id} was applied before it became a dead "
                f"letter is known for {CERTAIN_SECONDS / DAY_SECONDS:.0f} days. Look at the value, and drop the dead "
                "letter"
            )


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

    async def __aenter__(self) -> Tables:
        self._keeping = anyio.create_task_group()
        await self._keeping.__aenter__()
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
            table.connect(Counters(self.backend, spec, self.own_streams, prefix=prefix, patience_seconds=patience))
            return
        kind = CachedKeyValue if table.cached else RetryingKeyValue
        bucket = kind(
            self.backend,
            table_records.bucket_of(self.app, name),
            history=table.keeps_history,
            patience_seconds=patience,
        )
        table.connect(bucket, AppliedNotifications(bucket, self.backend, table=name))
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
