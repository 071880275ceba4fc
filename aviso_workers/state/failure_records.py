"""The last failure of each agent, timer and task of an app, recorded for operators who ask what is wrong with it.

All workers of the app keep one record of each in the bucket of `consumer_records`, under
`<app>/<agents|timers|tasks>/<name>/failure`. It is written at the first failure, and then at most every
`WRITE_SECONDS`, so nothing is written for what succeeds. A failure is over when it has not come again for
`OVER_SECONDS` after its next attempt was due. That of a timer is over when the timer succeeds.

Nothing depends on these records. Where the bucket cannot be written, the next failure is recorded; the log has all.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Literal

from msgspec import Struct, structs

from aviso_workers.aviso.codec import read_json
from aviso_workers.backends import Backend
from aviso_workers.errors import UndecodableError
from aviso_workers.jetstream.key_value import Entry
from aviso_workers.state import consumer_records
from aviso_workers.state.kept import Kept

__all__ = ["KEPT", "Kind", "LastFailure", "Retrying", "parsed", "remove_others", "shifted", "stored"]

Kind = Literal["agents", "timers", "tasks"]
WRITE_SECONDS = 5.0
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
    """When this was recorded, by the server's clock; in a record of an older version, by that of the worker."""
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
        retrying=tuple(structs.replace(each, again_at=each.again_at + by) for each in last.retrying),
    )
