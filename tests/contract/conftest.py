"""One suite for every backend: a backend joins by a branch in `backend`, `elapse` and nothing else.

In memory time is virtual; on JetStream it is real, and the waits are short.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import pytest

from aviso_workers import App, Notification, Reject, config
from aviso_workers.backends import Admin, ConsumerInfo, Delivery, Message, Outgoing, OutgoingChunk, PubAck, StreamInfo
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.backends.jetstream import JetStreamBackend, wire
from aviso_workers.clocks import VirtualClock
from aviso_workers.errors import BackendError, RefusedError
from aviso_workers.jetstream.specs import ConsumerSpec, StreamSpec
from aviso_workers.server import BINARY_VARIABLE, NatsServer
from aviso_workers.testing import Harness, harness
from tests.contract.settings import app_config
from tests.waits import PATIENCE_SECONDS

SECOND = 1_000_000_000
Elapse = Callable[[float], Awaitable[None]]
Create = Callable[..., Awaitable[StreamInfo]]
Publish = Callable[..., Coroutine[Any, Any, PubAck]]
PublishMany = Callable[..., Awaitable[list[PubAck | BackendError]]]
PublishChunk = Callable[..., Awaitable[int]]
Stored = Callable[..., Awaitable[list[Message]]]
Ensure = Callable[..., Awaitable[ConsumerInfo]]
Eventually = Callable[..., Awaitable[None]]


ON_A_SERVER_LATER = {
    *("test_app", "test_around", "test_attempts", "test_dependencies", "test_contexts", "test_memory", "test_once"),
    *("test_on_dead_letter", "test_outcomes", "test_outgoing", "test_outputs", "test_paused_timers", "test_retried"),
    *("test_raw_payloads", "test_redeploys", "test_requests", "test_returned_shapes", "test_sync_tables"),
    *("test_tables", "test_threads", "test_traces", "test_typed_identifiers", "test_uncounted", "test_windows"),
}
"""Modules about what authors write, and not about what a backend does: without `--all` they run in memory only."""
LONG_WAY = {"test_consuming", "test_publishing", "test_reading"}
"""Modules that are held to the contract on the long way through nats-py as well."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        name = metafunc.module.__name__.rpartition(".")[2]
        later = pytest.mark.slow if name in ON_A_SERVER_LATER else ()
        kinds = ["in_memory", pytest.param("jetstream", marks=later)]
        if name in LONG_WAY:
            kinds.append(pytest.param("jetstream, the long way", marks=pytest.mark.slow))
        metafunc.parametrize("kind", kinds)


TOO_OLD = re.compile(r"nats-server [0-9.]+ or newer is needed; this one is [0-9.]+")


