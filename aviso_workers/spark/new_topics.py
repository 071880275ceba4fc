"""Rows for a stream that keeps the newest message of a topic: stored only where the stream holds none of their topic.

`once` reads the stream before it publishes, and leaves out the rows whose topic is there. What others publish
between that read and the storing is newer than any row and must not be replaced by one: each message states which one
it expects to be the last of its topic, and the server refuses it where that is not so.
"""

from __future__ import annotations

from msgspec import structs

from aviso_workers.aviso.codec import is_marker
from aviso_workers.backends import Backend, OutgoingChunk, PubAck
from aviso_workers.engine.publisher import Publisher
from aviso_workers.jetstream.answers import EXPECTED_LAST, MESSAGE_ID


async def store(
    publisher: Publisher, backend: Backend, event_type: str, *, stream: str, chunk: OutgoingChunk
) -> list[PubAck | None]:
    """Store each message whose topic is new to the stream, and return its acknowledgement, or None where the stream
    holds another one of its topic.

    Raises as `Publisher.store_answered` and `Backend.message` do.
    """
    answers: list[PubAck | None] = [None] * len(chunk)
    expected = dict.fromkeys(range(len(chunk)), 0)
    while expected:
        tried, expected = expected, {}
        answered = await publisher.store_answered(event_type, _expecting(chunk, tried))
        for place, answer in zip(tried, answered, strict=True):
            if isinstance(answer, PubAck):
                answers[place] = answer
                continue
            newest = await backend.message(stream, last_by_subject=chunk.subjects[place])
            if newest is None:  # it was deleted just now
                expected[place] = 0
            elif is_marker(newest):  # the server counts what it says of the last message's end as the last message
                expected[place] = newest.sequence
            elif (newest.headers or {}).get(MESSAGE_ID) == chunk.message_ids[place]:
                # An earlier attempt has stored it. The server checks the expected sequence before it checks the id.
                answers[place] = PubAck(stream=stream, sequence=newest.sequence, duplicate=True)
    return answers


def _expecting(chunk: OutgoingChunk, expected: dict[int, int]) -> OutgoingChunk:
    """Return some messages of a chunk, each with the sequence that the newest message of its topic must have."""
    part = OutgoingChunk(
        **{name: [getattr(chunk, name)[place] for place in expected] for name in chunk.__struct_fields__}
    )
    headers = [
        {**(header or {}), EXPECTED_LAST: str(sequence)}
        for header, sequence in zip(part.headers, expected.values(), strict=True)
    ]
    return structs.replace(part, headers=headers)
