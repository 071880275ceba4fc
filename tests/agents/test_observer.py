"""The observer in memory and on a real server: what it shows of agents that nobody runs, and what it costs."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import msgspec
import nats
import pytest
import yaml
from msgspec import structs

from aviso_agents import observer
from aviso_workers import App, Notification, RetryPolicy
from aviso_workers.aviso.literals import SECOND
from aviso_workers.backends.buckets import open_existing
from aviso_workers.errors import DeniedError
from aviso_workers.events import Event, Measured, Settled
from aviso_workers.jetstream.specs import ConsumerSpec
from aviso_workers.ops import health
from aviso_workers.server import NatsServer
from aviso_workers.state import worker_records
from tests.waits import PATIENCE_SECONDS, flushed

pytestmark = pytest.mark.anyio


class Shown:
    """What an app shows to Prometheus, and what it settles."""

    def __init__(self, app: App) -> None:
        self.gauges: dict[str, Mapping[tuple[str, ...], float]] = {}
        self.settled = 0
        self._next = anyio.Event()
        app.events.listen(self._listen)

    async def until(self, condition: Callable[[], bool]) -> None:
        with anyio.move_on_after(PATIENCE_SECONDS):
            while not condition():
                await self._next.wait()
        assert condition(), f"this is shown: {self.gauges}"

    async def until_value(self, name: str, labels: tuple[str, ...], value: float | None) -> None:
        """None: there is no such series any more."""
        await self.until(lambda: name in self.gauges and self.gauges[name].get(labels) == value)

    async def until_state(self, of: tuple[str, ...], state: str, needs: float | None = None) -> None:
        """Wait for the state of an agent, and whether it needs somebody."""
        await self.until(lambda: self.state_of(of) == state)
        if needs is not None:
            await self.until_value("agent_needs_somebody", (*of, state), needs)

    def state_of(self, of: tuple[str, ...]) -> str:
        states = [labels[-1] for labels in self.gauges.get("agent_needs_somebody", ()) if labels[:-1] == of]
        return states[0] if states else ""

    def _listen(self, event: Event) -> None:
        match event:
            case Measured(name=name, values=values):
                self.gauges[name.removeprefix("aviso_observer_")] = values
            case Settled():
                self.settled += 1
        self._next.set()
        self._next = anyio.Event()


@pytest.fixture(params=["in_memory", "jetstream"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def base() -> str:
    """Of a stream that no other test has."""
    return f"observed-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def config_file(tmp_path: Path, base: str) -> Callable[..., Path]:
    """`config_file(url)`: a configuration for the server there, or for the memory; keywords are the observer's."""

    def config_file(url: str = "", **settings: float) -> Path:
        backend = {"kind": "jetstream", "jetstream": {"nats_url": url}} if url else {"kind": "in_memory"}
        settings = {"poll_seconds": 0.05} | settings
        document = {
            "notification_backend": backend,
            "notification_schema": {
                "field": {
                    "topic": {"base": base, "key_order": ["step"]},
                    "identifier": {"step": {"type": "IntHandler", "required": True}},
                }
            },
            "workers": {"agents": {"observer": settings}},
        }
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(document))
        return file

    return config_file


@pytest.fixture
async def app(kind: str, request: pytest.FixtureRequest, config_file: Callable[..., Path]) -> AsyncGenerator[App, None]:
    url = request.getfixturevalue("server").url if kind == "jetstream" else ""
    app = App(f"a{uuid.uuid4().hex[:8]}", config=config_file(url))
    app.include(observer.router)
    app.tasks.clear()  # it is run by `observing`, also while no worker is
    async with app:
        yield app


@pytest.fixture
def shown(app: App) -> Shown:
    return Shown(app)


@pytest.fixture
def stream(base: str) -> str:
    return base.upper()


@asynccontextmanager
async def observing(app: App) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(observer.observe, app)
        yield
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def working(app: App) -> AsyncIterator[None]:
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(app._work, stop)
        yield
        stop.set()


