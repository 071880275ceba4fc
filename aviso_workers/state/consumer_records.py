"""How far each agent's durable consumer has come, recorded apart from the consumer, for when that is gone.

A consumer that was deleted leaves nothing behind, and one that is made in its place begins where the agent's `start`
says: with the whole stream, usually. So the workers of all apps record it in one bucket, of an agent's two consumers,
that of its events and that of what is tried again: when they open them, when `shared_filters` looks which versions
there are, and when they stop. Where a consumer is missing, it is recreated and begins after what was settled. The same
record says since when the oldest notification of the agent is unfinished, which a server does not tell.
`ops.agent_inventory` reads the records for operators.

`agents rm` removes consumer and record, and cannot see a worker that is frozen or cut off from the server. When such a
worker goes on, it creates its consumer again after what it has last seen settled.

A record belongs to one stream. Where the stream was deleted and recreated, its sequences count other notifications.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import datetime

import msgspec
from msgspec import Struct

from aviso_workers import clocks
from aviso_workers.aviso.codec import read_json
from aviso_workers.backends import Backend, ConsumerInfo
from aviso_workers.backends.buckets import open_existing
from aviso_workers.errors import (
    BackendError,
    NotFoundError,
    UndecodableError,
    UnreadableStreamError,
)
from aviso_workers.jetstream.key_value import Entry, KeyValue
from aviso_workers.state.kept import Kept

__all__ = [
    "BUCKET",
    "FAILURE",
    "KEPT",
    "NOTES",
    "PAUSE",
    "RUN",
    "STUCK_SECONDS",
    "ConsumerRecord",
    "alive",
    "bucket",
    "create_bucket",
    "entries",
    "entry",
    "mark_removed",
    "move",
    "note_key",
    "notes",
    "parsed",
    "remove",
    "remove_notes",
    "rename",
    "stored",
    "time",
    "versions_key",
]

BUCKET = "aviso_workers_consumers"
KEPT = (
    Kept(
        bucket=BUCKET,
        key="<app>/<agent>/<stream>",
        holds="how far the consumer of an agent has come (`ConsumerRecord`)",
        until="until `agents rm`",
    ),
    Kept(
        bucket=BUCKET,
        key="streams/<stream>",
        holds="the key order with which the stream is read (`engine.key_orders`)",
        until="for ever",
    ),
)
FAILURE, PAUSE, RUN = NOTES = ("failure", "pause", "run")
"""What workers note for operators of an agent, a timer or a task, or (the last two) the other way round, as the last
part of its key."""
NO_KEY = re.compile(r"[^-_A-Za-z0-9]")
"""What a key of a bucket cannot have, as the name of a task that is a lambda."""
STUCK_SECONDS = 300.0
"""What may be unfinished for so long, whatever the agent's policy."""


class ConsumerRecord(Struct, frozen=True, kw_only=True):
    """How far an agent's consumer had come when a worker last read it."""

    stream_created: datetime
    """When the stream was created that the sequences are of."""
    ack_floor: int
    """The stream sequence up to which everything is settled."""
    filter_subjects: tuple[str, ...]
    time: datetime
    """When this was so, by the server's clock."""
    unfinished_since: datetime | None = None
    """Since when the ack floor is this one while there is something to do; None where there is nothing."""
    longest_seconds: float = STUCK_SECONDS
    """How long the agent's policy lets a notification be unfinished."""
    attempt_seconds: float | None = None
    """How long it lets one attempt take; None where an operator's command wrote the record."""
    removed: bool = False
    """Whether an operator has removed the consumer since: then it is recreated at the agent's `start`."""

    def holds_for(self, stream_created: datetime | None) -> bool:
        """Return whether a missing consumer is to be made again after `ack_floor`, of a stream created at this time."""
        return self.stream_created == stream_created and not self.removed


async def bucket(backend: Backend) -> KeyValue:
    """Return the bucket, created where it is missing. Raises `BackendError`."""
    return await backend.key_value(BUCKET, own=True)


async def create_bucket(backend: Backend) -> None:
    """Create the bucket where there is none, as the first thing that a worker creates. A server that cannot read its
    streams says so then, and what it erases is worth least: workers record it again.

    Raises `UnreadableStreamError`; any other failure is that of the agents, who state it.
    """
    try:
        await bucket(backend)
    except UnreadableStreamError:
        raise
    except BackendError:
        return


async def stored(backend: Backend) -> dict[tuple[str, str, str], ConsumerRecord]:
    """Return all records, by app, agent and stream. Raises `BackendError`."""
    return parsed(await entries(backend))


def parsed(entries: Iterable[Entry]) -> dict[tuple[str, str, str], ConsumerRecord]:
    """Return the records among the entries of the bucket, by app, agent and stream."""
    found = [(each.key.split("/"), _read(each.value)) for each in entries]
    return {(key[0], key[1], key[2]): record for key, record in found if record and len(key) == 3}


