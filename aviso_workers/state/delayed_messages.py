"""Notifications that are to be stored later.

They wait on the server, as message schedules (NATS ADR-51). What a schedule produces stays in its stream, and the
stream of an event holds what an aviso-server would write there and nothing else; so they wait in a stream of our own,
and when one is due the server moves it to where `delayed_delivery` reads. Each event stream has a stream of what waits
for it, because a server's permissions bind whole streams: who may purge one can remove all that waits there.

A schedule's subject follows from stream and message id, and a subject has one schedule: what is published again under
its id while it waits takes its own place. The server says, with what is due, which subject that was, and takes no
message that says so itself. So whoever may write below `aviso_workers.schedule.MARS.wait` has something published to
the stream MARS, and nowhere else; and only under the base of an event type that the worker's configuration has.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from aviso_workers.aviso import literals, schema, topics
from aviso_workers.aviso.codec import Message
from aviso_workers.aviso.notifications import Notify
from aviso_workers.backends import Backend, Outgoing
from aviso_workers.config import Config, streams
from aviso_workers.errors import (
    InvalidNotificationError,
    RefusedError,
    UndecodableError,
)
from aviso_workers.jetstream.key_value import TTL
from aviso_workers.jetstream.specs import SCHEDULES, StreamSpec

SUBJECT = "aviso_workers.schedule"
READER = "schedule-courier"
"""The name of the subscriptions that publish what is due."""
DURABLE = f"aviso_workers__{READER}"
"""One on each stream of what waits, for all apps, so that it does not matter whose workers run."""
SCHEDULED_BY = "Nats-Scheduler"
"""The header that the server gives to what is due: the subject under which it waited."""
KEPT_TTL = "Aviso-TTL"
"""The header of one that waits: its time to live begins when it is delivered."""
DIGEST_BYTES = 16
TOO_LATE = datetime(2262, 1, 1, tzinfo=UTC)
"""A server takes what is later for past, and delivers it at once: its 64 bits hold nanoseconds up to April 2262."""


def stream_of(stream: str) -> str:
    """Return the name of the stream of what waits to be stored in this event stream."""
    return f"{SCHEDULES}{stream}"


def event_stream_of(name: str) -> str:
    """Return the event stream for which a stream of this name keeps what waits; empty where it keeps nothing of it."""
    return name.removeprefix(SCHEDULES) if name.startswith(SCHEDULES) else ""


def require_server(backend: Backend) -> None:
    """Raise `RefusedError` where the server is too old to keep what is to be delivered later."""
    backend.connection.require_server(2, 12, to="deliver a notification later")


def is_served(backend: Backend) -> bool:
    """Return whether the server can keep what is to be delivered later."""
    try:
        require_server(backend)
    except RefusedError:
        return False
    return True


def is_later(wanted: Notify) -> bool:
    """Return whether it says when it is to be delivered."""
    return wanted.due is not None


def due_of(wanted: Notify, *, now: datetime) -> datetime:
    """Return when one is to be stored that `is_later`, UTC. Raises `InvalidNotificationError`."""
    name = wanted.event_type
    try:
        due = _due(wanted, now=now)
    except OverflowError as error:
        raise InvalidNotificationError(f"{name}: it cannot be delivered that late: {error}") from error
    if due >= TOO_LATE:
        raise InvalidNotificationError(
            f"{name}: it cannot be delivered in {due.year}: servers count nanoseconds up to {TOO_LATE.year}"
        )
    return due


def _due(wanted: Notify, *, now: datetime) -> datetime:
    if isinstance(wanted.due, datetime):
        if wanted.due.tzinfo:
            return wanted.due.astimezone(UTC)
    else:
        with suppress(ValueError):
            if (seconds := literals.seconds_of(wanted.due)) >= 0:
                return now + timedelta(seconds=seconds)
    raise InvalidNotificationError(
        f"{wanted.event_type}: due must be a datetime with a time zone, or a duration from 0 seconds, such as 600 or "
        f'"10m", found {wanted.due!r:.100}'
    )


def waiting(stream: str, message_id: str) -> str:
    """Return the subject under which a notification waits that is to be stored in this stream."""
    return f"{SUBJECT}.{stream}.wait.{hashlib.blake2b(message_id.encode(), digest_size=DIGEST_BYTES).hexdigest()}"


def all_waiting(stream: str) -> str:
    """Return the subjects, with a wildcard, under which notifications wait that are to be stored in this stream."""
    return f"{SUBJECT}.{stream}.wait.*"


def due_subject(stream: str) -> str:
    """Return the subject of the notifications that are due to be stored in this stream."""
    return f"{SUBJECT}.{stream}.due"


def schedule(outgoing: Outgoing, due: datetime, *, event_type: str, message_id: str) -> Outgoing:
    """Return what waits in its place.

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
        "Nats-Schedule-Target": due_subject(outgoing.stream),
    }
    if TTL in headers:
        headers[KEPT_TTL] = headers.pop(TTL)
    subject = waiting(outgoing.stream, outgoing.message_id)
    return Outgoing(
        Message(subject=subject, data=message.data, headers=headers), message_id, stream_of(outgoing.stream)
    )


def due_at(message: Message) -> datetime | None:
    """Return when one that waits is to be stored; None where it does not say so."""
    with suppress(ValueError):
        due = datetime.fromisoformat((message.headers or {}).get("Nats-Schedule", "").removeprefix("@at "))
        return due if due.tzinfo else None
    return None


def original(message: Message) -> Outgoing:
    """Return what one that waits or is due was made of.

    Raises `UndecodableError` where it was not made by `schedule`.
    """
    headers = message.headers or {}
    kept = {name: value for name, value in headers.items() if not name.startswith(("Aviso-", "Nats-"))}
    if KEPT_TTL in headers:
        kept[TTL] = headers[KEPT_TTL]
    try:
        subject, stream = headers["Aviso-Subject"], headers["Aviso-Stream"]
        message_id, waited = headers["Aviso-Message-Id"], headers.get(SCHEDULED_BY, message.subject)
    except KeyError as error:
        raise UndecodableError(f"message {message.sequence} has no header {error}") from error
    if waited != waiting(stream, message_id):
        # Else whoever may write here could have us write what it may not: to buckets, or to the server's own subjects.
        raise UndecodableError(f"message {message.sequence} waited as {waited}, which is not for {stream}")
    topics.check_subject(subject)
    base = subject.partition(".")[0]
    if schema.base_problem(base) or topics.stream_name(base) != stream:
        raise UndecodableError(f"message {message.sequence} is for {subject}, no notification of {stream}")
    return Outgoing(Message(subject=subject, data=message.data, headers=kept), message_id, stream)


def stream_spec(stream: str, config: Config) -> StreamSpec:
    """Return the stream of what waits for this event stream, and of what is due until it is published."""
    return streams.own_stream(stream_of(stream), f"{SUBJECT}.{stream}.>", config, allow_msg_schedules=True)
