"""Publishing of rows exactly once, however often and however late it is done again.

`backfill` and `completeness` use it. Each row has an id of its own, which becomes the message id: what two runs at
about the same time both send, the server stores once. What it has forgotten since, its duplicate window being over,
is found in the stream: a row is left out where a message there has its id, or is the very message that it came from.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from aviso_workers.config import Config, streams
from aviso_workers.errors import NotFoundError
from aviso_workers.jetstream.answers import MESSAGE_ID
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.spark import writers
from aviso_workers.spark.connections import connected, load_config
from aviso_workers.spark.options import WriteOptions

IN_ORDER = "sequence"


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


def publish(rows: DataFrame, event: str, *, config: str | None = None) -> int:
    """Publish rows of `id`, `topic`, `identifier`, `payload` and `sequence`, in order within each topic, and return how
    many were stored now.

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
