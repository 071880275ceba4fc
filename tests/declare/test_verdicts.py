"""The one place that decides what becomes of a delivery."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Generator
from datetime import timedelta
from typing import Any
from unittest.mock import MagicMock

import pytest

from aviso_workers.declare import verdicts
from aviso_workers.declare.retry import RetryPolicy
from aviso_workers.declare.verdicts import (
    Ack,
    Again,
    DeadLetter,
    Failure,
    PriorRecord,
    Reject,
    Retry,
    Verdict,
    before_handling,
    classify,
    decide,
    failure_returned,
)
from aviso_workers.errors import (
    DeclarationError,
    DeliveriesExhaustedError,
    InvalidNotificationError,
    LateError,
    UndecodableError,
    WorkerDiedError,
    describe,
)

STEADY = RetryPolicy(first=1.0, factor=3.0, jitter=0.0)


def decided(error: BaseException, *, failures: int = 0, retry: RetryPolicy = STEADY) -> Verdict:
    """The verdict on what an agent without `on_error` raised."""
    failure = classify(Failure(error), [])
    assert isinstance(failure, Failure)
    return decide(failure, failures=failures, retry=retry)


def test_what_fails_is_tried_again_after_a_wait_and_says_why() -> None:
    assert decided(ConnectionError("no")) == Again(after_seconds=1.0, reason="ConnectionError")
    assert decided(TimeoutError(), failures=4) == Again(after_seconds=81.0, reason="TimeoutError")
    assert decided(SystemExit(2)) == Again(after_seconds=1.0, reason="SystemExit")


@pytest.mark.parametrize("failures", [5, 6, 1000])
def test_the_last_attempt_is_followed_by_a_dead_letter(failures: int) -> None:
    assert decided(ConnectionError(), failures=failures) == DeadLetter(reason="attempts_exhausted")
    assert decided(Retry(after=1), failures=failures) == DeadLetter(reason="attempts_exhausted")


def test_one_attempt_means_no_second_one() -> None:
    assert decided(ConnectionError(), retry=RetryPolicy(attempts=1)) == DeadLetter(reason="attempts_exhausted")


def test_what_our_own_step_found_to_be_final_is_never_tried_again() -> None:
    failure = Failure(UndecodableError("?"), final="undecodable")
    assert decide(failure, failures=0, retry=STEADY) == DeadLetter(reason="undecodable")


@pytest.mark.parametrize("error", [UndecodableError("?"), InvalidNotificationError("?"), LateError("?")])
def test_the_type_of_what_a_handler_raises_decides_nothing(error: Exception) -> None:
    assert decided(error) == Again(after_seconds=1.0, reason=type(error).__name__)


def test_a_worker_that_died_is_a_failed_attempt_of_which_no_on_error_function_is_asked() -> None:
    died = Failure(WorkerDiedError(6), worker_died=True)
    assert classify(died, [(Exception, lambda _: Ack())]) == died
    assert decide(died, failures=0, retry=STEADY) == Again(after_seconds=1.0, reason="WorkerDiedError")
    assert decide(died, failures=5, retry=STEADY) == DeadLetter(reason="worker_died")
    exhausted = Failure(DeliveriesExhaustedError(30), final="max_deliveries")
    assert classify(exhausted, [(Exception, lambda _: Ack())]) == exhausted
    assert decide(exhausted, failures=0, retry=STEADY) == DeadLetter(reason="max_deliveries")


def test_who_asks_to_be_tried_again_may_say_when() -> None:
    assert decided(Retry(after=30)) == Again(after_seconds=30.0, reason="Retry")
    assert decided(Retry(), failures=1) == Again(after_seconds=3.0, reason="Retry")


@pytest.mark.parametrize("after", [1_764_083_318_000, 10**400, math.inf, "5", timedelta(days=400), -0.1])
def test_who_asks_for_a_wait_that_no_server_keeps_is_told_what_it_may_be(after: Any) -> None:
    with pytest.raises(
        DeclarationError,
        match=r"Retry: after must be a duration from 0 to 31622400 seconds \(366 days\) from now on, such as",
    ):
        Retry(after=after)


def test_what_is_rejected_is_never_tried_again() -> None:
    assert decided(Reject("no such field")) == DeadLetter(reason="rejected")


def test_a_reject_without_a_reason_says_how_to_write_one() -> None:
    with pytest.raises(DeclarationError, match=r'Reject: say why .*: Reject\("no such field"\)'):
        raise Reject


class TestClassify:
    """What an author says of an exception by `on_error`."""

    def classified(self, error: BaseException, *classifiers: tuple[type[Exception], Any]) -> Failure | Ack:
        return classify(Failure(error), classifiers)

    def verdict(self, error: BaseException, *classifiers: tuple[type[Exception], Any]) -> Verdict | Ack:
        found = self.classified(error, *classifiers)
        return found if isinstance(found, Ack) else decide(found, failures=0, retry=STEADY)

    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (ConnectionResetError(), Again(after_seconds=60.0, reason="ConnectionResetError")),
            (KeyError("step"), DeadLetter(reason="rejected")),
            (FileExistsError(), Ack()),
            (ValueError(), Again(after_seconds=1.0, reason="ValueError")),
        ],
    )
    def test_the_first_that_fits_says_what_an_exception_means(self, error: Exception, expected: object) -> None:
        classifiers = [
            (ConnectionError, lambda _: Retry(after=60)),
            (LookupError, lambda found: Reject(str(found))),
            (FileExistsError, lambda _: Ack()),
            (OSError, lambda _: Reject("too late to be asked")),
        ]
        assert self.verdict(error, *classifiers) == expected

    def test_none_is_no_answer_so_that_the_next_is_asked_and_then_the_policy_decides(self) -> None:
        nothing = (Exception, lambda _: None)
        assert self.verdict(OSError(), nothing) == Again(after_seconds=1.0, reason="OSError")
        assert self.verdict(OSError(), nothing, (OSError, lambda _: Ack())) == Ack()

    def test_what_our_own_step_found_may_be_done_all_the_same(self) -> None:
        failure = Failure(LateError(), final="late")
        assert classify(failure, [(LateError, lambda _: Ack())]) == Ack()
        assert classify(failure, [(LateError, lambda _: None)]) == failure

    @pytest.mark.parametrize("said", [Retry(after=5), Reject("no such field")])
    def test_what_the_handler_has_said_is_an_answer_already(self, said: Exception) -> None:
        assert self.verdict(said, (Exception, lambda _: Ack())) == decided(said)

    @pytest.mark.parametrize(
        ("raised", "expected"),
        [
            (Retry(after=5), Again(after_seconds=5.0, reason="OSError")),
            (Reject("no such field"), DeadLetter(reason="rejected")),
        ],
    )
    def test_an_answer_may_be_raised(self, raised: Exception, expected: Verdict) -> None:
        def classifier(error: Exception) -> None:
            raise raised

        error = OSError()
        assert self.verdict(error, (OSError, classifier)) == expected
        found = self.classified(error, (OSError, classifier))
        assert isinstance(found, Failure)
        assert found.error is error, "what is told is what went wrong"

    def test_one_that_raises_the_exception_again_has_no_answer(self) -> None:
        def classifier(error: Exception) -> None:
            raise error

        error = OSError()
        assert self.classified(error, (OSError, classifier)) == Failure(error)

    @pytest.mark.parametrize("broken", [KeyError("step"), SystemExit(2)])
    def test_one_that_fails_is_a_failure_itself_and_the_exception_is_its_context(self, broken: BaseException) -> None:
        def classifier(error: Exception) -> None:
            raise broken

        error = OSError()
        assert self.classified(error, (OSError, classifier)) == Failure(broken)
        assert broken.__context__ is error

    @pytest.mark.parametrize("answer", [Retry, Reject, Ack, True, ValueError()])
    def test_another_answer_is_a_mistake_that_is_told(self, answer: object) -> None:
        def never_mind(error: Exception) -> object:
            return answer

        found = self.classified(OSError(), (OSError, never_mind))
        assert isinstance(found, Failure)
        assert isinstance(found.error, DeclarationError)
        assert "on_error: never_mind returned" in str(found.error)
        assert "return Retry(), Reject(reason), Ack() or None" in str(found.error)


@pytest.mark.parametrize(("returned", "call"), [(Retry, r"Retry\(\)"), (Reject, r'Reject\("no such field"\)')])
def test_a_class_that_is_returned_is_a_failure_that_says_what_to_write(returned: object, call: str) -> None:
    failure = failure_returned(returned)
    assert failure is not None
    with pytest.raises(DeclarationError, match=f"returned the class .*: return {call} instead"):
        raise failure.error


async def later() -> None: ...


async def each_later() -> AsyncIterator[int]:
    yield 1


class Ready:
    def __await__(self) -> Generator[None]:
        yield


def test_what_is_returned_before_it_has_run_is_a_failure_that_says_what_to_do() -> None:
    coroutine = later()
    for output, told in (
        (coroutine, "the coroutine later, of which nothing has run: await it"),
        (Ready(), "the Ready, of which nothing has run: await it"),
        (each_later(), "the async_generator each_later, of which nothing has run: loop over it with `async for`, and "),
    ):
        failure = failure_returned(output)
        assert failure is not None
        with pytest.raises(DeclarationError, match=f"the handler returned {told}"):
            raise failure.error
    coroutine.close()


@pytest.mark.parametrize("output", [None, 42, "done", ValueError, Ack()])
def test_what_else_is_returned_is_no_failure(output: object) -> None:
    assert failure_returned(output) is None


@pytest.mark.parametrize(
    ("known", "num_delivered", "expected"),
    [
        ({}, 2, "run_recorded"),
        ({}, 1000, "run_recorded"),
        ({"failures": 1, "ended": 1}, 2, "run"),
        ({"failures": 1, "ended": 1}, 3, "run_recorded"),
        ({"failures": 3, "ended": 3}, 4, "run"),
        ({"failures": 3}, 2, "run_recorded"),
        ({"began": "beside_others"}, 3, "run_alone"),
        ({"began": "beside_others", "failures": 2}, 3, "run_alone"),
        ({"began": "alone"}, 4, "worker_died"),
        ({"began": "alone", "failures": 5}, 9, "worker_died"),
        ({"stored": False, "failures": 9, "ended": 9}, 10, "run"),
        ({"stored": False}, 2, "run_recorded"),
        ({"stored": False}, 3, "run_alone"),
        ({"stored": False}, 23, "run_alone"),
        ({"stored": False}, 24, "max_deliveries"),
    ],
)
def test_what_is_delivered_again_is_run_alone_where_it_may_have_ended_its_worker(
    known: dict[str, Any], num_delivered: int, expected: str
) -> None:
    assert before_handling(PriorRecord(**known), num_delivered=num_delivered, retry=RetryPolicy(attempts=3)) == expected


class ForgetfulRetry(Retry):
    """Its constructor does not call that of Retry."""

    def __init__(self) -> None: ...


class MuteError(Exception):
    """Nothing can be read of it."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise KeyError("no class")

    @property
    def __context__(self) -> Any:  # type: ignore[override]
        raise KeyError("no context")


