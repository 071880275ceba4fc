"""The stored notifications that have some values of an identifier, the newest first."""

from __future__ import annotations

from collections import deque
from contextlib import aclosing
from datetime import datetime

from msgspec import Struct

from aviso_workers.aviso import topics
from aviso_workers.aviso.codec import store_time
from aviso_workers.aviso.notifications import parse_pairs
from aviso_workers.aviso.schema import parse_where
from aviso_workers.backends import Admin
from aviso_workers.config import Config
from aviso_workers.errors import InvalidNotificationError
from aviso_workers.ops import aviso_admin, inventory

SHOWN = 20


class FoundNotification(Struct, frozen=True, kw_only=True):
    name: str
    """Such as `MARS@4711`."""
    time: datetime
    """When it was stored."""
    subject: str


class Search(Struct, frozen=True, kw_only=True):
    """What has the values."""

    count: int
    """How many are stored."""
    newest: list[FoundNotification]
    """Some of them, the newest first."""


async def search(admin: Admin, config: Config, asked: str) -> Search:
    """Return the notifications of an event type and values of its identifier, such as `mars class=od step=12`.

    Raises `UnknownEventTypeError`, `InvalidNotificationError` where the values are none of it, and `BackendError`.
    """
    event_type, *pairs = asked.split()
    event_type = aviso_admin.event_type_of(config, event_type)
    where = parse_where(event_type, config.notification_schema[event_type], parse_pairs(pairs))
    if where.place is not None:
        raise InvalidNotificationError("the console looks for the keys of a topic: `aviso-workers replay` finds places")
    filters = topics.filter_subjects(where)
    stream = aviso_admin.stream_of(config, event_type)
    info = await admin.stream_info(stream)
    begin = await inventory.start_of_newest(admin, stream, info, filters, SHOWN)
    newest = deque[FoundNotification](maxlen=SHOWN)
    last = (await admin.stream_info(stream)).last_sequence  # those that have come meanwhile were counted too
    messages = admin.read(stream, filter_subjects=filters, start_sequence=begin, last_sequence=last)
    async with aclosing(messages):
        async for each in messages:
            name = f"{stream}@{each.sequence}"
            newest.append(FoundNotification(name=name, time=store_time(each), subject=each.subject))
    count = await admin.count(stream, filter_subjects=filters)
    return Search(count=count, newest=[*reversed(newest)])
