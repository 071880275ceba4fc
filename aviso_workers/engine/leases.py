"""Leases: one worker of all does something, such as running timers or closing windows.

A lease is a key in a bucket that forgets it, unless it is put again, within `LEASE_SECONDS`. Whoever finds none makes
one. A worker whose lease may be over stops what it runs. That alone would let a worker that was paused run beside the
next one: what must not happen twice is claimed as well.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio

from aviso_workers import clocks
from aviso_workers.backends import Backend
from aviso_workers.clocks import Clock
from aviso_workers.engine.key_value import RetryingKeyValue
from aviso_workers.errors import BackendError, ConflictError, OutcomeUnknownError
from aviso_workers.events import Events, LeadershipHindered, LeadershipUnhindered
from aviso_workers.state import lease_records
from aviso_workers.state.lease_records import LEADER, LEASE_SECONDS

RENEW_SECONDS = 2.0
OVERDUE_SECONDS = LEASE_SECONDS + RENEW_SECONDS
"""A lease that nobody has renewed for so long is over, also where the server does not forget it: one that was put while
the server's clock was ahead is forgotten only when that time has come."""
CHECK_SECONDS = 1.0
"""How often it is looked whether there is a leader."""
APART_SECONDS = 30.0
"""Two failures that are further apart are two outages."""
UNDER_WAY_SECONDS = 0.05
TRIES = 10
"""How often in a row a lease is put again that was replaced meanwhile, and not by another worker."""


@asynccontextmanager
async def drained(stop: anyio.Event, *, clock: Clock, timeout_seconds: float) -> AsyncIterator[None]:
    """Cancel the block so long after `stop`."""

    async def end(scope: anyio.CancelScope) -> None:
        await stop.wait()
        await clock.sleep(timeout_seconds)
        scope.cancel()

    async with anyio.create_task_group() as ending:
        ending.start_soon(end, ending.cancel_scope)
        yield
        ending.cancel_scope.cancel()


class Outage:
    """Whether a bucket can be used: where it could not for as long as a lease lasts, that is stated once."""

    def __init__(self, bucket: str, *, clock: Clock, events: Events) -> None:
        self._bucket = bucket
        self._clock = clock
        self._events = events
        self._since = self._last = -math.inf
        """When the outage began, and when it was last noticed."""
        self._reported = False

    def begin(self, error: Exception) -> None:
        """Note that the bucket could not be used, or still cannot be."""
        now = self._clock.monotonic()
        if now - self._last > APART_SECONDS:
            self._since = now  # it was used well in between, or not at all
        self._last = now
        if not self._reported and now - self._since >= LEASE_SECONDS:
            self._reported = True
            self._events.emit(LeadershipHindered(bucket=self._bucket, error=error))

    def end(self) -> None:
        """Note that the bucket was written, or is not needed for now."""
        self._last = -math.inf
        if self._reported:
            self._reported = False
            self._events.emit(LeadershipUnhindered(bucket=self._bucket))