class TestObjectsOfTheAuthors:
    """What they raise when they are looked at is the failure of the notification, and ends no worker."""

    def test_a_retry_that_was_never_made_says_no_time(self) -> None:
        assert decided(ForgetfulRetry()) == Again(after_seconds=1.0, reason="Retry")

    @pytest.mark.parametrize("after", ["x", -1, math.nan, True, object()])
    def test_a_retry_that_was_changed_to_nonsense_is_a_failure_that_says_so(self, after: Any) -> None:
        said = Retry()
        said.after = after
        for failure in (classify(Failure(said), []), classify(Failure(OSError()), [(OSError, lambda _: said)])):
            assert isinstance(failure, Failure)
            assert isinstance(failure.error, DeclarationError)
            assert "Retry: after must be a duration from 0 to " in str(failure.error)
            assert decide(failure, failures=0, retry=STEADY) == Again(after_seconds=1.0, reason="DeclarationError")

    def test_an_exception_of_which_nothing_can_be_read_is_a_failure(self) -> None:
        failure = classify(Failure(MuteError()), [(OSError, lambda _: Ack())])
        assert isinstance(failure, Failure)
        assert describe(failure.error) == "KeyError: 'no class'"
        assert classify(Failure(OSError()), [(OSError, raising(MuteError()))])

    def test_a_mock_of_an_exception_is_not_one(self) -> None:
        for kind in (ValueError, Retry):
            failure = failure_returned(MagicMock(spec=kind))
            assert failure is not None
            assert str(failure.error) == "the handler returned a MagicMock, which is not an exception"
        answered = classify(Failure(OSError()), [(OSError, lambda _: MagicMock(spec=Retry))])
        assert isinstance(answered, Failure)
        assert isinstance(answered.error, DeclarationError)


def raising(error: BaseException) -> Any:
    def classifier(_: Exception) -> None:
        raise error

    return classifier


class TestUncounted:
    def test_it_is_asked_for_with_a_time_and_waits_a_second_at_least(self) -> None:
        assert Retry(after=0.1, counts=False).after == verdicts.LEAST_UNCOUNTED_SECONDS
        assert Retry(after="1m", counts=False).after == 60.0
        with pytest.raises(DeclarationError, match=r"Retry: counts=False needs the time to wait"):
            Retry(counts=False)

    def test_a_time_that_its_author_sets_later_is_held_to_the_same(self) -> None:
        instruction = Retry(after=60, counts=False)
        instruction.after = 0.0
        classified = verdicts.classify(Failure(instruction), [])
        assert isinstance(classified, Failure)
        assert verdicts.uncounted_seconds(classified) == verdicts.LEAST_UNCOUNTED_SECONDS

    def test_any_other_counts(self) -> None:
        for error in (Retry(after=1), Reject("no"), ValueError()):
            classified = verdicts.classify(Failure(error), [])
            assert isinstance(classified, Failure)
            assert verdicts.uncounted_seconds(classified) is None
