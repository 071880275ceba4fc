"""The last failure of each agent, timer and task of an app, recorded for operators who ask what is wrong with it, and
since when what an agent depends on is away.

All workers of the app keep one record of each in the bucket of `consumer_records`, under
`<app>/<agents|timers|tasks>/<name>/failure`. It is written at the first failure, and then at most every
`WRITE_SECONDS`, so nothing is written for what succeeds. A failure is over when it has not come again for
`OVER_SECONDS` after its next attempt was due. That of a timer is over when the timer succeeds.

A worker in which a dependency of an agent is away says so every `RENEW_SECONDS`. It is over when one of them says that
it is back, or when none has said it for `AWAY_SECONDS`, as where they have died.

Nothing depends on these records. Where the bucket cannot be written, the next failure is recorded; the log has all.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Literal

from msgspec import Struct, structs

from aviso_workers.aviso.codec import read_json
from aviso_workers.backends import Backend
from aviso_workers.declare.retry import USUAL_ATTEMPTS
from aviso_workers.errors import UndecodableError
from aviso_workers.jetstream.key_value import Entry
from aviso_workers.state import consumer_records
from aviso_workers.state.kept import Kept

__all__ = ["KEPT", "Kind", "LastFailure", "Retrying", "is_blocked", "parsed", "remove_others", "shifted", "stored"]

Kind = Literal["agents", "timers", "tasks"]
WRITE_SECONDS = 5.0
RENEW_SECONDS, AWAY_SECONDS = 20.0, 60.0
SLOW_WRITE = timedelta(seconds=2)
"""A write takes less: what was stored so much before or after it was written was written by a clock that is wrong."""
KEPT = (
    Kept(
        bucket=consumer_records.BUCKET,
        key=f"<app>/<agents, timers or tasks>/<name>/{consumer_records.FAILURE}",
        holds="the last failure (`LastFailure`)",
        until="until `agents rm`",
    ),
)


class Retrying(Struct, frozen=True, kw_only=True):
    """A notification that waits for its next attempt."""

    again_at: datetime
    """When its wait for the next attempt ends."""
    stream: str
    """The stream of the agent's events."""
    sequence: int
    timestamp_ns: int
    """When it was stored, in nanoseconds since 1970."""
    handed_back: bool = False
    """Whether it is a dead letter that was handed back."""
    attempt: int
    """How often it has failed."""
    attempts: int | None
    """After so many failures it becomes a dead letter; None: never."""
    blocked: bool = False
    """Whether the agent, which has no limit of attempts, is blocked at it: it has failed as often as is usual."""
    error: str
    """The class and the text of the error."""
    key: str = ""
    """Its ordering key; empty where the agent has no order."""
    behind: int = 0
    """How many notifications of this key waited behind it when this was recorded."""


def is_blocked(failures: int, attempts: int | None) -> bool:
    """Return whether an agent of so many attempts is blocked at a notification that has failed so often."""
    return attempts is None and failures >= USUAL_ATTEMPTS


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
    """When this was recorded, by the server's clock."""
    times: int
    """How often it has failed since then, in all workers."""
    retrying: tuple[Retrying, ...] = ()
    of_window: bool = False
    """Whether the function of a window failed last."""
    away: str = ""
    """The error that says that what the agent depends on is away, with its class; empty where nothing was."""
    away_since: datetime | None = None
    """Since when it is or was away, in the worker that has noticed it first."""
    away_until: datetime | None = None
    """When that is over, if no worker says it again."""

    def is_away(self, now: datetime) -> bool:
        """Return whether what the agent depends on is away, as far as a worker of it knows."""
        return self.away_until is not None and self.away_until > now

    @property
    def described(self) -> str:
        """The last error as `ValueError: no such field (fields.py:12)`."""
        text = f"{self.error}: {self.text}" if self.text else self.error
        return f"{text} ({self.at})" if self.at else text


async def stored(backend: Backend) -> dict[tuple[str, str, str], LastFailure]:
    """Return the records of all apps, by app, kind and name. Raises `BackendError`."""
    return parsed(await consumer_records.entries(backend))


def parsed(entries: Iterable[Entry]) -> dict[tuple[str, str, str], LastFailure]:
    """Return the records among the entries of the bucket, by app, kind and name."""
    noted = consumer_records.notes(entries, consumer_records.FAILURE)
    return {named: last for named, entry in noted if (last := read(entry))}


async def remove_others(backend: Backend, *, app: str, timers: Iterable[str], tasks: Iterable[str]) -> None:
    """Forget the failures of timers and tasks that the code of the app has no more. Raises `BackendError`."""
    declared = {key_of(app, "timers", name) for name in timers} | {key_of(app, "tasks", name) for name in tasks}
    for owner, kind, name in await stored(backend):
        if owner == app and kind != "agents" and (key := key_of(app, kind, name)) not in declared:
            await (await consumer_records.bucket(backend)).delete(key)


def key_of(app: str, kind: str, name: str) -> str:
    return consumer_records.note_key(app, kind, name, consumer_records.FAILURE)


def read(entry: Entry | None) -> LastFailure | None:
    """Return the record of an entry with its times by the server's clock: that of who wrote it may be wrong."""
    try:
        last = read_json(entry.value, LastFailure) if entry is not None else None
    except UndecodableError:
        return None  # another record, or none of ours
    if entry is None or last is None or abs(ahead := entry.time - last.written) < SLOW_WRITE:
        return last
    return shifted(last, ahead)


def shifted(last: LastFailure, by: timedelta) -> LastFailure:
    """Return the record with its times by a clock that is ahead by so much."""
    return structs.replace(
        last,
        since=last.since + by,
        last=last.last + by,
        until=last.until + by,
        written=last.written + by,
        away_since=last.away_since and last.away_since + by,
        away_until=last.away_until and last.away_until + by,
        retrying=tuple(structs.replace(each, again_at=each.again_at + by) for each in last.retrying),
    )
