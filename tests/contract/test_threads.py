"""Calls that run on after their timeout: what they keep, and what waits meanwhile.

Plain functions run on in their threads, and async functions where an await cannot be cancelled.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.to_thread
import pytest
from msgspec import structs

from aviso_workers import Agent, App, Batch, Batching, Notification, Notify, RetryPolicy, Router
from aviso_workers.declare import resources
from aviso_workers.engine import calls, shields
from aviso_workers.engine.flow import Flow
from aviso_workers.events import CallOverdue, CallsAbandoned, CallsFreed, CallsStuck, Event, Settled
from tests.contract.settings import mars
from tests.waits import LONG_SECONDS, PATIENCE_SECONDS, PROMPT_SECONDS

pytestmark = pytest.mark.anyio

TIMEOUT_SECONDS = 0.3
OVERDUE = CallOverdue(agent="index", timeout_seconds=TIMEOUT_SECONDS)
OFTEN = RetryPolicy(first=0.01, factor=1, attempts=50, jitter=0)
ONCE = RetryPolicy(attempts=1)


@pytest.fixture(autouse=True)
def soon_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "HUNG_SECONDS", 0.2)


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

    async def catch_cancellations(self, notification: Notification[Any]) -> None:
        """Do the same in a loop that goes on when it is cancelled."""
        step = int(notification.identifier["step"])
        self.begun.append(step)
        while step in self._hangs and not self._goes_on.is_set():
            with suppress(anyio.get_cancelled_exc_class()):
                await anyio.sleep(0.01)
        self.ended.append(step)

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


def in_a_thread_of_anyio(function: Hanging, **policy: Any) -> Agent[Any, Any]:
    async def index(notification: Notification[Any]) -> None:
        await anyio.to_thread.run_sync(function, notification)

    return Router("theirs").agent("mars", **{"timeout": TIMEOUT_SECONDS, "retry": OFTEN, **policy})(index)


def shielded(function: Hanging, **policy: Any) -> Agent[Any, Any]:
    async def index(notification: Notification[Any]) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(function, notification, abandon_on_cancel=True)

    return Router("theirs").agent("mars", **{"timeout": TIMEOUT_SECONDS, "retry": OFTEN, **policy})(index)


def catching_cancellations(function: Hanging, **policy: Any) -> Agent[Any, Any]:
    async def index(notification: Notification[Any]) -> None:
        await function.catch_cancellations(notification)

    return Router("theirs").agent("mars", **{"timeout": TIMEOUT_SECONDS, "retry": OFTEN, **policy})(index)


def shielded_around(function: Hanging, **policy: Any) -> Agent[Any, Any]:
    """The function ends in time, and what is around it does not: it has twice the timeout."""

    async def index(notification: Notification[Any]) -> None: ...

    async def around(notification: Notification[Any]) -> AsyncIterator[None]:
        yield
        await anyio.to_thread.run_sync(function, notification)

    router = Router("theirs")
    router.around(around)
    agent = router.agent("mars", **{"timeout": TIMEOUT_SECONDS, "retry": OFTEN, **policy})(index)
    return resources.surrounded(agent, router._arounds, ())


UNSTOPPABLE = [in_a_thread_of_anyio, shielded, catching_cancellations, shielded_around]
"""Async functions that cannot be cancelled."""


class Facts:
    """What was stated of the agent so far."""

    def __init__(self, app: App) -> None:
        self.of_threads: list[Event] = []
        self.ends: defaultdict[int, list[str]] = defaultdict(list)
        """By sequence, what became of a notification each time."""
        self.errors: list[BaseException | None] = []
        self._changed = anyio.Event()
        app.events.listen(self._note, CallOverdue, CallsStuck, CallsFreed, CallsAbandoned, Settled)

    @property
    def last(self) -> dict[int, str]:
        """By sequence, what became of a notification the last time."""
        return {sequence: ends[-1] for sequence, ends in self.ends.items()}

    async def until_threads(self, *events: Event) -> None:
        await self._until(lambda: self.of_threads == [*events])
        assert self.of_threads == [*events]

    async def until_stuck(self, threads: int) -> None:
        def is_told() -> bool:
            return threads in [event.calls for event in self.of_threads if isinstance(event, CallsStuck)]

        await self._until(is_told)
        assert is_told(), self.of_threads

    async def until_begun(self, function: Hanging, *steps: int) -> None:
        with anyio.fail_after(PATIENCE_SECONDS):
            while function.begun != [*steps]:  # noqa: ASYNC110
                await anyio.sleep(0.01)

    async def until_settled(self, last: dict[int, str]) -> None:
        await self._until(lambda: self.last == last)
        assert self.last == last

    async def until_acked(self, *sequences: int) -> None:
        await self.until_settled(dict.fromkeys(sequences, "acked"))

    async def _until(self, true: Callable[[], bool]) -> None:
        with anyio.move_on_after(PATIENCE_SECONDS):
            while not true():
                self._changed = anyio.Event()
                await self._changed.wait()

    def _note(self, event: Event) -> None:
        if isinstance(event, Settled):
            self.ends[event.sequence].append(event.outcome)
            self.errors.append(event.error)
        else:
            self.of_threads.append(event)
        self._changed.set()


class Heartbeats:
    """The reports of what a worker holds, of which there are three in each `ack_wait`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._count = 0
        self._beat = anyio.Event()
        heartbeat = Flow.heartbeat

        async def counted(flow: Flow) -> None:
            await heartbeat(flow)
            if len(flow):
                self._count += 1
                self._beat.set()

        monkeypatch.setattr(Flow, "heartbeat", counted)

    async def until_more(self, count: int) -> None:
        until = self._count + count
        with anyio.fail_after(PATIENCE_SECONDS):
            while self._count < until:
                self._beat = anyio.Event()
                await self._beat.wait()


