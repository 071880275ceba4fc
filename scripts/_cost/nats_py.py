"""The same with nats-py alone, which reads no identifier and no payload: `python -m _cost.nats_py callback`."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig

from _bench.filling import BODY, FILTER, STREAM, SUBJECTS, subject
from _cost import counting

PULLED = 1000
AT_ONCE = 500
SECOND = 1_000_000_000
ACK_SECONDS = 60.0


async def main(what: str) -> None:
    connection = await nats.connect(os.environ["COST_NATS_URL"])
    try:
        await globals()[what](connection)
    finally:
        await connection.close()


async def callback(connection: Client) -> None:
    """Ack each notification in a callback that pull requests feed without a pause."""
    name = f"callback-{os.getpid()}"
    config = ConsumerConfig(durable_name=name, max_ack_pending=4 * PULLED)
    await connection.jetstream().add_consumer(STREAM, config)
    inbox, acked, asked, done = connection.new_inbox(), 0, 0, asyncio.Event()
    tally = counting.Tally(ended=done.set)
    request = json.dumps({"batch": PULLED, "expires": 20 * SECOND, "idle_heartbeat": 5 * SECOND}).encode()

    async def ask() -> None:
        nonlocal asked
        asked += PULLED
        await connection.publish(f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{name}", request, reply=inbox)

    async def ack(message: Msg) -> None:
        nonlocal acked
        if not message.reply.startswith("$JS.ACK"):
            return
        acked += 1
        await message.ack()
        if asked - acked < PULLED // 2:
            await ask()
        tally.add()

    await connection.subscribe(inbox, cb=ack, pending_msgs_limit=-1, pending_bytes_limit=-1)
    await ask()
    await done.wait()


async def publish(connection: Client) -> None:
    """Publish one at a time."""
    stream = connection.jetstream(timeout=ACK_SECONDS)
    await stream.publish(subject(0), BODY)
    counting.begin()
    for number in range(counting.TO_COUNT):
        await stream.publish(subject(number % SUBJECTS), BODY)
    counting.end()


async def publish_many(connection: Client) -> None:
    """Publish some hundred at a time, and wait for all acknowledgements."""
    stream = connection.jetstream(timeout=ACK_SECONDS)
    await stream.publish(subject(0), BODY)
    counting.begin()
    for first in range(0, counting.TO_COUNT, AT_ONCE):
        last = min(first + AT_ONCE, counting.TO_COUNT)
        await asyncio.gather(*[stream.publish(subject(number % SUBJECTS), BODY) for number in range(first, last)])
    counting.end()


async def ordered(connection: Client) -> None:
    """Read with an ordered consumer, without acks."""
    done = asyncio.Event()
    tally = counting.Tally(ended=done.set)

    async def note(message: Msg) -> None:
        tally.add()

    await connection.jetstream().subscribe(FILTER, stream=STREAM, ordered_consumer=True, cb=note)
    await done.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
