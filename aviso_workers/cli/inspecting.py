"""`streams ls|info|gaps|get`, `consumers ls|show` and `account info`: what a server holds, and nothing is changed."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Awaitable
from typing import Annotated, Any

import msgspec
import typer

from aviso_workers.cli.administering import streams
from aviso_workers.cli.finding import ConfigOption, Opened, connected
from aviso_workers.cli.printing import end_where_silent, print_json, print_table
from aviso_workers.errors import DeclarationError
from aviso_workers.jetstream.info import ConsumerInfo, StreamInfo
from aviso_workers.ops import inspecting, stream_policy
from aviso_workers.ops.inspecting import Listed, StoredMessage

__all__ = ["Consumer", "Stream", "account", "consumers"]

consumers = typer.Typer(help="The consumers of any stream.", no_args_is_help=True)
account = typer.Typer(help="The account's limits and what it uses.", no_args_is_help=True)

Stream = Annotated[str, typer.Argument(metavar="STREAM", help="Its name, e.g. MARS.")]
Consumer = Annotated[str, typer.Argument(metavar="CONSUMER", help="Its name.")]


@streams.command()
def ls(config: ConfigOption = None) -> None:
    """List all streams of the account, and whether the configuration has them; exit 1 where one does not answer."""

    async def run(server: Opened) -> Listed[StreamInfo]:
        configured = stream_policy.sections(server.config)
        listed = await inspecting.streams(server.admin)
        print_table(
            ("stream", "configured", "messages", "bytes", "first", "last", "deleted", "consumers", "leader", "copies"),
            [_stream_row(stream, configured) for stream in listed.found],
        )
        return listed

    end_where_silent(connected(config, run).silent)


@streams.command()
def info(stream: Stream, config: ConfigOption = None) -> None:
    """Print a stream's configuration, state and copies as JSON, as the server tells them."""
    connected(config, lambda server: _print(inspecting.stream_info(server.admin, stream)))


@streams.command()
def gaps(stream: Stream, config: ConfigOption = None) -> None:
    """Show which sequences between a stream's first and last are gone."""

    async def run(server: Opened) -> None:
        found = await inspecting.gaps(server.admin, stream)
        print_table(
            ("first", "last", "gone"),
            [(str(first), str(last), str(last - first + 1)) for first, last in found.ranges],
        )
        typer.echo(f"{stream} {found.first} to {found.last}: {found.messages} messages, {found.deleted} gone")
        if found.lost:
            typer.echo(f"{found.lost} of them could not be read by the server: their blocks are damaged", err=True)

    connected(config, run)


@streams.command()
def get(
    stream: Stream,
    sequence: Annotated[int | None, typer.Argument(metavar="[SEQUENCE]", min=1)] = None,
    last: Annotated[str | None, typer.Option("--last", metavar="SUBJECT", help="The last of this subject.")] = None,
    direct: Annotated[bool, typer.Option("--direct", help="From any copy, which may be a little behind.")] = False,
    config: ConfigOption = None,
) -> None:
    """Print one message as JSON; `data` is text, or `data_base64` where it is none."""
    if (sequence is None) == (last is None):
        raise DeclarationError("say which message: its sequence, or --last SUBJECT")
    ask = inspecting.direct_message if direct else inspecting.message

    async def run(server: Opened) -> None:
        print_json(_document(await ask(server.admin, stream, sequence=sequence, subject=last)))

    connected(config, run)


@consumers.command("ls")
def list_consumers(stream: Stream, config: ConfigOption = None) -> None:
    """List a stream's consumers, agents' included, and how far they have come; exit 1 where one does not answer."""

    async def run(server: Opened) -> Listed[ConsumerInfo]:
        listed = await inspecting.consumers(server.admin, stream)
        print_table(
            ("consumer", "delivers", "ack", "pending", "unacknowledged", "redelivered", "ack floor", "state"),
            [_consumer_row(consumer) for consumer in listed.found],
        )
        return listed

    end_where_silent(connected(config, run).silent)


@consumers.command()
def show(stream: Stream, consumer: Consumer, config: ConfigOption = None) -> None:
    """Print a consumer's configuration and state as JSON, as the server tells them."""
    connected(config, lambda server: _print(inspecting.consumer_info(server.admin, stream, consumer)))


@account.command("info")
def account_info(config: ConfigOption = None) -> None:
    """Show what the account uses of JetStream, and of how much."""

    async def run(server: Opened) -> None:
        print_table(
            ("what", "used", "limit"),
            [
                (use.what, str(use.used), "none" if use.limit < 0 else str(use.limit))
                for use in await inspecting.account(server.admin)
            ],
        )

    connected(config, run)


async def _print(found: Awaitable[StreamInfo | ConsumerInfo]) -> None:
    print_json((await found).answer)


def _stream_row(stream: StreamInfo, configured: dict[str, str]) -> tuple[str, ...]:
    numbers = (stream.messages, stream.bytes, stream.first_sequence, stream.last_sequence, stream.deleted)
    return (
        stream.name,
        configured.get(stream.name, "-"),
        *map(str, numbers),
        str(stream.consumers),
        stream.cluster.leader or "-",
        str(stream.config.num_replicas),
    )


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


def _document(message: StoredMessage) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.structs.asdict(message)
    data = document.pop("data")
    try:
        return document | {"data": data.decode()}
    except UnicodeDecodeError:
        return document | {"data_base64": b64encode(data).decode()}
