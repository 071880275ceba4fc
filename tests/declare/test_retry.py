"""How long is waited before something is tried again."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from aviso_workers.aviso.literals import SECOND
from aviso_workers.declare.retry import MAX_LATER_SECONDS, Restarts, RetryPolicy, RetryShare, Tries
from aviso_workers.errors import DeclarationError
from aviso_workers.jetstream.fields import DEFAULT_DUPLICATE_WINDOW

STEADY = RetryPolicy(first=1.0, factor=3.0, jitter=0.0)
DOUBLING = RetryPolicy(first=1.0, factor=2.0, max=3.0, jitter=0.0)


def test_the_default_policy_ends_within_the_default_duplicate_window() -> None:
    """Or what a handler publishes before it fails would be stored twice by its last tries."""
    retry, handler_seconds = RetryPolicy(), 8.0
    attempts = retry.attempts or 0
    waits = sum(structs.replace(retry, jitter=0.0).delay_seconds(n) for n in range(1, attempts))
    longest = waits * (1 + retry.jitter) + (attempts - 1) * handler_seconds
    assert longest <= DEFAULT_DUPLICATE_WINDOW / SECOND


def test_the_waits_multiply_up_to_the_longest() -> None:
    waits = [STEADY.delay_seconds(failures) for failures in (1, 2, 3, 4, 7, 8, 1000)]
    assert waits == [1.0, 3.0, 9.0, 27.0, 600.0, 600.0, 600.0]


@given(
    st.builds(
        RetryPolicy,
        first=st.floats(0, 1e6),
        factor=st.floats(1, 100),
        max=st.floats(0, 1e6),
        jitter=st.floats(0, 1),
    ),
    st.integers(1, 10**9),
)
def test_a_wait_stays_within_the_jitter_around_the_longest(retry: RetryPolicy, failures: int) -> None:
    assert 0 <= retry.delay_seconds(failures) <= retry.max * (1 + retry.jitter) * (1 + 1e-9)


def test_what_failed_together_does_not_come_back_together() -> None:
    waits = {RetryPolicy().delay_seconds(1) for _ in range(20)}
    assert len(waits) > 1
    assert all(0.9 <= wait <= 1.1 for wait in waits), waits


@pytest.mark.parametrize(
    ("stated", "complaint"),
    [
        ({"attempts": 0}, "RetryPolicy: attempts must be a whole number from 1 on, or None for no end, found 0"),
        ({"first": -1.0}, "RetryPolicy: first must be a number from 0 to 31622400, found -1.0"),
        ({"max": float("nan")}, "RetryPolicy: max must be a number from 0 to inf, found nan"),
        ({"factor": 0.5}, "RetryPolicy: factor must be a number from 1 to 1000, found 0.5"),
        ({"first": "1"}, "RetryPolicy: first: duration must include a unit suffix .*, unlike '1'"),
        ({"first": 1e12}, "RetryPolicy: first must be a number from 0 to 31622400, found 1000000000000.0"),
        ({"attempts": 2.5}, "RetryPolicy: attempts must be a whole number from 1 on, or None for no end, found 2.5"),
        ({"jitter": 2.0}, "RetryPolicy: jitter must be a number from 0 to 1, found 2.0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(stated: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DeclarationError, match=complaint):
        RetryPolicy(**stated)


def test_no_wait_is_longer_than_a_server_keeps() -> None:
    waits = [RetryPolicy(max=longest, jitter=0.0).delay_seconds(1000) for longest in (1e12, math.inf)]
    assert waits == [366 * 86400] * 2


def test_tries_end_where_the_next_one_would_come_too_late() -> None:
    tries = Tries(DOUBLING, until=10.0)
    assert [tries.next_wait(now) for now in (0.0, 1.0, 7.0, 7.1)] == [1.0, 2.0, 3.0, None]
    assert tries.failed == 4


def test_so_many_tries_are_made_at_least() -> None:
    tries = Tries(DOUBLING, until=0.0, least=3)
    assert [tries.next_wait(9.0) for _ in range(3)] == [1.0, 2.0, None]


def test_the_waits_before_a_restart_begin_anew_after_a_healthy_run() -> None:
    restarts = Restarts(DOUBLING, healthy_seconds=30.0)
    assert [restarts.next_wait(0.0) for _ in range(3)] == [1.0, 2.0, 3.0], "it did not even start"
    restarts.note_start(100.0)
    assert (restarts.next_wait(130.0), restarts.failures) == (3.0, 4)
    restarts.note_start(200.0)
    assert (restarts.next_wait(230.1), restarts.failures) == (1.0, 1)


class TestTheShareOfRetries:
    def delays(self, *after: float, takes: float, new_wait: bool = True) -> list[float]:
        share = RetryShare()
        return [
            round(share.delay_seconds(100.0, seconds, takes_seconds=takes, new_wait=new_wait), 6) for seconds in after
        ]

    def test_the_first_is_retried_when_its_policy_says(self) -> None:
        assert self.delays(3.7, takes=0.2) == [3.7]

    def test_half_of_each_second_is_left_to_what_is_new(self) -> None:
        assert self.delays(*[1.0] * 6, takes=0.25) == [1.0, 1.5, 2.0, 2.5, 3.0, 3.5]

    def test_where_nothing_new_waits_all_are_retried_when_their_policy_says(self) -> None:
        assert self.delays(*[1.0] * 6, takes=0.25, new_wait=False) == [1.0] * 6

    def test_one_that_waits_for_long_does_not_hold_up_others(self) -> None:
        assert self.delays(600.0, 1.0, takes=0.5) == [600.0, 1.0]

    def test_one_that_takes_long_leaves_as_much_time_after_it(self) -> None:
        assert self.delays(1.0, 1.0, takes=3.0) == [1.0, 7.0]

    def test_none_is_retried_later_than_that_by_more_than_ten_minutes(self) -> None:
        assert max(self.delays(*[1.0] * 20, takes=60.0)) <= 1.0 + MAX_LATER_SECONDS + 1.0

    def test_seconds_that_are_over_are_forgotten(self) -> None:
        share = RetryShare()
        for now in (0.0, 10.0):
            delays = [share.delay_seconds(now, 1.0, takes_seconds=0.5, new_wait=True) for _ in range(3)]
            assert delays == [1.0, 2.0, 3.0]

    def test_what_is_due_waits_where_retries_have_taken_more_than_their_share(self) -> None:
        share = RetryShare()
        share.spend(10.0, 0.4)
        assert share.later_seconds(10.0) == 0.0
        share.spend(10.0, 2.6)
        assert share.later_seconds(10.0) == 6.0
        assert share.later_seconds(10.0) > 6.0, "that one has taken the time at which the first one comes"
        assert share.later_seconds(15.5) == 0.0
