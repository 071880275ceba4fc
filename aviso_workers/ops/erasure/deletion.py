"""Deletion of messages of one stream, as fast as possible without delaying publishers.

A nats-server (2.15) that erases a message rewrites the whole block of messages that holds it, up to 8 MB, and the
stream takes no publish meanwhile. Where that is so, many deletions at once are no faster than one after another, and
each publish waits for all of them. Where it is not, as in memory, in small streams and on an encrypted disk, a deletion
takes as long as its way there and back, and many at once are faster. So the time that deletions take decides how many
are under way: while each is answered soon, more are sent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import anyio

from aviso_workers.backends import Admin, Backend
from aviso_workers.errors import BackendError, NotFoundError, UnavailableError

T = TypeVar("T")

MAX_UNDER_WAY = 512
SOON_SECONDS = 0.02
"""A publish may wait for so long because of the deletions before it."""
PATIENCE_SECONDS, AGAIN_SECONDS = 30.0, 0.2
AT_A_TIME = 1000
"""Tasks that wait for their turn."""
WITHIN_SECONDS, POLL_SECONDS = 30.0, 0.1


class DeletionPace:
    """The pace of deletions: how many may be under way at a time."""

    def __init__(self) -> None:
        self.limiter = anyio.CapacityLimiter(1)

    def answered(self, seconds: float) -> None:
        """Adjust the pace by how many seconds a deletion took."""
        now = int(self.limiter.total_tokens)
        self.limiter.total_tokens = min(now + 1, MAX_UNDER_WAY) if seconds <= SOON_SECONDS else max(now // 2, 1)


async def delete(
    backend: Backend, stream: str, sequences: Sequence[int], *, pace: DeletionPace, progress: Callable[[int], None]
) -> None:
    """Delete messages and have their bytes overwritten; one that is gone already is passed over.

    Raises `BackendError` where one cannot be deleted; others may have been deleted then.
    """
    failures: list[BackendError] = []

    async def delete_one(sequence: int) -> None:
        try:
            async with pace.limiter:
                began = anyio.current_time()
                with suppress(NotFoundError):
                    await steadily(partial(backend.delete_message, stream, sequence))
                pace.answered(anyio.current_time() - began)
        except BackendError as error:
            failures.append(error)
            deletions.cancel_scope.cancel()
        else:
            progress(1)

    for start in range(0, len(sequences), AT_A_TIME):
        async with anyio.create_task_group() as deletions:
            for sequence in sequences[start : start + AT_A_TIME]:
                deletions.start_soon(delete_one, sequence)
        if failures:
            raise failures[0]


async def steadily(request: Callable[[], Awaitable[T]]) -> T:
    """Return the result of a request, which is repeated while a leader is elected."""
    deadline = anyio.current_time() + PATIENCE_SECONDS
    while True:
        try:
            return await request()
        except UnavailableError:
            if anyio.current_time() > deadline:
                raise
            await anyio.sleep(AGAIN_SECONDS)


async def not_current(admin: Admin, stream: str, filters: Sequence[str]) -> Sequence[str]:
    """Return the servers whose replicas of a stream are not current, as the leader says. If there are none, return
    those whose replicas do not come to hold as many messages on these subjects as the leader's; without subjects all
    messages count.

    A leader calls a replica current that has received its log, whether or not it has carried out what the log says. So
    a replica that is slow, or that has just come back, holds messages that were deleted, and readers that it serves get
    them. Each server counts the messages of its own replica, and the count is compared with the leader's.

    Raises `BackendError`.
    """
    found = await admin.stream_info(stream)
    if found.behind or not found.cluster.followers:
        return found.behind
    asked = found.cluster.members
    differ = set(asked)
    with anyio.move_on_after(WITHIN_SECONDS):
        while differ:
            before = await _at_leader(admin, stream, filters)
            # The servers choose which of them counts, so each is asked after a few attempts.
            server, counted = await admin.administration().replica_count(stream, filter_subjects=filters)
            after = await _at_leader(admin, stream, filters)
            if min(before, after) <= counted <= max(before, after):
                differ.discard(server)
            elif server in asked:
                differ.add(server)
                await anyio.sleep(POLL_SECONDS)
    return sorted(differ)


async def _at_leader(admin: Admin, stream: str, filters: Sequence[str]) -> int:
    if not filters:
        return (await admin.stream_info(stream)).messages
    return sum([sum((await admin.subject_counts(stream, subject=each)).values()) for each in filters])
