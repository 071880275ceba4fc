"""`streams copy`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import anyio
import typer

from aviso_workers.cli.administering import streams
from aviso_workers.cli.backing_up import Storage, bar
from aviso_workers.cli.finding import ConfigOption, connected_app
from aviso_workers.errors import BackupError
from aviso_workers.ops import copying
from aviso_workers.ops.copying import Copied

__all__ = ["copy"]


@streams.command()
def copy(
    stream: Annotated[str, typer.Argument(metavar="STREAM")],
    to_config: Annotated[Path, typer.Option("--to-config", metavar="FILE", help="The configuration of the target.")],
    name: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="As another stream, which has no subjects of the first.")
    ] = None,
    storage: Annotated[Storage | None, typer.Option(help="Default: as it is.")] = None,
    replicas: Annotated[int | None, typer.Option(min=1, max=5, help="Default: as it is.")] = None,
    config: ConfigOption = None,
) -> None:
    """Copy a stream to another server, cluster or account, and compare; exit 1 where the copy differs."""

    async def run() -> Copied:
        async with connected_app(config) as source, connected_app(to_config) as target:
            with bar(stream) as progress:
                return await copying.copy(
                    source, target, stream, name=name, storage=storage, replicas=replicas, progress=progress
                )

    copied = anyio.run(run)
    if copied.compared.differences:
        raise BackupError(f"{copied.restored.stream} is not as {stream} was: {'; '.join(copied.compared.differences)}")
    typer.echo(
        f"{copied.restored.stream}: {copied.compared.restored.messages} messages and "
        f"{len(copied.compared.restored.consumers)} consumers copied and compared"
    )
    if copied.meanwhile:
        typer.echo(
            f"{copied.meanwhile} were stored in {stream} meanwhile and are not in the copy: to move a stream for good, "
            f"`aviso-workers mirror fence {stream}` before",
            err=True,
        )
