"""`mirror status|promote|fence|unfence`, and `drill failover`."""

from __future__ import annotations

from typing import Annotated

import typer

from aviso_workers.app import App
from aviso_workers.cli.confirming import Yes, confirm
from aviso_workers.cli.finding import ConfigOption, connected_app, run_connected
from aviso_workers.cli.printing import print_table
from aviso_workers.ops import failing_over, mirroring
from aviso_workers.ops.failing_over import Drill
from aviso_workers.ops.mirroring import Link, Mirrors, Promotion

__all__ = ["drill", "mirror"]

mirror = typer.Typer(help="Streams that follow others, and what to do when those are lost.", no_args_is_help=True)
drill = typer.Typer(help="Rehearsals on streams of their own.", no_args_is_help=True)

StreamArgument = Annotated[str, typer.Argument(metavar="STREAM")]
Api = Annotated[str, typer.Option("--api", metavar="PREFIX", help="Where it is, e.g. '$JS.hub.API'; default: here.")]


@mirror.command()
def status(config: ConfigOption = None) -> None:
    """Show which streams follow which, and whether they do; exit 1 where one does not."""

    async def run(app: App) -> list[Link]:
        return await Mirrors(app).links()

    links = run_connected(connected_app(config), run)
    if not links:
        typer.echo("no stream follows another one")
    else:
        print_table(("stream", "is", "of", "lag", "heard of it", "trouble"), [_row(link) for link in links])
    if any(link.trouble for link in links):
        raise typer.Exit(1)


@mirror.command()
def promote(
    stream: StreamArgument,
    subject: Annotated[
        list[str] | None, typer.Option("--subject", help="What it takes from then on; default: what its origin took.")
    ] = None,
    origin_is_lost: Annotated[
        bool, typer.Option("--origin-is-lost", help="The origin does not answer and cannot be fenced: go on.")
    ] = False,
    patience: Annotated[float, typer.Option(min=0, help="Seconds in which it has to catch up.")] = 30.0,
    yes: Yes = False,
    config: ConfigOption = None,
) -> None:
    """Fence a mirror's origin, let the mirror catch up, and put it in its place."""
    confirm(yes, to=f"fence the origin of {stream}, and let {stream} take publishes in its place")

    async def run(app: App) -> Promotion:
        return await Mirrors(app).promote(
            stream, subjects=tuple(subject or ()), origin_is_lost=origin_is_lost, patience_seconds=patience
        )

    _print_promotion(run_connected(connected_app(config), run))


@mirror.command()
def fence(stream: StreamArgument, api: Api = "", yes: Yes = False, config: ConfigOption = None) -> None:
    """Let a stream take no publish any more; it keeps what it has, and whoever reconciles leaves it alone."""
    confirm(yes, to=f"take its subjects from {stream}")

    async def run(app: App) -> tuple[str, ...]:
        return (await mirroring.fence(app.session.backend.administration(), stream, api=api)).subjects

    subjects = run_connected(connected_app(config), run)
    typer.echo(f"{stream} is fenced; it took {', '.join(subjects)}")


@mirror.command()
def unfence(stream: StreamArgument, api: Api = "", yes: Yes = False, config: ConfigOption = None) -> None:
    """Give a fenced stream its subjects back. Be sure that no other stream takes them."""
    confirm(yes, to=f"give {stream} its subjects back")

    async def run(app: App) -> tuple[str, ...]:
        return await mirroring.unfence(app.session.backend.administration(), stream, api=api)

    subjects = run_connected(connected_app(config), run)
    typer.echo(f"{stream} takes {', '.join(subjects)} again")


@drill.command()
def failover(
    origin_api: Annotated[
        str, typer.Option("--origin-api", metavar="PREFIX", help="Another domain's API, e.g. '$JS.hub.API'.")
    ] = "",
    messages: Annotated[int, typer.Option(min=2, help="How many to publish meanwhile.")] = 1000,
    config: ConfigOption = None,
) -> None:
    """Rehearse a failover on a scratch stream and its mirror; exit 1 where a message was lost or doubled."""

    async def run(app: App) -> Drill:
        return await failing_over.rehearse(app, origin_api=origin_api, messages=messages)

    found = run_connected(connected_app(config), run)
    _print_promotion(found.promotion)
    typer.echo(f"no publish was taken for {found.silent_seconds:.3f} s at most")
    typer.echo(f"the fenced origin took {found.after_fence}; {found.stored} of {found.published} published are stored")
    if not found.passed:
        raise typer.Exit(1)


def _print_promotion(found: Promotion) -> None:
    gap = "nobody knows how many messages are missing" if found.gap is None else f"{found.gap} messages were to come"
    typer.echo(f"gap: {gap}")
    subjects = ", ".join(found.subjects)
    typer.echo(f"{found.stream} takes {subjects} after {found.seconds:.3f} s, from {found.last_sequence + 1} on")


def _row(link: Link) -> tuple[str, ...]:
    heard = "never" if link.active_seconds is None else f"{link.active_seconds:.1f} s ago"
    origin = f"{link.origin} at {link.api}" if link.api else link.origin
    return link.stream, link.relation, origin, str(link.lag), "" if link.relation == "promoted" else heard, link.trouble
