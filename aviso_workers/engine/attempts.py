"""Failure counts of notifications, and records of handlers that have begun, in a bucket that all workers share.

The delivery count of a server also rises when a worker dies or is replaced, and a deploy must not use up attempts.
So failures are counted in a bucket of the app's own. It is read for redeliveries only; what is known of a delivery that
a worker holds is in its flow. An entry expires 7 days after it was written, or after twice as long as its
notification waits. Where the bucket cannot be used, failures are counted in this process, and a notification is
dead-lettered (`max_deliveries`) once it was delivered `UNCOUNTED_DELIVERIES` times more than the agent has attempts.

An entry is the number of failures. Where some of them did not end their delivery, because the notification was tried
again without being given back (`order_by`), the number of deliveries that ended with a failure follows: `3 1`. Where
something that it needs was away, the time of the first such failure follows, in seconds since 1970: `3 1 1764374400`.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, TypeVar

import anyio
from msgspec import structs

from aviso_workers.aviso.codec import read_number
from aviso_workers.backends import Backend, BulkKeyValue, Delivery, Entry
from aviso_workers.declare.verdicts import RECORDED_FROM, PriorRecord, RunsAs
from aviso_workers.engine.shields import Shield
from aviso_workers.errors import BackendError, UndecodableError
from aviso_workers.events import Events, FailuresNotStored, Unreadable
from aviso_workers.state import failure_counts

T = TypeVar("T")
Key = tuple[int, int]
"""Sequence and store time of a notification: a stream that is recreated counts from 1 again."""

LONGEST_WAITS = 2
"""An entry is kept for so many times as long as its notification waits at least."""
WHOLE_SECONDS = 86400.0
"""Longer times are multiples of this, so that the bucket is seldom changed."""
SLOW_SECONDS = 1.0
UNUSED_SECONDS = 10.0
"""How long the bucket is not used after a request that failed and took `SLOW_SECONDS`: each of many failing
notifications would wait for it."""
MAX_REMEMBERED = 100_000
"""Of how many notifications that it has given back a process remembers the failures, so that a redelivery needs no
read, and where they cannot be stored: of as many as an agent may have ack pending, which takes about 35 MB."""
MAX_WAITING = 1000
"""Writes that wait for the next request. Who asks for one more waits with them."""


class Failures:
    """The failure counts of one agent."""

    def __init__(self, backend: Backend, *, app: str, agent: str, stream: str, shield: Shield, events: Events) -> None:
        self._backend = backend
        self._shield = shield
        self._agent = agent
        self._bucket = failure_counts.bucket_of(app)
        self._stream = stream
        self._events = events
        self._values: BulkKeyValue | None = None
        self._counted = GroupedWrites(lambda counts: self._write(lambda values: values.put_many(counts)), shield=shield)
        self._unstored: dict[Key, PriorRecord] = {}
        """Records that could not be stored, by key."""
        self._given_back: dict[Key, tuple[PriorRecord, int]] = {}
        """Stored records, with the `num_delivered` of the delivery that failed, by key. Where the next delivery comes
        to this process too, no other worker had it in between, and the count need not be read."""
        self._begun: set[Key] = set()
        """Keys of which the bucket says that a handler has begun."""
        self._begun_here: set[Key] = set()
        """Those whose handler has begun in this process."""
        self._kept_seconds = failure_counts.KEPT_SECONDS
        """For how long the bucket keeps an entry, as far as this worker needs it."""
        self._unused_until = -math.inf
        """Before this time the bucket is not used."""
        self._stored = True
        """Whether the last failure could be stored."""

    def recall(self, delivery: Delivery) -> PriorRecord | None:
        """Return the record without a request, where the delivery before failed in this process; else None."""
        given_back = self._given_back.pop(key_of(delivery), None)
        if given_back is None:
            return None
        record, last_delivered = given_back
        return record if delivery.num_delivered == last_delivered + 1 else None

    async def read(self, delivery: Delivery) -> PriorRecord:
        """Return what is known of a notification that was delivered before."""
        key = key_of(delivery)
        entry = await self._try(lambda values: values.get(self._name(key)))
        failures, ended, away_since = self._numbers(entry) if entry else (0, 0, 0)
        unstored = self._unstored.get(key)
        if unstored is not None and unstored.failures > failures:
            failures, ended = unstored.failures, unstored.ended
        began = None
        if delivery.num_delivered > RECORDED_FROM:  # the record is written from the second delivery on
            began = await self._try(lambda values: values.get(self._began(key)))
        how: RunsAs | None = None
        if began is not None:
            self._begun.add(key)
            how = "beside_others" if began.value == failure_counts.BESIDE_OTHERS else "alone"
        return PriorRecord(failures=failures, ended=ended, began=how, stored=self._stored, away_since=away_since)

    async def begin(self, delivery: Delivery, *, alone: bool) -> None:
        """Record that its handler begins, so that it is known which notification may have ended this process."""
        key = key_of(delivery)
        self._begun.add(key)
        self._begun_here.add(key)
        await self._write_began(key, failure_counts.ALONE if alone else failure_counts.BESIDE_OTHERS)

    async def clear(self, delivery: Delivery) -> None:
        """Remove the record that its handler began: it does not run any more, and this process lives."""
        key = key_of(delivery)
        self._begun_here.discard(key)
        if key in self._begun:
            self._begun.discard(key)
            async with self._shield.hold():
                await self._write_began(key, None)

    async def clear_all(self) -> None:
        """Remove the records of all whose handler has begun here and was cancelled."""
        begun, self._begun_here = self._begun_here, set()
        for key in begun:
            self._begun.discard(key)
            if not await self._write_began(key, None):
                return  # the others would wait for the server as well

    async def add(
        self,
        delivery: Delivery,
        *,
        before: PriorRecord,
        again_in_seconds: float,
        kept: bool,
        worker_died: bool,
        then: Callable[[PriorRecord], None],
    ) -> None:
        """Count one more failure, and call `then` with it when it is counted, which may be after this has returned.

        `kept`: the notification stays in the flow, and is not given back to the server. After a worker has died the
        next attempt is run alone again.
        """
        self._keep_for(LONGEST_WAITS * again_in_seconds)
        key = key_of(delivery)
        failures, ended = before.failures + 1, before.ended + (not kept or worker_died)

        def counted(stored: bool) -> None:
            record = structs.replace(
                before,
                failures=failures,
                ended=ended,
                began="beside_others" if worker_died else None,
                stored=self._stored,
            )
            if not stored:
                _remember(self._unstored, key, record)
            elif not kept and not worker_died:
                _remember(self._given_back, key, (record, delivery.num_delivered))
            then(record)

        if worker_died:
            self._begun.discard(key)
            async with self._shield.hold():
                await self._write_began(key, failure_counts.BESIDE_OTHERS)
        else:
            await self.clear(delivery)
        await self._counted.write(self._name(key), _value(failures, ended, before.away_since), then=counted)

    async def note_away(self, delivery: Delivery, record: PriorRecord) -> None:
        """Record since when what a notification needs is away, so that patience ends, whichever worker has it."""
        self._keep_for(LONGEST_WAITS * WHOLE_SECONDS)
        value = _value(record.failures, record.ended, record.away_since)
        await self._counted.write(self._name(key_of(delivery)), value, then=_nothing)

    def note_postponed(self, delivery: Delivery, record: PriorRecord) -> None:
        """Note that a delivery is given back although no handler has begun: that explains why it comes again."""
        postponed = structs.replace(record, ended=record.ended + 1)
        _remember(self._given_back, key_of(delivery), (postponed, delivery.num_delivered))

    async def forget(self, delivery: Delivery, record: PriorRecord) -> None:
        """Forget the failures of a delivery that is settled."""
        await self.clear(delivery)
        key = key_of(delivery)
        self._unstored.pop(key, None)
        if record.failures or record.away_since:
            await self._counted.write(self._name(key), None, then=_nothing)

    def _keep_for(self, seconds: float) -> None:
        if seconds > self._kept_seconds:
            self._kept_seconds = math.ceil(seconds / WHOLE_SECONDS) * WHOLE_SECONDS
            self._values = None  # it is opened again to keep what it has for so long

    def _numbers(self, entry: Entry) -> tuple[int, int, int]:
        """Return how many failures were counted, how many deliveries ended with one, and since when something is away;
        0 where an entry says none."""
        failures, *others = entry.value.decode("ascii", "replace").split(" ")
        ended, away_since = others[0] if others else failures, others[1] if len(others) > 1 else "0"
        try:
            return read_number(failures), read_number(ended), read_number(away_since)
        except UndecodableError as error:
            self._events.emit(Unreadable(stream=f"KV_{self._bucket}", sequence=entry.revision, error=error))
            return 0, 0, 0

    async def _write_began(self, key: Key, began: bytes | None) -> bool:
        """Store how a handler began, or remove that record where it is None, and return whether that was done."""
        name = self._began(key)
        return await self._write(lambda values: values.delete(name) if began is None else values.put(name, began))

    async def _write(self, operation: Callable[[BulkKeyValue], Awaitable[object]]) -> bool:
        """Do an operation on the bucket, and return whether it was done."""

        async def written(values: BulkKeyValue) -> bool:
            await operation(values)
            return True

        done = await self._try(written) is not None
        self._stored = self._stored or done
        return done

    async def _try(self, operation: Callable[[BulkKeyValue], Awaitable[T]]) -> T | None:
        """Return the result of an operation on the bucket; None where it cannot be used, which is logged once."""
        asked_at = self._backend.clock.monotonic()
        if asked_at < self._unused_until:
            return None
        try:
            if self._values is None:
                self._values = await self._backend.key_value(self._bucket, ttl_seconds=self._kept_seconds, own=True)
            return await operation(self._values)
        except BackendError as error:
            self._values = None  # it may have been deleted
            failed_at = self._backend.clock.monotonic()
            if failed_at - asked_at >= SLOW_SECONDS:  # whatever the error: a server denies a publish without an answer
                self._unused_until = failed_at + UNUSED_SECONDS
            if self._stored:
                self._stored = False
                self._events.emit(FailuresNotStored(agent=self._agent, bucket=self._bucket, error=error))
            return None

    def _name(self, key: Key) -> str:
        """Return the key of the count in the bucket."""
        return failure_counts.key_of(self._agent, self._stream, *key)

    def _began(self, key: Key) -> str:
        """Return the key of the record that a handler began, which is not the count."""
        return f"{self._name(key)}.began"


def _value(failures: int, ended: int, away_since: float) -> bytes:
    """Return an entry of the bucket."""
    if away_since:
        return f"{failures} {ended} {int(away_since)}".encode()
    return (f"{failures}" if ended == failures else f"{failures} {ended}").encode()


def key_of(delivery: Delivery) -> Key:
    """Return what tells a notification from all others of its stream."""
    return delivery.message.sequence, delivery.message.timestamp_ns


def _remember(known: dict[Key, T], key: Key, value: T) -> None:
    known[key] = value
    if len(known) > MAX_REMEMBERED:
        del known[next(iter(known))]


def _nothing(_: bool) -> None:
    pass


class _Write(NamedTuple):
    """One value, None where it is to be removed, and what is called with whether that was done."""

    key: str
    value: bytes | None
    then: Callable[[bool], None]


class GroupedWrites:
    """Values by key, written by `write_all`, which returns whether all of them are stored: writes that many callers ask
    for at once, made as few requests.

    A tenth of all notifications may fail, and a request for each failure would cost more than all the rest of the
    handling. The first caller writes, for itself and for all that ask meanwhile. The others go on at once, and what
    they wanted to do after their write is done for them.
    """

    def __init__(self, write_all: Callable[[Mapping[str, bytes | None]], Awaitable[bool]], *, shield: Shield) -> None:
        self._write_all = write_all
        self._shield = shield
        self._waiting: list[_Write] = []
        self._turn = anyio.Lock()

    async def write(self, key: str, value: bytes | None, *, then: Callable[[bool], None]) -> None:
        """Have the value stored, or removed where it is None, and then call `then` with whether it was.

        Where another caller writes at the moment, this returns before that. Of several values of a key that are written
        together the last one counts. `then` is also called when whoever writes is cancelled; it must not raise.
        """
        self._waiting.append(_Write(key, value, then))
        if self._turn.locked() and len(self._waiting) < MAX_WAITING:
            return
        try:
            async with self._shield.hold(), self._turn:  # to take it lets whoever runs now join
                while self._waiting:
                    await self._write_waiting()
        finally:
            if not self._turn.locked():  # else the next one writes what waits
                unwritten, self._waiting = self._waiting, []
                _tell(unwritten, stored=False)

    async def _write_waiting(self) -> None:
        writes, self._waiting = self._waiting, []
        stored = False
        try:
            stored = await self._write_all({write.key: write.value for write in writes})
        finally:
            _tell(writes, stored=stored)


def _tell(writes: list[_Write], *, stored: bool) -> None:
    for write in writes:
        write.then(stored)
