"""The command `aviso-workers`. A command parses, calls and prints; what it knows is elsewhere.

Exit codes: 0 done, 1 failed, 2 refused before anything was done (usage, configuration, bad input).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import cache

import typer
from rich.console import Console

from aviso_workers.cli import (
    administering,
    backing_up,
    burying,
    checking,
    configuring,
    copying,
    erasing,
    examining,
    inspecting,
    measuring,
    mirroring,
    notifying,
    operating,
    piping,
    reading,
    reporting,
    serving,
    sparking,
    steering,
    working,
)
from aviso_workers.errors import (
    AvisoWorkersError,
    ConfigError,
    DeclarationError,
    InvalidNotificationError,
    InvalidOptionError,
    InvalidPositionError,
    SparkRestError,
)

__all__ = ["main"]

REFUSED = (
    ConfigError,
    DeclarationError,
    InvalidNotificationError,
    InvalidOptionError,
    InvalidPositionError,
    SparkRestError,
)
ANYIO_THREAD = "AnyIO worker thread"
IDLE_SECONDS = 0.2

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
command.command()(examining.doctor)
command.command()(administering.delete)
command.command()(erasing.erase)
command.command()(reporting.agents)
command.command()(reporting.lag)
command.command()(measuring.top)
command.command()(steering.pause)
command.command()(steering.resume)
command.command()(steering.reset)
command.command()(steering.retire)
command.add_typer(burying.dead_letters, name="dead-letters")
command.add_typer(sparking.spark, name="spark")
sparking.spark.command()(piping.archive)
sparking.spark.command()(piping.backfill)
sparking.spark.command()(piping.report)
command.add_typer(administering.streams, name="streams")
administering.streams.command()(copying.copy)
command.add_typer(backing_up.backup, name="backup")
command.add_typer(measuring.report, name="report")
command.add_typer(mirroring.mirror, name="mirror")
command.add_typer(mirroring.drill, name="drill")
command.add_typer(operating.consumers, name="consumers")
command.add_typer(inspecting.account, name="account")
command.add_typer(serving.server, name="server")
command.add_typer(configuring.config, name="config")


def main() -> None:
    """Run the command line; our errors end it with a message and no traceback."""
    code = _run()
    if any(_goes_on(thread) for thread in threading.enumerate() if thread.name == ANYIO_THREAD):
        # A plain function of an agent that did not end in time: Python would wait for it, however long it takes.
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def _goes_on(thread: threading.Thread) -> bool:
    """An idle one has been told to end, and does in a moment."""
    thread.join(IDLE_SECONDS)
    return thread.is_alive()


def _run() -> int:
    try:
        command_line = _command_line()
        command_line()
    except SystemExit as end:
        return int(end.code or 0)
    except REFUSED as error:
        _complain(error)
        return 2
    except AvisoWorkersError as error:
        _complain(error)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


@cache
def _command_line() -> Callable[[], object]:
    """Return the parser of all commands, which runs the one that is given. Tests run many commands in one process,
    and to build the parser takes a tenth of a second."""
    return typer.main.get_command(command)


def _complain(error: AvisoWorkersError) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"aviso-workers: {error}", markup=False)
