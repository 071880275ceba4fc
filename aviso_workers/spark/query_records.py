"""Records of the stream that the batches of a streaming query were stored in, kept on the server by the query's id.

Spark's checkpoint keeps nothing for a sink that is written in Python. So a query that is started again would find a
stream that was deleted and recreated, take it for its own, and leave out for good what its earlier batches had
stored. `writers` records when the stream was created before it stores the first rows of a query, and compares it before
those of each later batch. The first batch records it again: nothing of the query was stored before.
"""

from __future__ import annotations

from msgspec import Struct

from aviso_workers.backends import Backend
from aviso_workers.engine.key_value import RetryingKeyValue
from aviso_workers.errors import DataLossError
from aviso_workers.state.query_records import bucket_of, key_of


class QueryBatch(Struct, frozen=True, kw_only=True):
    """A micro-batch of a streaming query."""

    query: str
    """The query's id, which stays the same as long as its checkpoint does."""
    number: int


class QueryRecord:
    """The record of when the stream was created in which a query's batches are stored."""

    def __init__(self, backend: Backend, batch: QueryBatch, *, stream: str, patience_seconds: float) -> None:
        self._batch = batch
        self._stream = stream
        self._bucket = RetryingKeyValue(backend, bucket_of(stream), patience_seconds=patience_seconds, own=True)
        self._key = key_of(batch.query)

    async def created(self) -> str:
        """Return when the stream of earlier batches was created; an empty text where none is recorded.

        Raises `BackendError`.
        """
        entry = await self._bucket.get(self._key) if self._batch.number else None
        return entry.value.decode() if entry else ""

    async def store(self, created: str) -> None:
        """Record when the stream of this batch was created. Raises `BackendError`."""
        await self._bucket.put(self._key, created.encode())

    def lost(self, *, then: str, now: str) -> DataLossError:
        """Return the error of a query whose earlier batches are in a stream that is gone; `now` is empty where there is
        none.
        """
        return DataLossError(
            f"stream {self._stream} was deleted{f' and recreated at {now}' if now else ''}; earlier batches of "
            f"query {self._batch.query} were stored in the one of {then}, and are gone with it. Write all of it again "
            "with a new checkpoint (in foreachBatch also with another queryId); or, to go on without what is gone, "
            f"delete the key {self._key} of the KV bucket {self._bucket.name}"
        )
