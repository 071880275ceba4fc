"""In which order the subjects of a stream have the values of an identifier, recorded beside the stream.

A subject has values and no names: `mars.od.6` is `class=od step=6` or, with another `key_order`, `class=6 step=od`. So
the workers of all apps record the order with which they read a stream. A worker whose event type has another one does
not read the stream while it has notifications, other workers read it, or it has delayed notifications or dead letters:
one of the two would handle each of them as another one, and ack it.
"""

from __future__ import annotations

from contextlib import aclosing, suppress
from datetime import datetime

from msgspec import Struct

from aviso_workers.aviso.codec import read_json
from aviso_workers.backends import Backend
from aviso_workers.declare.agents import durable_name
from aviso_workers.errors import BackendError, NotFoundError, RefusedError, UndecodableError
from aviso_workers.jetstream import key_value
from aviso_workers.jetstream.key_value import Entry
from aviso_workers.state import consumer_records, delayed_messages
from aviso_workers.state.own_streams import DEAD_LETTERS, DELAYED, RETRIES

__all__ = ["require_same"]


class _Order(Struct, frozen=True, kw_only=True):
    stream_created: datetime
    key_order: tuple[str, ...]


async def require_same(backend: Backend, stream: str, event_type: str, key_order: tuple[str, ...]) -> None:
    """Record the order with which a stream is read, or compare it with the recorded one. A stream without messages is
    read with any order, unless workers still read it with another one, or it has delayed notifications or dead letters.

    Where the order cannot be recorded, nothing is compared: what is missing then is said by `consumer_records`. Raises
    `RefusedError` for another order, `NotFoundError` where the stream does not exist.
    """
    info = await backend.stream_info(stream)
    own = _Order(stream_created=info.created or info.time, key_order=key_order)
    stored = f"the {info.messages} notifications of stream {stream} were stored with" if info.messages else ""
    try:
        recorded, why = await _recorded(backend, stream, own, stored=stored)
    except BackendError:
        return
    if why:
        raise RefusedError(
            f"event type {event_type} has key_order {', '.join(key_order)}, and {why} {', '.join(recorded.key_order)}: "
            f"they would be read as other ones. Take the former key_order back, or give the event type another "
            f"topic.base; with the same base, stop all programs that publish to it or read it, wait until stream "
            f"{stream} has no messages and no delayed ones wait for it, or purge it and cancel them; drop its "
            f"dead letters; and start again"
        )


async def _recorded(backend: Backend, stream: str, own: _Order, *, stored: str) -> tuple[_Order, str]:
    """Return the recorded order of the stream, and why it cannot be replaced: what is `stored` with it, or uses it.
    Where it is this one, or was replaced by this one, there is no reason.
    """
    bucket, key = await consumer_records.bucket(backend), f"streams/{stream}"
    while True:
        found = _read(await bucket.get(key))
        if found is not None and found.stream_created == own.stream_created:
            if found.key_order == own.key_order:
                return found, ""
            if why := stored or await _used(backend, stream):
                return found, why

        def replaced(now: _Order | None, expected: _Order | None = found) -> _Order | None:
            return own if now == expected else now

        _, recorded = await key_value.compare_and_set(bucket, key, read=_read, change=replaced)
        if recorded == own:
            return own, ""


async def _used(backend: Backend, stream: str) -> str:
    """Return who uses the recorded order of an empty stream, for people; empty where nobody does."""
    with suppress(NotFoundError):
        waiting = delayed_messages.all_waiting(stream)
        if count := await backend.count(DELAYED, filter_subjects=waiting):
            return f"{count} delayed notifications wait for stream {stream} with"
    if await _has_dead_letters(backend, stream):
        return f"dead letters, which may be retried, are of stream {stream} with"
    for app, agent, of in await consumer_records.stored(backend):
        if of != stream:
            continue
        with suppress(NotFoundError):
            if (await backend.consumer_info(stream, durable_name(app, agent))).num_waiting:
                return f"workers of agent {agent} of app {app} read stream {stream} with"
        with suppress(NotFoundError):
            retries = await backend.consumer_info(RETRIES, durable_name(app, agent))
            if retries.num_pending or retries.num_ack_pending:
                return f"retried dead letters of agent {agent} of app {app} are of stream {stream} with"
    return ""


async def _has_dead_letters(backend: Backend, stream: str) -> bool:
    try:
        info = await backend.stream_info(DEAD_LETTERS)
    except NotFoundError:
        return False
    if not info.messages:
        return False
    reading = backend.read(DEAD_LETTERS, filter_subjects=(), last_sequence=info.last_sequence)
    async with aclosing(reading):
        async for message in reading:
            if (message.headers or {}).get("Aviso-Stream") == stream:
                return True
    return False


def _read(entry: Entry | None) -> _Order | None:
    try:
        return read_json(entry.value, _Order) if entry else None
    except UndecodableError:
        return None
