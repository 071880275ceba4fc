"""The size and the shape of the package, which may only become smaller, and the public tests, which may only increase.

Who raises a budget says in the commit message what a user gets for it. `scripts/figures` prints the figures.
"""

from __future__ import annotations

import pytest

import _figures

BUDGETS = {
    "lines": 75_223,
    "lines of the core": 41_200,
    "lines of agents": 842,
    "lines of aviso": 2_806,
    "lines of aviso_workers": 4_409,
    "lines of backends": 6_835,
    "lines of cli": 6_309,
    "lines of config": 2_908,
    "lines of console": 3_329,
    "lines of declare": 4_215,
    "lines of engine": 7_893,
    "lines of jetstream": 2_451,
    "lines of ops": 14_958,
    "lines of projects": 77,
    "lines of server": 2_174,
    "lines of spark": 6_334,
    "lines of state": 2_831,
    "lines of telemetry": 2_284,
    "lines of worker": 1_074,
    "modules that a plain worker loads": 160,
    "lines that a plain worker loads": 33_909,
    "modules of the reading list": 33,
    "lines of the reading list": 10_655,
    "files that use tables": 9,
    "files that use windows": 10,
    "files that use timers": 10,
    "files that use limits": 6,
    "files that use delayed delivery": 9,
    "files that use singletons": 5,
    "files that use dead letters": 13,
    "files that use order": 2,
    "class names that stand twice": 7,
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
