"""`app.notify_many` in a process to be measured: with ids, until all are acknowledged."""

from __future__ import annotations

import anyio

from aviso_workers import App
from benchmarks.filling import make_notifications
from benchmarks.tally import Tally


async def publish() -> None:
    tally = Tally()
    async with App("publish") as app:
        tally.begin()
        tally.add(await app.notify_many(make_notifications(tally.wanted)))


if __name__ == "__main__":
    anyio.run(publish)
