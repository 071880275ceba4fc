"""The command `aviso-workers`. A command parses, calls and prints; everything else is in other packages.

Exit codes: 0 done, 1 failed, 2 refused before anything was done (usage, configuration, bad input), 3 done and not
proven to be whole, 4 a worker that had to end itself because something in it did not end.
"""

from __future__ import annotations

import errno
import importlib
import inspect
import os
import re
import sys
from collections import UserDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from aviso_workers import _fast, first_process
from aviso_workers.aviso.literals import printable_lines
from aviso_workers.cli.options import flag
from aviso_workers.errors import (
    AvisoWorkersError,
    ConfigError,
    DeclarationError,
    InvalidNotificationError,
    InvalidOptionError,
    InvalidPositionError,
    SparkRestError,
)
from aviso_workers.version import __version__
from aviso_workers.worker import LoopEnded, threads_run_on

__all__ = ["NOT_PROVEN", "main"]

NAME = "aviso-workers"
NOT_PROVEN = 3
"""The exit code of what was done and may lack something."""

REFUSED = (
    ConfigError,
    DeclarationError,
    InvalidNotificationError,
    InvalidOptionError,
    InvalidPositionError,
    SparkRestError,
)
OPTION_WITHOUT_VALUE = re.compile(r"--[a-z][a-z-]*=")

ONLY_FILES = frozenset({"dev", "server", "spark"})
"""They start a server of our own, or hand the configuration on to Spark's executors as a file."""
PANELS: dict[str, dict[str, str]] = {
    "Run": {"new": "new", "worker": "worker", "dev": "dev", "check": "check"},
    "Use": {"notify": "notify", "watch": "watch", "replay": "watch"},
    "Agents": {"agents": "agents", "dead-letters": "dead_letters", "timers": "timers"},
    "Observe": {"console": "console", "doctor": "doctor", "top": "report", "report": "report"},
    "Data": {
        "streams": "streams",
        "consumers": "consumers",
        "delete": "delete",
        "erase": "erase",
        "backup": "backup",
        "mirror": "mirror",
    },
    "Server": {"server": "server", "config": "config"},
    "Spark": {"spark": "spark"},
}
"""The sections of the help, with each command or group of commands and the module of this package that declares it
under its name. So the help needs none of these modules, whose imports take most of a second."""
COMMANDS = {name: module for panel in PANELS.values() for name, module in panel.items()}
SUMMARIES = {
    "new": "Create a small working project, with an agent, its tests and the files that deploy it.",
    "worker": "Run the agents of an app until SIGTERM or Ctrl-C.",
    "dev": "Run an app's agents beside a nats-server of their own, for development.",
    "check": "List every mistake in an app and its configuration.",
    "notify": "Publish one notification, or those of a file, and wait until the server has stored them.",
    "watch": "Print notifications as they come, until Ctrl-C.",
    "replay": "Print stored notifications, from the first to the last unless other positions are given.",
    "agents": "Show the progress of agents, and pause, reset or remove them.",
    "dead-letters": "List dead letters, return them to the agents that failed, or erase them.",
    "timers": "Show when timers run, pause them, and run one now.",
    "console": "Serve pages that say what needs an operator, and why, until SIGTERM or Ctrl-C.",
    "doctor": "Check servers, streams, consumers and settings for known problems, and say what to do about each.",
    "top": "Show streams and consumers as they change, until Ctrl-C.",
    "report": "Report on streams, mirrors, the account and single notifications.",
    "streams": "Show, plan, change and remove streams.",
    "consumers": "List, show, remove and unpin the consumers of any stream.",
    "delete": "Delete one notification, after showing which one it is.",
    "erase": "Erase notifications for good, wherever this account keeps them: also their copies and dead letters.",
    "backup": "Back up streams with their consumers, in the layout of the nats CLI, and restore them.",
    "mirror": "Promote mirrors, fence streams, and rehearse a failover.",
    "server": "Run nats-servers for development, and write nats-server.conf, from the configuration's section server.",
    "config": "Print the configuration in effect, its JSON Schema, an app as AsyncAPI, and the shipped files.",
    "spark": "Archive, backfill and report with Spark, and compare its jobs with their notifications.",
}
"""The first sentence of the help of each."""


class _Commands(UserDict[str, Any]):
    """The commands by name, each imported when it is asked for. To import and to build them all would take longer than
    the rest of a worker's start.
    """

    def __getitem__(self, name: str) -> Any:
        return _load(name)


