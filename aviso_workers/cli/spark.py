"""`spark ...`: the reconciliation of Spark's jobs, and pipelines on Spark."""

from __future__ import annotations

from typing import Annotated

import typer

from aviso_workers.app import App
from aviso_workers.aviso.literals import printable
from aviso_workers.aviso.positions import parse_date
from aviso_workers.cli import NOT_PROVEN
from aviso_workers.cli.options import argument, flag, option
from aviso_workers.cli.output import print_json, print_table
from aviso_workers.cli.targets import ConfigOption, connected_app, run_connected
from aviso_workers.ops import spark_reconciliation
from aviso_workers.ops.spark_reconciliation import NOT_PUBLISHED, Comparison, Incomparable
from aviso_workers.spark.rest import SparkRest

spark = typer.Typer(
    help="Archive, backfill and report with Spark, and compare its jobs with their notifications.", no_args_is_help=True
)

MAX_LINES = 20


@spark.command()
def reconcile(
    url: Annotated[str, argument("URL", "URL of a history server or of a driver's UI, e.g. http://history:18080.")],
    application: Annotated[
        list[str] | None, option("ID", "Compare only this application; may be repeated. Default: all.")
    ] = None,
    since: Annotated[
        str | None,
        option("DATE", "Compare only applications that began at this time or later, e.g. 2026-11-20T06:00:00Z."),
    ] = None,
    as_json: Annotated[bool, flag("--json", "Print one JSON document for each row.")] = False,
    config: ConfigOption = None,
) -> None:
    """Compare the published notifications of Spark's jobs with what Spark reports. Exit with 1 if they differ, with 3
    if some could not be compared.

    Example: aviso-workers spark reconcile http://history:18080 --since 2026-11-20T06:00:00Z
    """
    rest = SparkRest(url)
    moment = parse_date(since, name="--since") if since else None

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
    if incomparable:
        raise typer.Exit(NOT_PROVEN)
    if not all(comparison.agrees for comparison in compared):
        raise typer.Exit(1)


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
