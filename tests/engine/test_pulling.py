"""One agent at work: how much it takes, how much it runs at once, and how it leaves."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from aviso_workers import Batch, Batching, Notification, Router
from aviso_workers.backends import Message
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.clocks import Clock, LoopClock, VirtualClock
from aviso_workers.config import Config
from aviso_workers.engine import flow as in_flight
from aviso_workers.engine.flow import MAX_PREFETCH, PREFETCH_SECONDS, Flow
from aviso_workers.engine.shields import Shield
from aviso_workers.engine.subscription import SubscriptionRun
from aviso_workers.errors import UnavailableError
from aviso_workers.events import AgentDisturbed, AgentStopped, Settled
from aviso_workers.sessions.session import Session
from tests.deliveries import UnsettledDelivery
from tests.engine.conftest import Facts, NotifyStep, Working, config_with

pytestmark = pytest.mark.anyio

DRAIN_SECONDS = 30.0


@pytest.fixture
def settings() -> Config:
    return config_with(drain_timeout_seconds=DRAIN_SECONDS)


@pytest.mark.parametrize("concurrency", [1, 3, 8])
async def test_it_runs_as_many_at_once_as_it_may_and_holds_twice_as_many(
    session: Session, router: Router, notify: NotifyStep, working: Working, facts: Facts, concurrency: int
) -> None:
    running = 0
    most_running, most_held = 0, 0

    @router.agent("mars", concurrency=concurrency)
    async def index(notification: Notification[Any]) -> None:
        nonlocal running, most_running, most_held
        running += 1
        await anyio.sleep(int(notification.identifier["step"]) % 3)
        most_running = max(most_running, running)
        most_held = max(most_held, len(session.runs["index"].flow))
        running -= 1

    for step in range(50):
        await notify(step)
    async with working(index):
        await facts.wait_for(Settled, 50)
        assert len(session.runs["index"].flow) == 0
    assert (most_running, most_held) == (concurrency, 2 * concurrency)
    assert len({event.notification for event in facts.of(Settled)}) == 50


@pytest.mark.slow
async def test_what_runs_or_waits_for_longer_than_the_ack_wait_is_not_given_to_another(
    router: Router, notify: NotifyStep, working: Working, facts: Facts
) -> None:
    @router.agent("mars", ack_wait=2.0)
    async def index(notification: Notification[Any]) -> None:
        await anyio.sleep(3600)

    await notify(0)
    await notify(6)
    async with working(index), working(index):
        settled = await facts.wait_for(Settled, 2)
    assert [(event.outcome, event.num_delivered) for event in settled] == [("acked", 1), ("acked", 1)]


async def test_two_workers_share_what_there_is(
    router: Router, notify: NotifyStep, working: Working, facts: Facts
) -> None:
    running = most_running = 0

    @router.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        nonlocal running, most_running
        running += 1
        most_running = max(most_running, running)
        await anyio.sleep(1)
        running -= 1

    for step in range(20):
        await notify(step)
    async with working(index), working(index):
        await facts.wait_for(Settled, 20)
    assert {event.num_delivered for event in facts.of(Settled)} == {1}
    assert most_running == 2


class Delivery(UnsettledDelivery):
    """One that counts how often it was given back."""

    def __init__(self, sequence: int = 1, *, size: int = 4) -> None:
        self.message = Message(subject="mars.od.6", data=bytes(size), sequence=sequence)
        self.num_delivered = 1
        self.given_back = 0

    def nak(self, *, delay_seconds: float = 0.0) -> None:
        self.given_back += 1


class Discarding:
    """A call form that is done with everything at once."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow

    async def work(self) -> None:
        while (delivery := await self._flow.take()) is not None:
            self._flow.finish(delivery)


def run_of(form: Callable[[Flow], Any]) -> SubscriptionRun:
    clock = LoopClock()
    return run_with(form, clock, Flow(clock, workers=1, least=2))


def run_with(form: Callable[[Flow], Any], clock: Clock, flow: Flow) -> SubscriptionRun:
    return SubscriptionRun(handler=form(flow), flow=flow, clock=clock, ack_wait_seconds=20.0, shield=Shield(clock))


