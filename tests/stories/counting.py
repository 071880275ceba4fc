"""A process that counts: `python -m tests.stories.counting URL TIMES`. It reads a line before it begins."""

from __future__ import annotations

import sys

import anyio

from aviso_workers import App
from tests.contract.settings import app_config

__all__ = ["app_of"]


def app_of(url: str) -> App:
    return App("counting", config=app_config("jetstream", url))


async def main(url: str, times: int) -> None:
    app = app_of(url)
    sums, counts = app.table("sums", int, default=0), app.counter("counts")
    async with app:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()
        for _ in range(times):
            await sums.update("all", lambda total: total + 1)
            await counts.add("all")


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], int(sys.argv[2]))
