"""The last failure of each agent, timer and task of an app, recorded for operators who ask what is wrong with it.

All workers of the app keep one record of each in the bucket of `consumer_records`, under
`<app>/<agents|timers|tasks>/<name>/failure`. It is written at the first failure, and then at most every
`WRITE_SECONDS`, so nothing is written for what succeeds. A failure is over when it has not come again for
`OVER_SECONDS` after its next attempt was due. That of a timer is over when the timer succeeds.

Nothing depends on these records. Where the bucket cannot be written, the next failure is recorded; the log has all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Literal

import anyio
from msgspec import Struct, field, structs

from aviso_workers.aviso.codec import read_json
from aviso_workers.aviso.literals import printable
from aviso_workers.backends import Backend
from aviso_workers.engine import consumer_records
from aviso_workers.errors import BackendError, UndecodableError, place_of, text_of
from aviso_workers.events import TaskFailed, Ticked, WindowDone
from aviso_workers.jetstream import key_value
from aviso_workers.jetstream.key_value import Entry

__all__ = ["END", "Kind", "LastFailure", "LastFailures", "Retrying", "parsed", "remove", "remove_others", "stored"]

Kind = Literal["agents", "timers", "tasks"]
WRITE_SECONDS = 5.0
OVER_SECONDS = 60.0
UNTIL_SUCCESS_SECONDS = 366 * 86400.0
"""A timer that failed has failed until it succeeds, however seldom it runs."""
MOST_RETRYING = 50
"""Notifications that wait for their next attempt and are recorded: those that are due next."""
LONGEST_TEXT = 200
"""Characters of an error's text that are recorded; the log and dead letters have more."""
END = "failure"
"""The last part of the key of each record."""
NO_KEY = re.compile(r"[^-_A-Za-z0-9]")
"""What a key of a bucket cannot have, as the name of a task that is a lambda."""


class Retrying(Struct, frozen=True, kw_only=True):
    """A notification that waits for its next attempt."""

    again_at: datetime
    sequence: int
    attempt: int
    """How often it has failed."""
    attempts: int | None
    """After so many failures it becomes a dead letter; None: never."""
    error: str
    """The class of the error."""
    key: str = ""
    """Its ordering key; empty where the agent has no order."""
    behind: int = 0
    """How many notifications of this key waited behind it when this was recorded."""


class LastFailure(Struct, frozen=True, kw_only=True):
    """How an agent, a timer or a task has failed."""

    error: str
    """The class of the last error, such as `ValueError`."""
    text: str
    at: str
    """The file and the line that raised it, such as `fields.py:12`; empty where that is not known."""
    since: datetime
    """When it failed first, without having been well in between."""
    last: datetime
    until: datetime
    """When it is over, if it does not fail again."""
    written: datetime
    """When this was recorded, by the clock of the worker that did."""
    times: int
    """How often it has failed since then, in all workers."""
    retrying: tuple[Retrying, ...] = ()
    of_window: bool = False
    """Whether the function of a window failed last."""

    @property
    def described(self) -> str:
        """The last error as `ValueError: no such field (fields.py:12)`."""
        text = f"{self.error}: {self.text}" if self.text else self.error
        return f"{text} ({self.at})" if self.at else text


class _Noted(Struct):
    """What this worker has noted of one thing since it was last written."""

    last: LastFailure
    retrying: dict[int, Callable[[], Retrying]] = field(default_factory=dict)
    """By sequence."""


