"""`streams copy`: copies a stream to another server, cluster or account."""

from __future__ import annotations

from pathlib import Path

import anyio
import typer

from aviso_workers.aviso.literals import quoted
from aviso_workers.cli import NOT_PROVEN
from aviso_workers.cli.backup import Storage
from aviso_workers.cli.completion import STREAM
from aviso_workers.cli.options import flag, option
from aviso_workers.cli.output import echo
from aviso_workers.cli.progress import bar
from aviso_workers.cli.streams import streams
from aviso_workers.cli.targets import CONFIG, ConfigSource, OpenedServer, opened
from aviso_workers.errors import BackupError, UnavailableError
from aviso_workers.ops import stream_copies
from aviso_workers.ops.stream_copies import Copied, Followed


@streams.command()
def copy(
    stream: str = STREAM,
    to_config: Path = option("FILE", "Configuration file with the connection to the target.", default=...),
    name: str | None = option(
        "NAME",
        "Copy to a stream of this name, without the original's subjects. Default: the original's name and subjects.",
        "--as",
    ),
    storage: Storage | None = typer.Option(None, help="Storage of the copy. Default: that of the original."),
    replicas: int | None = option("N", "Number of replicas of the copy. Default: that of the original.", min=1, max=5),
    follow: bool = flag(
        "--follow",
        "Append new messages to the copy until the original is fenced. It also continues a copy that was interrupted.",
    ),
    config: ConfigSource | None = CONFIG,
) -> None:
    """Copy a stream to another server, cluster or account, and compare the two. Exit with 1 if the copy differs, with 3
    if it lacks messages that were stored meanwhile.

    Example: aviso-workers streams copy MARS --to-config there.yaml
    """

    if follow and name not in (None, stream):
        raise BackupError("--follow goes on until the copy takes the stream's place, which one with --as cannot")

    async def run() -> None:
        async with opened(config) as source, opened(ConfigSource(to_config)) as target:
            is_begun = follow and await stream_copies.is_begun(source.admin, target.admin, stream)
            if follow:
                typer.echo(
                    f"{stream}: {'carrying on with the copy there' if is_begun else 'copying it from its beginning'}",
                    err=True,
                )
            if not is_begun:
                with bar(stream) as progress:
                    copied = await stream_copies.copy(
                        source.admin,
                        target.admin,
                        stream,
                        name=name,
                        storage=storage,
                        replicas=replicas,
                        keep_fenced=follow,
                        progress=progress,
                    )
                _print(stream, copied)
                if copied.subjects or not follow:
                    _end(stream, copied)
                    return
            _print_followed(await _followed(source, target, stream))

    anyio.run(run)


async def _followed(source: OpenedServer, target: OpenedServer, stream: str) -> Followed:
    """Follow the original to its end, also while one of the two servers is away."""
    while True:
        try:
            return await stream_copies.follow(
                source.admin,
                target.admin,
                stream,
                on_progress=lambda appended, last: typer.echo(f"{appended} appended, up to {last}", err=True),
            )
        except UnavailableError as error:
            echo(f"waiting: {error}", err=True)
            await anyio.sleep(stream_copies.PROGRESS_SECONDS)


def _print(stream: str, copied: Copied) -> None:
    name = copied.restored.stream
    if copied.compared.differences:
        raise BackupError(f"{name} is not as {stream} was: {'; '.join(copied.compared.differences)}")
    typer.echo(
        f"{name}: {copied.compared.restored.messages} messages and "
        f"{len(copied.compared.restored.consumers)} consumers copied and compared"
    )
    if copied.subjects:
        typer.echo(f"{name} takes {', '.join(copied.subjects)} there")


def _end(stream: str, copied: Copied) -> None:
    """Print what is left to be done; exit 3 where the copy lacks messages that were stored meanwhile."""
    if copied.subjects and not copied.original_is_fenced:
        typer.echo(
            f"{stream} takes them here as well: to move it for good, `aviso-workers mirror fence {quoted(stream)}` "
            "before",
            err=True,
        )
    if copied.meanwhile:
        moved = f"{stream} has moved on: {copied.meanwhile} messages were stored meanwhile and are not in the copy"
        if copied.restored.stream == stream:
            moved += (
                ", which takes no publishes. The same command with --follow carries on from there; "
                f"`aviso-workers mirror unfence {quoted(stream)}` there lets it take publishes as it is"
            )
        typer.echo(moved, err=True)
        raise typer.Exit(NOT_PROVEN)


def _print_followed(found: Followed) -> None:
    typer.echo(
        f"{found.stream}: {found.messages} messages up to {found.last_sequence} and {found.consumers} consumers are as "
        f"in the original; {found.appended} messages appended by this run, {found.deleted} deleted"
    )
    typer.echo(f"{found.stream} takes {', '.join(found.subjects)} there")
