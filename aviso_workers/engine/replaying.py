"""Replay and watch: a stream read in order, outside of any agent.

One reading serves both: it starts where the caller says, goes through what is stored and, for a watch, on into what
comes. So there is no hand-over from history to live, and nothing can fall between them or come twice.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import Any

from aviso_workers import clocks, topics
from aviso_workers.backends import Backend, Message
from aviso_workers.codec import NotificationReader, store_time
from aviso_workers.errors import NotFoundError, UnavailableError, UndecodableError
from aviso_workers.events import Events, Skipped
from aviso_workers.notifications import Notification
from aviso_workers.positions import Position
from aviso_workers.schema import EventType, Where

__all__ = ["SKEW", "Replayer", "message_at", "when_created"]

SKEW = timedelta(minutes=1)
"""The clocks of two servers differ by less than this. A stream whose leader changed may have messages whose store times
are that much out of order."""

AGAIN_AFTER_SECONDS = 1.0
MOST_FRUITLESS = 60
"""How often in a row a replay is begun again while there is a connection, and nothing comes of it."""


async def message_at(backend: Backend, stream: str, sequence: int) -> Message | None:
    """The message of that sequence; None where the stream does not hold it. Raises `NotFoundError`."""
    reading = backend.read(stream, filter_subjects=(), start_sequence=sequence, last_sequence=sequence)
    async with aclosing(reading):
        return await anext(reading, None)


async def when_created(backend: Backend, stream: str, *, known: datetime | None) -> datetime | None:
    """Return when the stream was created. Raises `NotFoundError` where it is gone, or not the one that is known."""
    found = (await backend.stream_info(stream)).created
    if known is not None and found != known:
        raise NotFoundError(f"stream {stream} was deleted and made anew while it was read: begin again")
    return found


class Replayer:
    """Reads the notifications of one event type that match `where`."""

    def __init__(
        self, backend: Backend, *, name: str, event_type: EventType, where: Where, stream: str, events: Events
    ) -> None:
        self._backend = backend
        self._name = name
        self._stream = stream
        self._filters = topics.filter_subjects(where)
        self._reader = NotificationReader(name, event_type, where=where)
        self._events = events

    async def replay(self, start: Position, end: Position) -> AsyncGenerator[Notification[Any], None]:
        """What is stored now between the two ends, both inclusive."""
        info = await self._backend.stream_info(self._stream)
        last = info.last_sequence if end.sequence is None else min(info.last_sequence, end.sequence)
        async with aclosing(self._messages(start, last, created=info.created)) as messages:
            async for message in messages:
                if end.time is not None and store_time(message) > end.time:
                    if store_time(message) - end.time > SKEW:
                        return
                    continue
                if (notification := self._matching(message)) is not None:
                    yield notification

    async def watch(self, start: Position) -> AsyncGenerator[Notification[Any], None]:
        """What is stored from `start` on (a position of neither: from now on), and what comes, without end."""
        if start == Position():
            start = Position(sequence=(await self._backend.stream_info(self._stream)).last_sequence + 1)
        async with aclosing(self._messages(start, None)) as messages:
            async for message in messages:
                if (notification := self._matching(message)) is not None:
                    yield notification

    async def _messages(
        self, start: Position, last: int | None, *, created: datetime | None = None
    ) -> AsyncGenerator[Message, None]:
        """In order, once each, also where reading was interrupted in between.

        Raises `NotFoundError` where the stream is gone, or is another one than that `created` then; `BackendError` when
        the connection is lost for good, or what is stored up to `last` does not come although there is a connection.
        """
        seen, fruitless, since = 0, 0, start.time
        while last is None or (start.sequence or 0) <= last:
            try:
                created = await when_created(self._backend, self._stream, known=created)
                reading = self._backend.read(
                    self._stream,
                    filter_subjects=self._filters,
                    start_sequence=start.sequence or 1,
                    start_time=start.time and _before(start.time),
                    last_sequence=last,
                )
                async with aclosing(reading):
                    async for message in reading:
                        seen, fruitless = message.sequence, 0
                        if since is None or store_time(message) >= since:
                            yield message
                return
            except UnavailableError:
                fruitless = fruitless + 1 if self._backend.connected else 0
                if last is not None and fruitless == MOST_FRUITLESS:
                    raise
                start = Position(sequence=seen + 1) if seen else start
                with clocks.move_on_after(self._backend.clock, AGAIN_AFTER_SECONDS):
                    await self._backend.failed()

    def _matching(self, message: Message) -> Notification[Any] | None:
        try:
            return self._reader.notification(message)
        except UndecodableError as error:
            self._events.emit(Skipped(event_type=self._name, sequence=message.sequence, error=error))
            return None


def _before(time: datetime) -> datetime:
    """From when on a server is asked for what was stored at a time or later."""
    try:
        return time - SKEW
    except OverflowError:
        return time
