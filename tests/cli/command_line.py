"""The help of every command, as a terminal of 80 columns shows it. `python -m tests.cli.command_line` prints it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from aviso_workers import cli

WIDTH = 80


def helps() -> str:
    """Return the help of the command line and of every command below it."""
    return "\n".join(f"{context.get_help()}\n" for context in contexts())


def contexts() -> Iterator[Any]:
    """Yield click's context of the command line and of every command below it."""
    return _contexts(typer.main.get_command(cli.command), "aviso-workers", None)


def _contexts(command: Any, name: str, above: Any) -> Iterator[Any]:
    settings = {**command.context_settings, "terminal_width": WIDTH - 2}  # as click has it, which leaves two free
    context = command.context_class(command, info_name=name, parent=above, **settings)
    yield context
    for below, each in getattr(command, "commands", {}).items():
        yield from _contexts(each, below, context)


if __name__ == "__main__":
    print(helps(), end="")
