"""Tables and counters: state that all workers of an app share, kept on the server.

Declared on an app or a router, at work inside `async with app:`. Here is what an author calls: keys of any text, typed
values, and compare-and-set. Where it is kept, tried again and cached is `features.tables`.
"""

from __future__ import annotations

import asyncio
import builtins
import inspect
import os
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, overload
from weakref import WeakValueDictionary

import anyio
import msgspec
from msgspec import Struct

from aviso_workers import event_loops
from aviso_workers.aviso import payloads
from aviso_workers.aviso.literals import AnyDuration
from aviso_workers.aviso.notifications import Notification
from aviso_workers.declare import durations
from aviso_workers.errors import (
    ConflictError,
    DeclarationError,
    OutcomeUnknownError,
    UnavailableError,
    UndecodableError,
)
from aviso_workers.jetstream.key_value import Entry, KeyValue, decode_key, encode_key

T = TypeVar("T")
C = TypeVar("C")

PROCESS: ContextVar[object] = ContextVar("process", default=None)
"""Which worker this code runs in, where a test plays several of them in one process: each is connected by itself."""
MAX_HISTORY = 64
PAGES = "=applied."
"""The beginning of the keys in a table's bucket that are not an author's. No key of an author's is spelled so."""
APPLIED = "Aviso-Applied"
"""The header of a key that tells which notifications its updates were applied for."""
REMEMBERED_SECONDS = 31 * 86400.0
"""How long it is remembered of a key that an update has deleted."""
SHORTEST_TTL_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 0.5
"""After a conflict with another process an update waits for a random time before it is tried again, at most so long."""


class Delete:
    """Returned by a function that `Table.update` calls: delete the key."""

    # Neither a Struct nor an Enum, so that it is no JSON and cannot be stored by mistake.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Delete)

    def __hash__(self) -> int:
        return hash(Delete)

    def __repr__(self) -> str:
        return "Delete()"


D = TypeVar("D", bound=Delete)


class Change(Struct, Generic[T], frozen=True, kw_only=True):
    """A change of a key in a table. Its `value` is None if the key was deleted, or expired after its ttl."""

    key: str
    value: T | None
    """The new value; None if the key was deleted, or expired after its ttl."""
    revision: int
    time: datetime


class Applied(Protocol):
    """The record of updates that are made once for a notification, which a connected table asks."""

    def once(self, key: str, notification: Notification[Any]) -> AbstractContextManager[None]: ...
    async def added(self, key: str, header: str, notification: Notification[Any]) -> str | None: ...


class _Connected(NamedTuple, Generic[C]):
    """The connection of a table or counter in one app, its event loop and process."""

    to: C
    loop: asyncio.AbstractEventLoop
    process: int


class _Connections(Generic[C]):
    """The connections of a table or counter, by `PROCESS`."""

    def __init__(self, kind: str, name: str) -> None:
        self._kind = kind
        self._what = f"{kind} {name!r}"
        self._connected: dict[object, _Connected[C]] = {}

    def add(self, to: C) -> None:
        if PROCESS.get() in self._connected:
            raise DeclarationError(f"{self._what} is in use by another app of this process")
        self._connected[PROCESS.get()] = _Connected(to, asyncio.get_running_loop(), os.getpid())

    def remove(self) -> None:
        self._connected.pop(PROCESS.get(), None)

    @property
    def here(self) -> C:
        """Return the connection. Raises `DeclarationError` where there is none, or in another event loop, to which no
        answer would come; `UnavailableError` in a process that was forked from the one that is connected.
        """
        if (connected := self._connected.get(PROCESS.get())) is None:
            raise DeclarationError(
                f"{self._what} is not connected: declare it before `async with app:`, and use it inside"
            )
        if event_loops.running_loop() is not connected.loop:
            if os.getpid() != connected.process:
                raise UnavailableError(f"{self._what} is connected in the process that this one was forked from")
            raise DeclarationError(
                f"{self._what} is connected in another event loop: from this one, call its methods by `app.sync`, as "
                f"in `await asyncio.to_thread(app.sync, {self._kind}.get, key)`"
            )
        return connected.to


