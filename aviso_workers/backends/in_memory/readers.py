"""Reading a stream without acks, in order: for replay and watch. And counting what could be read."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime, timedelta

import anyio
from anyio.lowlevel import checkpoint

from aviso_workers.aviso.codec import Message
from aviso_workers.backends.in_memory.account import InMemoryAccount
from aviso_workers.backends.in_memory.connection import InMemoryConnection
from aviso_workers.backends.in_memory.stream import InMemoryStream
from aviso_workers.errors import UnavailableError
from aviso_workers.jetstream.subjects import pattern

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


async def read(
    account: InMemoryAccount,
    connection: InMemoryConnection,
    stream: str,
    *,
    filter_subjects: Sequence[str],
    start_sequence: int,
    start_time: datetime | None,
    last_sequence: int | None,
) -> AsyncGenerator[Message, None]:
    """See `backends.Backend.read`. Raises `UnavailableError` where the connection was lost meanwhile."""
    await connection.reach()
    opened, losses = account.stream(stream), connection.losses
    wanted = pattern(filter_subjects)
    position, start_ns = _start(start_sequence, start_time)
    changed = anyio.Event()

    def wake() -> None:
        changed.set()

    opened.watchers.add(wake)
    connection.watchers.add(wake)
    try:
        while True:
            changed = anyio.Event()
            if connection.losses > losses:
                raise UnavailableError(f"in_memory: the connection was lost while reading {stream}")
            held = account.stream(stream)
            if held is not opened:
                raise UnavailableError(f"in_memory: {stream} was deleted and recreated while it was read")
            message = held.next_message(position, wanted)
            if message is None and last_sequence is None:
                position = max(position, held.last_sequence + 1)
                await changed.wait()
                continue
            if message is None or (last_sequence is not None and message.sequence > last_sequence):
                return
            position = message.sequence + 1
            if message.timestamp_ns >= start_ns:
                await checkpoint()
                yield message
    finally:
        opened.watchers.discard(wake)
        connection.watchers.discard(wake)


def count(
    stream: InMemoryStream, filter_subjects: Sequence[str], *, start_sequence: int, start_time: datetime | None
) -> int:
    """Return how many messages a reading from there would give now."""
    wanted = pattern(filter_subjects)
    position, start_ns = _start(start_sequence, start_time)
    return sum(
        1
        for message in stream.messages.values()
        if message.sequence >= position and message.timestamp_ns >= start_ns and wanted.fullmatch(message.subject)
    )


def _start(sequence: int, time: datetime | None) -> tuple[int, int]:
    """Return the first sequence and the first time, in nanoseconds, that are wanted."""
    return (sequence, 0) if time is None else (1, (time - EPOCH) // timedelta(microseconds=1) * 1000)
