"""Backfills: stored notifications published again, filtered and checked against a schema, each once.

`aviso-workers spark backfill` calls it with an archive or a stream, as may any program with such rows. What is no
notification of the event type that it is to become goes to a table with the reason; where there is no such table,
nothing at all is published. A second run publishes what the first one did not come to, and adds nothing after one that
came to its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StringType, StructField, StructType

from aviso_workers.aviso import codec, schema
from aviso_workers.aviso.codec import Message, NotificationReader, NotificationWriter
from aviso_workers.aviso.schema import EventType
from aviso_workers.config import Config, streams
from aviso_workers.errors import InvalidNotificationError, NotFoundError, PipelineError
from aviso_workers.jetstream.answers import MESSAGE_ID
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.spark import writers
from aviso_workers.spark.connections import connected, load_config
from aviso_workers.spark.files import Files
from aviso_workers.spark.options import WriteOptions

TOPIC, REASON = "topic", "reason"
WRITTEN = re.compile(r"[^/_.][^/]*\.parquet")
"""The files of the table of dead letters, below its directory."""

IN_ORDER = "sequence"


class Backfilled(Struct, frozen=True, kw_only=True):
    """The numbers of rows that a backfill published, found in the stream, and refused."""

    published: int
    present: int
    """Not published: they are in the stream, or a newer one of the same topic is, also where that came meanwhile."""
    refused: int
    """No notifications: they are in the table of dead letters."""


def backfill(
    rows: DataFrame,
    event: str,
    *,
    dead_letters: str | None = None,
    fill: Mapping[str, str] | None = None,
    config: str | None = None,
) -> Backfilled:
    """Publish rows, as the data source or an archive has them, as notifications of the event type `event`.

    Of the columns `event_type`, `sequence` and `time` the message id is made, unless there is a column `id`.
    `dead_letters` is a directory, to which Parquet is added. `fill` has values of identifier fields, for rows that lack
    the field because they are older than it. Raises `PipelineError` where there are rows for it and it
    is None, `UnknownEventTypeError`, and `UnavailableError` where no server is reached.
    """
    event_type = load_config(config).event_type(event)
    named = rows if "id" in rows.columns else rows.withColumn("id", identity())
    filled = _filled(named, event, event_type, fill or {})
    checked = check(filled, event, config=config).persist()
    try:
        bad, good = checked.where("reason IS NOT NULL"), checked.where("reason IS NULL").drop("reason")
        refused = bad.count()
        if refused and dead_letters is None:
            raise _refusal(bad, refused, event)
        if refused:
            _add_dead_letters(bad, str(dead_letters))
        absent = without_stored(_with_fields_of(good, event_type), event, config=config)
        published = publish_once(absent, event, config=config)
        return Backfilled(published=published, present=good.count() - published, refused=refused)
    finally:
        checked.unpersist()


def check(rows: DataFrame, event: str, *, config: str | None = None) -> DataFrame:
    """Return the rows with the `topic` that each has as a notification of `event`; one that is none keeps its own, and
    has the `reason`.

    Raises `UnknownEventTypeError`.
    """
    event_type = load_config(config).event_type(event)
    others = [field for field in rows.schema.fields if field.name not in (TOPIC, REASON)]
    wanted = StructType([*others, StructField(TOPIC, StringType()), StructField(REASON, StringType())])
    names = wanted.names

    def step(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        writer = NotificationWriter(event, event_type)
        for batch in batches:
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            pairs = zip(columns["identifier"].to_pylist(), columns["payload"].to_pylist(), strict=True)
            found = [_topic_or_reason(writer, identifier, payload) for identifier, payload in pairs]
            topics = pa.array([topic for topic, _ in found], pa.string())
            columns[TOPIC] = pc.coalesce(topics, columns[TOPIC]) if TOPIC in columns else topics
            columns[REASON] = pa.array([reason for _, reason in found], pa.string())
            yield pa.RecordBatch.from_arrays([columns[name] for name in names], names=names)

    return rows.mapInArrow(step, wanted)


def matching(rows: DataFrame, event: str, where: Mapping[str, Any], *, config: str | None = None) -> DataFrame:
    """Return the rows of `event` that a filter lets through, as the `where` options of a read do for a stream.

    Raises `UnknownEventTypeError` and `InvalidIdentifierError`.
    """
    if not where:
        return rows
    event_type = load_config(config).event_type(event)
    prepared = schema.parse_where(event, event_type, where)

    def step(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        reader = NotificationReader(event, event_type, where=prepared)
        for batch in batches:
            pairs = zip(batch.column("topic").to_pylist(), batch.column("identifier").to_pylist(), strict=True)
            yield batch.filter(pa.array([_matches(reader, topic, identifier) for topic, identifier in pairs]))

    return rows.mapInArrow(step, rows.schema)


def _filled(rows: DataFrame, event: str, event_type: EventType, values: Mapping[str, str]) -> DataFrame:
    """Return the rows with these values of identifier fields where a row has none."""
    for field, value in values.items():
        if field not in event_type.identifier:
            raise schema.unknown(event, field, event_type.identifier)
        has_field = field in rows.select("identifier.*").columns
        known = F.col("identifier")[field].cast("string") if has_field else F.lit(None)
        filled = F.col("identifier").withField(f"`{field}`", F.coalesce(known, F.lit(value)))
        rows = rows.withColumn("identifier", filled)
    return rows


def _with_fields_of(checked: DataFrame, event_type: EventType) -> DataFrame:
    """Return rows that passed the check, with no identifier fields but those of the event type."""
    kind = checked.schema["identifier"].dataType
    if not isinstance(kind, StructType):
        return checked
    absent = F.lit(None).cast("string")
    found = {field: F.col("identifier")[field] if field in kind.names else absent for field in event_type.identifier}
    return checked.withColumn("identifier", F.struct(*(column.alias(field) for field, column in found.items())))


def _topic_or_reason(writer: NotificationWriter, identifier: Any, payload: Any) -> tuple[str | None, str | None]:
    values = {
        field: value.isoformat() if hasattr(value, "isoformat") else value
        for field, value in dict(identifier or {}).items()
        if value is not None
    }
    try:
        value = msgspec.json.decode(payload) if isinstance(payload, str) else payload
        return writer.message(values, value).subject, None
    except (msgspec.DecodeError, RecursionError) as error:
        return None, f"the payload is not JSON: {error}"
    except InvalidNotificationError as error:
        return None, str(error)


def _matches(reader: NotificationReader, topic: str, identifier: Mapping[str, Any]) -> bool:
    headers = {codec.SPATIAL_HEADERS[name]: identifier[name] for name in codec.SPATIAL_HEADERS if identifier.get(name)}
    return reader.matches(Message(subject=topic, data=b"", headers=headers))


def _add_dead_letters(bad: DataFrame, table: str) -> None:
    """Add refused rows to the table of dead letters, without those that an earlier run has added.

    They are written to a place of this run's own and moved in: two runs that Spark lets append to one directory have
    one place aside, which the first that ends removes, with what the other has written.
    """
    files, aside = Files(bad.sparkSession, table), f"_{uuid4().hex}"
    # A run that was killed leaves files in directories which Spark does not read.
    if any(WRITTEN.fullmatch(file.name) for file in files.list("")):
        known = bad.sparkSession.read.parquet(table).select("id", "reason")
        bad = bad.join(known, ["id", "reason"], "left_anti")
    bad.write.parquet(f"{files.root}/{aside}")
    for file in files.list(aside):
        if WRITTEN.fullmatch(file.name):
            files.move(f"{aside}/{file.name}", file.name)
    files.delete(aside)


def _refusal(bad: DataFrame, count: int, event: str) -> PipelineError:
    example = bad.select("id", "reason").first()
    assert example is not None
    older = (
        "--fill FIELD=VALUE completes rows that are older than a field. " if "is missing" in example["reason"] else ""
    )
    return PipelineError(
        f"{count} rows are not notifications of {event}, and nothing was published; {example['id']}: "
        f"{example['reason']}. {older}Give --dead-letters PATH to have them there, with their reasons, and publish the "
        "others"
    )


def identity() -> Column:
    """Return a column that identifies a stored message among all others, also those of a stream that was created
    again.
    """
    return F.concat_ws("/", "event_type", "sequence", F.unix_micros("time"))


def without_stored(rows: DataFrame, event: str, *, config: str | None = None) -> DataFrame:
    """Return the rows that the stream of `event` does not hold.

    They have the columns `id` and `topic`, the one that they would be published under. Where the stream keeps the
    newest message of a topic only, that is newer than any row, and one row is left for each other topic: that of the
    highest `sequence`. Raises `UnknownEventTypeError`, and `UnavailableError` where no server is reached.
    """
    settings = load_config(config)
    spec = _stream_of(event, settings)
    if keeps_one := _keeps_one(spec):
        newest = F.max_by(F.struct(*rows.columns), IN_ORDER).alias("newest")
        rows = rows.groupBy("topic").agg(newest).select("newest.*")
    with connected(settings) as connection:
        try:
            connection.call(connection.backend.stream_info, spec.name)
        except NotFoundError:
            return rows  # publishing makes the stream
    options: dict[str, str] = {"event": event, "includeHeaders": "true"} | ({"config": config} if config else {})
    stored = rows.sparkSession.read.format("aviso").options(**options).load()
    if keeps_one:
        return rows.join(stored.select("topic").distinct(), "topic", "left_anti")
    ids = F.explode(F.array(F.try_element_at("headers", F.lit(MESSAGE_ID)), identity()))
    return rows.join(stored.select(ids.alias("id")), "id", "left_anti")


def publish_once(rows: DataFrame, event: str, *, config: str | None = None) -> int:
    """Publish rows of `id`, `topic`, `identifier`, `payload` and `sequence`, in order within each topic, and return how
    many were stored now: each row once, however often and however late it is done again.

    The id of a row becomes the message id: what two runs at about the same time both send, the server stores once.
    What it has forgotten since, its duplicate window being over, is found in the stream (`without_stored`): a row is
    left out where a message there has its id, or is the very message that it came from.

    A row is not stored where another publisher has stored it since the stream was read, or has published another
    notification of its topic in a stream that keeps the newest of each. Raises `UnknownEventTypeError`, and what the
    data source raises, in a `PySparkException`.
    """
    only_new_topics = _keeps_one(_stream_of(event, load_config(config)))
    ordered = rows.repartition("topic").sortWithinPartitions(IN_ORDER).select("id", "identifier", "payload")
    wanted = WriteOptions(event=event, config=config, id_column="id", only_new_topics=only_new_topics)
    tasks = writers.write_counted(ordered, wanted)
    return sum(task.rows - task.duplicates - task.present for task in tasks)


def _stream_of(event: str, settings: Config) -> StreamSpec:
    """Return the stream of an event type. Raises `UnknownEventTypeError`."""
    return streams.event_stream(event, settings.event_type(event), settings)


def _keeps_one(spec: StreamSpec) -> bool:
    """Return whether a stream keeps only the newest message of each topic."""
    return spec.max_msgs_per_subject == 1
