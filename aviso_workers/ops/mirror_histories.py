"""Comparison of a mirror with its origin by some messages that both hold: whether they have one history.

Called by `mirrors` and `promotion`. A mirror keeps the sequence, the store time, the subject and the body of each
message; of its headers, a server leaves out those of expectations. An origin that was deleted and recreated counts
from the beginning, and its mirror goes on after the last sequence that it has: the numbers look well, and messages are
missing. So the two are compared message by message: the first and the last that both hold, some in between, and those
around the time at which the origin was created, which differ where it was restored from a backup that lacked the newest
messages.

What this cannot see: two differing messages between two equal ones that were compared, as an origin leaves that was
restored from a backup twice; and messages that only one of the streams holds, because they were deleted, replaced or
expired there.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import anyio
from msgspec import Struct

from aviso_workers._fast import stored_at
from aviso_workers.aviso import literals
from aviso_workers.backends import Admin, Management, Message
from aviso_workers.errors import BackendError
from aviso_workers.jetstream.info import StreamInfo

SPREAD = 16
"""Places between the first and the last sequence that both can have."""
BEFORE_CREATION = 4
"""Messages that are compared of those that were stored just before the origin was created."""
AT_ONCE = 8
"""Places that are compared side by side."""
CLOCKS = timedelta(seconds=60)
"""How far the clocks of the servers of one cluster may differ, and how late they may remove what is too old."""
LIMITS = ("max_msgs", "max_bytes", "max_age", "max_msgs_per_subject")


class Found(NamedTuple):
    """The part of a message that a mirror keeps as its origin has it."""

    sequence: int
    timestamp_ns: int
    subject: str
    data: bytes


class HistoryComparison(Struct, frozen=True, kw_only=True):
    """The result of comparing a mirror with its origin: how many messages are the same, and what differs."""

    equal: int = 0
    """Messages that both hold and that are the same."""
    trouble: str = ""
    """Why these are two histories; empty where nothing says so."""


class _ComparedStream:
    """A stream, with its state when it was read."""

    def __init__(self, streams: Management, found: StreamInfo) -> None:
        self._streams = streams
        self.name = found.name
        self.config = found.config
        assert found.created is not None  # a server always states it
        self.created = found.created
        self.asked = found.time
        self.messages = found.messages
        self.first = found.first_sequence
        self.last = found.last_sequence

    async def at(self, sequence: int) -> Found | None:
        return _found(await self._streams.message(self.name, sequence))

    async def next(self, sequence: int) -> Found | None:
        """Return the first message of this sequence or a later one; None where there is none."""
        return _found(await self._streams.message(self.name, sequence, next_by_subject=">"))

    async def last_before(self, time: datetime) -> int:
        """Return the last sequence up to which all messages were stored before a time."""
        low, high = self.first - 1, self.last
        while low < high:
            middle = (low + high + 1) // 2
            found = await self.next(middle)
            if found is not None and _time(found) < time:
                low = middle
            else:
                high = middle - 1
        return low


async def compare(admin: Admin, mirror: str, origin: str, *, api: str, timeout_seconds: float) -> HistoryComparison:
    """Compare a mirror with its origin, which is at another `api` or, where that is empty, in the same account.

    It takes some tens of requests for one message each. Raises `BackendError`.
    """
    here = _ComparedStream(admin, await admin.stream_info(mirror))
    # Asked for later, so that an origin that lives is never behind its mirror.
    streams = admin.at(api)
    there = _ComparedStream(streams, await streams.stream_info(origin, timeout_seconds=timeout_seconds))
    if here.last > there.last:
        return HistoryComparison(
            trouble=f"the origin {origin} was recreated or restored from a backup: it ends at {there.last}, and its "
            f"mirror {mirror}, which has what was stored before, at {here.last}"
        )
    pairs = await _pairs(here, there)
    equal = sum(pair == other for pair, other in pairs)
    for ours, theirs in pairs:
        if ours != theirs:
            return HistoryComparison(
                equal=equal,
                trouble=f"the origin {origin} was recreated or restored from a backup: its message "
                f"{theirs.sequence} is of {literals.rfc3339(theirs.timestamp_ns)}, and that of its mirror {mirror} of "
                f"{literals.rfc3339(ours.timestamp_ns)}",
            )
    return HistoryComparison(equal=equal, trouble=await _made_later(here, there, equal))


async def _pairs(here: _ComparedStream, there: _ComparedStream) -> list[tuple[Found, Found]]:
    """Return pairs of messages, from the mirror and its origin, that have the same sequence, in its order."""
    first, last = max(here.first, there.first), here.last
    if not (here.messages and there.messages) or first > last:
        return []
    places = {first + (last - first) * step // SPREAD for step in range(SPREAD + 1)}
    boundary = await here.last_before(there.created)
    places |= {place for place in range(boundary - BEFORE_CREATION + 1, boundary + 2) if first <= place <= last}
    found: dict[int, tuple[Found, Found]] = {}
    failures: list[BackendError] = []
    limiter = anyio.CapacityLimiter(AT_ONCE)

    async def compare_at(place: int) -> None:
        async with limiter:
            try:
                pair = None if failures else await _pair(here, there, place)
            except BackendError as error:
                failures.append(error)
                return
            if pair is not None:
                found[pair[0].sequence] = pair

    async with anyio.create_task_group() as tasks:
        for place in places:
            tasks.start_soon(compare_at, place)
    if failures:
        raise failures[0]
    return [found[sequence] for sequence in sorted(found)]


async def _pair(here: _ComparedStream, there: _ComparedStream, place: int) -> tuple[Found, Found] | None:
    """Return the pair of messages of a sequence or, where one stream has deleted it, of one soon after it; None where
    there is none.
    """
    for one, other in ((here, there), (there, here)):
        found = await one.next(place)
        if found is None or (counterpart := await other.at(found.sequence)) is None:
            continue
        return (found, counterpart) if one is here else (counterpart, found)
    return None


async def _made_later(here: _ComparedStream, there: _ComparedStream, equal: int) -> str:
    """Return why an origin that was created later than the mirror's messages is another stream; empty where it is
    not.
    """
    if not equal and here.messages:
        oldest = await here.next(here.first)
        if oldest is not None and _time(oldest) + CLOCKS < there.created:
            return (
                f"the origin {there.name} was recreated: it was created at {there.created:%Y-%m-%d %H:%M:%S}, its "
                f"mirror {here.name} has older messages, and none that both hold shows that it was restored with these"
            )
    if there.created > here.created + CLOCKS and await _holds_more(here, there):
        return (
            f"the origin {there.name} was recreated: it was created after its mirror {here.name}, and holds messages "
            f"before {here.first}, the first one of the mirror"
        )
    return ""


async def _holds_more(here: _ComparedStream, there: _ComparedStream) -> bool:
    """Return whether an origin holds older messages than its mirror, which no limit of the mirror explains."""
    if any(_limit(here.config, name) < _limit(there.config, name) for name in LIMITS):
        return False
    oldest = await there.next(there.first) if there.messages else None
    if oldest is None or oldest.sequence >= here.first:
        return False
    max_age = timedelta(microseconds=_limit(here.config, "max_age") / 1000)
    return there.asked - _time(oldest) < max_age - CLOCKS  # else both are about to remove it


def _found(message: Message | None) -> Found | None:
    if message is None:
        return None
    return Found(message.sequence, message.timestamp_ns, message.subject, message.data)


def _limit(config: Mapping[str, Any], name: str) -> int:
    value = int(config.get(name) or 0)
    return value if value > 0 else 10**18


def _time(found: Found) -> datetime:
    return stored_at(found.timestamp_ns)
