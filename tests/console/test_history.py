"""The rates of the last quarter of an hour, and how they are drawn."""

from __future__ import annotations

import math
from typing import Any

import pytest

from aviso_workers.console.overview import POINTS, STEP_SECONDS, Recent, sparkline, spoken

INDEX, OTHER = ("field", "index"), ("field", "other")


def seen(*deliveries: int, every: float = STEP_SECONDS) -> Recent:
    """What is seen of an agent that was delivered so many by each look."""
    recent = Recent()
    for number, count in enumerate(deliveries):
        recent.add(number * every, {INDEX: count})
    return recent


def test_the_newest_rate_comes_last() -> None:
    values = seen(0, 15, 45).rates.by_agent[INDEX]
    assert (len(values), values[-2:]) == (POINTS, [1.0, 2.0])
    assert all(math.isnan(value) for value in values[:-2])


def test_looks_that_follow_each_other_soon_are_one_point() -> None:
    values = seen(*range(0, 31, 2), every=2.0).rates.by_agent[INDEX]
    assert [value for value in values if math.isfinite(value)] == [1.0]


def test_what_happened_while_nobody_looked_is_a_gap() -> None:
    recent = seen(0, 15)
    recent.add(600.0, {INDEX: 9000})
    recent.add(615.0, {INDEX: 9015, OTHER: 7})
    found = recent.rates
    assert [value for value in found.by_agent[INDEX] if math.isfinite(value)] == [1.0, 1.0]
    assert found.by_agent[OTHER][-1] == 0.0, "how many it had before is not known"
    assert found.total[-1] == 1.0


def test_what_is_older_than_a_quarter_of_an_hour_is_left_out() -> None:
    recent = seen(0, 15)
    assert INDEX in recent.rates.by_agent
    recent.add(STEP_SECONDS * (POINTS + 1), {})
    assert recent.rates.by_agent == {}


def test_a_consumer_that_was_made_again_has_no_negative_rate() -> None:
    assert seen(900, 15).rates.by_agent[INDEX][-1] == 0.0


@pytest.mark.parametrize(
    ("values", "data"),
    [
        ([], ""),
        ([math.nan], ""),
        ([0.0, 0.0], "M0,17.0h0L1,17.0"),
        ([0.0, math.nan, 5.0, 10.0], "M0,17.0h0M3,9.0h0L4,1.0"),
    ],
)
def test_a_sparkline_is_as_high_as_its_values_and_has_gaps(values: list[float], data: str) -> None:
    assert sparkline(values) == data


@pytest.mark.parametrize(
    ("values", "said"),
    [([math.nan], "not known"), ([1.0, math.nan, 1500.0, 3.25], "now 3.2, at most 1,500.0, at least 1.0")],
)
def test_a_sparkline_is_said_in_words(values: list[float], said: Any) -> None:
    assert spoken(values) == said
