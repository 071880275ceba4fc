"""Reading of two streams side by side, by their sequences, to compare a copy or a mirror with its original.

Called by `following_copies` and `recovery`; `backups.completion` reads one stream by it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from aviso_workers.backends import Admin, Message


async def read(admin: Admin, stream: str, *, after: int, last: int) -> AsyncGenerator[Message, None]:
    """Yield the messages of a stream between two sequences; none where the stream is known to end before."""
    if after >= last:
        return
    reading = admin.read(stream, filter_subjects=(), start_sequence=after + 1, last_sequence=last)
    async with aclosing(reading):
        async for message in reading:
            yield message


async def side_by_side(
    ours: AsyncIterator[Message], theirs: AsyncIterator[Message]
) -> AsyncIterator[tuple[Message | None, Message | None]]:
    """Yield the messages of two streams in pairs by sequence, with None where one of them has no such message."""
    one, other = await anext(ours, None), await anext(theirs, None)
    while one or other:
        if other is None or (one is not None and one.sequence < other.sequence):
            yield one, None
            one = await anext(ours, None)
        elif one is None or other.sequence < one.sequence:
            yield None, other
            other = await anext(theirs, None)
        else:
            yield one, other
            one, other = await anext(ours, None), await anext(theirs, None)
