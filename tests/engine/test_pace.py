"""How fast an agent begins while what it depends on is away (`engine.pace`)."""

from __future__ import annotations

from itertools import pairwise

import pytest

from aviso_workers.engine.pace import FIFO, FIRST_SECONDS, FIRST_SHARE, FULL, GAIN, JITTER, LONGEST_SECONDS, Pace


class Agent:
    """What runs of an agent, and what it was told."""

    def __init__(self, *, most: int = 8) -> None:
        self.first = self.again = self.told = 0
        self.pace = Pace(running=lambda: (self.first, self.again), tell=self._hear)
        self.pace.most += most

    def _hear(self) -> None:
        self.told += 1

    def fail(self, count: int, *, now: float = 0.0, again: bool = False, away: bool = True) -> None:
        for _ in range(count):
            self.pace.failed(now, again=again, away=away)

    def lets(self, now: float = 0.0) -> tuple[bool, bool]:
        """Return whether a first try and whether a retry may begin."""
        return self.pace.lets(now, first=True, again=True)


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def shut(agent: Agent) -> Agent:
    """An agent of which a hundred calls have failed at second 0."""
    agent.fail(FULL)
    return agent


# The credit


@pytest.mark.parametrize(
    ("again", "away", "left"),
    [(False, True, (1, 1)), (False, False, (1, 0)), (True, True, (0, 1)), (True, False, (0, 0))],
    ids=["first try away", "first try wrong", "retry away", "retry wrong"],
)
def test_a_failure_takes_one_from_whose_it_is(agent: Agent, again: bool, away: bool, left: tuple[int, int]) -> None:
    agent.fail(1, again=again, away=away)
    assert (FULL - agent.pace.credit, FULL - agent.pace.retries) == left


def test_a_success_gives_thirty_to_first_tries_and_to_retries(shut: Agent) -> None:
    shut.pace.succeeded()
    assert (shut.pace.credit, shut.pace.retries) == (GAIN, GAIN) == (30, 30)


def test_credit_has_an_end_on_both_sides(shut: Agent) -> None:
    shut.fail(10, now=1.0)
    assert (shut.pace.credit, shut.pace.retries) == (0, 0)
    for _ in range(10):
        shut.pace.succeeded()
    assert (shut.pace.credit, shut.pace.retries) == (FULL, FULL)


@pytest.mark.parametrize("failing", [1, 2, 5, 9, 29])
def test_what_succeeds_now_and_then_never_shuts_the_pace(agent: Agent, failing: int) -> None:
    for _ in range(1000):
        agent.fail(failing)
        agent.pace.succeeded()
        assert not agent.pace.is_shut


def test_a_hundred_failures_in_a_row_shut_the_pace_and_ninety_nine_do_not(agent: Agent) -> None:
    agent.fail(99)
    assert not agent.pace.is_shut
    assert agent.lets()[0]
    agent.fail(1)
    assert agent.pace.is_shut
    assert agent.lets() == (False, False)


def test_retries_that_go_wrong_for_ever_stop_nobody(agent: Agent) -> None:
    agent.fail(10_000, again=True, away=False)
    assert agent.pace.is_full


def test_retries_of_what_is_away_stop_no_first_try(agent: Agent) -> None:
    agent.fail(10_000, again=True, away=True)
    assert agent.lets() == (True, False)
    assert agent.lets(now=FIRST_SECONDS) == (True, True)


def test_first_tries_of_what_is_away_leave_no_time_for_retries(agent: Agent) -> None:
    agent.fail(FULL, again=True, away=True)
    for second in range(1, 90):  # one first try a second comes, as slowly as retries are made
        assert agent.lets(now=second)[0]
        agent.pace.note_begin(second, 0.0, again=False)
        assert agent.lets(now=second + 0.9) == (True, False)
        agent.fail(1, now=second + 0.9)


# In which order


@pytest.mark.parametrize(("credit", "at_random"), [(FULL, False), (FIFO, False), (FIFO - 1, True), (0, True)])
def test_below_sixty_the_next_one_is_picked_at_random(agent: Agent, credit: int, at_random: bool) -> None:
    agent.fail(FULL - credit)
    assert agent.pace.picks(again=False) is at_random
    assert agent.pace.picks(again=True) is at_random
    assert agent.pace.free is not at_random


def test_four_of_five_are_first_tries_while_the_pace_is_shut(shut: Agent) -> None:
    assert FIRST_SHARE == 0.8
    assert [shut.pace.prefers_first(tenth / 10) for tenth in range(10)] == [True] * 8 + [False] * 2


# While it is shut


def begin_times(agent: Agent, count: int, *, random: float, away: bool = True) -> list[float]:
    """Return when so many begin, each of which fails at once."""
    now, times = 0.0, []
    for _ in range(count):
        now = agent.pace.again_at(now, first=True, again=True)
        assert agent.lets(now) == (True, True)
        agent.pace.note_begin(now, random, again=False)
        assert agent.lets(now) == (False, False), "only one of both kinds begins"
        agent.pace.failed(now, again=False, away=away)
        times.append(now)
    return times


