"""Declarations of the arguments and options of commands: the word for the value, then the help; and some that several
commands have.

A further setting is one of typer's, by its name. An option without a name has that of its parameter. A default of
`...` means that a value must be given.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import typer

Number = TypeVar("Number", float, float | None)


def argument(metavar: str, help: str, *, default: Any = ..., **settings: Any) -> Any:
    """Return an argument, whose value is `metavar` in the help."""
    return typer.Argument(default, metavar=metavar, help=help, **settings)


def option(metavar: str, help: str, *names: str, default: Any = None, **settings: Any) -> Any:
    """Return an option, whose value is `metavar` in the help."""
    return typer.Option(default, *names, metavar=metavar, help=help, **settings)


def flag(name: str, help: str, *names: str, **settings: Any) -> Any:
    """Return an option without a value."""
    return typer.Option(False, name, *names, help=help, **settings)


FOR = option("DURATION", "How long to pause it, e.g. 10m or 2h. Default: until it is resumed.", "--for")
NOTE = option("TEXT", "Why it is paused, for those who look how it is.", default="")
YES = flag("--yes", "Carry it out. Without --yes, the command only says what it would do.")
"""`--yes`: operations that cannot be taken back are shown first, and done with this option only."""


def filter_argument(what: str, *, more: str = "") -> Any:
    """Return the argument of a filter; `what` says to which notifications it is applied, and `more` what follows."""
    example = 'e.g. class=od, or a constraint in JSON, e.g. step={"gte":24}.'
    return argument("KEY=VALUE...", f"{what} with this value, {example}{more}", default=None)


def seconds_between(two: str, *, default: float) -> Any:
    """Return the option for the seconds between two samples or snapshots, from which rates are computed."""
    what = f"Seconds between the two {two} from which rates are computed."
    return option("SECONDS", what, default=default, min=0.1, callback=finite)


def finite(number: Number) -> Number:
    """Return the value of an option, whose `min` takes NaN as well. Raises `BadParameter` for NaN and infinity."""
    if number is not None and not math.isfinite(number):
        raise typer.BadParameter(f"{number} is not a finite number")
    return number


def end_where(condition: object, *, code: int = 1) -> None:
    """End with this exit code where the condition holds."""
    if condition:
        raise typer.Exit(code)


def confirm(yes: bool, *, to: str) -> None:
    """End with exit code 2 unless `--yes` was given; `to` is what it would do."""
    if not yes:
        typer.echo(f"nothing was done; say --yes to {to}", err=True)
        raise typer.Exit(2)