class Lease:
    """Who leads, in the app's timers or in what `of` names. One worker at a time holds it, but for one that was paused
    and has not noticed yet."""

    def __init__(
        self, backend: Backend, app: str, *, of: str = LEADER, events: Events, outage: Outage | None = None
    ) -> None:
        """`outage` is that of several leases, so that it is stated once."""
        self.token = 0
        """Greater with every leader."""
        self._clock = backend.clock
        bucket = lease_records.bucket_of(app)
        self._bucket = RetryingKeyValue(
            backend, bucket, ttl_seconds=LEASE_SECONDS, patience_seconds=RENEW_SECONDS, own=True
        )
        self._outage = outage or Outage(bucket, clock=backend.clock, events=events)
        self._key = of
        self._holder = f"{socket.gethostname()}:{os.getpid()}".encode()
        self._revision = 0
        self._until = 0.0
        self._in_doubt: set[str] = set()
        """The message ids of our puts since the last one that was answered of which it is not known whether they were
        stored: they are under way, were given up, or have failed without an answer."""
        self._seen: tuple[int, float] = (0, 0.0)
        """The revision of another worker's lease, and since when it has been that."""

    @property
    def held(self) -> bool:
        return self._clock.monotonic() < self._until

    async def take(self, stop: anyio.Event) -> bool:
        """Return when it is held; False where `stop` comes first."""
        while not stop.is_set():
            if await self.try_to_take():
                return True
            await clocks.sleep_until(self._clock, CHECK_SECONDS, stop)
        return False

    async def try_to_take(self) -> bool:
        """Return whether it is held now. Called again and again, it also takes one that is over and not forgotten."""
        try:
            await self._put(await self._overdue())
        except anyio.get_cancelled_exc_class():
            await self.give_back()
            raise
        if self.held:
            self.token = self._revision
            self._seen = (0, 0.0)
        return self.held

    async def _overdue(self) -> int:
        """Return the revision of a lease that nobody has renewed for too long; 0 where there is none.

        A foreign value hides whether there is a lease, so each one counts as a renewal: the leader may be at work.
        """
        now = self._clock.monotonic()
        try:
            entry = await self._bucket.newest(self._key)
        except BackendError:
            return 0
        revision, since = self._seen
        if entry is None or (entry.deleted and not entry.foreign):
            self._seen = (0, now)
            return 0
        if entry.revision != revision:
            self._seen = (entry.revision, now)
            return 0
        return entry.revision if now - since > OVERDUE_SECONDS else 0

    @asynccontextmanager
    async def renewed(self) -> AsyncIterator[None]:
        """Cancel the block when the lease may be over. It is given back when the block ends before."""
        async with anyio.create_task_group() as holding:
            holding.start_soon(self.hold, holding.cancel_scope)
            yield
            holding.cancel_scope.cancel()
        if self.held:
            await self.give_back()

    async def hold(self, term: anyio.CancelScope) -> None:
        """Renew it for as long as that goes well, then cancel what depends on it."""
        while self.held:
            with clocks.move_on_after(self._clock, self._until - self._clock.monotonic()):
                await self._clock.sleep(RENEW_SECONDS)
                await self._put(self._revision)
        term.cancel()

    async def give_back(self) -> None:
        """Delete the lease, so that the next leader need not wait until it is forgotten. Where that cannot be done in
        `RENEW_SECONDS`, it is forgotten soon enough. A caller who is cancelled gives it back all the same.
        """
        if self.held or self._in_doubt:
            self._until = 0.0
            with anyio.move_on_after(RENEW_SECONDS, shield=True), suppress(BackendError):
                await self._delete()

    async def _delete(self) -> None:
        """Delete what we have put last: also where that was under way when nobody needed it any more, and arrives
        meanwhile, as the server stores what one client sends in the order in which it was sent.
        """
        revision = self._revision
        for _ in range(TRIES):
            try:
                await self._bucket.delete(self._key, revision=revision)
            except ConflictError:
                newest = await self._bucket.newest(self._key)
                if newest is not None and newest.message_id in self._in_doubt:
                    revision = newest.revision
                elif newest is not None and newest.revision == revision:
                    await self._clock.sleep(UNDER_WAY_SECONDS)  # what was sent before is being stored by a cluster
                else:
                    break  # it is another worker's
            else:
                break
        self._in_doubt.clear()

    async def _put(self, revision: int, *, tries: int = TRIES) -> None:
        sent, message_id = self._clock.monotonic(), secrets.token_hex(12)
        self._in_doubt.add(message_id)
        try:
            self._revision = await self._bucket.put(self._key, self._holder, revision=revision, message_id=message_id)
        except ConflictError:
            self._in_doubt.discard(message_id)
            if (self._in_doubt or self.held) and tries:
                await self._put_after_conflict(tries - 1)
                return
            self._until = 0.0  # it is another worker's
        except BackendError as error:
            if not isinstance(error, OutcomeUnknownError):
                self._in_doubt.discard(message_id)
            self._outage.begin(error)
            return  # held as long as it was
        else:
            self._in_doubt.clear()
            self._until = sent + LEASE_SECONDS
        self._outage.end()

    async def _put_after_conflict(self, tries: int) -> None:
        """Put it on the revision of our own put that was in doubt, if that is the newest one; or on that of a foreign
        value, while it is ours: no other worker has taken it then.
        """
        try:
            entry = await self._bucket.newest(self._key)
        except BackendError as error:
            self._outage.begin(error)
            return
        in_doubt, self._in_doubt = self._in_doubt, set()
        if entry is not None and (entry.message_id in in_doubt or (entry.foreign and self.held)):
            await self._put(entry.revision, tries=tries)
        else:
            self._until = 0.0  # it is another worker's
            self._outage.end()
