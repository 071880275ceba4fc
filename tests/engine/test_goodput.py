"""How fast agents handle what can succeed while other calls fail, in virtual time. `scripts/goodput` has all cases."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from _goodput import __main__ as goodput
from _goodput import cases
from _goodput.cases import Case, Kind, Row

RATES = [
    Case("random", 0.0, "away"),
    Case("random", 0.5, "away"),
    Case("random", 0.9, "wrong", concurrency=1),
    Case("notification", 0.5, "away", trickle=True),
    Case("runs of 10", 0.8, "wrong"),
    Case("runs of 50", 0.5, "away", concurrency=64),
    Case("runs of 50", 0.2, "undecodable"),
    Case("key", 0.8, "away", concurrency=1),
    Case("random", 0.5, "wrong", "order_by"),
    Case("key", 0.5, "away", "order_by"),
    Case("random", 0.8, "away", "batch"),
    Case("notification", 0.1, "wrong", "batch"),
    Case("runs of 50", 0.1, "away", "singleton", 1, trickle=True),
    Case("notification", 0.8, "away", "window", 1),
]
FORMS = [("plain", 8), ("order_by", 8), ("batch", 8), ("singleton", 1), ("window", 1)]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have fewer notifications wait than scripts/goodput does, and leave chance to other tests as it was."""
    monkeypatch.setattr(cases, "BACKLOG", 1000)
    monkeypatch.setattr(cases, "WINDOWS", 300)
    state = random.getstate()
    yield
    random.setstate(state)


@pytest.mark.parametrize("case", RATES, ids=str)
def test_what_can_succeed_is_handled_at_nine_tenths_of_the_rate_with_pacing_off(case: Case) -> None:
    assert case.is_promised
    row = cases.measure(case)
    assert row.successes > 0
    assert row.ratio >= cases.PROMISED, row


@pytest.mark.parametrize("waiting", [True, False], ids=["backlog", "1/s"])
@pytest.mark.parametrize(("form", "concurrency"), FORMS)
def test_an_outage_costs_a_call_a_second_and_ten_seconds_at_its_end(form: str, concurrency: int, waiting: bool) -> None:
    assert cases.outage(form, concurrency, waiting=waiting) == []


@pytest.mark.parametrize(("form", "concurrency"), [("order_by", 8), ("singleton", 1)])
def test_where_all_is_wrong_a_worker_makes_at_most_a_dead_letter_a_second(form: str, concurrency: int) -> None:
    rate, exact = cases.all_wrong(form, concurrency)
    assert 0 < rate <= goodput.MOST_DEAD_LETTERS
    assert exact, "each has used its attempts"


@pytest.mark.parametrize("kind", cases.KINDS)
def test_what_comes_behind_five_hundred_that_fail_is_handled_within_a_minute(kind: Kind) -> None:
    assert cases.behind_a_run("plain", 8, kind) <= goodput.LAST_SECONDS


def test_the_table_has_the_least_rate_of_all_concurrencies() -> None:
    case = Case("random", 0.5, "away", concurrency=1)
    rows = [Row(case, 0.95, 1, 1, 1), Row(case._replace(concurrency=8), 0.91, 1, 1, 1)]
    assert [line.split() for line in goodput.table(rows)][2] == ["plain", "backlog", "random", "away", "0.91"]


@pytest.mark.parametrize(
    ("pattern", "share", "form", "is_promised"),
    [
        ("runs of 50", 0.8, "plain", True),
        ("runs of 50", 0.9, "plain", False),
        ("runs of 50", 0.1, "order_by", False),
        ("runs of 500", 0.1, "plain", False),
        ("notification", 0.9, "plain", True),
        ("notification", 0.5, "batch", False),
    ],
)
def test_a_rate_is_promised_where_a_tenth_of_any_hundred_calls_succeeds(
    pattern: str, share: float, form: str, is_promised: bool
) -> None:
    assert Case(pattern, share, "away", form).is_promised is is_promised
    assert Row(Case(pattern, share, "away", form), 0.89, 1, 1, 1).falls_short is is_promised
