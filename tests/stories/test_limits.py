"""Limits across the fleet, kept by worker processes that are killed, paused, and lose a server of three."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import nats
import pytest

from _chaos.clusters import start_nodes, stop_nodes
from aviso_workers import App
from aviso_workers.state.lease_records import LEASE_SECONDS
from tests.contract.settings import app_config
from tests.stories.processes import Record, Worker, until, until_jetstream
from tests.waits import PROMPT_SECONDS

pytestmark = pytest.mark.anyio

IN_A_MINUTE = 600
"""The limit of the app `limited`."""
SPAN_SECONDS = 60.0
WITHIN = 0.05
REPLICATED = {"notification_backend.jetstream.replicas": 3}


async def begun_in_a_minute(record: Record) -> int:
    """How many calls begin in a minute, from a second after the first one."""
    await until(lambda: record.of("begun"), what=lambda: record.acts)
    first = record.of("begun")[0].time + 1.0
    await until(lambda: record.of("begun")[-1].time >= first + SPAN_SECONDS, what=lambda: record.acts[-1])
    return sum(first <= act.time < first + SPAN_SECONDS for act in record.of("begun"))


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["undisturbed", "one is killed"])
async def test_four_workers_under_backlog_keep_the_rate(
    record: Record, run_worker: Callable[..., Worker], publish: Callable[..., Any], killed: bool
) -> None:
    await publish(range(2 * IN_A_MINUTE))
    workers = [run_worker(app="limited") for _ in range(4)]
    for worker in workers:
        await worker.ready()
    counted: list[int] = []
    async with anyio.create_task_group() as tasks:

        async def count() -> None:
            counted.append(await begun_in_a_minute(record))

        tasks.start_soon(count)
        if killed:
            await until(lambda: len(record.of("begun")) > IN_A_MINUTE / 2, what=lambda: len(record.acts))
            workers[0].kill()
    print(f"{counted[0]} of {IN_A_MINUTE}, by {len({act.pid for act in record.of('begun')})} workers")
    assert counted[0] == pytest.approx(IN_A_MINUTE, rel=WITHIN)


@pytest.mark.slow
async def test_a_worker_that_is_paused_begins_nothing_late(
    record: Record, run_worker: Callable[..., Worker], publish: Callable[..., Any]
) -> None:
    """What it had leased is lost, and no burst follows when it goes on."""
    await publish(range(IN_A_MINUTE))
    workers = [run_worker(app="limited") for _ in range(2)]
    await until(lambda: len({act.pid for act in record.of("begun")}) == 2, what=lambda: record.acts)
    workers[0].send(signal.SIGSTOP)
    await anyio.sleep(5)
    workers[0].send(signal.SIGCONT)
    before = len(record.acts)
    await until(lambda: len(record.acts) > before + 200, what=lambda: len(record.acts))
    times = sorted(act.time for act in record.of("begun"))
    busiest = max(sum(begin <= time < begin + 5 for time in times) for begin in times)
    assert busiest <= IN_A_MINUTE / 60 * (5 + 3), "what may gather in three seconds, at most"


@asynccontextmanager
async def a_cluster_loses_the_leader_of(bucket: str, directory: Path) -> AsyncIterator[tuple[str, Callable[[], Any]]]:
    """The address of three servers, and what ends the one that leads the bucket, which all have."""
    nodes = start_nodes(directory, 3)
    url = ",".join(node.url for node in nodes)

    async def lose_it() -> None:
        async with App("reader", config=app_config("jetstream", url)) as app:
            cluster = (await app.session.admin.stream_info(f"KV_{bucket}")).cluster
        assert len(cluster.followers) == 2
        next(node for node in nodes if node.server.name == cluster.leader).stop(killed=True)

    try:
        async with await nats.connect([node.url for node in nodes]) as client:
            await until_jetstream(client)
        yield url, lose_it
    finally:
        stop_nodes(nodes)


@pytest.mark.slow
async def test_a_cluster_that_loses_the_leader_of_the_bucket_goes_on_and_is_not_faster(
    record: Record, run_worker: Callable[..., Worker], publish: Callable[..., Any], tmp_path: Path
) -> None:
    async with a_cluster_loses_the_leader_of("limited__limits", tmp_path / "cluster") as (url, lose_it):
        await publish(range(2 * IN_A_MINUTE), url=url)
        for _ in range(4):
            run_worker(app="limited", url=url, settings=REPLICATED)
        await until(lambda: len(record.of("begun")) > 50, what=lambda: record.acts)
        await lose_it()
        before = len(record.of("begun"))
        await until(lambda: len(record.of("begun")) > before + 300, what=lambda: record.acts[-1])
    times = sorted(act.time for act in record.of("begun"))
    longest = max(later - earlier for earlier, later in pairwise(times))
    busiest = max(sum(begin <= time < begin + 10 for time in times) for begin in times)
    print(f"nothing began for {longest:.1f} s; at most {busiest} in ten seconds")
    assert longest < PROMPT_SECONDS
    assert busiest <= IN_A_MINUTE / 60 * (10 + 3)


@pytest.mark.slow
async def test_a_cluster_that_loses_the_leader_of_the_leases_has_one_call_at_a_time(
    record: Record, run_worker: Callable[..., Worker], publish: Callable[..., Any], tmp_path: Path
) -> None:
    async with a_cluster_loses_the_leader_of("exclusive__leases", tmp_path / "cluster") as (url, lose_it):
        await publish(range(150), url=url, seconds=0.1)
        for _ in range(3):
            run_worker(app="exclusive", url=url, settings=REPLICATED)
        await until_done(record, 20)
        await lose_it()
        await until_done(record, 150)
    times = sorted(act.time for act in record.of("begun"))
    print(f"nothing began for {max(later - earlier for earlier, later in pairwise(times)):.1f} s")
    assert overlaps(record) == []


def overlaps(record: Record) -> list[tuple[int, int]]:
    """The pairs of calls that ran at once, of those that came to their end."""
    ends = {(act.pid, act.number): act.time for act in record.of("done")}
    began = ((act.time, (act.pid, act.number)) for act in record.of("begun"))
    spans = sorted((begin, ends[call], call[1]) for begin, call in began if call in ends)
    return [(one[2], other[2]) for one, other in pairwise(spans) if other[0] < one[1]]


async def until_done(record: Record, count: int) -> None:
    await until(lambda: len(record.numbers("done")) >= count, what=lambda: record.acts)


@pytest.mark.slow
async def test_one_call_at_a_time_goes_on_after_workers_are_killed_and_stopped(
    record: Record, run_worker: Callable[..., Worker], publish: Callable[..., Any]
) -> None:
    workers = {worker.pid: worker for worker in (run_worker(app="exclusive") for _ in range(3))}
    for worker in workers.values():
        await worker.ready()
    await publish(range(60), seconds=0.1)
    await until_done(record, 5)
    workers.pop(record.of("begun")[-1].pid).kill()
    killed = time.time()
    await until(lambda: any(act.time > killed + 0.5 for act in record.of("begun")), what=lambda: record.acts)
    followed = min(act.time for act in record.of("begun") if act.time > killed + 0.5)
    leaving = workers[record.of("begun")[-1].pid]
    leaving.terminate()
    assert await leaving.ended() == 0
    await until_done(record, 60)
    print(f"followed {followed - killed:.1f} s after a worker was killed")
    assert followed - killed < LEASE_SECONDS + PROMPT_SECONDS
    assert overlaps(record) == []


@pytest.mark.slow
async def test_a_worker_that_is_paused_during_a_call_is_followed_and_does_not_complete_it(
    record: Record, run_worker: Callable[..., Worker], publish: Callable[..., Any]
) -> None:
    workers = {worker.pid: worker for worker in (run_worker(app="exclusive") for _ in range(2))}
    for worker in workers.values():
        await worker.ready()
    await publish([0], seconds=1.5 * LEASE_SECONDS)
    await until(lambda: record.of("begun"), what=lambda: record.acts)
    paused = workers[record.of("begun")[0].pid]
    paused.send(signal.SIGSTOP)
    stopped = time.time()
    await publish([1, 2])
    await until(lambda: len({act.pid for act in record.of("begun")}) == 2, what=lambda: record.acts)
    paused.send(signal.SIGCONT)
    await until(lambda: paused.logged("notification.retried"), what=lambda: paused.log)
    await until_done(record, 3)
    assert min(act.time for act in record.of("begun") if act.pid != paused.pid) - stopped > LEASE_SECONDS / 2
    assert {act.pid for act in record.of("done")} == workers.keys() - {paused.pid}
    assert sorted(act.number for act in record.of("done")) == [0, 1, 2]
