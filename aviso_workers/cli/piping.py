"""`spark archive`, `spark backfill` and `spark report`: pipelines on Spark, here or by spark-submit.

PySpark is loaded when one of them runs: it is an extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from aviso_workers.cli.finding import ConfigOption
from aviso_workers.cli.parsing import parse_pairs
from aviso_workers.errors import DeclarationError
from aviso_workers.literals import Duration

__all__ = ["archive"]

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