@pytest.fixture
async def labels(app: App, shown: Shown, stream: str) -> tuple[str, ...]:
    """Those of an agent that has handled one notification, and whose worker has ended since."""

    @app.agent("field")
    async def index(notification: Notification[Any]) -> None: ...

    await app.notify("field", {"step": 0})
    async with working(app):
        await shown.until(lambda: shown.settled == 1)
    return (app.name, "index", stream)


@pytest.mark.covers("001-04", "001-38")
async def test_the_lag_of_an_agent_whose_workers_are_down_is_shown(
    app: App, shown: Shown, stream: str, labels: tuple[str, ...]
) -> None:
    for step in range(3):
        await app.notify("field", {"step": step})

    async with observing(app):
        await shown.until_value("pending", labels, 3)
    found = {name: shown.gauges[name][labels] for name in ("ack_pending", "redelivered", "ack_floor_sequence")}
    assert found == {"ack_pending": 0, "redelivered": 0, "ack_floor_sequence": 1}
    now = datetime.now(UTC).timestamp()
    for name in ("last_delivery_timestamp_seconds", "last_ack_timestamp_seconds"):
        assert now - 60 < shown.gauges[name][labels] <= now, name
    assert now - 60 < shown.gauges["last_poll_timestamp_seconds"][()] <= now


@pytest.mark.slow
async def test_what_an_agent_is_blocked_at_is_told(app: App, shown: Shown, stream: str) -> None:
    @app.agent("field", ack_wait=0.1, retry=RetryPolicy(first=0.01, factor=1, max=60, attempts=None))
    async def index(notification: Notification[Any]) -> None:
        raise ValueError("no such field")

    labels = (app.name, "index", stream)
    await app.notify("field", {"step": 0})
    async with working(app), observing(app):
        await shown.until_state(labels, "blocked", 1)
    await app.session.admin.delete_stream(f"KV_{app.name}__failures")  # which other observers would read


async def test_an_agent_that_nobody_runs_is_said_to_have_no_worker(
    app: App, shown: Shown, stream: str, labels: tuple[str, ...]
) -> None:
    """It needs somebody a minute later."""
    await app.notify("field", {"step": 1})
    async with observing(app):
        await shown.until_state(labels, "no worker", 0)
        assert shown.gauges["agent_state_since_timestamp_seconds"][labels] > 0
        async with working(app):
            await shown.until_state(labels, "idle", 0)
            assert shown.gauges["agent_state_since_timestamp_seconds"][labels] == 0


