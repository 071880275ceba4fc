"""Clocks that are an hour apart: on a server that of its workers, in memory that of operators. What is recorded and
what is said of it is by the server's clock.
"""

from __future__ import annotations

import time
from collections import Counter
from datetime import UTC, datetime, timedelta

import anyio
import pytest

from aviso_workers import App, Tick
from aviso_workers.clocks import LoopClock
from aviso_workers.ops import agent_inventory, agent_report, timer_control
from aviso_workers.state import consumer_records, declarations, failure_records, worker_records
from aviso_workers.state.worker_records import AppWorkers
from aviso_workers.testing import Harness, harness
from tests.contract.settings import app_config
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio
A_WHILE = timedelta(minutes=5)


@pytest.fixture(params=[-1, 1], ids=["behind", "ahead"])
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> datetime:
    """When virtual time begins; the clocks of workers on a server are as far from its own."""
    apart = timedelta(hours=request.param)
    nanoseconds = int(apart.total_seconds()) * 10**9
    monkeypatch.setattr(LoopClock, "time_ns", staticmethod(lambda: time.time_ns() + nanoseconds))
    return datetime.now(UTC) + apart


@pytest.fixture
def ticks() -> Counter[str]:
    """How often each timer has run."""
    return Counter()


@pytest.fixture
def app(kind: str, nats_url: str, ticks: Counter[str]) -> App:
    app = App("contract", config=app_config(kind, nats_url))

    @app.every("1s", singleton=False)
    async def paused() -> None:
        ticks["paused"] += 1

    @app.every("1s", singleton=False)
    async def other(tick: Tick) -> None:
        ticks["other"] += 1

    @app.every("1s", singleton=False)
    async def fails() -> None:
        ticks["fails"] += 1
        raise ValueError("no such field")

    return app


async def ticked(t: Harness, ticks: Counter[str], timer: str, times: int) -> None:
    """Wait until a timer has run so often more."""
    until = ticks[timer] + times
    with anyio.fail_after(PATIENCE_SECONDS):
        while ticks[timer] < until:
            await t.advance(0.5)


@pytest.mark.slow
async def test_a_pause_is_as_long_as_it_was_said(
    app: App, url: str | None, start: datetime, ticks: Counter[str]
) -> None:
    async with harness(app, server=url, start=start) as t:
        admin = t.app.session.admin
        await timer_control.pause(admin, "contract", "paused", seconds=1800)
        await ticked(t, ticks, "other", 2)
        ticks.clear()
        await ticked(t, ticks, "other", 3)
        assert "paused" not in ticks
        rows = await timer_control.rows(admin, "contract", app.timers, ticks=1)
        assert [row.timer for row in rows if row.paused] == ["paused"]
        assert ("contract", "paused") in (await agent_inventory.recorded(admin)).pauses
        await timer_control.pause(admin, "contract", "paused", seconds=2)
        await ticked(t, ticks, "paused", 1)


async def test_what_workers_record_of_themselves_has_the_servers_time(
    app: App, url: str | None, start: datetime
) -> None:
    async with harness(app, server=url, start=start) as t:
        admin, workers = t.app.session.admin, AppWorkers()
        with anyio.fail_after(PATIENCE_SECONDS):
            while workers == AppWorkers() or not await declarations.stored(admin):
                await t.advance(0.5)
                workers = await worker_records.of_app(admin, "contract")
        recorded = await agent_inventory.recorded(admin)
        declared = (await declarations.stored(admin))["contract"]
    (worker,) = workers.living
    said = {
        "started": worker.started,
        "said": worker.said,
        "declared": declared.time,
        "deploy": recorded.deploys["contract"][-1].time,
    }
    assert {name for name, each in said.items() if not each or abs(recorded.time - each) > A_WHILE} == set(), said


async def test_a_failure_has_the_servers_time_and_is_over_when_it_is(
    app: App, url: str | None, start: datetime, ticks: Counter[str]
) -> None:
    async with harness(app, server=url, start=start) as t:
        admin = t.app.session.admin
        with anyio.fail_after(PATIENCE_SECONDS):
            failed = "contract", "timers", "fails"
            while not (stored := failure_records.parsed(await consumer_records.entries(admin)).get(failed)):
                await t.advance(1)
        recorded = await agent_inventory.recorded(admin)
        assert max(abs(recorded.time - each) for each in (stored.since, stored.last)) < A_WHILE
        (row,) = agent_report.failing(recorded)
        assert (row.agent, row.is_trouble) == ("timer fails", True)
        assert "`aviso-workers timers run MODULE:APP fails`" in row.cure
