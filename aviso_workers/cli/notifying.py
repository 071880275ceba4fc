"""`notify`: publish one notification, or a file of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import anyio
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from aviso_workers.cli.finding import ConfigOption, connected_app
from aviso_workers.cli.parsing import parse_pairs, parse_payload, read_lines
from aviso_workers.errors import InvalidNotificationError
from aviso_workers.notifications import Notify

__all__ = ["notify"]


def notify(
    event: Annotated[str | None, typer.Argument(metavar="EVENT", help="The event type, e.g. mars.")] = None,
    identifier: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...")] = None,
    payload: Annotated[str | None, typer.Option(help="JSON, @FILE, or - for standard input.")] = None,
    file: Annotated[
        Path | None, typer.Option(help='Lines of {"event": ..., "identifier": {...}, "payload": ...}.')
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Publish a notification, or all those in a file, and wait until they are stored."""
    if (event is None) == (file is None) or (file is not None and payload is not None):
        raise InvalidNotificationError("say what to publish: EVENT key=value... [--payload ...], or --file FILE")
    if file is not None:
        anyio.run(_notify_file, file, config)
        return
    assert event is not None
    anyio.run(_notify_one, event, parse_pairs(identifier or []), parse_payload(payload), config)


async def _notify_one(event: str, identifier: dict[str, str], payload: Any, config: Path | None) -> None:
    app = connected_app(config)
    app.check(Notify(event, identifier, payload))
    async with app:
        receipt = await app.notify(event, identifier, payload)
    typer.echo(f"{event}@{receipt.sequence} stored in {receipt.stream}")


async def _notify_file(path: Path, config: Path | None) -> None:
    app = connected_app(config)
    total = 0
    for number, line in read_lines(path):  # all of it is checked before any of it is sent
        total += 1
        try:
            app.check(Notify(line.event, line.identifier, line.payload))
        except InvalidNotificationError as error:
            raise InvalidNotificationError(f"{path}:{number}: {error}") from error
    columns = (TextColumn("publishing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=total)

        def notifications() -> Iterator[Notify]:
            for _, line in read_lines(path):
                yield Notify(line.event, line.identifier, line.payload, line.id)
                progress.advance(bar)

        async with app:
            stored = await app.notify_many(notifications())
    typer.echo(f"{stored} notifications stored")
