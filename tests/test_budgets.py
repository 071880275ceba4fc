"""The size and the shape of the package, which may only become smaller, and the public tests, which may only increase.

Code is counted without prose, imports, types and brackets (`scripts/_figures/code_lines.py`). Who raises a budget says
in the commit message what a user gets for it. `scripts/figures` prints the figures.
"""

from __future__ import annotations

import pytest

import _figures

BUDGETS = {
    "code of the core": 21_403,
    "code of agents": 519,
    "code of cli": 2_774,
    "code of console": 1_760,
    "code of ops": 8_181,
    "code of projects": 29,
    "code of server": 1_085,
    "code of spark": 3_124,
    "modules": 276,
    "modules that a plain worker loads": 126,
    "code that a plain worker loads": 17_058,
    "modules of the reading list": 29,
    "code of the reading list": 6_299,
    "files that use tables": 9,
    "files that use windows": 10,
    "files that use timers": 9,
    "files that use limits": 5,
    "files that use delayed delivery": 14,
    "files that use singletons": 5,
    "files that use dead letters": 18,
    "files that use order": 2,
    "class names that stand twice": 8,
    "functions above a complexity of 10": 0,
}
SLACK = 0.98
"""A figure below this part of its budget lowers the budget in the same commit."""
FLOORS = {"tests that touch public names only": 1_090}
"""Figures that may only rise: a test of behaviour outlives a change of the modules that it does not name."""


@pytest.fixture(scope="module")
def found() -> dict[str, int]:
    return _figures.figures()


@pytest.fixture(scope="module")
def tests() -> dict[str, int]:
    return _figures.figures_of_tests()


@pytest.mark.parametrize("name", BUDGETS)
def test_a_figure_is_within_its_budget(found: dict[str, int], name: str) -> None:
    assert found[name] <= BUDGETS[name], f"{name}: say in the commit message what a user gets for more"


@pytest.mark.parametrize("name", BUDGETS)
def test_a_budget_follows_its_figure(found: dict[str, int], name: str) -> None:
    assert found[name] >= SLACK * BUDGETS[name] - 1, f"lower the budget of {name} to {found[name]}"


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOORS)
def test_a_figure_is_not_below_its_floor(tests: dict[str, int], name: str) -> None:
    assert tests[name] >= FLOORS[name], f"{name}: `scripts/figures --tests` lists the others, and what they touch"


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOORS)
def test_a_floor_follows_its_figure(tests: dict[str, int], name: str) -> None:
    assert FLOORS[name] >= SLACK * tests[name] - 1, f"raise the floor of {name} to {tests[name]}"


def test_each_module_of_the_reading_list_exists() -> None:
    reading = _figures.reading_list()
    assert [str(path) for path in reading if not (_figures.PROJECT / path).is_file()] == []
    assert len(reading) > 20
