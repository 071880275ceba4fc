"""scripts/cost: what it counts, and when it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from _cost import __main__ as cost
from _cost import budget, callgrind
from _cost.budget import Cost
from _cost.contestants import OURS
from tests.programs import find

TOLERANCE = 0.001

COUNTED = """\
version: 1
events: Ir
fn=read'2
0 700
calls=2 0
0 5000
0 300
fn=write
0 30
cfn=read
fn=read
0 1
"""


def test_a_function_has_its_own_instructions_and_not_those_that_it_calls() -> None:
    assert callgrind.parse(COUNTED) == {"read": 1001, "write": 30}


@pytest.mark.slow
def test_a_count_is_of_what_lies_between_begin_and_end(tmp_path: Path) -> None:
    find("valgrind", package="valgrind")
    find("cc", package="gcc")

    def instructions(turns: int) -> float:
        code = (
            f"from _cost import counting\ncounting.begin()\nfor _ in range({turns}): pass\ncounting.end()\n[0] * 10**6"
        )
        process = callgrind.Process(arguments=("-c", code), notifications=1)
        return sum(runner.instructions(process).values())

    runner = callgrind.Runner(budget.PROJECT, {}, tmp_path)
    once, twice = instructions(10_000), instructions(20_000)
    assert once == pytest.approx(instructions(10_000), rel=TOLERANCE)
    assert twice == pytest.approx(2 * once, rel=0.2)


class Told:
    """A runner that counts what a test says."""

    def __init__(self, *instructions: float) -> None:
        self._left = list(instructions)

    def instructions(self, process: object) -> dict[str, float]:
        return {"eval": self._left.pop(0)}

    def calls(self, process: object) -> dict[str, float]:
        return {"codec.read": 2.0}


COMMITTED = Cost(100.0, {"eval": 100.0}, {"codec.read": 1.0})


@pytest.mark.parametrize(
    ("found", "again", "within"),
    [
        (102.9, (), True),
        (90.0, (), True),
        (104.0, (102.0,), True),
        (104.0, (104.5, 103.5), False),
        (104.0, (104.5, 102.0), True),
    ],
)
def test_what_is_three_percent_dearer_each_time_fails(found: float, again: Any, within: bool) -> None:
    assert cost._within(Told(*again), "replay", {"eval": found}, COMMITTED) is within  # type: ignore[arg-type]


def test_a_failure_says_which_functions_grew(capsys: pytest.CaptureFixture[str]) -> None:
    cost._within(Told(110.0, 110.0), "agent", {"eval": 110.0}, COMMITTED)  # type: ignore[arg-type]
    told = capsys.readouterr().out
    assert "agent: +10.0% against 100" in told
    assert "eval" in told
    assert "100 -> 110" in told
    assert "codec.read" in told
    assert "1.000 -> 2.000" in told


def test_what_has_no_committed_cost_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert not cost._within(Told(), "agent", {"eval": 1.0}, None)  # type: ignore[arg-type]
    assert "run scripts/cost agent --write" in capsys.readouterr().out


def test_costs_are_committed_of_all_that_is_counted() -> None:
    builds = budget.load()
    assert builds
    assert {name: set(costs) for name, costs in builds.items()} == {name: set(OURS) for name in builds}


def test_counts_hold_for_what_a_worker_needs_and_not_for_the_tools_of_developers() -> None:
    packages = {each.partition("==")[0] for each in budget._packages()}
    assert {"anyio", "msgspec", "nats-py", "nkeys", "structlog"} <= packages
    assert packages.isdisjoint({"pytest", "ruff", "starlette", "uvicorn", "opentelemetry-api"})
