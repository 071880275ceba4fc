"""`consumers ls|show|rm|unpin`: the consumers of any stream. Operations that cannot be taken back need `--yes`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from functools import partial

import typer

from aviso_workers.cli import completion
from aviso_workers.cli.completion import STREAM
from aviso_workers.cli.options import YES, argument, confirm, end_where
from aviso_workers.cli.output import (
    AS_ANSWERED,
    AS_JSON,
    end_where_unavailable,
    print_details,
    print_rows,
    recorded,
    replicas,
    time_text,
)
from aviso_workers.cli.report import SECONDS, consumer_state, duration, two_snapshots
from aviso_workers.cli.targets import OpenedServer, on_server
from aviso_workers.jetstream.info import ConsumerInfo
from aviso_workers.ops import maintenance, reports, snapshots
from aviso_workers.ops.reports import ConsumerRow

consumers = typer.Typer(help="List, show, remove and unpin the consumers of any stream.", no_args_is_help=True)

CONSUMERS = ("stream", "consumer", "pending", "ack pending", "redelivered", "lag change per s", "caught up in", "state")

CONSUMER = argument(
    "CONSUMER", "Name of the consumer, e.g. field-index__index_field.", autocompletion=completion.consumers
)


@consumers.command("ls")
@on_server
async def list_consumers(
    server: OpenedServer,
    stream: str | None = argument(
        "STREAM",
        "Name of the stream, e.g. MARS. Default: all streams.",
        autocompletion=completion.streams,
        default=None,
    ),
    seconds: float = SECONDS,
    as_json: bool = AS_JSON,
) -> None:
    """List consumers, also those of agents, the largest lag first. Exit with 1 if one is stuck or does not answer.

    The lag of a consumer is pending plus ack pending, and its change per second is negative while it shrinks.

    Example: aviso-workers consumers ls MARS
    """
    take = partial(snapshots.take, stream=stream or "")
    now, before = await two_snapshots(server, seconds, take)
    rows = reports.consumers(now, before, stream=stream or "")
    denied = now.denied.text()
    partly = bool(now.unavailable or denied)
    print_rows(CONSUMERS, map(_consumer_row, rows), rows, none="no consumers", as_json=as_json, partly=partly)
    end_where_unavailable(now.unavailable, denied)
    end_where(any(row.needs for row in rows))


@consumers.command()
@on_server
async def show(
    server: OpenedServer, stream: str = STREAM, consumer: str = CONSUMER, as_json: bool = AS_ANSWERED
) -> None:
    """Show the configuration, the state and the replicas of a consumer.

    Example: aviso-workers consumers show MARS field-index__index_field
    """
    print_details(await server.admin.consumer_info(stream, consumer), _state, as_json=as_json)


@consumers.command("rm")
@on_server
async def remove_consumer(
    server: OpenedServer, stream: str = STREAM, consumer: str = CONSUMER, yes: bool = YES
) -> None:
    """Remove a consumer, and with it its position in the stream.

    Example: aviso-workers consumers rm MARS field-index__index_field --yes
    """
    found = await server.admin.consumer_info(stream, consumer)
    typer.echo(f"{consumer} of {stream} would be removed, at {found.ack_floor}, with {found.lag} messages before it")
    confirm(yes, to="remove it")
    async with recorded(server, "remove-consumer", f"{stream} {consumer}") as result:
        await maintenance.remove_consumer(server.admin, stream, consumer)
        result.text = f"{consumer}: removed"


@consumers.command()
@on_server
async def unpin(
    server: OpenedServer,
    stream: str = STREAM,
    consumer: str = CONSUMER,
    group: str = argument("GROUP", "Priority group of the consumer, e.g. aviso-workers."),
) -> None:
    """Unpin the reader of a priority group, so that the server pins another one.

    Example: aviso-workers consumers unpin MARS field-index__index_field aviso-workers
    """
    async with recorded(server, "unpin-consumer", f"{stream} {consumer}", group=group) as result:
        await server.admin.unpin_consumer(stream, consumer, group=group)
        result.text = f"{group} of {consumer}: unpinned"


def _state(consumer: ConsumerInfo) -> Iterator[tuple[str, str]]:
    yield "stream", consumer.stream
    yield "consumer", consumer.name
    yield "created", time_text(consumer.created)
    yield "pending", str(consumer.num_pending)
    yield "ack pending", str(consumer.num_ack_pending)
    yield "redelivered", str(consumer.num_redelivered)
    yield "delivered", _reached(consumer.position, consumer.last_delivered)
    yield "ack floor", _reached(consumer.ack_floor, consumer.last_settled)
    if consumer.pulled:
        yield "pull requests", f"{consumer.num_waiting} waiting"
    else:
        yield "subscriber", "connected" if consumer.push_bound else "none"
    if consumer.paused:
        yield "paused until", time_text(consumer.paused_until)
    if consumer.pinned_since:
        yield "pinned since", time_text(consumer.pinned_since)
    yield from replicas(consumer.cluster)


def _reached(sequence: int, last: datetime | None) -> str:
    return f"up to sequence {sequence}, the last one at {time_text(last)}" if last else f"up to sequence {sequence}"


def _consumer_row(row: ConsumerRow) -> tuple[str, ...]:
    numbers = (str(row.pending), str(row.ack_pending), str(row.redelivered), f"{row.rate:+.1f}")
    caught_up_in = duration(row.drain_seconds) if row.lag else "-"
    return (row.stream, row.consumer, *numbers, caught_up_in, consumer_state(row))