class _Command(TyperCommand):
    """A command whose usage has its arguments as `EVENT`, `[EVENT]` and `[EVENT]...`. Typer has braces around one that
    is needed, and the dots inside of the brackets of one that may be repeated.
    """

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = super().collect_usage_pieces(ctx)
        return [re.sub(r"\.\.\.\]$", "]...", piece.removeprefix("{").removesuffix("}")) for piece in pieces]


class _Group(TyperGroup):
    """A group of commands whose help has the first sentence of each, however long; click cuts it."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, names in self._sections():
            with formatter.section(title):
                formatter.write_dl([(name, self._summary(name)) for name in names])

    def _summary(self, name: str) -> str:
        return _summary(self.commands[name])

    def _sections(self) -> Iterable[tuple[str, Iterable[str]]]:
        return [("Commands", self.commands)]


class _AllCommands(_Group):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands(COMMANDS)

    def _sections(self) -> Iterable[tuple[str, Iterable[str]]]:
        return PANELS.items()

    def _summary(self, name: str) -> str:
        return SUMMARIES[name]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _refuse_empty(args)
        return super().parse_args(ctx, args)


def _refuse_empty(args: list[str]) -> None:
    """Raise `DeclarationError` where an argument is empty, as where a shell variable is not set: many an option would
    choose everything then.
    """
    for before, arg in zip(["", *args], args, strict=False):
        option = arg.removesuffix("=") if OPTION_WITHOUT_VALUE.fullmatch(arg) else before
        if not arg or option is not before:
            what = option if option.startswith("-") else f"the argument after {before!r}" if before else "an argument"
            raise DeclarationError(f"{what} is empty: give it a value, or leave it out; is a shell variable not set?")


def _summary(command: Any) -> str:
    """Return the first sentence of a command's help, as far as its first semicolon."""
    paragraph = " ".join(inspect.cleandoc(command.help or "").partition("\n\n")[0].split())
    return re.split(r"[;.](?= |$)", paragraph, maxsplit=1)[0] + "."


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"aviso-workers {__version__} ({'compiled' if _fast.COMPILED else 'pure Python'})")
        raise typer.Exit


command = typer.Typer(
    name=NAME,
    cls=_AllCommands,
    help="Workers that react to data notifications on NATS JetStream.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@command.callback()
def _before_each(
    _version: bool = flag("--version", "Print the version and exit.", callback=_print_version, is_eager=True),
) -> None:
    pass  # with it, typer makes a group, although no command is added to it


@cache
def _load(name: str) -> Any:
    """Return the parser of one command or group, which typer makes only as a part of a whole."""
    declared = getattr(importlib.import_module(f"{__name__}.{COMMANDS[name]}"), name.replace("-", "_"))
    whole = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    if isinstance(declared, typer.Typer):
        for each in declared.registered_commands:
            each.cls = _Command
        whole.add_typer(declared, name=name, cls=_Group)
    else:
        whole.command(name, cls=_Command)(declared)
    built = typer.main.get_group(whole).commands[name]
    if name not in ONLY_FILES:
        importlib.import_module(f"{__name__}.targets").add_source_options(built)
    return built


def main() -> None:
    """Run the command line; our errors end it with a message and no traceback."""
    first_process.end_on_sigterm()
    code = _run()
    if threads_run_on():
        _end_process(code)
    sys.exit(code)


def _end_process(code: int) -> NoReturn:
    """End this process, whatever still runs in it."""
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def _run() -> int:
    try:
        command_line = _command_line()
        command_line(prog_name=NAME)  # else `python -m` would be called by another name in its own help
    except LoopEnded as ended:
        _end_process(ended.code)
    except SystemExit as end:
        return int(end.code or 0)
    except REFUSED as error:
        _print_error(error)
        return 1 if _is_port_in_use(error) else 2
    except AvisoWorkersError as error:
        _print_error(error)
        return 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if not _is_of_stdout():
            raise
        _print_error(
            AvisoWorkersError(f"cannot write to standard output: {error.strerror}; what was done before, is done")
        )
        return 1
    return 0


def _is_port_in_use(error: AvisoWorkersError) -> bool:
    """Return whether a port was in use: it may be free soon, and systemd does not restart what exits with 2."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE


def _is_of_stdout() -> bool:
    """Return whether standard output cannot be written; then what it still holds is dropped.

    It is asked by writing a line end: a buffer that has failed once may have forgotten what it was to write.
    """
    handle = sys.stdout.fileno()
    try:
        os.write(handle, b"\n")
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), handle)
        return True
    return False


@cache
def _command_line() -> Callable[..., object]:
    """Return the parser of the command line, which runs the command that is given."""
    return typer.main.get_command(command)


def _print_error(error: AvisoWorkersError) -> None:
    from rich.console import Console  # no help needs it

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"aviso-workers: {printable_lines(str(error))}", markup=False)
