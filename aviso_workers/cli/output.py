"""Tables for people at a terminal, and for pipes: there, nothing is cut to a width."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from aviso_workers import events
from aviso_workers.aviso.literals import printable, printable_lines
from aviso_workers.events import Events, Skipped

__all__ = [
    "Columns",
    "echo",
    "end_where_silent",
    "print_json",
    "print_table",
    "printable",
    "skipped_told",
    "table",
    "terminal",
]

WIDE = 10_000
MOST_SKIPPED = 10
"""Messages that are left out of which each has a line; more are only counted."""


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    terminal().print(table(columns, rows))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    made = Table(*columns)
    for row in rows:
        made.add_row(*(Text(printable(cell)) for cell in row))
    return made


class Columns:
    """A table of any length, printed some rows at a time: plain columns, which become wider where a row needs it."""

    def __init__(self, *names: str) -> None:
        self._widths = [0] * len(names)
        self._unprinted: list[Sequence[str]] = [[name.upper() for name in names]]

    def print(self, rows: Iterable[Sequence[str]]) -> None:
        """Print the next rows, below the names of the columns where they are the first."""
        cells = [*self._unprinted, *([printable(cell) for cell in row] for row in rows)]
        self._unprinted = []
        self._widths = [max(width, *map(len, column)) for width, *column in zip(self._widths, *cells, strict=True)]
        for row in cells:
            padded = (cell.ljust(width) for cell, width in zip(row, self._widths, strict=True))
            sys.stdout.write("  ".join(padded).rstrip() + "\n")
        sys.stdout.flush()


@contextmanager
def skipped_told(told: Events) -> Iterator[None]:
    """Write to standard error what these events leave out: the first with a line each, and at the end how many more."""
    skipped = 0

    def tell(event: Skipped) -> None:
        nonlocal skipped
        skipped += 1
        if skipped <= MOST_SKIPPED:
            print(printable(events.warning(event)), file=sys.stderr)
        elif skipped == MOST_SKIPPED + 1:
            print("more is left out, which is counted until the end", file=sys.stderr)

    told.listen(tell, Skipped)
    try:
        yield
    finally:
        if skipped > MOST_SKIPPED:
            print(f"{skipped - MOST_SKIPPED} more were left out ({skipped} in all)", file=sys.stderr)


def terminal() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDE)


def print_json(document: Any) -> None:
    """One document, one line."""
    text = msgspec.json.encode(document).decode()
    if not text.isprintable():  # within texts only, where JSON has another spelling for each
        text = "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)
    sys.stdout.buffer.write(text.encode() + b"\n")
    sys.stdout.buffer.flush()


def echo(text: str, *, err: bool = False) -> None:
    """Print text of which some may be anybody's."""
    typer.echo(printable_lines(text), err=err)


def end_where_silent(names: Sequence[str]) -> None:
    """End the command with exit code 1 and a line for each of these, if there are any: no server answers for them."""
    for name in names:
        echo(f"{name}: no server answers for it, so that it is not shown", err=True)
    if names:
        raise typer.Exit(1)
