"""How long a delivery waited in the worker before it was begun."""

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
from aviso_workers.engine import buffer as buffers
from aviso_workers.engine.buffer import Buffer
from aviso_workers.engine.ordering_keys import KEY_PREFETCH
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
def buffer_of(clock: VirtualClock) -> Callable[..., tuple[Buffer, list[Any]]]:
    """`buffer_of("a", "b", ordered=True)`: a buffer that just got deliveries for these keys, and them."""

    def buffer_of(*keys: str, ordered: bool) -> tuple[Buffer, list[Any]]:
        buffer = Buffer(clock, key=str) if ordered else Buffer(clock)
        deliveries = [Held(sequence, key) for sequence, key in enumerate(keys, start=1)]
        for delivery in deliveries:
            buffer.put(delivery)
        return buffer, deliveries

    return buffer_of


async def test_what_is_taken_at_once_has_not_waited(buffer_of: Callable[..., Any]) -> None:
    buffer, (delivery,) = buffer_of("a", ordered=False)
    assert await buffer.take() is delivery
    assert buffer.waited_seconds(delivery) == 0


async def test_it_waits_for_somebody_who_takes_it(buffer_of: Callable[..., Any], clock: VirtualClock) -> None:
    buffer, (delivery,) = buffer_of("a", ordered=False)
    await clock.advance(3)
    await buffer.take()
    await clock.advance(5)
    assert buffer.waited_seconds(delivery) == 3


async def test_it_waits_for_what_is_before_it_in_its_lane(buffer_of: Callable[..., Any], clock: VirtualClock) -> None:
    buffer, (first, behind, other) = buffer_of("a", "a", "b", ordered=True)
    assert [await buffer.take(), await buffer.take()] == [first, other]
    await clock.advance(7)
    buffer.finish(first)
    assert await buffer.take() is behind
    assert [buffer.waited_seconds(each) for each in (behind, other)] == [7, 0]


async def test_the_pause_before_another_attempt_is_no_waiting(
    buffer_of: Callable[..., Any], clock: VirtualClock
) -> None:
    buffer, (delivery,) = buffer_of("a", ordered=True)
    await buffer.take()
    buffer.retry_later(delivery, after_seconds=10)
    await clock.advance(12)
    await buffer.take()
    assert buffer.waited_seconds(delivery) == 2


async def test_what_is_done_is_forgotten(buffer_of: Callable[..., Any], clock: VirtualClock) -> None:
    buffer, (delivery,) = buffer_of("a", ordered=False)
    await clock.advance(3)
    await buffer.take()
    buffer.finish(delivery)
    assert (buffer.running, len(buffer), buffer.waited_seconds(delivery)) == (0, 0, None)


async def test_what_is_delivered_again_while_it_is_held_is_settled_by_the_older_delivery(
    buffer_of: Callable[..., Any],
) -> None:
    buffer, (older,) = buffer_of("a", ordered=False)
    buffer.put(Held(1, "a"))
    assert (len(buffer), buffer.delivery_of(1)) == (1, older)
    assert await buffer.take() is older
    buffer.put(Held(1, "a"))
    assert (buffer.running, buffer.holds(older)) == (1, True)
    buffer.finish(older)
    assert (len(buffer), buffer.running) == (0, 0)


class TickingClock(VirtualClock):
    """A millisecond passes whenever somebody looks."""

    def monotonic(self) -> float:
        self._now += 0.001
        return self._now


async def test_what_comes_together_is_put_as_each_by_itself(clock: VirtualClock) -> None:
    together, apart = Buffer(clock), Buffer(clock)
    for buffer in (together, apart):
        deliveries = [Held(sequence, "a") for sequence in (1, 2, 2, 3)]
        if buffer is together:
            buffer.put_all(deliveries)
        else:
            for delivery in deliveries:
                buffer.put(delivery)
    assert (len(together), together.ready, together.waiting_bytes) == (len(apart), apart.ready, apart.waiting_bytes)
    assert (len(together), together.ready, together.waiting_bytes) == (3, 3, 12)


