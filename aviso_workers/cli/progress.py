"""How far a long command has come, told in lines, for terminals, pipes and logs alike."""

from __future__ import annotations

import time
from collections.abc import Callable

import typer

__all__ = ["ProgressLines"]

EVERY_SECONDS = 10.0


class ProgressLines:
    """Writes a line to standard error every ten seconds: how many of all are done, how many a second, and how long the
    others will take at that rate. Called with how many more are done.
    """

    def __init__(self, done: str, *, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`done` is what has become of them, as `erased`."""
        self._done = done
        self._total = total
        self._count = 0
        self._clock = clock
        self._began = self._told = clock()

    def __call__(self, count: int) -> None:
        self._count += count
        now = self._clock()
        if now - self._told < EVERY_SECONDS:
            return
        self._told = now
        rate = self._count / (now - self._began)
        left = max(self._total - self._count, 0) / rate
        line = f"{self._count} of {self._total} {self._done}, {rate:.0f} a second, about {left:.0f} s left"
        typer.echo(line, err=True)
