"""A singleton's workers are paused, killed and stopped in the middle of its work: one handles, in order, and no two."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import nats
import pytest

from aviso_workers import App
from tests.contract.settings import app_config
from tests.stories.agents import ACK_WAIT_SECONDS
from tests.stories.processes import Proxy, Record, Server, Worker, cluster, until, until_jetstream
from tests.waits import LONG_SECONDS, PATIENCE_SECONDS, PROMPT_SECONDS

pytestmark = pytest.mark.anyio

FAILOVER_SECONDS = ACK_WAIT_SECONDS + PROMPT_SECONDS
PATIENT_SECONDS = 4.0
"""An `ack_wait` that is longer than a busy machine needs until a worker says that it goes on."""
PACE_SECONDS = 0.1
ACKED = 'aviso_worker_notifications_total{agent="write",app="singletons",base="mars",outcome="acked"} 1.0'


@pytest.fixture
async def workers(run_worker: Callable[..., Worker]) -> dict[int, Worker]:
    return await three_workers(run_worker)


async def three_workers(run_worker: Callable[..., Worker], **over: Any) -> dict[int, Worker]:
    """Workers by process id."""
    workers = [run_worker(app="singletons", **over) for _ in range(3)]
    for worker in workers:
        await worker.ready()
    return {worker.pid: worker for worker in workers}


async def written(record: Record, count: int) -> list[int]:
    """The numbers that were written, in order, once there are so many."""
    await until(lambda: len(record.of("written")) >= count, what=lambda: record.acts)
    return [act.number for act in record.of("written")]


async def published(server: Server) -> list[int]:
    """The numbers of what the handlers returned, in order."""
    async with App("reader", config=app_config("jetstream", server.url)) as app:
        return [int(notification.identifier["a"]) async for notification in app.replay("plain")]


async def busy(record: Record, workers: dict[int, Worker], number: int) -> Worker:
    """The worker that handles this one, once it has begun."""
    await until(lambda: record.of("begun", number), what=lambda: record.acts)
    return workers[record.of("begun", number)[-1].pid]


@pytest.mark.slow
async def test_a_worker_that_is_paused_is_followed_in_order_and_completes_nothing_when_it_wakes_up(
    server: Server, record: Record, run_worker: Callable[..., Worker], publish: Callable[..., Any]
) -> None:
    workers = await three_workers(run_worker, ack_wait_seconds=PATIENT_SECONDS)
    await publish(range(1), seconds=1.5 * PATIENT_SECONDS)
    await publish(range(1, 5), seconds=PACE_SECONDS)
    await publish([5], seconds=PATIENT_SECONDS / 2)  # in which it is paused
    await publish(range(6, 20), seconds=PACE_SECONDS)
    paused = await busy(record, workers, 5)
    assert {act.pid for act in record.acts} == {paused.pid}, "who is busy for long stays the one"

    paused.send(signal.SIGSTOP)
    stopped = time.time()
    await written(record, 15)
    taken_over = min(act.time for act in record.of("begun") if act.pid != paused.pid)
    assert taken_over - stopped < PATIENT_SECONDS + PROMPT_SECONDS
    paused.send(signal.SIGCONT)
    await until(lambda: paused.logged("notification.retried"), what=lambda: paused.log)
    await publish(range(20, 25), seconds=PACE_SECONDS)

    assert await written(record, 25) == list(range(25))
    assert await published(server) == list(range(25))
    assert len({act.pid for act in record.of("begun") if act.pid != paused.pid}) == 1
    assert [entry["reason"] for entry in paused.logged("notification.retried")] == ["taken_over"]
    assert [number for number, count in record.numbers("begun").items() if count > 1] == [5]


@pytest.mark.slow
async def test_a_worker_that_is_paused_while_it_waits_begins_nothing_that_came_for_it_meanwhile(
    record: Record, workers: dict[int, Worker], publish: Callable[..., Any]
) -> None:
    await publish([0])
    await written(record, 1)
    paused = await busy(record, workers, 0)
    await until(lambda: ACKED in paused.get("/metrics"), what=lambda: paused.get("/metrics"))
    paused.send(signal.SIGSTOP)
    stopped = time.time()
    await publish([1, 2])
    await written(record, 3)
    paused.send(signal.SIGCONT)
    await publish([3])
    assert await written(record, 4) == list(range(4))
    begun = [act for act in record.of("begun") if act.time > stopped]
    assert [act.number for act in begun] == [1, 2, 3]
    assert paused.pid not in {act.pid for act in begun}


@pytest.mark.slow
async def test_a_worker_that_is_killed_is_followed_in_order(
    server: Server, record: Record, workers: dict[int, Worker], publish: Callable[..., Any]
) -> None:
    await publish(range(20), seconds=PACE_SECONDS)
    for number in (3, 9):
        killed = await busy(record, workers, number)
        killed.kill()
        died = time.time()
        await written(record, number + 2)
        taken_over = min(act.time for act in record.of("begun") if act.time > died)
        assert taken_over - died < FAILOVER_SECONDS
    assert await written(record, 20) == list(range(20))
    assert await published(server) == list(range(20))
    assert len({act.pid for act in record.of("begun")}) == 3


async def test_a_worker_that_is_stopped_hands_over_at_once(
    server: Server, record: Record, run_worker: Callable[..., Worker], publish: Callable[..., Any]
) -> None:
    workers = await three_workers(run_worker, ack_wait_seconds=LONG_SECONDS)
    await publish(range(10), seconds=PACE_SECONDS)
    leaving = await busy(record, workers, 3)
    leaving.terminate()
    assert await leaving.ended() == 0
    assert await written(record, 10) == list(range(10))
    times = [act.time for act in record.of("begun")]
    assert max(later - earlier for earlier, later in pairwise(times)) < PROMPT_SECONDS
    assert record.numbers("begun").most_common(1)[0][1] == 1


@pytest.mark.slow
async def test_a_worker_that_is_cut_off_is_followed_in_order_and_ends_what_it_does(
    server: Server, record: Record, run_worker: Callable[..., Worker], publish: Callable[..., Any]
) -> None:
    with Proxy(server.port) as wire:
        await publish(range(2))
        cut_off = run_worker(app="singletons", url=wire.url, ack_wait_seconds=PATIENT_SECONDS)
        await written(record, 2)
        follower = run_worker(app="singletons", ack_wait_seconds=PATIENT_SECONDS)
        await follower.ready()
        await publish([2], seconds=2 * PATIENT_SECONDS)
        await publish(range(3, 6))
        assert (await busy(record, {cut_off.pid: cut_off, follower.pid: follower}, 2)) is cut_off
        wire.fall_silent()
        assert await written(record, 6) == list(range(6))
        wire.speak()
        await until(lambda: cut_off.logged("notification.retried"), what=lambda: cut_off.log)

    assert await published(server) == list(range(6))
    assert [act.pid for act in record.of("begun", 2)] == [cut_off.pid, follower.pid]
    assert record.of("refused") == []
    assert [entry["reason"] for entry in cut_off.logged("notification.retried")] == ["taken_over"]


@pytest.mark.slow
async def test_a_server_that_is_killed_finds_the_order_kept(
    server: Server, record: Record, workers: dict[int, Worker], publish: Callable[..., Any]
) -> None:
    """It has forgotten who was pinned, and may have forgotten the last acknowledgements."""
    await publish(range(10), seconds=PACE_SECONDS)
    await busy(record, workers, 3)
    server.kill()
    server.start()
    assert await written(record, 10) == list(range(10))


@pytest.mark.slow
async def test_a_consumer_that_changes_its_leader_again_and_again_keeps_the_order(
    tmp_path: Path, record: Record, run_worker: Callable[..., Worker], publish: Callable[..., Any]
) -> None:
    """A new leader knows of no pin, and hands out what was handed out before."""
    with cluster(tmp_path / "nodes") as nodes:
        url = ",".join(node.url for node in nodes)
        async with await nats.connect([node.url for node in nodes]) as client:
            await until_jetstream(client)
            workers = [
                run_worker(app="singletons", url=url, settings={"notification_backend.jetstream.replicas": 3})
                for _ in range(2)
            ]
            for worker in workers:
                await worker.ready()
            await publish(range(40), url=url, seconds=PACE_SECONDS)
            for number in (5, 15, 25):
                await until(partial(record.of, "begun", number), what=lambda: record.acts)
                await client.request(
                    "$JS.API.CONSUMER.LEADER.STEPDOWN.MARS.singletons__write", timeout=PATIENCE_SECONDS
                )
            assert await written(record, 40) == list(range(40))
