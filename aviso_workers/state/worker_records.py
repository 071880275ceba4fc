"""The worker processes that live, as each of them has said of itself: where it runs, what it handles, and what hinders
it; and those that were killed or cut off within a day.

Each app has them in a bucket. A worker puts its record again and again (`sessions.worker_recorder`), and says so when
it ends in order. So one that says nothing for `LIVES_SECONDS` was killed, or cut off from the servers; the bucket
forgets each after a day. Nothing depends on it: a worker without the right works as ever, and is not listed.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated

from msgspec import Meta, Struct, structs

from aviso_workers.aviso.codec import read_json
from aviso_workers.backends import Admin, Entry
from aviso_workers.backends.buckets import open_existing
from aviso_workers.errors import UndecodableError
from aviso_workers.jetstream.fields import Number, Said, Seconds, Time
from aviso_workers.state import bucket_names

WRITE_SECONDS = 30.0
LIVES_SECONDS = 3 * WRITE_SECONDS
"""A worker that has said nothing for so long does not live any more."""
TTL_SECONDS = 86_400.0
MOST_HINDRANCES = 1000


class AtWork(Struct, frozen=True, kw_only=True):
    """What a worker handles of one agent."""

    stream: str
    in_flight: Number
    """Notifications whose handling has begun and not ended."""
    at_once: Number
    """As many as calls at once can take."""
    pinned: bool | None = None
    """Whether the server gives everything to this worker; None of an agent that is no singleton."""
    oldest: Number | None = None
    """The sequence of the oldest notification that it holds; None where it holds none."""
    waits_for: Said = ""
    """What that one waits for, such as `a limit`; empty where it runs, or begins in its turn."""
    away: Said = ""
    """The error that says that what the agent depends on is away; empty where nothing is."""
    away_seconds: Seconds = 0.0
    """For how long it was away when this was put."""
    shut_seconds: Seconds | None = None
    """For how long calls have begun only now and then, because they fail; None where that is not so."""


class Hindered(Struct, frozen=True, kw_only=True):
    """What keeps a worker from being ready, as `/readyz` says it."""

    agent: str
    """Whose work it hinders; empty where it is not that of a single agent."""
    text: Said
    seconds: Seconds
    """For how long it was so when this was put."""


class WorkerRecord(Struct, frozen=True, kw_only=True):
    """A worker process."""

    host: str
    process: Number
    """Its process id."""
    member: str
    """Its name in its fleet; empty where it is in none."""
    version: str
    """Of aviso-workers."""
    code: Said = ""
    """Which code of its app it runs, as `declarations.code_version` returns it; empty where that is not known."""
    started: Time
    """By the server's clock, as `of_app` returns it; in the bucket by the worker's own."""
    age_seconds: float
    """How long before it was put the worker has started."""
    said: Time | None = None
    """When it was put, by the server's clock, as `of_app` returns it."""
    rss: Number | None = None
    """Bytes of memory that are resident; None where the system does not say it."""
    agents: dict[str, AtWork]
    hindrances: Annotated[tuple[Hindered, ...], Meta(max_length=MOST_HINDRANCES)] | None = None
    """None of a worker of an older version, which does not say this, nor what the oldest that it holds waits for."""
    timers: tuple[str, ...] | None = None
    """The timers that it runs while it leads, or always; None of a worker of an older version."""
    ended: bool = False
    """Whether it has ended in order. It then says nothing of its agents."""
    key: str = ""
    """Its key in the bucket, as `of_app` returns it."""

    @property
    def name(self) -> str:
        return self.member or f"{self.host}/{self.process}"

    def since(self, seconds: float) -> datetime:
        """Return when something began, by the server's clock, that was so for so long when this was put."""
        return (self.said or self.started) - timedelta(seconds=seconds)


class AppWorkers(Struct, frozen=True):
    """The workers of an app that have recorded themselves."""

    living: tuple[WorkerRecord, ...] = ()
    lost: tuple[WorkerRecord, ...] = ()
    """Those that were killed or cut off."""
    ended: tuple[WorkerRecord, ...] = ()
    """Those that have ended in order within a day."""


def bucket_of(app: str) -> str:
    """Return the bucket of the workers of an app."""
    return bucket_names.bucket_of(app, "live")


async def of_app(admin: Admin, app: str) -> AppWorkers:
    """Return the workers of an app. Raises `BackendError`."""
    bucket = await open_existing(admin, bucket_of(app), ttl_seconds=TTL_SECONDS, own=True)
    if bucket is None:
        return AppWorkers()
    now = await bucket.time()
    entries = sorted(await bucket.entries(), key=lambda each: each.key)
    found = [((now - each.time).total_seconds(), record) for each in entries if (record := _read(each)) is not None]
    return AppWorkers(
        living=tuple(each for silent, each in found if silent <= LIVES_SECONDS and not each.ended),
        # Somebody else may have made the bucket, without an age.
        lost=tuple(each for silent, each in found if LIVES_SECONDS < silent <= TTL_SECONDS and not each.ended),
        ended=tuple(each for _, each in found if each.ended),
    )


def _read(entry: Entry) -> WorkerRecord | None:
    try:
        record = read_json(entry.value, WorkerRecord)
        started = entry.time - timedelta(seconds=record.age_seconds)
    except (UndecodableError, OverflowError):
        return None  # of a version that writes another one, or not ours
    return structs.replace(record, said=entry.time, started=started, key=entry.key)
