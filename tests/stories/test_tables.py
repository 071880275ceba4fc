"""Processes that add to the same key, as fast as they can."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.stories.counting import app_of
from tests.stories.processes import Server
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

PROCESSES = 4
TIMES = 500


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


async def test_two_thousand_updates_from_four_processes_add_up(server: Server) -> None:
    count_in_processes(server.url)
    app = app_of(server.url)
    sums, counts = app.table("sums", int, default=0), app.counter("counts")
    async with app:
        assert await sums.get("all") == PROCESSES * TIMES
        assert await counts.get("all") == PROCESSES * TIMES
