"""The outages of what agents depend on, shared by all workers of an app, which together try one notification at a time.

Each agent has one record in the bucket of `consumer_records`, under `<app>/agents/<agent>/outage`. It is written when
the breaker of a worker opens, before each try, and when one succeeds: by compare-and-set, so that one of several
workers tries. A worker that cannot reach the bucket decides alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

import msgspec
from msgspec import Struct, structs

from aviso_workers.aviso.codec import read_json
from aviso_workers.backends import Backend
from aviso_workers.clocks import SKEW
from aviso_workers.errors import UndecodableError
from aviso_workers.jetstream.key_value import Entry
from aviso_workers.state import consumer_records
from aviso_workers.state.kept import Kept

__all__ = ["KEPT", "OutageRecord", "newest", "parsed", "write"]

RENEW_SECONDS, ABANDONED_SECONDS = 10.0, 30.0
"""How often a worker that waits for longer writes the record, and when others go on without it."""
KEPT = (
    Kept(
        bucket=consumer_records.BUCKET,
        key=f"<app>/agents/<agent>/{consumer_records.OUTAGE}",
        holds="the last outage of what an agent depends on (`OutageRecord`)",
        until="until `agents rm`",
    ),
)


class OutageRecord(Struct, frozen=True, kw_only=True):
    """An outage, as the workers of an app know it."""

    since: datetime
    reason: str
    """The error that opened the breaker, with its class."""
    tries: int = 0
    """How often one was to be tried since then."""
    again_in_seconds: float
    """After how long the next one is tried, from when this was written."""
    written: datetime
    over: bool = False
    """Whether the last one that was tried has succeeded."""

    def is_abandoned(self, now: datetime) -> bool:
        """Return whether the workers that had this outage have said nothing of it for long."""
        return now - self.written > timedelta(seconds=ABANDONED_SECONDS) + SKEW


async def newest(backend: Backend, *, app: str, agent: str) -> tuple[OutageRecord | None, int]:
    """Return the record and its revision; None and 0 where there is none. Raises `BackendError`."""
    entry = await (await consumer_records.bucket(backend)).newest(key_of(app, agent))
    return _read(entry), entry.revision if entry else 0


async def write(backend: Backend, record: OutageRecord, *, app: str, agent: str, revision: int) -> int:
    """Write a record over this revision, and return its own. Raises `ConflictError` where that is not the newest one,
    `BackendError`.
    """
    bucket = await consumer_records.bucket(backend)
    return await bucket.put(key_of(app, agent), msgspec.json.encode(record), revision=revision)


def parsed(entries: Iterable[Entry]) -> dict[tuple[str, str], OutageRecord]:
    """Return the outages that last, among the entries of the bucket, by app and agent; times are the server's."""
    found = {}
    for (app, _, agent), entry in consumer_records.notes(entries, consumer_records.OUTAGE):
        if (record := _read(entry)) and not record.over:
            ahead = entry.time - record.written  # the clock of the worker that wrote it may be wrong
            found[app, agent] = structs.replace(record, since=record.since + ahead, written=entry.time)
    return found


def key_of(app: str, agent: str) -> str:
    return consumer_records.note_key(app, "agents", agent, consumer_records.OUTAGE)


def _read(entry: Entry | None) -> OutageRecord | None:
    try:
        return read_json(entry.value, OutageRecord) if entry is not None and not entry.deleted else None
    except UndecodableError:
        return None  # none of ours
