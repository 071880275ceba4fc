"""nats-py: a push consumer whose callback acks."""

from __future__ import annotations

import asyncio
import os

import nats
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig

from _bench.tally import Tally


async def main() -> None:
    tally, counted = Tally(), asyncio.Event()
    connection = await nats.connect(os.environ["BENCHMARK_NATS_URL"])

    async def count(message: Msg) -> None:
        tally.add()
        await message.ack()
        if tally.count >= tally.wanted:
            counted.set()

    await connection.jetstream().subscribe(
        "mars.>",
        stream="MARS",
        durable=os.environ["BENCHMARK_NAME"],
        cb=count,
        manual_ack=True,
        config=ConsumerConfig(max_ack_pending=2000),
    )
    await counted.wait()
    await connection.drain()


asyncio.run(main())
