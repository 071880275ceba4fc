"""Short forms of the scripts for endurance: they end well, say so, and leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from _chaos.strokes import Kind, plan
from tests.stories.test_demo import running_with
from tests.waits import PATIENCE_SECONDS

PROJECT = Path(__file__).parents[2]


class Script:
    """A script that is running; its files are in `directory`."""

    def __init__(self, name: str, *arguments: str, directory: Path) -> None:
        self.directory = directory
        self.process = subprocess.Popen(
            [PROJECT / "scripts" / name, *arguments],
            env=os.environ | {"PYTHON": sys.executable, "PYTHONUNBUFFERED": "1", "TMPDIR": str(directory)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for(self, word: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if word in line:
                return
        pytest.fail(f"it ended before it said {word!r}")

    def end(self, *, within_seconds: float) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=within_seconds)
        return self.process.returncode, output

    def left_behind(self) -> list[str]:
        """Files, and processes that have the directory in their environment."""
        return [path.name for path in self.directory.glob("*aviso*")] + running_with(str(self.directory))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    """`start("chaos", "--seed", "1")`."""
    scripts: list[Script] = []

    def start(name: str, *arguments: str) -> Script:
        scripts.append(Script(name, *arguments, directory=tmp_path))
        return scripts[-1]

    yield start
    for script in scripts:
        script.process.terminate()
        script.process.wait(PATIENCE_SECONDS)


def test_plan_follows_from_its_seed_and_leaves_nothing_out() -> None:
    strokes = plan(1, duration_seconds=300)

    assert strokes == plan(1, duration_seconds=300)
    assert strokes != plan(2, duration_seconds=300)
    assert {stroke.kind for stroke in strokes} == set(Kind)
    assert all(stroke.at < 300 for stroke in strokes)


@pytest.mark.slow
@pytest.mark.covers("001-39", "003-05")
def test_chaos_loses_nothing(start: Callable[..., Script]) -> None:
    # A seed of which each kind of stroke comes early.
    script = start("chaos", "--seed", "54", "--duration", "10", "--workers", "2", "--rate", "100")

    code, output = script.end(within_seconds=3 * PATIENCE_SECONDS)

    assert code == 0, output
    told = re.search(r"^nothing lost: ([\d,]+) published, ([\d,]+) handled, ", output, re.MULTILINE)
    assert told, output
    assert int(told[1].replace(",", "")) > 100, output
    assert script.left_behind() == []


@pytest.mark.slow
def test_interrupted_chaos_leaves_nothing_behind(start: Callable[..., Script]) -> None:
    script = start("chaos", "--duration", "600")
    script.wait_for("worker")

    script.process.send_signal(signal.SIGTERM)
    code, output = script.end(within_seconds=PATIENCE_SECONDS)

    assert code == 130, output
    assert "Traceback" not in output
    assert script.left_behind() == []


@pytest.mark.slow
def test_outage_of_half_a_minute_is_waited_out(start: Callable[..., Script]) -> None:
    script = start("outage", "--minutes", "0.5")

    code, output = script.end(within_seconds=3 * PATIENCE_SECONDS)

    assert code == 0, output
    assert "as it should be" in output
    assert script.left_behind() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        # A pull request that nobody sends again is missed for five seconds.
        ("--kind", "singleton", "--most-pause", "4.5"),
        ("--kind", "notification", "--kind", "timer", "--leader-change", "--most-pause", "30"),
    ],
    ids=["as it is", "leader change"],
)
def test_backlog_on_a_cluster_of_three_is_drained(start: Callable[..., Script], asked: tuple[str, ...]) -> None:
    script = start("backlog", "--count", "1000", *asked)

    code, output = script.end(within_seconds=3 * PATIENCE_SECONDS)

    assert code == 0, output
    assert "as it should be" in output
    assert script.left_behind() == []


@pytest.mark.slow
def test_replays_of_any_filter_are_complete_on_a_cluster_that_is_behind(start: Callable[..., Script]) -> None:
    script = start("replays", "--count", "30000", "--servers", "3", "--filters", "8")

    code, output = script.end(within_seconds=3 * PATIENCE_SECONDS)

    assert code == 0, output
    assert "as it should be" in output
    assert script.left_behind() == []


@pytest.mark.slow
def test_operators_commands_that_are_killed_and_repeated_lose_and_double_nothing(start: Callable[..., Script]) -> None:
    script = start("kills", "--seed", "8", "--times", "2", "--count", "500")

    code, output = script.end(within_seconds=3 * PATIENCE_SECONDS)

    assert code == 0, output
    assert "as it should be: nothing lost, nothing doubled, nothing left" in output
    assert script.left_behind() == []
