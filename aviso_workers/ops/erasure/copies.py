"""Recognition of messages that are copies of the notifications to erase.

Copies are recognised by what they say of themselves, not by the original, so that an erasure that was broken off can be
repeated, and so that a backup can be cleansed without a server. A message that a mirror, a restore or a copy of a
stream has kept has the sequence and the store time of its original; in a stream that was recreated the same sequence
has another time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from aviso_workers.aviso import schema, topics
from aviso_workers.aviso.codec import Message, NotificationReader
from aviso_workers.aviso.schema import EventType
from aviso_workers.errors import UndecodableError
from aviso_workers.jetstream.answers import SOURCE
from aviso_workers.jetstream.info import StreamConfig
from aviso_workers.state import dead_letter_records, delayed_messages, own_streams
from aviso_workers.state.dead_letter_records import DeadLetter
from aviso_workers.state.own_streams import DEAD_LETTERS, RETRIES

CLOCKS_DIFFER_NS = 60_000_000_000
"""Nanoseconds by which the clocks of two servers may differ."""

Matches = Callable[[Message], bool]
Original = tuple[str, Message]
"""The stream of an original, and the message that it was there."""


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
