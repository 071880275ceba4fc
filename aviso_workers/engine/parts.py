"""A message that is too large for its stream with the headers that we add, stored as two messages.

A dead letter has more headers than its original, and the original may be as large as a server takes. So the first part
of its body is stored before the rest, as a message of its own under a subject that nobody reads; the rest names its
sequence. The message is there when the rest is. Of one that was broken off in between only the first part is there,
and no reader takes it for a message. `dead_lettering` and `ops.dead_letters` store by this module and read by it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from msgspec import structs

from aviso_workers.backends import Backend, PubAck
from aviso_workers.codec import Message, read_number
from aviso_workers.engine.replaying import message_at
from aviso_workers.errors import RefusedError, UndecodableError

__all__ = ["HEADERS", "TOO_LARGE", "first_part_of", "fits", "is_first_part", "store", "whole"]

FIRST_PART = "Aviso-First-Part"
"""The header of a rest: the sequence of its first part."""
IS_FIRST_PART = "Aviso-Is-First-Part"
HEADERS = (FIRST_PART, IS_FIRST_PART)
TOO_LARGE = 10054
"""JetStream: the message is larger than it may be."""
SUBJECT_END = ".part"
ADDED_BYTES = 1024
"""What publishing adds to the headers, and the headers' own frame."""

Publish = Callable[[Message, str], Awaitable[PubAck]]
"""Stores a message under a message id."""


async def store(message: Message, message_id: str, publish: Publish, *, max_payload: int) -> None:
    """Store it, in two parts where it is larger than `max_payload` bytes.

    Raises as `publish` does, and `RefusedError` with the code `TOO_LARGE` where its headers leave no room for a part.
    """
    if fits(message, max_payload=max_payload):
        await publish(message, message_id)
        return
    half = len(message.data) // 2
    if _size(message) - half > max_payload:
        raise RefusedError(f"{message.subject}: its headers leave no room in {max_payload} bytes", code=TOO_LARGE)
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
    """Whether it is stored as one message."""
    return _size(message) <= max_payload


def is_first_part(message: Message) -> bool:
    """Whether it is no message by itself."""
    return IS_FIRST_PART in (message.headers or {})


def first_part_of(message: Message) -> int:
    """The sequence of its first part; 0 for a message that was stored as one, or names none."""
    try:
        return read_number((message.headers or {}).get(FIRST_PART, ""))
    except UndecodableError:
        return 0


async def whole(backend: Backend, stream: str, message: Message) -> Message:
    """The message with its whole body.

    Raises `UndecodableError` where its first part is gone, `BackendError` where it cannot be read now.
    """
    sequence = first_part_of(message)
    if not sequence:
        return message
    first = await message_at(backend, stream, sequence)
    if first is None or not is_first_part(first) or _original(first.headers) != _original(message.headers):
        raise UndecodableError(f"message {message.sequence} of {stream} lacks its first part, which was {sequence}")
    return structs.replace(message, data=first.data + message.data)


def _original(headers: Mapping[str, str] | None) -> tuple[str | None, ...]:
    return tuple((headers or {}).get(name) for name in ("Aviso-Stream", "Aviso-Sequence", "Aviso-Timestamp"))


def _size(message: Message) -> int:
    headers = sum(len(f"{name}: {value}\r\n".encode()) for name, value in (message.headers or {}).items())
    return len(message.data) + headers + ADDED_BYTES
