"""`streams`, and `streams ls|info|gaps|get`: the streams and messages of a server, which are not changed."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Container, Iterable, Iterator
from typing import Any

import msgspec
import typer
from rich.filesize import decimal

from aviso_workers.cli.completion import STREAM
from aviso_workers.cli.options import argument, flag, option
from aviso_workers.cli.output import (
    AS_ANSWERED,
    AS_JSON,
    end_where_unavailable,
    print_details,
    print_json,
    print_rows,
    replicas,
    time_text,
)
from aviso_workers.cli.targets import CONFIG, ConfigSource, OpenedServer, connected, on_server
from aviso_workers.errors import DeclarationError
from aviso_workers.jetstream.info import StreamInfo
from aviso_workers.ops import inventory, reports, stream_policy
from aviso_workers.ops.inventory import StoredMessage

streams = typer.Typer(help="Show, plan, change and remove streams.", no_args_is_help=True)

STREAMS = ("stream", "configured", "messages", "bytes", "consumers", "note")
"""The columns of the table; `report streams` has more for people."""
GAPS = ("first", "last", "gone")
MISSING = (
    "{name}: configured, but there is no such stream. Nothing was published, or the server cannot read it "
    "(docs/operations/checks.md#js042)"
)


@streams.command()
@on_server
async def ls(server: OpenedServer, as_json: bool = AS_JSON) -> None:
    """List all streams of the account, and whether the configuration has them; exit 1 where one does not answer.
    Standard error names configured streams that do not exist.

    Example: aviso-workers streams ls
    """
    configured = stream_policy.sections(server.config)
    listed = await inventory.streams(server.admin)
    documents = [_stream_document(stream, configured) for stream in listed.found]
    print_rows(STREAMS, map(_stream_row, documents), documents, none="no streams", as_json=as_json)
    name_missing(configured, {stream.name for stream in listed.found}.union(listed.unavailable))
    end_where_unavailable(listed.unavailable)


@streams.command()
@on_server
async def info(server: OpenedServer, stream: str = STREAM, as_json: bool = AS_ANSWERED) -> None:
    """Show the configuration, the state and the replicas of a stream.

    Example: aviso-workers streams info MARS
    """
    print_details(await server.admin.stream_info(stream), _state, as_json=as_json)


@streams.command()
@on_server
async def gaps(server: OpenedServer, stream: str = STREAM, as_json: bool = AS_JSON) -> None:
    """Show which sequences between a stream's first and last are gone.

    Example: aviso-workers streams gaps MARS
    """
    found = await inventory.gaps(server.admin, stream)
    documents = [{"first": first, "last": last, "gone": last - first + 1} for first, last in found.ranges]
    print_rows(GAPS, (map(str, row.values()) for row in documents), documents, none="no gaps", as_json=as_json)
    if not as_json:
        typer.echo(f"{stream} {found.first} to {found.last}: {found.messages} messages, {found.deleted} gone")
    if found.lost:
        typer.echo(f"{found.lost} of them could not be read by the server: their blocks are damaged", err=True)


@streams.command()
def get(
    stream: str = STREAM,
    sequence: int | None = argument("SEQUENCE", "Sequence of the message.", min=1, default=None),
    last: str | None = option("SUBJECT", "Print the last message of this subject instead."),
    direct: bool = flag(
        "--direct", "Read from any replica, which may lag behind the leader. Default: from the leader."
    ),
    config: ConfigSource | None = CONFIG,
) -> None:
    """Print one message as JSON; `data` is text, or `data_base64` where it is none.

    Example: aviso-workers streams get MARS 4711
    """
    if (sequence is None) == (last is None):
        raise DeclarationError("say which message: its sequence, or --last SUBJECT")
    ask = inventory.direct_message if direct else inventory.message

    async def run(server: OpenedServer) -> None:
        print_json(_document(await ask(server.admin, stream, sequence=sequence, subject=last)))

    connected(config, run)


def name_missing(configured: Iterable[str], found: Container[str]) -> bool:
    """Name the configured streams that were not found on standard error, and return whether all were found."""
    missing = [name for name in configured if name not in found]
    for name in missing:
        typer.echo(MISSING.format(name=name), err=True)
    return not missing


def _stream_document(stream: StreamInfo, configured: dict[str, str]) -> dict[str, str | int]:
    return {
        "stream": stream.name,
        "configured": configured.get(stream.name, "-"),
        "messages": stream.messages,
        "bytes": stream.bytes,
        "first": stream.first_sequence,
        "last": stream.last_sequence,
        "deleted": stream.deleted,
        "consumers": stream.consumers,
        "leader": stream.cluster.leader or "-",
        "replicas": stream.config.num_replicas,
        "note": reports.SEALED if stream.config.sealed else "",
    }


def _state(stream: StreamInfo) -> Iterator[tuple[str, str]]:
    yield "stream", stream.name
    yield "created", time_text(stream.created)
    yield "messages", f"{stream.messages}, {decimal(stream.bytes)}"
    yield "sequences", f"{stream.first_sequence} to {stream.last_sequence}, {stream.deleted} deleted"
    if stream.first_time and stream.last_time:
        yield "stored", f"{time_text(stream.first_time)} to {time_text(stream.last_time)}"
    yield "subjects", str(stream.subjects)
    yield "consumers", str(stream.consumers)
    yield from replicas(stream.cluster)
    for origin in stream.origins:
        relation = "mirror of" if origin is stream.mirror else "source"
        place = f"{origin.name} at {origin.api}" if origin.api else origin.name
        yield relation, f"{place}, lag {origin.lag}{f', {origin.trouble}' if origin.trouble else ''}"


def _stream_row(document: dict[str, str | int]) -> Iterator[str]:
    return (decimal(int(document[name])) if name == "bytes" else str(document[name]) for name in STREAMS)


def _document(message: StoredMessage) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.structs.asdict(message)
    data = document.pop("data")
    try:
        return document | {"data": data.decode()}
    except UnicodeDecodeError:
        return document | {"data_base64": b64encode(data).decode()}
