"""The worker processes that live, as each of them has said of itself: where it runs, and what it handles.

All apps have them in one bucket, which forgets a record that is not put again. A worker puts its own again and again
(`sessions.worker_recorder`), so that a killed one is soon forgotten. Nothing depends on these records: a worker
without the right to write them works as ever, and is not listed.
"""

from __future__ import annotations

from datetime import datetime

from msgspec import Struct

from aviso_workers.aviso.codec import read_json
from aviso_workers.backends import Backend
from aviso_workers.backends.buckets import open_existing
from aviso_workers.errors import UndecodableError
from aviso_workers.jetstream.key_value import Entry, encode_key
from aviso_workers.state.kept import Kept

__all__ = ["BUCKET", "KEPT", "TTL_SECONDS", "WRITE_SECONDS", "AtWork", "WorkerRecord", "key_of", "remove", "stored"]

BUCKET = "aviso_workers_processes"
WRITE_SECONDS = 30.0
TTL_SECONDS = 3 * WRITE_SECONDS
KEPT = (
    Kept(
        bucket=BUCKET,
        key="<app>/<host, process and number of the worker>",
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
    return encode_key(f"{app}/{worker}")


async def stored(backend: Backend) -> dict[str, list[tuple[WorkerRecord, datetime]]]:
    """Return the workers that live, by app, each with when it was renewed by the server's clock. Raises
    `BackendError`.
    """
    bucket = await open_existing(backend, BUCKET, ttl_seconds=TTL_SECONDS, own=True)
    found: dict[str, list[tuple[WorkerRecord, datetime]]] = {}
    for entry in await bucket.entries() if bucket is not None else ():
        if record := _read(entry):
            found.setdefault(entry.key.partition("/")[0], []).append((record, entry.time))
    return {app: sorted(each, key=lambda one: (one[0].host, one[0].process)) for app, each in found.items()}


async def remove(backend: Backend, *, app: str) -> None:
    """Forget the workers of a retired app. Raises `BackendError`."""
    bucket = await open_existing(backend, BUCKET, ttl_seconds=TTL_SECONDS, own=True)
    for key in await bucket.keys() if bucket is not None else ():
        if bucket is not None and key.startswith(f"{app}/"):
            await bucket.delete(key)


def _read(entry: Entry) -> WorkerRecord | None:
    try:
        return read_json(entry.value, WorkerRecord)
    except UndecodableError:
        return None  # of a version that writes another one, or not ours
