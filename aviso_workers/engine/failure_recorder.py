"""Records the last failures of agents, timers and tasks that a worker notes (`state.failure_records`).

A record is written at the first failure, and then at most every `WRITE_SECONDS`, so nothing is written for what
succeeds. A failure is over when it has not come again for `OVER_SECONDS` after its next attempt was due. That of a
timer is over when the timer succeeds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial

import anyio
from msgspec import Struct, field, structs

from aviso_workers import clocks
from aviso_workers.aviso.literals import printable
from aviso_workers.backends import Backend
from aviso_workers.errors import BackendError, line_of, place_of
from aviso_workers.events import TaskFailed, Ticked, WindowDone
from aviso_workers.jetstream import key_value
from aviso_workers.state import consumer_records, failure_records
from aviso_workers.state.failure_records import Kind, LastFailure, Retrying

__all__ = ["LastFailures"]

OVER_SECONDS = 60.0
UNTIL_SUCCESS_SECONDS = 366 * 86400.0
"""A timer that failed has failed until it succeeds, however seldom it runs."""
MAX_RETRYING = 50
"""Notifications that wait for their next attempt and are recorded: those that are due next."""


class _Noted(Struct):
    """What this worker has noted of one thing since it was last written."""

    last: LastFailure
    retrying: dict[int, Callable[[], Retrying]] = field(default_factory=dict)
    """By sequence."""


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
        self._changed = anyio.Event()

    def note(
        self,
        kind: Kind,
        name: str,
        error: BaseException,
        *,
        again_in_seconds: float = 0.0,
        retrying: Callable[[datetime], Retrying] | None = None,
        of_window: bool = False,
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
        elif noted.last.error == printable(type(error).__name__):  # of thousands alike, only some are described
            noted.last = structs.replace(noted.last, last=now, until=until, times=noted.last.times + 1)
        else:
            before = noted.last
            noted.last = structs.replace(_described(error, now, until), since=before.since, times=before.times + 1)
        noted.last = structs.replace(noted.last, of_window=of_window)
        if retrying is not None:
            found = partial(retrying, again_at)
            noted.retrying[found().sequence] = found
            if len(noted.retrying) > MAX_RETRYING:
                del noted.retrying[next(iter(noted.retrying))]
        self._changed.set()

    def observe(self, event: Ticked | TaskFailed | WindowDone) -> None:
        """Note the failure that an event tells of, or that a timer succeeds again."""
        match event:
            case WindowDone(error=BaseException() as error):
                self.note("agents", event.agent, error, again_in_seconds=event.again_in_seconds, of_window=True)
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
                await self._write_over()
        finally:
            self._noted = noted | self._noted

    async def _write_noted(self, noted: dict[tuple[Kind, str], _Noted]) -> None:
        """Record these, and take out what is recorded."""
        while noted:
            (kind, name), each = next(iter(noted.items()))
            bucket = await consumer_records.bucket(self._backend)
            now, waiting = await bucket.time(), tuple(found() for found in each.retrying.values())
            last = failure_records.shifted(structs.replace(each.last, retrying=waiting), now - self._now())
            change = partial(_merged, last, now)
            await key_value.compare_and_set(
                bucket, failure_records.key_of(self._app, kind, name), read=failure_records.read, change=change
            )
            del noted[kind, name]

    async def _write_over(self) -> None:
        while self._over:
            timer = next(iter(self._over))
            key = failure_records.key_of(self._app, "timers", timer)
            if await consumer_records.entry(self._backend, key) is not None:  # as of the fewest
                bucket = await consumer_records.bucket(self._backend)
                change = partial(_ended, await bucket.time())
                await key_value.compare_and_set(bucket, key, read=failure_records.read, change=change)
            self._over.discard(timer)  # it may have failed again meanwhile

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


def _merged(last: LastFailure, now: datetime, before: LastFailure | None) -> LastFailure:
    """Return the record with what one worker has noted since it wrote last. All times are by the server's clock."""
    if before is not None and before.until >= last.since:
        last = structs.replace(
            last,
            since=min(before.since, last.since),
            times=before.times + last.times,
            until=max(before.until, last.until),
        )
    waiting = {each.sequence: each for each in before.retrying if each.again_at > now} if before else {}
    waiting |= {each.sequence: each for each in last.retrying}
    due = tuple(sorted(waiting.values(), key=lambda each: each.again_at)[:MAX_RETRYING])
    return structs.replace(last, written=now, retrying=due)


def _ended(now: datetime, before: LastFailure | None) -> LastFailure | None:
    """Return the record of what has succeeded by now."""
    return structs.replace(before, until=now, written=now) if before is not None and before.until > now else before
