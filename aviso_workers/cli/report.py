"""`report streams|mirrors|account|notification`, and `top`: the state of streams, consumers and the account, once or
repeatedly, and what has become of one notification."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext
from functools import partial

import anyio
import msgspec
import typer
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.text import Text

from aviso_workers.aviso.literals import printable, time_text
from aviso_workers.backends import Admin
from aviso_workers.cli.options import argument, end_where, flag, option, seconds_between
from aviso_workers.cli.output import (
    AS_JSON,
    end_where_unavailable,
    print_json,
    print_rows,
    print_table,
    table,
    terminal,
)
from aviso_workers.cli.targets import OpenedServer, on_server
from aviso_workers.errors import BackendError
from aviso_workers.ops import agent_report, aviso_admin, inventory, reports, snapshots, story, stream_policy
from aviso_workers.ops.inventory import ResourceUse
from aviso_workers.ops.mirrors import Link, Mirrors
from aviso_workers.ops.reports import ConsumerRow, ServerRow, StreamRow
from aviso_workers.ops.snapshots import ServerSnapshot

report = typer.Typer(help="Report on streams, mirrors, the account and single notifications.", no_args_is_help=True)

BARS = "▁▂▃▄▅▆▇█"
REMEMBERED = 30
"""Snapshots that a sparkline shows."""
SHOWN = 20
"""Consumers that fit on a screen: those that lag behind most."""

Take = Callable[[Admin], Awaitable[ServerSnapshot]]
SECONDS = seconds_between("snapshots", default=2.0)


@report.command()
@on_server
async def mirrors(server: OpenedServer, as_json: bool = AS_JSON) -> None:
    """List mirrors and sources with their origins and their lag. Exit with 1 if one does not follow its origin.

    Example: aviso-workers report mirrors
    """
    links = await Mirrors(server.admin).links()
    print_rows(MIRRORS, map(_mirror_row, links), links, none="no stream follows another one", as_json=as_json)
    end_where(any(link.trouble for link in links))


@report.command()
@on_server
async def account(server: OpenedServer, as_json: bool = AS_JSON) -> None:
    """Show how much of JetStream the account uses, and its limits.

    Example: aviso-workers report account
    """
    uses = await inventory.account(server.admin)
    print_rows(ACCOUNT, map(_use_row, uses), uses, none="no limits", as_json=as_json)


@report.command()
@on_server
async def streams(
    server: OpenedServer,
    seconds: float = SECONDS,
    monitor: list[str] | None = option(
        "URL",
        "URL of a server's monitoring port, which is asked for its disk; repeat it for each server. "
        "Default: that of the configuration's section server.",
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Show the size, limits, rate and replicas of each stream, and the servers' disks. Exit with 1 if one is in
    trouble.

    Example: aviso-workers report streams --json
    """
    now, before = await two_snapshots(server, seconds)
    rows = reports.streams(now, before)
    denied = now.denied.text()
    partly = bool(now.unavailable or denied)
    print_rows(STREAMS, map(_stream_row, rows), rows, none="no streams", as_json=as_json, partly=partly)
    if servers := await reports.servers(server.admin, server.config, monitor or ()):
        print_rows(SERVERS, map(_server_row, servers), servers, none="no servers", as_json=as_json)
    end_where_unavailable(now.unavailable, denied)
    sealed = stream_policy.sealed(server.config, now.streams)
    end_where(sealed or any(row.trouble for row in rows) or any(row.trouble for row in servers))


@report.command()
@on_server
async def notification(
    server: OpenedServer,
    name: str = argument("EVENT@SEQUENCE", "Event type, base or stream, and sequence, e.g. mars@4711."),
    seconds: float = seconds_between("snapshots", default=1.0),
    as_json: bool = flag("--json", "Print one JSON document."),
) -> None:
    """Report what has become of one notification at each agent of its stream, and how that is known.

    Example: aviso-workers report notification mars@4711
    """
    now, before = await two_snapshots(server, seconds)
    config, _ = aviso_admin.with_declared(server.config, now.recorded.apps)
    agents = await agent_report.of_server(server.admin, config, now, before)
    told = await story.of(server.admin, config, name, agents, now)
    if as_json:
        print_json(msgspec.to_builtins(told))
        return
    typer.echo(printable(f"{told.name}: {told.message.subject}"))
    for sentence in filter(None, (told.sentence, told.also)):
        typer.echo(printable(sentence))
    fates = [(each.name, each.state, "; ".join(filter(None, (each.why, each.error)))) for each in told.fates]
    print_table(("agent", "it is", "why"), fates)
    events = [
        (time_text(each.time) if each.time else "now", each.whose, "; ".join(filter(None, (each.told, each.error))))
        for each in told.events
    ]
    print_table(("time", "who", "what"), events)
    for sentence in filter(None, (*told.unsure, told.denied)):
        typer.echo(printable(sentence), err=True)