class LastFailures:
    """Records the failures that one worker notes. Keep `keep` running beside it."""

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
            if len(noted.retrying) > MOST_RETRYING:
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

    async def keep(self) -> None:
        """Record what is noted; cancel this to end it."""
        while True:
            await self._changed.wait()
            await self.write()
            await self._backend.clock.sleep(WRITE_SECONDS)

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
            change = partial(_merged, each, [found() for found in each.retrying.values()], self._now())
            await key_value.compare_and_set(bucket, _key(self._app, kind, name), read=_read, change=change)
            del noted[kind, name]

    async def _write_over(self) -> None:
        while self._over:
            timer = next(iter(self._over))
            key = _key(self._app, "timers", timer)
            if await consumer_records.entry(self._backend, key) is not None:  # as of the fewest
                bucket = await consumer_records.bucket(self._backend)
                await key_value.compare_and_set(bucket, key, read=_read, change=partial(_ended, self._now()))
            self._over.discard(timer)  # it may have failed again meanwhile

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._backend.clock.time_ns() / 1e9, UTC)


def _described(error: BaseException, now: datetime, until: datetime) -> LastFailure:
    text = " ".join(text_of(error).split())[:LONGEST_TEXT]
    return LastFailure(
        error=printable(type(error).__name__),
        text=printable(text),
        at=printable(place_of(error)),
        since=now,
        last=now,
        until=until,
        written=now,
        times=1,
    )


def _merged(noted: _Noted, retrying: Iterable[Retrying], now: datetime, before: LastFailure | None) -> LastFailure:
    """Return the record with what one worker has noted since it wrote last."""
    last = noted.last
    if before is not None and before.until >= last.since:
        last = structs.replace(
            last,
            since=min(before.since, last.since),
            times=before.times + last.times,
            until=max(before.until, last.until),
        )
    waiting = {each.sequence: each for each in before.retrying if each.again_at > now} if before else {}
    waiting |= {each.sequence: each for each in retrying}
    due = tuple(sorted(waiting.values(), key=lambda each: each.again_at)[:MOST_RETRYING])
    return structs.replace(last, written=now, retrying=due)


def _ended(now: datetime, before: LastFailure | None) -> LastFailure | None:
    """Return the record of what has succeeded by now."""
    return structs.replace(before, until=now, written=now) if before is not None and before.until > now else before


async def stored(backend: Backend) -> dict[tuple[str, str, str], LastFailure]:
    """Return the records of all apps, by app, kind and name. Raises `BackendError`."""
    return parsed(await consumer_records.entries(backend))


def parsed(entries: Iterable[Entry]) -> dict[tuple[str, str, str], LastFailure]:
    """Return the records among the entries of the bucket, by app, kind and name; `until` and the times of retries are
    by the server's clock.
    """
    found = {}
    for entry in entries:
        app, *key = entry.key.split("/")
        if len(key) == 3 and key[2] == END and (last := _read(entry)):
            ahead = entry.time - last.written  # the clock of the worker that wrote it may be wrong
            waiting = tuple(structs.replace(each, again_at=each.again_at + ahead) for each in last.retrying)
            found[app, key[0], key[1]] = structs.replace(last, until=last.until + ahead, retrying=waiting)
    return found


async def remove(backend: Backend, *, app: str, agent: str = "") -> None:
    """Forget the failures of an agent, or of everything of the app, because it is retired. Raises `BackendError`."""
    for owner, kind, name in await stored(backend):
        if owner == app and (not agent or (kind, name) == ("agents", agent)):
            await (await consumer_records.bucket(backend)).delete(_key(app, kind, name))


async def remove_others(backend: Backend, *, app: str, timers: Iterable[str], tasks: Iterable[str]) -> None:
    """Forget the failures of timers and tasks that the code of the app has no more. Raises `BackendError`."""
    declared = {_key(app, "timers", name) for name in timers} | {_key(app, "tasks", name) for name in tasks}
    for owner, kind, name in await stored(backend):
        if owner == app and kind != "agents" and (key := _key(app, kind, name)) not in declared:
            await (await consumer_records.bucket(backend)).delete(key)


def _key(app: str, kind: str, name: str) -> str:
    return f"{app}/{kind}/{NO_KEY.sub('_', name)}/{END}"


def _read(entry: Entry | None) -> LastFailure | None:
    try:
        return read_json(entry.value, LastFailure) if entry is not None else None
    except UndecodableError:
        return None  # another record, or none of ours
