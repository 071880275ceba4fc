"""FastStream: a pull consumer, one call per message."""

from __future__ import annotations

import asyncio
import os

from faststream import AckPolicy, FastStream
from faststream.nats import JStream, NatsBroker, PullSub
from pydantic import BaseModel

from _bench.tally import Tally


class Field(BaseModel):
    location: str
    size: int


async def main() -> None:
    tally = Tally()
    broker = NatsBroker(os.environ["BENCHMARK_NATS_URL"], logger=None)

    async def count(field: Field) -> None:
        tally.add()

    broker.subscriber(
        "mars.>",
        stream=JStream("MARS", declare=False),
        durable=os.environ["BENCHMARK_NAME"],
        ack_policy=AckPolicy.REJECT_ON_ERROR,
        pull_sub=PullSub(batch_size=500),
    )(count)
    await FastStream(broker, logger=None).run()


asyncio.run(main())