@on_server
async def top(server: OpenedServer, seconds: float = SECONDS) -> None:
    """Show streams and consumers as they change, until Ctrl-C.

    The lag of a consumer is pending plus ack pending, as `consumers ls` lists them.

    Example: aviso-workers top
    """
    all_rates: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
    all_lags: dict[tuple[str, str], deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
    before: ServerSnapshot | None = None

    async def shown() -> Group:
        nonlocal before
        now = await snapshots.take(server.admin)
        streams, consumers, width = [], [], terminal().width
        for stream in reports.streams(now, before or now):
            rates = all_rates[stream.stream]
            rates.append(stream.rate)
            numbers = (str(stream.messages), decimal(stream.bytes))
            streams.append((stream.stream, *numbers, _sparkline(rates), stream.note))
        for consumer in reports.consumers(now, before or now)[:SHOWN]:
            lags = all_lags[consumer.stream, consumer.consumer]
            lags.append(consumer.lag)
            counts = (str(consumer.lag), f"{consumer.rate:+.1f}", str(consumer.redelivered))
            consumers.append((consumer.stream, consumer.consumer, *counts, _sparkline(lags), consumer_state(consumer)))
        before = now
        away = f"no server answers for {', '.join(now.unavailable)}" if now.unavailable else ""
        missing = [Text(printable(said)) for said in (away, now.denied.text()) if said]
        below = [table(TOP_CONSUMERS, consumers, width=width)] if consumers else []
        above = [table(TOP_STREAMS, streams, width=width), Text()] if streams else []
        return Group(*above, *below, *missing)

    await keep_shown(shown, seconds=seconds, screen=True)


async def keep_shown(shown: Callable[[], Awaitable[RenderableType]], *, seconds: float, screen: bool = False) -> None:
    """Show what `shown` returns every so many seconds, at a terminal in the place of what was there before.

    An error of the server stands there as long as it lasts. Raises `BackendError` where the first call fails.
    """
    console, found = terminal(), await shown()
    with Live(console=console, auto_refresh=False, screen=screen) if console.is_terminal else nullcontext() as live:
        show = partial(live.update, refresh=True) if live else console.print
        while True:
            show(found)
            await anyio.sleep(seconds)
            try:
                found = await shown()
            except BackendError as error:
                found = Text(printable(str(error)))


async def two_snapshots(
    server: OpenedServer, seconds: float, take: Take = snapshots.take
) -> tuple[ServerSnapshot, ServerSnapshot]:
    """Return two snapshots that are taken `seconds` apart, the later one first."""
    before = await take(server.admin)
    await anyio.sleep(seconds)
    return await take(server.admin), before


STREAMS = ("stream", "messages", "bytes", "used", "per second", "last stored", "replicas", "trouble")
SERVERS = ("server", "stores", "may store", "free on its disk", "trouble")
MIRRORS = ("stream", "relation", "origin", "lag", "last contact", "compared", "trouble")
ACCOUNT = ("what", "used", "limit")
TOP_STREAMS = ("stream", "messages", "bytes", "per second", "state")
TOP_CONSUMERS = ("stream", "consumer", "lag", "lag change per s", "redelivered", "lag before", "state")


def _stream_row(row: StreamRow) -> tuple[str, ...]:
    used = "-" if row.used is None else f"{row.used:.0%}"
    replicas = str(row.replicas) if row.current is None else f"{row.current} of {row.replicas}"
    last = duration((row.time - row.last).total_seconds()) if row.last else "never"
    return (row.stream, str(row.messages), decimal(row.bytes), used, f"{row.rate:.1f}", last, replicas, row.note)


def _server_row(row: ServerRow) -> tuple[str, ...]:
    free = "not on this machine" if row.free is None else decimal(row.free)
    return (row.server, decimal(row.bytes), decimal(row.may_store), free, row.trouble)


def _mirror_row(link: Link) -> tuple[str, ...]:
    origin = f"{link.origin} at {link.api}" if link.api else link.origin
    heard = "never" if link.active_seconds is None else f"{link.active_seconds:.1f} s ago"
    contact = "" if link.relation == "promoted" else heard
    compared = "" if link.relation != "mirror" else "not" if link.equal is None else f"{link.equal} are the same"
    return (link.stream, link.relation, origin, str(link.lag), contact, compared, link.trouble)


def _use_row(use: ResourceUse) -> tuple[str, ...]:
    number = decimal if use.what.startswith("bytes") else str
    return (use.what, number(use.used), "none" if use.limit < 0 else number(use.limit))


def consumer_state(row: ConsumerRow) -> str:
    """Return the state of a consumer as text: what is wrong with it, or paused; empty where it is neither."""
    return row.trouble or ("paused" if row.paused else "")


def duration(seconds: float | None) -> str:
    """Return a duration in seconds as text; None is `never`."""
    if seconds is None:
        return "never"
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _sparkline(values: Iterable[float]) -> str:
    """Return the values as bars side by side, the highest value with the highest bar."""
    known = list(values)
    highest = max(known) or 1
    return "".join(BARS[round(value / highest * (len(BARS) - 1))] for value in known)
