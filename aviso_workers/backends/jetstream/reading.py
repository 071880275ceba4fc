"""Reading a stream without acks, in order: for replay and watch. And counting what could be read.

An ephemeral consumer of our own, read ahead of the caller by a bounded buffer. When it cannot go on it raises; the
engine opens the next one after the last sequence that was seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import anyio

from aviso_workers.backends.jetstream.connection import Connection
from aviso_workers.backends.jetstream.pulling import HEARTBEAT_SECONDS, PullSubscription, Received
from aviso_workers.codec import Message, store_time
from aviso_workers.errors import BackendError, UnavailableError

__all__ = ["count", "read", "read_chunks"]

BUFFER = 1000
CHUNK = 5000
CHUNK_BYTES = 4 * 1024 * 1024
INACTIVE_SECONDS = 60
"""After this long without a pull the server removes the consumer: longer than any heartbeat, short for a crash."""
SECOND = 1_000_000_000


async def read(
    connection: Connection,
    stream: str,
    *,
    filter_subjects: Sequence[str],
    start_sequence: int,
    start_time: datetime | None,
    last_sequence: int | None,
) -> AsyncGenerator[Message, None]:
    """See `backends.Backend.read`."""
    start: dict[str, Any] = {"deliver_policy": "by_start_sequence", "opt_start_seq": max(1, start_sequence)}
    if start_time is not None:
        start = {"deliver_policy": "by_start_time", "opt_start_time": start_time.isoformat()}
    created = await _create_consumer(connection, stream, filter_subjects, start)
    reader = _Reader(connection, stream=stream, consumer=created["name"], bounded=last_sequence is not None)
    await reader.open()
    try:
        while (message := await reader.next()) is not None:
            if last_sequence is not None and message.sequence > last_sequence:
                return
            if _before_start(message, start_sequence, start_time):
                continue  # a start beyond the end: the server begins with whatever comes next
            yield message
            if message.sequence == last_sequence:
                return
    finally:
        with anyio.CancelScope(shield=True):
            await reader.close()


async def read_chunks(
    connection: Connection,
    stream: str,
    *,
    filter_subjects: Sequence[str],
    start_sequence: int,
    last_sequence: int,
) -> AsyncGenerator[list[Message], None]:
    """See `backends.Backend.read_chunks`."""
    start = {"deliver_policy": "by_start_sequence", "opt_start_seq": max(1, start_sequence)}
    created = await _create_consumer(connection, stream, filter_subjects, start)
    reader = _Reader(connection, stream=stream, consumer=created["name"], bounded=True, start_sequence=start_sequence)
    await reader.open()
    try:
        while chunk := await reader.next_chunk(last_sequence):
            if chunk[-1].sequence < last_sequence:
                yield chunk
                continue
            if wanted := [message for message in chunk if message.sequence <= last_sequence]:
                yield wanted
            return
    finally:
        with anyio.CancelScope(shield=True):
            await reader.close()


async def count(connection: Connection, stream: str, *, filter_subjects: Sequence[str], start_sequence: int) -> int:
    """See `backends.Backend.count`. A consumer that would read them knows how many there are."""
    start = {"deliver_policy": "by_start_sequence", "opt_start_seq": max(1, start_sequence)}
    created = await _create_consumer(connection, stream, filter_subjects, start)
    await _delete_consumer(connection, stream, created["name"])
    return int(created["num_pending"])


async def _create_consumer(
    connection: Connection, stream: str, filter_subjects: Sequence[str], start: Mapping[str, Any]
) -> dict[str, Any]:
    """What the server answers: its name, and how many messages it has before it."""
    return await connection.api(
        f"CONSUMER.CREATE.{stream}",
        {
            "stream_name": stream,
            "config": {
                **start,
                "ack_policy": "none",
                "max_deliver": 1,
                "replay_policy": "instant",
                "filter_subjects": list(filter_subjects),
                "inactive_threshold": INACTIVE_SECONDS * SECOND,
                "mem_storage": True,
                "num_replicas": 1,
            },
        },
    )


async def _delete_consumer(connection: Connection, stream: str, name: str) -> None:
    with suppress(BackendError):  # the server removes it when it was inactive for long enough
        await connection.api(f"CONSUMER.DELETE.{stream}.{name}")


def _before_start(message: Message, start_sequence: int, start_time: datetime | None) -> bool:
    if start_time is None:
        return message.sequence < start_sequence
    return store_time(message) < start_time


class _Reader:
    """A buffer that is kept filled from one ephemeral consumer."""

    def __init__(
        self, connection: Connection, *, stream: str, consumer: str, bounded: bool, start_sequence: int = 1
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._consumer = consumer
        self._bounded = bounded
        self._buffer: deque[Message] = deque()
        self._buffered_bytes = 0
        self._seen = start_sequence - 1
        """The sequence up to which chunks were given away."""
        self._changed = anyio.Event()
        self._lost: BackendError | None = None
        self._pulls = PullSubscription(
            connection, stream=stream, consumer=consumer, on_message=self._on_message, on_change=self._change
        )

    async def open(self) -> None:
        await self._pulls.open()
        self._connection.on_disconnect.add(self._on_disconnect)

    async def close(self) -> None:
        self._connection.on_disconnect.discard(self._on_disconnect)
        await self._pulls.close()
        await _delete_consumer(self._connection, self._stream, self._consumer)

    async def next(self) -> Message | None:
        """The next message; None where a bounded reading has seen everything there is."""
        while True:
            self._changed = anyio.Event()
            if len(self._buffer) + self._pulls.outstanding <= BUFFER // 2 and not self._pulls.exhausted:
                await self._pulls.ask(BUFFER // 2, wait=not self._bounded)
            if self._buffer:
                return self._buffer.popleft()
            if lost := self._pulls.error or self._lost:
                # The consumer is ours alone: whatever became of it, another one can read on.
                raise UnavailableError(f"reading {self._stream} was interrupted: {lost}") from lost
            if self._pulls.exhausted:
                if self._bounded:
                    return None
                self._pulls.exhausted = False
                continue  # the request has expired: the next one goes out at once
            with anyio.move_on_after(HEARTBEAT_SECONDS):
                await self._changed.wait()
            if self._pulls.silent():
                raise UnavailableError(f"the server is silent about consumer {self._consumer} of {self._stream}")

    async def next_chunk(self, last_sequence: int) -> list[Message]:
        """What has come, as soon as it is worth it; nothing when a bounded reading has seen everything there is.

        No more is asked for than there can be up to `last_sequence`: what comes beyond it would be thrown away.
        """
        while True:
            self._changed = anyio.Event()
            seen = self._buffer[-1].sequence if self._buffer else self._seen
            room = min(CHUNK, last_sequence - seen - self._pulls.outstanding)
            full = len(self._buffer) >= CHUNK or self._buffered_bytes >= CHUNK_BYTES
            if room > 0 and not full and self._pulls.outstanding <= CHUNK and not self._pulls.exhausted:
                await self._pulls.ask(room, wait=False)
            complete = seen >= last_sequence or not self._pulls.outstanding or self._pulls.exhausted
            if full or (self._buffer and complete):
                chunk = list(self._buffer)
                self._buffer.clear()
                self._buffered_bytes = 0
                self._seen = chunk[-1].sequence
                return chunk
            if lost := self._pulls.error or self._lost:
                raise UnavailableError(f"reading {self._stream} was interrupted: {lost}") from lost
            if complete:
                return []
            with anyio.move_on_after(HEARTBEAT_SECONDS):
                await self._changed.wait()
            if self._pulls.silent():
                raise UnavailableError(f"the server is silent about consumer {self._consumer} of {self._stream}")

    def _on_message(self, received: Received) -> None:
        self._buffer.append(received.message)
        self._buffered_bytes += len(received.message.data)
        self._change()

    def _on_disconnect(self) -> None:
        # What was on its way is lost to this consumer: there are no acks, and so no redelivery.
        self._lost = UnavailableError(f"the connection was lost while reading {self._stream}")
        self._change()

    def _change(self) -> None:
        if not self._changed.is_set():
            self._changed.set()
