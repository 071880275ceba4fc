"""`scripts/bench` as a process: that it measures and what it tells, never how fast anything is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from _bench import scaling
from _bench.ground import Cores
from _bench.targets import SCALE, TARGETS, Target, judge
from tests.waits import PATIENCE_SECONDS

PROJECT = Path(__file__).parents[1]
PATHS = {"PYTHONPATH": os.pathsep.join((str(PROJECT / "scripts"), str(PROJECT)))}
AT_LEAST = Target(what="ours over the best of theirs", figure="ours", over=("one", "other"), at_least=4)
AT_MOST = Target(what="ours", figure="ours", at_most=1.5, unit="ms")


@pytest.mark.slow
def test_consume_tells_figures_and_targets(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    bench = subprocess.run(
        [sys.executable, "-m", "_bench", "consume", "--short", "--no-rivals", "--json", told],
        env=os.environ | PATHS,
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


@pytest.mark.slow
def test_every_worker_that_scale_measures_is_there() -> None:
    contestants = [one for some in scaling._of_a_full_stream(1000).values() for one in some]
    apps = {one.app.removeprefix("scaled_agents:") for one in contestants if ":" in one.app}
    agents = "import _bench.scaled_agents as them; print(*them.__all__)"
    found = subprocess.run(
        [sys.executable, "-c", agents],
        env=os.environ | PATHS | {"BENCHMARK_NAME": "test", "BENCHMARK_MARKS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 0, found.stderr
    assert apps | {"among_idle", "rejecting"} == set(found.stdout.split())


def test_what_scale_compares_is_measured() -> None:
    full_stream = {f"{name}.{one.name}" for name, some in scaling._of_a_full_stream(1000).items() for one in some}
    measured = full_stream | {f"order_by.{name}" for name in scaling.STEPS}
    measured |= {f"backlog.{backlog}" for backlog in scaling.BACKLOGS} | {"idle.none", f"idle.{scaling.IDLE}"}
    measured |= {f"update.by {callers}" for callers in scaling.CALLERS}
    measured |= {f"dead-letters.{dead_letters}" for dead_letters in scaling.LETTERS}
    assert {f"{benchmark}.{name}" for _, benchmark, *two, _ in SCALE for name in two} <= measured


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
