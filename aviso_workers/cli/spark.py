"""`spark ...`: the reconciliation of Spark's jobs, and pipelines on Spark, run here or by spark-submit.

PySpark is loaded when a pipeline runs: it is an extra.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import typer

from aviso_workers.app import App
from aviso_workers.aviso.literals import printable
from aviso_workers.aviso.notifications import parse_pairs
from aviso_workers.aviso.positions import parse_moment
from aviso_workers.cli import NOT_PROVEN, completion
from aviso_workers.cli.arguments import parse_duration, parse_where
from aviso_workers.cli.completion import EVENT
from aviso_workers.cli.options import argument, end_where, filter_argument, flag, option
from aviso_workers.cli.output import print_json, print_table
from aviso_workers.cli.targets import CONFIG, ConfigSource, connected_app, load, run_connected
from aviso_workers.errors import DeclarationError
from aviso_workers.ops import spark_reconciliation
from aviso_workers.ops.spark_reconciliation import NOT_PUBLISHED, Comparison, Incomparable
from aviso_workers.spark import require_pyspark
from aviso_workers.spark.rest import SparkRest

if TYPE_CHECKING:
    from aviso_workers.telemetry.lineage import PipelineRun

spark = typer.Typer(
    help="Archive, backfill and report with Spark, and compare its jobs with their notifications.", no_args_is_help=True
)

FILTER = filter_argument("Only notifications")
MAX_LINES = 20
MAX_PER_BATCH = 1_000_000
"""Messages of a long backlog that are handled at a time, and not again after a failure."""


@spark.command()
def reconcile(
    url: str = argument("URL", "URL of a history server or of a driver's UI, e.g. http://history:18080."),
    application: list[str] | None = option("ID", "Compare only this application; may be repeated. Default: all."),
    since: str | None = option(
        "TIME", "Compare only applications that began at this time or later, e.g. 2026-11-20 or 2h."
    ),
    as_json: bool = flag("--json", "Print one JSON document for each row."),
    config: ConfigSource | None = CONFIG,
) -> None:
    """Compare the published notifications of Spark's jobs with what Spark reports. Exit with 1 if they differ, with 3
    if some could not be compared.

    Example: aviso-workers spark reconcile http://history:18080 --since 2026-11-20T06:00:00Z
    """
    rest = SparkRest(url)
    moment = parse_moment(since, name="--since", now=datetime.now(UTC)) if since else None

    async def run(app: App) -> list[Comparison | Incomparable]:
        return [
            each
            async for each in spark_reconciliation.reconcile(
                app.replay, app.config, rest, only=application or (), since=moment
            )
        ]

    found = run_connected(connected_app(config), run)
    compared = [each for each in found if isinstance(each, Comparison)]
    incomparable = [each for each in found if isinstance(each, Incomparable)]
    if as_json:
        for each in found:
            print_json(each)
    else:
        _print(compared)
    for each in incomparable:
        typer.echo(printable(f"{each.application}: not compared: {each.problem}"), err=True)
    end_where(incomparable, code=NOT_PROVEN)
    end_where(not all(comparison.agrees for comparison in compared))


def _print(found: list[Comparison]) -> None:
    columns = ("application", "attempt", "kind", "Spark", "published", "different", "twice", "only published", "state")
    print_table(columns, map(_row, found), none="no applications")
    lines = [line for comparison in found for line in _lines(comparison)]
    for line in lines[:MAX_LINES]:
        typer.echo(printable(line))
    if len(lines) > MAX_LINES:
        typer.echo(f"and {len(lines) - MAX_LINES} more: --json has all of them")


def _row(comparison: Comparison) -> tuple[str, ...]:
    counts = (comparison.spark, comparison.published, len(comparison.differences), len(comparison.twice))
    verdict = "agrees" if comparison.agrees else "DIFFERS"
    identity = (comparison.application, comparison.attempt, comparison.kind)
    return (*identity, *map(str, counts), str(comparison.only_published), verdict)


def _lines(comparison: Comparison) -> list[str]:
    subject = f"{comparison.application}: {comparison.kind}"
    differences = [
        f"{subject} {each.id}: Spark says {each.spark}, published is {each.published}"
        if each.published != NOT_PUBLISHED
        else f"{subject} {each.id}: Spark says {each.spark}, nothing is published"
        for each in comparison.differences
    ]
    return [*differences, *(f"stored more than once: {message_id}" for message_id in comparison.twice)]


@spark.command()
def archive(
    event: str = EVENT,
    where: list[str] | None = FILTER,
    *,
    to: str = option("PATH", "Directory of the archive, which Spark must be able to reach.", default=...),
    every: str | None = option(
        "DURATION", "Keep running until Ctrl-C, and archive at this interval, e.g. 5m. Default: archive once."
    ),
    config: ConfigSource | None = CONFIG,
) -> None:
    """Archive notifications as Parquet by day, each once. A run adds what was stored since the last one.

    Example: aviso-workers spark archive mars --to /data/archive/mars --every 5m
    """
    require_pyspark()
    from aviso_workers.spark import archives, sessions

    options = _source(event, where, config) | {"startingOffsets": "earliest", "maxMessagesPerTrigger": MAX_PER_BATCH}
    selection = archives.selection(options)
    seconds = float(parse_duration(every, name="--every")) if every is not None else None
    with (
        _telling(config, f"archive.{event}", reads=event, to_path=to),
        sessions.session(f"aviso-workers: archive {event}") as spark,
    ):
        notifications = spark.readStream.format("aviso").options(**options).load()
        archives.archive(notifications, to, selection=selection, every_seconds=seconds).awaitTermination()


@spark.command()
def backfill(
    event: str = EVENT,
    where: list[str] | None = FILTER,
    *,
    start: str = option(
        "PATH|ID|DATE",
        "Path of an archive, or the sequence or time at which to begin in the stream of EVENT.",
        "--from",
        default=...,
    ),
    to: str = option(
        "EVENT", "Event type of the published notifications.", autocompletion=completion.event_types, default=...
    ),
    dead_letters: str | None = option(
        "PATH",
        "Directory for Parquet of what cannot be published, and why. Default: if there is any, nothing is published.",
    ),
    fill: list[str] | None = option(
        "FIELD=VALUE", "Value of an identifier field that older notifications lack, e.g. level=0; may be repeated."
    ),
    config: ConfigSource | None = CONFIG,
) -> None:
    """Publish archived or stored notifications again, each once. A repeated run adds nothing.

    Example: aviso-workers spark backfill mars --from /data/archive/mars --to mars
    """
    require_pyspark()
    from aviso_workers.spark import backfill, sessions

    read, filled = _reading(event, where, config, start), parse_pairs(fill or [])
    from_path = "" if _position(start) else start
    told = _telling(config, f"backfill.{event}.{to}", reads=event, from_path=from_path, writes=to)
    with told as run, sessions.session(f"aviso-workers: backfill {event} to {to}") as spark:
        done = backfill.backfill(read(spark), to, dead_letters=dead_letters, fill=filled, config=_path(config))
        if run is not None:
            run.written = done.published
    typer.echo(f"{done.published} published, {done.present} there before, {done.refused} refused")


@spark.command()
def report(
    event: str = EVENT,
    where: list[str] | None = FILTER,
    *,
    schedule: str = option("FILE", "Schedule of what is expected: YAML, or a table in CSV or Parquet.", default=...),
    to: str = option("PATH", "Directory for the tables and report.html.", default=...),
    start: str | None = option(
        "PATH|ID|DATE",
        "Path of an archive, or the sequence or time at which to begin in the stream of EVENT. Default: the first day.",
        "--from",
    ),
    first: str | None = option("DATE", "First day of a schedule in YAML, e.g. 2026-11-20. Default: yesterday, UTC."),
    last: str | None = option("DATE", "Last day of a schedule in YAML. Default: today, UTC."),
    config: ConfigSource | None = CONFIG,
) -> None:
    """Compare notifications with a schedule, and announce each cycle that is complete or late.

    Example: aviso-workers spark report mars --schedule schedule.yaml --to /data/report
    """
    require_pyspark()
    from aviso_workers.spark import completeness, sessions

    days = {"first": _day(first, "--first", days_ago=1), "last": _day(last, "--last", days_ago=0)}
    if days["first"] > days["last"]:
        raise DeclarationError(f"--first {days['first']} is after --last {days['last']}")
    read, path = _reading(event, where, config, start or days["first"].isoformat()), _path(config)
    known = completeness.read_schedule(schedule, event, config=path, **days)
    with sessions.session(f"aviso-workers: report {event}") as spark:
        expected = completeness.table(spark, known) if known else completeness.expected_table(spark, schedule)
        done = completeness.report(read(spark), expected, event, to=to, config=path)
    typer.echo(f"{done.cycles} cycles: {done.complete} complete, {done.late} late; see {to}/report.html")
    for kind, count in done.published.items():
        typer.echo(f"{count} published as {kind}")


def _telling(
    config: ConfigSource | None, name: str, *, reads: str, from_path: str = "", writes: str = "", to_path: str = ""
) -> AbstractContextManager[PipelineRun | None]:
    """Tell the run of a command, where `workers.lineage` is configured: from an event type or the path of an archive,
    to one of both.
    """
    loaded = load(config)
    settings = loaded.workers.lineage
    if settings is None:
        return nullcontext()
    from aviso_workers.telemetry import lineage

    source = lineage.place(from_path) if from_path else lineage.dataset(loaded, reads)
    target = lineage.place(to_path) if to_path else lineage.dataset(loaded, writes)
    return lineage.pipeline(loaded, settings, name, reads=source, writes=target)


def _reading(event: str, where: Sequence[str] | None, config: ConfigSource | None, start: str) -> Callable[[Any], Any]:
    """Return a function that reads notifications in a session of Spark: from a position in their stream on, or those of
    the archive at a path.
    """
    from aviso_workers.spark import archives, backfill

    options, position, wanted = _source(event, where, config), _position(start), parse_where(where or [])
    if position is not None:
        return lambda spark: spark.read.format("aviso").options(**options, **position).load()
    return lambda spark: backfill.matching(archives.read(spark, start), event, wanted, config=_path(config))


def _position(text: str) -> dict[str, str] | None:
    """Return the position where reading a stream begins, as options; None where the text is a path."""
    if text.isdecimal():
        return {"startingOffsets": text}
    if not re.match(r"\d{4}-\d{2}-\d{2}", text):
        return None
    now = datetime.now(UTC)
    begin = parse_moment(text, name="--from", now=now)
    if begin > now:
        raise DeclarationError(f"--from {text} is in the future")
    return {"startingTimestamp": begin.isoformat()}


def _source(event: str, where: Sequence[str] | None, config: ConfigSource | None) -> dict[str, str | int]:
    """Return the options of the data source for an event type and a filter."""
    options: dict[str, str | int] = {f"where.{field}": value for field, value in parse_pairs(where or []).items()}
    return options | {"event": event} | ({"config": str(config.path)} if config else {})


def _path(config: ConfigSource | None) -> str | None:
    return str(config.path) if config else None


def _day(text: str | None, name: str, *, days_ago: int) -> date:
    if text is None:
        return datetime.now(UTC).date() - timedelta(days_ago)
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise DeclarationError(f"{name} must be a day such as 2026-11-20, not {text!r}") from error