async def test_what_is_ready_is_taken_without_waiting(clock: VirtualClock) -> None:
    buffer = Buffer(clock)
    first, second = Held(1, "a"), Held(2, "a")
    buffer.put_all([first, second])
    assert buffer.take_now() is None, "a turn begins where somebody asks who may wait"
    assert await buffer.take() is first
    assert buffer.take_now() is second
    assert buffer.take_now() is None


async def test_nothing_is_taken_without_waiting_that_another_worker_may_have(clock: VirtualClock) -> None:
    buffer = Buffer(clock)
    buffer.put_all([Held(1, "a"), Held(2, "a")])
    await buffer.take()
    buffer.trust_until(clock.monotonic())
    assert buffer.take_now() is None


async def test_who_takes_without_waiting_lets_others_have_a_turn() -> None:
    buffer = Buffer(TickingClock())
    buffer.put_all([Held(sequence, "a") for sequence in range(1, 1001)])
    await buffer.take()
    taken = 0
    while buffer.take_now():
        taken += 1
    assert 0 < taken < 100


async def test_who_never_waits_lets_others_have_a_turn() -> None:
    buffer = Buffer(TickingClock())
    for sequence in range(1, 1001):
        buffer.put(Held(sequence, "a"))
    turns_of_another = 0

    async def take_turns() -> None:
        nonlocal turns_of_another
        while len(buffer):
            turns_of_another += 1
            await checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take_turns)
        while len(buffer):
            delivery = await buffer.take()
            assert delivery is not None
            buffer.finish(delivery)

    assert turns_of_another > 100


async def test_all_who_are_idle_come_where_there_is_work_for_all() -> None:
    buffer = Buffer(VirtualClock())
    working, most = 0, 0
    release = anyio.Event()

    async def work() -> None:
        nonlocal working, most
        while (delivery := await buffer.take()) is not None:
            working += 1
            most = max(most, working)
            await release.wait()
            working -= 1
            buffer.finish(delivery)

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(work)
        await anyio.wait_all_tasks_blocked()
        for sequence in range(1, 21):
            buffer.put(Held(sequence, "a"))
        await anyio.wait_all_tasks_blocked()
        assert most == 8
        release.set()
        await anyio.wait_all_tasks_blocked()
        assert len(buffer) == 0
        buffer.close()


async def test_what_is_there_is_taken_also_where_one_whose_turn_it_was_is_cancelled() -> None:
    buffer = Buffer(VirtualClock())
    taken: list[Any] = []

    async def take(scope: anyio.CancelScope) -> None:
        with scope:
            taken.append(await buffer.take())

    first, second = anyio.CancelScope(), anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take, first)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(take, second)
        await anyio.wait_all_tasks_blocked()
        buffer.put(Held(1, "a"))
        first.cancel()
        await anyio.wait_all_tasks_blocked()
        buffer.close()

    assert [delivery.message.sequence for delivery in taken if delivery] == [1]


async def test_what_comes_while_one_that_waits_is_being_cancelled_is_taken_by_another() -> None:
    buffer = Buffer(VirtualClock())
    taken: list[Any] = []

    async def take(scope: anyio.CancelScope) -> None:
        with scope:
            taken.append(await buffer.take())

    first, second = anyio.CancelScope(), anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        for scope in (first, second):
            tasks.start_soon(take, scope)
            await anyio.wait_all_tasks_blocked()
        first.cancel()
        buffer.put(Held(1, "a"))  # it is the turn of the first, which does not come any more
        await anyio.wait_all_tasks_blocked()
        buffer.close()

    assert [delivery.message.sequence for delivery in taken if delivery] == [1]


