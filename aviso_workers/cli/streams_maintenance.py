"""`streams purge|seal|rm|step-down|remove-peer`: change streams by hand.

What cannot be taken back is shown, and done with `--yes`.
"""

from __future__ import annotations

import typer

from aviso_workers.cli import completion
from aviso_workers.cli.completion import STREAM
from aviso_workers.cli.options import YES, argument, confirm, option
from aviso_workers.cli.output import print_table
from aviso_workers.cli.recorded import recorded
from aviso_workers.cli.streams import streams
from aviso_workers.cli.targets import OpenedServer, on_server
from aviso_workers.ops import maintenance


@streams.command()
@on_server
async def purge(
    server: OpenedServer,
    stream: str = STREAM,
    subject: str = option("SUBJECT", "Remove only messages with a matching subject, e.g. mars.od.>", default=""),
    keep: int = option("N", "Keep the newest N messages. It excludes --before.", min=0, default=0),
    before: int | None = option("SEQUENCE", "Remove only messages before this sequence.", min=1),
    yes: bool = YES,
) -> None:
    """Remove messages of any stream. Its configuration and consumers stay.

    Example: aviso-workers streams purge MARS --subject 'mars.od.>' --yes
    """
    plan = await maintenance.plan_purge(server.admin, stream, subject=subject, keep=keep, before=before or 0)
    typer.echo(f"{stream}: {plan.messages} messages would be removed")
    confirm(yes, to="remove them")
    async with recorded(server, "purge-stream", stream, subject=subject, keep=keep, before=before) as result:
        result.text = f"{stream}: {await maintenance.purge(server.admin, plan)} removed"
        result.affected = await maintenance.purged(server.admin, plan)


@streams.command()
@on_server
async def seal(server: OpenedServer, stream: str = STREAM, yes: bool = YES) -> None:
    """Seal a stream for good: no message is added, deleted or expired any more.

    Example: aviso-workers streams seal MARS --yes
    """
    kept = (await server.admin.stream_info(stream)).messages
    typer.echo(f"{stream}: {kept} messages would be kept as they are, and no other added, for good")
    confirm(yes, to="seal it")
    async with recorded(server, "seal-stream", stream) as result:
        await maintenance.seal(server.admin, stream)
        result.text = f"{stream}: sealed"


@streams.command("rm")
@on_server
async def remove(server: OpenedServer, stream: str = STREAM, yes: bool = YES) -> None:
    """Remove a stream with its messages and its consumers.

    Example: aviso-workers streams rm MARS --yes
    """
    found = await server.admin.stream_info(stream)
    going = f"{found.messages} messages and {found.consumers} consumers"
    typer.echo(f"{stream}: the stream would be removed with {going}")
    confirm(yes, to="remove it")
    async with recorded(server, "remove-stream", stream) as result:
        await server.admin.delete_stream(stream)
        result.text = f"{stream}: removed with {going}"


@streams.command("step-down")
@on_server
async def step_down(
    server: OpenedServer,
    stream: str = STREAM,
    consumer: str = option(
        "CONSUMER",
        "Move the leader of this consumer instead of the stream's.",
        autocompletion=completion.consumers,
        default="",
    ),
    prefer: str = option("SERVER", "Server that is to become the leader. Default: the servers elect one.", default=""),
) -> None:
    """Move the leader of a stream, or of one of its consumers, to another server.

    Example: aviso-workers streams step-down MARS
    """
    of = f"{stream} {consumer}".strip()
    async with recorded(server, "step-down", of, prefer=prefer) as result:
        leader = await maintenance.step_down(server.admin, stream, consumer=consumer, prefer=prefer)
        result.text = f"{of}: {leader} leads"


@streams.command("remove-peer")
@on_server
async def remove_peer(
    server: OpenedServer,
    stream: str = STREAM,
    peer: str = argument("PEER", "Name of the server whose copy is removed, e.g. n-2."),
    yes: bool = YES,
) -> None:
    """Remove a server's copy of a stream. Another server makes a new copy.

    Example: aviso-workers streams remove-peer MARS n-2 --yes
    """
    print_table(("server", f"copy of {stream}"), (await maintenance.peers(server.admin, stream)).items())
    confirm(yes, to=f"remove the copy on {peer}")
    async with recorded(server, "remove-peer", stream, peer=peer) as result:
        await maintenance.remove_peer(server.admin, stream, peer)
        result.text = f"{stream}: the copy on {peer} is removed"
