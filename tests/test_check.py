"""Which tests `scripts/check` and CI run."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.waits import PATIENCE_SECONDS

PROJECT = Path(__file__).parents[1]
STAND_IN = """#!/bin/sh
for each in "$@"; do echo "$each"; done >"$0.arguments"
"""

Check = Callable[..., list[str]]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """`check("-k", "retry")`: what pytest is given, in a clone whose tools only note what they are given."""
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(PROJECT / "scripts" / "check", tmp_path / "scripts")
    for name in ("ruff", "lint-imports", "mypy", "pytest"):
        (tools / name).write_text(STAND_IN)
        (tools / name).chmod(0o755)

    def check(*arguments: str) -> list[str]:
        subprocess.run([script, *arguments], check=True, timeout=PATIENCE_SECONDS)
        return (tools / "pytest.arguments").read_text().splitlines()

    return check


def test_slow_ones_are_left_out(check: Check) -> None:
    assert check("-k", "retry")[2:] == ["-m", "not slow", "-k", "retry"]


def test_all_are_run_where_that_is_asked_for(check: Check) -> None:
    assert check("--all", "-k", "retry")[2:] == ["-k", "retry"]


@pytest.mark.parametrize("file", [".ci/run", ".github/workflows/test.yml"])
def test_ci_runs_all_of_them_once(file: str) -> None:
    lines = [line for line in (PROJECT / file).read_text().splitlines() if not line.lstrip().startswith("#")]
    assert [line.split("./scripts/")[1] for line in lines if "scripts/test" in line] == ["test --all"]


SKIPPED = """
    import pytest

    def test_whole():
        pytest.skip("not here")

    @pytest.mark.parametrize("backend", ["in memory", "on a server"])
    def test_of_backends(backend):
        if backend == "in memory":
            pytest.skip("there is no server")
"""


@pytest.mark.parametrize(("ci", "failed"), [("true", 1), ("", 0)])
def test_a_whole_test_that_is_skipped_fails_in_ci(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ci: str, failed: int
) -> None:
    monkeypatch.setenv("CI", ci)
    pytester.makeconftest("from tests.conftest import pytest_runtest_makereport\n")
    pytester.makepyfile(SKIPPED)
    ran = pytester.runpytest("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:asyncio")
    ran.assert_outcomes(passed=1, failed=failed, skipped=2 - failed)
