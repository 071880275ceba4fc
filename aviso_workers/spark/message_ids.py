"""The message ids of rows, of which a stream stores each once within its duplicate window.

A stream discards a message whose id it knows and says nothing against it, so an id must never be that of another row.
`writers` makes one of the two for a task, and `rows` asks it for the ids of each chunk of messages, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

import pyarrow as pa

from aviso_workers.backends import OutgoingChunk
from aviso_workers.errors import InvalidNotificationError

DIGEST_BYTES = 16
MAX_REMEMBERED = 500_000
"""Rows of a task whose ids it remembers, which takes about 60 MB."""


class MessageIds(Protocol):
    def of(self, batch: pa.RecordBatch, messages: OutgoingChunk) -> list[str]:
        """Return the ids of the messages that were made of the rows of a batch. Raises `InvalidNotificationError`."""


class ColumnIds:
    """Message ids that are the values of a column; the author of the query answers for their being different."""

    def __init__(self, column: str) -> None:
        self._column = column

    def of(self, batch: pa.RecordBatch, messages: OutgoingChunk) -> list[str]:
        values = batch.column(batch.schema.names.index(self._column)).to_pylist()
        if None in values or "" in values:
            raise InvalidNotificationError(f"msgIdColumn {self._column!r} is null or empty in a row")
        return [str(value) for value in values]


class ContentIds:
    """Ids that no other row can have: digests of the query, the batch, the partition and the whole message.

    Messages of a partition that are alike are numbered, so that each has an id of its own. An attempt that has other
    rows than the one before it therefore uses an id of that one only for a message that is the same: it may store a
    row twice, and never goes without one.
    """

    def __init__(self, run: str, *, partition: int) -> None:
        self._key = blake2b(f"{run}/{partition}".encode(), digest_size=DIGEST_BYTES).digest()
        self._seen: set[str] = set()
        self._repeats: dict[str, int] = {}
        self._rows = 0

    def of(self, batch: pa.RecordBatch, messages: OutgoingChunk) -> list[str]:
        key, size = self._key, DIGEST_BYTES
        data: Sequence[bytes] = messages.data
        if any(messages.headers):
            spelled = [repr(sorted(head.items()) if head else None).encode() for head in messages.headers]
            data = [b"%b\n%b" % row for row in zip(spelled, data, strict=True)]
        digests = [
            blake2b(b"%b%b\n%b" % (key, subject.encode(), body), digest_size=size).hexdigest()
            for subject, body in zip(messages.subjects, data, strict=True)
        ]
        first, self._rows = self._rows, self._rows + len(digests)
        new = set(digests)
        if len(new) == len(digests) and self._rows <= MAX_REMEMBERED and self._seen.isdisjoint(new):
            self._seen |= new
            return digests
        return [self._numbered(digest, row) for row, digest in enumerate(digests, first)]

    def _numbered(self, digest: str, row: int) -> str:
        if digest in self._seen:
            self._repeats[digest] = self._repeats.get(digest, 0) + 1
            return f"{digest}.{self._repeats[digest]}"
        if len(self._seen) < MAX_REMEMBERED:
            self._seen.add(digest)
            return digest
        return f"{digest}@{row}"
