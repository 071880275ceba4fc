"""Processes that add to the same key, as fast as they can, and workers that are killed while they do."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import anyio
import pytest

from aviso_workers import App
from tests.contract.settings import app_config
from tests.stories.conftest import Publish, RunWorker
from tests.stories.counting import app_of
from tests.stories.processes import Record, Server, Worker, until
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

PROCESSES = 4
TIMES = 500
KILLS = 3
EACH = 200


def count_in_processes(url: str) -> None:
    """All of them begin at the same time."""
    with ExitStack() as running:
        processes = [
            running.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.stories.counting", url, str(TIMES)],
                    cwd=Path(__file__).parents[2],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(PROCESSES)
        ]
        for process in processes:
            running.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        assert [process.wait(timeout=PATIENCE_SECONDS) for process in processes] == [0] * PROCESSES


@pytest.mark.slow
async def test_two_thousand_updates_from_four_processes_add_up(server: Server) -> None:
    count_in_processes(server.url)
    app = app_of(server.url)
    sums, counts = app.table("sums", int, default=0), app.counter("counts")
    async with app:
        assert await sums.get("all") == PROCESSES * TIMES
        assert await counts.get("all") == PROCESSES * TIMES


@pytest.mark.slow
async def test_workers_that_are_killed_while_they_count_count_each_notification_once(
    server: Server, run_worker: RunWorker, publish: Publish, record: Record
) -> None:
    numbers = range(KILLS * EACH)
    app = App("counting", config=app_config("jetstream", server.url))
    sums = app.table("sums", int, default=0)

    async def is_settled() -> bool:
        info = await app.session.admin.consumer_info("MARS", "counting__count_once")
        return info.num_pending + info.num_ack_pending == 0

    def has_counted(worker: Worker) -> bool:
        return len([act for act in record.of("counted") if act.pid == worker.pid]) >= EACH // 20

    survivor = run_worker(app="counting")
    for kill in range(KILLS):
        victim = run_worker(app="counting")
        await victim.ready()
        await publish(range(kill * EACH, (kill + 1) * EACH), seconds=0.02, fails=kill % 2 == 0)
        await until(partial(has_counted, victim), what=record.path.read_text)
        victim.kill()
    async with app:
        with anyio.fail_after(PATIENCE_SECONDS):
            while not await is_settled():  # noqa: ASYNC110
                await anyio.sleep(0.05)
        again = sum(record.numbers("counted").values()) - len(numbers)
        assert again > 0, "nothing was handled twice: the story shows nothing"
        assert await sums.get("all") == len(numbers), survivor.log