class _Bucket(NamedTuple):
    """The bucket of a table while it is connected."""

    bucket: KeyValue
    applied: Applied
    turns: WeakValueDictionary[str, anyio.Lock]
    """By key as it is spelled, the updates that wait for each other."""


class Table(event_loops.Awaited, Generic[T]):
    """Values of one type by key, for use inside `async with app:`; see `Router.table`.

    A plain `def`, which runs in a thread, calls the methods by `App.sync`.

    Every method raises `InvalidKeyError` if the key is not a text, is empty or too long, `BackendError` if the server
    cannot be reached within `publish_deadline_seconds`, and `DeclarationError` where the table is not connected, or a
    method that has to be awaited is called in a thread without an event loop.
    """

    def __init__(self, name: str, type: Any, *, default: Any, history: int, cached: bool) -> None:
        self.name = name
        self.keeps_history = history
        self.cached = cached
        self._connections = _Connections[_Bucket]("table", name)
        try:
            if isinstance(default, builtins.type):
                raise TypeError(f"default= is a value such as {default.__name__}(), found the type itself")
            self._read = payloads.json_reader(type)
        except (TypeError, ValueError) as error:
            raise DeclarationError(f"table {name!r}: {error}") from error
        try:
            self._default = None if default is None else self._encode(default)
        except (TypeError, ValueError) as error:
            raise DeclarationError(f"{error}") from error  # which names the table
        if not isinstance(history, int) or not 1 <= history <= MAX_HISTORY:
            raise DeclarationError(f"table {name!r}: history must be from 1 to {MAX_HISTORY}, found {history!r:.100}")

    @event_loops.awaited
    async def get(self, key: str) -> T:
        """Return the value of a key, or the table's default if there is none (None if it has no default).

        A table that is `cached` does not ask the server. Raises `UndecodableError` if the stored value does not fit the
        table's type.
        """
        value: T = self._value(await self._bucket.get(encode_key(key)))
        return value

    @event_loops.awaited
    async def put(self, key: str, value: T, *, ttl: AnyDuration | None = None) -> None:
        """Store a value, which expires after the `ttl`: a number of seconds (1 or more), a text such as `10m`, or a
        timedelta; not in a table with a history. Default: it does not expire.

        Raises `DeclarationError` for a `ttl` that is no duration; `RefusedError` for one below 1 s, and for any if the
        server is older than 2.11.
        """
        await self._bucket.put(encode_key(key), self._encode(value), ttl_seconds=self._ttl_seconds(ttl))

    @overload
    async def update(
        self,
        key: str,
        change: Callable[[T], T],
        *,
        once: Notification[Any] | None = None,
        ttl: AnyDuration | None = None,
    ) -> T: ...

    @overload
    async def update(
        self,
        key: str,
        change: Callable[[T], T | D],
        *,
        once: Notification[Any] | None = None,
        ttl: AnyDuration | None = None,
    ) -> T | D: ...

    @event_loops.awaited
    async def update(
        self,
        key: str,
        change: Callable[[T], Any],
        *,
        once: Notification[Any] | None = None,
        ttl: AnyDuration | None = None,
    ) -> Any:
        """Store the value that `change` returns for the present value (or the default), and return it.

        Where `change` returns `Delete()`, the key is deleted, and `Delete()` is returned. None is not a value: for a
        function that changes a list in place and returns nothing, this raises `DeclarationError`, and the key stays as
        it is.

        A key that expires does so at the same time as before, or a second after the update if that is later. With a
        `ttl`, as in `put`, its time begins anew.

        No update is lost: if another one was faster, `change` is called again with the new value, so it must do nothing
        else. Raises `OutcomeUnknownError` if an acknowledgement was lost and the key has changed since, so that it is
        not known whether this update took part in it.

        With `once`, the notification that an agent is handling, the update is applied once for this notification,
        however often and by whichever worker it is handled, also as a dead letter that is retried. If it was applied
        before, the value is returned and `change` is not called. `put` and `delete` forget what was applied to the key.
        Raises `OutcomeUnknownError` for a dead letter that is older than 30 days, for which this is not known any more;
        `DeclarationError` for any other notification, for a second update of a key within a call, and if the table has
        a history; `RefusedError` if the server is older than 2.11.
        """
        bucket, spelled, seconds = self._bucket, encode_key(key), self._ttl_seconds(ttl)
        if once is None:
            return await self._update(bucket, spelled, change, None, seconds)
        if self.keeps_history > 1:
            raise DeclarationError(f"table {self.name!r}: once= needs a table without a history")
        with self._connections.here.applied.once(spelled, once):
            return await self._update(bucket, spelled, change, once, seconds)

    async def _update(
        self,
        bucket: KeyValue,
        spelled: str,
        change: Callable[[T], Any],
        once: Notification[Any] | None,
        ttl_seconds: float | None,
    ) -> Any:
        conflicts = 0
        _, applied_before, turns = self._connections.here
        # Callers of one process take turns: side by side they would only defeat each other's compare-and-set.
        async with turns.setdefault(spelled, anyio.Lock()):
            while True:
                began = anyio.current_time()
                entry = await bucket.newest(spelled)
                current: T = self._value(None if entry is None or entry.deleted else entry)
                applied: str | None = entry.headers.get(APPLIED, "") if entry else ""
                if once is not None:
                    applied = await applied_before.added(spelled, applied or "", once)
                if applied is None:
                    return current
                value = change(current)
                self._refuse_forgotten(value)
                try:
                    ttl = await _left_of_ttl(bucket, entry) if ttl_seconds is None else ttl_seconds
                    await self._store(bucket, spelled, entry, value, applied, ttl)
                    return value
                except ConflictError:  # another process was faster
                    conflicts += 1
                    longest_wait = (anyio.current_time() - began) * 2**conflicts
                    await anyio.sleep(random.uniform(0, min(longest_wait, LONGEST_WAIT_SECONDS)))
                except OutcomeUnknownError:
                    if once is None:
                        raise  # else the key tells whether it was applied

    async def _store(
        self,
        bucket: KeyValue,
        spelled: str,
        entry: Entry | None,
        value: T | Delete,
        applied: str,
        ttl_seconds: float | None,
    ) -> None:
        """Store the value of a key with what was applied to it, if nobody has changed the entry."""
        revision = entry.revision if entry else 0
        headers = {APPLIED: applied} if applied else None
        if not isinstance(value, Delete):
            data = self._encode(value)
            await bucket.put(spelled, data, revision=revision, headers=headers, ttl_seconds=ttl_seconds)
        elif applied:
            await bucket.delete(spelled, revision=revision, headers=headers, ttl_seconds=REMEMBERED_SECONDS)
        elif entry is not None and not entry.deleted:
            await bucket.delete(spelled, revision=revision)

    @event_loops.awaited
    async def delete(self, key: str) -> None:
        """Delete a key and its history. A key that does not exist is not an error."""
        await self._bucket.delete(encode_key(key))

    @event_loops.awaited
    async def items(self) -> dict[str, T]:
        """Return all keys with their values, those that changed last at the end."""
        entries = await self._bucket.entries()
        return {decode_key(entry.key): self._value(entry) for entry in entries if not entry.key.startswith(PAGES)}

    @event_loops.awaited
    async def history(self, key: str) -> list[Change[T]]:
        """Return the last values of a key, as many as the table keeps, the newest at the end."""
        bucket = self._bucket
        async with aclosing(bucket.changes(encode_key(key), until=await bucket.revision())) as changes:
            return [self._change(entry) async for entry in changes]

    async def watch(self, key: str | None = None) -> AsyncGenerator[Change[T], None]:
        """Yield the present values of a key, or of all keys, and then their changes, without end.

        Of changes in quick succession, or while the connection is lost, only the newest may be yielded.
        """
        async with aclosing(self._bucket.changes(None if key is None else encode_key(key))) as changes:
            async for entry in changes:
                if not entry.key.startswith(PAGES):
                    yield self._change(entry)

    def connect(self, bucket: KeyValue, applied: Applied) -> None:
        """Connect the table, as the app does. Raises `DeclarationError` if another app uses the table."""
        self._connections.add(_Bucket(bucket, applied, WeakValueDictionary()))

    def disconnect(self) -> None:
        self._connections.remove()

    def __repr__(self) -> str:
        return f"<Table {self.name}>"

    @property
    def _bucket(self) -> KeyValue:
        return self._connections.here.bucket

    def _ttl_seconds(self, ttl: object) -> float | None:
        return None if ttl is None else durations.seconds(f"table {self.name!r}: ttl", ttl)

    def _refuse_forgotten(self, value: object) -> None:
        """Raise `DeclarationError` for what a function of `update` returns where it has forgotten the new value."""
        if value is None:
            raise DeclarationError(
                f"table {self.name!r}: the function of update returned None, as `list.append` does: let it return the "
                "new value, or Delete() where the key is to be deleted"
            )
        if inspect.iscoroutine(value):
            value.close()
            raise DeclarationError(
                f"table {self.name!r}: the function of update is async: let a plain function return the new value"
            )

    def _encode(self, value: Any) -> bytes:
        if value is None:
            raise DeclarationError(f"table {self.name!r}: None is not a value: delete the key instead")
        if isinstance(value, Delete):
            raise DeclarationError(
                f"table {self.name!r}: Delete() is what a function of update returns: `await table.delete(key)` instead"
            )
        try:
            data = payloads.to_json(value)
            self._read(data)  # so that a mistake shows where it is made, and not where it is read
        except msgspec.ValidationError as error:
            raise msgspec.ValidationError(f"table {self.name!r}: {value!r:.100} does not fit: {error}") from error
        except TypeError as error:
            raise TypeError(f"table {self.name!r}: {error}") from error
        return data

    def _value(self, entry: Entry | None) -> Any:
        data = self._default if entry is None else entry.value
        try:
            return None if data is None else self._read(data)
        except msgspec.DecodeError as error:
            key = decode_key(entry.key) if entry else ""
            raise UndecodableError(
                f"table {self.name!r}, key {key!r}: what is stored does not fit: {error}; put another value, or give "
                "the table another name or a type that fits both, such as `Old | New`"
            ) from error

    def _change(self, entry: Entry) -> Change[T]:
        value = None if entry.deleted else self._value(entry)
        return Change(key=decode_key(entry.key), value=value, revision=entry.revision, time=entry.time)


