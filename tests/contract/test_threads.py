"""Plain functions that run on in their threads after their call was given up: how many, and what waits meanwhile."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from aviso_workers import Agent, App, Backoff, Batch, Batching, Notification, Router
from aviso_workers.engine import threads
from aviso_workers.events import Event, Settled, ThreadsFreed, ThreadsStuck
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

TIMEOUT_SECONDS = 0.5
OFTEN = Backoff(first=0.01, factor=1, attempts=50, jitter=0)
ONCE = Backoff(attempts=1)


@pytest.fixture(autouse=True)
def soon_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "STUCK_SECONDS", 0.2)


class Hanging:
    """A function that hangs for some steps until it is told to go on, and what it was called for."""

    def __init__(self, *steps: int) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self._hangs = set(steps)
        self._goes_on = threading.Event()

    def __call__(self, *notifications: Notification[Any]) -> None:
        steps = [int(notification.identifier["step"]) for notification in notifications]
        self.begun += steps
        if self._hangs & set(steps):
            self._goes_on.wait(PATIENCE_SECONDS)
        self.ended += steps

    def end(self) -> None:
        self._goes_on.set()


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    """Hangs for the steps 0 and 1."""
    hanging = Hanging(0, 1)
    yield hanging
    hanging.end()


def one_by_one(function: Hanging, **policy: Any) -> Agent[Any, Any]:
    def index(notification: Notification[Any]) -> None:
        function(notification)

    return Router("theirs").agent("mars", **{"timeout": TIMEOUT_SECONDS, "retry": OFTEN, **policy})(index)


def in_batches(function: Hanging, **policy: Any) -> Agent[Any, Any]:
    def index(batch: Batch[Any]) -> None:
        function(*batch)

    batch = Batching(size=1, within=0.0)
    return Router("theirs").agent("mars", batch=batch, **{"timeout": TIMEOUT_SECONDS, "retry": OFTEN, **policy})(index)


class Facts:
    """What was stated of the agent so far."""

    def __init__(self, app: App) -> None:
        self.of_threads: list[Event] = []
        self.ends: dict[int, str] = {}
        """By sequence, what became of a notification the last time."""
        self._changed = anyio.Event()
        app.events.listen(self._note, ThreadsStuck, ThreadsFreed, Settled)

    async def until_stuck(self, threads: int) -> None:
        stuck = [ThreadsStuck(agent="index", threads=threads)]
        await self._until(lambda: self.of_threads == stuck)
        assert self.of_threads == stuck

    async def until_settled(self, ends: dict[int, str]) -> None:
        await self._until(lambda: self.ends == ends)
        assert self.ends == ends

    async def until_acked(self, *sequences: int) -> None:
        await self.until_settled(dict.fromkeys(sequences, "acked"))

    async def _until(self, true: Callable[[], bool]) -> None:
        with anyio.move_on_after(PATIENCE_SECONDS):
            while not true():
                self._changed = anyio.Event()
                await self._changed.wait()

    def _note(self, event: Event) -> None:
        if isinstance(event, Settled):
            self.ends[event.sequence] = event.outcome
        else:
            self.of_threads.append(event)
        self._changed.set()


@asynccontextmanager
async def working(app: App, agent: Agent[Any, Any]) -> AsyncIterator[anyio.Event]:
    """A worker that runs the agent, until the block is left."""
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(app.session.run_agent, agent, stop)
        yield stop
        stop.set()


async def notify(app: App, steps: Sequence[int], **values: Any) -> None:
    for step in steps:
        await app.notify("mars", mars(step=step, **values), {})


@pytest.mark.parametrize("form", [one_by_one, in_batches])
async def test_when_all_threads_run_on_nothing_more_begins_and_others_get_what_waits(
    app: App, hanging: Hanging, form: Any
) -> None:
    async with app:
        facts = Facts(app)
        await notify(app, range(4))
        async with working(app, form(hanging, concurrency=2)):
            await facts.until_stuck(2)
            assert sorted(hanging.begun) == [0, 1]

            other = Hanging()
            async with working(app, form(other, concurrency=2)):
                await facts.until_acked(1, 2, 3, 4)
            assert set(other.begun) == {0, 1, 2, 3}
            assert facts.of_threads == [ThreadsStuck(agent="index", threads=2)]


async def test_an_agent_goes_on_when_a_thread_ends(app: App, hanging: Hanging) -> None:
    async with app:
        facts = Facts(app)
        await notify(app, range(4))
        async with working(app, one_by_one(hanging, concurrency=2)):
            await facts.until_stuck(2)
            hanging.end()
            await facts.until_acked(1, 2, 3, 4)
        assert facts.of_threads == [ThreadsStuck(agent="index", threads=2), ThreadsFreed(agent="index")]
        assert set(hanging.ended) == {0, 1, 2, 3}


async def test_an_agent_with_a_thread_left_goes_on_meanwhile(app: App) -> None:
    hanging = Hanging(0)
    async with app:
        facts = Facts(app)
        await notify(app, range(4))
        async with working(app, one_by_one(hanging, concurrency=2, retry=ONCE)):
            await facts.until_settled({1: "dead_lettered", 2: "acked", 3: "acked", 4: "acked"})
            hanging.end()
        assert facts.of_threads == []


async def test_an_agent_whose_threads_are_stuck_stops_at_once(app: App, hanging: Hanging) -> None:
    async with app:
        facts = Facts(app)
        await notify(app, range(4))
        async with working(app, one_by_one(hanging, concurrency=2)) as stop:
            await facts.until_stuck(2)
            stopped_at = anyio.current_time()
            stop.set()
        assert anyio.current_time() - stopped_at < PATIENCE_SECONDS / 2
        assert hanging.ended == []


class TestOrder:
    async def test_a_key_whose_thread_runs_on_is_not_given_its_next(self, app: App) -> None:
        hanging = Hanging(0)
        async with app:
            facts = Facts(app)
            await notify(app, [0, 1], expver="0001")
            await notify(app, [2, 3], expver="0002")
            async with working(app, one_by_one(hanging, concurrency=2, order_by=["expver"], retry=ONCE)):
                await facts.until_settled({1: "dead_lettered", 3: "acked", 4: "acked"})
                await notify(app, [4], expver="0002")
                await facts.until_settled({1: "dead_lettered", 3: "acked", 4: "acked", 5: "acked"})
                assert 1 not in hanging.begun
                hanging.end()
                await facts.until_settled({1: "dead_lettered", **dict.fromkeys(range(2, 6), "acked")})
            assert hanging.ended.index(0) < hanging.ended.index(1)

    async def test_a_key_is_not_tried_again_while_its_thread_runs_on(self, app: App) -> None:
        hanging = Hanging(0)
        async with app:
            facts = Facts(app)
            await notify(app, [0, 1], expver="0001")
            await notify(app, [2], expver="0002")
            async with working(app, one_by_one(hanging, concurrency=2, order_by=["expver"])):
                await facts.until_settled({1: "retried", 3: "acked"})
                await notify(app, [3], expver="0002")
                await facts.until_settled({1: "retried", 3: "acked", 4: "acked"})
                assert hanging.begun.count(0) == 1
                hanging.end()
                await facts.until_acked(1, 2, 3, 4)
            assert [step for step in hanging.ended if step < 2] == [0, 0, 1]

    async def test_what_was_given_back_comes_again_in_order(self, app: App) -> None:
        hanging = Hanging(0)
        async with app:
            facts = Facts(app)
            await notify(app, range(5), expver="0001")
            async with working(app, one_by_one(hanging, order_by=["expver"], ack_wait=1.0)):
                await facts.until_stuck(1)
                await notify(app, [5], expver="0001")
                hanging.end()
                await facts.until_acked(1, 2, 3, 4, 5, 6)
            assert hanging.ended == [0, 0, 1, 2, 3, 4, 5]