async def taken_from(buffer: Buffer, count: int) -> list[int]:
    """The sequences of the next deliveries, each of them done before the next is taken."""
    sequences = []
    for _ in range(count):
        delivery = await buffer.take()
        assert delivery is not None
        sequences.append(delivery.message.sequence)
        buffer.finish(delivery)
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
    def buffer(self, clock: VirtualClock) -> Buffer:
        return Buffer(clock, key=str)

    async def test_takes_its_place_in_its_lane(self, buffer: Buffer) -> None:
        for sequence in (1, 5, 9, 3, 7):
            buffer.put(Held(sequence, "a"))
        assert await taken_from(buffer, 5) == [1, 3, 5, 7, 9]

    async def test_goes_before_a_head_that_waits_for_a_worker(self, buffer: Buffer) -> None:
        buffer.put(Held(5, "a"))
        buffer.put(Held(6, "b"))
        buffer.put(Held(3, "a"))
        assert await taken_from(buffer, 3) == [6, 3, 5]

    async def test_goes_after_a_head_that_runs_or_waits_for_its_retry(
        self, buffer: Buffer, clock: VirtualClock
    ) -> None:
        buffer.put(Held(5, "a"))
        head = await buffer.take()
        assert head is not None
        buffer.put(Held(3, "a"))
        buffer.retry_later(head, after_seconds=1.0)
        buffer.put(Held(2, "a"))
        await clock.advance(1.0)
        assert await taken_from(buffer, 3) == [5, 2, 3]


class TestWhatIsGathered:
    """What a dead worker held comes in any order, and before anything new."""

    @pytest.fixture
    def buffer(self, clock: VirtualClock) -> Buffer:
        buffer = Buffer(clock, key=str)
        buffer.gather(3)
        return buffer

    async def test_is_handed_out_in_order_once_all_of_it_is_here(self, buffer: Buffer) -> None:
        buffer.put(Again(8, "a"))
        buffer.put(Again(2, "a"))
        assert (buffer.ready, buffer.gather_left) == (0, 1)
        buffer.put(Again(5, "a"))
        assert buffer.gather_left == 0
        assert await taken_from(buffer, 3) == [2, 5, 8]

    async def test_is_handed_out_when_something_new_comes(self, buffer: Buffer) -> None:
        buffer.put(Again(8, "a"))
        buffer.put(Again(2, "a"))
        buffer.put(Fresh(9, "a"))
        assert await taken_from(buffer, 3) == [2, 8, 9]

    async def test_does_not_end_with_a_dead_letter_that_was_handed_back(self, buffer: Buffer) -> None:
        dead_letter = Fresh(1, "a")
        dead_letter.can_be_read_again = False
        buffer.put(Again(8, "a"))
        buffer.put(dead_letter)
        assert buffer.ready == 0
        buffer.put(Again(2, "a"))
        assert await taken_from(buffer, 3) == [1, 2, 8]


class TestTheSurplus:
    """Of what waits, what belongs to keys that have enough here, or of which none can begin."""

    COUNT = KEY_PREFETCH + 10

    @pytest.fixture
    def buffer(self, clock: VirtualClock) -> Buffer:
        buffer = Buffer(clock, key=str)
        for sequence in range(1, self.COUNT + 1):
            buffer.put(Fresh(sequence, "a"))
        return buffer

    async def test_of_a_key_that_is_handled_is_what_is_more_than_enough(self, buffer: Buffer) -> None:
        assert buffer.surplus == 10
        assert await taken_from(buffer, 4) == [1, 2, 3, 4]
        assert buffer.surplus == 6
        await taken_from(buffer, self.COUNT - 4)
        assert (buffer.surplus, len(buffer)) == (0, 0)

    async def test_of_a_key_that_waits_for_its_retry_is_all_of_it(self, buffer: Buffer, clock: VirtualClock) -> None:
        head = await buffer.take()
        assert head is not None
        buffer.retry_later(head, after_seconds=5.0)
        assert buffer.surplus == self.COUNT
        await clock.advance(5.0)
        assert buffer.surplus == 10
        assert await taken_from(buffer, 1) == [1]

    async def test_is_none_once_all_was_given_back(self, buffer: Buffer, clock: VirtualClock) -> None:
        head = await buffer.take()
        assert head is not None
        buffer.retry_later(head, after_seconds=5.0)
        assert acknowledging.give_back(buffer.withdraw_all()) == self.COUNT
        buffer.put(Fresh(100, "a"))
        await clock.advance(5.0)
        assert buffer.surplus == 0
        assert await taken_from(buffer, 1) == [100]


