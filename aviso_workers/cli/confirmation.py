"""`--yes`: operations that cannot be taken back are shown first, and done with this option only."""

from __future__ import annotations

from typing import Annotated

import typer

from aviso_workers.cli.options import flag

Yes = Annotated[bool, flag("--yes", "Carry it out. Without --yes, the command only says what it would do.")]


def confirm(yes: bool, *, to: str) -> None:
    """End with exit code 2 unless `--yes` was given; `to` is what it would do."""
    if not yes:
        typer.echo(f"nothing was done; say --yes to {to}", err=True)
        raise typer.Exit(2)
