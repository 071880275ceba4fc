"""Limits that all workers of an app keep together (`declare.limits`): a delivery begins when all limits of it let it.

What a limit does not let begin yet waits for it (`engine.dispatch`), and takes no task of a handler, so that others
begin whose key has not come to its limit. A task serves each key of which something waits.

A place among the calls that may run at once, `Slots(1)`, is a lease (`leases`) that a worker renews while it has calls
for it. A call that runs when its place is lost, as in a process that was paused or cut off, is treated as a singleton's
(`singletons`): it is cancelled, what it publishes is refused, and its notification is tried again, which is no failed
attempt.

The calls of a rate are leased in a bucket. Its record says up to which time they are leased, and who leases some moves
that time by compare-and-set: each call takes the time from one call to the next. A leased call may begin from its own
time on, and a little later; then it is lost, as those of a worker that dies. So nothing begins twice, and what goes
wrong makes it slower. Times are the server's: a worker asks for that time now and then, and adds what its own clock has
measured since.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskGroup
from msgspec import Struct, field

from aviso_workers import clocks
from aviso_workers.aviso import topics
from aviso_workers.aviso.codec import read_json
from aviso_workers.aviso.schema import Topic
from aviso_workers.backends import Backend, Delivery
from aviso_workers.clocks import SKEW
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.limits import Rate, Slots
from aviso_workers.declare.verdicts import Failure, Retry
from aviso_workers.engine import calls, singletons
from aviso_workers.engine.attempts import key_of
from aviso_workers.engine.flow import Flow
from aviso_workers.engine.handlers import Guard, Step
from aviso_workers.engine.key_value import RetryingKeyValue
from aviso_workers.engine.leases import Lease, Outage
from aviso_workers.errors import BackendError, ConflictError, UndecodableError
from aviso_workers.events import Events
from aviso_workers.jetstream.key_value import Entry
from aviso_workers.state import lease_records
from aviso_workers.state.lease_records import LEASE_SECONDS, SLOTS, LeasedTokens

CHUNK_SECONDS = 0.5
"""For how long of the limit's time a worker leases calls at most, and how far ahead."""
GATHERED_SECONDS = 1.0
"""How old calls may be leased that nobody has leased in time."""
VALID_SECONDS = 2.0
"""How late a leased call may begin."""
TICK_SECONDS = 0.005
SYNC_SECONDS = 60.0
"""How often the server's time is asked for."""
ANSWER_SECONDS = 3.0
AGAIN_SECONDS = 1.0
"""When a bucket that could not be used is asked again."""
MAX_KEYS = 10_000
"""The keys of which a worker remembers what it has leased."""

Key = tuple[str, ...]
CHECK_SECONDS = 0.5
"""How often a worker tries to take a place that others have."""
LINGER_SECONDS = 0.25
"""How long a place is kept for which there is no call."""
TURN_SECONDS = 2.0
"""How long a worker keeps a place that others wait for, and then until its call ends."""
WANTED_SECONDS = 3.0
"""How often a worker that waits says so."""
AFTER_LOSS_SECONDS = 1.0


