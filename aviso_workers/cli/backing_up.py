"""`backup create|ls|verify|restore|drill|cleanse`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from aviso_workers.app import App
from aviso_workers.cli.confirming import Yes, confirm
from aviso_workers.cli.finding import ConfigOption, connected_app, run_connected
from aviso_workers.cli.parsing import parse_where
from aviso_workers.cli.printing import print_table
from aviso_workers.errors import AvisoWorkersError, BackupError, DeclarationError
from aviso_workers.ops import backups
from aviso_workers.ops.backups import Keep, Progress

__all__ = ["Storage", "backup", "bar"]

backup = typer.Typer(help="Backups of streams, with their consumers, as the nats CLI has them.", no_args_is_help=True)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A backup, e.g. backups/MARS/20261120T060000.000Z.")]
Below = Annotated[Path, typer.Argument(metavar="DIR", help="A backup, or a directory with backups of streams.")]


class Storage(StrEnum):
    FILE = "file"
    MEMORY = "memory"


@backup.command()
def create(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="EVENT|STREAM...", help="Event types, e.g. mars, or streams.")
    ] = None,
    *,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Each goes to DIR/STREAM/TIME.")],
    everything: Annotated[bool, typer.Option("--all", help="All streams of the account.")] = False,
    newest: Annotated[
        int | None, typer.Option("--keep", metavar="N", min=1, help="Remove all but a stream's newest N backups.")
    ] = None,
    days: Annotated[
        int | None, typer.Option("--keep-days", metavar="N", min=1, help="Remove backups that are older, but not all.")
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Back up streams, which stay in use; then remove old backups, if asked to."""
    if bool(names) == everything:
        raise DeclarationError("say what to back up: event types or streams, or --all")

    async def run(app: App) -> list[AvisoWorkersError]:
        failures: list[AvisoWorkersError] = []
        for stream in await backups.named_streams(app, names or ()):
            try:
                with bar(stream) as progress:
                    made = await backups.create(app, stream, to, progress=progress)
                typer.echo(f"{stream}: {made.state['messages']} messages, {made.size} bytes in {made.directory}")
                pruned = backups.prune(to, stream, Keep(newest, days))
                for gone in pruned.removed:
                    typer.echo(f"{stream}: removed {gone.directory}")
                failures += [BackupError(f"{found}; it is kept, and does not count") for found in pruned.damaged]
            except AvisoWorkersError as error:  # the others are backed up all the same
                failures.append(error)
        return failures

    _end(run_connected(connected_app(config), run))


@backup.command()
def ls(directory: Below) -> None:
    """List the backups in a directory, the oldest first; exit 1 where one cannot be read."""
    found: list[backups.Backup] = []
    failures = _each(backups.places(directory), lambda place: found.append(backups.load(place)))
    rows = [
        (
            each.stream,
            each.made.isoformat(timespec="seconds"),
            str(each.state["messages"]),
            str(each.size),
            (each.record and each.record.server_version) or "unknown",
            str(each.directory),
        )
        for each in sorted(found, key=lambda each: each.made)
    ]
    if rows:
        print_table(("stream", "made", "messages", "bytes", "nats-server", "directory"), rows)
    elif not failures:
        typer.echo(f"no backups in {directory}")
    _end(failures)


@backup.command()
def verify(directory: Below) -> None:
    """Read all of a backup, or of all backups in a directory, and count what is in it; exit 1 if one is damaged."""
    _end(_each(backups.places(directory) or [directory], _verify))


@backup.command()
def restore(
    directory: Directory,
    name: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="As another stream, which has no subjects of the first.")
    ] = None,
    storage: Annotated[Storage | None, typer.Option(help="Default: as it was.")] = None,
    replicas: Annotated[int | None, typer.Option(min=1, max=5, help="Default: as it was.")] = None,
    config: ConfigOption = None,
) -> None:
    """Make a stream again from a backup, with its sequences and consumers. It must not exist."""
    found = backups.load(directory)

    async def run(app: App) -> None:
        with bar(found.stream, found.size) as progress:
            restored = await backups.restore(
                app, found, name=name, storage=storage, replicas=replicas, progress=progress
            )
        now = restored.state["messages"]
        typer.echo(f"{restored.stream}: {now} messages, from {restored.state['first_seq']} on")
        if now != restored.messages_before:
            typer.echo(
                f"{restored.stream}: it had {restored.messages_before}: the rest is beyond its limits by now, "
                "or was deleted during the backup",
                err=True,
            )

    run_connected(connected_app(config), run)


@backup.command()
def drill(directory: Directory, config: ConfigOption = None) -> None:
    """Restore a backup into a scratch stream, compare every message and consumer, and delete that again."""
    found = backups.load(directory)

    async def run(app: App) -> None:
        with bar(found.stream, found.size) as progress:
            done = await backups.drill(app, found, progress=progress)
        if done.differences:
            raise BackupError(f"{directory} does not restore as it was: {'; '.join(done.differences)}")
        typer.echo(
            f"{found.stream}: {done.restored.messages} messages and {len(done.restored.consumers)} consumers "
            f"restored and compared, sha256 {done.restored.sha256}"
        )

    run_connected(connected_app(config), run)


@backup.command()
def cleanse(
    directory: Directory,
    where: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE...", help='A value, or JSON: step={"gte":24}. Of the stream\'s event type.'),
    ] = None,
    subject: Annotated[
        str | None, typer.Option(metavar="SUBJECT", help="Instead: of these subjects, e.g. mars.od.>")
    ] = None,
    yes: Yes = False,
    config: ConfigOption = None,
) -> None:
    """Remove messages from a backup for good, as a person's data; the rest restores with its sequences."""
    if bool(where) == bool(subject):
        raise DeclarationError("say which messages: KEY=VALUE, or --subject")
    found = backups.load(directory)
    if subject:
        takes = backups.of_subject(subject)
    else:
        takes = backups.of_identifier(connected_app(config).config, found, parse_where(where or []))
    with bar(f"{found.stream}, reading", found.size) as progress:
        plan = backups.plan_cleanse(found, takes, progress=progress)
    typer.echo(f"{directory}: {plan.removed} messages match, {plan.state['messages']} stay")
    if not plan.removed:
        return
    confirm(yes, to="remove them")
    with bar(f"{found.stream}, writing", found.size) as progress:
        backups.cleanse(plan, progress=progress)
    typer.echo(f"{directory}: {plan.removed} messages removed")


def _verify(directory: Path) -> None:
    found = backups.load(directory)
    with bar(found.stream, found.size) as progress:
        contents = backups.verify(found, progress=progress)
    if contents is None:
        typer.echo(f"{directory}: whole; a nats-server before 2.15 made it, and its messages cannot be counted here")
        return
    typer.echo(
        f"{directory}: {contents.messages} messages, {contents.bytes} bytes, {len(contents.consumers)} consumers"
        + (f"; {contents.missing} messages were deleted or expired while it was made" if contents.missing else "")
    )


def _each(directories: Sequence[Path], act: Callable[[Path], None]) -> list[AvisoWorkersError]:
    failures: list[AvisoWorkersError] = []
    for directory in directories:
        try:
            act(directory)
        except BackupError as error:
            failures.append(error)
    return failures


def _end(failures: Sequence[AvisoWorkersError]) -> None:
    """What failed is told when the rest is done."""
    if failures:
        raise BackupError("\n".join(map(str, failures)))


@contextmanager
def bar(what: str, total: int | None = None) -> Iterator[Progress]:
    """For people at a terminal; a log or a pipe gets none."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bars:
        yield partial(bars.advance, bars.add_task(what, total=total))
