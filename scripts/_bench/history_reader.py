"""`app.replay` in a process to be measured, from the first notification on."""

from __future__ import annotations

import anyio

from _bench.tally import Tally
from aviso_workers import App


async def read() -> None:
    tally = Tally()
    async with App("replay") as app:
        async for _ in app.replay("mars"):
            tally.add()


if __name__ == "__main__":
    anyio.run(read)