async def test_its_consumer_is_told_when_there_is_room_again() -> None:
    capacity_when_told: list[int] = []
    handled = anyio.Event()

    class Consumer:
        def refill(self) -> None:
            capacity_when_told.append(run.capacity())
            if run.capacity() == 2:
                handled.set()

        async def stop(self) -> None: ...

    run = run_of(Discarding)
    run.flow.attach("MARS", Consumer())  # type: ignore[arg-type]
    stop = anyio.Event()
    run.flow.put(Delivery(1))
    run.flow.put(Delivery(2))
    assert run.capacity() == 0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(run.work, stop=stop, drain_timeout_seconds=1.0))
        await handled.wait()
        stop.set()
    assert capacity_when_told[-1] == 2


async def test_consumer_of_an_agent_that_holds_one_at_a_time_is_asked_again_whenever_one_begins() -> None:
    """However fast they begin: nothing else asks for the next one."""
    began: list[int] = []
    refilled_after: list[int] = []

    class Consumer:
        def refill(self) -> None:
            refilled_after.append(len(began))

        async def stop(self) -> None: ...

    class Counting(Discarding):
        async def work(self) -> None:
            while (delivery := await self._flow.take()) is not None:
                began.append(delivery.message.sequence)
                self._flow.finish(delivery)

    clock = LoopClock()
    run = run_with(Counting, clock, Flow(clock, workers=1, least=1, most=1))
    run.flow.attach("MARS", Consumer())  # type: ignore[arg-type]
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(run.work, stop=stop, drain_timeout_seconds=1.0))
        for sequence in range(1, 401):
            run.flow.put(Delivery(sequence))
            await anyio.sleep(PREFETCH_SECONDS / 50)
        stop.set()
    assert refilled_after == list(range(400)), "a refill before each of them is counted"


class TestStopping:
    async def test_finishes_what_runs_and_gives_back_what_waits(
        self, session: Session, router: Router, notify: NotifyStep, working: Working, facts: Facts
    ) -> None:
        began, end = anyio.Event(), anyio.Event()
        finished: list[str] = []

        @router.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            began.set()
            await end.wait()
            finished.append(notification.identifier["step"])

        for step in range(3):
            await notify(step)
        async with working(index) as stop:
            await began.wait()
            assert len(session.runs["index"].flow) == 2
            stop.set()
            await anyio.sleep(DRAIN_SECONDS / 2)
            assert len(session.runs["index"].flow) == 1
            end.set()
        assert facts.of(AgentStopped) == [AgentStopped(agent="index", finished=1, returned=1)]
        assert finished == ["0"]
        async with working(index):
            await facts.wait_for(Settled, 3)
        assert finished == ["0", "1", "2"]
        assert [event.num_delivered for event in facts.of(Settled)] == [1, 2, 1]

    async def test_cancels_what_still_runs_after_the_drain_timeout_and_gives_it_back(
        self, session: Session, router: Router, notify: NotifyStep, working: Working, facts: Facts
    ) -> None:
        began = anyio.Event()
        cancelled_after: list[float] = []

        @router.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            if notification.num_delivered > 1:
                return
            began.set()
            started = anyio.current_time()
            try:
                await anyio.sleep_forever()
            finally:
                cancelled_after.append(anyio.current_time() - started)

        await notify(0)
        async with working(index) as stop:
            await began.wait()
            stop.set()
        assert [round(seconds, 3) for seconds in cancelled_after] == [DRAIN_SECONDS]
        assert facts.of(AgentStopped) == [AgentStopped(agent="index", finished=0, returned=1)]
        assert facts.of(Settled) == []
        began_again = anyio.current_time()
        async with working(index):
            (settled,) = await facts.wait_for(Settled)
        assert (settled.outcome, settled.num_delivered) == ("acked", 2)
        assert anyio.current_time() - began_again < 1

    async def test_at_once_gives_back_what_runs_and_what_waits(
        self, session: Session, router: Router, notify: NotifyStep, working: Working, facts: Facts
    ) -> None:
        began = anyio.Event()

        @router.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            if notification.num_delivered == 1:
                began.set()
                await anyio.sleep_forever()

        await notify(0)
        await notify(6)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.run_agent, index, anyio.Event())
            await began.wait()
            assert len(session.runs["index"].flow) == 2
            tasks.cancel_scope.cancel()
        began_again = anyio.current_time()
        async with working(index):
            settled = await facts.wait_for(Settled, 2)
        assert [(event.outcome, event.num_delivered) for event in settled] == [("acked", 2), ("acked", 2)]
        assert anyio.current_time() - began_again < 1

    async def test_while_nothing_runs_is_at_once(self, router: Router, working: Working, facts: Facts) -> None:
        @router.agent("mars", concurrency=4)
        async def index(notification: Notification[Any]) -> None: ...

        began = anyio.current_time()
        async with working(index) as stop:
            stop.set()
        assert anyio.current_time() - began < 1
        assert facts.of(AgentStopped) == [AgentStopped(agent="index", finished=0, returned=0)]

    async def test_takes_nothing_more(
        self, session: Session, backend: InMemoryBackend, router: Router, notify: NotifyStep, working: Working
    ) -> None:
        began, end = anyio.Event(), anyio.Event()

        @router.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            began.set()
            await end.wait()

        await notify(0)
        async with working(index) as stop:
            await began.wait()
            stop.set()
            await notify(6)
            await anyio.sleep(1)
            info = await session.consumer_info(index)
            assert (info.num_pending, info.num_ack_pending) == (1, 1)
            end.set()

    async def test_what_arrives_meanwhile_is_given_back(self) -> None:
        """A server may still be sending when it is told to stop."""

        class Refusing(Discarding):
            async def work(self) -> None:
                assert await self._flow.take() is None, "handled after the stop"

        delivery = Delivery()

        class Consumer:
            async def stop(self) -> None:
                run.flow.put(delivery)

        run = run_of(Refusing)
        run.flow.attach("MARS", Consumer())  # type: ignore[arg-type]
        stop = anyio.Event()
        stop.set()
        await run.work(stop=stop, drain_timeout_seconds=1.0)
        assert (delivery.given_back, run.returned, len(run.flow), run.capacity()) == (1, 1, 0, 0)


