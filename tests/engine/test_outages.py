"""What an outage makes of the failures and successes that it is told of, and what it lets begin (`engine.outages`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from aviso_workers import Dependency, Unavailable
from aviso_workers.backends import Message
from aviso_workers.clocks import VirtualClock
from aviso_workers.engine import flow as in_flight
from aviso_workers.engine import outages
from aviso_workers.engine.dispatch import GATE
from aviso_workers.engine.flow import Isolation
from aviso_workers.engine.outages import UNANSWERED_SECONDS, KeyGate, Outage
from aviso_workers.engine.pace import FULL, LONGEST_SECONDS
from aviso_workers.events import OutageBegan
from tests.deliveries import UnsettledDelivery
from tests.engine.conftest import Facts
from tests.waits import PATIENCE_SECONDS

REFUSED, WRONG = ConnectionRefusedError(), ValueError()


class Clock(VirtualClock):
    def move(self, seconds: float) -> None:
        self._now += seconds


class Flow:
    """What a worker holds for an agent, as an outage sees it."""

    def __init__(self, *, running: int = 0, running_again: int = 0) -> None:
        self.opened: list[Any] = []
        self.at_keys = 0
        """How many deliveries wait at each key."""
        self.dispatch = SimpleNamespace(
            running=running,
            running_again=running_again,
            special=False,
            waiting_at=lambda limit, key: self.at_keys,
        )
        self.waiting = 0

    def open(self, limit: object, key: object, count: int) -> None:
        self.opened.append((key, count))

    def wake(self) -> None: ...


def delivery(key: str, *, tried: bool = True, at_once: bool = False) -> Any:
    return SimpleNamespace(message=SimpleNamespace(subject=key), tried=tried, at_once=at_once)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def outage_of(clock: Clock, facts: Facts, *flows: Flow, declared: bool = False, by: tuple[str, ...] = ()) -> Outage:
    outage = Outage(Dependency("catalogue", by=by), declared=declared, clock=clock, events=facts.events)
    for number, flow in enumerate(flows):
        outage.join(f"agent{number}", flow, most=8, on_open=lambda: None)  # type: ignore[arg-type]
    return outage


def gate_of(outage: Outage, clock: Clock) -> tuple[KeyGate, Flow]:
    gate, flow = outage.gate(str), Flow()
    gate.attach(flow)  # type: ignore[arg-type]
    return gate, flow


@pytest.mark.parametrize("between", ["nothing", "a success", "another failure"])
def test_of_an_agent_with_few_notifications_failures_alone_for_long_are_an_outage(
    clock: Clock, facts: Facts, between: str
) -> None:
    outage = outage_of(clock, facts, Flow())
    outage.failed(REFUSED, again=False, away=True)
    clock.move(UNANSWERED_SECONDS / 2)
    if between == "a success":
        outage.succeeded()
    elif between == "another failure":
        outage.failed(WRONG, again=False, away=False)
    clock.move(UNANSWERED_SECONDS / 2)
    outage.failed(REFUSED, again=True, away=True)
    assert outage.is_away is (between == "nothing")
    assert len(facts.of(OutageBegan)) == (between == "nothing")


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_the_author_may_ask_that_all_is_left_alone_for_a_while(
    clock: Clock, facts: Facts, declared: bool, together: bool
) -> None:
    """Also from a task of a group."""
    outage = outage_of(clock, facts, Flow(), declared=declared)
    asked = Unavailable("maintenance", after=60)
    outage.failed(ExceptionGroup("tasks", [asked]) if together else asked, again=False, away=True)
    assert outage.pace.closed_until == clock.monotonic() + 60


def test_a_window_that_begins_while_all_is_away_takes_the_turn_of_the_others(clock: Clock, facts: Facts) -> None:
    outage = outage_of(clock, facts, Flow())
    outage.trip("maintenance", None)
    clock.move(2.0)
    assert [outage.begins(again=True) for _ in range(2)] == [True, False]


def test_first_tries_and_retries_that_run_are_counted_apart(clock: Clock, facts: Facts) -> None:
    outage = outage_of(clock, facts, Flow(running=3, running_again=1), Flow(running=2))
    assert outage._running() == (4, 1)


class TestKeys:
    """With `by`, it is away for each key by itself."""

    def shut(self, outage: Outage, key: str) -> None:
        for _ in range(FULL):
            outage.failed(REFUSED, again=True, away=True, key=key)

    def test_failures_of_one_key_for_however_long_are_no_outage_of_all(self, clock: Clock, facts: Facts) -> None:
        outage = outage_of(clock, facts, by=("class",))
        outage.failed(REFUSED, again=True, away=True, key="a")
        clock.move(2 * UNANSWERED_SECONDS)
        outage.failed(REFUSED, again=True, away=True, key="a")
        assert not outage.is_away

    def test_a_key_of_which_much_has_failed_is_remembered_until_as_much_has_succeeded(
        self, clock: Clock, facts: Facts
    ) -> None:
        outage = outage_of(clock, facts, by=("class",))
        for _ in range(FULL // 2):
            outage.failed(REFUSED, again=True, away=True, key="a")
        outage.succeeded("a")
        assert list(outage.keys) == ["a"]
        outage.succeeded("a")
        assert list(outage.keys) == []

    def test_a_key_that_is_forgotten_because_there_are_too_many_may_begin(
        self, clock: Clock, facts: Facts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(outages, "MAX_KEYS", 1)
        outage = outage_of(clock, facts, by=("class",))
        _, flow = gate_of(outage, clock)
        self.shut(outage, "a")
        flow.opened.clear()
        outage.failed(REFUSED, again=True, away=True, key="b")
        assert list(outage.keys) == ["b"]
        assert [key for key, _ in flow.opened] == ["a"]

    def test_what_a_person_asks_for_begins_although_its_key_is_away(self, clock: Clock, facts: Facts) -> None:
        outage = outage_of(clock, facts, by=("class",))
        gate, _ = gate_of(outage, clock)
        self.shut(outage, "a")
        now = clock.monotonic()
        assert not gate.admits(delivery("a"), now)
        assert gate.admits(delivery("b"), now)
        assert gate.admits(delivery("a", at_once=True), now)

    def test_as_many_of_a_key_run_as_have_begun_and_not_ended(self, clock: Clock, facts: Facts) -> None:
        outage = outage_of(clock, facts, by=("class",))
        gate, _ = gate_of(outage, clock)
        outage.failed(REFUSED, again=True, away=True, key="a")
        running = delivery("a")
        assert gate.admits(running, clock.monotonic())
        assert outage.keys["a"].running == 1
        gate.release(running)
        assert outage.keys["a"].running == 0

    @pytest.mark.anyio
    async def test_those_that_still_wait_at_a_key_are_asked_again(self, clock: Clock, facts: Facts) -> None:
        """The first of two that wait may begin, and become a dead letter of which the outage is not told."""
        outage = outage_of(clock, facts, by=("class",))
        gate, flow = gate_of(outage, clock)
        self.shut(outage, "a")
        flow.at_keys = 2

        def begin(limit: object, key: object, count: int) -> None:
            flow.at_keys -= gate.admits(delivery(str(key)), clock.monotonic())

        flow.open = begin  # type: ignore[method-assign]
        gate.wait("a")
        await clock.advance(60.0)
        assert flow.at_keys == 0

    @pytest.mark.anyio
    async def test_one_that_is_to_run_alone_is_decided_on_again_when_its_key_may_begin(
        self, clock: Clock, facts: Facts
    ) -> None:
        outage = outage_of(clock, facts, by=("class",))
        gate, suspect = outage.gate(str), UnsettledDelivery()
        flow = in_flight.Flow(clock, workers=1, least=1, isolation=Isolation(clock), limits=[gate])
        gate.attach(flow)
        self.shut(outage, "a")
        suspect.message, suspect.num_delivered = Message(subject="a", data=b"null", sequence=1), 3
        flow.put(suspect)
        assert await flow.take_redelivered() is suspect
        flow.admit(suspect, tried=True, alone=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(flow.take)
            await clock.advance(0)
            assert suspect.place == GATE
            with anyio.fail_after(PATIENCE_SECONDS):
                tasks.start_soon(clock.advance, LONGEST_SECONDS)
                assert await flow.take_redelivered() is suspect
            tasks.cancel_scope.cancel()
