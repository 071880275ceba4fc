"""The outages of what agents depend on, shared by all workers of an app, which together try one notification at a time,
and the agents that are halted.

Each breaker has one record in the bucket of `consumer_records`: that of an agent under `<app>/agents/<agent>/outage`,
that of a name which several agents share under `<app>/dependencies/<name>/outage`. It is written when the breaker of a
worker opens, before each try, and when one succeeds: by compare-and-set, so that one of several workers tries. A worker
that cannot reach the bucket decides alone.

A worker that halts an agent writes `<app>/agents/<agent>/halt` for as long as it does, for operators, who resume the
agent by writing that it is over.
"""

from __future__ import annotations

from collections.abc import Sequence
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

__all__ = ["KEPT", "OutageRecord", "end_halt", "halt_key", "key_of", "newest", "parsed", "write"]

RENEW_SECONDS, ABANDONED_SECONDS = 10.0, 30.0
"""How often a worker that waits for longer writes the record, and when others go on without it."""
KEPT = (
    Kept(
        bucket=consumer_records.BUCKET,
        key=f"<app>/agents/<agent>/{consumer_records.OUTAGE}",
        holds="the last outage of what an agent depends on (`OutageRecord`)",
        until="until `agents rm`",
    ),
    Kept(
        bucket=consumer_records.BUCKET,
        key=f"<app>/dependencies/<name>/{consumer_records.OUTAGE}",
        holds="the last outage of what several agents depend on, by `depends_on` (`OutageRecord`)",
        until="until `agents rm` of the whole app",
    ),
    Kept(
        bucket=consumer_records.BUCKET,
        key=f"<app>/agents/<agent>/{consumer_records.HALT}",
        holds="since when and why an agent is halted (`OutageRecord`)",
        until="until `agents rm`",
    ),
)


class OutageRecord(Struct, frozen=True, kw_only=True):
    """An outage, as the workers of an app know it, or since when an agent is halted."""

    since: datetime
    reason: str
    """The error that opened the breaker, with its class, or why the agent is halted."""
    agents: tuple[str, ...] = ()
    """The agents that wait; none in a record of a version that did not say it, where its key does."""
    halted: bool = False
    """Whether this is no outage: the agent waits until it is resumed, or its worker ends."""
    tries: int = 0
    """How often one was to be tried since then."""
    again_in_seconds: float = 0.0
    """After how long the next one is tried, from when this was written."""
    written: datetime
    over: bool = False
    """Whether the last one that was tried has succeeded, or the agent was resumed."""

    def is_abandoned(self, now: datetime) -> bool:
        """Return whether the workers that had this outage have said nothing of it for long."""
        return now - self.written > timedelta(seconds=ABANDONED_SECONDS) + SKEW


async def newest(backend: Backend, key: str) -> tuple[OutageRecord | None, int]:
    """Return the record and its revision; None and 0 where there is none. Raises `BackendError`."""
    entry = await (await consumer_records.bucket(backend)).newest(key)
    return _read(entry), entry.revision if entry else 0


async def write(backend: Backend, record: OutageRecord, *, key: str, revision: int) -> int:
    """Write a record over this revision, and return its own. Raises `ConflictError` where that is not the newest one,
    `BackendError`.
    """
    bucket = await consumer_records.bucket(backend)
    return await bucket.put(key, msgspec.json.encode(record), revision=revision)


async def end_halt(backend: Backend, *, app: str, agent: str) -> None:
    """Resume an agent in all workers that have halted it. Raises `BackendError`."""
    key = halt_key(app, agent)
    entry = await consumer_records.entry(backend, key)
    if (record := _read(entry)) and not record.over:
        await (await consumer_records.bucket(backend)).put(key, msgspec.json.encode(structs.replace(record, over=True)))


def parsed(entries: Sequence[Entry]) -> dict[tuple[str, str], OutageRecord]:
    """Return what agents wait for, among the entries of the bucket, by app and agent: of an outage and a halt, what was
    written last. Times are the server's.
    """
    found = dict[tuple[str, str], OutageRecord]()
    for note in (consumer_records.OUTAGE, consumer_records.HALT):
        for (app, _, name), entry in consumer_records.notes(entries, note):
            if (record := _read(entry)) and not record.over:
                ahead = entry.time - record.written  # the clock of the worker that wrote it may be wrong
                record = structs.replace(record, since=record.since + ahead, written=entry.time)
                for key in [(app, agent) for agent in record.agents or (name,)]:
                    found[key] = max(record, found.get(key, record), key=lambda each: each.written)
    return found


def key_of(app: str, agent: str, *, depends_on: str | None = None) -> str:
    """Return the key of the record of an agent's own breaker, or of what it depends on by this name."""
    kind, name = ("dependencies", depends_on) if depends_on else ("agents", agent)
    return consumer_records.note_key(app, kind, name, consumer_records.OUTAGE)


def halt_key(app: str, agent: str) -> str:
    return consumer_records.note_key(app, "agents", agent, consumer_records.HALT)


def _read(entry: Entry | None) -> OutageRecord | None:
    try:
        return read_json(entry.value, OutageRecord) if entry is not None and not entry.deleted else None
    except UndecodableError:
        return None  # none of ours
