"""Emptying streams and deleting single notifications, as an aviso-server's admin interface does.

Only streams of configured event types are touched: never KV buckets, dead letters or anybody else's. Configuration
and consumers stay, and the sequence goes on counting.
"""

from __future__ import annotations

from collections.abc import Sequence

from aviso_workers.aviso import schema, topics
from aviso_workers.aviso.positions import parse_id
from aviso_workers.backends import Admin
from aviso_workers.config import Config
from aviso_workers.errors import InvalidPositionError, NotFoundError, UnknownEventTypeError
from aviso_workers.ops import inventory, maintenance
from aviso_workers.ops.inventory import StoredMessage

__all__ = ["delete", "event_streams", "event_type_of", "find", "stream_of", "wipe"]


async def event_streams(admin: Admin, config: Config) -> dict[str, int]:
    """Return the existing streams of configured event types, with the number of messages in each."""
    found: dict[str, int] = {}
    for name in config.notification_schema:
        stream = stream_of(config, name)
        try:
            found[stream] = (await admin.stream_info(stream)).messages
        except NotFoundError:
            continue
    return found


async def wipe(admin: Admin, streams: Sequence[str]) -> dict[str, int]:
    """Remove all messages of these streams; returns how many went from each.

    Raises `NotFoundError`, and `RefusedError` where one of them refuses purges; then none was touched.
    """
    for stream in streams:
        maintenance.check_purge_allowed((await admin.stream_info(stream)).config)
    return {stream: await admin.purge_stream(stream) for stream in streams}


async def find(admin: Admin, config: Config, notification: str) -> StoredMessage:
    """Return one notification as it is stored, named `<event type>@<sequence>` (or by its base or stream).

    Raises `InvalidPositionError` where the name says nothing, `UnknownEventTypeError`, and `NotFoundError` where the
    stream or the notification does not exist.
    """
    stream, sequence = _position(config, notification)
    return await inventory.message(admin, stream, sequence=sequence)


async def delete(admin: Admin, config: Config, notification: str) -> None:
    """Delete one notification. Named, and raises, as `find`."""
    stream, sequence = _position(config, notification)
    await admin.delete_message(stream, sequence)


def _position(config: Config, notification: str) -> tuple[str, int]:
    event_type, at, sequence = notification.strip().partition("@")
    if not (event_type and at and sequence):
        raise InvalidPositionError(f"{notification!r} is not <event type>@<sequence>, such as mars@42")
    number = parse_id(sequence, name="the sequence")
    if number == 0:
        raise InvalidPositionError("the sequence must be 1 or more, found 0")
    return stream_of(config, event_type), number


def stream_of(config: Config, name: str) -> str:
    """Return the stream of an event type; see `event_type_of`."""
    found = event_type_of(config, name)
    return topics.stream_name(schema.topic_of(found, config.notification_schema[found]).base)


def event_type_of(config: Config, name: str) -> str:
    """Return an event type, which may also be called by its base or its stream's name, in any case.

    Raises `UnknownEventTypeError`.
    """
    event_types = config.notification_schema
    if name in event_types:
        return name
    for key, event_type in event_types.items():
        if name.lower() in (key.lower(), schema.topic_of(key, event_type).base.lower()):
            return key
    raise UnknownEventTypeError(name, event_types)
