"""Deliveries that are not the first of their notification: which of them run, run alone, and end with their worker."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from msgspec import structs

from aviso_workers import Notification, RetryPolicy, Router, config
from aviso_workers.aviso.codec import SIZE_HEADER
from aviso_workers.backends import Delivery, Message, PubAck
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.declare.verdicts import Failure
from aviso_workers.engine import acknowledging
from aviso_workers.engine.acknowledging import Settler
from aviso_workers.engine.attempts import Failures
from aviso_workers.engine.dead_letter_store import DeadLetterStore
from aviso_workers.engine.decisions import Decisions
from aviso_workers.engine.failure_recorder import LastFailures
from aviso_workers.engine.flow import ALONE_SECONDS, Flow, Isolation
from aviso_workers.engine.outages import Outage
from aviso_workers.engine.pace import Pace
from aviso_workers.engine.redeliveries import Redeliveries
from aviso_workers.engine.repeats import Repeats
from aviso_workers.engine.shields import Shield
from aviso_workers.errors import UnavailableError
from aviso_workers.events import NotReadAgain, ReadAgain, Settled
from aviso_workers.jetstream.specs import StreamSpec
from tests.deliveries import UnsettledDelivery
from tests.engine.conftest import Facts, config_with

pytestmark = pytest.mark.anyio

PATIENCE_SECONDS = 3600.0
SLOW_SECONDS = 2.0
"""How long a slow server takes: longer than the handlers of a test run, shorter than settlements are shielded."""


class SlowBackend(InMemoryBackend):
    """Takes a while to store and to tell what is known of failures, as it is told."""

    seconds = 0.0

    async def publish(self, message: Message, *, stream: str, **stated: Any) -> PubAck:
        if stream.endswith("_failures"):
            await anyio.sleep(self.seconds)
        return await super().publish(message, stream=stream, **stated)

    async def message(self, stream: str, sequence: int = 0, **which: str) -> Message | None:
        if "last_by_subject" in which:
            await anyio.sleep(self.seconds)
        return await super().message(stream, sequence, **which)


@pytest.fixture
async def backend() -> AsyncGenerator[SlowBackend, None]:
    async with SlowBackend(config.InMemory()) as backend:
        yield backend


class Delivered(UnsettledDelivery):
    """A delivery that notes how it was settled."""

    held = True

    def __init__(self, sequence: int, *, num_delivered: int = 3, timestamp_ns: int = 1) -> None:
        self.message = Message(subject=f"mars.{sequence}", data=b"null", sequence=sequence, timestamp_ns=timestamp_ns)
        self.num_delivered = num_delivered
        self.settled: list[str] = []

    def ack(self) -> None:
        self.settled.append("ack")

    def nak(self, *, delay_seconds: float = 0.0) -> None:
        self.settled.append("nak")

    def term(self, reason: str) -> None:
        self.settled.append(f"term {reason}")


Suspect = Callable[[int], Awaitable[Delivered]]


class Worker:
    """What a worker process has for one agent, without the call form: the test takes deliveries from the flow."""

    def __init__(
        self,
        backend: InMemoryBackend,
        facts: Facts,
        *,
        ordered: bool = False,
        concurrency: int = 1,
        isolation: Isolation | None = None,
        **of_flow: Any,
    ) -> None:
        @Router("tests").agent(
            "mars", concurrency=concurrency, retry=RetryPolicy(attempts=3, first=1.0, factor=1.0, jitter=0.0)
        )
        async def index(notification: Notification[Any]) -> None: ...

        clock = backend.clock
        self.isolation = isolation or Isolation(clock)
        key = str if ordered else None
        self.flow = Flow(clock, workers=1, least=1, key=key, isolation=self.isolation, **of_flow)
        self.failures = self.failures_of_another(backend, facts)
        decisions = Decisions(backend, app="tests", agent="index", stream="MARS", flow=self.flow)
        shield = Shield(clock)
        settings = config_with()
        provisioner = Provisioner(backend, management="reconcile", events=facts.events)
        self.settler = Settler(
            index,
            stream="MARS",
            flow=self.flow,
            repeats=Repeats(backend, stream="MARS", consumer="index"),
            failures=self.failures,
            decisions=decisions,
            dead_letters=DeadLetterStore(backend, app="tests", config=settings, provisioner=provisioner),
            last_failures=LastFailures(backend, app="tests"),
            shield=shield,
            outage=Outage(index.dependency, declared=False, clock=clock, events=facts.events),
            clock=clock,
            events=facts.events,
        )
        self.redeliveries = Redeliveries(backend=backend, settler=self.settler, isolation=self.isolation)

    @staticmethod
    def failures_of_another(backend: InMemoryBackend, facts: Facts) -> Failures:
        return Failures(
            backend, app="tests", agent="index", stream="MARS", shield=Shield(backend.clock), events=facts.events
        )

    @asynccontextmanager
    async def deciding(self) -> AsyncIterator[None]:
        """What is delivered again is decided upon in the block, and until the flow is closed."""
        with anyio.fail_after(PATIENCE_SECONDS):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.redeliveries.work)
                yield


@pytest.fixture
def worker(backend: SlowBackend, facts: Facts) -> Callable[..., Worker]:
    return lambda **stated: Worker(backend, facts, **stated)


@pytest.fixture
def suspect(backend: SlowBackend, facts: Facts) -> Suspect:
    """`await suspect(1)`: a delivery of what ran when its last worker ended."""

    async def suspect(sequence: int) -> Delivered:
        delivery = Delivered(sequence)
        await Worker.failures_of_another(backend, facts).begin(delivery, alone=False)
        return delivery

    return suspect


async def began(worker: Worker, backend: SlowBackend, facts: Facts, delivery: Delivery) -> str | None:
    """Which record there is that its handler begins."""
    return (await worker.failures_of_another(backend, facts).read(delivery)).began


async def test_one_that_waits_for_others_to_end_does_not_keep_its_worker_from_stopping(
    worker: Callable[..., Worker], suspect: Suspect
) -> None:
    here, running = worker(ordered=True), Delivered(1, num_delivered=1)
    here.flow.put(running)
    async with here.deciding():
        assert await here.flow.take() is running
        here.flow.put(await suspect(2))
        await anyio.wait_all_tasks_blocked()
        here.flow.close()
        here.flow.finish(running)
    assert here.isolation.alone is None


async def test_one_that_nobody_has_taken_yet_does_not_keep_its_worker_from_stopping(
    backend: SlowBackend, facts: Facts, worker: Callable[..., Worker], suspect: Suspect
) -> None:
    here, delivery = worker(ordered=True), await suspect(1)
    async with here.deciding():
        here.flow.put(delivery)
        await anyio.wait_all_tasks_blocked()
        assert here.isolation.alone is delivery
        here.flow.close()
    assert await began(here, backend, facts, delivery) is None, "it did not begin, and would count as a failure"


async def test_one_that_was_given_back_while_another_ran_alone_does_not_keep_others_from_running_alone(
    worker: Callable[..., Worker], suspect: Suspect
) -> None:
    here = worker()
    first, second, third = [await suspect(sequence) for sequence in (1, 2, 3)]
    async with here.deciding():
        here.flow.put(first)
        assert first is await here.flow.take()
        here.flow.put(second)
        await anyio.wait_all_tasks_blocked()
        acknowledging.give_back(here.flow.withdraw())
        here.flow.put(third)
        here.flow.finish(first)
        assert third is await here.flow.take()
        here.flow.finish(third)
        here.flow.close()
    assert second.settled == ["nak"]


async def test_others_begin_again_after_seconds_while_one_runs_alone(
    worker: Callable[..., Worker], suspect: Suspect
) -> None:
    here, other = worker(), Delivered(2, num_delivered=1)
    alone, next_one = await suspect(1), await suspect(3)
    async with here.deciding():
        here.flow.put(alone)
        assert alone is await here.flow.take()
        here.flow.put(other)
        since = anyio.current_time()
        assert await here.flow.take() is other
        assert anyio.current_time() - since == pytest.approx(ALONE_SECONDS)
        here.flow.finish(other)
        assert here.flow.dispatch.begin(anyio.current_time()) is None
        here.flow.finish(alone)
        here.flow.put(next_one)
        assert await here.flow.take() is next_one, "also one that is to run alone"
        here.flow.finish(next_one)
        here.flow.close()


async def test_one_that_waits_for_others_begins_after_seconds_although_they_run(
    worker: Callable[..., Worker], suspect: Suspect
) -> None:
    here, running = worker(), Delivered(1, num_delivered=1)
    alone = await suspect(2)
    here.flow.put(running)
    async with here.deciding():
        assert await here.flow.take() is running
        here.flow.put(alone)
        assert alone is await here.flow.take()
        here.flow.finish(alone)
        here.flow.close()


class Refusing:
    """A limit that lets nothing begin until it is told to."""

    refuses = True

    def gate(self, delivery: Delivery) -> str:
        return ""

    def admits(self, delivery: Delivery, now: float) -> bool:
        return not self.refuses

    def take_back(self, delivery: Delivery) -> None: ...

    def release(self, delivery: Delivery) -> None: ...

    def wait(self, key: str) -> None: ...


async def test_one_that_a_limit_holds_lets_others_run_alone_and_then_runs_alone(
    worker: Callable[..., Worker], suspect: Suspect
) -> None:
    limit = Refusing()
    here = worker(limits=[limit])
    held, other = await suspect(1), await suspect(2)
    async with here.deciding():
        here.flow.put(held)
        with anyio.move_on_after(1.0):
            await here.flow.take()
        limit.refuses = False
        here.flow.put(other)
        assert await here.flow.take() is other
        assert here.flow.alone(other)
        here.flow.dispatch.open(limit, "", 1, anyio.current_time())
        here.flow.wake()
        here.flow.finish(other)
        assert await here.flow.take() is held
        assert here.flow.alone(held)
        here.flow.finish(held)
        here.flow.close()


async def test_one_whose_pace_is_closed_for_long_lets_others_run_alone(
    worker: Callable[..., Worker], suspect: Suspect
) -> None:
    pace = Pace(running=lambda: (0, 0), tell=lambda: None)
    here = worker(pace=pace)
    there = worker(isolation=here.isolation)
    held, other = await suspect(1), await suspect(2)
    pace.close(anyio.current_time() + 3600.0)
    async with here.deciding(), there.deciding():
        here.flow.put(held)
        await anyio.wait_all_tasks_blocked()
        assert here.isolation.alone is None
        there.flow.put(other)
        assert await there.flow.take() is other
        there.flow.finish(other)
        pace.reset()
        assert await here.flow.take() is held
        assert here.flow.alone(held)
        here.flow.finish(held)
        here.flow.close()
        there.flow.close()


async def test_a_taker_that_is_cancelled_while_the_beginning_is_recorded_has_what_it_takes(
    backend: SlowBackend, worker: Callable[..., Worker]
) -> None:
    """One that fills a batch waits for the next only so long; else it would be held, and handled by nobody."""
    here, delivery = worker(), Delivered(1)
    taken: Any = None
    async with here.deciding():
        here.flow.put(delivery)
        await anyio.wait_all_tasks_blocked()
        backend.seconds = SLOW_SECONDS
        with anyio.move_on_after(SLOW_SECONDS / 2):
            taken = await here.flow.take()
        assert taken is delivery
        here.flow.close()


async def test_what_was_given_back_while_it_was_looked_up_is_not_settled_as_well(
    backend: SlowBackend, facts: Facts, worker: Callable[..., Worker]
) -> None:
    here, delivery = worker(), Delivered(1)
    await here.failures_of_another(backend, facts).begin(delivery, alone=True)
    backend.seconds = SLOW_SECONDS
    async with here.deciding():
        here.flow.put(delivery)
        await anyio.sleep(SLOW_SECONDS / 2)
        here.flow.close()
        acknowledging.give_back(here.flow.withdraw())
    assert delivery.settled == ["nak"]
    assert facts.of(Settled) == []
    assert await began(here, backend, facts, delivery) == "alone"


async def test_what_is_offered_after_the_line_was_closed_is_not_decided_upon(worker: Callable[..., Worker]) -> None:
    here, delivery = worker(), Delivered(1)
    here.flow.close()
    here.flow.put(delivery)
    assert await here.flow.take_redelivered() is None


@pytest.mark.parametrize("settle", ["acked", "failed", "passed over"])
async def test_what_was_given_back_while_it_ran_is_not_settled_as_well(
    facts: Facts, worker: Callable[..., Worker], settle: str
) -> None:
    here, delivery = worker(), Delivered(1, num_delivered=1)
    here.flow.put(delivery)
    await here.flow.take()
    acknowledging.give_back(here.flow.withdraw(running=True))
    if settle == "passed over":
        await here.settler.ack_unmatched(delivery)
    else:
        failure = None if settle == "acked" else Failure(ValueError("no"))
        await here.settler.settle(delivery, failure, started=0.0)
    assert delivery.settled == ["nak"]
    assert facts.of(Settled) == []


async def test_the_wait_of_what_is_away_grows_only_where_something_has_succeeded_since(
    worker: Callable[..., Worker],
) -> None:
    here, failing, other = worker(), Delivered(1, num_delivered=1), Delivered(2, num_delivered=1)
    waits: list[int] = []

    async def fail_once_more() -> None:
        known = failing.record
        here.flow.put(failing)
        assert await here.flow.take() is failing
        failing.record = known
        await here.settler.settle(failing, Failure(ConnectionRefusedError()), started=0.0)
        waits.append(failing.record.waits)

    await fail_once_more()
    await fail_once_more()
    here.flow.put(other)
    assert await here.flow.take() is other
    assert here.settler.succeeded(other, started=0.0)
    await fail_once_more()
    assert waits == [1, 1, 2]


async def test_what_was_left_to_others_is_asked_for_again_once(worker: Callable[..., Worker]) -> None:
    class Left(Delivered):
        def redeliver(self) -> None:
            self.settled.append("asked for again")

    here, failing, left = worker(), Delivered(1, num_delivered=1), Left(2, num_delivered=1)
    here.flow.put(failing)
    assert await here.flow.take() is failing
    here.flow.put(left)
    here.settler.outage.pace.shut(anyio.current_time())
    await here.settler.settle(failing, Failure(ConnectionRefusedError()), started=0.0)
    here.settler.call_back()
    here.settler.call_back()
    assert left.settled == ["nak", "asked for again"]


@pytest.mark.slow
async def test_the_failures_of_however_many_that_wait_in_order_are_remembered(
    facts: Facts, worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay in the flow while they wait for their retry."""
    monkeypatch.setattr(Failures, "_write", stored_at_once)
    here, many = worker(ordered=True), 10_100
    for number in range(1, many + 1):
        here.flow.put(Delivered(number, num_delivered=1))
    async with anyio.create_task_group() as tasks:
        for delivery in [await here.flow.take() for _ in range(many)]:
            tasks.start_soon(fail, here, delivery)
    async with here.deciding():
        for delivery in [await here.flow.take() for _ in range(many)]:
            if delivery is not None and delivery.message.sequence <= 100:
                await fail(here, delivery)
        here.flow.close()
    assert {settled.attempt for settled in facts.of(Settled)[-100:]} == {2}


