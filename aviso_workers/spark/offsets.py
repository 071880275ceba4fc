"""Offsets of a query in a stream: how far its next step goes, and how a step is divided among tasks.

Pure: `readers` asks servers. An offset is the sequence up to which everything was taken, together with the time at
which the stream was created: after it was deleted and recreated, equal sequences mean other messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import Struct, structs
from pyspark.sql.datasource import InputPartition

from aviso_workers.backends import StreamInfo
from aviso_workers.errors import DataLossError

LEAST_PER_PARTITION = 1000
"""Fewer are read faster by one task than by several: each needs a connection of its own."""


class Offset(Struct, frozen=True, kw_only=True):
    """The offset of a query: all messages up to `sequence`, inclusive, of the stream that was created at `created`."""

    stream: str
    created: str
    sequence: int
    partitions: int
    """Of how many partitions at most the batch is that ends here, so that a repeat of it has the same ones, whatever
    the options are then."""

    @classmethod
    def parse(cls, found: Mapping[str, Any]) -> Offset:
        """Return the offset that a checkpoint holds."""
        return msgspec.convert(found, cls)

    def as_dict(self) -> dict[str, Any]:
        return structs.asdict(self)


@dataclass
class Range(InputPartition):
    """The sequences that one task reads, from `first` to `last`, both inclusive."""

    first: int
    last: int
    created: str


def created(info: StreamInfo) -> str:
    """Return the time at which a stream was created, as offsets spell it."""
    return info.created.isoformat() if isinstance(info.created, datetime) else ""


def split(first: int, last: int, *, partitions: int, created: str) -> list[Range]:
    """Return the sequences from `first` to `last` in ranges of about one size."""
    count = last - first + 1
    if count <= 0:
        return []
    partitions = max(1, min(partitions, count // LEAST_PER_PARTITION))
    edges = [first + count * number // partitions for number in range(partitions + 1)]
    return [Range(first=begin, last=following - 1, created=created) for begin, following in pairwise(edges)]


def missing(
    info: StreamInfo, *, stream: str, first: int, created_then: str, last: int | None = None
) -> DataLossError | None:
    """Return the error of reading on at sequence `first`, up to `last`, where messages are lost; None where none are.

    Messages that somebody deleted in the middle of the stream do not count as lost. Nor does the beginning of a stream
    that keeps only the newest messages of each topic, since newer messages have replaced it. But if such a stream has
    no message left, something else has removed them, and they count as lost.
    """
    now = created(info)
    if now != created_then:
        return DataLossError(
            f"stream {stream} was deleted and recreated at {now}; the query knew the one of {created_then}: its "
            f"messages from {first} on are gone. Start with a new checkpoint, or set failOnDataLoss to false to read "
            "the new stream from its beginning"
        )
    if first > info.last_sequence + 1:
        return DataLossError(
            f"stream {stream} ends at {info.last_sequence}, and the query has read up to {first - 1}: the server has "
            f"lost the newest messages, and gives their sequences to others. Start with a new checkpoint, or set "
            f"failOnDataLoss to false to go on behind {info.last_sequence}"
        )
    gone_to = min(info.first_sequence, info.last_sequence + 1) - 1 if info.first_sequence else 0
    gone_to = gone_to if last is None else min(gone_to, last)
    if gone_to < first or (info.config.max_msgs_per_subject > 0 and info.messages):
        return None
    return DataLossError(
        f"stream {stream}: messages {first} to {gone_to} are gone, which the query was still to read. Set "
        "failOnDataLoss to false to go on without them, and let the stream keep more or the query run more often"
    )


def following(info: StreamInfo, *, first: int, created_then: str) -> int:
    """Return the sequence at which a query reads on instead of `first`, without the messages that are lost."""
    if created(info) != created_then:
        return 1
    return min(max(first, info.first_sequence), info.last_sequence + 1)