class KeyLimit:
    """A limit of an agent in one worker (`dispatch.Limit`)."""

    bucket_of: Callable[[str], str]
    """The name of the bucket, by that of the app."""
    ttl_seconds: float

    def __init__(
        self,
        limit: Rate | Slots,
        *,
        agent: Agent[Any, Any],
        app: str,
        topic: Topic,
        backend: Backend,
        events: Events,
    ) -> None:
        self.limit = limit
        self._agent = agent
        self._values = topics.key_of(topic, limit.by, of=f"{type(limit).__name__}: by")
        self._clock = backend.clock
        bucket = type(self).bucket_of(app)
        self._bucket = RetryingKeyValue(
            backend, bucket, ttl_seconds=self.ttl_seconds, patience_seconds=ANSWER_SECONDS, own=True
        )
        self._outage = Outage(bucket, clock=backend.clock, events=events)
        self._served: set[Key] = set()
        """The keys that a task serves, or will when `work` runs."""
        self._flow: Flow
        self._tasks: TaskGroup | None = None

    def attach(self, flow: Flow) -> None:
        """Limit what begins of this flow."""
        self._flow = flow

    def gate(self, delivery: Delivery) -> Key:
        """Return the values of the limit's fields."""
        return self._values(delivery.message.subject)

    def admits(self, delivery: Delivery, now: float) -> bool:
        """Return whether a delivery may begin now; then it does."""
        raise NotImplementedError

    def release(self, delivery: Delivery) -> None:
        """Note that a delivery does not run any more."""

    def take_back(self, delivery: Delivery) -> None:
        """Note that a delivery that was just admitted does not begin, because another limit does not let it."""
        self.release(delivery)

    def wait(self, key: Any) -> None:
        """Serve a key of which something waits."""
        if key not in self._served:
            self._served.add(key)
            if self._tasks is not None:
                self._tasks.start_soon(self._serve_all, key)

    def _record_of(self, key: Key) -> str:
        return lease_records.limit_key_of(self._agent.name, self.limit.by, key)

    async def work(self) -> None:
        """Run beside the agent; never returns."""
        async with anyio.create_task_group() as self._tasks:
            for key in self._served:
                self._tasks.start_soon(self._serve_all, key)
            await anyio.sleep_forever()

    def _waiting(self, key: Key) -> int:
        return self._flow.dispatch.waiting_at(self, key)

    async def _serve_all(self, key: Key) -> None:
        while self._waiting(key):
            await self._serve(key)
        self._served.discard(key)

    async def _serve(self, key: Key) -> None:
        """Let some of a key begin, or wait until some may."""
        raise NotImplementedError


class _Leased:
    """The calls of one key that this worker has leased. Times are those of the worker's clock."""

    def __init__(self, interval: float) -> None:
        self.until = 0.0
        """Up to when calls were leased as far as this worker knows, by the server's clock."""
        self.revision = -1
        """The revision of the record that says up to when calls are leased."""
        self.asked_at: float | None = None
        """When more were asked for first, since the last lease was used up."""
        self.offered = 0
        """The number of deliveries that may begin and that no handler has taken yet, as while all handlers are busy."""
        self._interval = interval
        self._left = self._granted = self._lost = 0
        self._next = 0.0
        """When the next one may begin."""
        self._used_up_at = -math.inf

    def wanted(self, most: int) -> int:
        """Return how many to lease: twice as many where the last ones were used, and the next one is wanted at once."""
        at_once = self.asked_at is not None and self.asked_at - self._used_up_at < CHUNK_SECONDS
        wanted = 2 * self._granted if at_once and not self._lost else (self._granted - self._lost) // 2
        return max(1, min(wanted, most))

    def forget(self) -> None:
        """Forget up to when calls were leased, as that time is not any more one of the server's clock."""
        self.until, self.revision = 0.0, -1

    def lease(self, first: float, count: int) -> None:
        self._next, self._left = first, count
        self._granted, self._lost, self.asked_at = count, 0, None
        self.offered = 0

    def use(self, now: float) -> bool:
        """Use one, and return whether one may begin now."""
        if not self.due(now):
            return False
        self._left -= 1
        self._next += self._interval
        if not self._left:
            self._used_up_at = now
        return True

    def unuse(self) -> None:
        """Undo the last `use`."""
        self._left += 1
        self._next -= self._interval

    def due(self, now: float) -> int:
        """Return how many may begin now. Those that are too late are lost."""
        if (late := now - VALID_SECONDS - self._next) > 0:
            lost = min(self._left, math.ceil(late / self._interval))
            self._left -= lost
            self._lost += lost
            self._next += lost * self._interval
        return min(self._left, max(0, math.floor((now - self._next) / self._interval) + 1))

    def next_seconds(self, now: float) -> float | None:
        """Return after how long the next one may begin; None where none is leased."""
        return max(TICK_SECONDS, self._next - now) if self._left else None


