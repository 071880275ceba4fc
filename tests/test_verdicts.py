"""The one place that decides what becomes of a delivery."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aviso_workers.errors import DeclarationError, UndecodableError
from aviso_workers.verdicts import Ack, Again, Backoff, DeadLetter, Reject, Retry, decide

STEADY = Backoff(jitter=0.0)


@pytest.mark.parametrize("failures", [0, 5, 1000])
@pytest.mark.parametrize("returned", [None, 42, "done"])
def test_what_succeeds_is_acked(failures: int, returned: object) -> None:
    assert decide(returned, failures=failures, retry=STEADY) == Ack()


def test_what_fails_is_tried_again_after_a_wait_and_says_why() -> None:
    assert decide(ConnectionError("no"), failures=0, retry=STEADY) == Again(after_seconds=1.0, reason="ConnectionError")
    assert decide(TimeoutError(), failures=4, retry=STEADY) == Again(after_seconds=81.0, reason="TimeoutError")


@pytest.mark.parametrize("failures", [5, 6, 1000])
def test_the_last_attempt_is_followed_by_a_dead_letter(failures: int) -> None:
    assert decide(ConnectionError(), failures=failures, retry=STEADY) == DeadLetter(reason="attempts_exhausted")
    assert decide(Retry(after=1), failures=failures, retry=STEADY) == DeadLetter(reason="attempts_exhausted")


def test_one_attempt_means_no_second_one() -> None:
    assert decide(ConnectionError(), failures=0, retry=Backoff(attempts=1)) == DeadLetter(reason="attempts_exhausted")


def test_what_cannot_be_decoded_is_never_tried_again() -> None:
    assert decide(UndecodableError("?"), failures=0, retry=STEADY) == DeadLetter(reason="undecodable")


def test_who_asks_to_be_tried_again_may_say_when() -> None:
    assert decide(Retry(after=30), failures=0, retry=STEADY) == Again(after_seconds=30.0, reason="Retry")
    assert decide(Retry(), failures=1, retry=STEADY) == Again(after_seconds=3.0, reason="Retry")


def test_what_is_rejected_is_never_tried_again() -> None:
    assert decide(Reject("no such field"), failures=0, retry=STEADY) == DeadLetter(reason="rejected")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionResetError(), Again(after_seconds=60.0, reason="Retry")),
        (KeyError("step"), DeadLetter(reason="rejected")),
        (FileExistsError(), Ack()),
        (ValueError(), Again(after_seconds=1.0, reason="ValueError")),
    ],
)
def test_the_first_classifier_that_fits_says_what_an_exception_means(error: Exception, expected: object) -> None:
    classifiers = [
        (ConnectionError, lambda _: Retry(after=60)),
        (LookupError, lambda found: Reject(str(found))),
        (FileExistsError, lambda _: None),
        (OSError, lambda _: Reject("too late to be asked")),
    ]
    assert decide(error, failures=0, retry=STEADY, classifiers=classifiers) == expected


def test_the_waits_multiply_up_to_the_longest() -> None:
    waits = [STEADY.delay_seconds(failures) for failures in (1, 2, 3, 4, 7, 8, 1000)]
    assert waits == [1.0, 3.0, 9.0, 27.0, 600.0, 600.0, 600.0]


@given(
    st.builds(
        Backoff,
        first=st.floats(0, 1e6),
        factor=st.floats(1, 100),
        max=st.floats(0, 1e6),
        jitter=st.floats(0, 1),
    ),
    st.integers(1, 10**9),
)
def test_a_wait_stays_within_the_jitter_around_the_longest(retry: Backoff, failures: int) -> None:
    assert 0 <= retry.delay_seconds(failures) <= retry.max * (1 + retry.jitter) * (1 + 1e-9)


def test_what_failed_together_does_not_come_back_together() -> None:
    waits = {Backoff().delay_seconds(1) for _ in range(20)}
    assert len(waits) > 1
    assert all(0.9 <= wait <= 1.1 for wait in waits), waits


@pytest.mark.parametrize(
    ("stated", "complaint"),
    [
        ({"attempts": 0}, "Backoff: attempts must be from 1 to inf, found 0"),
        ({"first": -1.0}, "Backoff: first must be from 0 to inf, found -1.0"),
        ({"max": float("nan")}, "Backoff: max must be from 0 to inf, found nan"),
        ({"factor": 0.5}, "Backoff: factor must be from 1 to 1000, found 0.5"),
        ({"jitter": 2.0}, "Backoff: jitter must be from 0 to 1, found 2.0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(stated: dict[str, float], complaint: str) -> None:
    with pytest.raises(DeclarationError, match=complaint):
        Backoff(**stated)  # type: ignore[arg-type]
