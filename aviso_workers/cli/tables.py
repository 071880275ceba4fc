"""Tables as text: in columns where these fit side by side, and no cell is ever cut."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from rich.cells import cell_len
from rich.text import Text

from aviso_workers.aviso.literals import printable

GAP = "  "
"""Between two columns, and before a last column that is written below its row."""
NARROWEST = 24
"""Characters that a wrapped column has at least, unless all of its cells are shorter."""


def table(columns: Sequence[str], rows: Iterable[Iterable[str]], *, width: int) -> Text:
    """Return the table as text, no wider than `width` characters.

    Where they are wider, the names of the columns are wrapped, and the last column too. Where that is too wide as well,
    the last column, which says the most, is written below its row, with its name; and where it still is, each row is
    written as names and values, as many on a line as fit.
    """
    names = [name.upper() for name in columns]
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = _widths([names, *cells])
    if _together(widths) <= width:
        return _in_columns(names, cells, widths)
    *others, last = _widths([[_longest_word(name) for name in names], *cells])
    left = width - _together([*others, 0])
    words = max(cell_len(_longest_word(row[-1])) for row in [names, *cells])
    if left >= max(words, min(last, NARROWEST)):
        return _in_columns(names, cells, [*others, left])
    if _together(others) <= width:
        named = [[*row, f"{columns[-1]}: {value}" if value else ""] for *row, value in cells]
        return _in_columns(names[:-1], named, others, below=width)
    return Text("\n\n").join(_record(columns, row, width) for row in cells).append("\n")


def _in_columns(names: Sequence[str], cells: Iterable[Sequence[str]], widths: Sequence[int], *, below: int = 0) -> Text:
    """Return rows in columns, with the names on top; with `below`, each row's last cell is beneath it, in lines of that
    width.
    """
    wrapped = [textwrap.wrap(name, width) for name, width in zip(names, widths, strict=True)]
    height = max(map(len, wrapped))
    text = Text()
    for line in _lines([[""] * (height - len(each)) + each for each in wrapped], widths):
        text.append(f"{line}\n", style="bold")
    for row in cells:
        beside = zip(row, widths, strict=not below)
        for line in _lines([_wrap(cell, width) for cell, width in beside], widths):
            text.append(f"{line}\n")
        for line in _wrap(row[-1], below - len(GAP)) if below else ():
            text.append(f"{GAP}{line}\n" if line else "")
    text.right_crop(1)
    return text


def _lines(cells: Iterable[Sequence[str]], widths: Sequence[int]) -> Iterator[str]:
    """Yield the lines of one row whose cells have several lines each."""
    for line in zip_longest(*cells, fillvalue=""):
        padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True))
        yield GAP.join(padded).rstrip()


def _record(columns: Sequence[str], row: Sequence[str], width: int) -> Text:
    """Return a row as names and values, without empty ones."""
    text = Text(overflow="fold")
    used = 0
    for name, cell in zip(columns, row, strict=True):
        if not cell:
            continue
        needed = cell_len(name) + len(": ") + cell_len(cell)
        if used and used + len(GAP) + needed > width:
            text.append("\n")
            used = 0
        text.append(GAP if used else "")
        text.append(f"{name}:", style="bold")
        text.append(f" {cell}")
        used += len(GAP) + needed if used else needed
    return text


def _wrap(cell: str, width: int) -> list[str]:
    return textwrap.wrap(cell, width, break_on_hyphens=False) if cell_len(cell) > width else [cell]


def _longest_word(text: str) -> str:
    return max(text.split(), key=cell_len, default="")


def _widths(rows: Iterable[Sequence[str]]) -> list[int]:
    return [max(map(cell_len, column)) for column in zip(*rows, strict=True)]


def _together(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)