async def test_a_lane_does_not_overtake_a_head_that_the_drain_timeout_cuts_off(
    router: Router, notify: NotifyStep, working: Working, facts: Facts
) -> None:
    begun: list[str] = []
    running = anyio.Event()

    @router.agent("mars", order_by=("class",))
    async def index(notification: Notification[Any]) -> None:
        begun.append(notification.identifier["step"])
        running.set()
        if notification.num_delivered == 1:
            await anyio.sleep(2 * DRAIN_SECONDS)

    await notify(1)
    await notify(2)
    async with working(index):
        await running.wait()
    assert [event.returned for event in facts.of(AgentStopped)] == [2]
    async with working(index):
        await facts.wait_for(Settled, 2)
    assert begun == ["1", "1", "2"]


async def test_what_it_asks_for_follows_the_pace_at_which_handling_begins() -> None:
    clock = VirtualClock()
    run = run_with(Discarding, clock, Flow(clock, workers=1, least=2))
    flow = run.flow
    numbers = itertools.count(1)

    async def begin(count: int, *, every_seconds: float) -> None:
        for _ in range(count):
            await clock.advance(every_seconds)
            flow.put(Delivery(next(numbers)))
            delivery = await flow.take()
            assert delivery is not None
            flow.finish(delivery)

    assert run.capacity() == 2
    await begin(1000, every_seconds=0.001)
    assert 90 <= run.capacity() <= 110  # a tenth of a second's worth
    await begin(4000, every_seconds=0.00005)
    assert run.capacity() == MAX_PREFETCH
    await begin(200, every_seconds=1.0)
    assert run.capacity() == 2


