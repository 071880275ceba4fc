"""The command `aviso-workers`. A command parses, calls and prints; what it knows is elsewhere.

Exit codes: 0 done, 1 failed, 2 refused before anything was done (usage, configuration, bad input).
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from aviso_workers.cli import administering, checking, configuring, notifying, reading, working
from aviso_workers.errors import (
    AvisoWorkersError,
    ConfigError,
    DeclarationError,
    InvalidNotificationError,
    InvalidPositionError,
)

__all__ = ["main"]

command = typer.Typer(
    name="aviso-workers",
    help="Workers that react to data notifications on NATS JetStream.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
command.command()(working.worker)
command.command()(working.dev)
command.command()(notifying.notify)
command.command()(reading.watch)
command.command()(reading.replay)
command.command()(checking.check)
command.command()(administering.delete)
command.add_typer(administering.streams, name="streams")
command.add_typer(configuring.config, name="config")


def main() -> None:
    """Run the command line; our errors end it with a message and no traceback."""
    try:
        command()
    except (ConfigError, DeclarationError, InvalidNotificationError, InvalidPositionError) as error:
        _complain(error)
        sys.exit(2)
    except AvisoWorkersError as error:
        _complain(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _complain(error: AvisoWorkersError) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"aviso-workers: {error}", markup=False)
