"""Comparison of rows that a stream discarded as duplicates with the messages that have their message ids.

`writers` calls `check` with the rows of a chunk that were acknowledged as duplicates. A stream discards by the id alone
and does not compare, so without this an id that two rows share would cost one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing

import msgspec

from aviso_workers.aviso import codec
from aviso_workers.backends import Backend, Message, OutgoingChunk
from aviso_workers.errors import DuplicateIdError

GAP = 200
"""So many messages are read in about the time of asking for one more."""
FEW = 10
"""Less than this is asked for one by one: a reading has to be set up."""


async def check(backend: Backend, stream: str, chunk: OutgoingChunk, discarded: Mapping[int, int]) -> int:
    """Compare discarded rows with the messages of their ids, and return how many cannot be compared, because a newer
    message of their topic replaced theirs.

    `discarded` has the place in the chunk of each, and the sequence of the message that has its id. Raises
    `DuplicateIdError`, whose `place` is that of the row, where the message has other content or is gone.
    """
    stored = await _messages(backend, stream, sorted(set(discarded.values())))
    replaced = 0
    for place, sequence in discarded.items():
        message = stored.get(sequence)
        if message is None:
            await _check_replaced(backend, stream, chunk, place=place, sequence=sequence)
            replaced += 1
        elif not _is_alike(message, chunk, place):
            raise DuplicateIdError(
                f"id {chunk.message_ids[place]!r}: the row was not stored; message {sequence} of stream {stream} has "
                "the id and holds other content",
                place=place,
            )
    return replaced


async def _messages(backend: Backend, stream: str, sequences: Sequence[int]) -> dict[int, Message]:
    """Return the messages of ascending sequences by sequence, without those that are deleted."""
    wanted, found = set(sequences), dict[int, Message]()
    for first, last, count in _runs(sequences):
        if count < FEW:
            continue
        reading = backend.read_chunks(stream, filter_subjects=(), start_sequence=first, last_sequence=last)
        async with aclosing(reading):
            async for chunk in reading:
                found |= {message.sequence: message for message in chunk if message.sequence in wanted}
    for sequence in wanted - found.keys():  # a replica that is behind does not have them, and the leader may
        message = await backend.message(stream, sequence)
        if message is not None:
            found[sequence] = message
    return found


def _runs(sequences: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of sequences that are close to each other: the first, the last, and how many there are."""
    begin = 0
    for place in range(1, len(sequences) + 1):
        if place == len(sequences) or sequences[place] - sequences[place - 1] > GAP:
            yield sequences[begin], sequences[place - 1], place - begin
            begin = place


async def _check_replaced(backend: Backend, stream: str, chunk: OutgoingChunk, *, place: int, sequence: int) -> None:
    """Raise `DuplicateIdError` unless the stream limits the messages of a topic, and has a newer one of the row's
    topic.
    """
    info = await backend.stream_info(stream)
    if info.config.max_msgs_per_subject > 0:
        newest = await backend.message(stream, last_by_subject=chunk.subjects[place])
        if newest is not None and newest.sequence > sequence:
            return
    raise DuplicateIdError(
        f"id {chunk.message_ids[place]!r}: the row was not stored; the stream knows the id from message {sequence} of "
        f"stream {stream}, which is gone. Write it again when the stream's duplicate window is over",
        place=place,
    )


def _is_alike(message: Message, chunk: OutgoingChunk, place: int) -> bool:
    if message.subject != chunk.subjects[place] or _place(message.headers) != _place(chunk.headers[place]):
        return False
    return message.data == chunk.data[place] or _value(message.data) == _value(chunk.data[place])


def _place(headers: Mapping[str, str] | None) -> list[str | None]:
    """Return the spatial headers of a notification: the only headers that are part of what it says."""
    return [(headers or {}).get(header) for header in (codec.BBOX_HEADER, *codec.SPATIAL_HEADERS.values())]


def _value(data: bytes) -> object:
    """Return a payload decoded from JSON, so that different spellings are equal; the bytes where it is not JSON."""
    try:
        return msgspec.json.decode(data)
    except codec.UNREADABLE_JSON:
        return data
