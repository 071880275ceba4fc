"""Publishing and reading with an App, in a process that is counted: `python -m _cost.ours notify`."""

from __future__ import annotations

import sys

import anyio

from _bench.filling import make_notifications
from _cost import counting
from aviso_workers import App

BEFOREHAND = 20
"""Published before it is counted: the first ones look at the stream."""


async def main(what: str) -> None:
    async with App("cost") as app:
        if what == "replay":
            await _replay(app)
            return
        await app.notify_many(make_notifications(BEFOREHAND))
        counting.begin()
        if what == "notify":
            for each in make_notifications(counting.TO_COUNT):
                await app.notify(each.event_type, each.identifier, each.payload)
        else:
            await app.notify_many(make_notifications(counting.TO_COUNT))
        counting.end()


async def _replay(app: App) -> None:
    done = anyio.Event()
    tally = counting.Tally(ended=done.set)
    async for _ in app.replay("mars"):
        tally.add()
        if done.is_set():
            return


if __name__ == "__main__":
    anyio.run(main, sys.argv[1])
