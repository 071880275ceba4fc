"""Timers of which one worker of the fleet runs all, while its leaders die, pause and leave."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from tests.stories.processes import Record, Server, Worker, until

pytestmark = pytest.mark.anyio


@pytest.mark.slow
async def test_no_tick_is_run_twice_whatever_becomes_of_the_leader(
    server: Server, record: Record, run_worker: Callable[..., Worker]
) -> None:
    workers = {worker.pid: worker for worker in (run_worker(app="ticking") for _ in range(4))}

    async def next_leader(*others: int) -> Worker:
        """The worker that ticks from now on, which is none of the others."""
        began = time.time()

        def ticking() -> list[int]:
            return [act.pid for act in record.of("tick") if act.time > began and act.pid not in others]

        await until(ticking, what=lambda: record.acts)
        return workers[ticking()[0]]

    killed = await next_leader()
    killed.kill()
    paused = await next_leader(killed.pid)
    paused.send(signal.SIGSTOP)
    leaving = await next_leader(killed.pid, paused.pid)
    paused.send(signal.SIGCONT)
    leaving.terminate()
    assert await leaving.ended() == 0
    last = await next_leader(killed.pid, leaving.pid)
    await until(lambda: len(record.of("tick")) > 10, what=lambda: record.acts)

    assert [tick for tick, count in record.numbers("tick").items() if count > 1] == []
    assert last.pid not in (killed.pid, leaving.pid)
    tokens = [entry["token"] for worker in workers.values() for entry in worker.logged("leader.began")]
    assert len(tokens) == len(set(tokens)) >= 4, tokens
    assert [entry["token"] for entry in paused.logged("leader.ceased")] != [], paused.log
