"""How far each agent's durable consumer has come, recorded apart from the consumer, for when that is gone.

A consumer that was deleted leaves nothing behind, and one that is made in its place begins where the agent's `start`
says: with the whole stream, usually. So the workers of an app record it in a bucket, of an agent's two consumers, that
of its events and that of what is tried again: when they open them, when `shared_filters` looks which versions
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
from functools import partial
from itertools import chain
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, structs

from aviso_workers import clocks
from aviso_workers.backends import Admin, Backend, BulkKeyValue, ConsumerInfo
from aviso_workers.backends.buckets import open_existing
from aviso_workers.errors import BackendError, DeniedError, NotFoundError, UnreadableStreamError
from aviso_workers.jetstream.fields import Number, Seconds, Time
from aviso_workers.jetstream.key_value import Entry, KeyValue, record_of
from aviso_workers.jetstream.metadata import MAX_NOTED, FilterSubject
from aviso_workers.state import bucket_names
from aviso_workers.task_groups import asked_of_each

BUCKET = bucket_names.bucket_of("<app>", "state")
"""The bucket, as texts name it."""
FAILURE, RUN = NOTES = ("failure", "run")
"""What workers note for operators of an agent, a timer or a task, as the last part of its key."""
PAUSE = "pause"
"""What operators note for workers in the bucket of `orders`, as the last part of its key; `RUN` is noted there as
well."""
NO_KEY = re.compile(r"[^-_A-Za-z0-9]")
"""A character that a name may have and a key may not, as in `<lambda>`, the name of a task."""
KeptBy = Literal["state", "orders"]
"""Whose bucket of an app: that of its workers, or that of operators (`orders`)."""
AT_ONCE = 8
"""Of how many apps the buckets are read at the same time."""
STUCK_SECONDS = 300.0
"""What may be unfinished for so long, whatever the agent's policy."""


class ConsumerRecord(Struct, frozen=True, kw_only=True):
    """How far an agent's consumer had come when a worker last read it."""

    stream_created: Time
    """When the stream was created that the sequences are of."""
    ack_floor: Number
    """The stream sequence up to which everything is settled."""
    filter_subjects: Annotated[tuple[FilterSubject, ...], Meta(max_length=MAX_NOTED)]
    time: Time
    """When this was so, by the server's clock."""
    unfinished_since: Time | None = None
    """Since when the ack floor is this one while there is something to do; None where there is nothing."""
    longest_seconds: Seconds = STUCK_SECONDS
    """How long the agent's policy lets a notification be unfinished."""
    attempt_seconds: Seconds | None = None
    """How long it lets one attempt take; None where an operator's command wrote the record."""
    removed: bool = False
    """Whether an operator has removed the consumer since: then it is recreated at the agent's `start`."""

    def holds_for(self, stream_created: datetime | None) -> bool:
        """Return whether a missing consumer is to be made again after `ack_floor`, of a stream created at this time."""
        return self.stream_created == stream_created and not self.removed


def bucket_of(app: str) -> str:
    """Return the name of the app's bucket."""
    return bucket_names.bucket_of(app, "state")


async def bucket(backend: Backend, app: str) -> KeyValue:
    """Return the bucket of an app, created where it is missing. Raises `BackendError`."""
    return await backend.key_value(bucket_of(app), own=True)


async def create_bucket(backend: Backend, app: str) -> None:
    """Create the bucket where there is none, as the first thing that a worker creates. A server that cannot read its
    streams says so then, and what it erases is worth least: workers record it again. Who may not use the bucket has a
    role of an earlier version, or of another app, and could do a part of its work alone.

    Raises `UnreadableStreamError` and `DeniedError`; any other failure is that of the agents, who state it.
    """
    try:
        await bucket(backend, app)
    except DeniedError as error:
        raise DeniedError(
            f"{error}; the worker needs what `aviso-workers server render --role worker --app MODULE:APP` prints"
        ) from error
    except UnreadableStreamError:
        raise
    except BackendError:
        return


async def stored(admin: Admin) -> dict[tuple[str, str, str], ConsumerRecord]:
    """Return the records of all apps, by app, agent and stream. Raises `BackendError`."""
    return parsed(await entries(admin))


def parsed(entries: Iterable[Entry]) -> dict[tuple[str, str, str], ConsumerRecord]:
    """Return the records among the entries of the bucket, by app, agent and stream."""
    found = [(each.key.split("/"), record_of(each, ConsumerRecord)) for each in entries]
    return {(key[0], key[1], key[2]): record for key, record in found if record and len(key) == 3}


