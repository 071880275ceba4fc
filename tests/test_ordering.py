"""How long a delivery waited in the worker before it was begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aviso_workers.aviso.codec import Message
from aviso_workers.clocks import VirtualClock
from aviso_workers.engine import acknowledging
from aviso_workers.engine.buffer import KEY_PREFETCH, Line

pytestmark = pytest.mark.anyio


class Held:
    """A delivery; its subject is its lane."""

    num_delivered = 1
    given_back = False

    def __init__(self, sequence: int, lane: str) -> None:
        self.message = Message(subject=lane, data=b"null", sequence=sequence)

    def nak(self, *, delay_seconds: float = 0.0) -> None:
        self.given_back = True


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def line_of(clock: VirtualClock) -> Callable[..., tuple[Line, list[Any]]]:
    """`line_of("a", "b", ordered=True)`: a line that just got deliveries for these lanes, and them."""

    def line_of(*lanes: str, ordered: bool) -> tuple[Line, list[Any]]:
        line = Line(clock, key=str) if ordered else Line(clock)
        deliveries = [Held(sequence, lane) for sequence, lane in enumerate(lanes, start=1)]
        for delivery in deliveries:
            line.put(delivery)  # type: ignore[arg-type]
        return line, deliveries

    return line_of


async def test_what_is_taken_at_once_has_not_waited(line_of: Callable[..., Any]) -> None:
    line, (delivery,) = line_of("a", ordered=False)
    assert await line.take() is delivery
    assert line.waited_seconds(delivery) == 0


async def test_it_waits_for_somebody_who_takes_it(line_of: Callable[..., Any], clock: VirtualClock) -> None:
    line, (delivery,) = line_of("a", ordered=False)
    await clock.advance(3)
    await line.take()
    await clock.advance(5)
    assert line.waited_seconds(delivery) == 3


async def test_it_waits_for_what_is_before_it_in_its_lane(line_of: Callable[..., Any], clock: VirtualClock) -> None:
    line, (first, behind, other) = line_of("a", "a", "b", ordered=True)
    assert [await line.take(), await line.take()] == [first, other]
    await clock.advance(7)
    line.done(first)
    assert await line.take() is behind
    assert [line.waited_seconds(each) for each in (behind, other)] == [7, 0]


async def test_the_pause_before_another_attempt_is_no_waiting(line_of: Callable[..., Any], clock: VirtualClock) -> None:
    line, (delivery,) = line_of("a", ordered=True)
    await line.take()
    line.again(delivery, after_seconds=10)
    await clock.advance(12)
    await line.take()
    assert line.waited_seconds(delivery) == 2


async def test_what_is_done_is_forgotten(line_of: Callable[..., Any], clock: VirtualClock) -> None:
    line, (delivery,) = line_of("a", ordered=False)
    await clock.advance(3)
    await line.take()
    line.done(delivery)
    assert (line.running, len(line), line.waited_seconds(delivery)) == (0, 0, None)


async def test_what_is_delivered_again_while_it_is_held_is_settled_by_the_older_delivery(
    line_of: Callable[..., Any],
) -> None:
    line, (older,) = line_of("a", ordered=False)
    line.put(Held(1, "a"))
    assert (len(line), line.delivery_of(1)) == (1, older)
    assert await line.take() is older
    line.put(Held(1, "a"))
    assert (line.running, line.holds(older)) == (1, True)
    line.done(older)
    assert (len(line), line.running) == (0, 0)


class TickingClock(VirtualClock):
    """A millisecond passes whenever somebody looks."""

    def monotonic(self) -> float:
        self._now += 0.001
        return self._now


async def test_who_never_waits_lets_others_have_a_turn() -> None:
    line = Line(TickingClock())
    for sequence in range(1, 1001):
        line.put(Held(sequence, "a"))  # type: ignore[arg-type]
    turns_of_another = 0

    async def take_turns() -> None:
        nonlocal turns_of_another
        while len(line):
            turns_of_another += 1
            await checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take_turns)
        while len(line):
            delivery = await line.take()
            assert delivery is not None
            line.done(delivery)

    assert turns_of_another > 100


async def test_all_who_are_idle_come_where_there_is_work_for_all() -> None:
    line = Line(VirtualClock())
    working, most = 0, 0
    release = anyio.Event()

    async def work() -> None:
        nonlocal working, most
        while (delivery := await line.take()) is not None:
            working += 1
            most = max(most, working)
            await release.wait()
            working -= 1
            line.done(delivery)

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(work)
        await anyio.wait_all_tasks_blocked()
        for sequence in range(1, 21):
            line.put(Held(sequence, "a"))  # type: ignore[arg-type]
        await anyio.wait_all_tasks_blocked()
        assert most == 8
        release.set()
        await anyio.wait_all_tasks_blocked()
        assert len(line) == 0
        line.close()


async def test_what_is_there_is_taken_also_where_one_whose_turn_it_was_is_cancelled() -> None:
    line = Line(VirtualClock())
    taken: list[Any] = []

    async def take(scope: anyio.CancelScope) -> None:
        with scope:
            taken.append(await line.take())

    first, second = anyio.CancelScope(), anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take, first)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(take, second)
        await anyio.wait_all_tasks_blocked()
        line.put(Held(1, "a"))  # type: ignore[arg-type]
        first.cancel()
        await anyio.wait_all_tasks_blocked()
        line.close()

    assert [delivery.message.sequence for delivery in taken if delivery] == [1]


async def test_what_comes_while_one_that_waits_is_being_cancelled_is_taken_by_another() -> None:
    line = Line(VirtualClock())
    taken: list[Any] = []

    async def take(scope: anyio.CancelScope) -> None:
        with scope:
            taken.append(await line.take())

    first, second = anyio.CancelScope(), anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        for scope in (first, second):
            tasks.start_soon(take, scope)
            await anyio.wait_all_tasks_blocked()
        first.cancel()
        line.put(Held(1, "a"))  # it is the turn of the first, which does not come any more
        await anyio.wait_all_tasks_blocked()
        line.close()

    assert [delivery.message.sequence for delivery in taken if delivery] == [1]


async def taken_from(line: Line, count: int) -> list[int]:
    """The sequences of the next deliveries, each of them done before the next is taken."""
    sequences = []
    for _ in range(count):
        delivery = await line.take()
        assert delivery is not None
        sequences.append(delivery.message.sequence)
        line.done(delivery)
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
    def line(self, clock: VirtualClock) -> Line:
        return Line(clock, key=str)

    async def test_takes_its_place_in_its_lane(self, line: Line) -> None:
        for sequence in (1, 5, 9, 3, 7):
            line.put(Held(sequence, "a"))  # type: ignore[arg-type]
        assert await taken_from(line, 5) == [1, 3, 5, 7, 9]

    async def test_goes_before_a_head_that_waits_for_a_worker(self, line: Line) -> None:
        line.put(Held(5, "a"))  # type: ignore[arg-type]
        line.put(Held(6, "b"))  # type: ignore[arg-type]
        line.put(Held(3, "a"))  # type: ignore[arg-type]
        assert await taken_from(line, 3) == [6, 3, 5]

    async def test_goes_after_a_head_that_runs_or_waits_for_its_retry(self, line: Line, clock: VirtualClock) -> None:
        line.put(Held(5, "a"))  # type: ignore[arg-type]
        head = await line.take()
        assert head is not None
        line.put(Held(3, "a"))  # type: ignore[arg-type]
        line.again(head, after_seconds=1.0)
        line.put(Held(2, "a"))  # type: ignore[arg-type]
        await clock.advance(1.0)
        assert await taken_from(line, 3) == [5, 2, 3]


class TestWhatIsGathered:
    """What a dead worker held comes in any order, and before anything new."""

    @pytest.fixture
    def line(self, clock: VirtualClock) -> Line:
        line = Line(clock, key=str)
        line.gather(3)
        return line

    async def test_is_handed_out_in_order_once_all_of_it_is_here(self, line: Line) -> None:
        line.put(Again(8, "a"))  # type: ignore[arg-type]
        line.put(Again(2, "a"))  # type: ignore[arg-type]
        assert (line.ready, line.gathers) == (0, 1)
        line.put(Again(5, "a"))  # type: ignore[arg-type]
        assert line.gathers == 0
        assert await taken_from(line, 3) == [2, 5, 8]

    async def test_is_handed_out_when_something_new_comes(self, line: Line) -> None:
        line.put(Again(8, "a"))  # type: ignore[arg-type]
        line.put(Again(2, "a"))  # type: ignore[arg-type]
        line.put(Fresh(9, "a"))  # type: ignore[arg-type]
        assert await taken_from(line, 3) == [2, 8, 9]

    async def test_does_not_end_with_a_dead_letter_that_was_handed_back(self, line: Line) -> None:
        letter = Fresh(1, "a")
        letter.can_be_read_again = False
        line.put(Again(8, "a"))  # type: ignore[arg-type]
        line.put(letter)  # type: ignore[arg-type]
        assert line.ready == 0
        line.put(Again(2, "a"))  # type: ignore[arg-type]
        assert await taken_from(line, 3) == [1, 2, 8]


class TestTheSurplus:
    """Of what waits, what belongs to keys that have enough here, or of which none can begin."""

    COUNT = KEY_PREFETCH + 10

    @pytest.fixture
    def line(self, clock: VirtualClock) -> Line:
        line = Line(clock, key=str)
        for sequence in range(1, self.COUNT + 1):
            line.put(Fresh(sequence, "a"))  # type: ignore[arg-type]
        return line

    async def test_of_a_key_that_is_handled_is_what_is_more_than_enough(self, line: Line) -> None:
        assert line.surplus == 10
        assert await taken_from(line, 4) == [1, 2, 3, 4]
        assert line.surplus == 6
        await taken_from(line, self.COUNT - 4)
        assert (line.surplus, len(line)) == (0, 0)

    async def test_of_a_key_that_waits_for_its_retry_is_all_of_it(self, line: Line, clock: VirtualClock) -> None:
        head = await line.take()
        assert head is not None
        line.again(head, after_seconds=5.0)
        assert line.surplus == self.COUNT
        await clock.advance(5.0)
        assert line.surplus == 10
        assert await taken_from(line, 1) == [1]

    async def test_of_a_key_whose_thread_runs_on_is_all_of_it(self, line: Line) -> None:
        head = await line.take()
        assert head is not None
        line.block(head)
        line.done(head)
        assert line.surplus == self.COUNT - 1
        line.unblock(head)
        assert line.surplus == 9

    async def test_is_none_once_all_was_given_back(self, line: Line, clock: VirtualClock) -> None:
        head = await line.take()
        assert head is not None
        line.again(head, after_seconds=5.0)
        assert acknowledging.give_back(line.withdraw_all()) == self.COUNT
        line.put(Fresh(100, "a"))  # type: ignore[arg-type]
        await clock.advance(5.0)
        assert line.surplus == 0
        assert await taken_from(line, 1) == [100]
