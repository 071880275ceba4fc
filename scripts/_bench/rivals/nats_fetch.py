"""nats-py: `fetch(500)` and an ack for each."""

from __future__ import annotations

import asyncio
import os

import nats

from _bench.tally import Tally


async def main() -> None:
    tally = Tally()
    connection = await nats.connect(os.environ["BENCHMARK_NATS_URL"])
    stream = connection.jetstream()
    subscription = await stream.pull_subscribe("mars.>", durable=os.environ["BENCHMARK_NAME"], stream="MARS")
    while tally.count < tally.wanted:
        for message in await subscription.fetch(500, timeout=30):
            tally.add()
            await message.ack()
    await connection.drain()


asyncio.run(main())
