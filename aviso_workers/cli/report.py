"""`report streams|consumers|agents|mirrors`, and `top`: how things do, once or again and again."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import anyio
import msgspec
import typer
from rich.console import Group
from rich.filesize import decimal
from rich.live import Live
from rich.text import Text

from aviso_workers.cli import mirror
from aviso_workers.cli.output import end_where_silent, print_json, print_table, printable, table, terminal
from aviso_workers.cli.targets import ConfigOption, Opened, connected
from aviso_workers.errors import BackendError
from aviso_workers.ops import deployment, reports
from aviso_workers.ops.reports import ConsumerRow, Look, ServerRow, StreamRow

__all__ = ["report", "top"]

report = typer.Typer(help="Report on streams, consumers, agents and mirrors.", no_args_is_help=True)

BARS = "▁▂▃▄▅▆▇█"
REMEMBERED = 30
"""Looks that a sparkline goes back."""
SHOWN = 20
"""Consumers that fit on a screen: those that lag behind most."""

Seconds = Annotated[float, typer.Option(min=0.1, help="Time between two looks, from which rates are told.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document a row.")]


@report.command()
def mirrors(config: ConfigOption = None) -> None:
    """Show which streams follow which, and whether they do; exit 1 where one does not.

    Example: aviso-workers report mirrors
    """
    mirror.status(config)


@report.command()
def streams(
    seconds: Seconds = 2.0,
    monitor: Annotated[
        list[str] | None,
        typer.Option(
            "--monitor", metavar="URL", help="A server's monitoring port, for its disk; once for each server."
        ),
    ] = None,
    as_json: AsJson = False,
    config: ConfigOption = None,
) -> None:
    """Sizes against limits, rates and replicas of all streams, and the servers' disks; exit 1 on trouble.

    Example: aviso-workers report streams --json
    """
    now, before = _looks(config, seconds)
    rows = reports.streams(now, before)
    _print(STREAMS, map(_stream_row, rows), rows, as_json=as_json)
    servers: list[ServerRow] = connected(config, lambda server: reports.servers(server.config, monitor or ()))
    if servers:
        _print(SERVERS, map(_server_row, servers), servers, as_json=as_json)
    end_where_silent(now.silent)
    if any(row.trouble for row in rows) or any(row.trouble for row in servers):
        raise typer.Exit(1)


@report.command()
def consumers(seconds: Seconds = 2.0, as_json: AsJson = False, config: ConfigOption = None) -> None:
    """Lag of all consumers, its rate and when it is gone; exit 1 where one is stuck.

    Example: aviso-workers report consumers
    """
    now, before = _looks(config, seconds)
    _print_consumers(reports.consumers(now, before), now, as_json=as_json)


@report.command()
def agents(seconds: Seconds = 2.0, as_json: AsJson = False, config: ConfigOption = None) -> None:
    """As `consumers`, of agents only, of whatever app.

    Example: aviso-workers report agents
    """
    now, before = _looks(config, seconds)
    rows = [row for row in reports.consumers(now, before) if deployment.agent_of(row.consumer)]
    _print_consumers(rows, now, as_json=as_json)


def top(seconds: Seconds = 2.0, config: ConfigOption = None) -> None:
    """Show streams and consumers as they change, until Ctrl-C.

    Example: aviso-workers top
    """
    connected(config, lambda server: _top(server, seconds))


def _looks(config: Any, seconds: float) -> tuple[Look, Look]:
    async def run(server: Opened) -> tuple[Look, Look]:
        before = await reports.look(server.admin)
        await anyio.sleep(seconds)
        return await reports.look(server.admin), before

    return connected(config, run)


async def _top(server: Opened, seconds: float) -> None:
    console = terminal()
    screen = _Screen()
    before = now = await reports.look(server.admin)
    while not console.is_terminal:
        console.print(screen.shown(now, before))
        await anyio.sleep(seconds)
        before, now = now, await reports.look(server.admin)
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(screen.shown(now, before), refresh=True)
            await anyio.sleep(seconds)
            try:
                before, now = now, await reports.look(server.admin)
            except BackendError as error:
                live.update(Text(printable(str(error))), refresh=True)


class _Screen:
    """What `top` shows, with how it was before."""

    def __init__(self) -> None:
        self._rates: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._lags: dict[tuple[str, str], deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))

    def shown(self, now: Look, before: Look) -> Group:
        streams = []
        for stream in reports.streams(now, before):
            self._rates[stream.stream].append(stream.rate)
            streams.append((*_stream_row(stream), _sparkline(self._rates[stream.stream])))
        consumers = []
        for consumer in reports.consumers(now, before)[:SHOWN]:
            lags = self._lags[consumer.stream, consumer.consumer]
            lags.append(consumer.lag)
            consumers.append((*_consumer_row(consumer), _sparkline(lags)))
        silent = [Text(printable(f"no server answers for {', '.join(now.silent)}"))] if now.silent else []
        return Group(table((*STREAMS, "rate"), streams), table((*CONSUMERS, "lag"), consumers), *silent)


STREAMS = ("stream", "messages", "bytes", "used", "gaps", "per second", "last", "consumers", "replicas", "trouble")
SERVERS = ("server", "stores", "may store", "free on its disk", "trouble")
CONSUMERS = ("stream", "consumer", "pending", "ack pending", "redelivered", "grows by", "gone in", "settled", "")


def _print(columns: Sequence[str], rows: Iterable[Sequence[str]], documents: Sequence[Any], *, as_json: bool) -> None:
    if as_json:
        for document in documents:
            print_json(msgspec.to_builtins(document))
    elif documents:
        print_table(columns, rows)
    else:
        typer.echo("there are none")


def _print_consumers(rows: Sequence[ConsumerRow], now: Look, *, as_json: bool) -> None:
    _print(CONSUMERS, map(_consumer_row, rows), rows, as_json=as_json)
    end_where_silent(now.silent)
    if any(row.stuck for row in rows):
        raise typer.Exit(1)


def _stream_row(row: StreamRow) -> tuple[str, ...]:
    used = "-" if row.used is None else f"{row.used:.0%}"
    numbers = (str(row.messages), decimal(row.bytes), used, str(row.deleted), f"{row.rate:.1f}")
    return (
        row.stream,
        *numbers,
        _ago(row.last),
        str(row.consumers),
        row.replicas,
        row.trouble or ("sealed" if row.sealed else ""),
    )


def _server_row(row: ServerRow) -> tuple[str, ...]:
    free = "not on this machine" if row.free is None else decimal(row.free)
    return (row.server, decimal(row.bytes), decimal(row.may_store), free, row.trouble)


def _consumer_row(row: ConsumerRow) -> tuple[str, ...]:
    numbers = (str(row.pending), str(row.ack_pending), str(row.redelivered), f"{row.rate:+.1f}/s")
    gone_in = _duration(row.drain_seconds) if row.lag else "-"
    state = "paused" if row.paused else "STUCK" if row.stuck else ""
    return (row.stream, row.consumer, *numbers, gone_in, _settled(row), state)


def _settled(row: ConsumerRow) -> str:
    return "-" if row.last_settled is None and row.deliveries else _ago(row.last_settled)


def _ago(time: datetime | None) -> str:
    return "never" if time is None else f"{_duration((datetime.now(UTC) - time).total_seconds())} ago"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _sparkline(values: Iterable[float]) -> str:
    """The values beside one another; the highest one has the highest bar."""
    known = list(values)
    highest = max(known) or 1
    return "".join(BARS[round(value / highest * (len(BARS) - 1))] for value in known)