@pytest.fixture
def heartbeats(monkeypatch: pytest.MonkeyPatch) -> Heartbeats:
    return Heartbeats(monkeypatch)


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


def drain_within(app: App, seconds: float) -> None:
    config = app.config
    app.configure(structs.replace(config, workers=structs.replace(config.workers, drain_timeout_seconds=seconds)))


class TestANotification:
    @pytest.mark.parametrize("form", [one_by_one, in_batches, *UNSTOPPABLE])
    async def test_whose_thread_runs_on_is_run_by_nobody_else(
        self, app: App, heartbeats: Heartbeats, form: Any
    ) -> None:
        hanging = Hanging(0)
        async with app:
            facts = Facts(app)
            await notify(app, range(3))
            agent = form(hanging, concurrency=3, ack_wait=0.6)
            async with working(app, agent), working(app, agent):
                await facts.until_acked(2, 3)
                await facts.until_threads(structs.replace(OVERDUE, in_thread=agent.in_thread))
                await heartbeats.until_more(6)
                await notify(app, [3, 4])
                await facts.until_acked(2, 3, 4, 5)
                assert hanging.begun.count(0) == 1

                hanging.end()
                await facts.until_acked(1, 2, 3, 4, 5)
            assert facts.ends[1] == ["retried", "acked"]
            assert hanging.ended.count(0) == 2

    async def test_has_failed_for_its_time_when_its_thread_has_ended(self, app: App) -> None:
        hanging = Hanging(0)
        async with app:
            facts = Facts(app)
            await notify(app, range(4))
            async with working(app, one_by_one(hanging, concurrency=2, retry=ONCE)):
                await facts.until_threads(OVERDUE)
                await facts.until_acked(2, 3, 4)
                run = app.session.runs["index"]
                assert (run.overdue, run.flow.running) == (1, 1)
                hanging.end()
                await facts.until_settled({1: "dead_lettered", 2: "acked", 3: "acked", 4: "acked"})
                assert run.overdue == 0
            assert str(facts.errors[-1]) == f"not done within {TIMEOUT_SECONDS:g} s"
            assert isinstance(facts.errors[-1], TimeoutError)

    @pytest.mark.parametrize("raises", [False, True])
    async def test_fails_whatever_its_function_ends_with_after_its_time(self, app: App, raises: bool) -> None:
        hanging = Hanging(0)

        def index(notification: Notification[Any]) -> Notify:
            hanging(notification)
            if raises:
                raise ConnectionError("the query was ended")
            return Notify("mars", mars(step=99))

        agent = Router("theirs").agent("mars", timeout=TIMEOUT_SECONDS, retry=ONCE)(index)
        async with app:
            facts = Facts(app)
            await notify(app, [0])
            async with working(app, agent):
                await facts.until_stuck(1)
                hanging.end()
                await facts.until_settled({1: "dead_lettered"})
            (error,) = facts.errors
            assert isinstance(error, TimeoutError)
            assert str(error.__cause__) == ("the query was ended" if raises else "None")
            assert [notification.sequence async for notification in app.replay("mars", from_id=1)] == [1]


