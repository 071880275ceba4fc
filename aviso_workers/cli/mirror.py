"""`mirror promote|recover|fence|unfence|drill`: failover to the mirror of a stream."""

from __future__ import annotations

from pathlib import Path

import typer

from aviso_workers.aviso.codec import store_time
from aviso_workers.aviso.literals import quoted
from aviso_workers.cli import NOT_PROVEN
from aviso_workers.cli.completion import STREAM
from aviso_workers.cli.options import YES, confirm, end_where, finite, flag, option
from aviso_workers.cli.output import recorded
from aviso_workers.cli.targets import CONFIG, ConfigSource, OpenedServer, connected, load, on_server
from aviso_workers.ops import mirrors, promotion, recovery
from aviso_workers.ops.mirrors import Carried
from aviso_workers.ops.promotion import Promotion
from aviso_workers.ops.recovery import Recovered

mirror = typer.Typer(help="Promote mirrors, fence streams, and rehearse a failover.", no_args_is_help=True)

MAX_LISTED = 20
"""Messages that are listed one by one."""
API = option(
    "PREFIX",
    "API prefix of the domain with the stream, e.g. '$JS.hub.API'. Default: that of the configuration.",
    default="",
)


@mirror.command()
def promote(
    stream: str = STREAM,
    subject: list[str] | None = option(
        "SUBJECT", "Subject on which the mirror takes publishes; may be repeated. Default: the origin's subjects."
    ),
    origin_is_lost: bool = flag(
        "--origin-is-lost", "Promote it although the origin does not answer and cannot be fenced. It needs --subject."
    ),
    origin_was_recreated: bool = flag(
        "--origin-was-recreated", "Promote it although the origin was recreated and has messages that the mirror lacks."
    ),
    patience: float = option(
        "SECONDS",
        "Seconds within which the mirror must catch up with its origin.",
        min=0,
        callback=finite,
        default=30.0,
    ),
    yes: bool = YES,
    config: ConfigSource | None = CONFIG,
) -> None:
    """Promote a mirror: fence its origin, and let the mirror take publishes in its place. Exit with 3 if it is not
    proven that nothing is missing.

    Example: aviso-workers mirror promote MARS --yes
    """
    confirm(yes, to=f"fence the origin of {stream}, and let {stream} take publishes in its place")

    async def run(server: OpenedServer) -> Promotion:
        async with recorded(server, "promote-mirror", stream) as result:
            found = await promotion.promote(
                server.admin,
                stream,
                subjects=subject or (),
                origin_is_lost=origin_is_lost,
                origin_was_recreated=origin_was_recreated,
                patience_seconds=patience,
            )
            result.state = "done" if found.proven else "failed"
        return found

    found = connected(config, run)
    _print_promotion(found)
    end_where(not found.proven, code=NOT_PROVEN)


@mirror.command()
def recover(
    stream: str = STREAM,
    origin_config: Path | None = option(
        "FILE",
        "Configuration file with the connection to the origin. Default: the origin is in this account, or "
        "in a JetStream domain.",
    ),
    yes: bool = YES,
    config: ConfigSource | None = CONFIG,
) -> None:
    """Publish to a promoted mirror the messages that only its origin has. Without --yes, they are only listed. Exit
    with 3 if some cannot be compared.

    Example: aviso-workers mirror recover MARS --yes
    """
    origin = load(ConfigSource(origin_config)) if origin_config else None

    async def list_missing(server: OpenedServer) -> tuple[int, int]:
        async with recovery.opened(server.admin, server.config, stream, origin_config=origin) as found:
            count = 0
            async for message in found.only_there():
                count += 1
                if count <= MAX_LISTED:
                    typer.echo(f"{message.sequence} {store_time(message).isoformat()} {message.subject}")
            return count, found.undecided

    async def publish(server: OpenedServer) -> Recovered:
        async with (
            recorded(server, "recover-mirror", stream) as result,
            recovery.opened(server.admin, server.config, stream, origin_config=origin) as found,
        ):
            recovered = await found.publish()
            there = f"{recovered.present} were there already"
            result.text = f"{stream}: {recovered.published} messages published, {there}"
        return recovered

    if yes:
        recovered = connected(config, publish)
        if recovered.superseded:
            newer = f"{stream} has a newer one of their subject"
            typer.echo(f"{recovered.superseded} were not published, because {newer}")
        undecided = recovered.undecided
        _print_undecided(undecided)
    else:
        count, undecided = connected(config, list_missing)
        if count > MAX_LISTED:
            typer.echo(f"... and {count - MAX_LISTED} more")
        typer.echo(f"only the origin of {stream} has {count} messages")
        _print_undecided(undecided)
        confirm(not count, to=f"publish them to {stream}, behind what it has")
    end_where(undecided, code=NOT_PROVEN)


