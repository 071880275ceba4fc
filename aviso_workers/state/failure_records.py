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
from aviso_workers.declare.retry import USUAL_ATTEMPTS
from aviso_workers.errors import UndecodableError
from aviso_workers.jetstream.fields import Number, Time
from aviso_workers.jetstream.key_value import Entry
from aviso_workers.state import consumer_records

Kind = Literal["agents", "timers", "tasks"]
WRITE_SECONDS = 5.0
MAX_RETRYING = 100
"""Notifications that are retried and are recorded: first those at which the agent is blocked, in the order of their
streams, then those due next."""
MAX_BEHIND = 5
SLOW_WRITE = timedelta(seconds=2)
"""No write takes so long. Where the writer's time and the store time differ by more, the writer's clock is wrong."""


class Retrying(Struct, frozen=True, kw_only=True):
    """A notification that waits for its next attempt."""

    again_at: Time
    """When its wait for the next attempt ends."""
    stream: str
    """The stream of the agent's events."""
    sequence: Number
    timestamp_ns: Number
    """When it was stored, in nanoseconds since 1970."""
    handed_back: bool = False
    """Whether it is a dead letter that was handed back."""
    attempt: Number
    """How often it has failed."""
    attempts: Number | None
    """After so many failures it becomes a dead letter; None: never."""
    blocked: bool = False
    """Whether the agent, which has no limit of attempts, is blocked at it: it has failed as often as is usual."""
    error: str
    """The class and the text of the error."""
    key: str = ""
    """Its ordering key; empty where the agent has no order."""
    behind: Number = 0
    """How many notifications of this key waited behind it when this was recorded."""
    first_behind: tuple[Number, ...] = ()
    """The sequences of the first `MAX_BEHIND` of them."""


def is_blocked(failures: int, attempts: int | None) -> bool:
    """Return whether an agent of so many attempts is blocked at a notification that has failed so often."""
    return attempts is None and failures >= USUAL_ATTEMPTS


def rank(retrying: Retrying) -> tuple[bool, str, int, datetime]:
    """Return what is recorded first, as a key to sort by."""
    of = (retrying.stream, retrying.sequence) if retrying.blocked else ("", 0)
    return not retrying.blocked, *of, retrying.again_at


class LastFailure(Struct, frozen=True, kw_only=True):
    """How an agent, a timer or a task has failed."""

    error: str
    """The class of the last error, such as `ValueError`."""
    text: str
    at: str
    """The file and the line that raised it, such as `fields.py:12`; empty where that is not known."""
    since: Time
    """When it failed first, without having been well in between."""
    last: Time
    until: Time
    """When it is over, if it does not fail again."""
    written: Time
    """When this was recorded, by the server's clock."""
    times: Number
    """How often it has failed since then, in all workers."""
    retrying: tuple[Retrying, ...] = ()
    of: Literal["", "a window", "on_dead_letter"] = ""
    """Which function failed last, where it is not that which notifications are handled by."""
    handled: Time | None = None
    """When the last notification was settled that had failed before; None where none was."""

    @property
    def described(self) -> str:
        """The last error as `ValueError: no such field (fields.py:12)`."""
        text = f"{self.error}: {self.text}" if self.text else self.error
        return f"{text} ({self.at})" if self.at else text


def parsed(entries: Iterable[Entry]) -> dict[tuple[str, str, str], LastFailure]:
    """Return the records among the entries of the bucket, by app, kind and name."""
    noted = consumer_records.notes(entries, consumer_records.FAILURE)
    return {named: last for named, entry in noted if (last := read(entry))}


async def remove_others(backend: Backend, *, app: str, timers: Iterable[str], tasks: Iterable[str]) -> None:
    """Forget the failures of timers and tasks that the code of the app has no more. Raises `BackendError`."""
    declared = {key_of(app, "timers", name) for name in timers} | {key_of(app, "tasks", name) for name in tasks}
    bucket = await backend.key_value(consumer_records.bucket_of(app), own=True)
    revision = 0
    while entry := await bucket.next(">", after=revision):  # a worker may list no keys of this bucket
        revision = entry.revision
        for of_app, kind, _ in parsed([] if entry.deleted else [entry]):
            if of_app == app and kind != "agents" and entry.key not in declared:
                await bucket.delete(entry.key)


def key_of(app: str, kind: str, name: str) -> str:
    return consumer_records.note_key(app, kind, name, consumer_records.FAILURE)


def read(entry: Entry | None) -> LastFailure | None:
    """Return the record of an entry with its times by the server's clock: that of who wrote it may be wrong."""
    if entry is None:
        return None
    try:
        last = read_json(entry.value, LastFailure)
        ahead = entry.time - last.written
        return last if abs(ahead) < SLOW_WRITE else shifted(last, ahead)
    except (UndecodableError, OverflowError):
        return None  # another record, or none of ours


def shifted(last: LastFailure, by: timedelta) -> LastFailure:
    """Return the record with all of its times moved by this much."""
    return structs.replace(
        last,
        since=last.since + by,
        last=last.last + by,
        until=last.until + by,
        written=last.written + by,
        handled=last.handled and last.handled + by,
        retrying=tuple(structs.replace(each, again_at=each.again_at + by) for each in last.retrying),
    )
