"""Tables for people at a terminal, and for pipes: there, nothing is cut to a width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["print_table"]

WIDE = 10_000


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDE)
    table = Table(*columns)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
