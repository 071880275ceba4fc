"""Recognition of messages that are copies of the notifications to erase, and search for what may hold more of them.

Copies are recognised by what they say of themselves, not by the original, so that an erasure that was broken off can be
repeated, and so that a backup can be cleansed without a server. A message that a mirror, a restore or a copy of a
stream has kept has the sequence and the store time of its original; in a stream that was recreated the same sequence
has another time.

Agents make what they like of notifications, so only people can know which keys of tables, windows and counters stand
for somebody. They are named here for a review: every bucket that apps fill, with those of its keys that have a value of
what is to be erased in their name or in their values.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import Struct

from aviso_workers.aviso import schema, topics
from aviso_workers.aviso.codec import UNREADABLE_JSON, Message, NotificationReader
from aviso_workers.aviso.schema import EventType
from aviso_workers.backends import Admin, StreamInfo
from aviso_workers.errors import BackendError, InvalidNotificationError, NotFoundError, UndecodableError
from aviso_workers.jetstream.answers import SOURCE
from aviso_workers.jetstream.info import StreamConfig
from aviso_workers.jetstream.key_value import decode_key
from aviso_workers.jetstream.specs import BUCKET
from aviso_workers.state import (
    consumer_records,
    dead_letter_records,
    delayed_messages,
    failure_counts,
    own_buckets,
    own_streams,
    table_records,
)
from aviso_workers.state.dead_letter_records import DeadLetter
from aviso_workers.state.own_streams import COUNTERS, DEAD_LETTERS, RETRIES

CLOCKS_DIFFER_NS = 60_000_000_000
"""Nanoseconds by which the clocks of two servers may differ."""

Matches = Callable[[Message], bool]
Original = tuple[str, Message]
"""The stream of an original, and the message that it was there."""
OF_KEYS = "$KV."
PIECE = re.compile(r"[^\W_]+|[\W_]")
"""A word of letters and digits, or one character between words."""
POSITIONS = {"counted", "sequence", "stored", "closed", "time"}
"""The fields of the state of a window beside the values of windows: sequences and times."""

POSITIONS_ONLY = ("timers", "leases", "live")
"""Kinds of buckets that hold only sequences and times."""
NOTED = tuple(f"/{note}" for note in consumer_records.NOTES)
"""What of the `state` of an app has the texts of errors; the rest are positions, versions and declarations."""

Kind = Literal["table", "windows", "counter", "bucket"]


class Wanted:
    """The notifications that are to be erased: those that `where` lets through, or the one of a `sequence`.

    Raises `InvalidIdentifierError`.
    """

    def __init__(
        self, name: str, event_type: EventType, *, where: Mapping[str, Any], sequence: int | None = None
    ) -> None:
        self.event_type = name
        self.where = schema.parse_where(name, event_type, where)
        self.stream = topics.stream_name(schema.topic_of(name, event_type).base)
        self.fields = sorted(where)
        self.sequence = sequence
        self._reader = NotificationReader(name, event_type, where=self.where)

    @property
    def subjects(self) -> str:
        """The subject filter that covers all notifications of the event type."""
        return f"{topics.encode_token(self.where.topic.base)}.>"

    def matches(self, original: Message) -> bool:
        """Return whether a message of the event type's own stream is one of the notifications to erase."""
        if self.sequence is not None:
            return original.sequence == self.sequence
        return self._reader.matches(original)

    def carried_by(self, stream: str, message: Message) -> bool:
        """Return whether a message of a `carrier`, or a copy of it, carries one of them."""
        found = original_in(stream, message)
        return found is not None and found[0] == self.stream and self.matches(found[1])

    def is_copy(self, stream: str, message: Message) -> bool:
        """Return whether a message of a stream is one of them or a copy of one, judged by the message alone."""
        original = original_in(stream, message)
        if original is not None and original[0] == self.stream:
            message = original[1]
        elif _carried_by(stream):
            return False
        return self.matches(message)

    def kept_in(self, stream: str, known: Mapping[int, int], message: Message) -> bool:
        """Return whether a message of a stream without origins is one of those that were found, or would have been.

        `known` has the store time of those that were found by their sequence.
        """
        if self.sequence is None and self.is_copy(stream, message):
            return True
        return known.get(message.sequence) == message.timestamp_ns

    def copied_from(
        self,
        origin: str,
        stream: str,
        relation: str,
        known: Mapping[int, int],
        message: Message,
        *,
        same_sequences: bool,
    ) -> bool:
        """Return whether a message of a stream is the copy of one that was found in `origin`, or that would have been
        there.

        `relation` is that of the stream to `origin`; `known` has the store time of each by its sequence, and
        `same_sequences` says that these are those of the event's own stream.
        """
        copied = message
        if relation == "source":
            sourced = _sourced(message)
            if sourced is None or sourced[0] != origin:
                return False
            copied = sourced[1]
        if self.sequence is None and (self.matches(copied) or self.is_copy(stream, message)):
            return True
        stored_ns = known.get(copied.sequence)
        if stored_ns is None:
            return same_sequences and self.matches(copied)
        if relation == "mirror":
            return message.timestamp_ns == stored_ns  # a mirror keeps it
        return message.timestamp_ns >= stored_ns - CLOCKS_DIFFER_NS  # a stream that sources has its own, later one


