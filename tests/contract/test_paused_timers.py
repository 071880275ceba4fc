"""Timers that are paused, resumed and caught up, in the test harness: in virtual time and on a server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import anyio
import pytest

from aviso_workers import App, Tick
from aviso_workers.testing import harness
from tests.contract.settings import app_config
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("leader", [False, True])
async def test_a_paused_timer_runs_in_no_worker_until_it_is_resumed(kind: str, nats_url: str, leader: bool) -> None:
    app = App("contract", config=app_config(kind, nats_url))
    ticks: list[str] = []
    ticked = anyio.Event()

    @app.every("1s", singleton=leader)
    async def paused() -> None:
        ticks.append("paused")
        ticked.set()

    @app.every("1s", singleton=leader)
    async def other() -> None:
        ticks.append("other")

    server = nats_url if kind == "jetstream" else None
    async with harness(app, server=server, workers=2) as t:
        await t.pause(paused)
        await t.advance(2)  # a tick that has begun meanwhile
        ticks.clear()
        await t.advance(4)
        assert set(ticks) == {"other"}
        await t.crash()  # the worker in its place knows it as well
        ticks.clear()
        await t.advance(3)
        assert "paused" not in ticks
        ticked = anyio.Event()
        await t.resume("paused")
        with anyio.fail_after(PATIENCE_SECONDS):
            while not ticked.is_set():
                await t.advance(1)


@pytest.mark.parametrize("leader", [False, True])
async def test_ticks_from_before_the_first_worker_are_caught_up(kind: str, nats_url: str, leader: bool) -> None:
    app = App("contract", config=app_config(kind, nats_url))
    seen: list[Tick] = []

    @app.every("10m", singleton=leader)
    async def look(tick: Tick) -> None:
        seen.append(tick)

    async with harness(app, server=nats_url if kind == "jetstream" else None) as t:
        now = datetime.fromtimestamp(t.clock.time_ns() // 10**9, UTC)
        ran = await t.catch_up(look, now - timedelta(hours=2), now - timedelta(hours=1))
    assert [ticked.time for ticked in ran] == [tick.time for tick in seen]
    assert len(seen) in (6, 7)  # 7 where both ends are ticks
    assert {tick.token for tick in seen} == {None}


async def test_a_tick_of_a_pause_runs_when_that_ends() -> None:
    """And the next one, although it is due within the time after which a worker looks at a pause that goes on."""
    app = App("contract", config=app_config("in_memory", ""))
    ticks: list[datetime] = []

    @app.every("10s", singleton=False)
    async def count(tick: Tick) -> None:
        ticks.append(tick.time)

    async with harness(app, start=datetime(2026, 11, 26, 12, 0, 2, tzinfo=UTC)) as t:
        await t.pause(count, seconds=25)
        await t.advance(60)
    assert [tick.second for tick in ticks] == [20, 30, 40, 50, 0]
