"""Consumers that are broken each in one way, beside one of which the same holds."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import create_task_group
from msgspec import structs

from aviso_workers import App, Batch, Notification
from aviso_workers.aviso.schema import StoragePolicy
from aviso_workers.backends import Administration
from aviso_workers.config import Config
from aviso_workers.declare.batches import Batching
from aviso_workers.errors import RefusedError
from aviso_workers.jetstream.info import AccountInfo, ConsumerConfig, Limits, StreamConfig, Use
from aviso_workers.ops.doctor import State
from aviso_workers.ops.doctor.facts import Facts
from aviso_workers.ops.doctor.monitoring_port import Advisory
from tests.ops.doctor.conftest import (
    SECOND,
    Seen,
    add_consumer,
    add_stream,
    between_samples,
    changed,
    gathered,
    judged,
    publish,
    pull,
    served,
    write,
)

OURS = {"aviso-workers-start": "all"}
app = App("field")


@app.agent("mars", concurrency=16)
async def index(notification: Notification[Any]) -> None: ...


@app.agent("mars", batch=Batching(size=500, within=1))
async def load(batch: Batch[Any]) -> None: ...


async def break_consumers(server: Administration) -> None:
    await add_stream(server, "MARS", subjects=["mars.>"])
    await publish(server, "mars", 3)
    await add_consumer(server, "MARS", "steps", backoff=[SECOND, 2 * SECOND], max_deliver=3)
    await add_consumer(server, "MARS", "cut_short", backoff=[SECOND, 2 * SECOND], max_deliver=2)
    await add_consumer(server, "MARS", "field__index", metadata=OURS, max_ack_pending=10, max_deliver=26)
    await add_consumer(server, "MARS", "field__load", metadata=OURS, max_ack_pending=500, max_deliver=26)
    await add_consumer(server, "MARS", "plain")
    filters = [f"mars.{i}" for i in range(11)]
    await add_consumer(server, "MARS", "narrow", filter_subjects=filters[:10])
    await add_consumer(server, "MARS", "scattered", filter_subjects=filters)
    kept = [f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.MARS.{name}" for name in ("steps",)]
    await add_stream(server, "kept", subjects=kept)
    await add_consumer(server, "MARS", "flooding", deliver_subject="to.nobody")
    push = {"deliver_subject": "to.us", "flow_control": True, "idle_heartbeat": 5 * SECOND}
    await add_consumer(server, "MARS", "pushing", **push)
    await add_consumer(server, "MARS", "forgotten__pause", pause_until="2200-01-01T00:00:00Z")
    await add_consumer(server, "MARS", "paused", pause_until=in_an_hour())
    pinned = {"priority_groups": ["g"], "priority_policy": "pinned_client"}
    await add_consumer(server, "MARS", "unpinned", **pinned)
    await add_consumer(server, "MARS", "pinned", **pinned)
    await add_stream(server, "CROWDED")
    async with create_task_group() as many:
        for i in range(801):
            many.start_soon(add_ephemeral, server, "CROWDED", f"c{i}")


def in_an_hour() -> str:
    return (datetime.now(UTC) + timedelta(hours=1)).isoformat()


async def add_ephemeral(server: Administration, stream: str, name: str) -> None:
    config = {"name": name, "mem_storage": True, "inactive_threshold": 600 * SECOND}
    await server.api(f"CONSUMER.CREATE.{stream}.{name}", {"stream_name": stream, "config": config}, timeout_seconds=60)


async def ask(server: Administration) -> None:
    """Between the samples."""
    await server.api("CONSUMER.INFO.MARS.plain")


async def gather_broken(loaded: Config, monitor: str) -> Facts:
    async with App("breaking", config=loaded) as breaking:
        server = breaking.session.admin.administration()
        await break_consumers(server)
        await pull(server, "MARS", "pinned", 3, group="g")
        async with server.listen("to.us"), between_samples(server, lambda: ask(server)):
            return await gathered(loaded, monitors=(monitor,), agents=tuple(app.agents), app=app.name, seconds=1.0)


@pytest.fixture(scope="module")
def broken(directory: Path) -> Iterator[Seen]:
    with served(directory) as (server, monitor):
        loaded = write(directory / "config.yaml", server.url)
        yield judged(anyio.run(gather_broken, loaded, monitor))


@pytest.mark.slow
def test_a_consumer_that_tries_again_at_once(broken: Seen) -> None:
    found = broken.found("JS024")
    assert found["MARS > plain"] == "no backoff: unacknowledged messages are delivered again after 30 s"
    assert not {"MARS > steps", "MARS > field__index"} & found.keys()


def test_a_consumer_that_never_gives_up(broken: Seen) -> None:
    found = broken.found("JS025")
    assert found["MARS > plain"] == "max_deliver is unlimited"
    assert "MARS > steps" not in found


def test_what_is_given_up_and_not_kept(broken: Seen) -> None:
    assert broken.found("JS026") == {
        "MARS > cut_short": "max_deliver 2, and no stream stores advisories of messages beyond it",
    }


def test_a_backoff_with_steps_too_many(broken: Seen) -> None:
    assert broken.found("JS027") == {"MARS > cut_short": "2 steps of backoff, and max_deliver 2"}


def test_a_push_consumer_that_floods(broken: Seen) -> None:
    assert broken.found("JS028") == {"MARS > flooding": "pushes without flow_control and idle_heartbeat"}


def test_a_push_consumer_that_nobody_hears(broken: Seen) -> None:
    assert broken.found("JS029") == {"MARS > flooding": "no client subscribes to to.nobody"}


def test_an_agent_that_may_hold_less_than_it_handles(broken: Seen) -> None:
    assert broken.found("JS032") == {"MARS > field__index": "max_ack_pending 10, and one worker handles 16 at a time"}


def test_an_agent_whose_consumer_is_not_as_its_code_says(broken: Seen) -> None:
    assert broken.found("JS064")["MARS > field__index"] == (
        "ack wait 30 s, the code says 20 s; max_deliver 26, which agents do not have; "
        "filters none, the code says mars.>"
    )


@pytest.mark.covers("001-23")
def test_a_consumer_of_many_filters(broken: Seen) -> None:
    assert broken.found("JS033") == {"MARS > scattered": "11 filters"}


def test_a_stream_of_many_consumers(broken: Seen) -> None:
    assert broken.found("JS034") == {"CROWDED": "801 consumers"}
    assert broken.state("JS034") is State.WARN


@pytest.mark.covers("001-32")
def test_a_stream_of_far_too_many_consumers(broken: Seen) -> None:
    """By hand: a hundred thousand take minutes."""
    crowded = broken.facts.streams["CROWDED"]
    many = structs.replace(crowded, consumers=100_001)
    after = structs.replace(broken.facts.after, streams={"CROWDED": many})
    assert judged(structs.replace(broken.facts, after=after)).state("JS034") is State.FAIL


def test_a_consumer_that_nobody_has_used_for_a_week(broken: Seen) -> None:
    """Real consumers; only the time is moved."""
    assert broken.found("JS035") == {}
    later = judged(changed(broken.facts, now=broken.facts.now + timedelta(days=8)))
    found = later.found("JS035")
    assert found["MARS > plain"].startswith("no client reads from the consumer, and no message was delivered since")
    assert not {"MARS > pinned", "MARS > pushing"} & found.keys()  # in use


def test_an_agent_whose_stream_keeps_the_newest_of_a_subject_only(broken: Seen) -> None:
    """By hand, of real consumers: the stream, and what the configuration says of it."""
    assert broken.state("JS063") is State.PASS
    stream = broken.facts.streams["MARS"]
    one_per_subject = structs.replace(stream, config=StreamConfig({**stream.config, "max_msgs_per_subject": 1}))
    facts = structs.replace(broken.facts, after=structs.replace(broken.facts.after, streams={"MARS": one_per_subject}))

    found = judged(facts).found("JS063")

    assert found == {"mars > field__index": "max_msgs_per_subject 1", "mars > field__load": "max_msgs_per_subject 1"}
    mars = facts.config.notification_schema["mars"]
    enough = structs.replace(mars, storage_policy=StoragePolicy(allow_duplicates=False))
    decided = structs.replace(facts, config=structs.replace(facts.config, notification_schema={"mars": enough}))
    assert judged(decided).state("JS063") is State.PASS


def test_a_pause_that_was_forgotten(broken: Seen) -> None:
    assert broken.found("JS036").keys() == {"MARS > forgotten__pause"}
    assert broken.findings("JS036")["MARS > forgotten__pause"].cure.startswith(
        "`aviso-workers agents resume forgotten/pause`"
    )


def test_a_pinned_consumer_without_a_client(broken: Seen) -> None:
    assert broken.found("JS037") == {"MARS > unpinned": "3 pending, and no client pinned in g"}


def test_a_client_that_is_pinned_again_and_again(broken: Seen) -> None:
    """By hand: a server takes longer than the test to pin anew so often."""
    pinned = Advisory(kind="ADVISORY.CONSUMER.PINNED.MARS.pinned", stream="MARS", consumer="pinned")
    assert judged(structs.replace(broken.facts, advisories=(pinned,) * 2)).found("JS037").keys() == {"MARS > unpinned"}
    assert "MARS > pinned" in judged(structs.replace(broken.facts, advisories=(pinned,) * 3)).found("JS037")


def test_who_asks_for_consumers_all_the_time(broken: Seen) -> None:
    asked = next(each for each in broken.facts.advisories if ".CONSUMER.INFO." in each.subject)
    often, seldom = (
        structs.replace(broken.facts, elapsed_seconds=2.0, advisories=(asked,) * count) for count in (200, 20)
    )
    assert judged(often).found("JS051") == {"$JS.API.CONSUMER.INFO": "100 calls a second"}
    assert judged(seldom).state("JS051") is State.PASS


@pytest.mark.anyio
async def test_overlapping_consumers_of_a_work_queue_are_refused_by_the_server(tmp_path: Path) -> None:
    """Which is why no check looks for them."""
    with served(tmp_path) as (server, _):
        async with App("breaking", config=write(tmp_path / "config.yaml", server.url)) as breaking:
            queue = breaking.session.admin.administration()
            await add_stream(queue, "QUEUE", retention="workqueue")
            await add_consumer(queue, "QUEUE", "one")
            with pytest.raises(RefusedError, match="not unique on workqueue") as refused:
                await add_consumer(queue, "QUEUE", "other", filter_subject="QUEUE.a")
    assert refused.value.code == 10100


def test_a_reader_that_a_lost_connection_left_ends_by_itself(broken: Seen) -> None:
    """By hand: the settings of the consumers with which buckets are read."""
    reader = next(iter(broken.facts.consumers.values()))
    ephemeral = ConsumerConfig({"name": "reader", "inactive_threshold": 60 * SECOND})
    assert structs.replace(reader, config=ephemeral).ends_by_itself
    assert not structs.replace(reader, config=ConsumerConfig({**ephemeral, "durable_name": "reader"})).ends_by_itself
    assert not structs.replace(reader, config=ConsumerConfig({"name": "reader"})).ends_by_itself


@pytest.mark.parametrize(("own", "account", "most"), [(-1, 5, 5), (3, 5, 3), (7, -1, 7), (-1, -1, 0)])
def test_the_limit_of_consumers_is_the_lower_one(own: int, account: int, most: int) -> None:
    limits = Limits(max_consumers=account)
    stream = StreamConfig({"name": "MARS", "max_consumers": own, "num_replicas": 3})
    assert AccountInfo(limits=limits).max_consumers(stream) == most
    assert AccountInfo(tiers={"R3": Use(limits=limits), "R1": Use()}).max_consumers(stream) == most