class TestAnAgent:
    @pytest.mark.parametrize("form", [one_by_one, in_batches, *UNSTOPPABLE])
    async def test_all_of_whose_threads_hang_begins_nothing_and_others_get_what_waits(
        self, app: App, hanging: Hanging, form: Any
    ) -> None:
        async with app:
            facts = Facts(app)
            await notify(app, range(4))
            async with working(app, form(hanging, concurrency=2)):
                await facts.until_stuck(2)
                assert sorted(hanging.begun) == [0, 1]

                other = Hanging()
                async with working(app, form(other, concurrency=2)):
                    await facts.until_acked(3, 4)
                    assert sorted(other.begun) == [2, 3]
                    hanging.end()
                    await facts.until_acked(1, 2, 3, 4)

    @pytest.mark.parametrize("form", [one_by_one, *UNSTOPPABLE])
    async def test_goes_on_when_a_call_ends(self, app: App, hanging: Hanging, form: Any) -> None:
        async with app:
            facts = Facts(app)
            await notify(app, range(4))
            agent = form(hanging, concurrency=2)
            async with working(app, agent):
                await facts.until_stuck(2)
                hanging.end()
                await facts.until_acked(1, 2, 3, 4)
            assert facts.of_threads[-1] == CallsFreed(agent="index", in_thread=agent.in_thread)
            assert set(hanging.ended) == {0, 1, 2, 3}

    async def test_that_stops_waits_for_its_threads_and_settles(self, app: App, hanging: Hanging) -> None:
        async with app:
            facts = Facts(app)
            await notify(app, range(2))
            async with working(app, one_by_one(hanging, concurrency=2)) as stop:
                await facts.until_stuck(2)
                stop.set()
                hanging.end()
            assert facts.ends == {1: ["retried"], 2: ["retried"]}

    async def test_that_stops_gives_back_what_has_not_ended_when_the_drain_timeout_is_over(
        self, app: App, hanging: Hanging
    ) -> None:
        drain_within(app, 0.5)
        async with app:
            facts = Facts(app)
            await notify(app, range(2))
            async with working(app, one_by_one(hanging, concurrency=2)) as stop:
                await facts.until_stuck(2)
                stop.set()
            assert (hanging.ended, facts.ends) == ([], {})
            assert not [fact for fact in facts.of_threads if isinstance(fact, CallsFreed)]
            other = Hanging()
            with anyio.fail_after(PROMPT_SECONDS):
                async with working(app, one_by_one(other, ack_wait=600.0)):
                    await facts.until_acked(1, 2)

    @pytest.mark.parametrize("form", UNSTOPPABLE)
    async def test_that_stops_gives_back_what_cannot_be_cancelled(
        self, app: App, monkeypatch: pytest.MonkeyPatch, form: Any
    ) -> None:
        monkeypatch.setattr(shields, "SHIELDED_SECONDS", 0.1)
        drain_within(app, 0.5)
        hanging = Hanging(0)
        async with app:
            facts = Facts(app)
            await notify(app, range(1))
            async with working(app, form(hanging, timeout=None)) as stop:
                await facts.until_begun(hanging, 0)
                stop.set()
                other = Hanging()
                with anyio.fail_after(PROMPT_SECONDS):
                    async with working(app, one_by_one(other, ack_wait=600.0)):
                        await facts.until_acked(1)
                assert (hanging.ended, other.ended) == ([], [0])
                assert facts.of_threads == [CallsAbandoned(agent="index", sequences=[1])]
                hanging.end()

    @pytest.mark.parametrize("form", UNSTOPPABLE)
    async def test_that_is_cancelled_gives_back_what_cannot_be_cancelled(
        self, app: App, monkeypatch: pytest.MonkeyPatch, form: Any
    ) -> None:
        monkeypatch.setattr(shields, "SHIELDED_SECONDS", 0.1)
        drain_within(app, LONG_SECONDS)
        hanging = Hanging(0)
        async with app:
            facts = Facts(app)
            await notify(app, range(1))
            agent = form(hanging, timeout=None)
            async with anyio.create_task_group() as worker:
                worker.start_soon(app.session.run_agent, agent, anyio.Event())
                await facts.until_begun(hanging, 0)
                worker.cancel_scope.cancel()
                with anyio.CancelScope(shield=True), anyio.fail_after(PROMPT_SECONDS):
                    async with working(app, one_by_one(Hanging(), ack_wait=600.0)):
                        await facts.until_acked(1)
                assert facts.of_threads == [CallsAbandoned(agent="index", sequences=[1])]
                hanging.end()


class TestOrder:
    async def test_a_key_whose_thread_runs_on_is_not_given_its_next(self, app: App) -> None:
        hanging = Hanging(0)
        async with app:
            facts = Facts(app)
            await notify(app, [0, 1], expver="0001")
            await notify(app, [2, 3], expver="0002")
            async with working(app, one_by_one(hanging, concurrency=2, order_by=["expver"])):
                await facts.until_threads(OVERDUE)
                await notify(app, [4], expver="0002")
                await facts.until_acked(3, 4, 5)
                # Keys have threads of their own, of which either may be the first to come to its function.
                assert [step for step in hanging.begun if step < 2] == [0]
                assert [step for step in hanging.begun if step >= 2] == [2, 3, 4]
                hanging.end()
                await facts.until_acked(1, 2, 3, 4, 5)
            assert [step for step in hanging.ended if step < 2] == [0, 0, 1]

    @pytest.mark.slow
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


@pytest.mark.needs_server(2, 11)
class TestASingleton:
    async def test_whose_thread_hangs_stays_the_one(self, app: App, heartbeats: Heartbeats) -> None:
        hanging = Hanging(0)
        async with app:
            facts = Facts(app)
            await notify(app, range(2))
            agent = one_by_one(hanging, singleton=True, ack_wait=1.0)
            async with working(app, agent), working(app, agent):
                await facts.until_stuck(1)
                await heartbeats.until_more(6)
                assert hanging.begun == [0]
                hanging.end()
                await facts.until_acked(1, 2)
            assert hanging.ended == [0, 0, 1]