class CounterStore(Protocol):
    """The store that a connected counter adds to."""

    async def add(self, key: str, amount: int, *, message_id: str | None) -> int: ...
    async def get(self, key: str) -> int: ...
    async def all(self) -> dict[str, int]: ...


class Counter(event_loops.Awaited):
    """Whole numbers by key, which the server adds up, for use inside `async with app:`; see `Router.counter`.

    Nothing is read before it is written, so that workers do not conflict. Every method raises as those of a `Table` do,
    and `RefusedError` if the server is older than 2.12. A plain `def` calls the methods by `App.sync`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._connections = _Connections[CounterStore]("counter", name)

    @event_loops.awaited
    async def add(self, key: str, amount: int = 1, *, message_id: str | None = None) -> int:
        """Add an amount to the number of a key, and return the new number.

        With a `message_id` of your own, such as the notification's, a repeat within two minutes adds nothing. Raises
        `DeclarationError` for an amount that is not a whole number.
        """
        if not isinstance(amount, int) or isinstance(amount, bool):
            raise DeclarationError(f"counter {self.name!r}: the amount must be a whole number, found {amount!r:.100}")
        return await self._connections.here.add(encode_key(key), amount, message_id=message_id)

    @event_loops.awaited
    async def get(self, key: str) -> int:
        """Return the number of a key; 0 if nothing was added."""
        return await self._connections.here.get(encode_key(key))

    @event_loops.awaited
    async def items(self) -> dict[str, int]:
        """Return the numbers of all keys."""
        return {decode_key(key): total for key, total in (await self._connections.here.all()).items()}

    def connect(self, store: CounterStore) -> None:
        """Connect the counter, as the app does. Raises `DeclarationError` if another app uses the counter."""
        self._connections.add(store)

    def disconnect(self) -> None:
        self._connections.remove()

    def __repr__(self) -> str:
        return f"<Counter {self.name}>"


async def _left_of_ttl(bucket: KeyValue, entry: Entry | None) -> float | None:
    """Return after how many seconds an entry expires, at least `SHORTEST_TTL_SECONDS`; None where it does not."""
    if entry is None or (ttl := entry.ttl_seconds) is None:
        return None
    age = (await bucket.time() - entry.time).total_seconds()
    return max(SHORTEST_TTL_SECONDS, ttl - age)
