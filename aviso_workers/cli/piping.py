"""`spark archive`, `spark backfill` and `spark report`: pipelines on Spark, here or by spark-submit.

PySpark is loaded when one of them runs: it is an extra.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from aviso_workers.cli.finding import ConfigOption
from aviso_workers.cli.parsing import parse_pairs, parse_where
from aviso_workers.errors import DeclarationError
from aviso_workers.literals import Duration
from aviso_workers.positions import parse_date

__all__ = ["archive", "backfill"]

Event = Annotated[str, typer.Argument(metavar="EVENT", help="The event type, e.g. mars.")]
Filter = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...", help='A value, or JSON: step={"gte":24}')]

MOST_PER_BATCH = 1_000_000
"""Of a long backlog, so much is done at a time and need not be done again."""


def archive(
    event: Event,
    where: Filter = None,
    *,
    to: Annotated[str, typer.Option("--to", metavar="PATH", help="Directory of the archive, as Spark reaches it.")],
    every: Annotated[
        str | None, typer.Option("--every", metavar="TIME", help="Go on until Ctrl-C, so often, e.g. 5m.")
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Keep notifications as Parquet by day, each once: what came since the last run."""
    _require_spark()
    from aviso_workers.spark import archiving, sessions

    options = _source(event, where, config) | {"startingOffsets": "earliest", "maxMessagesPerTrigger": MOST_PER_BATCH}
    seconds = _seconds(every) if every is not None else None
    with sessions.session(f"aviso-workers: archive {event}") as spark:
        notifications = spark.readStream.format("aviso").options(**options).load()
        archiving.archive(notifications, to, every_seconds=seconds).awaitTermination()


def backfill(
    event: Event,
    where: Filter = None,
    *,
    start: Annotated[
        str,
        typer.Option("--from", metavar="PATH|ID|DATE", help="An archive, or where to begin in the stream of EVENT."),
    ],
    to: Annotated[str, typer.Option("--to", metavar="EVENT", help="The event type to publish them as.")],
    dead_letters: Annotated[
        str | None, typer.Option("--dead-letters", metavar="PATH", help="Parquet of what cannot be published, and why.")
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Publish kept notifications again, each once; a rerun adds nothing."""
    _require_spark()
    from aviso_workers.spark import backfilling, sessions

    path = str(config) if config else None
    with sessions.session(f"aviso-workers: backfill {event} to {to}") as spark:
        if (position := _position(start)) is None:
            kept = spark.read.parquet(start)
            rows = backfilling.matching(kept, event, parse_where(where or []), config=path)
        else:
            rows = spark.read.format("aviso").options(**_source(event, where, config), **position).load()
        done = backfilling.backfill(rows, to, dead_letters=dead_letters, config=path)
    typer.echo(f"{done.published} published, {done.present} there before, {done.refused} refused")


def _position(text: str) -> dict[str, str] | None:
    """Where to begin in a stream, as options; None where the text is a path."""
    if text.isdecimal():
        return {"startingOffsets": text}
    if re.match(r"\d{4}-\d{2}-\d{2}", text):
        return {"startingTimestamp": parse_date(text, name="--from").isoformat()}
    return None


def _require_spark() -> None:
    if find_spec("pyspark") is None:
        raise DeclarationError("PySpark is not installed: pip install 'aviso-workers[spark]'")


def _source(event: str, where: Sequence[str] | None, config: Path | None) -> dict[str, str | int]:
    """The options of the data source."""
    options: dict[str, str | int] = {f"where.{field}": value for field, value in parse_pairs(where or []).items()}
    return options | {"event": event} | ({"config": str(config)} if config else {})


def _seconds(text: str) -> float:
    try:
        return float(Duration.parse(text))
    except ValueError as error:
        raise DeclarationError(f"--every: {error}") from error