class RateTokens(KeyLimit):
    """A rate that the workers keep together."""

    bucket_of = staticmethod(lease_records.limits_bucket_of)
    ttl_seconds = lease_records.LIMITS_KEPT_SECONDS

    def __init__(self, limit: Rate, **given: Any) -> None:
        super().__init__(limit, **given)
        self._interval = limit.interval_seconds
        self._leased: dict[Key, _Leased] = {}
        self._ahead = 0.0
        """How much more the server's clock says than ours, at least."""
        self._synced_at = -math.inf

    def admits(self, delivery: Delivery, now: float) -> bool:
        leased = self._leased.get(self.gate(delivery))
        if leased is None:
            return False
        leased.offered = max(0, leased.offered - 1)
        return leased.use(now)

    def take_back(self, delivery: Delivery) -> None:
        self._leased[self.gate(delivery)].unuse()

    async def _serve(self, key: Key) -> None:
        if (leased := self._leased.get(key)) is None:
            if len(self._leased) >= MAX_KEYS:
                del self._leased[next(iter(self._leased))]
            leased = self._leased[key] = _Leased(self._interval)
        now = self._clock.monotonic()
        if (more := leased.due(now) - leased.offered) > 0:
            leased.offered += self._flow.open(self, key, more)
        if (seconds := leased.next_seconds(now)) is None:
            leased.asked_at = now if leased.asked_at is None else leased.asked_at
            seconds = await self._lease(key, leased)
        if seconds and self._waiting(key):
            await self._clock.sleep(seconds)

    async def _lease(self, key: Key, leased: _Leased) -> float:
        """Lease some calls of a key; return after how many seconds to look again."""
        try:
            with clocks.fail_after(self._clock, ANSWER_SECONDS):
                seconds = await self._lease_some(self._record_of(key), leased)
        except ConflictError:
            return random.uniform(0, TICK_SECONDS)  # another worker was faster
        except (BackendError, TimeoutError) as error:
            self._outage.begin(error)
            self._synced_at = -math.inf
            return AGAIN_SECONDS
        self._outage.end()
        return seconds

    async def _lease_some(self, name: str, leased: _Leased) -> float:
        entry = await self._bucket.newest(name)
        server_now = await self._server_now()
        revision = entry.revision if entry is not None else 0
        if revision != leased.revision:
            # Nobody leases more than this, if the server's clock was not set back meanwhile. So an earlier version with
            # a longer time between calls, and a foreign value, stop nobody for long. It counts where a record is lost.
            most = server_now + CHUNK_SECONDS + max(self._interval, CHUNK_SECONDS)
            recorded = most if entry is None and leased.revision > 0 else _until(entry)
            leased.until = min(max(leased.until, recorded), most + SKEW.total_seconds())
            leased.revision = revision
        gathered = GATHERED_SECONDS if self._interval < GATHERED_SECONDS else 0.0
        begin = max(leased.until, server_now - gathered)
        if (early := begin - server_now - CHUNK_SECONDS) > 0:
            return early + random.uniform(0, min(self._interval, CHUNK_SECONDS) / 2)  # and not all workers at once
        count = leased.wanted(max(1, int(CHUNK_SECONDS / self._interval)))
        until = begin + count * self._interval
        value = msgspec.json.encode(LeasedTokens(until=until))
        leased.revision = await self._bucket.put(name, value, revision=revision)
        leased.until = until
        leased.lease(begin - self._ahead, count)
        return 0.0

    async def _server_now(self) -> float:
        """Return the server's time, or a little less, in seconds since 1970."""
        if (now := self._clock.monotonic()) - self._synced_at > SYNC_SECONDS:
            said = (await self._bucket.time()).timestamp()
            now = self._synced_at = self._clock.monotonic()
            if said - now < self._ahead - SKEW.total_seconds():  # the server's clock was set back
                for leased in self._leased.values():
                    leased.forget()
            self._ahead = said - now
        return now + self._ahead


def _until(entry: Entry | None) -> float:
    try:
        return read_json(entry.value, LeasedTokens).until if entry is not None and not entry.deleted else 0.0
    except UndecodableError:
        return 0.0  # none of ours


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
                self._taken[key_of(delivery)] = place
                return True
        return False

    def release(self, delivery: Delivery) -> None:
        place = self._taken.get(key_of(delivery))
        if place is not None and place.delivery is delivery:
            del self._taken[key_of(delivery)]
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
