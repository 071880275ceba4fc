"""FastStream: a push consumer, one call per message; as many at a time as its argument says."""

from __future__ import annotations

import asyncio
import os
import sys

from faststream import AckPolicy, FastStream
from faststream.nats import ConsumerConfig, JStream, NatsBroker
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
        max_workers=int(sys.argv[1]),
        config=ConsumerConfig(max_ack_pending=2000),
    )(count)
    await FastStream(broker, logger=None).run()


asyncio.run(main())
