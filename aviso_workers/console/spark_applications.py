"""Spark applications, as the notifications of the event type `spark_job` tell of them."""

from __future__ import annotations

from contextlib import aclosing, suppress
from datetime import datetime

from msgspec import Struct

from aviso_workers.aviso.codec import NotificationReader, store_time
from aviso_workers.backends import Admin
from aviso_workers.config import Config
from aviso_workers.errors import AvisoWorkersError
from aviso_workers.ops import aviso_admin, inventory
from aviso_workers.spark.job_events import EVENT_TYPE

FIELDS = ("cluster", "application", "kind", "event")
READ = 5000
"""The newest notifications that are read."""


class SparkRun(Struct, kw_only=True):
    """A Spark application, as far as the notifications that were read tell of it."""

    cluster: str
    application: str
    name: str = ""
    began: datetime | None = None
    heard: datetime
    """When the newest notification of it was stored."""
    state: str = "running"
    """`running`, `lost`, or how it has ended."""
    begun: dict[str, int] = {}
    """How many jobs, stages and so on have begun, by kind."""
    failed: dict[str, int] = {}
    """How many of them have failed."""
    notifications: int = 0
    first: int = 0
    """The sequence of its first notification."""
    last: int


async def newest(admin: Admin, config: Config) -> tuple[list[SparkRun], str]:
    """Return the applications in the newest notifications, the latest first, and their stream; no stream where the
    event type is not configured, or nothing was ever published.

    Raises `BackendError`.
    """
    if EVENT_TYPE not in config.notification_schema:
        return [], ""
    stream = aviso_admin.stream_of(config, EVENT_TYPE)
    info = await inventory.existing(admin.stream_info(stream))
    if info is None:
        return [], ""
    reader = NotificationReader(EVENT_TYPE, config.notification_schema[EVENT_TYPE])
    runs: dict[tuple[str, str], SparkRun] = {}
    first = max(info.first_sequence, info.last_sequence - READ + 1)
    reading = admin.read(stream, filter_subjects=(), start_sequence=first, last_sequence=info.last_sequence)
    async with aclosing(reading):
        async for message in reading:
            with suppress(AvisoWorkersError):  # one that cannot be read is the dead letter of whoever reads it
                if (found := reader.notification(message)) is not None:
                    payload = found.payload if isinstance(found.payload, dict) else {}
                    _add(runs, dict(found.identifier), payload, store_time(message), message.sequence)
    return sorted(runs.values(), key=lambda run: -run.last), stream


def _add(
    runs: dict[tuple[str, str], SparkRun],
    identifier: dict[str, str],
    payload: dict[str, object],
    time: datetime,
    sequence: int,
) -> None:
    cluster, application, kind, event = (identifier[field] for field in FIELDS)
    run = runs.get((cluster, application))
    if run is None:
        run = SparkRun(cluster=cluster, application=application, heard=time, first=sequence, last=sequence)
        runs[cluster, application] = run
    run.heard, run.last = time, sequence
    run.notifications += 1
    status = str(payload.get("status", ""))
    if kind == "application":
        _add_own(run, event, status, payload, time)
    elif event == "start":
        run.begun[kind] = run.begun.get(kind, 0) + 1
    elif event == "end" and status == "failed":
        run.failed[kind] = run.failed.get(kind, 0) + 1


def _add_own(run: SparkRun, event: str, status: str, payload: dict[str, object], time: datetime) -> None:
    """Take an event of the application itself."""
    if event == "start":
        run.name, run.began = str(payload.get("name", "")), time
    run.state = {"start": "running", "resumed": "running", "lost": "lost"}.get(event, status or "ended")
