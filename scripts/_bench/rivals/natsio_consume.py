"""natsio: a pull consumer that is asked for more as it goes, whose messages are acked one by one."""

from __future__ import annotations

import asyncio
import os

import natsio
from natsio.jetstream.entities import ConsumerConfig

from _bench.tally import Tally

MAX_MESSAGES = 1000


async def main() -> None:
    tally = Tally()
    config = ConsumerConfig(
        durable_name=os.environ["BENCHMARK_NAME"], filter_subject="mars.>", max_ack_pending=4 * MAX_MESSAGES
    )
    async with await natsio.connect(os.environ["BENCHMARK_NATS_URL"]) as connection:
        stream = await connection.jetstream().stream("MARS")
        consumer = await stream.create_consumer(config)
        async with consumer.consume(max_messages=MAX_MESSAGES) as messages:
            async for message in messages:
                tally.add()
                await message.ack()
                if tally.count >= tally.wanted:
                    break


asyncio.run(main())
