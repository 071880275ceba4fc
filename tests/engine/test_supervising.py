"""Agents and tasks kept running, whatever happens to their consumers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from aviso_workers import App, Notification, Router, config
from aviso_workers.backends import ConsumerInfo, Delivery, StreamInfo
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.backends.in_memory.consumer import InMemoryConsumer
from aviso_workers.clocks import LoopClock
from aviso_workers.declare import resources
from aviso_workers.engine.subscription import HEALTHY_SECONDS, supervise_task
from aviso_workers.errors import BackendError, NotFoundError, UnavailableError
from aviso_workers.events import AgentDisturbed, AgentStarted, AgentStopped, Settled, TaskFailed
from aviso_workers.jetstream.specs import ConsumerSpec
from aviso_workers.sessions.session import Session
from tests.engine.conftest import Facts, NotifyStep, Working

pytestmark = pytest.mark.anyio

APP: Any = object()

Supervise = Callable[[Router, anyio.Event], Coroutine[Any, Any, None]]


class LosingBackend(InMemoryBackend):
    """Loses consumers, or cannot open any, as it is told; keeps a diary."""

    def __init__(self) -> None:
        super().__init__(config.InMemory(max_history_per_topic=1000))
        self.loss: BackendError | None = None
        self.lost = anyio.Event()
        self.closed: BackendError | None = None
        self.diary: list[str] = []

    def lose(self, error: BackendError) -> None:
        self.loss, lost, self.lost = error, self.lost, anyio.Event()
        lost.set()

    async def stream_info(self, stream: str, **stated: Any) -> StreamInfo:
        if stream == "MARS":
            self.diary.append("stream looked at")
        return await super().stream_info(stream, **stated)

    async def consumer_info(self, stream: str, consumer: str, **stated: Any) -> ConsumerInfo:
        if self.closed is not None and stream == "MARS":
            raise self.closed
        return await super().consumer_info(stream, consumer, **stated)

    @asynccontextmanager
    async def consume(
        self, stream: str, consumer: str, *, deliver: Callable[[Sequence[Delivery]], None], **stated: Any
    ) -> AsyncIterator[InMemoryConsumer]:
        async with super().consume(stream, consumer, deliver=deliver, **stated) as reader:
            if stream != "MARS":
                yield reader  # the retries, which every agent also reads
                return
            lost = self.lost

            async def wait_until_lost() -> None:
                await lost.wait()
                assert self.loss is not None
                raise self.loss

            async def note_settled() -> None:
                self.diary.append("settled")
                await InMemoryConsumer.settled(reader)

            reader.lost = wait_until_lost  # type: ignore[method-assign]
            reader.settled = note_settled  # type: ignore[method-assign]
            yield reader
        self.diary.append("consumer closed")


@pytest.fixture
async def backend() -> AsyncGenerator[LosingBackend, None]:
    async with LosingBackend() as backend:
        yield backend


class TestAnAgent:
    async def test_goes_on_after_its_consumer_was_lost(
        self, backend: LosingBackend, router: Router, notify: NotifyStep, working: Working, facts: Facts
    ) -> None:
        @router.agent("mars")
        async def index(notification: Notification[Any]) -> None: ...

        async with working(index):
            await notify(0)
            await facts.wait_for(Settled)
            backend.lose(UnavailableError("the leader is gone"))
            (disturbed,) = await facts.wait_for(AgentDisturbed)
            await facts.wait_for(AgentStarted, 2)
            await notify(6)
            settled = await facts.wait_for(Settled, 2)
        assert (disturbed.agent, str(disturbed.error), disturbed.again_in_seconds) == (
            "index",
            "the leader is gone",
            0.1,
        )
        assert [(event.outcome, event.num_delivered) for event in settled] == [("acked", 1), ("acked", 1)]
        assert len(facts.of(AgentStopped)) == 1

    async def test_finishes_what_ran_when_its_consumer_was_lost(
        self, backend: LosingBackend, router: Router, notify: NotifyStep, working: Working, facts: Facts
    ) -> None:
        began, end = anyio.Event(), anyio.Event()

        @router.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            began.set()
            await end.wait()

        await notify(0)
        async with working(index):
            await began.wait()
            backend.lose(UnavailableError("gone"))
            await facts.wait_for(AgentStarted, 2)
            end.set()
            (settled,) = await facts.wait_for(Settled)
        assert (settled.outcome, settled.num_delivered) == ("acked", 1)

    async def test_looks_at_its_stream_again_where_that_may_be_gone(
        self, backend: LosingBackend, router: Router, working: Working, facts: Facts
    ) -> None:
        @router.agent("mars")
        async def index(notification: Notification[Any]) -> None: ...

        async with working(index):
            await facts.wait_for(AgentStarted)
            backend.diary.clear()
            backend.lose(UnavailableError("the leader is gone"))
            await facts.wait_for(AgentStarted, 2)
            usual = backend.diary.count("stream looked at")
            backend.diary.clear()
            backend.lose(NotFoundError("stream MARS: not found"))
            await facts.wait_for(AgentStarted, 3)
            assert backend.diary.count("stream looked at") > usual

    async def test_that_cannot_be_opened_waits_longer_and_longer(
        self, backend: LosingBackend, router: Router, working: Working, facts: Facts
    ) -> None:
        @router.agent("mars")
        async def index(notification: Notification[Any]) -> None: ...

        backend.closed = UnavailableError("no answer")
        async with working(index):
            disturbed = await facts.wait_for(AgentDisturbed, 12)
        waits = [round(event.again_in_seconds, 1) for event in disturbed]
        assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0, 10.0, 10.0]

    async def test_that_is_to_stop_does_not_wait_for_a_server_that_answers_nothing(
        self, backend: LosingBackend, router: Router, working: Working, facts: Facts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As where Ctrl-C reaches a worker that has just connected, and its server."""

        @router.agent("mars")
        async def index(notification: Notification[Any]) -> None: ...

        asked = anyio.Event()

        async def never_answer(stream: str, spec: ConsumerSpec) -> ConsumerInfo:
            asked.set()
            await anyio.sleep_forever()
            raise AssertionError

        monkeypatch.setattr(backend, "ensure_consumer", never_answer)
        async with working(index):
            await asked.wait()
        assert len(facts.of(AgentStopped)) == 1
        assert (facts.of(AgentStarted), facts.of(AgentDisturbed)) == ([], [])

    async def test_does_not_hurry_because_it_once_was_healthy(
        self, backend: LosingBackend, router: Router, working: Working, facts: Facts
    ) -> None:
        @router.agent("mars")
        async def index(notification: Notification[Any]) -> None: ...

        async with working(index):
            await facts.wait_for(AgentStarted)
            await anyio.sleep(HEALTHY_SECONDS + 1)
            backend.closed = UnavailableError("no answer")
            backend.lose(backend.closed)
            disturbed = await facts.wait_for(AgentDisturbed, 9)
        waits = [round(event.again_in_seconds, 1) for event in disturbed]
        assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]

    async def test_that_was_healthy_starts_again_at_once(
        self, backend: LosingBackend, router: Router, working: Working, facts: Facts
    ) -> None:
        @router.agent("mars")
        async def index(notification: Notification[Any]) -> None: ...

        async with working(index):
            for count, seconds in enumerate((1.0, 1.0, HEALTHY_SECONDS + 1, 1.0), start=1):
                await facts.wait_for(AgentStarted, count)
                await anyio.sleep(seconds)
                backend.lose(UnavailableError("gone"))
                await facts.wait_for(AgentDisturbed, count)
        assert [round(event.again_in_seconds, 1) for event in facts.of(AgentDisturbed)] == [0.1, 0.2, 0.1, 0.2]

    async def test_that_waits_to_be_opened_stops_at_once(
        self, backend: LosingBackend, router: Router, working: Working, facts: Facts
    ) -> None:
        @router.agent("mars")
        async def index(notification: Notification[Any]) -> None: ...

        backend.closed = UnavailableError("no answer")
        async with working(index) as stop:
            await facts.wait_for(AgentDisturbed, 10)
            began = anyio.current_time()
            stop.set()
        assert anyio.current_time() - began < 1
        assert len(facts.of(AgentStopped)) == 1

    async def test_that_stops_sees_its_last_settlement_off_before_it_closes(
        self, backend: LosingBackend, router: Router, notify: NotifyStep, working: Working
    ) -> None:
        began, end = anyio.Event(), anyio.Event()

        @router.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            began.set()
            await end.wait()
            backend.diary.append("handled")

        await notify(0)
        async with working(index) as stop:
            await began.wait()
            backend.diary.clear()
            stop.set()
            await anyio.sleep(1)
            assert backend.diary == []
            end.set()
        assert backend.diary == ["handled", "settled", "consumer closed"]

    async def test_that_stops_without_a_connection_does_not_complain(
        self, backend: LosingBackend, router: Router, notify: NotifyStep, working: Working, facts: Facts
    ) -> None:
        began = anyio.Event()

        @router.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            began.set()
            await anyio.sleep(1)

        await notify(0)
        async with working(index) as stop:
            await began.wait()
            stop.set()
            backend.disconnect()
        assert facts.of(AgentDisturbed) == []
        assert facts.of(AgentStopped) == [AgentStopped(agent="index", finished=1, returned=0)]

    async def test_that_keeps_an_order_does_not_wait_for_what_it_holds_itself(
        self, backend: LosingBackend, router: Router, notify: NotifyStep, working: Working, facts: Facts
    ) -> None:
        began, end = anyio.Event(), anyio.Event()

        @router.agent("mars", order_by=("class",), ack_wait=5.0)
        async def index(notification: Notification[Any]) -> None:
            began.set()
            await end.wait()

        await notify(0)
        async with working(index):
            await began.wait()
            lost_at = anyio.current_time()
            backend.lose(UnavailableError("the leader is gone"))
            await facts.wait_for(AgentStarted, 2)
            assert anyio.current_time() - lost_at < 1
            end.set()
            await facts.wait_for(Settled)

    async def test_that_keeps_an_order_waits_for_what_a_dead_worker_held(
        self, backend: LosingBackend, session: Session, router: Router, notify: NotifyStep, working: Working
    ) -> None:
        seen: list[str] = []
        done = anyio.Event()

        @router.agent("mars", order_by=("class",), ack_wait=5.0)
        async def index(notification: Notification[Any]) -> None:
            seen.append(notification.identifier["step"])
            if len(seen) == 2:
                done.set()

        await notify(0)
        await notify(1)
        async with working(index):  # makes the consumer
            await done.wait()
        durable, died = index.durable_name("tests"), anyio.Event()
        await backend.reset_consumer("MARS", durable, sequence=1)
        async with InMemoryBackend.consume(
            backend, "MARS", durable, deliver=lambda delivery: died.set(), capacity=lambda: int(not died.is_set())
        ):
            await died.wait()  # it took the first, and dies with it
        seen.clear()
        done = anyio.Event()
        async with working(index):
            await done.wait()
        assert seen == ["0", "1"]


