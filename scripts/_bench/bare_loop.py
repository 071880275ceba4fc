"""What the engine is measured against: the backend's own consumer, where each delivery is counted and acked at once.

No decoding, no queue, no tasks. Run as a process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import anyio

from _bench.filling import FILTER, STREAM
from _bench.tally import Tally
from aviso_workers import App
from aviso_workers.aviso.literals import SECOND
from aviso_workers.backends import Delivery
from aviso_workers.jetstream.specs import ConsumerSpec

ROOM = 1000


async def loop() -> None:
    tally = Tally()
    spec = ConsumerSpec(
        durable_name=os.environ["BENCHMARK_NAME"],
        filter_subjects=(FILTER,),
        ack_wait=20 * SECOND,
        max_ack_pending=2 * ROOM,
    )

    async with App("bare-loop") as app:
        backend = app.session.backend
        await backend.ensure_consumer(STREAM, spec)

        def deliver(deliveries: Sequence[Delivery]) -> None:
            for delivery in deliveries:
                delivery.ack()
                tally.add()
                consumer.refill()

        async with backend.consume(STREAM, spec.durable_name, deliver=deliver, capacity=lambda: ROOM) as consumer:
            await consumer.lost()


if __name__ == "__main__":
    anyio.run(loop)
