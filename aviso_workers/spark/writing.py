"""Rows to a stream: acknowledged, and stored once.

Spark makes the writers by `data_source`, pickles them, and runs `write` in a task. A row's message id is either of a
column, or made of what Spark repeats when it runs a task again: the query, the batch, the partition and the row.
`rows` makes the messages, and the engine's publisher does the rest, as for any other notification: stream, headers,
waiting and trying again.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from aviso_workers.config import Config
from aviso_workers.engine.provisioning import Provisioner
from aviso_workers.engine.publishing import Publisher
from aviso_workers.errors import InvalidNotificationError
from aviso_workers.events import Events
from aviso_workers.spark.connecting import connected, load_config
from aviso_workers.spark.options import Writing
from aviso_workers.spark.rows import Rows

__all__ = ["BatchWriter", "StreamWriter"]

QUERY, BATCH = "sql.streaming.queryId", "streaming.sql.batchId"


@dataclass
class Written(WriterCommitMessage):
    rows: int


class _Writer:
    """What both writers do in a task."""

    def __init__(self, writing: Writing) -> None:
        self._writing = writing

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        writing = self._writing
        settings = load_config(writing.config)
        prefix = self._prefix()
        rows = 0
        with connected(settings) as connection:
            publisher = _publisher(connection.backend, settings)
            made = Rows(writing.event, settings.notification_schema[writing.event])
            for batch in iterator:
                ids = _ids(batch, writing.id_column, prefix=prefix, first=rows)
                connection.call(publisher.store_chunk, writing.event, made.chunk(batch, ids))
                rows += len(batch)
        return Written(rows)

    def _prefix(self) -> str:
        """The same for every attempt at a task, and different for all others."""
        context = TaskContext.get()
        assert context is not None
        return f"{self._run(context)}/{context.partitionId()}"

    def _run(self, context: TaskContext) -> str:
        raise NotImplementedError


class BatchWriter(_Writer, DataSourceArrowWriter):
    """A write of its own, also where `foreachBatch` of a streaming query calls for several."""

    def __init__(self, writing: Writing) -> None:
        super().__init__(writing)
        self._job = uuid.uuid4().hex

    def _run(self, context: TaskContext) -> str:
        return self._job


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """A batch of a streaming query, which after a crash is written again under the same number."""

    def _run(self, context: TaskContext) -> str:
        return f"{context.getLocalProperty(QUERY)}/{context.getLocalProperty(BATCH)}"


def _publisher(backend: Any, settings: Config) -> Publisher:
    events = Events()
    management = settings.notification_backend.jetstream.stream_management
    provisioner = Provisioner(backend, management=management, events=events)
    own_streams = Provisioner(backend, management="reconcile", events=events, removes_replicas=False)
    return Publisher(backend, config=settings, provisioner=provisioner, own_streams=own_streams, events=events)


def _ids(batch: pa.RecordBatch, column: str | None, *, prefix: str, first: int) -> list[str]:
    """The message ids of rows, of which the first is that one of its partition."""
    if column is None:
        return [f"{prefix}/{row}" for row in range(first, first + len(batch))]
    values = batch.column(batch.schema.names.index(column)).to_pylist()
    if None in values or "" in values:
        raise InvalidNotificationError(f"msgIdColumn {column!r} is null or empty in a row")
    return [str(value) for value in values]
