"""Runs of timers at once: operators ask for them, and one worker takes each.

What is asked of all timers of an app is one record in the bucket of `consumer_records`, under `<app>/timers/all/run`,
so that a worker reads one key to know it. It has the last run of each timer: the worker that takes it writes its name
there by a compare-and-set before it begins, and at the end what became of it. Workers of a version that does not know
the record leave it alone.
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

__all__ = ["KEPT", "VOID_SECONDS", "Run", "key_of", "parsed", "read"]

KEPT = (
    Kept(
        bucket=consumer_records.BUCKET,
        key=f"<app>/timers/all/{consumer_records.RUN}",
        holds="the last run of each timer that somebody has asked for, and what became of it (`Run`)",
        until="until `agents rm` of the app",
    ),
)
VOID_SECONDS = 60.0
"""A run that no worker has taken within this time is void: nobody wants it to come later."""


class Run(Struct, frozen=True, kw_only=True):
    """A run of a timer that somebody has asked for."""

    asked: Time
    """When, by the server's clock."""
    by: str
    """Who has asked."""
    worker: str = ""
    """The host and the process that have taken it; empty where none has."""
    seconds: float | None = None
    """How long it took; None while it has not ended."""
    error: str = ""
    """Why it failed; empty where it has not."""

    def is_open(self, now: datetime) -> bool:
        """Return whether a worker may take it."""
        return not self.worker and (now - self.asked).total_seconds() <= VOID_SECONDS


def parsed(entries: Iterable[Entry]) -> dict[tuple[str, str], Run]:
    """Return the last runs among the entries of the bucket, by app and timer."""
    noted = consumer_records.notes(entries, consumer_records.RUN)
    return {(app, timer): run for (app, *_), entry in noted for timer, run in read(entry).items()}


def key_of(app: str) -> str:
    return consumer_records.note_key(app, "timers", "all", consumer_records.RUN)


def read(entry: Entry | None) -> dict[str, Run]:
    try:
        return read_json(entry.value, dict[str, Run]) if entry is not None else {}
    except UndecodableError:
        return {}  # another record, or none of ours
