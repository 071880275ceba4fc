"""`consumers ls|show|rm|unpin`: the consumers of any stream. What cannot be taken back is done with `--yes`."""

from __future__ import annotations

from typing import Annotated

import typer

from aviso_workers.cli.confirmation import Yes, confirm
from aviso_workers.cli.output import end_where_silent, print_json, print_table
from aviso_workers.cli.streams import Stream
from aviso_workers.cli.targets import ConfigOption, Opened, connected
from aviso_workers.jetstream.info import ConsumerInfo
from aviso_workers.ops import inventory, maintenance
from aviso_workers.ops.inventory import Listed

__all__ = ["consumers"]

consumers = typer.Typer(help="Show and remove the consumers of any stream.", no_args_is_help=True)

Consumer = Annotated[str, typer.Argument(metavar="CONSUMER", help="Its name.")]


@consumers.command("ls")
def list_consumers(stream: Stream, config: ConfigOption = None) -> None:
    """List a stream's consumers, agents' included, and how far they have come; exit 1 where one does not answer.

    Example: aviso-workers consumers ls MARS
    """

    async def run(server: Opened) -> Listed[ConsumerInfo]:
        listed = await inventory.consumers(server.admin, stream)
        print_table(
            ("consumer", "delivers", "ack", "pending", "unacknowledged", "redelivered", "ack floor", "state"),
            [_consumer_row(consumer) for consumer in listed.found],
        )
        return listed

    end_where_silent(connected(config, run).silent)


@consumers.command()
def show(stream: Stream, consumer: Consumer, config: ConfigOption = None) -> None:
    """Print a consumer's configuration and state as JSON, as the server tells them.

    Example: aviso-workers consumers show MARS field-index__index_field
    """

    async def run(server: Opened) -> None:
        print_json((await server.admin.consumer_info(stream, consumer)).answer)

    connected(config, run)


@consumers.command("rm")
def remove_consumer(stream: Stream, consumer: Consumer, yes: Yes = False, config: ConfigOption = None) -> None:
    """Remove a consumer: how far it has come is forgotten.

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


def _consumer_row(consumer: ConsumerInfo) -> tuple[str, ...]:
    waiting = f"{consumer.num_waiting} pulls wait"
    pushed = f"pushed to {consumer.config.deliver_subject}"
    state = "paused" if consumer.paused else waiting if consumer.pulled else pushed
    return (
        consumer.name,
        ", ".join(consumer.config.filters) or "everything",
        consumer.config.ack_policy,
        str(consumer.num_pending),
        str(consumer.num_ack_pending),
        str(consumer.num_redelivered),
        str(consumer.ack_floor),
        state,
    )
