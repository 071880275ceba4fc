"""Rows to notifications, each checked against its schema, acknowledged, and stored once.

Spark makes the writers by `data_source`, pickles them, and runs `write` in a task. A row's message id is either of a
column, or made of what Spark repeats when it runs a task again: the query, the batch, the partition and the row. The
engine's publisher does the rest, as for any other notification: stream, headers, waiting and trying again.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from aviso_workers import schema, topics
from aviso_workers.config import Config
from aviso_workers.engine.provisioning import Provisioner
from aviso_workers.engine.publishing import Publisher
from aviso_workers.errors import InvalidNotificationError, InvalidOptionError, InvalidPayloadError, UndecodableError
from aviso_workers.events import Events
from aviso_workers.notifications import Notify
from aviso_workers.schema import EventType
from aviso_workers.spark.connecting import connected, load_config
from aviso_workers.spark.options import Writing

__all__ = ["BatchWriter", "StreamWriter", "check_columns"]

QUERY, BATCH = "sql.streaming.queryId", "streaming.sql.batchId"
READ_ONLY = {"event_type", "sequence", "time", "topic", "headers", "_corrupt_record"}
"""Columns of a read that a write may have and does not need."""
SLICE = 10_000
"""Rows that are handed to the publisher at once."""


@dataclass
class Written(WriterCommitMessage):
    rows: int


def check_columns(names: list[str], writing: Writing, event_type: EventType) -> None:
    """Raise `InvalidOptionError` where the columns of a data frame cannot be notifications."""
    event = writing.event
    if writing.id_column is not None and writing.id_column not in names:
        raise InvalidOptionError(f"msgIdColumn: there is no column {writing.id_column!r}")
    whole = "identifier" in names or "topic" in names
    known = {*event_type.identifier, "identifier", "payload", writing.id_column, *(READ_ONLY if whole else {"topic"})}
    if unknown := [name for name in names if name not in known]:
        raise InvalidOptionError(
            f"{event}: column {unknown[0]!r} is no part of a notification; select identifier, or topic, or columns "
            f"named {', '.join(event_type.identifier)}, and payload"
        )
    if absent := [field for field in event_type.identifier if field not in names and not whole]:
        raise InvalidOptionError(f"{event}: there is no column for the identifier field {absent[0]!r}")


class _Writer:
    """What both writers do in a task."""

    def __init__(self, writing: Writing) -> None:
        self._writing = writing
        self._job = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        writing = self._writing
        settings = load_config(writing.config)
        prefix = self._prefix()
        rows = 0
        with connected(settings) as connection:
            publisher = _publisher(connection.backend, settings)
            notifications = _Notifications(writing, settings.notification_schema[writing.event])
            for whole in iterator:
                for start in range(0, len(whole), SLICE):
                    batch = whole.slice(start, SLICE)
                    wanted = notifications.of(batch, prefix=prefix, first=rows)
                    rows += connection.call(publisher.notify_many, wanted)
        return Written(rows)

    def _prefix(self) -> str:
        """The same for every attempt at a task, and different for all others."""
        context = TaskContext.get()
        assert context is not None
        query, batch = context.getLocalProperty(QUERY), context.getLocalProperty(BATCH)
        return f"{query}/{batch}/{context.partitionId()}" if query else f"{self._job}/{context.partitionId()}"


class BatchWriter(_Writer, DataSourceArrowWriter):
    pass


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    pass


def _publisher(backend: Any, settings: Config) -> Publisher:
    events = Events()
    management = settings.notification_backend.jetstream.stream_management
    provisioner = Provisioner(backend, management=management, events=events)
    return Publisher(backend, config=settings, provisioner=provisioner, events=events)


class _Notifications:
    """Makes notifications of rows. Made once in a task."""

    def __init__(self, writing: Writing, event_type: EventType) -> None:
        self._event = writing.event
        self._id_column = writing.id_column
        self._fields = tuple(event_type.identifier)
        self._topic = schema.topic_of(writing.event, event_type)

    def of(self, batch: pa.RecordBatch, *, prefix: str, first: int) -> Iterator[Notify]:
        """Raises `InvalidNotificationError` when a row is reached that is none."""
        identifiers = self._identifiers(batch)
        payloads = _payloads(self._event, batch)
        ids = _column(batch, self._id_column) if self._id_column else None
        for index, (identifier, payload) in enumerate(zip(identifiers, payloads, strict=True)):
            if ids is None:
                message_id = f"{prefix}/{first + index}"
            elif ids[index] is None or ids[index] == "":
                raise InvalidNotificationError(f"{self._event}: msgIdColumn {self._id_column!r} is null in a row")
            else:
                message_id = str(ids[index])
            yield Notify(self._event, identifier, payload, message_id)

    def _identifiers(self, batch: pa.RecordBatch) -> Iterator[Mapping[str, Any]]:
        names = batch.schema.names
        if "identifier" in names:
            is_map = pa.types.is_map(batch.schema.field("identifier").type)
            for found in _column(batch, "identifier"):
                yield _spelled(dict(found or ()) if is_map else found or {})
        elif "topic" in names:
            own = [field for field in self._fields if field in names and field not in READ_ONLY]
            beside = zip(*(_column(batch, field) for field in own), strict=True) if own else None
            for topic in _column(batch, "topic"):
                yield self._of_topic(topic) | (_spelled(dict(zip(own, next(beside), strict=True))) if beside else {})
        else:
            for values in zip(*(_column(batch, field) for field in self._fields), strict=True):
                yield _spelled(dict(zip(self._fields, values, strict=True)))

    def _of_topic(self, topic: str | None) -> dict[str, Any]:
        try:
            base, *values = topics.decode_subject(topic or "")
        except UndecodableError as error:
            raise InvalidNotificationError(f"{self._event}: {error}") from error
        if base != self._topic.base or len(values) != len(self._topic.key_order):
            wanted = ".".join([self._topic.base, *(f"<{field}>" for field in self._topic.key_order)])
            raise InvalidNotificationError(f"{self._event}: topic {topic!r} is not {wanted}")
        return dict(zip(self._topic.key_order, values, strict=True))


def _spelled(found: Mapping[str, Any]) -> dict[str, Any]:
    """As the schema takes it: without what is null, and dates as text."""
    return {
        field: value.isoformat() if hasattr(value, "isoformat") else value
        for field, value in found.items()
        if value is not None
    }


def _payloads(event: str, batch: pa.RecordBatch) -> Iterator[Any]:
    names = batch.schema.names
    if "payload" not in names:
        yield from [None] * len(batch)
        return
    kind = batch.schema.field("payload").type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        maps = pa.types.is_map(kind)
        yield from (dict(value) if maps and value is not None else value for value in _column(batch, "payload"))
        return
    for text in _column(batch, "payload"):
        try:
            yield None if text is None else msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidPayloadError(
                f"{event}: the payload of a row is not JSON: {error}; to_json makes JSON of columns"
            ) from error


def _column(batch: pa.RecordBatch, name: str) -> list[Any]:
    values: list[Any] = batch.column(batch.schema.get_field_index(name)).to_pylist()
    return values