def relation(config: Mapping[str, Any], origin: str) -> str:
    """Return the relation of a stream of that configuration to `origin`: `mirror`, `source`, or an empty text."""
    found = StreamConfig(config)
    if found.mirror and found.mirror.name == origin:
        return "mirror"
    return "source" if any(source.name == origin for source in found.sources) else ""


def carrier(stream: str, configs: Mapping[str, Mapping[str, Any]], *, seen: frozenset[str] = frozenset()) -> str:
    """Return the stream of ours, with messages that carry notifications, that a stream is, mirrors or sources, also by
    way of others; empty where there is none.

    `configs` are those of the streams that are known.
    """
    if _carried_by(stream):
        return stream
    if stream in seen or stream not in configs:
        return ""
    origins = StreamConfig(configs[stream]).origins
    found = (carrier(each.name, configs, seen=seen | {stream}) for each in origins)
    return next(filter(None, found), "")


def original_in(stream: str, message: Message) -> Original | None:
    """Return the original of a message, as far as the message names it: its stream, and the message there; else
    None.
    """
    return (_carried_by(stream) or _sourced)(message)


def _sourced(message: Message) -> Original | None:
    """Return the original of a sourced message, by the header that the server adds; None where it has none."""
    words = (message.headers or {}).get(SOURCE, "").split()
    if len(words) < 2 or not words[1].isdigit():
        return None
    subject = words[4] if len(words) > 4 else message.subject
    stream = words[0].partition(":")[0]
    original = Message(
        subject=subject, data=message.data, headers=message.headers, sequence=int(words[1]), timestamp_ns=1
    )
    return stream, original


def _carried_by(stream: str) -> Callable[[Message], Original | None] | None:
    """Return what tells the original of a message of one of our streams that carry notifications; None for others."""
    if app := own_streams.app_of(DEAD_LETTERS, stream):
        return partial(_dead_letter, app)
    if own_streams.app_of(RETRIES, stream):
        return _retry
    return _waiting if delayed_messages.event_stream_of(stream) else None


def _dead_letter(app: str, message: Message) -> Original | None:
    with suppress(UndecodableError):
        dead_letter = DeadLetter.read(message, app)
        return dead_letter.stream, dead_letter.original
    return None


def _retry(message: Message) -> Original | None:
    original, stream = dead_letter_records.unwrap(message)
    return (stream, original) if stream else None


def _waiting(message: Message) -> Original | None:
    with suppress(UndecodableError):
        outgoing = delayed_messages.original(message)
        return outgoing.stream, outgoing.message
    return None


class Suspect(Struct, frozen=True, kw_only=True):
    """A table, windows or a counter that may hold something of the notifications to erase."""

    kind: Kind
    name: str
    """The name as `--key` takes it before the slash."""
    keys: int
    named: tuple[str, ...] = ()
    """Those keys that have a value of what is to be erased, in their name or in their value."""
    unread: str = ""
    """Why it could not be read; empty where it was."""


async def find_suspects(admin: Admin, infos: Mapping[str, StreamInfo], values: Iterable[str]) -> list[Suspect]:
    """Return all tables, windows and counters that hold any key, by name."""
    wanted = _Values(values)
    found = []
    for stream in sorted(infos):
        if stream.startswith(BUCKET) and own_buckets.kind_of(stream.removeprefix(BUCKET)) not in POSITIONS_ONLY:
            found.append(await _bucket(admin, stream.removeprefix(BUCKET), wanted))
        elif app := own_streams.app_of(COUNTERS, stream):
            found += await _counters(admin, app, wanted)
    return [suspect for suspect in found if suspect.keys or suspect.unread]


def parse_key(text: str) -> tuple[str, str]:
    """Parse the value of `--key`: a bucket or `<app>__<counter>`, and a key. Raises `InvalidNotificationError`."""
    holder, slash, key = text.partition("/")
    if not (holder and slash and key):
        raise InvalidNotificationError(f"{text!r} is not BUCKET/KEY, such as index__sums/od")
    return holder, key


