"""The pauses of an app's timers, which operators make and workers obey.

Each paused timer has one record in the bucket of `consumer_records`, under `<app>/timers/<timer>/pause`. Workers read
it before each tick. Workers of a version that does not know it run the timer as ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from msgspec import Struct

from aviso_workers.aviso.codec import read_json
from aviso_workers.errors import UndecodableError
from aviso_workers.jetstream.fields import Time
from aviso_workers.jetstream.key_value import Entry
from aviso_workers.state import consumer_records
from aviso_workers.state.kept import Kept

__all__ = ["KEPT", "Pause", "key_of", "parsed", "read"]

KEPT = (
    Kept(
        bucket=consumer_records.BUCKET,
        key=f"<app>/timers/<timer>/{consumer_records.PAUSE}",
        holds="that a timer is paused, by whom and until when (`Pause`)",
        until="until the timer is resumed, or `agents rm` of the app",
    ),
)


class Pause(Struct, frozen=True, kw_only=True):
    """A time in which no worker runs a timer. Times are by the server's clock."""

    since: Time
    until: Time
    by: str
    """The user and the host that paused it."""
    note: str = ""


def parsed(entries: Iterable[Entry], *, now: datetime) -> dict[tuple[str, str], Pause]:
    """Return the pauses that last, among the entries of the bucket, by app and timer."""
    noted = consumer_records.notes(entries, consumer_records.PAUSE)
    found = {(app, timer): read(entry) for (app, kind, timer), entry in noted if kind == "timers"}
    return {key: pause for key, pause in found.items() if pause and pause.until > now}


def key_of(app: str, timer: str) -> str:
    return consumer_records.note_key(app, "timers", timer, consumer_records.PAUSE)


def read(entry: Entry | None) -> Pause | None:
    try:
        return read_json(entry.value, Pause) if entry is not None else None
    except UndecodableError:
        return None  # another record, or none of ours
