"""Limits that all workers of an app keep together (`declare.limits`): a delivery begins when all limits of it let it.

What a limit does not let begin yet waits for it (`engine.dispatch`), and takes no task of a handler, so that others
begin whose key has not come to its limit. A task serves each key of which something waits.

The calls of a rate are leased in a bucket. Its record says up to which time they are leased, and who leases some moves
that time by compare-and-set: each call takes the time from one call to the next. A leased call may begin from its own
time on, and a little later; then it is lost, as those of a worker that dies. So nothing begins twice, and what goes
wrong makes it slower. Times are the server's: a worker asks for that time now and then, and adds what its own clock has
measured since.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskGroup

from aviso_workers import clocks
from aviso_workers.aviso import topics
from aviso_workers.aviso.codec import read_json
from aviso_workers.aviso.schema import Topic
from aviso_workers.backends import Backend, Delivery
from aviso_workers.clocks import SKEW
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.limits import Rate, Slots
from aviso_workers.engine.flow import Flow
from aviso_workers.engine.key_value import RetryingKeyValue
from aviso_workers.engine.leases import Outage
from aviso_workers.errors import BackendError, ConflictError, UndecodableError
from aviso_workers.events import Events
from aviso_workers.jetstream.key_value import Entry
from aviso_workers.state import limit_records
from aviso_workers.state.limit_records import LeasedTokens

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
        return limit_records.key_of(self._agent.name, self.limit.by, key)

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
        """Of the record that says it."""
        self.asked_at: float | None = None
        """When more were asked for first, since the last lease was used up."""
        self.offered = 0
        """How many were asked again that no handler has taken yet, as while all are busy."""
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

    bucket_of = staticmethod(limit_records.bucket_of)
    ttl_seconds = limit_records.KEPT_SECONDS

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
