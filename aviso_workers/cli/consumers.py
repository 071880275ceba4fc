"""`consumers ls|show|rm|unpin`: the consumers of any stream. Operations that cannot be taken back need `--yes`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from aviso_workers.cli.confirmation import Yes, confirm
from aviso_workers.cli.output import AsJson, end_where_unavailable, print_json, print_rows
from aviso_workers.cli.report import Seconds, consumer_state, duration, snapshots
from aviso_workers.cli.streams import Stream
from aviso_workers.cli.targets import ConfigOption, Opened, connected
from aviso_workers.ops import maintenance, reports
from aviso_workers.ops.reports import ConsumerRow

__all__ = ["consumers"]

consumers = typer.Typer(help="Show and remove the consumers of any stream.", no_args_is_help=True)

CONSUMERS = ("stream", "consumer", "pending", "ack pending", "redelivered", "per second", "gone in", "state")

Consumer = Annotated[str, typer.Argument(metavar="CONSUMER", help="Its name.")]


@consumers.command("ls")
def list_consumers(
    stream: Annotated[
        str | None, typer.Argument(metavar="[STREAM]", help="Its name, e.g. MARS; default: all streams.")
    ] = None,
    seconds: Seconds = 2.0,
    as_json: AsJson = False,
    config: ConfigOption = None,
) -> None:
    """List consumers, agents' included, those with the largest lag first; exit 1 where one is stuck or does not answer.

    The rate is that of the lag: a negative one shrinks.

    Example: aviso-workers consumers ls MARS
    """
    take = partial(reports.take_consumers, stream=stream) if stream else reports.take
    now, before = snapshots(config, seconds, take)
    rows = reports.consumers(now, before)
    print_rows(CONSUMERS, map(_consumer_row, rows), rows, as_json=as_json)
    end_where_unavailable(now.unavailable)
    if any(row.stuck for row in rows):
        raise typer.Exit(1)


@consumers.command()
def show(stream: Stream, consumer: Consumer, config: ConfigOption = None) -> None:
    """Print a consumer's configuration and state as JSON, as the server has them.

    Example: aviso-workers consumers show MARS field-index__index_field
    """

    async def run(server: Opened) -> None:
        print_json((await server.admin.consumer_info(stream, consumer)).answer)

    connected(config, run)


@consumers.command("rm")
def remove_consumer(stream: Stream, consumer: Consumer, yes: Yes = False, config: ConfigOption = None) -> None:
    """Remove a consumer, and with it its position.

    Example: aviso-workers consumers rm MARS field-index__index_field --yes
    """

    async def run(server: Opened) -> None:
        found = await server.admin.consumer_info(stream, consumer)
        left = f"{found.num_pending + found.num_ack_pending} messages before it"
        typer.echo(f"{consumer} of {stream} would be removed, at {found.ack_floor}, with {left}")
        confirm(yes, to="remove it")
        await maintenance.remove_consumer(server.admin, stream, consumer)
        typer.echo(f"{consumer}: removed")

    connected(config, run)


@consumers.command()
def unpin(
    stream: Stream,
    consumer: Consumer,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="One of its priority_groups.")],
    config: ConfigOption = None,
) -> None:
    """Let the server pin another reader of a priority group.

    Example: aviso-workers consumers unpin MARS field-index__index_field aviso-workers
    """

    async def run(server: Opened) -> None:
        await server.admin.unpin_consumer(stream, consumer, group=group)
        typer.echo(f"{group} of {consumer}: unpinned")

    connected(config, run)


def _consumer_row(row: ConsumerRow) -> tuple[str, ...]:
    numbers = (str(row.pending), str(row.ack_pending), str(row.redelivered), f"{row.rate:+.1f}")
    gone_in = duration(row.drain_seconds) if row.lag else "-"
    return (row.stream, row.consumer, *numbers, gone_in, consumer_state(row))
