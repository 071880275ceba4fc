"""A request: a notification is published, and the first notification that replies to it is waited for.

The end of the stream of replies is looked up before the request is published, and the stream is read from there on
afterwards. So a reply cannot be missed, however fast it comes.
"""

from __future__ import annotations

from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from aviso_workers import clocks
from aviso_workers.aviso.codec import store_time
from aviso_workers.aviso.notifications import Notification, Notify, Receipt
from aviso_workers.aviso.positions import Position
from aviso_workers.backends import Backend
from aviso_workers.clocks import SKEW
from aviso_workers.engine.key_value import retried
from aviso_workers.engine.publisher import Publisher
from aviso_workers.engine.replay import Replayer
from aviso_workers.errors import BackendError, NoReplyError, NotFoundError

Begin = tuple[Position, datetime]
"""Where the replies to a request begin, and a time before which none of them was stored."""


async def request(
    wanted: Notify, backend: Backend, publisher: Publisher, replies: Replayer, *, stream: str, timeout_seconds: float
) -> Notification[Any]:
    """Publish, and return the first of the `replies` that their `stream` stores afterwards. See `App.request`."""
    patience = publisher.patience_seconds
    begin = await retried(lambda: _end(backend, stream), clock=backend.clock, patience_seconds=patience)
    receipt = await publisher.notify(wanted)
    stored = f"the request is stored in {receipt.stream} with the sequence {receipt.sequence}"
    try:
        if receipt.duplicate:
            again = await retried(lambda: _since(backend, receipt), clock=backend.clock, patience_seconds=patience)
            begin = again or begin
        with clocks.move_on_after(backend.clock, timeout_seconds):
            async with aclosing(replies.watch(begin[0])) as found:
                async for reply in found:
                    if reply.time >= begin[1]:  # else a stream that was restored meanwhile is read from its beginning
                        return reply
    except BackendError as error:
        error.add_note(stored)
        raise
    raise NoReplyError(
        f"no reply came within {timeout_seconds:g} s: {stored}, and may still be handled",
        sequence=receipt.sequence,
        message_id=receipt.message_id,
    )


async def _end(backend: Backend, stream: str) -> Begin:
    """Return where the stream will store its next notification."""
    try:
        info = await backend.stream_info(stream)
    except NotFoundError:
        return Position(sequence=1), datetime.min.replace(tzinfo=UTC)
    return Position(sequence=info.last_sequence + 1), info.time - SKEW


async def _since(backend: Backend, receipt: Receipt) -> Begin | None:
    """Return the time of a request that was stored by an earlier call, whose reply may be stored as well; None where
    the request is gone."""
    message = await backend.message(receipt.stream, receipt.sequence)
    return None if message is None else (Position(time=store_time(message)), store_time(message))