async def test_more_is_asked_for_when_what_comes_waits_behind_a_retry() -> None:
    clock, asked = LoopClock(), []
    flow = Flow(clock, workers=1, least=2, key=lambda subject: subject)
    flow.attach("MARS", SimpleNamespace(refill=lambda: asked.append("more")))
    head = Delivery(1)
    flow.put(head)
    assert await flow.take() is head
    flow.retry_later(head, after_seconds=60.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(flow.take)
        await anyio.wait_all_tasks_blocked()
        asked.clear()
        flow.put(Delivery(2))
        await anyio.wait_all_tasks_blocked()
        assert asked == ["more"]
        tasks.cancel_scope.cancel()


async def test_no_more_is_asked_for_than_is_gathered() -> None:
    run = run_with(Discarding, LoopClock(), Flow(LoopClock(), workers=1, least=100))
    run.flow.dispatch.gather(3)
    assert run.capacity() == 3


class TestBytes:
    """What waits of an agent is limited in bytes too."""

    @pytest.fixture(autouse=True)
    def small_budget(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(in_flight, "MAX_WAITING_BYTES", 1000)
        monkeypatch.setattr(in_flight, "MAX_STARVED_BYTES", 4000)

    @staticmethod
    def run_with_room_for(count: int) -> SubscriptionRun:
        clock = LoopClock()
        return run_with(Discarding, clock, Flow(clock, workers=1, least=count, key=lambda subject: subject))

    async def test_as_many_are_asked_for_as_fit(self) -> None:
        run = self.run_with_room_for(100)
        assert run.capacity() == 100, "of unknown size"
        run.flow.put(Delivery(1, size=200))
        run.flow.put(Delivery(2, size=100))
        assert run.capacity() == 4, "700 bytes are left, and those that wait have 150 each"
        await run.flow.take()
        assert run.capacity() == 9, "what runs does not count"

    async def test_one_that_is_larger_than_all_that_may_wait_is_handled(self) -> None:
        run = self.run_with_room_for(100)
        large = Delivery(1, size=5000)
        run.flow.put(large)
        assert run.capacity() <= 0
        assert await run.flow.take() is large
        assert run.capacity() == 100

    async def test_what_begins_makes_room_at_once_where_there_was_none(self) -> None:
        clock, asked = LoopClock(), []
        flow = Flow(clock, workers=1, least=100)
        flow.attach("MARS", SimpleNamespace(refill=lambda: asked.append("more")))
        run = run_with(Discarding, clock, flow)
        run.flow.put(Delivery(1, size=1))
        await run.flow.take()
        for sequence in range(2, 7):
            run.flow.put(Delivery(sequence, size=200))
        asked.clear()
        assert run.capacity() <= 0
        await run.flow.take()
        assert asked == ["more"]

    async def test_whatever_begins_makes_room_while_there_is_none(self) -> None:
        clock, asked = LoopClock(), []
        flow = Flow(clock, workers=1, least=100)
        run = run_with(Discarding, clock, flow)
        flow.attach("MARS", SimpleNamespace(refill=lambda: asked.append(run.capacity())))
        for sequence in range(1, 11):
            run.flow.put(Delivery(sequence, size=200))
        assert run.capacity() <= 0
        for begun in range(1, 5):
            await run.flow.take()
            assert len(asked) == begun

    async def test_small_ones_are_limited_by_their_number(self) -> None:
        run = self.run_with_room_for(100)
        run.flow.put(Delivery(1, size=1))
        assert run.capacity() == 99

    async def test_a_worker_is_not_kept_idle_by_what_waits_for_its_retry(self) -> None:
        run = self.run_with_room_for(100)
        head = Delivery(1, size=600)
        run.flow.put(head)
        run.flow.put(Delivery(2, size=600))
        assert await run.flow.take() is head
        run.flow.retry_later(head, after_seconds=60.0)
        assert run.capacity() <= 0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.flow.take)
            await anyio.wait_all_tasks_blocked()
            assert run.capacity() == 4, "2,800 bytes are left, and none of its key can begin before it"
            tasks.cancel_scope.cancel()

    async def test_no_more_wait_than_fit(
        self, session: Session, router: Router, notify: NotifyStep, working: Working
    ) -> None:
        began, end = anyio.Event(), anyio.Event()

        @router.agent("mars", order_by=["step"])
        async def index(notification: Notification[Any]) -> None:
            began.set()
            await end.wait()

        for step in range(20):
            await notify(step, "x" * 200)
        async with working(index):
            await began.wait()
            assert 800 < session.runs["index"].flow.dispatch.waiting_bytes <= 1000
            end.set()


class TestAWorkerThatWasAway:
    """Its clock has moved on by more than `ack_wait` while nothing ran, as after SIGSTOP or a pause of its machine."""

    AWAY_SECONDS = 60.0

    def pause(self) -> None:
        asyncio.get_running_loop()._now_ns += int(self.AWAY_SECONDS * 1e9)  # type: ignore[attr-defined]

    @pytest.mark.parametrize("order_by", [(), ("class",), ("step",)])
    async def test_begins_nothing_that_another_one_may_have_been_given(
        self, router: Router, notify: NotifyStep, working: Working, facts: Facts, order_by: tuple[str, ...]
    ) -> None:
        begun: list[tuple[str, int]] = []

        @router.agent("mars", ack_wait=20.0, order_by=order_by)
        async def index(notification: Notification[Any]) -> None:
            begun.append((notification.identifier["step"], notification.num_delivered))
            if len(begun) == 1:
                await anyio.sleep(0.01)
                self.pause()

        for step in range(4):
            await notify(step)
        async with working(index):
            await facts.wait_for(Settled, 4)
        assert begun[0] == ("0", 1)
        assert ("1", 1) not in begun, "it was held while the worker was away"
        assert sorted(step for step, _ in begun) == ["0", "1", "2", "3"]
        if order_by == ("class",):
            assert [step for step, _ in begun] == ["0", "1", "2", "3"]
        assert len(facts.of(AgentDisturbed)) == 1

    async def test_begins_no_call_with_a_batch_that_it_was_collecting(
        self, router: Router, notify: NotifyStep, working: Working, facts: Facts
    ) -> None:
        begun: list[tuple[str, int]] = []

        @router.agent("mars", ack_wait=20.0, batch=Batching(size=10, within=5.0))
        async def load(batch: Batch[Any]) -> None:
            begun.extend((notification.identifier["step"], notification.num_delivered) for notification in batch)

        await notify(0)
        async with working(load):
            await anyio.sleep(1.0)
            self.pause()
            await facts.wait_for(Settled)
        assert [step for step, _ in begun] == ["0"]
        assert begun[0][1] > 1, "it was given to somebody else meanwhile"

    async def test_goes_on_where_it_was_away_for_less_than_ack_wait(
        self, router: Router, notify: NotifyStep, working: Working, facts: Facts
    ) -> None:
        @router.agent("mars", ack_wait=120.0)
        async def index(notification: Notification[Any]) -> None:
            await anyio.sleep(1.0)
            self.pause()

        await notify(0)
        await notify(6)
        async with working(index):
            settled = await facts.wait_for(Settled, 2)
        assert [event.num_delivered for event in settled] == [1, 1]
        assert facts.of(AgentDisturbed) == []

    @pytest.mark.slow
    async def test_and_is_connected_begins_what_waits_however_long(
        self, router: Router, notify: NotifyStep, working: Working, facts: Facts
    ) -> None:
        @router.agent("mars", ack_wait=1.0)
        async def index(notification: Notification[Any]) -> None:
            await anyio.sleep(3600.0)

        await notify(0)
        await notify(6)
        async with working(index):
            settled = await facts.wait_for(Settled, 2)
        assert [event.num_delivered for event in settled] == [1, 1]

    async def test_from_its_server_begins_nothing_that_waited_before(
        self, backend: InMemoryBackend, router: Router, notify: NotifyStep, working: Working, facts: Facts
    ) -> None:
        """Without a confirmed report, however well its clock runs."""
        begun: list[tuple[str, int]] = []

        @router.agent("mars", ack_wait=20.0)
        async def index(notification: Notification[Any]) -> None:
            begun.append((notification.identifier["step"], notification.num_delivered))
            if len(begun) == 1:
                await anyio.sleep(0.01)
                backend.connection.lose("cut off")
                await anyio.sleep(self.AWAY_SECONDS)
                backend.connection.open()

        await notify(0)
        await notify(6)
        async with working(index):
            await facts.wait_for(Settled, 2)
        assert begun[0] == ("0", 1)
        assert ("6", 1) not in begun

    async def test_and_has_a_singleton_goes_on_where_it_was_away_for_less_than_ack_wait(
        self, router: Router, notify: NotifyStep, working: Working, facts: Facts
    ) -> None:
        """It reports more often than others, and that is no reason to leave sooner."""

        @router.agent("mars", ack_wait=120.0, singleton=True)
        async def index(notification: Notification[Any]) -> None:
            await anyio.sleep(1.0)
            self.pause()

        await notify(0)
        async with working(index):
            await facts.wait_for(Settled)
            await anyio.sleep(10.0)
        assert facts.of(AgentDisturbed) == []


async def test_what_is_held_is_reported_at_once_where_it_has_to_be_reported_more_often() -> None:
    reported: list[float] = []

    class Reporting(Delivery):
        def in_progress(self) -> None:
            reported.append(anyio.current_time())

    class Waiting(Discarding):
        async def work(self) -> None:
            await anyio.sleep_forever()

    run, stop = run_of(Waiting), anyio.Event()
    run.flow.put(Reporting())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(run.work, stop=stop, drain_timeout_seconds=0.0))
        await anyio.wait_all_tasks_blocked()
        began = anyio.current_time()
        run.report_within(3.0)
        await anyio.sleep(2.5)
        assert [round(time - began) for time in reported] == [0, 1, 2]
        stop.set()


