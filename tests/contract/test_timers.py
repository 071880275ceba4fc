"""Timers of a worker, on either backend, in real time."""

from __future__ import annotations

import anyio
import pytest

from aviso_workers import App, Tick
from tests.contract.settings import app_config
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


@pytest.mark.slow
@pytest.mark.parametrize("leader", [False, True])
async def test_a_worker_runs_its_timers(kind: str, nats_url: str, leader: bool) -> None:
    app, stop = App("contract", config=app_config(kind, nats_url)), anyio.Event()
    ticks: list[Tick] = []

    @app.every("1s", singleton=leader)
    async def look(tick: Tick) -> None:
        ticks.append(tick)
        if len(ticks) == 3:
            stop.set()

    with anyio.fail_after(PATIENCE_SECONDS):
        async with app:
            await app._work(stop)
    first, second, third = (tick.time.timestamp() for tick in ticks)
    assert second - first in range(1, 30), "on a machine that is busy, ticks are left out"
    assert third - second in range(1, 30)
    assert [tick.token is not None for tick in ticks] == [leader] * 3


async def test_a_leader_that_leaves_is_followed_and_no_tick_is_missed(kind: str, nats_url: str) -> None:
    app = App("contract", config=app_config(kind, nats_url))
    ticks: list[Tick] = []
    stops = [anyio.Event(), anyio.Event()]

    @app.every("1s", singleton=True)
    async def look(tick: Tick) -> None:
        ticks.append(tick)
        if len(ticks) == 2:
            stops[0].set()
        if len(ticks) == 4:
            stops[1].set()

    with anyio.fail_after(PATIENCE_SECONDS):
        async with app:
            for stop in stops:
                await app._work(stop)
    times = [tick.time.timestamp() for tick in ticks]
    assert times == sorted(set(times))
    assert ticks[0].token == ticks[1].token
    assert ticks[2].token == ticks[3].token
    assert (ticks[1].token or 0) < (ticks[2].token or 0)