def _print_undecided(count: int) -> None:
    if count:
        typer.echo(f"{count} more cannot be compared, as the mirror has nothing under their sequences any more")


@mirror.command()
def fence(stream: str = STREAM, api: str = API, yes: bool = YES, config: ConfigSource | None = CONFIG) -> None:
    """Fence a stream: it takes no publishes any more. It keeps its messages, and stream management does not change it.

    Example: aviso-workers mirror fence MARS --yes
    """
    confirm(yes, to=f"take its subjects from {stream}")

    async def run(server: OpenedServer) -> None:
        async with recorded(server, "fence-stream", stream, api=api) as result:
            fenced = await mirrors.fence(server.admin.at(api), stream)
            result.text = f"{stream} is fenced; it took {', '.join(fenced.subjects)}"

    connected(config, run)


@mirror.command()
def unfence(stream: str = STREAM, api: str = API, yes: bool = YES, config: ConfigSource | None = CONFIG) -> None:
    """Unfence a stream: it takes publishes on its subjects again. Make sure that no other stream takes them.

    Example: aviso-workers mirror unfence MARS --yes
    """
    confirm(yes, to=f"give {stream} its subjects back")

    async def run(server: OpenedServer) -> None:
        async with recorded(server, "unfence-stream", stream, api=api) as result:
            subjects = await mirrors.unfence(server.admin.at(api), stream)
            result.text = f"{stream} takes {', '.join(subjects)} again"

    connected(config, run)


@mirror.command()
@on_server
async def drill(
    server: OpenedServer,
    origin_api: str = option(
        "PREFIX",
        "API prefix of the domain for the origin, e.g. '$JS.hub.API'. Default: that of the configuration.",
        default="",
    ),
    messages: int = option("N", "Number of messages to publish during the drill.", min=2, default=1000),
) -> None:
    """Rehearse a failover on a scratch stream and its mirror. Exit with 1 if a message was lost or stored twice.

    Example: aviso-workers mirror drill --messages 10000
    """
    found = await promotion.rehearse(server.admin, origin_api=origin_api, messages=messages)
    _print_promotion(found.promotion)
    typer.echo(f"no publish was stored for {found.interrupted_seconds:.3f} s at most")
    typer.echo(f"the fenced origin took {found.after_fence}; {found.stored} of {found.published} published are stored")
    end_where(not found.passed)


def _print_promotion(found: Promotion) -> None:
    if found.gap is None:
        typer.echo(f"gap: how many messages are missing is not known; when {found.origin} answers, ask by")
        typer.echo(f"  aviso-workers mirror recover {quoted(found.stream)}")
    else:
        typer.echo(f"gap: {found.gap} messages were to come and came; {found.equal} were compared and are the same")
    for each in found.consumers or ():
        typer.echo(_consumer(each))
    if found.consumers is None:
        typer.echo(f"consumers: where those of {found.origin} had come to is not known; none was made")
    else:
        made = sum(each.made for each in found.consumers)
        typer.echo(f"consumers: {made} of {len(found.consumers)} made, each after what was settled")
    subjects = ", ".join(found.subjects)
    typer.echo(f"{found.stream} takes {subjects} after {found.seconds:.3f} s, from {found.last_sequence + 1} on")


def _consumer(found: Carried) -> str:
    if found.refused and not found.next_sequence:
        return f"consumer {found.consumer}: not made: {found.refused}"
    if found.refused:
        return f"consumer {found.consumer}: not made, and was to go on at {found.next_sequence}: {found.refused}"
    if not found.made:
        return f"consumer {found.consumer}: was at work here already, and goes on at {found.next_sequence}"
    again = max(0, found.delivered + 1 - found.next_sequence)
    sentence = f"consumer {found.consumer}: goes on at {found.next_sequence}"
    if again:
        sentence += f"; what is unsettled up to {found.delivered} is handled again"
    if found.has_readers:
        sentence += "; it still has readers at the origin: stop them, or what they handle from now on is handled again"
    return sentence