async def test_what_waits_is_trusted_from_when_its_report_was_sent_and_not_from_when_it_was_confirmed() -> None:
    class Consumer:
        confirmed = 0

        def refill(self) -> None: ...

        async def stop(self) -> None: ...

        async def reached(self) -> None:
            if self.confirmed:
                raise UnavailableError("no answer")
            self.confirmed += 1
            await anyio.sleep(3.0)

    class Reported(Delivery):
        def in_progress(self) -> None: ...

    class Waiting(Discarding):
        async def work(self) -> None:
            await anyio.sleep_forever()

    run, stop = run_of(Waiting), anyio.Event()  # an ack_wait of 20 s, and so a report every 20 / 3
    run.begin_reading()
    run.flow.attach("MARS", Consumer())  # type: ignore[arg-type]
    run.flow.put(Reported())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(run.work, stop=stop, drain_timeout_seconds=0.0))
        await anyio.sleep(20 / 3 + 19.5)
        assert run.flow.trusted
        await anyio.sleep(1.0)
        assert not run.flow.trusted
        stop.set()


async def test_what_comes_while_a_consumer_is_opened_again_is_handled_although_the_worker_was_away() -> None:
    consumer = SimpleNamespace(refill=lambda: None)
    clock = LoopClock()
    run = run_with(Discarding, clock, Flow(clock, workers=1, least=2))
    run.begin_reading()
    run.flow.attach("MARS", consumer)
    await anyio.sleep(20.0)
    run.flow.put(Delivery(1))
    with anyio.move_on_after(1.0):
        await run.flow.take()
    assert run.flow.lapses == 1
    run.detach("MARS")
    run.begin_reading()
    run.flow.put(Delivery(2))  # before the consumer is attached
    delivery = await run.flow.take()
    assert delivery is not None
    assert delivery.message.sequence == 2


async def test_what_comes_from_before_a_worker_was_away_is_left_to_others(
    session: Session,
    router: Router,
    notify: NotifyStep,
    working: Working,
    facts: Facts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @router.agent("mars")
    async def index(notification: Notification[Any]) -> None: ...

    delivers: list[Callable[[Sequence[Any]], None]] = []
    consume = session.backend.consume

    def noting(*of: Any, **stated: Any) -> Any:
        delivers.append(stated["deliver"])
        return consume(*of, **stated)

    monkeypatch.setattr(session.backend, "consume", noting)
    await notify(0)
    async with working(index):
        await facts.wait_for(Settled)
        flow = session.runs["index"].flow
        flow.lapse()
        for deliver in tuple(delivers):
            deliver([Delivery(7)])
        assert flow.delivery_of(7) is None
        await notify(1)
        await facts.wait_for(Settled, 2)
    assert len(delivers) > 2, "its consumers were opened again"
