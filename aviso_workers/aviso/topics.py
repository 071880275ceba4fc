"""Topics as NATS subjects: the escapes, the stream they land in, and the filters a server applies for us.

`codec` turns an identifier into a subject with `topic` and a stored subject back into values with
`decode_subject`; whoever opens a consumer asks `filter_subjects`. The escapes are aviso-server's, byte for
byte: `.`, `*`, `>` and `%` become `%2E`, `%2A`, `%3E` and `%25`, all else stays as it is, and the reader
takes any `%HH`.

A server's filter is as narrow as NATS allows and may still let more through than was asked for, such as
all numbers where a range is wanted: `schema.Where.matches` decides.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from string import hexdigits

from aviso_workers.aviso import literals, schema
from aviso_workers.aviso.schema import EventType, Where
from aviso_workers.errors import InvalidIdentifierError, InvalidNotificationError, UndecodableError

_BYTES = {high + low: bytes.fromhex(high + low) for high, low in product(hexdigits, repeat=2)}

LONGEST_SUBJECT = 3900
"""Bytes. A server takes 4096 for the line that a subject shares with an inbox, and closes the connection on more."""

_MAX_FILTER_SUBJECTS = 8
"""A server checks every message against each of them, which soon costs more than a wider filter."""


def encode_token(token: str) -> str:
    """Escape one part of a subject. Whether NATS can carry the rest is the business of `encode_subject`."""
    return token.replace("%", "%25").replace(".", "%2E").replace("*", "%2A").replace(">", "%3E")


def decode_token(token: str) -> str:
    """Undo the escapes of one part of a subject, which may be empty. Raises UndecodableError."""
    if "%" not in token:
        return token
    first, *escaped = token.split("%")
    try:
        parts = [_BYTES[part[:2]] + part[2:].encode() for part in escaped]
        return b"".join((first.encode(), *parts)).decode()
    except KeyError:
        raise UndecodableError(f"subject token {token!r} has a % without two hex digits after it") from None
    except UnicodeError as problem:
        raise UndecodableError(f"subject token {token!r} is not UTF-8 without its escapes") from problem


def encode_subject(tokens: Sequence[str]) -> str:
    """Join tokens to a subject. Raises InvalidNotificationError for one that NATS cannot carry or route."""
    for token in tokens:
        try:
            schema.require_routable(token)
        except ValueError as problem:
            raise InvalidNotificationError(f"subject token {token!r} {problem}") from problem
    return ".".join(map(encode_token, tokens))


def decode_subject(subject: str) -> tuple[str, ...]:
    """Return the tokens of a subject, base first; empty ones are kept. Raises UndecodableError."""
    if "%" not in subject:
        return tuple(subject.split("."))
    return tuple([decode_token(token) if "%" in token else token for token in subject.split(".")])


def check_subject(subject: str) -> None:
    """Raise UndecodableError for a subject under which no notification can be published."""
    if len(subject.encode()) > LONGEST_SUBJECT:
        raise UndecodableError(f"subject {reprlib.repr(subject)} is longer than {LONGEST_SUBJECT} bytes")
    decode_subject(subject)
    for token in subject.split("."):
        try:
            schema.require_routable(token)
        except ValueError as problem:
            raise UndecodableError(f"subject token {token!r} {problem}") from problem
        if token in ("*", ">"):
            raise UndecodableError(f"subject {subject!r} is a filter")


def stream_name(base: str) -> str:
    """Return the name of the stream of a base. Raises InvalidNotificationError for a text that is no base."""
    if problem := schema.base_problem(base):
        raise InvalidNotificationError(f"a topic base {problem}")
    return base.upper()


def binding(base: str) -> str:
    """Return the one subject that the stream of a base listens to."""
    return f"{base}.>"


def topic(event_type_name: str, event_type: EventType, identifier: Mapping[str, str]) -> str:
    """Return the subject of a notification, from its canonical identifier.

    Raises InvalidIdentifierError for a field that is missing or that NATS cannot carry, and
    InvalidNotificationError for a subject that is too long, or an event type without fields: no stream takes its
    bare base.
    """
    place = schema.topic_of(event_type_name, event_type)
    if not place.key_order:
        raise InvalidNotificationError(f"{event_type_name}: no identifier field to build a subject from")
    tokens = [encode_subject((place.base,))]
    for field in place.key_order:
        try:
            schema.require_routable(identifier[field])
        except KeyError:
            raise InvalidIdentifierError(event_type_name, field, "is missing from the subject") from None
        except ValueError as problem:
            raise InvalidIdentifierError(event_type_name, field, str(problem)) from problem
        tokens.append(encode_token(identifier[field]))
    subject = ".".join(tokens)
    if len(subject.encode()) > LONGEST_SUBJECT:
        raise InvalidNotificationError(
            f"{event_type_name}: the identifier makes a subject of {len(subject.encode())} bytes, "
            f"at most {LONGEST_SUBJECT} can be sent"
        )
    return subject


def key_of(topic: schema.Topic, fields: Sequence[str], *, of: str = "order_by") -> Callable[[str], tuple[str, ...]]:
    """Return a function from a subject to the tokens of these fields. Raises InvalidNotificationError, which says `of`
    what they are."""
    for field in fields:
        if field not in topic.key_order:
            hint = literals.suggestion(field, topic.key_order, all_of_them="it has", none="nothing")
            raise InvalidNotificationError(f"{of}: {field!r} is not part of the topic; {hint}")
    positions = [topic.key_order.index(field) + 1 for field in fields]

    def key(subject: str) -> tuple[str, ...]:
        tokens = subject.split(".")
        return tuple(tokens[position] for position in positions if position < len(tokens))

    return key


def filter_subjects(where: Where) -> tuple[str, ...]:
    """Return the filters for a consumer: they leave out what NATS can leave out, and nothing that `where` wants.

    A field with listed values gives one subject per value as long as there are at most eight in all,
    shortest lists first; every other field becomes `*`, and those at the end become one `>`. Any two of
    the subjects differ in a listed value, so that they never overlap, which JetStream refuses (10138).
    """
    narrowed: dict[int, list[str]] = {}
    room = _MAX_FILTER_SUBJECTS
    lists = [(position, found) for position, found in where.conditions if isinstance(found, frozenset)]
    for position, values in sorted(lists, key=lambda entry: len(entry[1])):
        if len(values) <= room:
            room //= len(values)
            narrowed[position] = [encode_token(value) for value in sorted(values)]
    last = max(narrowed, default=0)
    tail = [] if 0 < last == len(where.topic.key_order) else [">"]
    choices = [narrowed.get(position, ["*"]) for position in range(1, last + 1)]
    return tuple(".".join([encode_token(where.topic.base), *tokens, *tail]) for tokens in product(*choices))