def subjects_of_key(holder: str, key: str) -> tuple[str, str]:
    """Return the two subjects that a key may have: that in a bucket, and that in a counter `<app>__<counter>`."""
    app, _, name = holder.partition("__")
    return f"{OF_KEYS}{holder}.{key}", f"{table_records.COUNTERS_SUBJECT}.{app}.{name}.{key}"


def subject_of_key(infos: Mapping[str, StreamInfo], holder: str, key: str) -> tuple[str, str]:
    """Return the stream and the subject of a key, in the streams that exist. Raises `NotFoundError`."""
    of_bucket, of_counter = subjects_of_key(holder, key)
    if f"{BUCKET}{holder}" in infos:
        return f"{BUCKET}{holder}", of_bucket
    if (counters := own_streams.of_app(COUNTERS, holder.partition("__")[0])) in infos:
        return counters, of_counter
    raise NotFoundError(f"no bucket {holder!r}, and no counter")


async def _bucket(admin: Admin, bucket: str, wanted: _Values) -> Suspect:
    found = own_buckets.kind_of(bucket)
    kind: Kind = found if found in ("table", "windows") else "bucket"
    newest: dict[str, bool] = {}
    named: set[str] = set()
    try:
        async for message in messages_of(admin, f"{BUCKET}{bucket}"):
            key = message.subject.removeprefix(f"{OF_KEYS}{bucket}.")
            if kind == "windows" and key.startswith("="):
                continue  # how far time has come, of all keys
            if found == "state" and not key.endswith(NOTED):
                continue
            if found == "failures" and not key.endswith(failure_counts.DECIDED):
                continue  # counts
            newest[key] = bool(message.data)
            if wanted.any_in(decode_key(key)) or any(map(wanted.any_in, _texts(message.data))):
                named.add(key)
    except BackendError as error:
        return Suspect(kind=kind, name=bucket, keys=0, unread=str(error))
    return Suspect(kind=kind, name=bucket, keys=sum(newest.values()), named=tuple(sorted(named)))


async def _counters(admin: Admin, app: str, wanted: _Values) -> list[Suspect]:
    keys: dict[str, set[str]] = {}
    prefix = f"{table_records.COUNTERS_SUBJECT}.{app}."
    try:
        subjects = await admin.subject_counts(own_streams.of_app(COUNTERS, app), subject=f"{prefix}>")
    except BackendError as error:
        return [Suspect(kind="counter", name=f"all counters of {app}", keys=0, unread=str(error))]
    for subject in subjects:
        name, key = subject.removeprefix(prefix).split(".", 1)
        keys.setdefault(f"{app}__{name}", set()).add(key)
    return [
        Suspect(
            kind="counter",
            name=name,
            keys=len(of_one),
            named=tuple(sorted(key for key in of_one if wanted.any_in(decode_key(key)))),
        )
        for name, of_one in sorted(keys.items())
    ]


async def messages_of(
    admin: Admin, stream: str, *, after: int = 0, last: int | None = None, subjects: Sequence[str] = ()
) -> AsyncIterator[Message]:
    """Yield the messages of a stream after a sequence, up to `last` or its present end, of some subjects or of all."""
    if last is None:
        last = (await admin.stream_info(stream)).last_sequence
    reading = admin.read_chunks(stream, filter_subjects=subjects, start_sequence=after + 1, last_sequence=last)
    async with aclosing(reading):
        async for chunk in reading:
            for message in chunk:
                yield message


def _texts(data: bytes) -> Iterator[str]:
    """Yield all texts, numbers and keys of a JSON value; of data that is not JSON, the whole as a text."""
    try:
        value = msgspec.json.decode(data) if data else None
    except UNREADABLE_JSON:
        yield data.decode("utf-8", "replace")
        return
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            fields: dict[str, Any] = value
            if "counted" in fields and "open" in fields:
                fields = {name: inside for name, inside in fields.items() if name not in POSITIONS}
            yield from fields
            waiting += fields.values()
        elif isinstance(value, list):
            waiting += value
        elif value is not None and not isinstance(value, bool):
            yield str(value)


class _Values:
    """Values that are searched in texts. A text takes the same time for one value as for many."""

    def __init__(self, values: Iterable[str]) -> None:
        self._values = frozenset(filter(None, values))
        self._counts = {len(PIECE.findall(value)) for value in self._values}
        """The numbers of pieces that the values have."""

    def any_in(self, text: str) -> bool:
        """Return whether one of the values is in a text, without being a part of a longer word or number."""
        if text in self._values:
            return True
        pieces = PIECE.findall(text)
        return any(
            "".join(pieces[start : start + count]) in self._values
            for count in self._counts
            for start in range(len(pieces) - count + 1)
        )