class TestWhatIsDeliveredUnderASequenceThatIsHeld:
    @pytest.mark.parametrize("ordered", [True, False])
    async def test_is_another_notification_where_its_store_time_differs(
        self, clock: VirtualClock, ordered: bool
    ) -> None:
        """Its stream was deleted and recreated, and counts from 1 again."""
        buffer = Buffer(clock, key=str) if ordered else Buffer(clock)
        old, new = Held(1, "a"), Held(1, "a")
        new.message = structs.replace(old.message, timestamp_ns=2, data=b"longer than null")
        buffer.put(old)
        buffer.put(new)
        assert (buffer.holds(old), buffer.holds(new)) == (False, True)
        assert buffer.waiting_bytes == len(new.message.data)
        assert await buffer.take() is new

    async def test_is_the_same_one_where_its_store_time_is_the_same(self, clock: VirtualClock) -> None:
        buffer = Buffer(clock)
        held, again = Held(1, "a"), Again(1, "a")
        buffer.put(held)
        buffer.put(again)
        assert await buffer.take() is held
        assert buffer.ready == 0


class TestTheHeadOfAKey:
    async def test_that_is_settled_while_it_waits_for_its_retry_lets_the_next_one_begin(
        self, buffer_of: Callable[..., Any], clock: VirtualClock
    ) -> None:
        buffer, (head, following) = buffer_of("a", "a", ordered=True)
        assert await buffer.take() is head
        buffer.retry_later(head, after_seconds=5.0)
        assert buffer.surplus == 2
        buffer.finish(head)
        assert buffer.surplus == 0, "nothing of the key waits for a retry any more"
        assert await buffer.take() is following

    async def test_is_not_stopped_or_overtaken_by_one_behind_it_that_waits_for_its_retry(
        self, clock: VirtualClock
    ) -> None:
        buffer = Buffer(clock, key=str)
        later, earlier = Held(6, "a"), Held(5, "a")
        buffer.put(later)
        buffer.put(earlier)
        buffer.retry_later(later, after_seconds=1.0)
        assert buffer.surplus == 0
        await clock.advance(2.0)
        assert buffer.ready == 1
        assert await taken_from(buffer, 2) == [5, 6]

    async def test_counts_with_its_body_again_once_that_was_read(
        self, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(buffers, "MAX_SURPLUS_BYTES", 0)
        buffer = Buffer(clock, key=str)
        head, *others = [Fresh(sequence, key) for sequence, key in enumerate("abc", start=1)]
        message = head.message
        for delivery in (head, *others):
            buffer.put(delivery)
        assert await buffer.take() is head
        buffer.retry_later(head, after_seconds=1.0)
        assert buffer.is_bodiless(head)
        buffer.restore_body(head, message)
        assert not buffer.is_bodiless(head)
        assert (buffer.waiting_bytes, buffer.mean_bytes) == (12, 4)


async def test_what_is_not_trusted_any_more_is_left_to_others(clock: VirtualClock) -> None:
    buffer = Buffer(clock)
    buffer.trust_until(10.0)
    running, waiting, late = Held(1, "a"), Held(2, "a"), Held(3, "a")
    buffer.put(running)
    buffer.put(waiting)
    assert await buffer.take() is running
    await clock.advance(10.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(buffer.take)
        await anyio.wait_all_tasks_blocked()
        assert buffer.lapsed.is_set()
        assert (buffer.holds(running), buffer.holds(waiting)) == (True, False)
        buffer.put(late)
        await anyio.wait_all_tasks_blocked()
        assert len(buffer) == 1, "it was on its way while nobody could say how old it was"
        tasks.cancel_scope.cancel()
    buffer.put(late)
    buffer.trust_until(20.0)
    assert not buffer.lapsed.is_set()
    assert len(buffer) == 1
    fresh = Held(4, "a")
    buffer.put(fresh)
    assert await buffer.take() is fresh
