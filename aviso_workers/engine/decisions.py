"""The decisions of persons about notifications that are retried (`agents retry`, `agents skip`), at a worker.

A decision is a record beside the failure count of its notification (`state.failure_counts`). A worker looks for the
decisions about an agent once a second, by one request, while it knows of a notification of the agent that is retried:
one that it keeps until its retry is due (`order_by`), one that it has given back to the server, or one that it handles
again. Other agents ask for nothing.

A decision makes the wait for the retry end: a notification that is kept here is offered at once, and one that was given
back is asked for again. Whoever is given it knows the decision before its handler runs (`redeliveries`), and has it
tried again or skipped. What became of it is written into the record, for the person who waits for that.

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
from aviso_workers.engine.flow import Flow
from aviso_workers.errors import BackendError, ConflictError, DeniedError, UndecodableError, line_of
from aviso_workers.state import failure_counts
from aviso_workers.state.failure_counts import DECIDED, Decision, Outcome

__all__ = ["Decisions"]

T = TypeVar("T")
Key = tuple[int, int]
"""Sequence and store time of a notification."""

LOOK_SECONDS = 1.0
DENIED_SECONDS = 60.0
"""How long none are looked for after the server has refused that."""
MARGIN_SECONDS = 1.0
"""One that is due so soon is not asked for: it comes by itself."""
LATELY_SECONDS = 3.0
"""For how long it is known how one ended that was retried: somebody may have decided while it ran."""
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


class _Found(Struct):
    """A decision as it is in the bucket."""

    decision: Decision
    revision: int


class Decisions:
    """Decisions about the retried notifications of one agent. Keep `work` running beside it."""

    def __init__(self, backend: Backend, *, app: str, agent: str, stream: str, flow: Flow) -> None:
        self._backend = backend
        self._clock = backend.clock
        self._bucket = f"{app}{failure_counts.BUCKET_SUFFIX}"
        self._agent = agent
        self._stream = stream
        self._flow = flow
        self._values: BulkKeyValue | None = None
        self._known: dict[Key, _Known] = {}
        self._found: dict[Key, _Found] = {}
        """The decisions that no worker has carried out yet, as they were found last."""
        self._told: dict[Key, _Found] = {}
        """Decisions with their outcomes, which are to be written in place of these revisions."""
        self._changed = anyio.Event()
        self._failed: BackendError | None = None
        """Why the bucket could not be used the last time."""

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
        found = self._found.get(_key(delivery))
        return None if found is None else found.decision

    async def read(self, delivery: Delivery) -> None:
        """Find what was decided about a notification that another worker has given back."""
        name = failure_counts.key_of(self._agent, self._stream, *_key(delivery))
        entry = await self._use(lambda values: values.get(f"{name}{DECIDED}"))
        if (decision := failure_counts.decision(entry)) is not None and entry is not None and not decision.outcome:
            self._found[_key(delivery)] = _Found(decision, entry.revision)

    def note_end(
        self, delivery: Delivery, outcome: Outcome, *, error: BaseException | None = None, again_in_seconds: float = 0.0
    ) -> None:
        """Note how an attempt of a notification ended, and tell that to whoever has decided about it."""
        key = _key(delivery)
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
        for entry in await self._use(self._entries) or ():
            decision = failure_counts.decision(entry)
            try:
                key = failure_counts.parse_key(entry.key)
            except (UndecodableError, ValueError):
                continue
            if decision is not None and not decision.outcome:
                found[key] = self._told.get(key) or _Found(decision, entry.revision)
        self._found = {key: each for key, each in found.items() if not each.decision.outcome}
        for key, each in tuple(self._found.items()):
            if (known := self._known.get(key)) is not None:
                await self._carry_out(key, known, each)

    async def _entries(self, values: BulkKeyValue) -> list[Entry]:
        found: list[Entry] = []
        keys = f"{self._agent}.{self._stream}.*.*{DECIDED}"
        while len(found) < MAX_FOUND and (entry := await values.next(keys, after=found[-1].revision if found else 0)):
            found.append(entry)
        return found

    async def _carry_out(self, key: Key, known: _Known, found: _Found) -> None:
        if known.end is not None:
            self._tell(key, known.end)
            return
        again_at = found.decision.again_at
        if again_at is not None and again_at > self._now():
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
        if not found.decision.taken:
            taken = structs.replace(found.decision, taken=True)
            if not (revision := await self._store(key, taken, found.revision)):
                return False
            self._found[key] = _Found(taken, revision)
        return True

    def _tell(self, key: Key, end: _End) -> None:
        found = self._found.pop(key)
        decision = found.decision
        outcome = "" if decision.decides == "skip" and end.outcome == "failed" else end.outcome
        told = structs.replace(decision, outcome=outcome, error=end.error, again_at=end.again_at)
        self._told[key] = _Found(told, found.revision)
        if not outcome:
            self._found[key] = self._told[key]  # it is skipped when it comes again
        self._changed.set()

    async def _write_outcomes(self) -> None:
        for key, told in tuple(self._told.items()):
            if await self._store(key, told.decision, told.revision) is None:
                return  # it is kept, or the decision would be carried out again
            if self._told.get(key) is told:
                del self._told[key]

    async def _store(self, key: Key, decision: Decision, revision: int) -> int | None:
        """Store a decision in place of this revision, and return its own: 0 where somebody has decided again, None
        where it could not be stored.
        """
        name = failure_counts.key_of(self._agent, self._stream, *key)
        try:
            return await self._use(
                lambda values: failure_counts.store_decision(values, name, decision, revision=revision)
            )
        except ConflictError:
            return 0

    async def _use(self, operation: Callable[[BulkKeyValue], Awaitable[T]]) -> T | None:
        """Return the result of an operation on the bucket; None where it cannot be used, or where there is none. Raises
        `ConflictError`.
        """
        try:
            if self._values is None:
                self._values = await open_existing(self._backend, self._bucket, own=True)
            result = None if self._values is None else await operation(self._values)
        except ConflictError:
            raise
        except BackendError as error:
            self._values, self._failed = None, error
            return None
        self._failed = None
        return result

    def _know(self, known: _Known) -> None:
        if not self._known:
            self._changed.set()
        key = _key(known.delivery)
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


def _key(delivery: Delivery) -> Key:
    return delivery.message.sequence, delivery.message.timestamp_ns
