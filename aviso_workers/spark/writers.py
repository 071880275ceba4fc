"""Writers of rows to a stream: each row is acknowledged, and none is discarded in place of another.

Spark makes the writers by `data_source`, pickles them, runs `write` in tasks, and hands what these return to `commit`
on the driver. `rows` makes the messages and their ids; the engine's publisher does the rest, as for any
other notification: stream, headers, waiting and trying again. Ids that are made of the content need no comparison with
what the stream discards, since it can only be the same row. With ids of a column each row is answered by itself, and
`check_discarded` compares: a stream discards by the id alone, and without this an id that two rows share would cost one
of them. A task makes the stream at most before its first row: what is missing later was deleted, with all that had been
stored in it, and `QueryRecord` says so of the earlier batches of a streaming query.

Dead letters of a write are the rows that are not notifications, each named and kept with its reason in Parquet. What is
wrong shows for a batch of rows at a time, so a batch that is refused is divided until each row of it that is wrong
stands alone. Their directory goes through Arrow's file systems, because a task has no JVM: a path that driver and
executors share, or a URL of HDFS, S3 or Google's storage.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
from msgspec import Struct, structs
from pyarrow import fs
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from aviso_workers import files
from aviso_workers.aviso import codec
from aviso_workers.aviso.codec import is_marker
from aviso_workers.backends import Backend, Message, OutgoingChunk, PubAck
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.config import Config, streams
from aviso_workers.engine.key_value import RetryingKeyValue
from aviso_workers.engine.publisher import Publisher
from aviso_workers.errors import (
    ConflictError,
    DataLossError,
    DuplicateIdError,
    InvalidNotificationError,
    NotFoundError,
    PipelineError,
    RefusedError,
    UnavailableError,
)
from aviso_workers.events import Events
from aviso_workers.jetstream.answers import EXPECTED_LAST, MESSAGE_ID
from aviso_workers.spark import offsets
from aviso_workers.spark.connections import BlockingConnection, connected, load_config, tries
from aviso_workers.spark.options import WriteOptions
from aviso_workers.spark.rows import ColumnIds, ContentIds, Rows
from aviso_workers.state.bucket_names import key_of_query, of_queries

TYPES = {"int": "BIGINT", "str": "STRING"}
QUERY, BATCH = "sql.streaming.queryId", "streaming.sql.batchId"
READ_GAP = 200
"""So many messages are read in about the time of asking for one more."""
READ_FEW = 10
"""Less than this is asked for one by one: a reading has to be set up."""
REASON = "reason"
MAX_SHOWN = 200
"""Characters of a row in an error."""
DIGEST_BYTES = 16

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass
class WrittenRows(WriterCommitMessage):
    """The result of one task: how many of its rows were stored, discarded or refused."""

    rows: int = 0
    duplicates: int = 0
    """Rows that the stream discarded, because it had their message id; counted with `msgIdColumn` only."""
    replaced: int = 0
    """Those of them that could not be compared, because a newer message of their topic had replaced theirs."""
    present: int = 0
    """Rows that were not stored, because somebody has published a notification of their topic; counted with
    `only_new_topics` only."""
    refused: int = 0
    """Rows that are not notifications, in the dead letters."""
    dead_letters: str = ""
    """The file that has them."""
    created: str = ""
    """When the stream was created that has the rows; empty where none were stored."""
    unrecorded: str = ""
    """Why that is not recorded for the next batches of the query; empty where it is, or nothing is to be."""


class _RowWriter:
    """The part that both writers share: the write in a task, and the report on the driver when all tasks are done."""

    def __init__(self, writing: WriteOptions) -> None:
        self._writing = writing
        self._run = uuid.uuid4().hex
        """The id of a write of its own: the same for every attempt at it, and different for all others."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenRows:
        settings = load_config(self._writing.config)
        context = TaskContext.get()
        assert context is not None
        patience = settings.notification_backend.jetstream.publish_deadline_seconds
        with connected(settings, patience_seconds=patience) as connection:
            batch = self._batch(context)
            run = f"{batch.query}/{batch.number}" if batch else self._run
            task = _Task(self._writing, settings, connection, run=run, batch=batch, partition=context.partitionId())
            for rows in iterator:
                task.write(rows)
            return task.end()

    def _batch(self, context: TaskContext) -> QueryBatch | None:
        """Return the batch of a streaming query that is written; None for a write of its own."""
        raise NotImplementedError

    def _report(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Log what became of the rows. Raises `PipelineError` where dead letters went to a directory that the driver
        does not see, and `DataLossError` where tasks wrote to different streams.
        """
        tasks = [message for message in messages if isinstance(message, WrittenRows)]
        if len(streams_seen := sorted({task.created for task in tasks if task.created})) > 1:
            raise _deleted(self._writing.event, streams_seen[-1])
        if paths := [task.dead_letters for task in tasks if task.dead_letters]:
            check_dead_letters_present(str(self._writing.dead_letters), paths)
        level = logging.WARNING if any(task.duplicates or task.refused for task in tasks) else logging.INFO
        logger.log(level, _summary(self._writing, tasks))
        if unrecorded := next((task.unrecorded for task in tasks if task.unrecorded), ""):
            logger.warning(
                f"{self._writing.event}: the next batches will not notice where the stream is deleted and created "
                f"again, because {unrecorded}"
            )


class BatchWriter(_RowWriter, DataSourceArrowWriter):
    """A write of its own, also in `foreachBatch` of a streaming query, unless the options name its query and batch."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._report(messages)

    def _batch(self, context: TaskContext) -> QueryBatch | None:
        query, number = self._writing.query_id, self._writing.batch_id
        return QueryBatch(query=query, number=number) if query is not None and number is not None else None


def write_counted(rows: DataFrame, writing: WriteOptions) -> list[WrittenRows]:
    """Write rows as a batch write does, and return the results of its tasks, which a batch write keeps to itself.
    Raises what Spark makes of a failure, and as `commit` does.
    """
    writer = BatchWriter(writing)

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pylist([asdict(writer.write(batches))])

    columns = ", ".join(f"{field.name} {TYPES[str(field.type)]}" for field in fields(WrittenRows))
    tasks = [WrittenRows(**row.asDict()) for row in rows.mapInArrow(write, columns).collect()]
    writer.commit([*tasks])
    return tasks


class StreamWriter(_RowWriter, DataSourceStreamArrowWriter):
    """A write of a streaming query's batch, which after a crash is written again under the same number."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._report(messages)

    def _batch(self, context: TaskContext) -> QueryBatch | None:
        return QueryBatch(query=str(context.getLocalProperty(QUERY)), number=int(str(context.getLocalProperty(BATCH))))


class _Task:
    """The write of one partition's rows."""

    def __init__(
        self,
        writing: WriteOptions,
        settings: Config,
        connection: BlockingConnection,
        *,
        run: str,
        batch: QueryBatch | None,
        partition: int,
    ) -> None:
        event, event_type = writing.event, settings.notification_schema[writing.event]
        self._writing = writing
        self._connection = connection
        self._backend = connection.backend
        self._partition = partition
        self._spec = streams.event_stream(event, event_type, settings)
        jetstream = settings.notification_backend.jetstream
        self._patience_seconds = patience = jetstream.publish_deadline_seconds
        self._provisioner = Provisioner(self._backend, management=jetstream.stream_management, events=Events())
        self._publisher = _publisher(self._backend, settings)
        self._record: QueryRecord | None = None
        if batch:
            self._record = QueryRecord(self._backend, batch, stream=self._spec.name, patience_seconds=patience)
        self._made = Rows(event, event_type, most_bytes=self._publisher.most_bytes)
        column = writing.id_column
        self._ids = ContentIds(run, partition=partition) if column is None else ColumnIds(column)
        directory = writing.dead_letters
        self._refused = RefusedRows(directory, task=f"{run}/{partition}") if directory else None
        self._written = WrittenRows()

    def write(self, batch: pa.RecordBatch) -> None:
        """Store the rows of a record batch. Raises `InvalidNotificationError` and `DuplicateIdError`, which name the
        row.
        """
        parts = list(divided(batch, self._messages))
        for place, made in parts:  # before any row is sent
            if isinstance(made, InvalidNotificationError):
                self._refuse(batch, place, made)
        for place, made in parts:
            if isinstance(made, OutgoingChunk):
                self._store(made, batch, place)
        self._written.rows += len(batch)

    def end(self) -> WrittenRows:
        """Finish the task, and return its result when the dead letters are on their disk.

        Raises `DataLossError` where the stream is not the one any more that the first rows were stored in.
        """
        if self._written.created and (now := self._asked(self._created)) != self._written.created:
            raise _deleted(self._writing.event, now)
        if self._refused is not None:
            self._written.refused, self._written.dead_letters = len(self._refused), self._refused.save()
        return self._written

    def _messages(self, batch: pa.RecordBatch) -> OutgoingChunk:
        made = self._made.chunk(batch, self._ids)
        if not (trace := self._writing.trace):
            return made
        # Here, so that the id of a row that is written again does not depend on the trace.
        return structs.replace(made, headers=[{**(headers or {}), **trace} for headers in made.headers])

    def _refuse(self, batch: pa.RecordBatch, place: int, error: InvalidNotificationError) -> None:
        if self._refused is None:
            raise InvalidNotificationError(f"{self._row(batch, place)}: {error}") from error
        self._refused.add(batch.slice(place, 1), str(error))

    def _store(self, chunk: OutgoingChunk, batch: pa.RecordBatch, first: int) -> None:
        """Store the messages of rows. Raises `DataLossError` where the stream that had earlier rows is gone."""
        if not self._written.created:
            self._written.created = self._asked(self._found)
        try:
            self._store_chunk(chunk, batch, first)
        except NotFoundError as error:
            raise _deleted(self._writing.event, "") from error

    def _store_chunk(self, chunk: OutgoingChunk, batch: pa.RecordBatch, first: int) -> None:
        """Store the messages of rows, and compare those that the stream discarded with what it has, where ids are of a
        column.
        """
        if self._writing.id_column is None:
            self._connection.call(self._publisher.store_chunk, self._writing.event, chunk)
            return
        acks = self._connection.call(self._answers, chunk)
        self._written.present += acks.count(None)
        discarded = {place: ack.sequence for place, ack in enumerate(acks) if ack is not None and ack.duplicate}
        if not discarded:
            return
        try:
            replaced = self._connection.call(check_discarded, self._backend, self._spec.name, chunk, discarded)
        except DuplicateIdError as error:
            raise DuplicateIdError(f"{self._row(batch, first + error.place)}: {error}") from error
        if self._writing.on_duplicate == "fail":
            place = min(discarded)
            raise DuplicateIdError(
                f"{self._row(batch, first + place)}: id {chunk.message_ids[place]!r}: the stream has it already, and "
                "onDuplicate is fail"
            )
        self._written.duplicates += len(discarded)
        self._written.replaced += replaced

    async def _answers(self, chunk: OutgoingChunk) -> Sequence[PubAck | None]:
        """Store a chunk, and return the acknowledgement of each message; None for one that was to be stored only if its
        topic is new, and whose topic is not.
        """
        if self._writing.only_new_topics:
            return await store_new_topics(
                self._publisher, self._backend, self._writing.event, stream=self._spec.name, chunk=chunk
            )
        answers = await self._publisher.store_answered(self._writing.event, chunk)
        if refused := next((answer for answer in answers if isinstance(answer, ConflictError)), None):
            raise refused
        return [answer for answer in answers if isinstance(answer, PubAck)]

    def _asked(self, request: Callable[[], Awaitable[T]]) -> T:
        """Return the server's answer to a request, which is retried for as long as publishing is."""
        left = tries(self._patience_seconds, now=time.monotonic())
        while True:
            try:
                return self._connection.call(request)
            except UnavailableError:
                if (wait := left.next_wait(time.monotonic())) is None:
                    raise
            time.sleep(wait)

    async def _found(self) -> str:
        """Return when the stream was created. It is made where it is missing and no earlier batch was stored in it.

        Raises `DataLossError` where earlier batches were stored in another stream of this name.
        """
        if self._record is None:
            return await self._ensured()
        try:
            if not (then := await self._record.created()):
                now = await self._ensured()
                await self._record.store(now)
                return now
        except RefusedError as error:
            self._written.unrecorded = f"bucket {of_queries(self._spec.name)} cannot be used: {error}"
            return await self._ensured()
        if (now := await self._created()) != then:
            raise self._record.lost(then=then, now=now)
        return now

    async def _ensured(self) -> str:
        """Create the stream where it is missing, and return when it was created."""
        await self._provisioner.ensure(self._spec)
        return await self._created()

    async def _created(self) -> str:
        """Return when the stream was created; an empty text where there is none."""
        try:
            return offsets.created(await self._backend.stream_info(self._spec.name))
        except NotFoundError:
            return ""

    def _row(self, batch: pa.RecordBatch, place: int) -> str:
        number = self._written.rows + place
        return f"row {number} of partition {self._partition} {excerpt(batch.slice(place, 1))}"


def _summary(writing: WriteOptions, tasks: Sequence[WrittenRows]) -> str:
    """Return a sentence on what became of the rows of all tasks."""
    rows, refused = sum(task.rows for task in tasks), sum(task.refused for task in tasks)
    found, present = sum(task.duplicates for task in tasks), sum(task.present for task in tasks)
    summary = f"{writing.event}: {rows} rows"
    if writing.id_column is not None:
        summary += f", {rows - refused - found - present} stored, {found} discarded because the stream had them already"
    if replaced := sum(task.replaced for task in tasks):
        summary += f" (of which {replaced} were not compared: newer notifications have replaced them)"
    if writing.only_new_topics:
        summary += f", {present} left out because the stream has newer ones of their topics"
    if writing.dead_letters is not None:
        summary += f", {refused} refused, in {writing.dead_letters}"
    return summary


def _deleted(event: str, created: str) -> DataLossError:
    """Return the error of a write whose stream is another one than that of its first rows, or is gone."""
    return DataLossError(
        f"{event}: its stream was deleted{f' and recreated at {created}' if created else ''}, while rows were "
        "written: those that were stored before are gone. Write all of them again; a streaming query does so with a "
        "new checkpoint"
    )


def _publisher(backend: Backend, settings: Config) -> Publisher:
    """Return a publisher that creates no stream in place of one that is deleted while it publishes."""
    events = Events()
    provisioner = Provisioner(backend, management="observe", events=events)
    own_streams = Provisioner(backend, management="reconcile", events=events, removes_replicas=False)
    return Publisher(backend, config=settings, provisioner=provisioner, own_streams=own_streams, events=events)


async def store_new_topics(
    publisher: Publisher, backend: Backend, event_type: str, *, stream: str, chunk: OutgoingChunk
) -> list[PubAck | None]:
    """Store each message whose topic is new to a stream that keeps the newest of each, and return its acknowledgement,
    or None where the stream holds another one of its topic.

    `backfill` reads the stream before it publishes, and leaves out the rows whose topic is there. What others publish
    between that read and the storing is newer than any row and must not be replaced by one: each message states which
    one it expects to be the last of its topic, and the server refuses it where that is not so.

    Raises as `Publisher.store_answered` and `Backend.message` do.
    """
    answers: list[PubAck | None] = [None] * len(chunk)
    expected = dict.fromkeys(range(len(chunk)), 0)
    while expected:
        tried, expected = expected, {}
        answered = await publisher.store_answered(event_type, _expecting(chunk, tried))
        for place, answer in zip(tried, answered, strict=True):
            if isinstance(answer, PubAck):
                answers[place] = answer
                continue
            newest = await backend.message(stream, last_by_subject=chunk.subjects[place])
            if newest is None:  # it was deleted just now
                expected[place] = 0
            elif is_marker(newest):  # the server counts what it says of the last message's end as the last message
                expected[place] = newest.sequence
            elif (newest.headers or {}).get(MESSAGE_ID) == chunk.message_ids[place]:
                # An earlier attempt has stored it. The server checks the expected sequence before it checks the id.
                answers[place] = PubAck(stream=stream, sequence=newest.sequence, duplicate=True)
    return answers


def _expecting(chunk: OutgoingChunk, expected: dict[int, int]) -> OutgoingChunk:
    """Return some messages of a chunk, each with the sequence that the newest message of its topic must have."""
    part = OutgoingChunk(
        **{name: [getattr(chunk, name)[place] for place in expected] for name in chunk.__struct_fields__}
    )
    headers = [
        {**(header or {}), EXPECTED_LAST: str(sequence)}
        for header, sequence in zip(part.headers, expected.values(), strict=True)
    ]
    return structs.replace(part, headers=headers)


class QueryBatch(Struct, frozen=True, kw_only=True):
    """A micro-batch of a streaming query."""

    query: str
    """The query's id, which stays the same as long as its checkpoint does."""
    number: int


class QueryRecord:
    """The record of when the stream was created in which a query's batches are stored, kept on the server.

    Spark's checkpoint keeps nothing for a sink that is written in Python. So a query that is started again would find a
    stream that was deleted and recreated, take it for its own, and leave out for good what its earlier batches had
    stored. The record is made before the first rows of a query, and compared before those of each later batch. The
    first batch records it again: nothing of the query was stored before.
    """

    def __init__(self, backend: Backend, batch: QueryBatch, *, stream: str, patience_seconds: float) -> None:
        self._batch = batch
        self._stream = stream
        self._bucket = RetryingKeyValue(backend, of_queries(stream), patience_seconds=patience_seconds, own=True)
        self._key = key_of_query(batch.query)

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


async def check_discarded(backend: Backend, stream: str, chunk: OutgoingChunk, discarded: Mapping[int, int]) -> int:
    """Compare discarded rows with the messages of their ids, and return how many cannot be compared, because a newer
    message of their topic replaced theirs.

    `discarded` has the place in the chunk of each, and the sequence of the message that has its id. Raises
    `DuplicateIdError`, whose `place` is that of the row, where the message has other content or is gone.
    """
    stored = await _stored_messages(backend, stream, sorted(set(discarded.values())))
    replaced = 0
    for place, sequence in discarded.items():
        message = stored.get(sequence)
        if message is None:
            await _check_replaced(backend, stream, chunk, place=place, sequence=sequence)
            replaced += 1
        elif not _is_alike(message, chunk, place):
            raise DuplicateIdError(
                f"id {chunk.message_ids[place]!r}: the row was not stored; message {sequence} of stream {stream} has "
                "the id and holds other content",
                place=place,
            )
    return replaced


async def _stored_messages(backend: Backend, stream: str, sequences: Sequence[int]) -> dict[int, Message]:
    """Return the messages of ascending sequences by sequence, without those that are deleted."""
    wanted, found = set(sequences), dict[int, Message]()
    for first, last, count in _close_runs(sequences):
        if count < READ_FEW:
            continue
        reading = backend.read_chunks(stream, filter_subjects=(), start_sequence=first, last_sequence=last)
        async with aclosing(reading):
            async for chunk in reading:
                found |= {message.sequence: message for message in chunk if message.sequence in wanted}
    for sequence in wanted - found.keys():  # a replica that is behind does not have them, and the leader may
        message = await backend.message(stream, sequence)
        if message is not None:
            found[sequence] = message
    return found


def _close_runs(sequences: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of sequences that are close to each other: the first, the last, and how many there are."""
    begin = 0
    for place in range(1, len(sequences) + 1):
        if place == len(sequences) or sequences[place] - sequences[place - 1] > READ_GAP:
            yield sequences[begin], sequences[place - 1], place - begin
            begin = place


async def _check_replaced(backend: Backend, stream: str, chunk: OutgoingChunk, *, place: int, sequence: int) -> None:
    """Raise `DuplicateIdError` unless the stream limits the messages of a topic, and has a newer one of the row's
    topic.
    """
    info = await backend.stream_info(stream)
    if info.config.max_msgs_per_subject > 0:
        newest = await backend.message(stream, last_by_subject=chunk.subjects[place])
        if newest is not None and newest.sequence > sequence:
            return
    raise DuplicateIdError(
        f"id {chunk.message_ids[place]!r}: the row was not stored; the stream knows the id from message {sequence} of "
        f"stream {stream}, which is gone. Write it again when the stream's duplicate window is over",
        place=place,
    )


def _is_alike(message: Message, chunk: OutgoingChunk, place: int) -> bool:
    if message.subject != chunk.subjects[place] or _spatial(message.headers) != _spatial(chunk.headers[place]):
        return False
    return message.data == chunk.data[place] or _spelled(message.data) == _spelled(chunk.data[place])


def _spatial(headers: Mapping[str, str] | None) -> list[str | None]:
    """Return the spatial headers of a notification: the only headers that are part of what it says."""
    return [(headers or {}).get(header) for header in (codec.BBOX_HEADER, *codec.SPATIAL_HEADERS.values())]


def _spelled(data: bytes) -> bytes:
    """Return a payload of JSON in one spelling; other bytes as they are.

    Values are not compared, because Python takes true for 1.
    """
    try:
        return msgspec.json.encode(msgspec.json.decode(data), order="sorted")
    except codec.UNREADABLE_JSON:
        return data


def divided(
    batch: pa.RecordBatch, messages_of: Callable[[pa.RecordBatch], OutgoingChunk], *, first: int = 0
) -> Iterator[tuple[int, OutgoingChunk | InvalidNotificationError]]:
    """Yield the messages of a batch in order, a chunk at a time, and for each row that is wrong its error.

    With each comes the number of its first row, which for that of the batch is `first`.
    """
    try:
        made = messages_of(batch)
    except InvalidNotificationError as error:
        if len(batch) == 1:
            yield first, error
            return
        middle = len(batch) // 2
        yield from divided(batch.slice(0, middle), messages_of, first=first)
        yield from divided(batch.slice(middle), messages_of, first=first + middle)
        return
    yield first, made


def excerpt(row: pa.RecordBatch) -> str:
    """Return the beginning of a row as text, for an error message."""
    text = str(row.to_pylist()[0])
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


class RefusedRows:
    """The refused rows of one task. `save` writes them to a file that is named by a digest of their content.

    So a task that is run again with the same rows writes the same file, and one that has other rows writes another.
    """

    def __init__(self, directory: str, *, task: str) -> None:
        self._directory = directory
        self._digest = blake2b(task.encode(), digest_size=DIGEST_BYTES)
        self._rows: list[pa.RecordBatch] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: pa.RecordBatch, reason: str) -> None:
        self._digest.update(repr((row.to_pylist(), reason)).encode())
        self._rows.append(row.append_column(REASON, pa.array([reason])))

    def save(self) -> str:
        """Write the file, or nothing where no row was refused; return its path or an empty text."""
        if not self._rows:
            return ""
        from pyarrow import parquet  # takes a tenth of a second, and most tasks refuse nothing

        system, directory = _located(self._directory)
        path = f"{directory}/{self._digest.hexdigest()}.parquet"
        # An earlier attempt may have left the same file, whole or cut short by a power cut: it is written again.
        partial = f"{directory}/_{uuid.uuid4().hex}.parquet"  # readers of tables pass over names like this
        system.create_dir(directory)
        parquet.write_table(pa.Table.from_batches(self._rows), partial, filesystem=system)
        if is_local := isinstance(system, fs.LocalFileSystem):
            with open(partial, "rb+") as written:
                files.sync(written)
        system.move(partial, path)
        if is_local:
            files.sync_directory(Path(directory))
        return path


def check_dead_letters_present(directory: str, paths: list[str]) -> None:
    """Raise `PipelineError` where this process does not see a file that a task has written."""
    system, _ = _located(directory)
    for found in system.get_file_info(paths):
        if found.type != fs.FileType.File:
            raise PipelineError(
                f"deadLetters: {found.path} was written by an executor, and the driver finds no such file; give a "
                "directory or a URL that all of them share"
            )


def _located(directory: str) -> tuple[Any, str]:
    """Return the file system of a directory or URL, and the path in that file system."""
    if "://" in directory:
        system, path = fs.FileSystem.from_uri(directory)
        return system, path.rstrip("/")
    return fs.LocalFileSystem(), os.path.abspath(directory)
