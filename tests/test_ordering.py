"""In which order the deliveries that a worker holds begin, and how long each waited for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from msgspec import structs

from aviso_workers.aviso.codec import Message
from aviso_workers.clocks import VirtualClock
from aviso_workers.engine import acknowledging
from aviso_workers.engine.flow import KEY_PREFETCH, Flow
from tests.deliveries import UnsettledDelivery

pytestmark = pytest.mark.anyio


class Held(UnsettledDelivery):
    """A delivery; its subject is its ordering key."""

    given_back = False

    def __init__(self, sequence: int, key: str) -> None:
        self.message = Message(subject=key, data=b"null", sequence=sequence)

    def nak(self, *, delay_seconds: float = 0.0) -> None:
        self.given_back = True


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def flow_of(clock: VirtualClock) -> Callable[..., tuple[Flow, list[Any]]]:
    """`flow_of("a", "b", ordered=True)`: a flow that just got deliveries for these keys, and them."""

    def flow_of(*keys: str, ordered: bool) -> tuple[Flow, list[Any]]:
        flow = Flow(clock, workers=1, least=1, key=str) if ordered else Flow(clock, workers=1, least=1)
        deliveries = [Held(sequence, key) for sequence, key in enumerate(keys, start=1)]
        for delivery in deliveries:
            flow.put(delivery)
        return flow, deliveries

    return flow_of


async def test_what_is_taken_at_once_has_not_waited(flow_of: Callable[..., Any]) -> None:
    flow, (delivery,) = flow_of("a", ordered=False)
    assert await flow.take() is delivery
    assert flow.waited_seconds(delivery) == 0


async def test_it_waits_for_somebody_who_takes_it(flow_of: Callable[..., Any], clock: VirtualClock) -> None:
    flow, (delivery,) = flow_of("a", ordered=False)
    await clock.advance(3)
    await flow.take()
    await clock.advance(5)
    assert flow.waited_seconds(delivery) == 3


async def test_it_waits_for_what_is_before_it_in_its_lane(flow_of: Callable[..., Any], clock: VirtualClock) -> None:
    flow, (first, behind, other) = flow_of("a", "a", "b", ordered=True)
    assert [await flow.take(), await flow.take()] == [first, other]
    await clock.advance(7)
    flow.finish(first)
    assert await flow.take() is behind
    assert [flow.waited_seconds(each) for each in (behind, other)] == [7, 0]


async def test_the_pause_before_another_attempt_is_no_waiting(flow_of: Callable[..., Any], clock: VirtualClock) -> None:
    flow, (delivery,) = flow_of("a", ordered=True)
    await flow.take()
    flow.retry_later(delivery, after_seconds=10)
    await clock.advance(12)
    await flow.take()
    assert flow.waited_seconds(delivery) == 2


async def test_what_is_done_is_forgotten(flow_of: Callable[..., Any], clock: VirtualClock) -> None:
    flow, (delivery,) = flow_of("a", ordered=False)
    await clock.advance(3)
    await flow.take()
    flow.finish(delivery)
    assert (flow.running, len(flow), flow.waited_seconds(delivery)) == (0, 0, None)


async def test_what_is_delivered_again_while_it_is_held_is_settled_by_the_older_delivery(
    flow_of: Callable[..., Any],
) -> None:
    flow, (older,) = flow_of("a", ordered=False)
    flow.put(Held(1, "a"))
    assert (len(flow), flow.delivery_of(1)) == (1, older)
    assert await flow.take() is older
    flow.put(Held(1, "a"))
    assert (flow.running, flow.holds(older)) == (1, True)
    flow.finish(older)
    assert (len(flow), flow.running) == (0, 0)


class TickingClock(VirtualClock):
    """A millisecond passes whenever somebody looks."""

    def monotonic(self) -> float:
        self._now += 0.001
        return self._now


async def test_what_comes_together_is_put_as_each_by_itself(clock: VirtualClock) -> None:
    together, apart = Flow(clock, workers=1, least=1), Flow(clock, workers=1, least=1)
    for flow in (together, apart):
        deliveries = [Held(sequence, "a") for sequence in (1, 2, 2, 3)]
        if flow is together:
            flow.put_all(deliveries)
        else:
            for delivery in deliveries:
                flow.put(delivery)
    for flow in (together, apart):
        assert (len(flow), len(flow.dispatch.ready), flow.dispatch.waiting_bytes) == (3, 3, 12)


async def test_what_is_ready_is_taken_without_waiting(clock: VirtualClock) -> None:
    flow = Flow(clock, workers=1, least=1)
    first, second = Held(1, "a"), Held(2, "a")
    flow.put_all([first, second])
    assert flow.take_now() is None, "a turn begins where somebody asks who may wait"
    assert await flow.take() is first
    assert flow.take_now() is second
    assert flow.take_now() is None


async def test_nothing_is_taken_without_waiting_that_another_worker_may_have(clock: VirtualClock) -> None:
    flow = Flow(clock, workers=1, least=1)
    flow.put_all([Held(1, "a"), Held(2, "a")])
    await flow.take()
    flow.trust_until(clock.monotonic())
    assert flow.take_now() is None


async def test_who_takes_without_waiting_lets_others_have_a_turn() -> None:
    flow = Flow(TickingClock(), workers=1, least=1)
    flow.put_all([Held(sequence, "a") for sequence in range(1, 1001)])
    await flow.take()
    taken = 0
    while flow.take_now():
        taken += 1
    assert 0 < taken < 100


async def test_who_never_waits_lets_others_have_a_turn() -> None:
    flow = Flow(TickingClock(), workers=1, least=1)
    for sequence in range(1, 1001):
        flow.put(Held(sequence, "a"))
    turns_of_another = 0

    async def take_turns() -> None:
        nonlocal turns_of_another
        while len(flow):
            turns_of_another += 1
            await checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take_turns)
        while len(flow):
            delivery = await flow.take()
            assert delivery is not None
            flow.finish(delivery)

    assert turns_of_another > 100


async def test_all_who_are_idle_come_where_there_is_work_for_all() -> None:
    flow = Flow(VirtualClock(), workers=1, least=1)
    working, most = 0, 0
    release = anyio.Event()

    async def work() -> None:
        nonlocal working, most
        while (delivery := await flow.take()) is not None:
            working += 1
            most = max(most, working)
            await release.wait()
            working -= 1
            flow.finish(delivery)

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(work)
        await anyio.wait_all_tasks_blocked()
        for sequence in range(1, 21):
            flow.put(Held(sequence, "a"))
        await anyio.wait_all_tasks_blocked()
        assert most == 8
        release.set()
        await anyio.wait_all_tasks_blocked()
        assert len(flow) == 0
        flow.close()


async def test_what_is_there_is_taken_also_where_one_whose_turn_it_was_is_cancelled() -> None:
    flow = Flow(VirtualClock(), workers=1, least=1)
    taken: list[Any] = []

    async def take(scope: anyio.CancelScope) -> None:
        with scope:
            taken.append(await flow.take())

    first, second = anyio.CancelScope(), anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take, first)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(take, second)
        await anyio.wait_all_tasks_blocked()
        flow.put(Held(1, "a"))
        first.cancel()
        await anyio.wait_all_tasks_blocked()
        flow.close()

    assert [delivery.message.sequence for delivery in taken if delivery] == [1]


async def test_what_comes_while_one_that_waits_is_being_cancelled_is_taken_by_another() -> None:
    flow = Flow(VirtualClock(), workers=1, least=1)
    taken: list[Any] = []

    async def take(scope: anyio.CancelScope) -> None:
        with scope:
            taken.append(await flow.take())

    first, second = anyio.CancelScope(), anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        for scope in (first, second):
            tasks.start_soon(take, scope)
            await anyio.wait_all_tasks_blocked()
        first.cancel()
        flow.put(Held(1, "a"))  # it is the turn of the first, which does not come any more
        await anyio.wait_all_tasks_blocked()
        flow.close()

    assert [delivery.message.sequence for delivery in taken if delivery] == [1]


async def taken_from(flow: Flow, count: int) -> list[int]:
    """The sequences of the next deliveries, each of them done before the next is taken."""
    sequences = []
    for _ in range(count):
        delivery = await flow.take()
        assert delivery is not None
        sequences.append(delivery.message.sequence)
        flow.finish(delivery)
    return sequences


class Again(Held):
    """One that a server delivers again."""

    num_delivered = 2
    can_be_read_again = True


class Fresh(Held):
    """One that comes for the first time."""

    can_be_read_again = True


class TestWhatComesOutOfOrder:
    @pytest.fixture
    def flow(self, clock: VirtualClock) -> Flow:
        return Flow(clock, workers=1, least=1, key=str)

    async def test_takes_its_place_in_its_lane(self, flow: Flow) -> None:
        for sequence in (1, 5, 9, 3, 7):
            flow.put(Held(sequence, "a"))
        assert await taken_from(flow, 5) == [1, 3, 5, 7, 9]

    async def test_goes_before_a_head_that_waits_for_a_worker(self, flow: Flow) -> None:
        flow.put(Held(5, "a"))
        flow.put(Held(6, "b"))
        flow.put(Held(3, "a"))
        assert await taken_from(flow, 3) == [6, 3, 5]

    async def test_goes_after_a_head_that_runs(self, flow: Flow) -> None:
        flow.put(Held(5, "a"))
        head = await flow.take()
        assert head is not None
        flow.put(Held(3, "a"))
        assert not flow.dispatch.may_begin()
        flow.finish(head)
        assert await taken_from(flow, 1) == [3]

    async def test_goes_before_a_head_that_waits_for_its_retry(self, flow: Flow, clock: VirtualClock) -> None:
        flow.put(Held(5, "a"))
        head = await flow.take()
        assert head is not None
        flow.put(Held(3, "a"))
        flow.retry_later(head, after_seconds=1.0)
        flow.put(Held(2, "a"))
        assert await taken_from(flow, 2) == [2, 3]
        assert not flow.dispatch.may_begin(), "the head waits for its retry still"
        await clock.advance(1.0)
        assert await taken_from(flow, 1) == [5]


class TestWhatIsGathered:
    """What a dead worker held comes in any order, and before anything new."""

    @pytest.fixture
    def flow(self, clock: VirtualClock) -> Flow:
        flow = Flow(clock, workers=1, least=1, key=str)
        flow.dispatch.gather(3)
        return flow

    async def test_is_handed_out_in_order_once_all_of_it_is_here(self, flow: Flow, clock: VirtualClock) -> None:
        flow.put(Again(8, "a"))
        flow.put(Again(2, "a"))
        assert (flow.dispatch.begin(clock.monotonic()), flow.dispatch.gathering) == (None, 1)
        flow.put(Again(5, "a"))
        assert flow.dispatch.gathering == 0
        assert await taken_from(flow, 3) == [2, 5, 8]

    async def test_is_handed_out_when_something_new_comes(self, flow: Flow) -> None:
        flow.put(Again(8, "a"))
        flow.put(Again(2, "a"))
        flow.put(Fresh(9, "a"))
        assert await taken_from(flow, 3) == [2, 8, 9]

    async def test_does_not_end_with_a_dead_letter_that_was_handed_back(self, flow: Flow, clock: VirtualClock) -> None:
        dead_letter = Fresh(1, "a")
        dead_letter.can_be_read_again = False
        flow.put(Again(8, "a"))
        flow.put(dead_letter)
        assert flow.dispatch.begin(clock.monotonic()) is None
        flow.put(Again(2, "a"))
        assert await taken_from(flow, 3) == [1, 2, 8]


def surplus_of(flow: Flow) -> int:
    return flow.dispatch.surplus(KEY_PREFETCH)


class TestTheSurplus:
    """Of what waits, what belongs to keys that have enough here, or of which none can begin."""

    COUNT = KEY_PREFETCH + 10

    @pytest.fixture
    def flow(self, clock: VirtualClock) -> Flow:
        flow = Flow(clock, workers=1, least=1, key=str)
        for sequence in range(1, self.COUNT + 1):
            flow.put(Fresh(sequence, "a"))
        return flow

    async def test_of_a_key_that_is_handled_is_what_is_more_than_enough(self, flow: Flow) -> None:
        assert surplus_of(flow) == 10
        assert await taken_from(flow, 4) == [1, 2, 3, 4]
        assert surplus_of(flow) == 6
        await taken_from(flow, self.COUNT - 4)
        assert (surplus_of(flow), len(flow)) == (0, 0)

    async def test_of_a_key_that_waits_for_its_retry_is_all_of_it(self, flow: Flow, clock: VirtualClock) -> None:
        head = await flow.take()
        assert head is not None
        flow.retry_later(head, after_seconds=5.0)
        assert surplus_of(flow) == self.COUNT
        await clock.advance(5.0)
        assert await taken_from(flow, 1) == [1]
        assert surplus_of(flow) == 9

    async def test_is_none_once_all_was_given_back(self, flow: Flow, clock: VirtualClock) -> None:
        head = await flow.take()
        assert head is not None
        flow.retry_later(head, after_seconds=5.0)
        assert acknowledging.give_back(flow.withdraw(running=True)) == self.COUNT
        flow.put(Fresh(100, "a"))
        await clock.advance(5.0)
        assert surplus_of(flow) == 0
        assert await taken_from(flow, 1) == [100]


class TestWhatIsDeliveredUnderASequenceThatIsHeld:
    @pytest.mark.parametrize("ordered", [True, False])
    async def test_is_another_notification_where_its_store_time_differs(
        self, clock: VirtualClock, ordered: bool
    ) -> None:
        """Its stream was deleted and recreated, and counts from 1 again."""
        flow = Flow(clock, workers=1, least=1, key=str) if ordered else Flow(clock, workers=1, least=1)
        old, new = Held(1, "a"), Held(1, "a")
        new.message = structs.replace(old.message, timestamp_ns=2, data=b"longer than null")
        flow.put(old)
        flow.put(new)
        assert (flow.holds(old), flow.holds(new)) == (False, True)
        assert flow.dispatch.waiting_bytes == len(new.message.data)
        assert await flow.take() is new

    async def test_is_the_same_one_where_its_store_time_is_the_same(self, clock: VirtualClock) -> None:
        flow = Flow(clock, workers=1, least=1)
        held, again = Held(1, "a"), Again(1, "a")
        flow.put(held)
        flow.put(again)
        assert await flow.take() is held
        assert not flow.dispatch.may_begin()


class TestTheHeadOfAKey:
    async def test_that_is_settled_while_it_waits_for_its_retry_lets_the_next_one_begin(
        self, flow_of: Callable[..., Any], clock: VirtualClock
    ) -> None:
        flow, (head, following) = flow_of("a", "a", ordered=True)
        assert await flow.take() is head
        flow.retry_later(head, after_seconds=5.0)
        assert surplus_of(flow) == 2
        flow.finish(head)
        assert surplus_of(flow) == 0, "nothing of the key waits for a retry any more"
        assert await flow.take() is following

    async def test_is_not_stopped_or_overtaken_by_one_behind_it_that_waits_for_its_retry(
        self, clock: VirtualClock
    ) -> None:
        flow = Flow(clock, workers=1, least=1, key=str)
        later, earlier = Held(6, "a"), Held(5, "a")
        flow.put(later)
        assert await flow.take() is later
        flow.put(earlier)
        flow.retry_later(later, after_seconds=1.0)
        assert surplus_of(flow) == 0
        await clock.advance(2.0)
        assert len(flow.dispatch.ready) == 1
        assert await taken_from(flow, 2) == [5, 6]

    async def test_counts_with_its_body_once_that_was_read(self, clock: VirtualClock) -> None:
        """The server has left it out, because somebody has edited the consumer to deliver headers only."""
        flow = Flow(clock, workers=1, least=1, key=str)
        head, whole = Fresh(1, "a"), Fresh(1, "a").message
        head.message = structs.replace(whole, data=b"")
        flow.put(head)
        assert flow.dispatch.waiting_bytes == 0
        flow.replace(head, whole)
        assert (flow.dispatch.waiting_bytes, head.message.data) == (4, whole.data)


async def test_what_is_not_trusted_any_more_is_left_to_others(clock: VirtualClock) -> None:
    flow = Flow(clock, workers=1, least=1)
    flow.trust_until(10.0)
    running, waiting, late = Held(1, "a"), Held(2, "a"), Held(3, "a")
    flow.put(running)
    flow.put(waiting)
    assert await flow.take() is running
    await clock.advance(10.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(flow.take)
        await anyio.wait_all_tasks_blocked()
        assert flow.lapsed.is_set()
        assert (flow.holds(running), flow.holds(waiting)) == (True, False)
        flow.put(late)
        await anyio.wait_all_tasks_blocked()
        assert len(flow) == 1, "it was on its way while nobody could say how old it was"
        tasks.cancel_scope.cancel()
    flow.put(late)
    flow.trust_until(20.0)
    assert not flow.lapsed.is_set()
    assert len(flow) == 1
    fresh = Held(4, "a")
    flow.put(fresh)
    assert await flow.take() is fresh
