"""Wiping of streams and deletion of single notifications, as the admin interface of an aviso-server offers them.

Only streams of configured event types are touched: never KV buckets, dead letters or streams of other programs.
Configuration and consumers stay, and the sequence goes on counting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime

from msgspec import Struct, structs

from aviso_workers.aviso import schema, topics
from aviso_workers.aviso.codec import Message, store_time
from aviso_workers.aviso.notifications import parse_pairs
from aviso_workers.aviso.positions import parse_id
from aviso_workers.aviso.schema import parse_where
from aviso_workers.backends import Admin
from aviso_workers.config import Config, completed
from aviso_workers.errors import (
    ConfigError,
    InvalidNotificationError,
    InvalidPositionError,
    NotFoundError,
    UndecodableError,
    UnknownEventTypeError,
)
from aviso_workers.jetstream.subjects import matcher
from aviso_workers.ops import inventory, maintenance
from aviso_workers.ops.inventory import Denials, StoredMessage, noted
from aviso_workers.state import declarations, delayed_messages
from aviso_workers.state.declarations import AppDeclarations

DELAYED = "delayed:"
"""What the name of a notification that waits to be stored later has instead of a sequence, before its message id."""
MAX_DELAYED = 3000
"""Notifications that wait to be stored later among which a search looks."""
SHOWN = 20
"""Notifications that a search returns, at most."""
MAX_TOLD = 5
"""How many mistakes of one app are told, and how many of its event types."""


async def event_streams(admin: Admin, config: Config) -> dict[str, int]:
    """Return the existing streams of configured event types, with the number of messages in each."""
    found: dict[str, int] = {}
    for name in config.notification_schema:
        stream = stream_of(config, name)
        if info := await inventory.existing(admin.stream_info(stream)):
            found[stream] = info.messages
    return found


def with_declared(config: Config, stored: Mapping[str, AppDeclarations]) -> tuple[Config, list[str]]:
    """Return the configuration with the event types that workers have recorded and it does not have: those that are
    declared in Python; and what is to be told about them.

    An event type with mistakes, as of a newer version, is left out and told: an app's workers write what they like.
    """
    found = declarations.event_types(stored, known=config.notification_schema)
    if not found:
        return config, []
    try:
        examined = completed(config, [(name, entry) for name, (entry, _) in found.items()])
    except ConfigError as error:
        return config, [f"event types that workers have recorded are left out: {error}"]
    told = [(_owner(mistake), f"left out: {mistake:.500}") for mistake in examined.mistakes]
    recorded = found.keys() & examined.config.notification_schema.keys()
    for name, (entry, others) in sorted(found.items()):
        owner = f"event types of {_owner(str(entry.place))}"
        if name in recorded:
            told.append((owner, f"event type {name} is not in the configuration; it is that of {entry.place}"))
        if others:
            apps = ", ".join(others)
            text = f"another event type {name} is that of app {apps}: use its configuration for its agents"
            told.append((owner, text))
    return structs.replace(examined.config, recorded=frozenset(recorded)), _shortened(told)


def _owner(text: str) -> str:
    """Return the app at the begin of a mistake or a place."""
    return text.partition(" (")[0]


def _shortened(told: Iterable[tuple[str, str]]) -> list[str]:
    """Return the texts, of each owner the first few and the number of the others."""
    by_owner: dict[str, list[str]] = {}
    for owner, text in told:
        by_owner.setdefault(owner, []).append(text)
    lines = []
    for owner, texts in by_owner.items():
        lines += texts[:MAX_TOLD]
        if len(texts) > MAX_TOLD:
            lines.append(f"{owner}: and {len(texts) - MAX_TOLD} more")
    return lines


async def wipe(admin: Admin, streams: Sequence[str]) -> dict[str, int]:
    """Delete all messages of these streams, and return how many were deleted from each.

    Raises `NotFoundError`, and `RefusedError` where one of them refuses purges; then none was touched.
    """
    for stream in streams:
        maintenance.check_purge_allowed((await admin.stream_info(stream)).config)
    return {stream: await admin.purge_stream(stream) for stream in streams}


async def find(admin: Admin, config: Config, notification: str) -> StoredMessage:
    """Return a stored notification by its name `<event type>@<sequence>`; the base or the stream may stand for the
    event type.

    Raises `InvalidPositionError` where the name has another form, `UnknownEventTypeError`, and `NotFoundError` where
    the stream or the notification does not exist.
    """
    stream, sequence = position(config, notification)
    return await inventory.message(admin, stream, sequence=sequence)


class FoundNotification(Struct, frozen=True, kw_only=True):
    name: str
    """Such as `MARS@4711`."""
    time: datetime
    """When it was stored."""
    subject: str


class DelayedNotification(Struct, frozen=True, kw_only=True):
    """A notification that waits to be stored later."""

    name: str
    """Such as `MARS@delayed:forecast-12`, with its message id."""
    due: datetime
    message: StoredMessage
    """What is to be stored, without a sequence, and when it was published."""


class Search(Struct, frozen=True, kw_only=True):
    """What has the values."""

    count: int
    """How many are stored."""
    newest: list[FoundNotification]
    """Some of them, the newest first."""
    delayed: list[DelayedNotification]
    """Of those that wait to be stored later, some, first those that are due first."""
    unsure: str
    """Why more may wait, in a sentence without its full stop; empty where all were looked at."""


def filters_of(config: Config, asked: str) -> Sequence[str]:
    """Return the filter subjects of an event type and values of its identifier, such as `mars class=od step=12`.

    Raises `UnknownEventTypeError`, and `InvalidNotificationError` where the values are none of it.
    """
    event_type, *pairs = asked.split()
    event_type = event_type_of(config, event_type)
    where = parse_where(event_type, config.notification_schema[event_type], parse_pairs(pairs))
    if where.place is not None:
        raise InvalidNotificationError("the console looks for the keys of a topic: `aviso-workers replay` finds places")
    return topics.filter_subjects(where)


async def search(admin: Admin, config: Config, asked: str) -> Search:
    """Return the notifications of an event type and values of its identifier, such as `mars class=od step=12`.

    Raises what `filters_of` raises, and `BackendError`.
    """
    stream, filters = stream_of(config, asked.split()[0]), filters_of(config, asked)
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
    delayed, unsure = await _delayed(admin, stream, filters)
    return Search(count=count, newest=[*reversed(newest)], delayed=delayed, unsure=unsure)


async def _delayed(admin: Admin, stream: str, filters: Sequence[str]) -> tuple[list[DelayedNotification], str]:
    """Return `delayed` and `unsure` of a search. Raises `BackendError`."""
    schedules, denied, read = delayed_messages.stream_of(stream), Denials(), 0
    found, matches = list[DelayedNotification](), matcher(filters)
    with noted(denied, DELAYED):
        if (info := await inventory.existing(admin.stream_info(schedules))) and info.messages:
            subjects = (delayed_messages.all_waiting(stream),)
            async with aclosing(
                admin.read(schedules, filter_subjects=subjects, last_sequence=info.last_sequence)
            ) as reading:
                async for each in reading:
                    read += 1
                    if (one := _waiting(each)) is not None and matches(one.message.subject):
                        found.append(one)
                    if read == MAX_DELAYED:
                        break
    unsure = f"of those that wait to be stored later, {read:,} were looked at" if read == MAX_DELAYED else ""
    if said := denied.text():
        unsure = f"what waits to be stored later is {said}"
    return sorted(found, key=lambda each: each.due)[:SHOWN], unsure


async def find_delayed(admin: Admin, config: Config, notification: str) -> DelayedNotification | None:
    """Return the notification of a name such as `mars@delayed:forecast-12`; None where the name is another one.

    Raises `UnknownEventTypeError`, and `NotFoundError` where it does not wait.
    """
    event_type, _, named = notification.strip().partition("@")
    if not named.startswith(DELAYED):
        return None
    stream = stream_of(config, event_type)
    schedules = delayed_messages.stream_of(stream)
    waiting = delayed_messages.waiting(stream, named.removeprefix(DELAYED))
    found = await inventory.existing(admin.message(schedules, last_by_subject=waiting))
    if found is None or (one := _waiting(found)) is None:
        raise NotFoundError(f"{notification} does not wait: it was stored, was cancelled, or was never published")
    return one


def _waiting(message: Message) -> DelayedNotification | None:
    """Return what waits; None where it is none of ours."""
    due = delayed_messages.due_at(message)
    try:
        of = delayed_messages.original(message)
    except (UndecodableError, InvalidNotificationError):
        return None
    stored = inventory.read(of.stream, structs.replace(of.message, timestamp_ns=message.timestamp_ns))
    return DelayedNotification(name=f"{of.stream}@{DELAYED}{of.message_id}", due=due, message=stored) if due else None


async def delete(admin: Admin, config: Config, notification: str) -> None:
    """Delete the notification of a name as `find` takes it. Raises as `find` does."""
    stream, sequence = position(config, notification)
    await admin.delete_message(stream, sequence)


def position(config: Config, notification: str) -> tuple[str, int]:
    """Return the stream and the sequence of a name as `find` takes it. Raises as `find` does, save `NotFoundError`."""
    event_type, at, sequence = notification.strip().partition("@")
    if not (event_type and at and sequence):
        raise InvalidPositionError(f"{notification!r} is not <event type>@<sequence>, such as mars@42")
    number = parse_id(sequence, name="the sequence")
    if number == 0:
        raise InvalidPositionError("the sequence must be 1 or more, found 0")
    return stream_of(config, event_type), number


def stream_of(config: Config, name: str) -> str:
    """Return the stream of an event type. Raises `UnknownEventTypeError`."""
    found = event_type_of(config, name)
    return topics.stream_name(schema.topic_of(found, config.notification_schema[found]).base)


def event_type_of(config: Config, name: str) -> str:
    """Return the name of an event type that is given by its name, its base or its stream, in any case.

    Raises `UnknownEventTypeError`.
    """
    event_types = config.notification_schema
    if name in event_types:
        return name
    for key, event_type in event_types.items():
        if name.lower() in (key.lower(), schema.topic_of(key, event_type).base.lower()):
            return key
    raise UnknownEventTypeError(name, event_types)