async def test_a_worker_that_was_killed_needs_somebody(
    app: App, shown: Shown, labels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`labels` leaves the record of a worker that has ended in order: here it is one that says nothing any more."""
    monkeypatch.setattr(worker_records, "LIVES_SECONDS", 0.2)
    monkeypatch.setattr(health, "COMES_BACK", timedelta(0))
    (ended,) = (await worker_records.of_app(app.session.admin, app.name)).ended
    async with observing(app):
        await shown.until(lambda: bool(shown.state_of(labels)))
        assert {each[1] for each in shown.gauges["agent_needs_somebody"]} == {"index"}
        bucket = await open_existing(app.session.admin, worker_records.bucket_of(app.name), own=True)
        assert bucket is not None
        await bucket.put(ended.key, msgspec.json.encode(structs.replace(ended, ended=False)))
        await shown.until_state((app.name, f"worker {ended.name}", "-"), "lost", 1)


async def test_dead_letters_are_counted_by_agent(app: App, shown: Shown) -> None:
    @app.agent("field", retry=RetryPolicy(attempts=1))
    async def broken(notification: Notification[Any]) -> None:
        raise ValueError("no")

    for step in range(2):
        await app.notify("field", {"step": step})
    async with observing(app), working(app):
        await shown.until_value("dead_letters", (app.name, "broken"), 2)


@pytest.mark.parametrize("kind", ["in_memory"])
async def test_what_the_server_does_not_answer_stays_as_it_was(app: App, shown: Shown, stream: str) -> None:
    backend: Any = app.session.backend
    await app.notify("field", {"step": 0})
    await backend.ensure_consumer(stream, durable("away__index", f"{stream.lower()}.>"))
    async with observing(app):
        await shown.until_value("pending", ("away", "index", stream), 1)
        backend.disconnect()
        polled = shown.gauges["last_poll_timestamp_seconds"][()]
        await anyio.sleep(0.2)
        assert shown.gauges["pending"]["away", "index", stream] == 1
        assert shown.gauges["last_poll_timestamp_seconds"][()] == polled
        backend.reconnect()
        await app.notify("field", {"step": 1})
        await shown.until_value("pending", ("away", "index", stream), 2)


OF_CONSUMERS = (
    "pending",
    "ack_pending",
    "redelivered",
    "ack_floor_sequence",
    "last_delivery_timestamp_seconds",
    "last_ack_timestamp_seconds",
)


async def test_what_is_not_known_of_an_agent_has_no_series(
    app: App, shown: Shown, stream: str, labels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def denied(stream: str) -> Any:
        raise DeniedError(f"$JS.API.CONSUMER.LIST.{stream}: the server denies it")

    await app.notify("field", {"step": 1})
    async with observing(app):
        await shown.until_value("pending", labels, 1)
        assert [name for name in OF_CONSUMERS if labels not in shown.gauges[name]] == []
        monkeypatch.setattr(app.session.admin, "consumers", denied)
        await shown.until_state(labels, "unknown", 1)
        assert [name for name in OF_CONSUMERS if labels in shown.gauges[name]] == []


@pytest.mark.parametrize("kind", ["jetstream"])
async def test_an_agent_whose_consumer_is_deleted_disappears(
    app: App, shown: Shown, stream: str, server: NatsServer
) -> None:
    await app.notify("field", {"step": 0})
    for agent in ("index", "archive"):
        await app.session.backend.ensure_consumer(stream, durable(f"away__{agent}", f"{stream.lower()}.>"))
    async with observing(app), await nats.connect(server.url) as client:
        await shown.until_value("pending", ("away", "archive", stream), 1)
        await client.jetstream().delete_consumer(stream, "away__index")
        await shown.until_value("pending", ("away", "index", stream), None)
        assert shown.gauges["pending"]["away", "archive", stream] == 1


async def test_an_agent_whose_consumer_is_gone_shows_as_such_until_a_worker_makes_it_anew(
    app: App, shown: Shown, stream: str, labels: tuple[str, ...]
) -> None:
    async with observing(app):
        await shown.until_state(labels, "at rest")
        await app.session.admin.delete_consumer(stream, f"{app.name}__index")
        await shown.until_state(labels, "consumer gone")
        async with working(app):
            await shown.until_state(labels, "idle")


async def test_an_agent_without_any_has_none_shown_so_that_the_first_one_is_a_change(
    app: App, shown: Shown, labels: tuple[str, ...]
) -> None:
    async with observing(app):
        await shown.until_value("dead_letters", labels[:2], 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jetstream"])
async def test_a_thousand_agents_cost_a_handful_of_requests(
    app: App, shown: Shown, stream: str, server: NatsServer
) -> None:
    await app.notify("field", {"step": 0})
    for first in range(0, 1000, 50):  # a server beside other work does not answer a thousand requests in time
        async with anyio.create_task_group() as creating:
            for number in range(first, first + 50):
                spec = durable(f"away__agent-{number}", f"{stream.lower()}.>")
                creating.start_soon(app.session.backend.ensure_consumer, stream, spec)

    asked: Counter[str] = Counter()

    async def count(message: Any) -> None:
        asked[message.subject.removeprefix("$JS.API.")] += 1

    async with await nats.connect(server.url) as client:
        await client.subscribe("$JS.API.>", cb=count)
        await flushed(client)
        async with observing(app):
            await shown.until(lambda: "pending" in shown.gauges)  # it has looked twice
        await flushed(client)

    assert asked[f"CONSUMER.LIST.{stream}"] == 8, "two looks, with four pages of the thousand each"
    assert sum(number for request, number in asked.items() if stream in request) <= 20, asked
    assert len([agent for agent in shown.gauges["pending"] if agent[2] == stream]) == 1000


def durable(name: str, subject: str) -> ConsumerSpec:
    return ConsumerSpec(durable_name=name, filter_subjects=(subject,), ack_wait=20 * SECOND, max_ack_pending=10)
