"""Limits across the fleet, kept by worker processes that are killed, paused, and lose a server of three."""

from __future__ import annotations

import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import nats
import pytest

from _chaos.clusters import start_nodes, stop_nodes
from aviso_workers import App
from tests.contract.settings import app_config
from tests.stories.processes import Record, Worker, until, until_jetstream
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

IN_A_MINUTE = 600
"""The limit of the app `limited`."""
SPAN_SECONDS = 60.0
WITHIN = 0.05


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


@pytest.mark.slow
async def test_a_cluster_that_loses_the_leader_of_the_bucket_goes_on_and_is_not_faster(
    record: Record, run_worker: Callable[..., Worker], publish: Callable[..., Any], tmp_path: Path
) -> None:
    nodes = start_nodes(tmp_path / "cluster", 3)
    try:
        url = ",".join(node.url for node in nodes)
        async with await nats.connect([node.url for node in nodes]) as client:
            await until_jetstream(client)
        settings = {"notification_backend.jetstream.replicas": 3}
        await publish(range(2 * IN_A_MINUTE), url=url)
        for _ in range(4):
            run_worker(app="limited", url=url, settings=settings)
        await until(lambda: len(record.of("begun")) > 50, what=lambda: record.acts)
        async with App("reader", config=app_config("jetstream", url)) as app:
            info = await app.session.admin.stream_info("KV_limited_limits")
            assert len(info.cluster.followers) == 2
            leader = info.cluster.leader
        before = len(record.of("begun"))
        next(node for node in nodes if node.server.name == leader).stop(killed=True)
        await until(lambda: len(record.of("begun")) > before + 300, what=lambda: record.acts[-1])
    finally:
        stop_nodes(nodes)
    times = sorted(act.time for act in record.of("begun"))
    longest = max(later - earlier for earlier, later in pairwise(times))
    busiest = max(sum(begin <= time < begin + 10 for time in times) for begin in times)
    print(f"nothing began for {longest:.1f} s; at most {busiest} in ten seconds")
    assert longest < PATIENCE_SECONDS
    assert busiest <= IN_A_MINUTE / 60 * (10 + 3)
