"""Places among the calls that may run at once over all workers of an app: `Limit(concurrent=1)`.

A place is a lease (`leases`) that a worker renews while it has calls for it. A call that runs when its place is lost,
as in a process that was paused or cut off, is treated as a singleton's (`singletons`): it is cancelled, what it
publishes is refused, and its notification is tried again, which is no failed attempt.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import anyio

from aviso_workers.backends import Backend, Delivery
from aviso_workers.declare.limits import Limit
from aviso_workers.declare.verdicts import Failure, Retry
from aviso_workers.engine import calls, singletons
from aviso_workers.engine.buffer import Buffer
from aviso_workers.engine.leases import RENEW_SECONDS, Lease
from aviso_workers.errors import BackendError
from aviso_workers.events import Events
from aviso_workers.features.limits.rates import MAX_KEYS, Key, KeyLimit
from aviso_workers.state import lease_records, limit_records
from aviso_workers.state.lease_records import LEASE_SECONDS, PLACES

__all__ = ["Places"]

CHECK_SECONDS = 0.5
"""How often a worker tries to take a place that others have."""
LINGER_SECONDS = 0.25
"""How long a place is kept for which there is no call."""
TURN_SECONDS = 2.0
"""How long a worker keeps a place that others wait for, and then until its call ends."""
WANTED_SECONDS = 3.0
"""How often a worker that waits says so."""
AFTER_LOSS_SECONDS = 1.0


class _Place:
    """A place that this worker has."""

    def __init__(self, key: Key, number: int, lease: Lease) -> None:
        self.key = key
        self.number = number
        self.lease = lease
        self.delivery: Delivery | None = None
        """What it was given to."""
        self.runs = False
        """Whether a call runs, which may be after the delivery was given back."""
        self.used = 0
        self.leaving = False
        self.yields = False
        """Whether it is left to other workers that wait for one."""
        self.unused = anyio.Event()
        self.call = anyio.CancelScope()

    @property
    def free(self) -> bool:
        return self.delivery is None and not self.runs and not self.leaving and self.lease.held


class Places(KeyLimit):
    """The places of an agent."""

    bucket_of = staticmethod(lease_records.bucket_of)
    ttl_seconds = LEASE_SECONDS

    def __init__(self, limit: Limit, *, app: str, backend: Backend, events: Events, **given: Any) -> None:
        super().__init__(limit, app=app, backend=backend, events=events, **given)
        self.guard = self.call
        self._lease = partial(Lease, backend, app, events=events, outage=self._outage)
        self._ourselves = secrets.token_hex(8).encode()
        self._places: dict[Key, list[_Place]] = {}
        self._taken: dict[int, _Place] = {}
        """By the sequence of the delivery that each was given to."""
        self._tried: dict[str, Lease] = {}
        """Leases that others have, by their name."""
        self._yielded: set[Key] = set()
        """Keys of which a place was left to others, who try to take it now."""
        self._said_at: dict[Key, float] = {}
        """When this worker has said that it waits."""

    def admits(self, delivery: Delivery) -> bool:
        for place in self._places.get(self.key_of(delivery), ()):
            if place.free:
                place.delivery, place.unused = delivery, anyio.Event()
                place.used += 1
                self._taken[delivery.message.sequence] = place
                return True
        return False

    def release(self, delivery: Delivery) -> None:
        place = self._taken.get(delivery.message.sequence)
        if place is not None and place.delivery is delivery:
            del self._taken[delivery.message.sequence]
            place.delivery = None
            self._note_free(place)

    async def call(
        self, function: Callable[[Any], Awaitable[Failure | None]], buffer: Buffer, notification: Any
    ) -> Failure | None:
        """Return what the function returns. Raises an uncounted `Retry` where another worker may have the place."""
        place = self._taken[notification.sequence]
        place.runs = True
        try:
            with singletons.needing(place.lease), anyio.CancelScope() as place.call:
                failure = await calls.call(function, notification)
                if failure is None or place.lease.held:
                    return failure
        except Exception:
            if place.lease.held:
                raise
        finally:
            place.runs = False
            self._note_free(place)
        lost = Retry(after=AFTER_LOSS_SECONDS, counts=False)
        lost.args = ("its place among the calls that may run at once was lost, because it was not renewed in time",)
        raise lost

    def _note_free(self, place: _Place) -> None:
        if place.delivery is None and not place.runs:
            place.unused.set()
        if place.free:
            self._let(place.key, 1)

    def _name(self, key: Key) -> str:
        return f"{PLACES}/{limit_records.key_of(self._agent.name, self.limit.key, key)}"

    async def _serve(self, key: Key) -> None:
        """Let some of a key begin, or try to take a place for them."""
        if key in self._yielded:
            self._yielded.discard(key)
            await self._clock.sleep(2 * CHECK_SECONDS)
        places = self._places.get(key, [])
        if free := sum(place.free for place in places):
            self._let(key, free)
        numbers = set(range(self.limit.concurrent)) - {place.number for place in places}
        if self._waiting[key] and numbers and await self._take(key, random.choice(sorted(numbers))):
            return
        await self._clock.sleep(random.uniform(CHECK_SECONDS / 2, CHECK_SECONDS))

    async def _take(self, key: Key, number: int) -> bool:
        name = f"{self._name(key)}/{number}"
        if (lease := self._tried.get(name)) is None:
            lease = self._lease(of=name)
        if not await lease.try_to_take():
            if len(self._tried) >= MAX_KEYS:
                self._tried.clear()
            self._tried[name] = lease
            await self._say_that_we_wait(key)
            return False
        self._tried.pop(name, None)
        place = _Place(key, number, lease)
        self._places.setdefault(key, []).append(place)
        assert self._tasks is not None
        self._tasks.start_soon(self._hold, place)
        return True

    async def _hold(self, place: _Place) -> None:
        """Renew a place for as long as it is used, and end what runs in it where it is lost."""
        try:
            async with place.lease.renewed():
                self._let(place.key, 1)
                await self._until_left(place)
        finally:
            place.leaving = True
            self._places[place.key].remove(place)
            if not self._places[place.key]:
                del self._places[place.key]
            if place.runs and self._agent.can_be_cancelled:
                place.call.cancel()
            with anyio.move_on_after(RENEW_SECONDS, shield=True):
                await place.lease.give_back()
            if place.yields and self._waiting.get(place.key):
                self._yielded.add(place.key)

    async def _until_left(self, place: _Place) -> None:
        asked = self._clock.monotonic()
        used = -1
        while used != place.used or not place.free or self._waiting.get(place.key):
            used = place.used
            await self._clock.sleep(LINGER_SECONDS)
            if self._clock.monotonic() - asked >= TURN_SECONDS:
                asked = self._clock.monotonic()
                place.yields = await self._others_wait(place.key)
                if place.yields:
                    break
        place.leaving = True
        while place.delivery is not None or place.runs:
            await place.unused.wait()

    async def _say_that_we_wait(self, key: Key) -> None:
        now = self._clock.monotonic()
        if now - self._said_at.get(key, -math.inf) < WANTED_SECONDS:
            return
        self._said_at = {each: at for each, at in self._said_at.items() if now - at < WANTED_SECONDS} | {key: now}
        with suppress(BackendError):
            await self._bucket.put(f"{self._name(key)}/wanted", self._ourselves)

    async def _others_wait(self, key: Key) -> bool:
        with suppress(BackendError):
            entry = await self._bucket.get(f"{self._name(key)}/wanted")
            return entry is not None and entry.data != self._ourselves
        return False
