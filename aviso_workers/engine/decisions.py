"""The decisions of persons about notifications that are retried (`agents retry`, `agents skip`), at a worker.

A decision is an order (`state.orders`), which no worker writes. A worker looks for the decisions about an agent once a
second, by one request and one more for each decision that stands, while it knows of a notification of the agent that is
retried: one that it keeps until its retry is due (`order_by`), one that it has given back to the server, or one that it
handles again. Other agents ask for nothing.

A decision makes the wait for the retry end: a notification that is kept here is offered at once, and one that was given
back is asked for again. Whoever is given it knows the decision before its handler runs (`redeliveries`), and has it
tried again or skipped. That a worker has taken it, and what became of it, is a record beside the failure count of its
notification (`state.failure_counts`), for other workers and for the person who waits for that.

Only one worker has given a notification back last. It asks for it no later than `MARGIN_SECONDS` before it is due:
after that the server may have delivered it, and would deliver it once more beside whoever handles it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import NamedTuple, TypeVar

import anyio
from msgspec import Struct, structs

from aviso_workers import clocks
from aviso_workers.aviso.literals import printable
from aviso_workers.backends import Backend, BulkKeyValue, Delivery, Entry
from aviso_workers.backends.buckets import open_existing
from aviso_workers.engine.attempts import Key, key_of
from aviso_workers.engine.flow import Flow
from aviso_workers.errors import BackendError, ConflictError, DeniedError, UndecodableError, line_of
from aviso_workers.state import failure_counts, orders
from aviso_workers.state.failure_counts import DECIDED, KEPT_SECONDS, Outcome, Taken
from aviso_workers.state.orders import Decision

T = TypeVar("T")

LOOK_SECONDS = 1.0
DENIED_SECONDS = 60.0
"""How long none are looked for after the server has refused that."""
MARGIN_SECONDS = 1.0
"""One that is due so soon is not asked for: it comes by itself."""
LATELY_SECONDS = 3.0
"""How long the end of a retried notification is remembered: a person may have decided about it while it ran."""
MAX_KNOWN = 10_000
"""How many retried notifications are known at most, of those that are retried last."""
MAX_FOUND = 1000
"""How many decisions are read at a look."""


class _End(NamedTuple):
    """How an attempt of a notification ended."""

    outcome: Outcome
    error: str
    again_at: datetime | None


class _Known(Struct):
    """A notification that is retried, or was until lately."""

    delivery: Delivery
    kept: bool = True
    """Whether it waits, runs or is about to run here; else it was given back to the server."""
    until: float = math.inf
    """Where it is not kept, when it is delivered again, or when its end is no longer to be known, on the agent's
    clock."""
    end: _End | None = None
    """How it ended for good; None while it is retried."""


class _Found(Struct, frozen=True):
    """A decision, and what workers have recorded of it."""

    decision: Decision
    order: int
    """The revision of the decision."""
    taken: Taken | None
    """None where no worker has taken it."""
    revision: int
    """That of the record of the last decision about its notification; 0 where there is none."""


class Decisions:
    """Decisions about the retried notifications of one agent. Keep `work` running beside it."""

    def __init__(self, backend: Backend, *, app: str, agent: str, stream: str, flow: Flow) -> None:
        self._backend = backend
        self._clock = backend.clock
        self._orders = orders.bucket_of(app)
        self._records = failure_counts.bucket_of(app)
        self._agent = agent
        self._stream = stream
        self._flow = flow
        self._opened: dict[str, BulkKeyValue] = {}
        self._known: dict[Key, _Known] = {}
        self._found: dict[Key, _Found] = {}
        """The decisions that no worker has carried out yet, as they were found last."""
        self._told: dict[Key, _Found] = {}
        """Decisions whose `taken` is to be written in place of these revisions."""
        self._changed = anyio.Event()
        self._failed: BackendError | None = None
        """Why a bucket could not be used the last time."""

    def note_retried(self, delivery: Delivery, *, kept: bool, after_seconds: float) -> None:
        """Note that a notification is retried after so many seconds, kept here or given back to the server."""
        if not kept and delivery.message.data:  # the message is not needed any more, and may be large
            delivery.message = structs.replace(delivery.message, data=b"", headers=None)
        until = math.inf if kept else self._clock.monotonic() + after_seconds
        self._know(_Known(delivery, kept=kept, until=until))

    def pending(self, delivery: Delivery) -> Decision | None:
        """Return what was decided about a notification that is about to be handled again, as far as this worker has
        found it; None where nothing was.
        """
        self._know(_Known(delivery))
        found = self._found.get(key_of(delivery))
        return None if found is None else found.decision

    async def read(self, delivery: Delivery) -> None:
        """Find what was decided about a notification that another worker has given back."""
        key = key_of(delivery)
        if found := await self._open_in(await self._order(key)):
            self._found[key] = found

    def note_end(
        self, delivery: Delivery, outcome: Outcome, *, error: BaseException | None = None, again_in_seconds: float = 0.0
    ) -> None:
        """Note how an attempt of a notification ended, and tell that to whoever has decided about it."""
        key = key_of(delivery)
        if (known := self._known.get(key)) is None:
            return
        end = _End(
            outcome,
            error="" if error is None else printable(f"{type(error).__name__}: {line_of(error)}"),
            again_at=self._now() + timedelta(seconds=again_in_seconds) if outcome == "failed" else None,
        )
        if outcome != "failed":
            known.kept, known.until, known.end = False, self._clock.monotonic() + LATELY_SECONDS, end
        if key in self._found:
            self._tell(key, end)

    async def work(self) -> None:
        """Look for decisions while something is retried, and write what became of them; cancel this to end it."""
        while True:
            if not self._known and not self._told:
                self._changed = anyio.Event()
                await self._changed.wait()
            with clocks.move_on_after(self._clock, LOOK_SECONDS):
                while not self._told:
                    self._changed = anyio.Event()
                    await self._changed.wait()
            await self._write_outcomes()
            self._forget_old()
            if self._known:
                await self._look()
            if self._failed is not None:
                await self._clock.sleep(DENIED_SECONDS if isinstance(self._failed, DeniedError) else LOOK_SECONDS)

    async def _look(self) -> None:
        """Find what was decided about any notification of the agent, and carry it out."""
        found: dict[Key, _Found] = {}
        for entry in await self._use(self._orders, self._entries) or ():
            try:
                key = failure_counts.parse_key(entry.key)
            except (UndecodableError, ValueError):
                continue
            told = self._told.get(key)
            decided = told if told is not None and told.order == entry.revision else await self._open_in(entry)
            if decided is not None and not (decided.taken and decided.taken.outcome):
                found[key] = decided
        self._found = found
        for key, each in tuple(found.items()):
            if (known := self._known.get(key)) is not None:
                await self._carry_out(key, known, each)

    async def _open_in(self, entry: Entry | None) -> _Found | None:
        """Return the decision of an entry; None where there is none, or where it was carried out, as far as known."""
        decision = orders.decision(entry)
        if entry is None or decision is None:
            return None
        record = await self._use(self._records, lambda values: values.newest(f"{entry.key}{DECIDED}"))
        taken = failure_counts.taken(record, order=entry.revision)
        if self._failed is not None or (taken is not None and taken.outcome):
            return None
        return _Found(decision, entry.revision, taken, record.revision if record else 0)

    async def _order(self, key: Key) -> Entry | None:
        return await self._use(self._orders, lambda values: values.get(self._name(key)))

    async def _entries(self, values: BulkKeyValue) -> list[Entry]:
        found: list[Entry] = []
        keys = f"{self._agent}.{self._stream}.*.*"
        while len(found) < MAX_FOUND and (entry := await values.next(keys, after=found[-1].revision if found else 0)):
            found.append(entry)
        return found

    async def _carry_out(self, key: Key, known: _Known, found: _Found) -> None:
        if known.end is not None:
            self._tell(key, known.end)
            return
        if found.taken and found.taken.again_at and found.taken.again_at > self._now():
            return  # its dead letter could not be stored
        if not self._may_end_wait(known) or not await self._take(key, found):
            return
        if not self._may_end_wait(known) or self._known.get(key) is not known:
            return  # it is due by now
        if known.kept:
            self._flow.retry_now(key[0])
        else:
            known.until = self._clock.monotonic()
            known.delivery.redeliver()

    def _may_end_wait(self, known: _Known) -> bool:
        if known.kept:
            return self._flow.holds(known.delivery)
        return known.until > self._clock.monotonic() + MARGIN_SECONDS and self._backend.connection.ready

    async def _take(self, key: Key, found: _Found) -> bool:
        """Have it recorded that a worker carries a decision out, and return whether it still stands."""
        if found.taken is not None:
            return True
        taken = Taken(order=found.order)
        if not (revision := await self._store(key, taken, found.revision)):
            return False
        self._found[key] = structs.replace(found, taken=taken, revision=revision)
        order = await self._order(key)  # a person who has withdrawn it before has not seen that it is taken
        return order is not None and order.revision == found.order

    def _tell(self, key: Key, end: _End) -> None:
        found = self._found.pop(key)
        outcome = "" if found.decision.decides == "skip" and end.outcome == "failed" else end.outcome
        taken = Taken(order=found.order, outcome=outcome, error=end.error, again_at=end.again_at)
        self._told[key] = structs.replace(found, taken=taken)
        if not outcome:
            self._found[key] = self._told[key]  # it is skipped when it comes again
        self._changed.set()

    async def _write_outcomes(self) -> None:
        for key, told in tuple(self._told.items()):
            assert told.taken is not None
            if await self._store(key, told.taken, told.revision) is None:
                return  # it is kept, or the decision would be carried out again
            if self._told.get(key) is told:
                del self._told[key]

    async def _store(self, key: Key, taken: Taken, revision: int) -> int | None:
        """Store the record of a decision in place of this revision, and return its own: 0 where another worker was
        faster, None where it could not be stored.
        """
        name = self._name(key)
        try:
            return await self._use(
                self._records, lambda values: failure_counts.store_taken(values, name, taken, revision=revision)
            )
        except ConflictError:
            return 0

    async def _use(self, bucket: str, operation: Callable[[BulkKeyValue], Awaitable[T]]) -> T | None:
        """Return the result of an operation on a bucket; None where it cannot be used, or where there are no orders.
        Raises `ConflictError`.
        """
        try:
            values = self._opened.get(bucket) or await self._open(bucket)
            result = None if values is None else await operation(values)
        except ConflictError:
            raise
        except BackendError as error:
            self._opened.pop(bucket, None)
            self._failed = error
            return None
        if values is not None:
            self._opened[bucket] = values
        self._failed = None
        return result

    async def _open(self, bucket: str) -> BulkKeyValue | None:
        if bucket == self._orders:
            return await open_existing(self._backend, bucket, own=True)
        return await self._backend.key_value(bucket, ttl_seconds=KEPT_SECONDS, own=True)

    def _name(self, key: Key) -> str:
        return failure_counts.key_of(self._agent, self._stream, *key)

    def _know(self, known: _Known) -> None:
        if not self._known:
            self._changed.set()
        key = key_of(known.delivery)
        self._known.pop(key, None)
        self._known[key] = known
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def _forget_old(self) -> None:
        now = self._clock.monotonic()
        over = [
            key
            for key, known in self._known.items()
            if (not self._flow.holds(known.delivery) if known.kept else known.until <= now)
        ]
        for key in over:
            del self._known[key]

    def _now(self) -> datetime:
        return clocks.utc_now(self._clock)
