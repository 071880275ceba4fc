"""nats-py: `publish_async` with at most 4,000 unacknowledged, its default, until all are acknowledged."""

from __future__ import annotations

import asyncio
import json
import os

import nats

from _bench.tally import Tally

PAYLOAD = {"location": "s3://forecasts/".ljust(216, "x"), "size": 5_242_880}


async def main() -> None:
    tally = Tally()
    connection = await nats.connect(os.environ["BENCHMARK_NATS_URL"])
    stream = connection.jetstream()
    tally.begin()
    for number in range(tally.wanted):
        body = json.dumps(PAYLOAD, separators=(",", ":")).encode()
        await stream.publish_async(f"mars.od.20261120.0000.{number % 1000}", body, wait_stall=30)
    await stream.publish_async_completed()
    tally.add(tally.wanted)
    await connection.close()


asyncio.run(main())
