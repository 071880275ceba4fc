"""The size and the shape of the package, which may only become smaller.

Who raises a budget says in the commit message what a user gets for it. `scripts/figures` prints the figures.
"""

from __future__ import annotations

import pytest

import _figures

BUDGETS: dict[str, int] = {}
SLACK = 0.98
"""A figure below this part of its budget lowers the budget in the same commit."""


@pytest.fixture(scope="module")
def found() -> dict[str, int]:
    return _figures.figures()


@pytest.mark.parametrize("name", BUDGETS)
def test_a_figure_is_within_its_budget(found: dict[str, int], name: str) -> None:
    assert found[name] <= BUDGETS[name], f"{name}: say in the commit message what a user gets for more"


@pytest.mark.parametrize("name", BUDGETS)
def test_a_budget_follows_its_figure(found: dict[str, int], name: str) -> None:
    assert found[name] >= SLACK * BUDGETS[name] - 1, f"lower the budget of {name} to {found[name]}"


def test_each_module_of_the_reading_list_exists() -> None:
    reading = _figures.reading_list()
    assert [str(path) for path in reading if not (_figures.PROJECT / path).is_file()] == []
    assert len(reading) > 20
