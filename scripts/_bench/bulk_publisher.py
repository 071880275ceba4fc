"""`app.notify_many` in a process to be measured: with ids, until all are acknowledged."""

from __future__ import annotations

import anyio

from _bench.filling import make_notifications
from _bench.tally import Tally
from aviso_workers import App


async def publish() -> None:
    tally = Tally()
    async with App("publish") as app:
        tally.begin()
        tally.add(await app.notify_many(make_notifications(tally.wanted)))


if __name__ == "__main__":
    anyio.run(publish)
