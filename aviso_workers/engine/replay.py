"""Replay and watch: a stream read in order, outside of any agent.

One reading serves both: it starts where the caller says, goes through what is stored and, for a watch, on into what
comes. So there is no hand-over from history to live, and nothing can fall between them or come twice.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import datetime
from typing import Any

from msgspec import Struct

from aviso_workers import clocks
from aviso_workers.aviso.codec import NotificationReader, store_time
from aviso_workers.aviso.notifications import Notification
from aviso_workers.aviso.positions import Position
from aviso_workers.backends import Backend, Message, StreamInfo
from aviso_workers.clocks import SKEW
from aviso_workers.errors import NotFoundError, UnansweredError, UnavailableError, UndecodableError
from aviso_workers.events import (
    Events,
    Skipped,
    StartNotReached,
    StreamGone,
    StreamMadeAgain,
    StreamNotRead,
)

AGAIN_AFTER_SECONDS = 1.0
MAX_TIMES_BEHIND = 3
"""How many times in a row a stream may end before a message that was read. Its new leader may still be catching up."""
MAX_FAILURES = 60
"""Failures in a row, with a connection, after which a replay raises the last one."""
MAX_UNANSWERED = 8
"""The same, where nobody receives a request and nothing was read before. A server that starts takes less time."""
FAILURES_BEFORE_WARNING = 3
"""Failures in a row before a warning. A new leader is usually elected sooner."""


async def when_created(backend: Backend, stream: str, *, known: datetime | None) -> datetime | None:
    """Return when the stream was created. Raises `NotFoundError` where it is gone, or not the one that is known."""
    found = (await backend.stream_info(stream)).created
    if known is not None and found != known:
        raise _recreated(stream)
    return found


class Replayer(Struct, eq=False):
    """Reads the notifications of one event type that match `where`."""

    backend: Backend
    name: str
    """Of the event type."""
    stream: str
    filters: tuple[str, ...]
    reader: NotificationReader
    events: Events

    async def replay(self, start: Position, end: Position) -> AsyncGenerator[Notification[Any], None]:
        """Yield what is stored now between the two ends, both inclusive.

        Raises `NotFoundError` where there is no stream, it never had the sequence of the start, or it is deleted
        meanwhile: what it held cannot be read to its end. Raises `UnansweredError` where nothing receives a request.
        """
        info = await self._reaching(start)
        if not _is_within(start, info):
            raise NotFoundError(
                f"there is no {start.sequence} to begin at: {self.stream} ends at {info.last_sequence}. If it was "
                "deleted and recreated since you noted the id, begin at 1"
            )
        last = info.last_sequence if end.sequence is None else min(info.last_sequence, end.sequence)
        reading = _Reading(start, created=info.created)
        async with aclosing(self._messages(reading, last)) as messages:
            async for message in messages:
                if end.time is not None and store_time(message) > end.time:
                    if store_time(message) - end.time > SKEW:
                        return
                    continue
                if (notification := self._matching(message)) is not None:
                    yield notification

    async def watch(self, start: Position) -> AsyncGenerator[Notification[Any], None]:
        """Yield what is stored from `start` on (a position of neither: from now on), and what comes, without end.

        Where there is no stream, or it is deleted, it waits for one to be made, and goes on at its first message. It
        begins there as well where the stream never had the sequence of the start, as after it was recreated.
        """
        try:
            info = await self._reaching(start)
        except NotFoundError:
            info = await self._stream_again()
            start = Position(time=start.time) if start.time else Position(sequence=1)
        if start == Position():
            start = Position(sequence=info.last_sequence + 1)
        begin = start
        if not _is_within(start, info):
            assert start.sequence is not None
            self.events.emit(
                StartNotReached(stream=self.stream, sequence=start.sequence, last_sequence=info.last_sequence)
            )
            begin = Position(sequence=1)
        reading = _Reading(begin, created=info.created)
        while True:
            try:
                async with aclosing(self._messages(reading, None)) as messages:
                    async for message in messages:
                        if (notification := self._matching(message)) is not None:
                            yield notification
            except NotFoundError:
                info = await self._stream_again()
                if not reading.is_of(info):
                    sequence, last = reading.next_sequence, info.last_sequence
                    self.events.emit(StreamMadeAgain(stream=self.stream, next_sequence=sequence, last_sequence=last))
                    reading = _Reading(Position(time=start.time), created=info.created)

    async def _messages(self, reading: _Reading, last: int | None) -> AsyncGenerator[Message, None]:
        """Yield the messages in order, once each, also where reading was interrupted in between.

        Raises `NotFoundError` where the stream is gone, or not the one that was read; `BackendError` when the
        connection is lost for good, or what is stored up to `last` does not come although there is a connection;
        `UnansweredError` where nothing receives a request.
        """
        failures = unanswered = 0
        while last is None or reading.next_sequence <= last:
            try:
                await self._require_same(reading)
                async with aclosing(self._read(reading, last)) as messages:
                    async for message in messages:
                        failures = 0
                        reading.is_answered = True
                        yield message
                return
            except UnavailableError as error:
                failures = failures + 1 if self.backend.connection.ready else 0
                unanswered = unanswered + 1 if failures and isinstance(error, UnansweredError) else 0
                if unanswered == MAX_UNANSWERED and not reading.is_answered:
                    raise
                if failures == FAILURES_BEFORE_WARNING:
                    self.events.emit(StreamNotRead(stream=self.stream, error=error))
                if last is not None and failures == MAX_FAILURES:
                    raise
                await self._pause()

    async def _read(self, reading: _Reading, last: int | None) -> AsyncGenerator[Message, None]:
        """Read until the end or an interruption."""
        messages = self.backend.read(
            self.stream,
            filter_subjects=self.filters,
            start_sequence=reading.next_sequence,
            start_time=reading.from_time and _before(reading.from_time),
            last_sequence=last,
        )
        since = reading.since
        known_as_same = False
        async with aclosing(messages):
            async for message in messages:
                if not known_as_same:
                    # Asked before, the stream could have been replaced until its consumer was made. Asked now, it
                    # cannot: a consumer goes with its stream.
                    await self._require_same(reading)
                    known_as_same = True
                reading.next_sequence, reading.from_time = message.sequence + 1, None
                if since is None or store_time(message) >= since:
                    yield message
        if not known_as_same:
            await self._require_same(reading)

    async def _require_same(self, reading: _Reading) -> None:
        """Raise `NotFoundError` where the stream is gone, was recreated, or has lost its end.

        Raises `UnavailableError` where its end may still come.
        """
        info = await self.backend.stream_info(self.stream)
        if reading.is_of(info):
            reading.times_behind = 0
            return
        reading.times_behind += 1
        if info.created == reading.created and reading.times_behind <= MAX_TIMES_BEHIND:
            raise UnavailableError(f"stream {self.stream} has come to {info.last_sequence}, and was further")
        raise _recreated(self.stream)

    async def _reaching(self, start: Position) -> StreamInfo:
        """Return what the stream is, asked again a few times where it has not come to the sequence of the start: its
        new leader may not have come so far yet.
        """
        info = await self.backend.stream_info(self.stream)
        for _ in range(MAX_TIMES_BEHIND):
            if _is_within(start, info):
                break
            await self._pause()
            info = await self.backend.stream_info(self.stream)
        return info

    async def _stream_again(self) -> StreamInfo:
        """Return what the stream is, as soon as there is one. Raises `BackendError` as `Backend.failed` does."""
        reported = False
        while True:
            await self._pause()
            try:
                return await self.backend.stream_info(self.stream)
            except UnavailableError:
                continue
            except NotFoundError:
                if not reported:
                    self.events.emit(StreamGone(stream=self.stream))
                reported = True

    async def _pause(self) -> None:
        """Wait before the next attempt. Raises `BackendError` when the connection is lost for good."""
        with clocks.move_on_after(self.backend.clock, AGAIN_AFTER_SECONDS):
            await self.backend.connection.failed()

    def _matching(self, message: Message) -> Notification[Any] | None:
        try:
            return self.reader.notification(message)
        except UndecodableError as error:
            self.events.emit(Skipped(event_type=self.name, sequence=message.sequence, error=error))
            return None


class _Reading:
    """Where the reading of one stream is: the same stream for as long as it was created at the same time."""

    def __init__(self, start: Position, *, created: datetime | None) -> None:
        self.created = created
        self.since = start.time
        """The time before which notifications are left out."""
        self.from_time = start.time
        """Where to begin, as long as nothing was seen."""
        self.next_sequence = start.sequence or 1
        self.is_answered = False
        """Whether any message has come."""
        self.times_behind = 0
        """How often in a row the stream ended before what was read of it."""

    def is_of(self, info: StreamInfo) -> bool:
        """Return whether that is the stream that was read: not one that was recreated, restored, or lost its end."""
        return info.created == self.created and info.last_sequence + 1 >= self.next_sequence


def _is_within(start: Position, info: StreamInfo) -> bool:
    """Return whether the stream has come to the start, or to right before it."""
    return start.sequence is None or start.sequence <= info.last_sequence + 1


def _recreated(stream: str) -> NotFoundError:
    return NotFoundError(f"stream {stream} was deleted and recreated while it was read: begin again")


def _before(time: datetime) -> datetime:
    """Return the time from which a server is asked for what was stored at `time` or later."""
    try:
        return time - SKEW
    except OverflowError:
        return time
