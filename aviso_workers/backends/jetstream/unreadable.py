"""No stream is created, or restored, where that could erase one that the server cannot read.

A nats-server that was started with the wrong encryption key goes on without the streams that it cannot read. It answers
that they do not exist, until one is to be created in the place of such a stream: it refuses that once, and
erases the files of the old one. The second attempt succeeds, with an empty stream.

So the first refusal is the last attempt. It leaves a mark on the server, which everybody asks for before a stream is
created: an empty stream in memory. It is gone when the server is restarted, as the right key needs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

from aviso_workers.errors import BackendError, RefusedError, UnreadableStreamError
from aviso_workers.jetstream import error_codes
from aviso_workers.jetstream.info import StreamInfo
from aviso_workers.jetstream.specs import UNREADABLE

MARK_SUBJECT = "aviso_workers.unreadable"
FILE_ERRORS = {error_codes.STREAM_NOT_CREATED: "store", error_codes.STREAM_NOT_RESTORED: "(10077)"}
"""By the code of a refusal, the text in its description if the files of a stream are the reason. The server gives the
same codes for other reasons too. 10077 is its code for an error of the store."""
ASK_SECONDS = 2.0
CURE = (
    "stop the server, and look at its encryption key, its store_dir and its log: with the right key the other streams "
    "are there again, and {lost} needs its backup (docs/operations/checks.md#js042)"
)


class StreamCreation(Protocol):
    """The verbs of `Management` for this, which cannot be imported here: it asks before it creates a stream."""

    async def stream_info(self, stream: str, *, timeout_seconds: float) -> StreamInfo: ...

    async def add_unguarded(self, config: Mapping[str, Any]) -> StreamInfo: ...


@asynccontextmanager
async def guarding_unreadable(streams: StreamCreation, name: str) -> AsyncIterator[None]:
    """Create the stream `name` in the block, if the server has no mark, and leave one where it cannot read the stream.

    Raises `UnreadableStreamError` where the server cannot read a stream that it has, this one or another one.
    """
    await require_no_mark(streams, name)
    try:
        yield
    except RefusedError as error:
        part = FILE_ERRORS.get(error.code or 0)
        if part is None or part not in str(error):
            raise
        with suppress(BackendError):
            await mark(streams, name)
        raise UnreadableStreamError(
            f"stream {name} is not created, because the server has files of a stream of that name and cannot use them "
            f"({error}); it erases them when it refuses. Nothing else is created until it is restarted: "
            + CURE.format(lost="this one"),
            code=error_codes.STREAM_NOT_CREATED,
        ) from error


async def require_no_mark(streams: StreamCreation, name: str) -> None:
    """Raise `UnreadableStreamError` where the server has the mark, so that the stream `name` must not be created."""
    try:
        found = await streams.stream_info(UNREADABLE, timeout_seconds=ASK_SECONDS)
    except RefusedError:
        return  # the server has no mark, or we may not ask
    raise UnreadableStreamError(
        f"stream {name} is not created, because the server cannot read one that it has "
        f"({found.config.description or ''}) and could erase others: {CURE.format(lost='that one')}. Where everything "
        f"is there, remove the mark: aviso-workers streams rm {UNREADABLE}",
        code=error_codes.STREAM_NOT_CREATED,
    )


async def mark(streams: StreamCreation, name: str) -> None:
    """Leave the mark, because the server cannot read the stream `name`. Raises `BackendError`."""
    await streams.add_unguarded(
        {
            "name": UNREADABLE,
            "subjects": [MARK_SUBJECT],
            "storage": "memory",
            "max_msgs": 1,
            "description": f"the server could not read stream {name}",
        }
    )
