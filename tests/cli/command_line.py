"""The help of every command, as a terminal of 80 columns shows it. `python -m tests.cli.command_line` prints it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from aviso_workers import cli

WIDTH = 80


def helps() -> str:
    """Return the help of the command line and of every command below it."""
    whole = typer.main.get_command(cli.command)
    return "\n".join(_helps(whole, "aviso-workers", None))


def _helps(command: Any, name: str, above: Any) -> Iterator[str]:
    context = command.context_class(
        command, info_name=name, parent=above, terminal_width=WIDTH, max_content_width=WIDTH
    )
    yield command.get_help(context) + "\n"
    for below, each in getattr(command, "commands", {}).items():
        yield from _helps(each, below, context)


if __name__ == "__main__":
    print(helps(), end="")
