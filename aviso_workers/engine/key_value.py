"""Buckets of keys as the engine uses them: made where they are missing, tried again until a deadline, cached on demand.

Tables, leases, claims and the states of windows are kept in them. A backend's own bucket (`backends.buckets`) says what
failed, and tries nothing again.
"""

from __future__ import annotations

import heapq
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import TypedDict, TypeVar, Unpack

from msgspec import Struct

from aviso_workers import clocks
from aviso_workers.backends import Backend
from aviso_workers.clocks import Clock
from aviso_workers.declare.retry import Backoff, Tries
from aviso_workers.engine import replay, singletons
from aviso_workers.errors import BackendError, ConflictError, NotFoundError, OutcomeUnknownError, UnavailableError
from aviso_workers.jetstream.key_value import TTL, Entry, KeyValue, ttl_text

T = TypeVar("T")

LONGEST_DELAY_SECONDS = 1.0
BACKOFF = Backoff(first=0.1, factor=2.0, max=LONGEST_DELAY_SECONDS, jitter=0.0)


class Conditions(TypedDict, total=False):
    """What `put` and `delete` of a `KeyValue` take beside the key and the value; see there."""

    revision: int | None
    ttl_seconds: float | None
    message_id: str | None
    headers: Mapping[str, str] | None


class RetryingKeyValue(Struct, eq=False):
    """A `KeyValue` that is made where it is missing, and that waits for a connection that is lost.

    Raises `OutcomeUnknownError` where it cannot be told whether a write was done.
    """

    backend: Backend
    name: str
    patience_seconds: float
    history: int = 1
    ttl_seconds: float | None = None
    own: bool = False
    """As for `Backend.key_value`."""
    bucket: KeyValue | None = None
    """The bucket itself, as soon as it is needed."""

    async def get(self, key: str) -> Entry | None:
        return await self._do(lambda bucket: bucket.get(key))

    async def newest(self, key: str) -> Entry | None:
        return await self._do(lambda bucket: bucket.newest(key))

    async def put(self, key: str, value: bytes, **conditions: Unpack[Conditions]) -> int:
        return await self._write(key, conditions, lambda bucket, once: bucket.put(key, value, **once))

    async def delete(self, key: str, **conditions: Unpack[Conditions]) -> int:
        return await self._write(key, conditions, lambda bucket, once: bucket.delete(key, **once))

    async def time(self) -> datetime:
        return await self._do(lambda bucket: bucket.time())

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

        Raises `NotFoundError` where the bucket was deleted, also where it was recreated, because its revisions begin
        again then; `BackendError` when the connection is lost for good.
        """
        created: datetime | None = None
        while True:
            try:
                bucket = await self.opened()
                created = await replay.when_created(self.backend, f"KV_{self.name}", known=created)
                async with aclosing(bucket.changes(key, after=after, until=until)) as changes:
                    async for entry in changes:
                        after = entry.revision
                        yield entry
                return
            except UnavailableError:
                with clocks.move_on_after(self.backend.clock, LONGEST_DELAY_SECONDS):
                    await self.backend.connection.failed()

    async def opened(self) -> KeyValue:
        """Return the bucket itself, which does not try again."""

        async def itself(bucket: KeyValue) -> KeyValue:
            return bucket

        return await self._do(itself)

    async def _write(
        self, key: str, conditions: Conditions, write: Callable[[KeyValue, Conditions], Awaitable[int]]
    ) -> int:
        singletons.check()
        message_id = conditions.get("message_id") or secrets.token_hex(12)
        once: Conditions = {**conditions, "message_id": message_id}
        try:
            return await self._do(lambda bucket: write(bucket, once))
        except OutcomeUnknownError as error:
            if not isinstance(error.__cause__, ConflictError):
                raise
            doubt = error
        # An attempt whose acknowledgement was lost may have been the one that was faster.
        try:
            async with aclosing(self.changes(key, until=await self.revision())) as changes:
                found = [entry async for entry in changes]
        except BackendError as error:
            raise doubt from error
        if found and found[-1].message_id == message_id:
            return found[-1].revision
        raise doubt

    async def _do(self, deed: Callable[[KeyValue], Awaitable[T]]) -> T:
        async def attempt() -> T:
            if self.bucket is None:
                self.bucket = await self.backend.key_value(
                    self.name, history=self.history, ttl_seconds=self.ttl_seconds, own=self.own
                )
            try:
                return await deed(self.bucket)
            except (UnavailableError, NotFoundError):
                self.bucket = None  # it may have been deleted
                raise

        return await retried(attempt, clock=self.backend.clock, patience_seconds=self.patience_seconds)


class CachedKeyValue(RetryingKeyValue, eq=False, kw_only=True):
    """A `RetryingKeyValue` whose values are here as well, kept by `keep_current`, which reads what changes.

    While that is interrupted or has not come to the newest yet, the server is asked. So what is told is as old as the
    way from the server to here; one's own writes are told at once. That a key is forgotten after its ttl comes as no
    change: it is forgotten here by the server's time.
    """

    seen: int = 0
    """The revision up to which the bucket's changes have come here."""
    is_current: bool = False
    rows: dict[str, Entry] = {}
    """The newest known entry of each key. A key that we deleted has its deletion here until the server's
    message about it arrives."""
    number: int = 0
    """See `version`."""
    ahead: timedelta = timedelta(0)
    """How far the server's clock is ahead of ours."""
    ends: list[tuple[datetime, str, int]] = []
    """When keys are forgotten, the first one first, with their revisions; some may have newer values."""

    @property
    def version(self) -> int | None:
        """A number that is another one when `entries` tells something else; None while the server is asked."""
        self._forget()
        return self.number if self.is_current else None

    async def keep_current(self) -> None:
        """Keep the copy current by following the bucket. Never returns."""
        while True:
            try:
                await self._follow(await self.opened())
            except BackendError:
                await self.backend.clock.sleep(LONGEST_DELAY_SECONDS)

    async def get(self, key: str) -> Entry | None:
        if not self.is_current:
            return await super().get(key)
        self._forget()
        entry = self.rows.get(key)
        return None if entry is None or entry.deleted else entry

    async def newest(self, key: str) -> Entry | None:
        """Return what is here; the server is asked about a key that is not, because deletions are not kept, and about
        one with a ttl, which counts from the server's time."""
        entry = self.rows.get(key) if self.is_current else None
        if entry is None or entry.deleted or entry.ttl_seconds is not None:
            return await super().newest(key)
        return entry

    async def entries(self) -> list[Entry]:
        if not self.is_current:
            return await super().entries()
        self._forget()
        return sorted((row for row in self.rows.values() if not row.deleted), key=lambda row: row.revision)

    async def put(self, key: str, value: bytes, **conditions: Unpack[Conditions]) -> int:
        try:
            stored = await super().put(key, value, **conditions)
        except ConflictError:
            await self._read_again(key)
            raise
        ttl_seconds = conditions.get("ttl_seconds")
        own = {} if ttl_seconds is None else {TTL: ttl_text(ttl_seconds)}
        self._note(key, stored, value, {**(conditions.get("headers") or {}), **own})
        return stored

    async def delete(self, key: str, **conditions: Unpack[Conditions]) -> int:
        try:
            stored = await super().delete(key, **conditions)
        except ConflictError:
            await self._read_again(key)
            raise
        self._note(key, stored, None)
        return stored

    async def _follow(self, bucket: KeyValue) -> None:
        # Begun again each time: what expired during a long interruption comes as no change.
        self.rows, self.ends, self.seen = {}, [], 0
        self.number += 1
        last = await bucket.revision()
        self.ahead = await bucket.time() - clocks.utc_now(self.backend.clock)
        try:
            async with aclosing(bucket.changes(until=last)) as changes:
                async for entry in changes:
                    self._learn(entry)
            self.seen, self.is_current = last, True
            async with aclosing(bucket.changes(after=last)) as changes:
                async for entry in changes:
                    self._learn(entry)
        finally:
            self.is_current = False

    async def _read_again(self, key: str) -> None:
        """Read a key that somebody else has changed before the change came here."""
        newest = await super().get(key)
        if newest is None:
            self.number += 1
            self.rows.pop(key, None)
        else:
            self._take_newer(newest)

    def _learn(self, entry: Entry) -> None:
        self.seen = max(self.seen, entry.revision)
        known = self.rows.get(entry.key)
        if known is not None and known.revision > entry.revision:
            return
        self.number += known is None or known.revision < entry.revision
        if entry.deleted:
            self.rows.pop(entry.key, None)
        else:
            self._keep(entry)

    def _keep(self, entry: Entry) -> None:
        self.rows[entry.key] = entry
        if (ttl_seconds := entry.ttl_seconds) is not None:
            heapq.heappush(self.ends, (entry.time + timedelta(seconds=ttl_seconds), entry.key, entry.revision))

    def _forget(self) -> None:
        """Forget the keys whose ttl is over."""
        while self.ends and self.ends[0][0] <= clocks.utc_now(self.backend.clock) + self.ahead:
            _, key, revision = heapq.heappop(self.ends)
            if key in self.rows and self.rows[key].revision == revision:
                del self.rows[key]
                self.number += 1

    def _note(self, key: str, revision: int, value: bytes | None, headers: Mapping[str, str] | None = None) -> None:
        time = clocks.utc_now(self.backend.clock) + self.ahead
        deleted = value is None
        self._take_newer(
            Entry(key=key, data=value or b"", revision=revision, time=time, deleted=deleted, headers=headers or {})
        )

    def _take_newer(self, entry: Entry) -> None:
        """Keep what is newer than all that the server has told of."""
        known = self.rows.get(entry.key)
        if entry.revision > self.seen and (known is None or known.revision < entry.revision):
            self.number += 1
            self._keep(entry)


async def retried(attempt: Callable[[], Awaitable[T]], *, clock: Clock, patience_seconds: float) -> T:
    """Return what the attempt returns, which is repeated where that may help, until the time is over.

    `NotFoundError` says that what it works on was deleted: the next attempt makes it again. After an attempt that may
    have been done, every error of a later one is raised as `OutcomeUnknownError`, from that error.
    """
    tries = Tries(BACKOFF, until=clock.monotonic() + patience_seconds)
    in_doubt = False
    while True:
        try:
            return await attempt()
        except BackendError as error:
            unknown = isinstance(error, OutcomeUnknownError)
            passes = unknown or isinstance(error, UnavailableError | NotFoundError)
            delay = tries.next_wait(clock.monotonic()) if passes else None
            if delay is None:
                if in_doubt and not unknown:
                    raise OutcomeUnknownError.after(error) from error
                raise
            in_doubt = in_doubt or unknown
        await clock.sleep(delay)
