"""nats-py: `fetch(500)` of stored messages, without acks."""

from __future__ import annotations

import asyncio
import os

import nats
from nats.js.api import AckPolicy, ConsumerConfig

from _bench.tally import Tally


async def main() -> None:
    tally = Tally()
    connection = await nats.connect(os.environ["BENCHMARK_NATS_URL"])
    stream = connection.jetstream()
    subscription = await stream.pull_subscribe(
        "mars.>", stream="MARS", config=ConsumerConfig(ack_policy=AckPolicy.NONE)
    )
    while tally.count < tally.wanted:
        tally.add(len(await subscription.fetch(500, timeout=30)))
    await connection.close()


asyncio.run(main())
