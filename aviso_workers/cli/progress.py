"""Progress of long commands: a bar for a terminal, lines for terminals, pipes and logs alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bars

from aviso_workers.ops.backups import Progress

EVERY_SECONDS = 10.0


class ProgressLines:
    """A callable that prints a line to standard error every ten seconds: how many of all are done, how many a second,
    and how long the others will take at that rate. It is called with how many more are done.
    """

    def __init__(self, done: str, *, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to count; `done` is the participle in the line, such as `erased`."""
        self._done = done
        self._total = total
        self._count = 0
        self._clock = clock
        self._began = self._printed = clock()

    def __call__(self, count: int) -> None:
        self._count += count
        now = self._clock()
        if now - self._printed < EVERY_SECONDS:
            return
        self._printed = now
        rate = self._count / (now - self._began)
        left = max(self._total - self._count, 0) / rate
        line = f"{self._count} of {self._total} {self._done}, {rate:.0f} a second, about {left:.0f} s left"
        typer.echo(line, err=True)


@contextmanager
def counted(done: str, total: int) -> Iterator[Callable[[], None]]:
    """Show for the block how many of all are done; what it yields is called for each of them."""
    columns = (TextColumn(done), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True)) as bars:
        yield partial(bars.advance, bars.add_task("", total=total))


@contextmanager
def bar(what: str, total: int | None = None) -> Iterator[Progress]:
    """Show a progress bar at a terminal for the block; a log or a pipe gets none."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bars:
        yield partial(bars.advance, bars.add_task(what, total=total))
