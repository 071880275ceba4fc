"""A message that is too large for its stream with the headers that we add, stored as two messages.

A dead letter has more headers than its original, and the original may be as large as a server takes. So the first part
of its body is stored before the rest, as a message of its own under a subject that nobody reads; the rest names its
sequence. The message is there when the rest is. Of one that was broken off in between only the first part is there,
and no reader takes it for a message. Headers cannot be divided, so where those of the original leave no room for ours,
they are stored as the beginning of the body.

`dead_letter_store` and `ops.dead_letters` store by this module and read by it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing

from msgspec import structs

from aviso_workers.aviso.codec import Message, read_number
from aviso_workers.backends import Backend, PubAck
from aviso_workers.errors import RefusedError, UndecodableError
from aviso_workers.jetstream import error_codes

__all__ = ["HEADERS", "first_part_of", "fits", "is_first_part", "joined", "store", "whole"]

FIRST_PART = "Aviso-First-Part"
"""The header of a rest: the sequence of its first part."""
IS_FIRST_PART = "Aviso-Is-First-Part"
HEADER_BYTES = "Aviso-Header-Bytes"
"""The header of a message whose body begins with headers: how many bytes of it they are."""
HEADERS = (FIRST_PART, IS_FIRST_PART, HEADER_BYTES)
OURS = "Aviso-"
LINE_END = b"\r\n"
MAX_HEADER_BYTES = 65_535
"""JetStream stores no message with more."""
SUBJECT_END = ".part"
ADDED_BYTES = 1024
"""Bytes that publishing adds to the headers, and those of the headers' own frame."""

Publish = Callable[[Message, str], Awaitable[PubAck]]
"""Stores a message under a message id."""


async def store(message: Message, message_id: str, publish: Publish, *, max_payload: int) -> None:
    """Store it, in two parts where it is larger than `max_payload` bytes.

    Raises as `publish` does, and `RefusedError` with `MESSAGE_TOO_LARGE` where its headers leave no room for a part.
    """
    if fits(message, max_payload=max_payload):
        await publish(message, message_id)
        return
    if _header_size(message) > min(max_payload // 2, MAX_HEADER_BYTES):
        message = _with_headers_in_body(message)
    half = len(message.data) // 2
    if _header_size(message) + len(message.data) - half > max_payload:
        raise RefusedError(
            f"{message.subject}: it does not fit into two messages of {max_payload}", code=error_codes.MESSAGE_TOO_LARGE
        )
    first = await publish(
        structs.replace(
            message,
            subject=message.subject + SUBJECT_END,
            data=message.data[:half],
            headers={**(message.headers or {}), IS_FIRST_PART: "true"},
        ),
        message_id + SUBJECT_END,
    )
    rest = {**(message.headers or {}), FIRST_PART: str(first.sequence)}
    await publish(structs.replace(message, data=message.data[half:], headers=rest), message_id)


def fits(message: Message, *, max_payload: int) -> bool:
    """Return whether it is stored as one message."""
    size = _header_size(message)
    return size <= MAX_HEADER_BYTES and size + len(message.data) <= max_payload


def is_first_part(message: Message) -> bool:
    """Return whether it is not a message by itself."""
    return IS_FIRST_PART in (message.headers or {})


def first_part_of(message: Message) -> int:
    """Return the sequence of its first part; 0 for a message that was stored as one, or names none."""
    try:
        return read_number((message.headers or {}).get(FIRST_PART, ""))
    except UndecodableError:
        return 0


async def whole(backend: Backend, stream: str, message: Message) -> Message:
    """Return the message with its whole body, and its headers.

    Raises `UndecodableError` where its first part is gone, `BackendError` where it cannot be read now.
    """
    sequence = first_part_of(message)
    if not sequence:
        return message
    first = await message_at(backend, stream, sequence)
    if first is None or not is_first_part(first) or _original(first.headers) != _original(message.headers):
        raise UndecodableError(f"message {message.sequence} of {stream} lacks its first part, which was {sequence}")
    return joined(first.data, message)


def joined(first: bytes, rest: Message) -> Message:
    """Return the message of which these are the parts. Raises `UndecodableError`."""
    return _with_own_headers(structs.replace(rest, data=first + rest.data))


def _with_headers_in_body(message: Message) -> Message:
    """Return the message with all headers but ours at the beginning of its body."""
    headers = message.headers or {}
    kept = {name: value for name, value in headers.items() if name.startswith(OURS)}
    # What was no UTF-8 has three bytes each that it came with one: then the whole might not fit.
    lines = [f"{name}:{value}".replace("\ufffd", "?").encode() for name, value in headers.items() if name not in kept]
    moved = LINE_END.join(lines)
    return structs.replace(message, data=moved + message.data, headers={**kept, HEADER_BYTES: str(len(moved))})


def _with_own_headers(message: Message) -> Message:
    """Return the message as it was before `_with_headers_in_body`.

    Raises `UndecodableError` where it cannot have been so.
    """
    headers = dict(message.headers or {})
    if HEADER_BYTES not in headers:
        return message
    size = read_number(headers.pop(HEADER_BYTES))
    for line in message.data[:size].split(LINE_END):
        name, _, value = line.decode("utf-8", "replace").partition(":")
        headers.setdefault(name, value)
    return structs.replace(message, data=message.data[size:], headers=headers)


def _original(headers: Mapping[str, str] | None) -> tuple[str | None, ...]:
    return tuple((headers or {}).get(name) for name in ("Aviso-Stream", "Aviso-Sequence", "Aviso-Timestamp"))


def _header_size(message: Message) -> int:
    return sum(len(f"{name}: {value}\r\n".encode()) for name, value in (message.headers or {}).items()) + ADDED_BYTES


async def message_at(backend: Backend, stream: str, sequence: int) -> Message | None:
    """Return the message of that sequence; None where the stream does not hold it. Raises `NotFoundError`."""
    reading = backend.read(stream, filter_subjects=(), start_sequence=sequence, last_sequence=sequence)
    async with aclosing(reading):
        return await anext(reading, None)
