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

__all__ = ["print_json", "print_table", "printable", "table", "terminal"]

WIDE = 10_000


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    terminal().print(table(columns, rows))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    made = Table(*columns)
    for row in rows:
        made.add_row(*(Text(printable(cell)) for cell in row))
    return made


def terminal() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDE)


def print_json(document: Any) -> None:
    """One document, one line."""
    sys.stdout.buffer.write(msgspec.json.encode(document) + b"\n")
    sys.stdout.buffer.flush()
