"""Places among the calls that may run at once over all workers of an app: `Slots(1)`.

A place is a lease (`leases`) that a worker renews while it has calls for it. A call that runs when its place is lost,
as in a process that was paused or cut off, is treated as a singleton's (`singletons`): it is cancelled, what it
publishes is refused, and its notification is tried again, which is no failed attempt.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
from msgspec import Struct, field

from aviso_workers.backends import Backend, Delivery
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.limits import Slots
from aviso_workers.declare.verdicts import Failure, Retry
from aviso_workers.engine import calls, singletons
from aviso_workers.engine.flow import Flow
from aviso_workers.engine.handlers import Guard, Step
from aviso_workers.engine.leases import Lease
from aviso_workers.errors import BackendError
from aviso_workers.events import Events
from aviso_workers.features.limits.rates import MAX_KEYS, Key, KeyLimit, RateTokens
from aviso_workers.state import lease_records
from aviso_workers.state.lease_records import LEASE_SECONDS, SLOTS

CHECK_SECONDS = 0.5
"""How often a worker tries to take a place that others have."""
LINGER_SECONDS = 0.25
"""How long a place is kept for which there is no call."""
TURN_SECONDS = 2.0
"""How long a worker keeps a place that others wait for, and then until its call ends."""
WANTED_SECONDS = 3.0
"""How often a worker that waits says so."""
AFTER_LOSS_SECONDS = 1.0


class _Place(Struct, eq=False):
    """A place that this worker has."""

    key: Key
    number: int
    lease: Lease
    delivery: Delivery | None = None
    """What it was given to."""
    runs: bool = False
    """Whether a call runs: in a thread, also after it was cancelled."""
    used: int = 0
    leaving: bool = False
    yields: bool = False
    """Whether it is left to other workers that wait for one."""
    unused: anyio.Event = field(default_factory=anyio.Event)
    call: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    @property
    def free(self) -> bool:
        return self.delivery is None and not self.leaving and self.lease.held


class Places(KeyLimit):
    """The places of an agent."""

    bucket_of = staticmethod(lease_records.bucket_of)
    ttl_seconds = LEASE_SECONDS

    def __init__(self, limit: Slots, *, app: str, backend: Backend, events: Events, **given: Any) -> None:
        super().__init__(limit, app=app, backend=backend, events=events, **given)
        self._lease = partial(Lease, backend, app, events=events, outage=self._outage)
        self._ourselves = secrets.token_hex(8).encode()
        self._places: dict[Key, list[_Place]] = {}
        self._taken: dict[tuple[int, int], _Place] = {}
        """By the sequence and the time of the message that each was given to: while a call runs, its stream may have
        been recreated, and have the sequence again."""
        self._tried: dict[str, Lease] = {}
        """Leases that others have, by their name."""
        self._yielded: set[Key] = set()
        """Keys of which a place was left to others, who try to take it now."""
        self._said_at: dict[Key, float] = {}
        """When this worker has said that it waits."""

    def admits(self, delivery: Delivery, now: float) -> bool:
        for place in self._places.get(self.gate(delivery), ()):
            if place.free:
                place.delivery, place.unused = delivery, anyio.Event()
                place.used += 1
                self._taken[_id(delivery)] = place
                return True
        return False

    def release(self, delivery: Delivery) -> None:
        place = self._taken.get(_id(delivery))
        if place is not None and place.delivery is delivery:
            del self._taken[_id(delivery)]
            place.delivery = None
            place.unused.set()
            if place.free:
                self._flow.open(self, place.key, 1)

    async def call(self, step: Step, flow: Flow, notification: Any) -> Failure | None:
        """Return what the step returns. Raises an uncounted `Retry` where another worker may have the place."""
        place = self._taken[notification.sequence, notification.time_ns]
        if place.lease.held:
            place.runs, runs_on = True, False
            try:
                with singletons.needing(place.lease), anyio.CancelScope() as place.call:
                    failure = await calls.call(step, notification)
                    if failure is None or place.lease.held:
                        return failure
            except Exception:
                if place.lease.held:
                    raise
            except BaseException:
                runs_on = not self._agent.can_be_cancelled  # its thread does
                raise
            finally:
                place.runs = runs_on
        lost = Retry(after=AFTER_LOSS_SECONDS, counts=False)
        lost.args = ("its slot was lost, because it was not renewed in time",)
        raise lost

    def _name(self, key: Key) -> str:
        return f"{SLOTS}/{self._record_of(key)}"

    async def _serve(self, key: Key) -> None:
        """Let some of a key begin, or try to take a place for them."""
        if key in self._yielded:
            self._yielded.discard(key)
            await self._clock.sleep(2 * CHECK_SECONDS)
        places = self._places.get(key, [])
        if free := sum(place.free for place in places):
            self._flow.open(self, key, free)
        numbers = set(range(self.limit.count)) - {place.number for place in places}
        if self._waiting(key) and numbers and await self._take(key, random.choice(sorted(numbers))):
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
                await self._until_left(place)
        finally:
            place.leaving = True
            self._places[place.key].remove(place)
            if not self._places[place.key]:
                del self._places[place.key]
            if not place.runs:
                await place.lease.give_back()
            elif self._agent.can_be_cancelled:
                place.call.cancel()
            if place.yields and self._waiting(place.key):
                self._yielded.add(place.key)

    async def _until_left(self, place: _Place) -> None:
        asked = self._clock.monotonic()
        used = -1
        while used != place.used or not place.free or self._waiting(place.key):
            used = place.used
            await self._clock.sleep(LINGER_SECONDS)
            if self._clock.monotonic() - asked >= TURN_SECONDS:
                asked = self._clock.monotonic()
                place.yields = await self._others_wait(place.key)
                if place.yields:
                    break
        place.leaving = True
        if place.delivery is not None:
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


def _id(delivery: Delivery) -> tuple[int, int]:
    return delivery.message.sequence, delivery.message.timestamp_ns


def limits_of(agent: Agent[Any, Any], **given: Any) -> list[KeyLimit]:
    """Return the limits of an agent in one worker, in the order in which they are asked."""
    return [
        Places(limit, agent=agent, **given) if isinstance(limit, Slots) else RateTokens(limit, agent=agent, **given)
        for limit in agent.policy.limits
    ]


def guard_of(limits: Sequence[KeyLimit]) -> Guard | None:
    """Return what makes the calls of an agent that needs a place for each; None where it needs none."""
    guards = [limit.call for limit in limits if isinstance(limit, Places)]

    async def call(step: Step, flow: Flow, notification: Any) -> Failure | None:
        for guard in reversed(guards):
            step = partial(guard, step, flow)
        return await step(notification)

    return call if guards else None
