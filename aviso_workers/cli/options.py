"""Declarations of the arguments and options of commands: the word for the value, then the help; and some that several
commands have.

A further setting is one of typer's, by its name. An option without a name has that of its parameter.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, TypeVar

import typer

Number = TypeVar("Number", float, float | None)


def argument(metavar: str, help: str, **settings: Any) -> Any:
    """Return an argument, whose value is `metavar` in the help."""
    return typer.Argument(metavar=metavar, help=help, **settings)


def option(metavar: str, help: str, *names: str, **settings: Any) -> Any:
    """Return an option, whose value is `metavar` in the help."""
    return typer.Option(*names, metavar=metavar, help=help, **settings)


For = Annotated[
    str | None, option("DURATION", "How long to pause it, e.g. 10m or 2h. Default: until it is resumed.", "--for")
]


Note = Annotated[str, option("TEXT", "Why it is paused, for those who look how it is.")]


def flag(name: str, help: str, *names: str, **settings: Any) -> Any:
    """Return an option without a value."""
    return typer.Option(name, *names, help=help, **settings)


Yes = Annotated[bool, flag("--yes", "Carry it out. Without --yes, the command only says what it would do.")]
"""`--yes`: operations that cannot be taken back are shown first, and done with this option only."""


def filter_argument(what: str, *, more: str = "") -> Any:
    """Return the argument of a filter; `what` says to which notifications it is applied, and `more` what follows."""
    example = 'e.g. class=od, or a constraint in JSON, e.g. step={"gte":24}.'
    return argument("KEY=VALUE...", f"{what} with this value, {example}{more}")


def seconds_between(two: str) -> Any:
    """Return the option for the seconds between two samples or snapshots, from which rates are computed."""
    return option("SECONDS", f"Seconds between the two {two} from which rates are computed.", min=0.1, callback=finite)


def finite(number: Number) -> Number:
    """Return the value of an option, whose `min` takes NaN as well. Raises `BadParameter` for NaN and infinity."""
    if number is not None and not math.isfinite(number):
        raise typer.BadParameter(f"{number} is not a finite number")
    return number


def confirm(yes: bool, *, to: str) -> None:
    """End with exit code 2 unless `--yes` was given; `to` is what it would do."""
    if not yes:
        typer.echo(f"nothing was done; say --yes to {to}", err=True)
        raise typer.Exit(2)
