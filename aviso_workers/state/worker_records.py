"""The worker processes that live, as each of them has said of itself: where it runs, and what it handles.

All apps have them in one bucket, which forgets what is not put again. A worker puts its record again and again
(`sessions.worker_recorder`). Nothing depends on it: a worker without the right works as ever, and is not listed.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta

from msgspec import Struct, structs

from aviso_workers.aviso.codec import read_json
from aviso_workers.backends import Backend
from aviso_workers.backends.buckets import open_existing
from aviso_workers.errors import UndecodableError
from aviso_workers.jetstream.fields import Time
from aviso_workers.state.kept import Kept

__all__ = ["BUCKET", "KEPT", "TTL_SECONDS", "WRITE_SECONDS", "AtWork", "WorkerRecord", "stored"]

BUCKET = "aviso_workers_processes"
WRITE_SECONDS = 30.0
TTL_SECONDS = 3 * WRITE_SECONDS
KEPT = (
    Kept(
        bucket=BUCKET,
        key="<app>.<host>.<process>.<number>",
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
    member: str
    """Its name in its fleet; empty where it is in none."""
    version: str
    """Of aviso-workers."""
    started: Time
    """By the server's clock, as `stored` returns it; in the bucket by the worker's own."""
    age_seconds: float
    """How long before it was put the worker has started."""
    said: datetime | None = None
    """When it was put, by the server's clock, as `stored` returns it."""
    rss: int | None = None
    """Bytes of memory that are resident; None where the system does not say it."""
    agents: dict[str, AtWork]


async def stored(backend: Backend) -> dict[str, list[WorkerRecord]]:
    """Return the workers that live, by app. Raises `BackendError`."""
    found: dict[str, list[WorkerRecord]] = {}
    if bucket := await open_existing(backend, BUCKET, ttl_seconds=TTL_SECONDS, own=True):
        now = await bucket.time()
        for entry in sorted(await bucket.entries(), key=lambda each: each.key):
            if (now - entry.time).total_seconds() > TTL_SECONDS:
                continue  # of a worker that was killed, in a bucket that somebody else has made, without an age
            with suppress(UndecodableError):  # of a version that writes another one, or not ours
                record = read_json(entry.value, WorkerRecord)
                started = entry.time - timedelta(seconds=record.age_seconds)
                record = structs.replace(record, said=entry.time, started=started)
                found.setdefault(entry.key.partition(".")[0], []).append(record)
    return found
