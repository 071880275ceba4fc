"""What operators ask of an app's timers, and workers obey: pauses, and runs at once. Who has paused an agent, and why,
is kept in the same way; the pause itself is that of its consumers.

What is asked is in the bucket of `orders`. Each paused timer has a record, `<app>/timers/<timer>/pause`, that workers
read before each tick. The last runs that were asked for, of all timers, are one record, `<app>/timers/all/run`, so that
a worker that looks again and again reads one key. Who takes a run writes it with its name under the same key of the
bucket of `consumer_records`, by a compare-and-set before it begins, and at the end what became of it. It is the same
run by the time at which it was asked for: revisions begin again where a bucket is recreated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TypeVar

from msgspec import Struct

from aviso_workers.backends import Admin
from aviso_workers.jetstream.fields import Time
from aviso_workers.jetstream.key_value import Entry, record_of
from aviso_workers.state import consumer_records, orders

K = TypeVar("K")
VOID_SECONDS = 60.0
"""A run that no worker has taken within this time is void: nobody wants it to come later."""


class Pause(Struct, frozen=True, kw_only=True):
    """A time in which no worker runs a timer, or an agent is delivered nothing. Times are by the server's clock."""

    since: Time
    until: Time
    by: str
    """The user and the host that paused it."""
    note: str = ""


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


def pauses(entries: Iterable[Entry], *, now: datetime, of: str = "timers") -> dict[tuple[str, str], Pause]:
    """Return the pauses that last, among the entries of buckets of `orders`, by app and timer, or by app and agent."""
    noted = consumer_records.notes(entries, consumer_records.PAUSE)
    found = {(app, name): read_pause(entry) for (app, kind, name), entry in noted if kind == of}
    return {key: pause for key, pause in found.items() if pause and pause.until > now}


def runs(ordered: Iterable[Entry], recorded: Iterable[Entry]) -> dict[tuple[str, str], Run]:
    """Return the last runs, by app and timer, among the entries of buckets of `orders` and what workers have recorded
    of them.
    """
    return with_taken(_runs(ordered), _runs(recorded))


def with_taken(asked: Mapping[K, Run], taken: Mapping[K, Run]) -> dict[K, Run]:
    """Return the runs that are asked for, each as the worker has recorded it that has taken it, if one has."""
    same = {of: run for of, run in taken.items() if of in asked and run.asked == asked[of].asked}
    return {**asked, **same}


def _runs(entries: Iterable[Entry]) -> dict[tuple[str, str], Run]:
    noted = consumer_records.notes(entries, consumer_records.RUN)
    return {(app, timer): run for (app, *_), entry in noted for timer, run in read_runs(entry).items()}


async def withdraw(admin: Admin, app: str, key: str) -> None:
    """Remove an order where there is one. Raises `BackendError`."""
    if await consumer_records.entry(admin, key, kind="orders") is not None:
        await (await orders.bucket(admin, app)).delete(key)


def pause_key(app: str, name: str, *, of: str = "timers") -> str:
    return consumer_records.note_key(app, of, name, consumer_records.PAUSE)


def runs_key(app: str) -> str:
    return consumer_records.note_key(app, "timers", "all", consumer_records.RUN)


def read_pause(entry: Entry | None) -> Pause | None:
    return record_of(entry, Pause)


def read_runs(entry: Entry | None) -> dict[str, Run]:
    return record_of(entry, dict[str, Run]) or {}
