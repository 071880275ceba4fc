"""Compares notifications with a schedule: which forecast cycles are complete, and how late each notification came.

`aviso-workers spark report` calls `report`; its parts are functions on data frames, for reports of one's own.
`expected` is a table with a row for each expected notification: `cycle` (the name of one run), `due`, perhaps `start`
(from which latency is counted; else from `due`), and a column for each identifier field that distinguishes them. Where
a notification was published more than once, the first one counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from datetime import UTC, date, datetime
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from anyio.from_thread import start_blocking_portal
from msgspec import Struct
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import DataType, TimestampType

from aviso_workers.aviso.notifications import Notify
from aviso_workers.aviso.positions import Position
from aviso_workers.aviso.schema import EventType
from aviso_workers.config import Config
from aviso_workers.errors import DeclarationError, NotFoundError, PipelineError
from aviso_workers.events import Events
from aviso_workers.sessions.session import Session, open_session
from aviso_workers.spark import pages, schedules
from aviso_workers.spark.connections import load_config
from aviso_workers.spark.files import Files
from aviso_workers.spark.schedules import Expected

COMPLETE, LATE = KINDS = ("cycle_complete", "cycle_late")
"""Event types with the identifier fields `event` and `cycle`; and which cycles they are for, by their columns."""
SHARES = (0.5, 0.95, 0.99)
MAX_ON_PAGE = 500
"""Absent notifications on the page; all are in the table."""
PAYLOAD_COLUMNS = ("start", "due", "expected", "arrived", "in_time", "missing", "last_arrival")
"""The columns of a cycle that its notification has in its payload."""


class Reported(Struct, frozen=True, kw_only=True):
    """The number of cycles in a report, and of the notifications that announced cycles for the first time."""

    cycles: int
    complete: int
    late: int
    published: Mapping[str, int]
    """Announcements published, by event type; one that is not configured is absent."""


def expected(
    spark: SparkSession, schedule: str, event: str, *, first: date, last: date, config: str | None = None
) -> DataFrame:
    """Return the notifications that a schedule in YAML expects on the days from `first` to `last`, as a table.

    Raises `PipelineError` and `UnknownEventTypeError`.
    """
    return table(spark, _expand(schedule, load_config(config).event_type(event), first=first, last=last))


def read_schedule(
    path: str, event: str, *, first: date, last: date, config: str | None = None
) -> list[Expected] | None:
    """Return the notifications that a schedule in a file of this machine expects, in YAML or CSV, without Spark; None
    where Spark must read it (`expected_table`).

    Raises `PipelineError`, `UnknownEventTypeError`, and `DeclarationError` where the file cannot be opened.
    """
    in_yaml = path.endswith((".yaml", ".yml"))
    if not in_yaml and not (path.endswith(".csv") and Path(path).is_file()):
        return None
    event_type = load_config(config).event_type(event)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        found = (
            _expand(text, event_type, first=first, last=last)
            if in_yaml
            else list(schedules.parse_table(text, event_type))
        )
    except OSError as error:
        raise DeclarationError(f"cannot read the schedule {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PipelineError(f"{path}: not text in UTF-8, from byte {error.start} on") from error
    except PipelineError as error:
        raise PipelineError(f"{path}: {error}") from error
    if not found:
        raise PipelineError(f"{path}: the schedule expects nothing")
    return found


def _expand(schedule: str, event_type: EventType, *, first: date, last: date) -> list[Expected]:
    return list(schedules.expand(schedules.parse(schedule), event_type, first=first, last=last))


def table(spark: SparkSession, expected: Sequence[Expected]) -> DataFrame:
    """Return expected notifications, at least one, as a table."""
    fields = list(expected[0].identifier)
    rows = [(each.cycle, each.start, each.due, *(each.identifier[field] for field in fields)) for each in expected]
    typed = "cycle STRING, start TIMESTAMP, due TIMESTAMP"
    return spark.createDataFrame(rows, ", ".join([typed, *(f"`{field}` STRING" for field in fields)]))


def expected_table(spark: SparkSession, path: str) -> DataFrame:
    """Return what is expected, from a CSV file with a header or a directory of Parquet. Raises `PipelineError`."""
    if not Files(spark, path).exists(""):
        raise PipelineError(f"there is no schedule in {path}")
    found = spark.read.csv(path, header=True) if path.endswith(".csv") else spark.read.parquet(path)
    if found.isEmpty():
        raise PipelineError(f"{path}: the schedule expects nothing")
    return found


def compare(notifications: DataFrame, expected: DataFrame) -> DataFrame:
    """Return the expected notifications with their `arrival` (null: none yet) and `latency_seconds`. Raises
    `PipelineError`.
    """
    types = {field.name: field.dataType for field in notifications.select("identifier.*").schema.fields}
    fields = schedules.fields_of_table(expected.columns, types)
    times = {name: TimestampType() for name in ("due", "start") if name in expected.columns}
    _require_types(expected, times | {name: types[name] for name in fields})
    arrivals = notifications.groupBy(*(F.col(f"identifier.{name}").alias(name) for name in fields))
    start = F.col("start" if "start" in expected.columns else "due").cast("timestamp")
    wanted = expected.select(
        "cycle",
        start.alias("start"),
        F.col("due").cast("timestamp").alias("due"),
        *(F.col(name).cast(types[name]).alias(name) for name in fields),
    )
    found = wanted.join(arrivals.agg(F.min("time").alias("arrival")), fields, "left")
    latency = (F.unix_micros("arrival") - F.unix_micros("start")) / 1e6
    return found.withColumn("latency_seconds", latency).select(
        "cycle", *fields, "start", "due", "arrival", "latency_seconds"
    )


def _require_types(expected: DataFrame, types: Mapping[str, DataType]) -> None:
    """Raise `PipelineError` where a value is not of the type that its column is compared as."""
    wrong = {name: F.col(name).isNotNull() & F.col(name).try_cast(kind).isNull() for name, kind in types.items()}
    columns = [F.when(is_wrong, F.col(name).cast("string")).alias(name) for name, is_wrong in wrong.items()]
    row = expected.where(reduce(or_, wrong.values())).select(columns).first()
    if row is None:
        return
    name = next(name for name in types if row[name] is not None)
    hint = ", such as 2026-11-20T12:00:00Z" if name in ("due", "start") else ""
    raise PipelineError(
        f"the schedule's column {name} has {row[name]!r}, which is no {types[name].simpleString()}{hint}"
    )


def cycles(compared: DataFrame, now: datetime) -> DataFrame:
    """Return a row for each cycle: how many notifications came and when, whether all did (`cycle_complete`), and
    whether any came after it was due or is overdue (`cycle_late`).
    """
    in_time = F.coalesce(F.col("arrival") <= F.col("due"), F.lit(False))
    came_late = F.col("arrival").isNotNull() & ~in_time
    overdue = F.col("arrival").isNull() & (F.col("due") <= F.lit(now))
    found = compared.groupBy("cycle").agg(
        F.min("start").alias("start"),
        F.max("due").alias("due"),
        F.count("*").alias("expected"),
        F.count("arrival").alias("arrived"),
        F.count_if(in_time).alias("in_time"),
        F.count_if(overdue).alias("missing"),
        F.min("arrival").alias("first_arrival"),
        F.max("arrival").alias("last_arrival"),
        F.percentile_approx("latency_seconds", list(SHARES)).alias("latency_seconds"),
        F.bool_or(overdue | came_late).alias(LATE),
    )
    return found.withColumn(COMPLETE, F.col("arrived") == F.col("expected")).orderBy("start", "cycle")


def per_hour(notifications: DataFrame) -> DataFrame:
    """Return how many notifications were stored in each hour: `hour`, which is its beginning, and `notifications`."""
    hour = F.timestamp_seconds(F.expr("unix_seconds(time) DIV 3600 * 3600"))
    return notifications.groupBy(hour.alias("hour")).agg(F.count("*").alias("notifications")).orderBy("hour")


def report(
    notifications: DataFrame,
    expected: DataFrame,
    event: str,
    *,
    to: str,
    now: datetime | None = None,
    config: str | None = None,
) -> Reported:
    """Write the tables `notifications` (all expected ones), `cycles` and `hours`, and `report.html`, to the directory
    `to`, and announce complete and late cycles, each once.

    Cycles are announced as the event types `cycle_complete` and `cycle_late`, where the configuration has them, with
    the identifier fields `event` and `cycle`. Raises `PipelineError` and, after the tables are written, as `announce`
    does.
    """
    moment = now or datetime.now(UTC)
    compared, hours = compare(notifications, expected).persist(), per_hour(notifications).persist()
    try:
        found = cycles(compared, moment)
        files = Files(notifications.sparkSession, to)
        for name, table in (("notifications", compared), ("cycles", found), ("hours", hours)):
            table.write.mode("overwrite").parquet(f"{files.root}/{name}")
        absent = compared.where(F.col("arrival").isNull() & (F.col("due") <= F.lit(moment)))
        overall = compared.agg(F.percentile_approx("latency_seconds", list(SHARES)).alias("latency")).first()
        rows = [row.asDict() for row in found.collect()]
        content = pages.Content(
            event=event,
            made=moment,
            cycles=rows,
            hours=[row.asDict() for row in hours.collect()],
            absent=[row.asDict() for row in absent.orderBy("due", "cycle").limit(MAX_ON_PAGE).collect()],
            latency=(overall and overall["latency"]) or [],
        )
        files.write("report.html", pages.page(content))
        published = announce(rows, event, load_config(config))
        complete, late = (sum(row[kind] for row in rows) for kind in (COMPLETE, LATE))
        return Reported(cycles=len(rows), complete=complete, late=late, published=published)
    finally:
        compared.unpersist()
        hours.unpersist()


def announce(cycles: Sequence[Mapping[str, Any]], event: str, settings: Config) -> dict[str, int]:
    """Publish a notification for each complete and each late cycle, once however often a report is made, and return
    how many were new, by event type.

    A cycle that the stream of its kind has is not announced again; what two reports at about the same time both send
    has the same message id, which the server stores once.

    Raises `InvalidNotificationError` where one has other fields or a cycle's name cannot be sent, and `BackendError`.
    """
    with start_blocking_portal() as portal:  # not anyio.run: a notebook has a loop that runs
        return portal.call(_announce, cycles, event, settings)


async def _announce(cycles: Sequence[Mapping[str, Any]], event: str, settings: Config) -> dict[str, int]:
    published = {}
    async with open_session(app="spark-report", config=settings, events=Events()) as session:
        for kind in KINDS:
            if kind in settings.notification_schema:
                announced = await _announced(session, kind, event)
                published[kind] = await session.publisher.notify_many(
                    Notify(kind, {"event": event, "cycle": name}, _payload(cycle), message_id=f"{kind}/{event}/{name}")
                    for cycle in cycles
                    if cycle[kind] and (name := cycle["cycle"]) not in announced
                )
    return published


async def _announced(session: Session, kind: str, event: str) -> Set[str]:
    try:
        replayer = await session.replayer(kind, {"event": event})
        return {one.identifier["cycle"] async for one in replayer.replay(Position(), Position())}
    except NotFoundError:  # nothing was ever published
        return set()


def _payload(cycle: Mapping[str, Any]) -> dict[str, Any]:
    """Return the payload that describes a cycle, with times that name their zone: those that Spark gives are local
    ones.
    """
    values = {name: cycle[name] for name in PAYLOAD_COLUMNS}
    return {name: each.astimezone(UTC) if isinstance(each, datetime) else each for name, each in values.items()}