@cache
def named_version() -> tuple[int, ...] | None:
    """The version of the nats-server that the suite was told to use; None where it uses the one that it finds."""
    named = os.environ.get(BINARY_VARIABLE)
    if not named:
        return None
    said = subprocess.run([named, "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, said.split()[-1].lstrip("v").split(".")[:2]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Skip what is marked as needing a newer nats-server than the one that was named."""
    needed, found = item.get_closest_marker("needs_server"), named_version()
    if needed and found and "in_memory" not in item.name and found < needed.args:
        pytest.skip(f"nats-server {'.'.join(map(str, needed.args))} or newer is needed")
    with skipping_what_is_too_old():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    with skipping_what_is_too_old():
        return (yield)


@contextmanager
def skipping_what_is_too_old() -> Iterator[None]:
    """Skip a test that ends with our own refusal because the nats-server that was named is too old for it."""
    try:
        yield
    except RefusedError as error:
        if named_version() is None or not (refusal := TOO_OLD.search(str(error))):
            raise
        pytest.skip(refusal[0])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server of the test's own. It starts within 50 ms, and the obvious alternative does not hold: a nats-server
    2.15 that deletes a stream and creates it again right away sometimes finds the old one's last message in it.
    """
    with NatsServer.start(store_dir=tmp_path) as server:
        yield server


@pytest.fixture
def nats_url(kind: str, request: pytest.FixtureRequest) -> str:
    """Empty where no server is needed."""
    return request.getfixturevalue("server").url if kind != "in_memory" else ""


@pytest.fixture
def app(kind: str, nats_url: str) -> App:
    """An app without agents, for a test to declare some."""
    return App("contract", config=app_config(kind, nats_url))


@pytest.fixture
def url(nats_url: str) -> str | None:
    """Where the harness finds the server; None where it needs none."""
    return nats_url or None


@pytest.fixture
def handled() -> list[int]:
    """The steps that the agent `index` of `t` was given, in order."""
    return []


@pytest.fixture
async def t(app: App, url: str | None, handled: list[int]) -> AsyncIterator[Harness]:
    """A worker with the agent `index`, which rejects what has the payload "reject"."""

    @app.agent("mars", where={"stream": "oper"})
    async def index(notification: Notification[Any]) -> None:
        handled.append(int(notification.identifier["step"]))
        if notification.payload == "reject":
            raise Reject("as asked for")

    async with harness(app, server=url) as t:
        yield t


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def backend(
    kind: str, nats_url: str, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Admin, None]:
    if kind == "in_memory":
        async with InMemoryBackend(config.InMemory(), clock=clock) as in_memory:
            yield in_memory
        return
    if kind == "jetstream, the long way":
        monkeypatch.setattr(wire, "version", lambda package: "2.99.0")
    async with JetStreamBackend(config.JetStream(nats_url=config.ServerUrls(nats_url))) as jetstream:
        yield jetstream


@pytest.fixture
def elapse(kind: str, clock: VirtualClock) -> Elapse:
    """`await elapse(seconds)`: let time pass."""
    return clock.advance if kind == "in_memory" else anyio.sleep


@pytest.fixture
def create(backend: Admin) -> Create:
    """`await create(max_msgs=2)`: the stream MARS, or another."""

    async def create(name: str = "MARS", subjects: tuple[str, ...] = ("mars.>",), **stated: Any) -> StreamInfo:
        return await backend.create_stream(StreamSpec(name=name, subjects=subjects, **{"storage": "memory", **stated}))

    return create


@pytest.fixture
def publish(backend: Admin) -> Publish:
    """`await publish("mars.od")`: a message of its own id, or of a given one."""
    numbers = itertools.count(1)

    async def publish(
        subject: str,
        data: bytes = b"null",
        *,
        message_id: str | None = None,
        headers: dict[str, str] | None = None,
        stream: str = "MARS",
    ) -> PubAck:
        return await backend.publish(
            Message(subject=subject, data=data, headers=headers),
            message_id=message_id or f"message-{next(numbers)}",
            stream=stream,
            timeout_seconds=PATIENCE_SECONDS,
        )

    return publish


@pytest.fixture
def publish_many(backend: Admin) -> PublishMany:
    """`await publish_many(["mars.od", "mars.rd"])`: messages whose ids are their subjects, each to its base's stream,
    or all to a given one."""

    async def publish_many(subjects: list[str], *, stream: str = "", **stated: Any) -> list[PubAck | BackendError]:
        outgoing = [
            Outgoing(Message(subject=subject, data=b"null"), subject, stream or subject.partition(".")[0].upper())
            for subject in subjects
        ]
        return await backend.publish_many(outgoing, timeout_seconds=PATIENCE_SECONDS, **stated)

    return publish_many


@pytest.fixture
def publish_chunk(backend: Admin) -> PublishChunk:
    """`await publish_chunk(["mars.od", "mars.rd"])`: messages for the stream MARS whose ids are their subjects."""

    async def publish_chunk(subjects: list[str], **columns: Any) -> int:
        given: dict[str, Any] = {
            "data": [b"null"] * len(subjects),
            "headers": [None] * len(subjects),
            "message_ids": subjects,
        }
        chunk = OutgoingChunk(subjects=subjects, **(given | columns))
        return await backend.publish_chunk("MARS", chunk, timeout_seconds=PATIENCE_SECONDS)

    return publish_chunk


@pytest.fixture
def stored(backend: Admin) -> Stored:
    """`await stored()`: what the stream MARS holds now."""

    async def stored(stream: str = "MARS") -> list[Message]:
        last = (await backend.stream_info(stream)).last_sequence
        return [message async for message in backend.read(stream, filter_subjects=(), last_sequence=last)]

    return stored


@pytest.fixture
def ensure(backend: Admin) -> Ensure:
    """`await ensure(ack_wait_seconds=0.5)`: the consumer `agent` of MARS, or another."""

    async def ensure(
        durable_name: str = "agent",
        *,
        stream: str = "MARS",
        filter_subjects: tuple[str, ...] = ("mars.>",),
        ack_wait_seconds: float = 30.0,
        max_ack_pending: int = 100,
        **stated: Any,
    ) -> ConsumerInfo:
        spec = ConsumerSpec(
            durable_name=durable_name,
            filter_subjects=filter_subjects,
            ack_wait=int(ack_wait_seconds * SECOND),
            max_ack_pending=max_ack_pending,
            **stated,
        )
        return await backend.ensure_consumer(stream, spec)

    return ensure


@pytest.fixture
def eventually(backend: Admin) -> Eventually:
    """`await eventually(ack_floor=3)`: wait until the consumer reports it. A server counts a little later."""

    async def eventually(consumer: str = "agent", *, stream: str = "MARS", **expected: int) -> None:
        found: dict[str, int] = {}
        with anyio.move_on_after(PATIENCE_SECONDS):
            while found != expected:
                info = await backend.consumer_info(stream, consumer)
                found = {name: getattr(info, name) for name in expected}
                if found != expected:
                    await anyio.sleep(0.01)
        assert found == expected

    return eventually


class Inbox:
    """A reader's end: takes as many deliveries as its size allows and hands them to the test one by one."""

    def __init__(self, size: int = 100) -> None:
        self.size = size
        self.waiting: deque[Delivery] = deque()
        self._arrived = anyio.Event()

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        self.waiting.extend(deliveries)
        self._arrived.set()

    def capacity(self) -> int:
        return self.size - len(self.waiting)

    async def next(self, timeout_seconds: float = PATIENCE_SECONDS) -> Delivery:
        with anyio.move_on_after(timeout_seconds):
            while not self.waiting:
                self._arrived = anyio.Event()
                await self._arrived.wait()
        assert self.waiting, f"nothing was delivered within {timeout_seconds} s"
        return self.waiting.popleft()

    async def take(self, count: int) -> list[Delivery]:
        return [await self.next() for _ in range(count)]

    @property
    def subjects(self) -> list[str]:
        """Of what was delivered and not yet taken."""
        return [delivery.message.subject for delivery in self.waiting]


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def inbox_of() -> Callable[[int], Inbox]:
    """`inbox_of(2)`: an inbox with room for two."""
    return Inbox
