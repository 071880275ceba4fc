"""Runs of timers at once, which operators ask for and one worker takes, in the test harness and on a server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import anyio
import msgspec
import pytest
from msgspec import structs

from aviso_workers import App, Tick
from aviso_workers.errors import DeclarationError
from aviso_workers.features.timers import Control
from aviso_workers.ops import timer_control
from aviso_workers.state import orders, timer_requests
from aviso_workers.state.timer_requests import Run
from aviso_workers.testing import Harness, harness
from tests.contract.settings import app_config
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


async def outcome(t: Harness, timer: str) -> Run:
    """What is recorded of the last run that was asked for, once it has ended."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while True:
            run = await timer_control.asked(t.app.session.admin, "contract", timer)
            if run is not None and run.seconds is not None:
                return run
            await t.advance(1)


@pytest.mark.slow
@pytest.mark.parametrize("leader", [False, True])
async def test_one_worker_runs_what_was_asked_for(kind: str, nats_url: str, leader: bool) -> None:
    app = App("contract", config=app_config(kind, nats_url))
    seen: list[Tick] = []

    @app.every("1000d", singleton=leader)
    async def report(tick: Tick) -> None:
        seen.append(tick)

    @app.every("1000d", singleton=False)
    async def other() -> None:
        raise AssertionError("nobody has asked for it")

    server = nats_url if kind == "jetstream" else None
    async with harness(app, server=server, workers=3, start=datetime(2026, 11, 26, 12, 5, tzinfo=UTC)) as t:
        asked = await timer_control.ask(t.app.session.admin, "contract", "report", by="anna")
        run = await outcome(t, "report")
        await t.advance(6)  # every worker has looked again
    assert (run.by, run.asked, run.error) == ("anna", asked.asked, "")
    assert run.worker
    assert [tick.time for tick in seen] == [asked.asked]
    assert (seen[0].token is None) is not leader, "the leader runs what is the leader's"


@pytest.mark.slow
async def test_a_run_that_fails_says_why_also_while_the_timer_is_paused(kind: str, nats_url: str) -> None:
    app = App("contract", config=app_config(kind, nats_url))

    @app.every("1000d", singleton=False)
    async def report() -> None:
        raise ValueError("no such archive")

    async with harness(app, server=nats_url if kind == "jetstream" else None) as t:
        await t.pause(report)
        await timer_control.ask(t.app.session.admin, "contract", "report")
        run = await outcome(t, "report")
        assert "no such archive" in run.error
        assert [str(ticked.error) for ticked in t.ticks(report)] == ["no such archive"]


async def test_what_nobody_has_taken_in_time_is_void() -> None:
    app = App("contract", config=app_config("in_memory", ""))
    ran: list[Tick] = []

    @app.every("1000d", singleton=False)
    async def report(tick: Tick) -> None:
        ran.append(tick)

    async with harness(app, start=datetime(2026, 11, 26, 12, 5, tzinfo=UTC)) as t:
        bucket = await orders.bucket(t.app.session.admin, "contract")
        late = Run(asked=await bucket.time() - timedelta(seconds=61), by="anna")
        await bucket.put(timer_requests.runs_key("contract"), msgspec.json.encode({"report": late, "unknown": late}))
        await t.advance(30)
        assert ran == []
        assert await timer_control.asked(t.app.session.admin, "contract", "report") == late
        await timer_control.ask(t.app.session.admin, "contract", "report")
        await outcome(t, "report")
        assert len(ran) == 1


async def test_of_two_that_know_of_a_run_one_takes_it(kind: str, nats_url: str) -> None:
    app = App("contract", config=app_config(kind, nats_url))

    @app.every("1000d", singleton=False)
    async def report() -> None: ...

    async with harness(app, server=nats_url if kind == "jetstream" else None, workers=0) as t:
        backend, stop = t.app.session.admin, anyio.Event()
        controls = [Control(backend, "contract", timers={"report"}) for _ in range(5)]
        taken: list[Run | None] = []

        async def take(control: Control) -> None:
            taken.append(await control.take("report"))

        asked = await timer_control.ask(backend, "contract", "report", by="anna")
        async with anyio.create_task_group() as looking:
            for control in controls:
                looking.start_soon(control.keep_looking, stop)
                await control.news.wait()
            stop.set()
        async with anyio.create_task_group() as taking:
            for control in controls:
                taking.start_soon(take, control)
        [one] = filter(None, taken)
        assert (one.asked, one.by) == (asked.asked, "anna")
        assert await timer_control.asked(backend, "contract", "report") == one
        newer = await timer_control.ask(backend, "contract", "report", by="rolf")
        assert await controls[0].record("report", structs.replace(newer, worker="there"))
        ended = structs.replace(one, seconds=1.0)
        assert not await controls[0].record("report", ended, taken=one), "a later one has been taken since"


async def test_two_do_not_ask_at_the_same_time() -> None:
    app = App("contract", config=app_config("in_memory", ""))

    @app.every("1000d", singleton=False)
    async def report() -> None: ...

    async with harness(app, workers=0) as t:
        await timer_control.ask(t.app.session.admin, "contract", "report", by="anna")
        with pytest.raises(DeclarationError, match="anna has asked for a run of report already"):
            await timer_control.ask(t.app.session.admin, "contract", "report", by="rolf")


@pytest.mark.slow
async def test_a_run_whose_worker_dies_does_not_run_again(kind: str, nats_url: str) -> None:
    app = App("contract", config=app_config(kind, nats_url))
    begun: list[Tick] = []
    began = anyio.Event()

    @app.every("1000d", singleton=False)
    async def report(tick: Tick) -> None:
        begun.append(tick)
        began.set()
        await anyio.sleep_forever()

    async with harness(app, server=nats_url if kind == "jetstream" else None) as t:
        await timer_control.ask(t.app.session.admin, "contract", "report")
        with anyio.fail_after(PATIENCE_SECONDS):
            while not began.is_set():
                await t.advance(1)
        await t.crash()  # another worker comes in its place
        await t.advance(12)
        run = await timer_control.asked(t.app.session.admin, "contract", "report")
    assert len(begun) == 1
    assert run is not None
    assert (bool(run.worker), run.seconds) == (True, None)
