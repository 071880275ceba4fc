"""Notifications that are to be stored later.

They wait on the server, as message schedules (NATS ADR-51). What a schedule produces stays in its stream, and the
stream of an event holds what an aviso-server would write there and nothing else; so they wait in a stream of our own,
and when one is due the server moves it to where couriers read. Every worker of whatever app runs a courier. One of
them publishes it where it belongs, under the message id that it was given at first, and then acknowledges it. When a
courier dies in between another one does it again: within the duplicate window the stream stores it once, and after that
the courier finds it there by its id. It is removed from where it waited too; whether that succeeds changes nothing of
this, and what was left is removed later.

A schedule's subject follows from stream and message id, and a subject has one schedule: what is published again under
its id while it waits takes its own place. The server says, with what is due, which subject that was, and takes no
message that says so itself. So whoever may write below `aviso_workers.schedule.wait.MARS` has something published to
the stream MARS, and nowhere else; and only under the base of an event type that the courier's configuration has.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from contextlib import aclosing, suppress
from datetime import UTC, datetime, timedelta
from typing import Literal

from aviso_workers import schema, topics
from aviso_workers.backends import Backend, Delivery, Outgoing
from aviso_workers.codec import Message, store_time
from aviso_workers.config import Config, streams
from aviso_workers.engine.replaying import SKEW
from aviso_workers.errors import (
    BackendError,
    InvalidNotificationError,
    NotFoundError,
    RefusedError,
    UndecodableError,
)
from aviso_workers.events import Events, NotRemoved, Overdue, Published, PublishOutcome
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.notifications import Notify
from aviso_workers.schema import EventType
from aviso_workers.verdicts import Ack, Backoff, Nak, Settlement

__all__ = [
    "DUE",
    "STREAM",
    "Courier",
    "due_of",
    "is_later",
    "original",
    "require_server",
    "schedule",
    "stream_spec",
    "waiting",
]

STREAM = "aviso_workers_schedule"
SUBJECT = "aviso_workers.schedule"
DUE = f"{SUBJECT}.due"
"""Beneath it, by stream, is what couriers read."""
MESSAGE_ID = "Nats-Msg-Id"
SCHEDULED_BY = "Nats-Scheduler"
"""The header that the server gives to what is due: the subject under which it waited."""
TTL = "Nats-TTL"
KEPT_TTL = "Aviso-TTL"
"""The header of one that waits: its time to live begins when it is delivered."""
DIGEST_BYTES = 16
TIMEOUT_SECONDS = 10.0
REMOVE_SECONDS = 600.0
"""How often it is looked whether there is something that was delivered and not removed."""
AGAIN = Backoff(first=1, factor=2, max=60)
"""When a courier tries again to store what its stream does not take: without end, because it must not be lost."""


def require_server(backend: Backend) -> None:
    """Raises `RefusedError` where the server is too old to keep what is to be delivered later."""
    backend.require_server(2, 12, to="deliver a notification later")


def is_later(wanted: Notify) -> bool:
    """Whether it says when it is to be delivered."""
    return wanted.deliver_at is not None or wanted.deliver_after is not None


def due_of(wanted: Notify, *, now: datetime) -> datetime:
    """When one is to be stored that `is_later`, UTC. Raises `InvalidNotificationError`."""
    at, after, name = wanted.deliver_at, wanted.deliver_after, wanted.event_type
    if at is not None and after is not None:
        raise InvalidNotificationError(f"{name}: give it deliver_at or deliver_after, and not both")
    try:
        if at is None:
            if not (isinstance(after, int | float) and 0 <= after < math.inf):
                raise InvalidNotificationError(
                    f"{name}: deliver_after must be a number of seconds from 0, found {after!r}"
                )
            return now + timedelta(seconds=after)
        if not (isinstance(at, datetime) and at.tzinfo):
            raise InvalidNotificationError(f"{name}: deliver_at must be a datetime with a time zone, found {at!r}")
        return at.astimezone(UTC)
    except OverflowError as error:
        raise InvalidNotificationError(f"{name}: it cannot be delivered that late: {error}") from error


def waiting(stream: str, message_id: str) -> str:
    """The subject under which a notification waits that is to be stored in this stream."""
    return f"{SUBJECT}.wait.{stream}.{hashlib.blake2b(message_id.encode(), digest_size=DIGEST_BYTES).hexdigest()}"


def schedule(outgoing: Outgoing, due: datetime, *, event_type: str, message_id: str) -> Outgoing:
    """What waits in its place.

    `message_id` is the schedule's own and never used before: who cancels and publishes again within the duplicate
    window, or at another time, means it.
    """
    message = outgoing.message
    headers = {
        **(message.headers or {}),
        "Aviso-Event-Type": event_type,
        "Aviso-Subject": message.subject,
        "Aviso-Stream": outgoing.stream,
        "Aviso-Message-Id": outgoing.message_id,
        "Nats-Schedule": f"@at {due.isoformat()}",
        "Nats-Schedule-Target": f"{DUE}.{outgoing.stream}",
    }
    if TTL in headers:
        headers[KEPT_TTL] = headers.pop(TTL)
    subject = waiting(outgoing.stream, outgoing.message_id)
    return Outgoing(Message(subject=subject, data=message.data, headers=headers), message_id, STREAM)


def original(message: Message) -> Outgoing:
    """What one that waits or is due was made of. Raises `UndecodableError` where it was not made by `schedule`."""
    headers = message.headers or {}
    kept = {name: value for name, value in headers.items() if not name.startswith(("Aviso-", "Nats-"))}
    if KEPT_TTL in headers:
        kept[TTL] = headers[KEPT_TTL]
    try:
        subject, stream = headers["Aviso-Subject"], headers["Aviso-Stream"]
        message_id, waited = headers["Aviso-Message-Id"], headers.get(SCHEDULED_BY, message.subject)
    except KeyError as error:
        raise UndecodableError(f"message {message.sequence} of {STREAM} has no header {error}") from error
    if waited != waiting(stream, message_id):
        # Else whoever may write here could have us write what it may not: to buckets, or to the server's own subjects.
        raise UndecodableError(f"message {message.sequence} of {STREAM} waited as {waited}, which is not for {stream}")
    topics.check_subject(subject)
    if topics.stream_name(subject.partition(".")[0]) != stream:
        raise UndecodableError(f"message {message.sequence} of {STREAM} is for {subject}, no notification of {stream}")
    return Outgoing(Message(subject=subject, data=message.data, headers=kept), message_id, stream)


class Courier:
    """Handles what is due: publishes it where it belongs."""

    def __init__(
        self, backend: Backend, *, consumer: str, event_types: Mapping[str, EventType], events: Events
    ) -> None:
        """`event_types` are those of this app's configuration. What is for others is left to workers that have them."""
        self._backend = backend
        self._consumer = consumer
        bases = {name: schema.topic_of(name, event_type).base for name, event_type in event_types.items()}
        self._event_types = {topics.stream_name(base): (name, base) for name, base in bases.items()}
        """By stream: the event type, and its base."""
        self._events = events

    async def handle(self, delivery: Delivery) -> Settlement:
        """Return how one that is due is settled. Raises `UndecodableError`."""
        outgoing = original(delivery.message)
        event_type, base = self._event_types.get(outgoing.stream, ("", ""))
        if not event_type:
            unknown = RefusedError(f"this worker's configuration has no event type of the stream {outgoing.stream}")
            return self._give_back(delivery, outgoing, unknown)
        if not outgoing.message.subject.startswith(f"{base}."):
            raise UndecodableError(f"{outgoing.message.subject} is no subject of event type {event_type}")
        return await self._deliver(delivery, outgoing, event_type)

    async def keep_removing(self) -> None:
        """Remove, now and then, what was delivered and is still there. Never returns."""
        while True:
            with suppress(BackendError):  # the next time; what could not be removed was told of
                await self._remove_acked()
            await self._backend.clock.sleep(REMOVE_SECONDS)

    def _give_back(self, delivery: Delivery, outgoing: Outgoing, error: BackendError) -> Settlement:
        delay = AGAIN.delay_seconds(delivery.num_delivered)
        self._events.emit(
            Overdue(stream=outgoing.stream, message_id=outgoing.message_id, error=error, again_in_seconds=delay)
        )
        return Nak(delay)

    async def _deliver(self, delivery: Delivery, outgoing: Outgoing, event_type: str) -> Settlement:
        try:
            again = delivery.num_delivered > 1 and await self._is_stored(outgoing, due=store_time(delivery.message))
            outcome: PublishOutcome = "duplicate" if again else await self._publish(outgoing)
        except BackendError as error:
            return self._give_back(delivery, outgoing, error)
        try:
            await self._backend.delete_message(STREAM, delivery.message.sequence, overwrite=False)
        except NotFoundError:
            pass  # it was delivered before
        except BackendError as error:
            self._events.emit(NotRemoved(stream=STREAM, message_id=outgoing.message_id, error=error))
        self._events.emit(Published(event_type=event_type, outcome=outcome, attempts=delivery.num_delivered))
        return Ack()

    async def _publish(self, outgoing: Outgoing) -> Literal["stored", "duplicate"]:
        ack = await self._backend.publish(
            outgoing.message, message_id=outgoing.message_id, stream=outgoing.stream, timeout_seconds=TIMEOUT_SECONDS
        )
        return "duplicate" if ack.duplicate else "stored"

    async def _is_stored(self, outgoing: Outgoing, *, due: datetime) -> bool:
        """Whether an earlier delivery has stored it. The stream may not remember message ids for as long as that."""
        subject, stream = outgoing.message.subject, outgoing.stream
        try:
            last = (await self._backend.stream_info(stream)).last_sequence
            reading = self._backend.read(stream, filter_subjects=(subject,), start_time=due - SKEW, last_sequence=last)
            async with aclosing(reading):
                return any([(each.headers or {}).get(MESSAGE_ID) == outgoing.message_id async for each in reading])
        except NotFoundError:
            return False

    async def _remove_acked(self) -> None:
        acked = (await self._backend.consumer_info(STREAM, self._consumer)).ack_floor
        if not acked:
            return
        reading = self._backend.read(STREAM, filter_subjects=(f"{DUE}.>",), last_sequence=acked)
        async with aclosing(reading):
            left = [message.sequence async for message in reading if _is_ours(message)]
        for sequence in left:
            with suppress(NotFoundError):  # another worker's courier was faster
                await self._backend.delete_message(STREAM, sequence, overwrite=False)


def _is_ours(message: Message) -> bool:
    try:
        original(message)
    except UndecodableError:
        return False  # it was delivered nowhere, and is kept for whoever looks for it
    return True


def stream_spec(config: Config) -> StreamSpec:
    """The stream of what waits, and of what is due until a courier has brought it."""
    return streams.own_stream(STREAM, f"{SUBJECT}.>", config, allow_msg_schedules=True)
