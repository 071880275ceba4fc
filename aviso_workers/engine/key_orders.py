"""In which order the subjects of a stream have the values of an identifier, recorded beside the stream.

A subject has values and no names: `mars.od.6` is `class=od step=6` or, with another `key_order`, `class=6 step=od`. So
the workers of all apps record the order with which they read a stream. A worker whose event type has another one does
not read the stream while it has notifications: it would handle each of them as another one, and ack it.
"""

from __future__ import annotations

from datetime import datetime

import msgspec
from msgspec import Struct

from aviso_workers.aviso.codec import read_json
from aviso_workers.backends import Backend
from aviso_workers.engine import consumer_records
from aviso_workers.errors import BackendError, ConflictError, RefusedError, UndecodableError

__all__ = ["require_same"]


class _Order(Struct, frozen=True, kw_only=True):
    stream_created: datetime
    key_order: tuple[str, ...]


async def require_same(backend: Backend, stream: str, event_type: str, key_order: tuple[str, ...]) -> None:
    """Record the order with which a stream is read, or compare it with the recorded one. A stream without messages is
    read with any order.

    Where the order cannot be recorded, nothing is compared: what is missing then is said by `consumer_records`. Raises
    `RefusedError` for another order, `NotFoundError` where the stream does not exist.
    """
    info = await backend.stream_info(stream)
    own = _Order(stream_created=info.created or info.time, key_order=key_order)
    try:
        recorded = await _recorded(backend, stream, own, replaces=not info.messages)
    except BackendError:
        return
    if recorded.key_order != key_order:
        raise RefusedError(
            f"event type {event_type} has key_order {', '.join(key_order)}, and the {info.messages} notifications of "
            f"stream {stream} were stored with {', '.join(recorded.key_order)}: they would be read as other ones. Take "
            f"the former key_order back, or give the event type another topic.base; with the same base, stop all "
            f"programs that publish to it, wait until stream {stream} has no messages, or purge it, and start again"
        )


async def _recorded(backend: Backend, stream: str, own: _Order, *, replaces: bool) -> _Order:
    """Return the recorded order of the stream, which is this one where there was none, or it `replaces` the other."""
    bucket = await backend.key_value(consumer_records.BUCKET)
    while True:
        entry = await bucket.get(key := f"streams/{stream}")
        found = _read(entry.value) if entry else None
        same_stream = found is not None and found.stream_created == own.stream_created
        if found is not None and same_stream and (found.key_order == own.key_order or not replaces):
            return found
        try:
            await bucket.put(key, msgspec.json.encode(own), revision=entry.revision if entry else 0)
        except ConflictError:
            continue
        return own


def _read(value: bytes) -> _Order | None:
    try:
        return read_json(value, _Order)
    except UndecodableError:
        return None