async def entries(admin: Admin, *, kind: KeptBy = "state") -> list[Entry]:
    """Return the entries of the buckets of all apps, in which `versions` and other modules keep theirs as well. An
    entry that speaks of another app than its bucket's is none. Raises `BackendError`.
    """
    apps = await bucket_names.apps_with(admin, kind)
    found = await asked_of_each(apps, partial(entries_of, admin, kind=kind), at_once=AT_ONCE)
    return list(chain.from_iterable(found.values()))


async def entries_of(backend: Backend, app: str, *, kind: KeptBy = "state") -> list[Entry]:
    """Return the entries of the bucket of one app; none where there is no bucket. Raises `BackendError`."""
    kept = await _existing(backend, app, kind)
    return [each for each in await kept.entries() if _app_of(each.key) == app] if kept is not None else []


async def time(backend: Backend, app: str) -> datetime:
    """Return the time by the clock of the server that leads the bucket of an app, which the store times of its records
    are by; our own where there is no bucket. Raises `BackendError`.
    """
    try:
        return (await backend.stream_info(f"KV_{bucket_of(app)}")).time
    except NotFoundError:
        return clocks.utc_now(backend.clock)


async def time_of_any(admin: Admin) -> datetime:
    """Return the time by the clock of a server that leads the bucket of some app; our own where there is none."""
    for app in (await bucket_names.apps_with(admin, "state"))[:1]:
        return await time(admin, app)
    return clocks.utc_now(admin.clock)


async def entry(backend: Backend, key: str, *, kind: KeptBy = "state") -> Entry | None:
    """Return the entry of a key; None where there is none, or no bucket. Raises `BackendError`."""
    kept = await _existing(backend, _app_of(key), kind)
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
    record = await _of_now(backend, stream, consumer.settled, consumer.config.filters)
    removed = msgspec.json.encode(structs.replace(record, removed=True))
    await (await bucket(backend, app)).put(key_of(app, agent, stream), removed)


async def remove(backend: Backend, *, app: str, agent: str, stream: str) -> None:
    """Forget that there was a consumer, because its agent is retired. Raises `BackendError`."""
    kept = await _existing(backend, app)
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
    found = await entries_of(backend, app)
    for note in NOTES:
        for (_, kind, name), each in notes(found, note):
            if not agent or (kind, name) == ("agents", agent):
                await (await bucket(backend, app)).delete(each.key)


async def rename(backend: Backend, record: ConsumerRecord, *, app: str, agent: str, stream: str) -> None:
    """Record for an agent how far the consumer of another one had come. Raises `BackendError`."""
    await (await bucket(backend, app)).put(key_of(app, agent, stream), msgspec.json.encode(record))


async def move(
    backend: Backend, *, app: str, agent: str, stream: str, ack_floor: int, filter_subjects: Iterable[str]
) -> None:
    """Record that a consumer was taken to another place, or goes on there when it is recreated. Where no worker has
    made the bucket, nothing is recorded. Raises `BackendError`.
    """
    kept = await _existing(backend, app)
    if kept is None:
        return
    moved = await _of_now(backend, stream, ack_floor, filter_subjects)
    await kept.put(key_of(app, agent, stream), msgspec.json.encode(moved))


async def _of_now(backend: Backend, stream: str, ack_floor: int, filter_subjects: Iterable[str]) -> ConsumerRecord:
    info = await backend.stream_info(stream)
    return ConsumerRecord(
        stream_created=info.created or info.time,
        ack_floor=ack_floor,
        filter_subjects=tuple(filter_subjects),
        time=info.time,
    )


async def _existing(backend: Backend, app: str, kind: KeptBy = "state") -> BulkKeyValue | None:
    return await open_existing(backend, bucket_names.bucket_of(app, kind), own=True)


def _app_of(key: str) -> str:
    return key.partition("/")[0]


async def read(backend: Backend, key: str) -> ConsumerRecord | None:
    """Return the record of this key; None where there is none."""
    return record_of(await entry(backend, key), ConsumerRecord)


def versions_key(app: str, agent: str, stream: str) -> str:
    """Return the key under which `versions` are registered in the bucket."""
    return f"{key_of(app, agent, stream)}/versions"


def note_key(app: str, kind: str, name: str, note: str) -> str:
    return f"{app}/{kind}/{NO_KEY.sub('_', name)}/{note}"


def key_of(app: str, agent: str, stream: str) -> str:
    return f"{app}/{agent}/{stream}"
