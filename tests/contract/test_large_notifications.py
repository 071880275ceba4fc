"""Notifications that are large: nothing stalls because few of them may wait in a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from aviso_workers import Agent, App, Batch, Batching, Notification, Router
from aviso_workers.engine import flow
from aviso_workers.events import Settled
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

BUDGET = 100_000
COUNT = 30


@pytest.fixture(autouse=True)
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "MAX_WAITING_BYTES", BUDGET)


def one_by_one(**policy: Any) -> Agent[Any, Any]:
    async def index(notification: Notification[str]) -> None:
        await anyio.lowlevel.checkpoint()

    return Router("theirs").agent("mars", **policy)(index)


def in_order() -> Agent[Any, Any]:
    return one_by_one(order_by=["step"])


def in_batches() -> Agent[Any, Any]:
    async def index(batch: Batch[str]) -> None:
        await anyio.lowlevel.checkpoint()

    return Router("theirs").agent("mars", batch=Batching(size=COUNT, within=1.0))(index)


@pytest.mark.parametrize("size", [BUDGET // 5, 2 * BUDGET])
@pytest.mark.parametrize("form", [one_by_one, in_order, in_batches])
async def test_all_are_handled(app: App, form: Callable[[], Agent[Any, Any]], size: int) -> None:
    acked: set[int] = set()
    done = anyio.Event()

    def note(settled: Settled) -> None:
        acked.add(settled.sequence)
        if len(acked) == COUNT:
            done.set()

    async with app:
        app.events.listen(note, Settled)
        for step in range(COUNT):
            await app.notify("mars", mars(step=step), "x" * size)
        stop = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(app.session.run_agent, form(), stop)
            with anyio.move_on_after(PATIENCE_SECONDS):
                await done.wait()
            stop.set()
    assert acked == set(range(1, COUNT + 1))
