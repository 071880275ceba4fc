"""What begins next (`engine.dispatch`) where it depends on times, on chance and on what came together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from aviso_workers.backends import Message
from aviso_workers.engine.dispatch import AGAIN, ALONE, GATE, READY, Dispatch
from aviso_workers.engine.pace import FULL, Pace
from tests.deliveries import UnsettledDelivery


class Delivered(UnsettledDelivery):
    def __init__(self, sequence: int, *, num_delivered: int = 1, key: str = "a") -> None:
        self.message = Message(subject=key, data=b"null", sequence=sequence, timestamp_ns=1)
        self.num_delivered = num_delivered

    def __repr__(self) -> str:
        return f"{self.message.subject}{self.message.sequence}"


class Closed:
    """A limit that lets so many begin."""

    def __init__(self, lets: int = 0) -> None:
        self.lets = lets

    def gate(self, delivery: Any) -> str:
        return ""

    def admits(self, delivery: Any, now: float) -> bool:
        self.lets -= 1
        return self.lets >= 0

    def take_back(self, delivery: Any) -> None: ...

    def release(self, delivery: Any) -> None: ...

    def wait(self, key: str) -> None: ...


def pace() -> Pace:
    made = Pace(running=lambda: (0, 0), tell=lambda: None)
    made.most = 64
    return made


def begun(dispatch: Dispatch, now: float = 0.0) -> list[int]:
    """Let all begin that may, and return their sequences."""
    found = []
    while (delivery := dispatch.begin(now)) is not None:
        found.append(delivery.message.sequence)
    return found


def received(dispatch: Dispatch, *sequences: int, tried: bool = False) -> Sequence[Delivered]:
    """Let these come; with `tried`, they are decided on as what was tried before."""
    deliveries = [Delivered(sequence, num_delivered=1 + tried) for sequence in sequences]
    for delivery in deliveries:
        dispatch.received(delivery, 0.0)
        if tried:
            dispatch.decided(delivery, 0.0, tried=True)
    return deliveries


def test_something_new_that_comes_with_others_ends_the_gathering() -> None:
    dispatch = Dispatch(screens=True)
    dispatch.gather(3)
    dispatch.received_all([Delivered(2)], 0.0)
    assert begun(dispatch) == [2]


def test_a_dead_letter_that_is_handed_back_ends_no_gathering() -> None:
    dispatch, handed_back = Dispatch(), Delivered(2)
    handed_back.can_be_read_again = False
    dispatch.gather(3)
    dispatch.received(handed_back, 0.0)
    assert begun(dispatch) == []
    dispatch.release()
    assert begun(dispatch) == [2]


def test_what_is_gathered_is_not_decided_on() -> None:
    dispatch = Dispatch(screens=True)
    dispatch.gather(3)
    received(dispatch, 1)
    dispatch.gather(3)
    dispatch.received(redelivered := Delivered(2, num_delivered=2), 0.0)
    assert dispatch.take_asked() is None
    dispatch.release()
    assert dispatch.take_asked() is redelivered


def test_one_that_comes_twice_together_with_others_is_held_once() -> None:
    dispatch, first = Dispatch(), Delivered(1)
    dispatch.received_all([first], 0.0)
    dispatch.received_all([Delivered(1), Delivered(2)], 0.0)
    assert begun(dispatch) == [1, 2]
    assert dispatch.holds(first)


def test_retries_get_as_much_time_as_first_tries_and_not_as_many_turns() -> None:
    dispatch = Dispatch(screens=True)
    received(dispatch, 1, 2, 3, 4)
    received(dispatch, 5, 6, tried=True)
    order, now = list[int](), 0.0
    while (delivery := dispatch.begin(now)) is not None:
        order.append(delivery.message.sequence)
        now += 0.75 if delivery.tried else 0.25
        dispatch.ended(delivery, now)
    assert order == [1, 5, 2, 3, 6, 4], "one retry takes as long as three first tries"


def test_one_that_waits_to_be_tried_again_has_not_been_taken() -> None:
    dispatch = Dispatch()
    (delivery,) = received(dispatch, 1)
    assert begun(dispatch) == [1]
    assert delivery.waited is not None
    dispatch.wait(delivery, 0.0, until=5.0)
    assert delivery.waited is None


def test_what_a_limit_lets_begin_together_begins_in_order() -> None:
    limit = Closed()
    dispatch = Dispatch(limits=[limit])
    received(dispatch, 1, 2, 3)
    assert begun(dispatch) == []
    limit.lets = 3
    assert dispatch.open(limit, "", 2, 0.0) == 2
    assert begun(dispatch) == [1, 2]


def test_all_that_waits_behind_one_at_a_limit_is_more_than_a_worker_asks_for() -> None:
    dispatch = Dispatch(key=str, limits=[Closed()])
    received(dispatch, 1, 2, 3)
    assert begun(dispatch) == []
    assert dispatch.surplus(64) == 3


def test_a_key_is_free_when_all_of_it_was_given_back() -> None:
    dispatch = Dispatch(key=str)
    received(dispatch, 1, 2)
    assert begun(dispatch) == [1]
    dispatch.withdraw(running=True)
    received(dispatch, 3)
    assert begun(dispatch) == [3]


def test_a_decision_is_carried_out_once() -> None:
    dispatch = Dispatch(pace=(closed := pace()))
    (delivery,) = received(dispatch, 1)
    assert begun(dispatch) == [1]
    dispatch.wait(delivery, 0.0, until=5.0)
    closed.close(100.0)
    assert dispatch.retry_now(1, 1.0)
    delivery.at_once = True
    assert not dispatch.retry_now(1, 1.0)


def test_while_shut_four_of_five_are_first_tries() -> None:
    for chance, sequence in ((0.79, 1), (0.81, 2)):
        shut = pace()
        dispatch = Dispatch(pace=shut, screens=True, pick=partial(float, chance))
        received(dispatch, 1)
        received(dispatch, 2, tried=True)
        shut.shut(0.0)
        assert begun(dispatch, 1.0) == [sequence]


def test_first_tries_are_picked_at_random_where_they_fail_and_retries_do_not() -> None:
    failing = pace()
    dispatch = Dispatch(pace=failing, screens=True, pick=lambda: 0.99)
    received(dispatch, 1, 2, 3)
    for _ in range(FULL - 1):
        failing.failed(0.0, again=False, away=False)
    assert dispatch.begin(0.0) is dispatch.held[3]


def test_one_that_is_to_run_alone_does_although_a_person_has_decided_about_it() -> None:
    dispatch = Dispatch(screens=True)
    dispatch.received(delivery := Delivered(1, num_delivered=3), 0.0)
    dispatch.decided(delivery, 0.0, tried=True, alone=True, at_once=True)
    assert delivery.place == ALONE


def test_one_that_has_run_alone_is_one_of_the_others_afterwards() -> None:
    dispatch = Dispatch(screens=True, key=str)
    dispatch.received(delivery := Delivered(1, num_delivered=3), 0.0)
    dispatch.decided(delivery, 0.0, tried=True, alone=True)
    assert begun(dispatch) == [1]
    dispatch.wait(delivery, 0.0, until=1.0)
    delivery.screened = True
    assert delivery.place != READY
    dispatch.retry_now(1, 0.5)
    dispatch.decided(delivery, 0.5, tried=True)
    assert delivery.place == AGAIN


def test_one_that_is_to_run_alone_and_that_a_limit_holds_is_decided_on_again_and_is_not_counted() -> None:
    limit = Closed()
    dispatch = Dispatch(screens=True, limits=[limit])
    dispatch.received(alone := Delivered(1, num_delivered=3), 0.0)
    assert dispatch.take_asked() is alone
    dispatch.decided(alone, 0.0, tried=True, alone=True)
    received(dispatch, 2)
    assert begun(dispatch) == []
    assert alone.place == GATE
    limit.lets = 1
    assert dispatch.open(limit, "", 1, 0.0) == 1
    assert begun(dispatch) == [2]
    assert dispatch.take_asked() is alone


@pytest.mark.parametrize("again", [True, False])
def test_a_retry_takes_no_turn_from_first_tries_while_they_alone_are_shut(again: bool) -> None:
    shut = pace()
    for _ in range(FULL):
        shut.failed(0.0, again=False, away=False)
    assert shut.is_shut
    shut.note_begin(1.0, 0.0, again=again)
    assert shut.lets(1.5, first=True, again=False)[0] is again