def test_one_begins_each_second_or_a_fifth_later_while_what_fails_is_wrong() -> None:
    for random in (0.0, 0.5, 1.0):
        agent = Agent()
        agent.fail(FULL, away=False)
        times = [0.0]
        for _ in range(50):
            times.append(agent.pace.again_at(times[-1], first=True, again=False))
            agent.pace.note_begin(times[-1], random, again=False)
            agent.fail(1, now=times[-1], away=False)
        gaps = [after - before for before, after in pairwise(times[1:])]
        assert gaps == pytest.approx([1.0 + JITTER * random] * 49)


def test_what_fails_while_all_is_away_begins_ever_less_often(shut: Agent) -> None:
    times = begin_times(shut, 120, random=0.0)
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == FIRST_SECONDS
    assert gaps[:3] == pytest.approx([1.0, 1.02, 1.02**2])
    assert gaps[-1] == pytest.approx(LONGEST_SECONDS) == pytest.approx(4.0)


def test_a_success_begins_the_intervals_anew(shut: Agent) -> None:
    times = begin_times(shut, 100, random=0.0)
    shut.pace.succeeded()
    shut.fail(FULL, now=times[-1])
    assert shut.pace.again_at(times[-1], first=True, again=True) == times[-1] + FIRST_SECONDS


def test_retries_are_not_paced_while_first_tries_are_wrong(agent: Agent) -> None:
    agent.fail(FULL, away=False)
    assert agent.lets() == (False, True)
    agent.pace.note_begin(0.0, 0.0, again=True)
    assert agent.lets() == (False, True)
    assert agent.pace.again_at(0.0, first=True, again=True) == FIRST_SECONDS, "the retry has not put off the first try"


# How it opens


def test_the_first_success_opens_two_and_each_further_one_more(shut: Agent) -> None:
    for most in (2, 3, 4, 5):
        shut.pace.succeeded()
        shut.first, shut.again = most - 1, 0
        assert shut.lets()[0]
        shut.first = most
        assert not shut.lets()[0]


def test_retries_open_as_first_tries_do_until_there_is_credit(shut: Agent) -> None:
    shut.pace.succeeded()
    shut.again = 1
    assert shut.lets()[1]
    shut.again = 2
    assert not shut.lets()[1]
    shut.pace.succeeded()  # 60: from here on retries are not limited
    shut.again = 8
    assert shut.lets()[1]


def test_all_may_run_once_so_many_may_as_can(shut: Agent) -> None:
    for _ in range(9):
        shut.pace.succeeded()
    shut.first = 1_000
    assert shut.lets() == (True, True)
    assert shut.pace.is_full


def test_a_failure_while_it_opens_shuts_it_only_where_the_credit_is_used_up(shut: Agent) -> None:
    shut.pace.succeeded()
    shut.fail(29)
    assert not shut.pace.is_shut
    shut.fail(1)
    assert shut.pace.is_shut


def test_who_waits_is_told_of_each_success_that_opens_it(shut: Agent) -> None:
    told = shut.told
    shut.pace.succeeded()
    shut.pace.succeeded()
    assert shut.told == told + 2


def test_an_agent_is_told_when_its_pace_is_not_free_any_more(agent: Agent) -> None:
    agent.fail(FULL - FIFO)
    assert (agent.pace.free, agent.told) == (True, 0)
    agent.fail(1)
    assert (agent.pace.free, agent.told) == (False, 1)


def test_a_success_tells_nobody_where_nothing_has_failed(agent: Agent) -> None:
    agent.pace.succeeded()
    assert agent.told == 0


# What is said by others


def test_nothing_begins_before_the_time_that_was_asked_for(agent: Agent) -> None:
    agent.pace.close(30.0)
    agent.pace.close(20.0)
    assert agent.lets(29.9) == (False, False)
    assert agent.pace.again_at(5.0, first=True, again=True) == 30.0
    assert agent.lets(30.0) == (True, True)
    assert agent.pace.free


def test_a_success_does_not_open_before_that_time(agent: Agent) -> None:
    agent.pace.close(30.0)
    agent.pace.succeeded()
    assert agent.lets(10.0) == (False, False)


def test_a_person_shuts_it_as_a_hundred_failures_do(agent: Agent) -> None:
    agent.pace.shut(5.0)
    assert agent.pace.is_shut
    assert agent.lets(5.9) == (False, False)
    assert agent.lets(6.0) == (True, True)


def test_to_shut_it_again_puts_nothing_off(shut: Agent) -> None:
    shut.pace.shut(0.9)
    assert shut.lets(FIRST_SECONDS) == (True, True)


def test_a_person_opens_it(shut: Agent) -> None:
    shut.pace.close(30.0)
    shut.pace.reset()
    assert shut.pace.is_full
    assert shut.lets() == (True, True)
