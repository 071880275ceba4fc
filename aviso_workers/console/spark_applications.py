"""Spark applications, as the notifications of the event type `spark_job` tell of them."""

from __future__ import annotations

from collections import Counter
from contextlib import aclosing, suppress
from datetime import datetime
from typing import Any

from msgspec import Struct, field

from aviso_workers.aviso.codec import Message, NotificationReader, store_time
from aviso_workers.aviso.notifications import Notification
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
    begun: Counter[str] = field(default_factory=Counter)
    """How many jobs, stages and so on have begun, by kind."""
    failed: Counter[str] = field(default_factory=Counter)
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
                    _add(runs, found, message)
    return sorted(runs.values(), key=lambda run: -run.last), stream


def _add(runs: dict[tuple[str, str], SparkRun], found: Notification[Any], message: Message) -> None:
    payload = found.payload if isinstance(found.payload, dict) else {}
    status, time, sequence = str(payload.get("status", "")), store_time(message), message.sequence
    cluster, application, kind, event = (found.identifier[field] for field in FIELDS)
    new = SparkRun(cluster=cluster, application=application, heard=time, first=sequence, last=sequence)
    run = runs.setdefault((cluster, application), new)
    run.heard, run.last = time, sequence
    run.notifications += 1
    if kind == "application":
        if event == "start":
            run.name, run.began = str(payload.get("name", "")), time
        run.state = {"start": "running", "resumed": "running", "lost": "lost"}.get(event, status or "ended")
    elif event == "start":
        run.begun[kind] += 1
    elif event == "end" and status == "failed":
        run.failed[kind] += 1
