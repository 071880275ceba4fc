"""`streams plan|apply|show|wipe|wipe-all`, and `delete`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from aviso_workers.app import App
from aviso_workers.cli.finding import ConfigOption, connected_app, run_connected
from aviso_workers.cli.printing import print_table
from aviso_workers.ops import stream_policy, wiping
from aviso_workers.streams import Plan

__all__ = ["delete", "streams"]

T = TypeVar("T")

streams = typer.Typer(help="The streams of the configured event types.", no_args_is_help=True)

Event = Annotated[str, typer.Argument(metavar="EVENT", help="An event type, e.g. mars.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it; without this, only say what would be done.")]


@streams.command()
def plan(config: ConfigOption = None) -> None:
    """Show what `apply` would change, field by field."""

    async def run(app: App) -> None:
        _print_plans(await stream_policy.plans(app))

    _connected(config, run)


@streams.command()
def apply(config: ConfigOption = None) -> None:
    """Create the streams that are missing and update those that differ from the configuration."""

    async def run(app: App) -> None:
        plans = await stream_policy.plans(app)
        _print_plans(plans)
        for needed in (found for found in plans.values() if found.needed):
            await app.session.provisioner.carry_out(needed)
            typer.echo(f"{needed.stream}: done")

    _connected(config, run)


@streams.command()
def show(event: Event, config: ConfigOption = None) -> None:
    """Show the stream's effective policy beside the configured one; exit 1 if they differ."""

    async def run(app: App) -> bool:
        rows = await stream_policy.effective_policy(app, event)
        print_table(
            ("field", "configured by", "configured", "effective", "follows"),
            [(row.field, row.key, row.configured, row.effective, "yes" if row.follows else "NO") for row in rows],
        )
        return all(row.follows for row in rows)

    if not _connected(config, run):
        raise typer.Exit(1)


@streams.command()
def wipe(event: Event, yes: Yes = False, config: ConfigOption = None) -> None:
    """Remove all notifications of one event type; its stream, configuration and consumers stay."""

    async def run(app: App) -> None:
        stream = wiping.stream_of(app, event)
        found = {stream: (await app.session.backend.stream_info(stream)).messages}
        await _wipe(app, found, yes=yes)

    _connected(config, run)


@streams.command("wipe-all")
def wipe_all(yes: Yes = False, config: ConfigOption = None) -> None:
    """Remove all notifications of all configured event types; nothing else is touched."""

    async def run(app: App) -> None:
        await _wipe(app, await wiping.event_streams(app), yes=yes)

    _connected(config, run)


def delete(
    notification: Annotated[str, typer.Argument(metavar="EVENT@SEQUENCE", help="e.g. mars@42")],
    config: ConfigOption = None,
) -> None:
    """Delete one notification."""

    async def run(app: App) -> None:
        await wiping.delete(app, notification)
        typer.echo(f"{notification} deleted")

    _connected(config, run)


async def _wipe(app: App, found: Mapping[str, int], *, yes: bool) -> None:
    if not found:
        typer.echo("no stream of a configured event type exists")
        return
    print_table(("stream", "messages"), [(stream, str(messages)) for stream, messages in found.items()])
    if not yes:
        typer.echo("nothing was removed; say --yes to remove all of them", err=True)
        raise typer.Exit(2)
    for stream, removed in (await wiping.wipe(app, list(found))).items():
        typer.echo(f"{stream}: {removed} removed")


def _print_plans(plans: Mapping[str, Plan]) -> None:
    rows: list[tuple[str, str, str, str]] = []
    for event_type, found in plans.items():
        if found.fenced:
            rows.append((event_type, found.stream, "fenced", "its mirror was promoted"))
        elif found.unfinished:
            rows.append((event_type, found.stream, "wait", "it is being restored, or that was killed"))
        elif not found.needed:
            rows.append((event_type, found.stream, "keep", ""))
        elif not found.exists:
            rows.append((event_type, found.stream, "create", ""))
        for difference in found.differences:
            rows.append((event_type, found.stream, "update", str(difference)))
    print_table(("event type", "stream", "step", "difference"), rows)


def _connected(config: Path | None, run: Callable[[App], Awaitable[T]]) -> T:
    return run_connected(connected_app(config), run)