@pytest.mark.slow
async def test_the_failures_of_however_many_that_are_in_one_batch_are_remembered(
    backend: SlowBackend, facts: Facts, worker: Callable[..., Worker]
) -> None:
    """All of them are taken before the first of them is settled."""
    here, many = worker(), 10_100
    bucket = await backend.key_value("tests__failures")
    await bucket.put_many({f"index.MARS.{number}.1": b"1" for number in range(1, many + 1)})
    async with here.deciding():
        for number in range(1, many + 1):
            here.flow.put(Delivered(number, num_delivered=2))
        batch = [await here.flow.take() for _ in range(many)]
        for delivery in batch[:100]:
            await fail(here, delivery)
        here.flow.close()
    assert {settled.attempt for settled in facts.of(Settled)} == {2}


async def stored_at_once(*_: object) -> bool:
    return True


async def fail(worker: Worker, delivery: Delivery | None) -> None:
    assert delivery is not None
    await worker.settler.settle(delivery, Failure(ValueError()), started=0.0)


def of_one_key(sequence: int) -> Delivered:
    delivery = Delivered(sequence, num_delivered=2)
    delivery.message = structs.replace(delivery.message, subject="mars.one")
    return delivery


@pytest.mark.parametrize("comes", ["at once", "while the record is read"])
async def test_of_two_redeliveries_of_a_key_the_earlier_one_begins_first_in_whatever_order_they_come(
    backend: SlowBackend, worker: Callable[..., Worker], comes: str
) -> None:
    here = worker(ordered=True)
    backend.seconds = SLOW_SECONDS
    later, earlier = of_one_key(6), of_one_key(5)
    async with here.deciding():
        here.flow.put(later)
        if comes == "while the record is read":
            await anyio.sleep(SLOW_SECONDS / 2)
        here.flow.put(earlier)
        for expected in (earlier, later):
            assert await here.flow.take() is expected
            here.flow.finish(expected)
        assert not here.flow.dispatch.may_begin(), "each is handed out once"
        here.flow.close()


