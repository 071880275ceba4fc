"""Tables for people at a terminal, and for pipes: there, nothing is cut to a width."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from aviso_workers.literals import printable

__all__ = ["Columns", "print_json", "print_table", "printable", "table", "terminal"]

WIDE = 10_000


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


def terminal() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDE)


def print_json(document: Any) -> None:
    """One document, one line."""
    sys.stdout.buffer.write(msgspec.json.encode(document) + b"\n")
    sys.stdout.buffer.flush()
