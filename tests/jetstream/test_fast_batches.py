"""Fast batches against a real server: that they are taken, that a stream without them is served, and what is left of
them when the server dies."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from aviso_workers import App, Notify, config
from aviso_workers.backends import Message, Outgoing, OutgoingChunk, PubAck
from aviso_workers.backends.jetstream import JetStreamBackend
from aviso_workers.errors import OutcomeUnknownError, RefusedError
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.server import NatsServer
from tests.conftest import WriteConfig
from tests.presence import present
from tests.waits import PATIENCE_SECONDS, stand_still

pytestmark = pytest.mark.anyio

MARS = StreamSpec(name="MARS", subjects=("mars.>",))


@asynccontextmanager
async def connected(server: NatsServer) -> AsyncIterator[JetStreamBackend]:
    settings = config.JetStream(nats_url=config.ServerUrls(server.url), max_reconnect_attempts=0)
    async with JetStreamBackend(settings) as backend:
        yield backend


@pytest.fixture
async def backend(nats_server: NatsServer) -> AsyncGenerator[JetStreamBackend, None]:
    async with connected(nats_server) as backend:
        yield backend


def messages(count: int, *, name: str = "message") -> list[Outgoing]:
    return [Outgoing(Message(subject="mars.od", data=b"%d" % n), f"{name}-{n}", "MARS") for n in range(count)]


def answers(backend: JetStreamBackend) -> int:
    """How many messages the server has sent us so far."""
    return int(backend._connection.nc.stats["in_msgs"])


@pytest.mark.covers("003-03")
async def test_many_are_answered_by_few(backend: JetStreamBackend) -> None:
    await backend.create_stream(MARS)
    before = answers(backend)

    results = await backend.publish_many(messages(500), timeout_seconds=PATIENCE_SECONDS)

    assert Counter(results) == {PubAck(stream="MARS", sequence=0): 500}
    assert answers(backend) - before < 50
    assert (await backend.stream_info("MARS")).messages == 500


async def test_a_few_are_answered_each(backend: JetStreamBackend) -> None:
    await backend.create_stream(MARS)

    results = await backend.publish_many(messages(3), timeout_seconds=PATIENCE_SECONDS)

    assert [result.sequence for result in results if isinstance(result, PubAck)] == [1, 2, 3]


async def test_a_stream_that_somebody_else_made_is_left_as_it_is(
    nats_server: NatsServer, write_config: WriteConfig
) -> None:
    path = str(write_config(nats_server.url))
    async with connected(nats_server) as other:
        await other._connection.api("STREAM.CREATE.MARS", {"name": "MARS", "subjects": ["mars.>"]})

        async with App("feeder", config=path) as app:
            assert await app.notify_many(Notify("mars", {"class": "od", "step": n}) for n in range(100)) == 100

        info = await other.stream_info("MARS")
    assert info.messages == 100
    assert not info.config.get("allow_batched")


async def test_a_stream_that_takes_no_batches_any_more_is_served_one_by_one(
    nats_server: NatsServer, backend: JetStreamBackend
) -> None:
    info = await backend.create_stream(MARS)
    async with connected(nats_server) as other:
        await other.update_stream({**info.config, "allow_batched": False})

    first = await backend.publish_many(messages(20), timeout_seconds=PATIENCE_SECONDS)
    second = await backend.publish_many(messages(20, name="other"), timeout_seconds=PATIENCE_SECONDS)

    assert [result.sequence for result in first if isinstance(result, PubAck)] == list(range(1, 21))
    assert [result.sequence for result in second if isinstance(result, PubAck)] == list(range(21, 41))


async def test_beyond_the_batches_that_a_server_allows_messages_go_one_by_one(backend: JetStreamBackend) -> None:
    await backend.create_stream(MARS)
    for number in range(1000):
        backend._connection.wire.send(b"mars.rd", b"", reply=b"nobody.%d.1.fail.1.0.$FI" % number)

    results = await backend.publish_many(messages(20), timeout_seconds=PATIENCE_SECONDS)

    assert [result.sequence for result in results if isinstance(result, PubAck)] == list(range(1001, 1021))


async def test_a_message_that_must_not_be_sent_does_not_end_the_batch_of_the_others(backend: JetStreamBackend) -> None:
    await backend.create_stream(MARS)
    too_large = Outgoing(Message(subject="mars.od", data=b"x" * backend.connection.max_payload), "large", "MARS")
    no_subject = Outgoing(Message(subject="mars od", data=b""), "bad", "MARS")
    before = answers(backend)

    results = await backend.publish_many([too_large, *messages(500), no_subject], timeout_seconds=PATIENCE_SECONDS)

    assert [type(results[place]) for place in (0, 501)] == [RefusedError, RefusedError]
    assert Counter(results[1:501]) == {PubAck(stream="MARS", sequence=0): 500}
    assert answers(backend) - before < 50


async def test_what_a_silent_server_may_have_stored_is_unknown(
    backend: JetStreamBackend, nats_server: NatsServer
) -> None:
    await backend.create_stream(MARS)
    stand_still(nats_server)

    results = await backend.publish_many(messages(20), timeout_seconds=0.1)

    nats_server.process.send_signal(signal.SIGCONT)
    assert {type(result) for result in results} == {OutcomeUnknownError}
    await backend.publish_many(messages(20), timeout_seconds=PATIENCE_SECONDS)
    assert (await backend.stream_info("MARS")).messages == 20


async def test_a_chunk_that_a_silent_server_may_have_stored_is_unknown(
    backend: JetStreamBackend, nats_server: NatsServer
) -> None:
    await backend.create_stream(MARS)
    stand_still(nats_server)

    chunk = OutgoingChunk(
        subjects=["mars.od"] * 20, data=[b""] * 20, headers=[None] * 20, message_ids=[str(n) for n in range(20)]
    )
    with pytest.raises(OutcomeUnknownError, match="publish 20 messages to stream MARS"):
        await backend.publish_chunk("MARS", chunk, timeout_seconds=0.1)

    nats_server.process.send_signal(signal.SIGCONT)


async def test_what_was_under_way_when_the_server_died_is_unknown_at_once(
    backend: JetStreamBackend, nats_server: NatsServer
) -> None:
    await backend.create_stream(MARS)
    stand_still(nats_server)
    results: list[Any] = []

    async def publish() -> None:
        results.extend(await backend.publish_many(messages(20), timeout_seconds=PATIENCE_SECONDS))

    with anyio.fail_after(PATIENCE_SECONDS):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publish)
            await anyio.wait_all_tasks_blocked()
            nats_server.kill()

    assert {type(result) for result in results} == {OutcomeUnknownError}


@pytest.mark.slow
async def test_a_server_that_dies_while_many_are_published_costs_none_and_doubles_none(
    tmp_path: Path, write_config: Callable[..., Path], free_port: int
) -> None:
    """Killed three times, each time soon after the next 20,000 were begun."""
    count = 60_000
    begun = {number: anyio.Event() for number in range(5_000, count, 20_000)}
    server = NatsServer.start(store_dir=tmp_path / "jetstream", port=free_port)

    def wanted() -> Iterator[Notify]:
        for number in range(count):
            if number in begun:
                begun[number].set()
            yield Notify("mars", {"class": "od", "step": number % 1000}, "x" * 200, message_id=f"{number}")

    async with App("feeder", config=str(write_config(server.url))) as app, anyio.create_task_group() as tasks:
        tasks.start_soon(app.notify_many, wanted())
        for soon in begun.values():
            await soon.wait()
            server.kill()
            server.stop()
            server = NatsServer.start(store_dir=tmp_path / "jetstream", port=free_port)

    async with connected(server) as backend:
        last = (await backend.stream_info("MARS")).last_sequence
        stored = Counter(
            [
                int(present(message.headers)["Nats-Msg-Id"])
                async for message in backend.read("MARS", filter_subjects=(), last_sequence=last)
            ]
        )
    server.stop()
    assert stored == Counter(range(count)), _difference(stored, count)


def _difference(stored: Counter[int], count: int) -> str:
    lost, twice = set(range(count)) - set(stored), [number for number, times in stored.items() if times > 1]
    return f"{len(lost)} lost: {sorted(lost)[:5]}, {len(twice)} twice: {twice[:5]}"
