"""What a failed call leaves in memory: nothing, without a garbage collection. On either backend."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import pytest

from aviso_workers import App, Batch, Batching, Notification, Retry, RetryPolicy, Router
from aviso_workers.events import Settled, TaskFailed
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


class Large:
    """What the functions have as a local variable."""


class LargeError(Exception):
    """Has it as well."""

    def __init__(self, large: Large) -> None:
        self.large = large


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Failing:
    """Fails in one of several ways, each time with a variable of its own."""

    def __init__(self, how: str) -> None:
        self.made: list[weakref.ref[Large]] = []
        self._how = how

    def __call__(self) -> None:
        large = Large()
        self.made.append(weakref.ref(large))
        if self._how == "by itself":
            raise ValueError
        if self._how == "with the variable":
            raise LargeError(large)
        if self._how == "to be retried":
            raise Retry(after=0.01)
        if self._how == "in a group":
            raise ExceptionGroup("two", [LargeError(large), ValueError()])
        try:
            raise LargeError(large)
        except LargeError as error:
            raise RuntimeError from error


def plain(fail: Failing, router: Router, **policy: Any) -> None:
    @router.agent("mars", **policy)
    def index(notification: Notification[Any]) -> None:
        fail()


def not_plain(fail: Failing, router: Router, **policy: Any) -> None:
    @router.agent("mars", **policy)
    async def index(notification: Notification[Any]) -> None:
        fail()


def in_batches(fail: Failing, router: Router, **policy: Any) -> None:
    @router.agent("mars", batch=Batching(size=2, within=0.01), **policy)
    async def index(batch: Batch[Any]) -> None:
        fail()


def plain_in_batches(fail: Failing, router: Router, **policy: Any) -> None:
    @router.agent("mars", batch=Batching(size=2, within=0.01), **policy)
    def index(batch: Batch[Any]) -> None:
        fail()


def add_around(router: Router) -> None:
    @router.around
    async def each(notification: Notification[Any]) -> AsyncIterator[None]:
        yield

    @router.around
    async def each_batch(batch: Batch[Any]) -> AsyncIterator[None]:
        yield


@pytest.mark.slow
@pytest.mark.parametrize("form", [plain, not_plain, in_batches, plain_in_batches])
@pytest.mark.parametrize("surrounded", [False, True])
@pytest.mark.parametrize("how", ["by itself", "with the variable", "with a cause", "to be retried", "in a group"])
async def test_a_failed_call_leaves_none_of_its_variables(
    app: App, no_collection: None, form: Any, surrounded: bool, how: str
) -> None:
    fail, router = Failing(how), Router("theirs")
    form(fail, router, timeout=PATIENCE_SECONDS, retry=RetryPolicy(first=0.01, factor=1, attempts=3, jitter=0))
    if surrounded:
        add_around(router)
    app.include(router)
    (agent,) = app._agents_at_work()
    settled, done, stop = [0], anyio.Event(), anyio.Event()

    def note(event: Settled) -> None:
        settled[0] += event.outcome == "dead_lettered"
        if settled[0] == 3:
            done.set()

    async with app, anyio.create_task_group() as tasks:
        app.events.listen(note, Settled)
        for step in range(3):
            await app.notify("mars", mars(step=step), {})
        tasks.start_soon(app.session.run_agent, agent, stop)
        with anyio.fail_after(PATIENCE_SECONDS):
            await done.wait()
        with anyio.move_on_after(PATIENCE_SECONDS):  # what has stated it goes on to its next wait
            while any(each() is not None for each in fail.made):  # noqa: ASYNC110 - in a thread too, nothing says so
                await anyio.sleep(0.01)
        left = [each() for each in fail.made if each() is not None]
        stop.set()
    assert len(fail.made) >= 3
    assert left == []


@pytest.mark.parametrize("how", ["by itself", "with the variable", "with a cause"])
async def test_a_failed_task_leaves_none_of_its_variables_while_it_waits(
    app: App, no_collection: None, how: str
) -> None:
    fail, failed, stop = Failing(how), anyio.Event(), anyio.Event()

    @app.task
    async def work() -> None:
        fail()

    app.events.listen(lambda event: failed.set(), TaskFailed)
    async with app, anyio.create_task_group() as tasks:
        tasks.start_soon(app._work, stop)
        with anyio.fail_after(PATIENCE_SECONDS):
            await failed.wait()
        await anyio.sleep(0.05)
        left = [each for each in fail.made if each() is not None]
        stop.set()
    assert left == []
