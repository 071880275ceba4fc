from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from aviso_workers import App
from aviso_workers.backends import Administration
from aviso_workers.jetstream.info import Cluster, Replica
from aviso_workers.ops import reports, snapshots
from aviso_workers.ops.reports import ConsumerRow, StreamRow
from aviso_workers.ops.snapshots import ServerSnapshot
from aviso_workers.server import NatsServer
from aviso_workers.state.consumer_records import ConsumerRecord

pytestmark = pytest.mark.anyio


class Place:
    def __init__(self, app: App) -> None:
        self.app = app

    @property
    def server(self) -> Administration:
        return self.app.session.admin.administration()

    async def create(self, stream: str, **config: Any) -> None:
        config = {"name": stream, "subjects": [f"{stream.lower()}.>"], **config}
        await self.server.api(f"STREAM.CREATE.{stream}", config)

    async def consumer(self, stream: str, name: str, **config: Any) -> None:
        config = {"durable_name": name, "ack_policy": "explicit", **config}
        await self.server.api(f"CONSUMER.CREATE.{stream}.{name}", {"stream_name": stream, "config": config})

    async def publish(self, stream: str, count: int) -> None:
        for number in range(count):
            await self.server.request(f"{stream.lower()}.{number}", b"here")

    async def settle(self, stream: str, consumer: str, answer: bytes = b"+ACK") -> None:
        inbox = self.server.new_inbox()
        async with self.server.listen(inbox) as heard:
            self.server.send(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", reply=inbox)
            await self.server.request((await heard.receive()).reply, answer)

    async def look(self) -> ServerSnapshot:
        return await snapshots.take(self.app.session.admin)


@pytest.fixture
async def place(nats_server: NatsServer, write_config: Callable[..., Path]) -> AsyncGenerator[Place, None]:
    async with App("tests", config=write_config(nats_server.url)) as app:
        yield Place(app)


def stream_row(now: ServerSnapshot, before: ServerSnapshot) -> StreamRow:
    [row] = reports.streams(now, before)
    return row


def consumer_row(now: ServerSnapshot, before: ServerSnapshot) -> ConsumerRow:
    [row] = reports.consumers(now, before)
    return row


def later(look: ServerSnapshot, seconds: float) -> ServerSnapshot:
    return structs.replace(look, at=look.at + seconds)


async def test_a_stream_is_told_with_its_rate_and_limits(place: Place) -> None:
    await place.create("MARS", max_msgs=100, max_bytes=1_000_000)
    before = await place.look()
    await place.publish("MARS", 10)
    await place.server.api("STREAM.MSG.DELETE.MARS", {"seq": 5})
    row = stream_row(later(await place.look(), 2 + before.at - (await place.look()).at), before)
    assert (row.stream, row.messages, row.used, row.deleted, row.consumers) == ("MARS", 9, 0.09, 1, 0)
    assert row.rate == pytest.approx(5, rel=0.2)
    assert (row.replicas, row.current, row.trouble) == (1, None, "")
    assert row.last is not None


async def test_a_stream_without_limits_and_messages_has_neither(place: Place) -> None:
    await place.create("MARS")
    look = await place.look()
    row = stream_row(look, look)
    assert (row.used, row.last, row.rate) == (None, None, 0.0)


async def test_a_lag_that_shrinks_is_gone_some_time(place: Place) -> None:
    await place.create("MARS")
    await place.publish("MARS", 10)
    await place.consumer("MARS", "client")
    before = await place.look()
    for _ in range(4):
        await place.settle("MARS", "client")
    now = structs.replace(await place.look(), at=before.at + 2)
    row = consumer_row(now, before)
    assert (row.pending, row.lag, row.rate, row.drain_seconds, row.trouble) == (6, 6, -2.0, 3.0, "")


async def test_a_lag_that_grows_is_never_gone(place: Place) -> None:
    await place.create("MARS")
    await place.consumer("MARS", "client")
    before = await place.look()
    await place.publish("MARS", 10)
    row = consumer_row(structs.replace(await place.look(), at=before.at + 2), before)
    assert (row.lag, row.rate, row.drain_seconds) == (10, 5.0, None)
    assert not row.trouble, "what has just come is not stuck"


async def test_what_nobody_takes_is_stuck(place: Place) -> None:
    await place.create("MARS")
    await place.consumer("MARS", "client")
    await place.publish("MARS", 1)
    row = consumer_row(later(await place.look(), 1), await place.look())
    assert row.trouble == "1 pending, and no client pulls them"


async def test_what_was_delivered_just_now_is_not_stuck(place: Place) -> None:
    await place.create("MARS")
    await place.publish("MARS", 3)
    await place.consumer("MARS", "slow", ack_wait=30_000_000_000)
    await place.settle("MARS", "slow", b"+WPI")
    look = await place.look()
    assert not consumer_row(later(look, 1), look).trouble


async def test_a_consumer_of_an_agent_says_how_the_agent_is(place: Place) -> None:
    """A worker recorded that the ack floor had stood for ten minutes."""
    await place.create("MARS")
    await place.publish("MARS", 2)
    await place.consumer("MARS", "index__field")
    await place.settle("MARS", "index__field", b"+WPI")
    await place.settle("MARS", "index__field")
    look = await place.look()
    consumer = look.consumers["MARS", "index__field"]
    created = look.streams["MARS"].created
    assert created is not None
    record = ConsumerRecord(
        stream_created=created,
        ack_floor=0,
        filter_subjects=(),
        time=consumer.time,
        unfinished_since=consumer.time - timedelta(minutes=10),
    )
    assert consumer.last_settled, "the second one was just now"
    known = structs.replace(look.recorded, consumers={("MARS", "index__field"): record})
    recorded = structs.replace(look, recorded=known)
    assert consumer_row(recorded, recorded).trouble == (
        "stuck: 1 are delivered and not finished, the oldest after sequence 0"
    )


async def test_what_is_paused_is_not_stuck(place: Place) -> None:
    await place.create("MARS")
    await place.publish("MARS", 3)
    await place.consumer("MARS", "client", pause_until="2099-01-01T00:00:00Z")
    look = await place.look()
    row = consumer_row(later(look, 1), look)
    assert (row.paused, row.trouble) == (True, "")


async def test_those_that_lag_behind_most_come_first(place: Place) -> None:
    await place.create("MARS")
    await place.publish("MARS", 3)
    await place.consumer("MARS", "few", filter_subject="mars.1")
    await place.consumer("MARS", "all")
    look = await place.look()
    assert [(row.consumer, row.lag) for row in reports.consumers(look, look)] == [("all", 3), ("few", 1)]


@pytest.mark.parametrize(
    ("n2", "leader", "told"),
    [
        ({"current": True}, "n1", ""),
        ({"current": False}, "n1", "not current: n2"),
        ({"current": True, "offline": True}, "n1", "not current: n2"),
        ({"current": True}, "", "it has no leader"),
    ],
)
async def test_replicas_that_are_behind_are_named(place: Place, n2: dict[str, Any], leader: str, told: str) -> None:
    await place.create("MARS")
    look = await place.look()
    replicas = (Replica(name="n2", **n2), Replica(name="n3", current=True))
    look.streams["MARS"] = structs.replace(look.streams["MARS"], cluster=Cluster(leader=leader, replicas=replicas))
    assert stream_row(look, look).trouble == told


async def test_when_something_was_settled_is_not_known_after_a_restart_and_is_not_never(
    tmp_path: Path, write_config: Callable[..., Path]
) -> None:
    """A server keeps what is settled, and not when."""
    for start in range(2):
        with NatsServer.start(store_dir=tmp_path / "js") as server:
            async with App("tests", config=write_config(server.url)) as app:
                place = Place(app)
                if start == 0:
                    await place.create("MARS")
                    await place.publish("MARS", 1)
                    await place.consumer("MARS", "used")
                    await place.settle("MARS", "used")
                    await place.consumer("MARS", "unused")
                look = await place.look()
    unused, used = reports.consumers(look, look)
    assert (used.deliveries, used.last_settled) == (1, None)
    assert (unused.deliveries, unused.last_settled) == (0, None)
