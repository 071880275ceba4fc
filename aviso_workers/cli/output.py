"""Output of commands: tables for terminals, one line a row for pipes, and JSON for programs; and what commands do,
recorded in the audit as the actions of the console are.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from aviso_workers.aviso import literals
from aviso_workers.aviso.literals import SECOND, printable, printable_lines
from aviso_workers.cli.options import end_where, flag
from aviso_workers.events import Events, Skipped
from aviso_workers.jetstream import fields
from aviso_workers.jetstream.info import SILENT_NANOSECONDS, Cluster, ConsumerInfo, StreamInfo

if TYPE_CHECKING:
    from aviso_workers.cli.targets import OpenedServer
    from aviso_workers.ops.audit import ActionResult

AS_JSON = flag("--json", "Print one JSON document a row instead of a table.")

WIDE = 10_000
MAX_SKIPPED = 10
"""Skipped messages that have a line each; more are only counted."""
AS_ANSWERED = flag("--json", "Print the server's whole answer as one JSON document.")
T = TypeVar("T", StreamInfo, ConsumerInfo)
GAP = "  "
"""Between two columns, and before a last column that is written below its row."""
NARROWEST = 24
"""Characters that a wrapped column has at least, unless all of its cells are shorter."""


def print_rows(
    columns: Sequence[str],
    rows: Iterable[Iterable[str]],
    documents: Iterable[Any] | None = None,
    *,
    none: str,
    as_json: bool,
    partly: bool = False,
) -> None:
    """Print a table for people, or the documents of its rows for programs, one on each line, with what a row's class
    makes of its fields; without documents, each has the cells of its row by the names of the columns. `none` is what
    people read instead of a table without rows, such as `no streams`, and `partly` whether there may be others that are
    not known.
    """
    if as_json:
        for document in (dict(zip(columns, row, strict=True)) for row in rows) if documents is None else documents:
            print_json(msgspec.to_builtins(document) | _properties(document))
    else:
        print_table(columns, rows, none=f"{none} that can be shown" if partly else none)


def _properties(document: Any) -> dict[str, Any]:
    named = [name for name, member in vars(type(document)).items() if isinstance(member, property)]
    return {name: msgspec.to_builtins(getattr(document, name)) for name in named}


def print_table(columns: Sequence[str], rows: Iterable[Iterable[str]], *, none: str = "no rows") -> None:
    """Print a table of the rows, or `none` where there are no rows."""
    cells = [list(row) for row in rows]
    console = terminal()
    if not cells:
        typer.echo(none)
    elif console.is_terminal:
        console.print(table(columns, cells, width=console.width))
    else:
        Columns(*columns).print(cells)


def print_record(pairs: Iterable[tuple[str, str]]) -> None:
    """Print one record, with a line for each name and its value."""
    lines = [(name, printable(value)) for name, value in pairs]
    console = terminal()
    if not console.is_terminal:
        width = max((len(name) for name, _ in lines), default=0)
        for name, value in lines:
            typer.echo(f"{name.ljust(width)}  {value}".rstrip())
        return
    made = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True, style="bold")
    made.add_column(overflow="fold")
    for name, value in lines:
        made.add_row(Text(name), Text(value))
    console.print(made)


class Columns:
    """A table of any length, printed some rows at a time, whose columns become wider where a row needs it."""

    def __init__(self, *names: str) -> None:
        self._widths = [0] * len(names)
        self._unprinted: list[Sequence[str]] = [[name.upper() for name in names]]

    def print(self, rows: Iterable[Sequence[str]]) -> None:
        """Print the next rows, the first of them below the names of the columns."""
        cells = [*self._unprinted, *([printable(cell) for cell in row] for row in rows)]
        self._unprinted = []
        self._widths = [max(width, *map(len, column)) for width, *column in zip(self._widths, *cells, strict=True)]
        for row in cells:
            padded = (cell.ljust(width) for cell, width in zip(row, self._widths, strict=True))
            sys.stdout.write("  ".join(padded).rstrip() + "\n")
        sys.stdout.flush()


@contextmanager
def skipped_reported(source: Events) -> Iterator[Callable[[], int]]:
    """Print messages that are skipped to standard error for the block: the first ones with a line each, the others as a
    count. What it yields returns how many were skipped.
    """
    skipped = 0

    def report(event: Skipped) -> None:
        nonlocal skipped
        skipped += 1
        if skipped <= MAX_SKIPPED:
            print(printable(event.warning()), file=sys.stderr)
        elif skipped == MAX_SKIPPED + 1:
            print("more is left out, which is counted until the end", file=sys.stderr)

    source.listen(report, Skipped)
    try:
        yield lambda: skipped
    finally:
        if skipped > MAX_SKIPPED:
            print(f"{skipped - MAX_SKIPPED} more were left out ({skipped} in all)", file=sys.stderr)


@asynccontextmanager
async def recorded(server: OpenedServer, action: str, of: str, **selection: object) -> AsyncIterator[ActionResult]:
    """Record, for the block, what a command does to what, and print what has come of it. Arguments without a value are
    left out. Where nothing can be recorded, standard error says so, and the command goes on.
    """
    from aviso_workers.ops import audit  # most commands record nothing

    given = {name: str(value) for name, value in selection.items() if value not in (None, "", 0)}
    records = audit.Audit(server.admin, server.config, warn=lambda text: echo(text, err=True))
    async with records.recorded(audit.this_user(), action, of, given) as result:
        try:
            yield result
        finally:
            if result.text:
                echo(result.text, err=result.state == "failed")


def terminal() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDE)


def print_json(document: Any) -> None:
    """Print a document as one line of JSON."""
    text = msgspec.json.encode(document).decode()
    if not text.isprintable():  # within texts only, where JSON has another spelling for each
        text = "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)
    sys.stdout.buffer.write(text.encode() + b"\n")
    sys.stdout.buffer.flush()


def echo(text: str, *, err: bool = False) -> None:
    """Print text that may come from other programs, with unprintable characters escaped."""
    typer.echo(printable_lines(text), err=err)


def end_where_unavailable(names: Sequence[str], denied: str = "") -> None:
    """End the command with exit code 1 and a line for each of these names, for which no server answers, and one for
    what is `denied`; go on where there are none.
    """
    said = [*(f"{name}: no server answers for it, so that it is not shown" for name in names), denied]
    for line in filter(None, said):
        echo(line, err=True)
    end_where(any(said))


def print_details(found: T, state: Callable[[T], Iterable[tuple[str, str]]], *, as_json: bool) -> None:
    """Print what `state` says of a stream or consumer, and below it the configuration without its zero values; or the
    server's answer as JSON.
    """
    if as_json:
        print_json(found.answer)
        return
    print_record(state(found))
    typer.echo()
    print_record(fields.configured(found.config))


def replicas(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Yield the leader and the followers of a stream or consumer; of a server without a cluster, nothing."""
    if not cluster.name:
        return
    yield "cluster", cluster.name
    yield "leader", cluster.leader or "none"
    for follower in cluster.followers:
        heard = follower.active / SECOND
        if follower.offline or follower.active > SILENT_NANOSECONDS:
            state = f"not heard of for {heard:.0f} s; then it lagged by {follower.lag}"
        else:
            state = (
                f"{'current' if follower.current else 'not current'}, lag {follower.lag}, heard of {heard:.1f} s ago"
            )
        yield "follower", f"{follower.name}: {state}"


def time_text(time: datetime | None) -> str:
    """Return a time to the second, with its zone; None is `unknown`."""
    return literals.time_text(time) if time else "unknown"


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