async def test_a_redelivery_that_is_next_again_before_its_record_is_read_begins_once(
    backend: SlowBackend, worker: Callable[..., Worker]
) -> None:
    here = worker(ordered=True)
    backend.seconds = SLOW_SECONDS
    later, earlier = of_one_key(6), of_one_key(5)
    async with here.deciding():
        here.flow.put(later)
        await anyio.sleep(SLOW_SECONDS / 2)
        here.flow.put(earlier)
        here.flow.finish(earlier)
        assert await here.flow.take() is later
        await anyio.sleep(2 * SLOW_SECONDS)
        assert not here.flow.dispatch.may_begin()
        here.flow.close()


async def test_one_that_waits_to_run_alone_goes_behind_an_earlier_one_of_its_key(
    backend: SlowBackend, facts: Facts, worker: Callable[..., Worker]
) -> None:
    """And runs alone after it, because what is known against it is not lost."""
    here, running = worker(ordered=True), Delivered(1, num_delivered=1)
    later, earlier = of_one_key(6), of_one_key(5)
    later.num_delivered = 3
    await here.failures_of_another(backend, facts).begin(later, alone=False)
    here.flow.put(running)
    async with here.deciding():
        assert await here.flow.take() is running
        here.flow.put(later)
        await anyio.wait_all_tasks_blocked()
        assert here.isolation.alone is later
        here.flow.put(earlier)
        here.flow.finish(running)
        assert await here.flow.take() is earlier
        await anyio.wait_all_tasks_blocked()
        assert not here.flow.dispatch.may_begin(), "the two of one key would run at the same time"
        here.flow.finish(earlier)
        assert await here.flow.take() is later
        assert here.isolation.alone is later
        here.flow.finish(later)
        here.flow.close()


