"""`scripts/bench` as a process: that it measures and what it tells, never how fast anything is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.ground import Cores
from benchmarks.targets import TARGETS, Target, judge
from tests.waits import PATIENCE_SECONDS

PROJECT = Path(__file__).parents[1]
AT_LEAST = Target(what="ours over the best of theirs", figure="ours", over=("one", "other"), at_least=4)
AT_MOST = Target(what="ours", figure="ours", at_most=1.5, unit="ms")


def test_consume_tells_figures_and_targets(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    bench = subprocess.run(
        [sys.executable, "-m", "benchmarks", "consume", "--short", "--no-rivals", "--json", told],
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(PROJECT / "scripts"), str(PROJECT)))},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_SECONDS,
    )
    assert bench.returncode == 0, bench.stdout + bench.stderr
    report = json.loads(told.read_bytes())
    assert set(report) == {"machine", "seconds", "figures", "targets"}
    contestants = {name.split(".")[1] for name in report["figures"]}
    fleet = {"two-processes"} if Cores.divide().has_room_for(2) else set()
    assert contestants == {"agent", "batch", "bare-loop"} | fleet
    for name, figure in report["figures"].items():
        assert figure["values"] == [figure["median"]], name
        assert figure["median"] > 0, name
    assert [target["what"] for target in report["targets"]] == [target.what for target in TARGETS]
    measured = {target["what"] for target in report["targets"] if target["reached"] is not None}
    assert measured == {"agent, CPU per notification", "agent over the bare loop"} | (
        {"two processes over one"} if fleet else set()
    )


@pytest.mark.parametrize(
    ("target", "medians", "found", "reached"),
    [
        (AT_LEAST, {"ours": 40.0, "one": 5.0, "other": 10.0}, 4.0, True),
        (AT_LEAST, {"ours": 40.0, "one": 20.0, "other": 10.0}, 2.0, False),
        (AT_LEAST, {"ours": 40.0}, None, None),
        (AT_LEAST, {"one": 5.0}, None, None),
        (AT_MOST, {"ours": 1.5}, 1.5, True),
        (AT_MOST, {"ours": 1.6}, 1.6, False),
    ],
)
def test_a_target_is_judged_by_medians(
    target: Target, medians: dict[str, float], found: float | None, reached: bool | None
) -> None:
    finding = judge(medians, target)
    assert (finding.found, finding.reached) == (found, reached)