class TestATask:
    @pytest.fixture
    def supervise(self, facts: Facts) -> Supervise:
        async def supervise(router: Router, stop: anyio.Event) -> None:
            (task,) = router.tasks
            await supervise_task(resources.bound(task, {App: APP}), clock=LoopClock(), events=facts.events, stop=stop)

        return supervise

    async def test_is_called_with_the_app_and_is_done_when_it_returns(
        self, router: Router, supervise: Supervise, facts: Facts
    ) -> None:
        called_with: list[Any] = []

        @router.task
        async def tail(app: App) -> None:
            called_with.append(app)

        await supervise(router, anyio.Event())
        assert (called_with, facts.of(TaskFailed)) == ([APP], [])

    async def test_that_raises_starts_again_after_waits_that_grow(
        self, router: Router, supervise: Supervise, facts: Facts
    ) -> None:
        times: list[float] = []

        @router.task
        async def tail(app: App) -> None:
            times.append(anyio.current_time())
            if len(times) < 10:
                raise OSError("no such directory")

        await supervise(router, anyio.Event())
        waits = [round(event.again_in_seconds, 1) for event in facts.of(TaskFailed)]
        assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
        assert round(times[-1] - times[0], 1) == round(sum(waits), 1)
        assert str(facts.of(TaskFailed)[0].error) == "no such directory"

    async def test_that_ran_well_for_a_while_starts_again_at_once(
        self, router: Router, supervise: Supervise, facts: Facts
    ) -> None:
        runs = 0

        @router.task
        async def tail(app: App) -> None:
            nonlocal runs
            runs += 1
            await anyio.sleep(HEALTHY_SECONDS + 1 if runs == 3 else 1)
            if runs < 5:
                raise OSError

        await supervise(router, anyio.Event())
        assert [round(event.again_in_seconds, 1) for event in facts.of(TaskFailed)] == [0.1, 0.2, 0.1, 0.2]

    async def test_is_cancelled_when_the_worker_stops(self, router: Router, supervise: Supervise, facts: Facts) -> None:
        stop = anyio.Event()
        ended: list[bool] = []

        @router.task
        async def tail(app: App) -> None:
            try:
                await anyio.sleep_forever()
            finally:
                ended.append(True)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervise, router, stop)
            await anyio.wait_all_tasks_blocked()
            stop.set()
        assert (ended, facts.of(TaskFailed)) == ([True], [])

    async def test_that_waits_to_start_again_stops_at_once(
        self, router: Router, supervise: Supervise, facts: Facts
    ) -> None:
        stop = anyio.Event()

        @router.task
        async def tail(app: App) -> None:
            raise OSError

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervise, router, stop)
            await facts.wait_for(TaskFailed, 9)
            began = anyio.current_time()
            stop.set()
        assert anyio.current_time() - began < 1

    async def test_that_is_cancelled_from_within_has_failed(
        self, router: Router, supervise: Supervise, facts: Facts
    ) -> None:
        runs = 0

        @router.task
        async def tail(app: App) -> None:
            nonlocal runs
            runs += 1
            if runs == 1:
                raise asyncio.CancelledError

        await supervise(router, anyio.Event())
        (failed,) = facts.of(TaskFailed)
        assert (runs, type(failed.error)) == (2, RuntimeError)
