"""Reading a stream: all that was asked for comes, and the end is believed only where the server proves it."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import anyio
import pytest

from aviso_workers import config
from aviso_workers.backends import Message, Outgoing, PubAck
from aviso_workers.backends.jetstream import JetStreamBackend, pulling, wire
from aviso_workers.server import NatsServer
from aviso_workers.streams import StreamSpec

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["the short way", "the long way"])
async def backend(
    nats_server: NatsServer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[JetStreamBackend, None]:
    if request.param == "the long way":
        monkeypatch.setattr(wire, "version", lambda package: "2.99.0")
    async with JetStreamBackend(config.JetStream(nats_url=config.ServerUrls(nats_server.url))) as backend:
        yield backend


async def store(backend: JetStreamBackend, subjects: list[str]) -> None:
    """Make the stream MARS, and store a message on each of these subjects in it, in this order."""
    await backend.create_stream(StreamSpec(name="MARS", subjects=("mars.>",)))
    outgoing = [
        Outgoing(Message(subject=subject, data=b"null"), str(number), "MARS") for number, subject in enumerate(subjects)
    ]
    for first in range(0, len(subjects), 10_000):
        for result in await backend.publish_many(outgoing[first : first + 10_000], timeout_seconds=30):
            assert isinstance(result, PubAck), result


async def read(backend: JetStreamBackend, filters: tuple[str, ...], last: int, *, chunks: bool) -> list[int]:
    """Return the sequences that a reading from the beginning brings."""
    with anyio.fail_after(30):
        if not chunks:
            messages = backend.read("MARS", filter_subjects=filters, last_sequence=last)
            return [message.sequence async for message in messages]
        reading = backend.read_chunks("MARS", filter_subjects=filters, start_sequence=1, last_sequence=last)
        return [sequence async for chunk in reading for sequence in chunk.sequences]


@pytest.mark.parametrize("count", [1, 100, 30_000])
async def test_all_that_filters_of_any_density_take_comes(backend: JetStreamBackend, count: int) -> None:
    chance = random.Random(count)
    # The number of a subject is small for most messages, so that its share of the stream is anything.
    numbers = [min(999, int(chance.paretovariate(0.5))) for _ in range(count)]
    await store(backend, [f"mars.{number % 2}.{number}" for number in numbers])
    for _ in range(20):
        if chance.random() < 0.2:
            half = chance.choice([0, 1])
            filters, wanted = (f"mars.{half}.*",), {number for number in range(1000) if number % 2 == half}
        else:
            wanted = {
                chance.choice([chance.choice(numbers), chance.randrange(1000)]) for _ in range(chance.choice([1, 3]))
            }
            filters = tuple(f"mars.{number % 2}.{number}" for number in sorted(wanted))
        last = chance.choice([count, max(1, count - chance.randrange(count))])
        expected = [sequence for sequence, number in enumerate(numbers[:last], 1) if number in wanted]

        assert await read(backend, filters, last, chunks=chance.random() < 0.5) == expected, filters


async def test_what_comes_after_a_request_has_expired_comes_at_once(nats_server, monkeypatch):
    monkeypatch.setattr(pulling, "EXPIRES_SECONDS", 1)
    settings = config.JetStream(nats_url=config.ServerUrls(nats_server.url))
    async with JetStreamBackend(settings) as backend:
        await backend.create_stream(StreamSpec(name="MARS", subjects=("mars.>",), storage="memory"))
        published = 0.0

        async def publish_later() -> None:
            nonlocal published
            await anyio.sleep(1.3)
            published = time.monotonic()
            await backend.publish(
                Message(subject="mars.od", data=b""), message_id="1", stream="MARS", timeout_seconds=5
            )

        async with anyio.create_task_group() as tasks, aclosing(backend.read("MARS", filter_subjects=())) as messages:
            tasks.start_soon(publish_later)
            await anext(messages)
            assert time.monotonic() - published < 0.5
