"""Reading a stream: all that was asked for comes, and the end is believed only where the server proves it."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aviso_workers import config
from aviso_workers.backends import Message, Outgoing
from aviso_workers.backends.jetstream import JetStreamBackend, pull_requests, readers, wire
from aviso_workers.backends.jetstream.inboxes import Inbox
from aviso_workers.errors import BackendError, NotFoundError, RefusedError, UnavailableError
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.server import NatsServer
from tests.jetstream.conftest import PlayedConnection
from tests.stories.processes import cluster
from tests.waits import LONG_SECONDS, PATIENCE_SECONDS, PROMPT_SECONDS

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["the short way", pytest.param("the long way", marks=pytest.mark.slow)])
async def backend(
    nats_server: NatsServer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[JetStreamBackend, None]:
    if request.param == "the long way":
        monkeypatch.setattr(wire, "version", lambda package: "2.99.0")
    async with JetStreamBackend(config.JetStream(nats_url=config.ServerUrls(nats_server.url))) as backend:
        yield backend


async def store(backend: JetStreamBackend, subjects: list[str], *, num_replicas: int = 1) -> None:
    """Make the stream MARS, and store a message on each of these subjects in it, in this order."""
    await backend.create_stream(StreamSpec(name="MARS", subjects=("mars.>",), num_replicas=num_replicas))
    outgoing = [
        Outgoing(Message(subject=subject, data=b"null"), str(number), "MARS") for number, subject in enumerate(subjects)
    ]
    for first in range(0, len(subjects), 10_000):
        for result in await backend.publish_many(outgoing[first : first + 10_000], timeout_seconds=PATIENCE_SECONDS):
            if isinstance(result, BackendError):
                raise result


async def read(backend: JetStreamBackend, filters: tuple[str, ...], last: int, *, chunks: bool) -> list[int]:
    """Return the sequences that a reading from the beginning brings."""
    with anyio.fail_after(PATIENCE_SECONDS):
        if not chunks:
            messages = backend.read("MARS", filter_subjects=filters, last_sequence=last)
            return [message.sequence async for message in messages]
        found = backend.read_chunks("MARS", filter_subjects=filters, start_sequence=1, last_sequence=last)
        return [sequence async for chunk in found for sequence in chunk.sequences]


@pytest.mark.parametrize("count", [1, 100, 30_000])
async def test_all_that_filters_of_any_density_take_comes(backend: JetStreamBackend, count: int) -> None:
    chance = random.Random(count)
    # The number of a subject is small for most messages, so that its share of the stream is anything.
    numbers = [min(999, int(chance.paretovariate(0.5))) for _ in range(count)]
    await store(backend, [f"mars.{number % 2}.{number}" for number in numbers])
    for _ in range(20):
        if chance.random() < 0.2:
            half = chance.choice([0, 1])
            filters: tuple[str, ...] = (f"mars.{half}.*",)
            wanted = {number for number in range(1000) if number % 2 == half}
        else:
            wanted = {
                chance.choice([chance.choice(numbers), chance.randrange(1000)]) for _ in range(chance.choice([1, 3]))
            }
            filters = tuple(f"mars.{number % 2}.{number}" for number in sorted(wanted))
        last = chance.choice([count, max(1, count - chance.randrange(count))])
        expected = [sequence for sequence, number in enumerate(numbers[:last], 1) if number in wanted]

        assert await read(backend, filters, last, chunks=chance.random() < 0.5) == expected, filters


@pytest.mark.slow
async def test_what_two_of_three_servers_hold_is_read_at_once_after_the_third_has_died(tmp_path: Path) -> None:
    with cluster(tmp_path) as nodes:
        async with JetStreamBackend(config.JetStream(nats_url=config.ServerUrls(nodes[0].url))) as backend:
            with anyio.fail_after(PATIENCE_SECONDS):
                while True:
                    try:
                        await store(backend, ["mars.0.1", "mars.0.2"], num_replicas=3)
                        break
                    except BackendError:  # the servers elect their leader
                        await anyio.sleep(0.1)
            leader = (await backend.administration().api("STREAM.INFO.MARS"))["cluster"]["leader"]
            next(node for node in nodes[1:] if node.name != leader).kill()
            with anyio.fail_after(PATIENCE_SECONDS):
                while True:
                    with suppress(UnavailableError):  # who has died may have led them
                        await read(backend, (), 2, chunks=False)
                        break
            interrupted = 0
            for _ in range(6):
                try:
                    assert await read(backend, (), 2, chunks=False) == [1, 2]
                except UnavailableError:  # a busy machine; every third one would be the dead server's
                    interrupted += 1
            assert interrupted < 2
            with anyio.fail_after(PATIENCE_SECONDS):  # also those that the dead server was given to keep
                while (await backend.administration().api("CONSUMER.NAMES.MARS"))["consumers"]:  # noqa: ASYNC110
                    await anyio.sleep(0.1)


async def test_who_may_not_ask_for_the_end_is_told_so(tmp_path: Path) -> None:
    denied = '{ publish: { deny: "$JS.API.STREAM.MSG.GET.>" } }'
    users = f"authorization {{ users: [{{ user: reader, password: secret, permissions: {denied} }}] }}\n"
    with NatsServer.start(store_dir=tmp_path, config=users) as server:
        url = server.url.replace("//", "//reader:secret@")
        async with JetStreamBackend(config.JetStream(nats_url=config.ServerUrls(url))) as backend:
            await store(backend, ["mars.0.1", "mars.0.2"])

            assert await read(backend, ("mars.0.2",), 2, chunks=False) == [2]  # it is the last one: nothing is asked
            with pytest.raises(RefusedError, match=r"STREAM\.MSG\.GET\.MARS.*permissions violation"):
                await read(backend, ("mars.0.1",), 2, chunks=False)


async def test_what_comes_after_a_request_has_expired_comes_at_once(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_requests, "EXPIRES_SECONDS", 1)
    monkeypatch.setattr(readers, "HEARTBEAT_SECONDS", LONG_SECONDS)  # when it would look again by itself
    settings = config.JetStream(nats_url=config.ServerUrls(nats_server.url))
    async with JetStreamBackend(settings) as backend:
        await backend.create_stream(StreamSpec(name="MARS", subjects=("mars.>",), storage="memory"))

        async def publish_later() -> None:
            await anyio.sleep(1.3)
            await backend.publish(
                Message(subject="mars.od", data=b""),
                message_id="1",
                stream="MARS",
                timeout_seconds=PATIENCE_SECONDS,
            )

        async with anyio.create_task_group() as tasks, aclosing(backend.read("MARS", filter_subjects=())) as messages:
            tasks.start_soon(publish_later)
            with anyio.fail_after(PROMPT_SECONDS):
                await anext(messages)


class PlayedStream(PlayedConnection):
    """A server whose stream holds more than it delivers: message `held`, after whatever is asked about."""

    def __init__(self, held: int | None) -> None:
        super().__init__()
        self.on_disconnect: set[Callable[[], None]] = set()
        self.held = held
        self.asked: list[dict[str, Any]] = []

    async def api(self, subject: str, request: Any = None, **_: object) -> dict[str, Any]:
        match subject.partition(".MARS")[0]:
            case "CONSUMER.CREATE":
                reader = {"stream_name": "MARS", "name": "reader", "ts": "2026-11-20T06:00:00Z", "config": {}}
                return {**reader, "delivered": {"stream_seq": 0}, "num_pending": 5}
            case "STREAM.MSG.GET" if self.held is None:
                raise NotFoundError("no message found", code=10037)
            case "STREAM.MSG.GET":
                self.asked.append(request)
                return {"message": {"subject": "mars.1", "seq": self.held, "time": "2026-11-20T06:00:00Z"}}
        return {}

    async def close_inbox(self, inbox: Inbox) -> None:
        pass

    def deliver(self, sequence: int, number: int, *, pending: int) -> None:
        """Deliver a message of the stream, the so manieth one of its consumer."""
        self.heard([(b"mars.od", b"$JS.ACK.MARS.reader.1.%d.%d.1.%d" % (sequence, number, pending), b"", b"{}")])


WHOLE: dict[str, Any] = {"filter_subjects": ["mars.>"], "start_sequence": 1, "start_time": None, "last_sequence": 5}


async def deliver_later(stream: PlayedStream, *deliveries: tuple[int, int, int]) -> None:
    """Deliver once the consumer was asked, each in a turn of the loop of its own."""
    while not stream.sent:
        await checkpoint()
    for sequence, number, pending in deliveries:
        stream.deliver(sequence, number, pending=pending)
        await anyio.wait_all_tasks_blocked()


async def test_a_message_that_got_lost_on_its_way_is_noticed() -> None:
    stream = PlayedStream(held=None)
    async with (
        aclosing(readers.JetStreamReaders(stream.connection).read("MARS", **WHOLE)) as messages,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(deliver_later, stream, (1, 1, 4), (3, 3, 2))
        assert (await anext(messages)).sequence == 1
        with pytest.raises(UnavailableError, match="its message 3 came instead of 2"):
            await anext(messages)


async def deliver_at_once(stream: PlayedStream, *deliveries: tuple[int, int, int], together: bool) -> None:
    """Deliver once the consumer was asked, in one turn of the loop, and `together` in one read."""
    while not stream.sent:
        await checkpoint()
    arrivals = [
        (b"mars.od", b"$JS.ACK.MARS.reader.1.%d.%d.1.%d" % (sequence, number, pending), b"", b"{}")
        for sequence, number, pending in deliveries
    ]
    for read in [arrivals] if together else [[arrival] for arrival in arrivals]:
        stream.heard(read)


async def test_nothing_that_comes_after_one_that_got_lost_is_read() -> None:
    stream = PlayedStream(held=None)
    async with (
        aclosing(readers.JetStreamReaders(stream.connection).read("MARS", **WHOLE)) as messages,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(partial(deliver_at_once, together=False), stream, (3, 2, 2), (4, 1, 1))
        with pytest.raises(UnavailableError, match="its message 2 came instead of 1"):
            await anext(messages)


async def test_nothing_that_was_stored_after_the_end_comes() -> None:
    stream = PlayedStream(held=None)
    async with (
        aclosing(readers.JetStreamReaders(stream.connection).read("MARS", **WHOLE)) as messages,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(partial(deliver_at_once, together=True), stream, (4, 1, 2), (6, 2, 1), (7, 3, 0))
        assert [message.sequence async for message in messages] == [4]


async def test_a_consumer_that_begins_anew_delivers_nothing_twice() -> None:
    stream = PlayedStream(held=None)
    async with (
        aclosing(readers.JetStreamReaders(stream.connection).read("MARS", **WHOLE)) as messages,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(deliver_later, stream, (1, 1, 4), (2, 2, 3), (1, 1, 4))
        assert [(await anext(messages)).sequence for _ in range(2)] == [1, 2]
        with pytest.raises(UnavailableError, match="its message 1 came instead of 3"):
            await anext(messages)


async def test_a_reading_raises_where_its_stream_holds_more_than_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "CHECK_SECONDS", 0.01)
    stream = PlayedStream(held=4)
    async with (
        aclosing(readers.JetStreamReaders(stream.connection).read("MARS", **WHOLE)) as messages,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(deliver_later, stream, (1, 1, 0))
        assert (await anext(messages)).sequence == 1
        with pytest.raises(UnavailableError, match="delivers nothing of MARS after 1"):
            await anext(messages)
    assert stream.asked == [{"seq": 2, "next_by_subj": "mars.>"}] * (readers.MAX_CHECKS + 1)


async def test_a_leader_that_lacks_what_comes_meanwhile_has_not_proven_the_end() -> None:
    """It may have stored what another leader had acknowledged only when it was asked."""

    class Catching(PlayedStream):
        async def api(self, subject: str, request: Any = None, **stated: object) -> dict[str, Any]:
            if subject.startswith("STREAM.MSG.GET") and not self.asked:
                self.asked.append(request)
                self.deliver(2, 2, pending=3)
            return await super().api(subject, request, **stated)

    stream = Catching(held=None)

    async def deliver_the_rest() -> None:
        while not stream.asked:
            await checkpoint()
        await anyio.wait_all_tasks_blocked()
        for sequence in (3, 4, 5):
            stream.deliver(sequence, sequence, pending=5 - sequence)

    async with (
        aclosing(readers.JetStreamReaders(stream.connection).read("MARS", **WHOLE)) as messages,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(deliver_later, stream, (1, 1, 0))
        tasks.start_soon(deliver_the_rest)
        assert [message.sequence async for message in messages] == [1, 2, 3, 4, 5]


async def test_a_bounded_reading_asks_for_no_more_than_may_be_left() -> None:
    stream = PlayedStream(held=None)
    async with (
        aclosing(readers.JetStreamReaders(stream.connection).read("MARS", **WHOLE)) as messages,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(deliver_later, stream, (1, 1, 4))
        await anext(messages)
    assert [json.loads(body)["batch"] for _, body, _ in stream.sent] == [5]


async def test_a_chunk_is_full_when_it_has_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "CHUNK_BYTES", 2)
    stream = PlayedStream(held=None)
    reading = readers.JetStreamReaders(stream.connection).read_chunks(
        "MARS", filter_subjects=["mars.>"], start_sequence=1, last_sequence=5
    )
    async with aclosing(reading) as chunks, anyio.create_task_group() as tasks:
        tasks.start_soon(deliver_later, stream, (1, 1, 4))
        with anyio.fail_after(readers.CHECK_SECONDS / 2):
            assert list((await anext(chunks)).sequences) == [1]


async def test_a_consumer_that_delivers_slowly_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks in a row count, and a message ends the row."""
    monkeypatch.setattr(readers, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(readers, "MAX_CHECKS", 3)
    stream = PlayedStream(held=6)

    async def deliver_slowly() -> None:
        for sequence in range(1, 6):
            asked = len(stream.asked)
            stream.held = 5
            while len(stream.asked) < asked + 2:
                await checkpoint()
            stream.deliver(sequence, sequence, pending=0)

    async with (
        aclosing(readers.JetStreamReaders(stream.connection).read("MARS", **WHOLE)) as messages,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(deliver_slowly)
        assert [message.sequence async for message in messages] == [1, 2, 3, 4, 5]
