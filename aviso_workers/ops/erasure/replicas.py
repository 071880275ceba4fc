"""Proof that the replicas of a stream hold what its leader holds.

A leader calls a replica current that has received its log, whether or not it has carried out what the log says. So a
replica that is slow, or that has just come back, holds messages that were deleted, and readers that it serves get them.
Each server counts the messages of its own replica, and the count is compared with the leader's.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from aviso_workers.backends import Admin

WITHIN_SECONDS, POLL_SECONDS = 30.0, 0.1


async def not_current(admin: Admin, stream: str, filters: Sequence[str]) -> Sequence[str]:
    """Return the servers whose replicas of a stream are not current, as the leader says. If there are none, return
    those whose replicas do not come to hold as many messages on these subjects as the leader's; without subjects all
    messages count.

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
