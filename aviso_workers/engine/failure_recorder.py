"""Records the last failures of agents, timers and tasks that a worker notes (`state.failure_records`).

A record is written at the first failure, and then at most every `WRITE_SECONDS`, so nothing is written for what
succeeds. A failure is over when it has not come again for `OVER_SECONDS` after its next attempt was due. That of a
timer is over when the timer succeeds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Literal

import anyio
from msgspec import UNSET, Struct, field, structs

from aviso_workers import clocks
from aviso_workers.aviso.literals import printable
from aviso_workers.backends import Backend
from aviso_workers.errors import BackendError, line_of, place_of
from aviso_workers.events import DeadLetterCallFailed, TaskFailed, Ticked, WindowDone
from aviso_workers.jetstream import key_value
from aviso_workers.state import consumer_records, failure_records
from aviso_workers.state.failure_records import Kind, LastFailure, Retrying

Change = Callable[[LastFailure | None, datetime], LastFailure | None]
"""Returns a record changed, by what it was and the time of the server."""
OBSERVED = (DeadLetterCallFailed, TaskFailed, Ticked, WindowDone)
"""The facts that `LastFailures.observe` is for."""

OVER_SECONDS = 60.0
UNTIL_SUCCESS_SECONDS = 366 * 86400.0
"""A timer that failed has failed until it succeeds, however seldom it runs."""
STALE = timedelta(days=1)
"""After so long without another attempt, the agent counts as blocked at a notification no more: no worker says what
became of it."""


class _Noted(Struct):
    """What this worker has noted of one thing since it was last written."""

    last: LastFailure
    retrying: dict[tuple[str, int], Callable[[], Retrying]] = field(default_factory=dict)
    """By stream and sequence."""


class LastFailures:
    """Records the failures that one worker notes. Keep `keep_writing` running beside it."""

    def __init__(self, backend: Backend, *, app: str) -> None:
        self._backend = backend
        self._app = app
        self._noted: dict[tuple[Kind, str], _Noted] = {}
        self._well: set[str] = set()
        """The timers whose last tick has succeeded in this process."""
        self._over: set[str] = set()
        """Those of them of which it is not recorded yet that they do not fail any more."""
        self._settled: dict[str, dict[tuple[str, int], datetime | None]] = {}
        """By agent, settled notifications that may be recorded as retried, by stream and sequence: when each was
        handled, None where it became a dead letter."""
        self._changed = anyio.Event()

    def note(
        self,
        kind: Kind,
        name: str,
        error: BaseException,
        *,
        again_in_seconds: float = 0.0,
        retrying: Callable[[datetime], Retrying] | None = None,
        of: Literal["", "a window", "on_dead_letter"] = "",
    ) -> None:
        """Note a failure. `retrying` returns, at any later time, what is known of the notification, if it is retried;
        it is given when that is due.
        """
        now = self._now()
        again_at = now + timedelta(seconds=again_in_seconds)
        until = again_at + timedelta(seconds=OVER_SECONDS)
        noted = self._noted.get((kind, name))
        if noted is None:
            noted = self._noted[kind, name] = _Noted(_described(error, now, until))
        elif (noted.last.error, noted.last.of) == (printable(type(error).__name__), of):
            # Of thousands alike, only some are described.
            noted.last = structs.replace(noted.last, last=now, until=until, times=noted.last.times + 1)
        else:
            before = noted.last
            noted.last = structs.replace(_described(error, now, until), since=before.since, times=before.times + 1)
        noted.last = structs.replace(noted.last, of=of)
        if retrying is not None:
            found = partial(retrying, again_at)
            known = found()
            noted.retrying[known.stream, known.sequence] = found
            self._settled.get(name, {}).pop((known.stream, known.sequence), None)  # it was handed back
            if len(noted.retrying) > failure_records.MAX_RETRYING:
                one_of_many = next((key for key, each in noted.retrying.items() if not each().blocked), None)
                del noted.retrying[one_of_many or next(iter(noted.retrying))]
        self._changed.set()

    def note_settled(self, agent: str, stream: str, sequence: int, *, handled: bool) -> None:
        """Note that a notification is settled that has failed before: `handled` or skipped by a person, or as a dead
        letter.
        """
        if (noted := self._noted.get(("agents", agent))) is not None:
            noted.retrying.pop((stream, sequence), None)
        self._settled.setdefault(agent, {})[stream, sequence] = self._now() if handled else None
        self._changed.set()

    def observe(self, event: DeadLetterCallFailed | Ticked | TaskFailed | WindowDone) -> None:
        """Note the failure that an event tells of, or that a timer succeeds again."""
        match event:
            case WindowDone(error=BaseException() as error):
                self.note("agents", event.agent, error, again_in_seconds=event.again_in_seconds, of="a window")
            case DeadLetterCallFailed(again_in_seconds=0.0):
                self.note("agents", event.agent, event.error, of="on_dead_letter")
            case TaskFailed():
                self.note("tasks", event.task, event.error, again_in_seconds=event.again_in_seconds)
            case Ticked(error=BaseException() as error):
                self.note("timers", event.timer, error, again_in_seconds=UNTIL_SUCCESS_SECONDS)
                self._well.discard(event.timer)
                self._over.discard(event.timer)
            case Ticked(timer=timer) if timer not in self._well:  # it may have failed in another process
                self._well.add(timer)
                self._over.add(timer)
                self._changed.set()

    async def keep_writing(self) -> None:
        """Record what is noted; cancel this to end it."""
        while True:
            await self._changed.wait()
            await self.write()
            await self._backend.clock.sleep(failure_records.WRITE_SECONDS)

    async def write(self) -> None:
        """Record what is noted and not recorded yet. What cannot be is noted for the next time."""
        self._changed = anyio.Event()
        noted, self._noted = self._noted, {}
        try:
            with suppress(BackendError):
                await self._write_noted(noted)
                await self._write_settled()
                await self._write_over()
        finally:
            self._noted = noted | self._noted

    async def _write_noted(self, noted: dict[tuple[Kind, str], _Noted]) -> None:
        """Record these, and take out what is recorded."""
        while noted:
            (kind, name), each = next(iter(noted.items()))
            last = structs.replace(each.last, retrying=tuple(found() for found in each.retrying.values()))
            await self._change(kind, name, partial(_merged, last, self._now()))
            del noted[kind, name]

    async def _write_settled(self) -> None:
        for agent, settled in tuple(self._settled.items()):
            written = dict(settled)
            handled = max(filter(None, written.values()), default=None)
            ago = self._now() - handled if handled else None
            await self._change("agents", agent, partial(_without, written, handled_ago=ago))
            for each, at in written.items():
                if settled.get(each, UNSET) == at:
                    del settled[each]
            if not settled:
                del self._settled[agent]

    async def _write_over(self) -> None:
        while self._over:
            timer = next(iter(self._over))
            key = failure_records.key_of(self._app, "timers", timer)
            if await consumer_records.entry(self._backend, key) is not None:  # as of the fewest
                await self._change("timers", timer, _ended)
            self._over.discard(timer)  # it may have failed again meanwhile

    async def _change(self, kind: Kind, name: str, change: Change) -> None:
        """Change the record of an agent, a timer or a task."""
        bucket = await consumer_records.bucket(self._backend, self._app)
        key, now = failure_records.key_of(self._app, kind, name), await bucket.time()
        await key_value.compare_and_set(
            bucket, key, read=failure_records.read, change=lambda before: change(before, now)
        )

    def _now(self) -> datetime:
        return clocks.utc_now(self._backend.clock)


def _described(error: BaseException, now: datetime, until: datetime) -> LastFailure:
    return LastFailure(
        error=printable(type(error).__name__),
        text=printable(line_of(error)),
        at=printable(place_of(error)),
        since=now,
        last=now,
        until=until,
        written=now,
        times=1,
    )


def _merged(last: LastFailure, noted_at: datetime, before: LastFailure | None, now: datetime) -> LastFailure:
    """Return the record with what one worker has noted since it wrote last, by its own clock."""
    last = failure_records.shifted(last, now - noted_at)
    if before is not None and before.until >= last.since:
        last = structs.replace(
            last,
            since=min(before.since, last.since),
            times=before.times + last.times,
            until=max(before.until, last.until),
        )
    noted = {(each.stream, each.sequence): each for each in last.retrying}
    for each in before.retrying if before else ():
        if each.again_at + (STALE if each.blocked else timedelta()) > now:
            noted.setdefault((each.stream, each.sequence), each)
    first = sorted(noted.values(), key=failure_records.rank)
    if before is not None:
        last = structs.replace(last, handled=before.handled)
    return structs.replace(last, written=now, retrying=tuple(first[: failure_records.MAX_RETRYING]))


def _without(
    settled: Collection[tuple[str, int]], before: LastFailure | None, now: datetime, *, handled_ago: timedelta | None
) -> LastFailure | None:
    """Return the record without notifications that are settled."""
    if before is None:
        return None
    left = tuple(each for each in before.retrying if (each.stream, each.sequence) not in settled)
    handled = before.handled if handled_ago is None else now - handled_ago
    return structs.replace(before, retrying=left, handled=handled, written=now)


def _ended(before: LastFailure | None, now: datetime) -> LastFailure | None:
    """Return the record of what has succeeded by now."""
    return structs.replace(before, until=now, written=now) if before is not None and before.until > now else before