async def entries(backend: Backend) -> list[Entry]:
    """Return all entries of the bucket, which `versions` and other modules keep theirs in as well; none where there is
    no bucket. Raises `BackendError`.
    """
    kept = await _existing(backend)
    return await kept.entries() if kept is not None else []


async def time(backend: Backend) -> datetime:
    """Return the time by the clock of the server that leads the bucket, which the store times of records are by; our
    own where there is no bucket. Raises `BackendError`.
    """
    try:
        return (await backend.stream_info(f"KV_{BUCKET}")).time
    except NotFoundError:
        return clocks.utc_now(backend.clock)


async def entry(backend: Backend, key: str) -> Entry | None:
    """Return the entry of a key; None where there is none, or no bucket. Raises `BackendError`."""
    kept = await _existing(backend)
    return await kept.get(key) if kept is not None else None


async def alive(backend: Backend, *, app: str, agent: str, stream: str) -> ConsumerRecord | None:
    """Return the record of an agent's consumer; None where there is none, it is of another stream of that name, or an
    operator has removed the consumer. Raises `BackendError`.
    """
    record = await read(backend, key_of(app, agent, stream))
    info = await backend.stream_info(stream)
    return record if record and record.holds_for(info.created or info.time) else None


async def mark_removed(backend: Backend, *, app: str, agent: str, stream: str, consumer: ConsumerInfo) -> None:
    """Record that an operator has removed the consumer, and how far it had come. Raises `BackendError`."""
    info = await backend.stream_info(stream)
    record = ConsumerRecord(
        stream_created=info.created or info.time,
        ack_floor=consumer.settled,
        filter_subjects=tuple(consumer.config.filters),
        time=info.time,
        removed=True,
    )
    await (await bucket(backend)).put(key_of(app, agent, stream), msgspec.json.encode(record))


async def remove(backend: Backend, *, app: str, agent: str, stream: str) -> None:
    """Forget that there was a consumer, because its agent is retired. Raises `BackendError`."""
    kept = await _existing(backend)
    if kept is None:
        return
    for key in (key_of(app, agent, stream), versions_key(app, agent, stream)):
        if await kept.newest(key) is not None:
            await kept.delete(key)


def notes(entries: Iterable[Entry], note: str) -> Iterator[tuple[tuple[str, str, str], Entry]]:
    """Return the entries of the bucket that are of this one of `NOTES`, each after its app, kind and name."""
    for each in entries:
        app, *key = each.key.split("/")
        if len(key) == 3 and key[2] == note:
            yield (app, key[0], key[1]), each


async def remove_notes(backend: Backend, *, app: str, agent: str = "") -> None:
    """Forget what workers have noted of an agent, or of everything of the app, because it is retired. Raises
    `BackendError`.
    """
    found = await entries(backend)
    for note in NOTES:
        for (owner, kind, name), each in notes(found, note):
            if owner == app and (not agent or (kind, name) == ("agents", agent)):
                await (await bucket(backend)).delete(each.key)


async def rename(backend: Backend, record: ConsumerRecord, *, app: str, agent: str, stream: str) -> None:
    """Record for an agent how far the consumer of another one had come. Raises `BackendError`."""
    await (await bucket(backend)).put(key_of(app, agent, stream), msgspec.json.encode(record))


async def move(
    backend: Backend, *, app: str, agent: str, stream: str, ack_floor: int, filter_subjects: Iterable[str]
) -> None:
    """Record that a consumer was taken to another place, or goes on there when it is recreated. Where no worker has
    made the bucket, nothing is recorded. Raises `BackendError`.
    """
    kept = await _existing(backend)
    if kept is None:
        return
    info = await backend.stream_info(stream)
    moved = ConsumerRecord(
        stream_created=info.created or info.time,
        ack_floor=ack_floor,
        filter_subjects=tuple(filter_subjects),
        time=info.time,
    )
    await kept.put(key_of(app, agent, stream), msgspec.json.encode(moved))


async def _existing(backend: Backend) -> KeyValue | None:
    return await open_existing(backend, BUCKET, own=True)


async def read(backend: Backend, key: str) -> ConsumerRecord | None:
    """Return the record of this key; None where there is none."""
    found = await entry(backend, key)
    return _read(found.value) if found else None


def versions_key(app: str, agent: str, stream: str) -> str:
    """Return the key under which `versions` are registered in `BUCKET`."""
    return f"{key_of(app, agent, stream)}/versions"


def note_key(app: str, kind: str, name: str, note: str) -> str:
    return f"{app}/{kind}/{NO_KEY.sub('_', name)}/{note}"


def key_of(app: str, agent: str, stream: str) -> str:
    return f"{app}/{agent}/{stream}"


def _read(value: bytes) -> ConsumerRecord | None:
    try:
        return read_json(value, ConsumerRecord)
    except UndecodableError:
        return None  # of a version that writes another one, or not ours
