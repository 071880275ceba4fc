"""The process that follows event logs is killed at random moments: the stream holds each event once, in order.

With a duplicate window so short that it cannot help. `AVISO_BRIDGE_KILLS` and `AVISO_BRIDGE_SEED` make another run.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from pyspark.sql import SparkSession

from _chaos.bridge_kills import LATER_SECONDS, Growing, shorten_duplicate_window
from aviso_workers import App
from tests.commands import Command
from tests.spark.logs import ids_in, logs_in
from tests.spark.test_listeners import work
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

KILLS = int(os.environ.get("AVISO_BRIDGE_KILLS", "20"))
SEED = int(os.environ.get("AVISO_BRIDGE_SEED", "6"))


@pytest.mark.slow
async def test_killed_at_random_moments_it_stores_each_event_once_and_in_order(
    app: App,
    config: Path,
    start: Callable[..., Command],
    start_spark: Callable[..., SparkSession],
    tmp_path: Path,
) -> None:
    chance = random.Random(SEED)
    spark = await anyio.to_thread.run_sync(start_spark, tmp_path / "recorded", {})
    try:
        await anyio.to_thread.run_sync(work, spark, tmp_path)
    finally:
        await anyio.to_thread.run_sync(spark.stop)
    logs = Growing(tmp_path / "recorded", tmp_path / "logs", name="local", dice=chance)
    interrupted = 0
    async with app:
        await shorten_duplicate_window(app)
        for _ in range(KILLS):
            before = await stored(app)
            logs.grow(1 / (KILLS + 1))
            all_of_it = count(expected(tmp_path))
            worker = start("worker", "--agent", "spark-events", "--config", config)
            worker.until("worker.started")
            await until_stored(app, chance.randint(before, all_of_it))
            await anyio.sleep(chance.uniform(0, LATER_SECONDS))
            worker.end(signal.SIGKILL)
            interrupted += before < await stored(app) < all_of_it
        logs.grow(1)
        logs.end()
        wanted = expected(tmp_path)
        worker = start("worker", "--agent", "spark-events", "--config", config)
        await until_stored(app, count(wanted))
        assert worker.end(signal.SIGTERM) == 0
        found = defaultdict(list)
        async for each in app.replay("spark_job", from_id=1):
            found[each.identifier["application"]].append(each.headers["Nats-Msg-Id"])
    twice = [which for ids in found.values() for which, times in Counter(ids).items() if times > 1]
    assert twice == [], f"{len(twice)} events are stored more than once, with seed {SEED}"
    assert found == wanted
    print(f"{interrupted} of {KILLS} kills in the middle of work")
    assert interrupted >= KILLS / 4, f"only {interrupted} of {KILLS} kills came in the middle of work"


def expected(directory: Path) -> dict[str, list[str]]:
    return {name: ids_in(log) for name, log in logs_in(directory / "logs").items() if log.files}


def count(ids: dict[str, list[str]]) -> int:
    return sum(map(len, ids.values()))


async def until_stored(app: App, events: int) -> None:
    with anyio.fail_after(PATIENCE_SECONDS):
        while await stored(app) < events:  # noqa: ASYNC110
            await anyio.sleep(0.002)


async def stored(app: App) -> int:
    return (await app.session.backend.stream_info("SPARK")).messages