class Unreadable(SlowBackend):
    """Answers no request for a message of the stream while `silent`."""

    silent = False

    async def message(self, stream: str, sequence: int = 0, **which: str) -> Message | None:
        if self.silent:
            raise UnavailableError("no answer")
        return await super().message(stream, sequence, **which)


class TestAMessageWhoseBodyWasLeftOut:
    @pytest.fixture
    async def backend(self) -> AsyncGenerator[Unreadable, None]:
        async with Unreadable(config.InMemory()) as backend:
            yield backend

    @pytest.fixture
    async def here(self, worker: Callable[..., Worker]) -> Worker:
        """A worker that holds one, because somebody has edited the consumer to deliver headers only."""
        here, delivery = worker(ordered=True), Delivered(1, num_delivered=1)
        delivery.message = structs.replace(delivery.message, data=b"", headers={SIZE_HEADER: "4"})
        here.flow.put(delivery)
        return here

    async def test_is_not_mistaken_for_another_one_of_its_sequence(self, backend: Unreadable, here: Worker) -> None:
        """Its stream was deleted and recreated."""
        await backend.create_stream(StreamSpec(name="MARS", subjects=("mars.>",)))
        other = Message(subject="mars.1", data=b"other")
        await backend.publish(other, message_id="other", stream="MARS", timeout_seconds=1.0)
        delivery: Any = here.flow.delivery_of(1)
        async with here.deciding():
            await anyio.sleep(2.0)
            here.flow.close()
        assert delivery.settled == ["nak"]
        assert len(here.flow) == 0

    async def test_and_cannot_be_read_is_told_until_nothing_has_to_be_read_any_more(
        self, backend: Unreadable, here: Worker, facts: Facts
    ) -> None:
        backend.silent = True
        async with here.deciding():
            await facts.wait_for(NotReadAgain)
            await anyio.sleep(10.0)
            here.flow.withdraw(running=True)
            await facts.wait_for(ReadAgain)
            here.flow.close()
        assert (len(facts.of(NotReadAgain)), len(facts.of(ReadAgain))) == (1, 1)


@pytest.mark.parametrize(("num_pending", "concurrency", "later"), [(0, 1, False), (5, 1, True), (5, 4, False)])
async def test_retries_are_later_where_they_would_take_more_than_their_share_while_something_new_waits(
    facts: Facts, worker: Callable[..., Worker], num_pending: int, concurrency: int, later: bool
) -> None:
    """Each handler takes a second; four side by side take a quarter of their worker's time each."""
    here = worker(concurrency=concurrency)
    for sequence in range(1, 11):
        delivery = Delivered(sequence, num_delivered=1)
        delivery.num_pending = num_pending
        here.flow.put(delivery)
        assert await here.flow.take() is delivery
        await anyio.sleep(1.0)
        started = anyio.current_time() - 1.0
        await here.settler.settle(delivery, Failure(ValueError()), started=started)
    delays = [settled.again_in_seconds for settled in facts.of(Settled)]
    assert delays[0] == pytest.approx(1.0)
    assert (max(delays) > 5.0) == later, delays
