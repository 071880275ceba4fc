"""The worker processes that live, as each of them has said of itself: where it runs, and what it handles.

A worker has one record in the bucket of `consumer_records`, under `<app>/workers/<worker>/alive`. It puts it again and
again (`sessions.worker_recorder`), and the server forgets the record of one that was killed. Nothing depends on these
records: a worker without the right to write them works as ever, and is not listed.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from msgspec import Struct

from aviso_workers.aviso.codec import read_json
from aviso_workers.errors import UndecodableError
from aviso_workers.jetstream.key_value import Entry
from aviso_workers.state import consumer_records
from aviso_workers.state.kept import Kept

__all__ = ["KEPT", "TTL_SECONDS", "WRITE_SECONDS", "AtWork", "WorkerRecord", "key_of", "parsed"]

WRITE_SECONDS = 30.0
TTL_SECONDS = 3 * WRITE_SECONDS
KEPT = (
    Kept(
        bucket=consumer_records.BUCKET,
        key=f"<app>/workers/<worker>/{consumer_records.ALIVE}",
        holds="that a worker process lives, and what it handles (`WorkerRecord`)",
        until=f"until the worker ends, or {TTL_SECONDS:g} s after it was renewed",
    ),
)


class AtWork(Struct, frozen=True, kw_only=True):
    """What a worker handles of one agent."""

    stream: str
    in_flight: int
    """Notifications whose handling has begun and not ended."""
    at_once: int
    """As many as calls at once can take."""
    pinned: bool | None = None
    """Whether the server gives everything to this worker; None of an agent that is no singleton."""


class WorkerRecord(Struct, frozen=True, kw_only=True):
    """A worker process."""

    host: str
    process: int
    """Its process id."""
    member: str = ""
    """Its name in its fleet; empty where it is in none."""
    version: str
    """Of aviso-workers."""
    started: datetime
    """By its own clock."""
    rss: int | None = None
    """Bytes of memory that are resident; None where the system does not say it."""
    agents: dict[str, AtWork]


def key_of(app: str, worker: str) -> str:
    return consumer_records.note_key(app, "workers", worker, consumer_records.ALIVE)


def parsed(entries: Iterable[Entry]) -> dict[str, list[tuple[WorkerRecord, datetime]]]:
    """Return the workers among the entries of the bucket, by app, each with when it was renewed by the server's
    clock.
    """
    found: dict[str, list[tuple[WorkerRecord, datetime]]] = {}
    for (app, _, _), entry in consumer_records.notes(entries, consumer_records.ALIVE):
        if record := _read(entry):
            found.setdefault(app, []).append((record, entry.time))
    return {app: sorted(each, key=lambda one: (one[0].host, one[0].process)) for app, each in found.items()}


def _read(entry: Entry) -> WorkerRecord | None:
    try:
        return read_json(entry.value, WorkerRecord)
    except UndecodableError:
        return None  # of a version that writes another one, or not ours
