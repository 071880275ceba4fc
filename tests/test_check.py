"""Which tests `scripts/check` and CI run."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from _check import Modules, changed
from tests.waits import PATIENCE_SECONDS

PROJECT = Path(__file__).parents[1]
STAND_IN = """#!/bin/sh
for each in "$@"; do echo "$each"; done >"$0.arguments"
"""

Check = Callable[..., list[str]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """`check("-k", "retry")`: what pytest is given, in a clone whose tools only note what they are given, and where
    these files are `picked`.
    """
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(PROJECT / "scripts" / "check", tmp_path / "scripts")
    stand_ins = dict.fromkeys(("ruff", "lint-imports", "mypy", "pytest"), STAND_IN)
    for name, text in {**stand_ins, "python": '#!/bin/sh\nprintf "$PICKED"\n'}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)

    def check(*arguments: str, picked: str = "") -> list[str]:
        monkeypatch.setenv("PICKED", picked)
        subprocess.run([script, *arguments], check=True, timeout=PATIENCE_SECONDS)
        return (tools / "pytest.arguments").read_text().splitlines()

    return check


def test_slow_ones_are_left_out(check: Check) -> None:
    assert check("-k", "retry")[2:] == ["-m", "not slow", "-k", "retry"]


def test_without_arguments_the_files_that_are_picked_are_run(check: Check) -> None:
    assert check(picked="tests/test_app.py\ntests/test_fast.py\n")[2:] == [
        *("-m", "not slow"),
        *("tests/test_app.py", "tests/test_fast.py"),
    ]


def test_where_none_are_picked_all_are_run_but_slow_ones(check: Check) -> None:
    assert check()[2:] == ["-m", "not slow"]


def test_nothing_is_picked_where_all_that_are_not_slow_are_asked_for(check: Check) -> None:
    assert check("--not-slow", "-x", picked="tests/test_app.py")[2:] == ["-m", "not slow", "-x"]


def test_all_are_run_where_that_is_asked_for(check: Check) -> None:
    assert check("--all", "-k", "retry")[2:] == ["-k", "retry"]


@pytest.mark.parametrize("file", [".ci/run", ".github/workflows/test.yml"])
def test_ci_runs_all_of_them_once(file: str) -> None:
    lines = [line for line in (PROJECT / file).read_text().splitlines() if not line.lstrip().startswith("#")]
    assert [line.split("./scripts/")[1] for line in lines if "scripts/test" in line] == ["test --all"]


@pytest.fixture(scope="module")
def modules() -> Modules:
    return Modules()


@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("tests/cli/test_notify.py", "tests/cli/test_notify.py"),
        pytest.param("aviso_workers/aviso/spatial.py", "tests/aviso/test_spatial.py", id="it imports it"),
        pytest.param("aviso_workers/ops/doctor/facts.py", "tests/ops/doctor/test_progress.py", id="its conftest does"),
        pytest.param("aviso_workers/cli/doctor.py", "tests/cli/test_doctor.py", id="it runs the command"),
        pytest.param("aviso_workers/worker/fleet.py", "tests/stories/test_fleets.py", id="in a process"),
        pytest.param("tests/commands.py", "tests/cli/test_watch.py", id="a fixture of conftest.py has it"),
        pytest.param("tests/data/help.txt", "tests/cli/test_help.py", id="it reads it"),
        pytest.param("config/prometheus-rules.yml", "tests/test_monitoring.py", id="it reads it too"),
        pytest.param("docs/tables.md", "tests/test_documented_blocks.py", id="it runs the examples"),
        pytest.param("aviso_workers/aviso/spatial.py", "tests/test_vocabulary.py", id="it reads all modules"),
    ],
)
def test_what_depends_on_a_change_is_picked(modules: Modules, file: str, test: str) -> None:
    assert test in (modules.tests_of([file]) or ())


@pytest.mark.parametrize(
    ("file", "test"),
    [
        pytest.param("aviso_workers/ops/doctor/facts.py", "tests/aviso/test_spatial.py", id="it is below"),
        pytest.param("aviso_workers/cli/doctor.py", "tests/contract/test_consuming.py", id="it runs no command"),
        pytest.param("docs/metrics.md", "tests/contract/test_consuming.py", id="it reads no page"),
        pytest.param("aviso_workers/aviso/spatial.py", "tests/interop/test_reach.py", id="scripts/interop runs it"),
    ],
)
def test_others_are_not(modules: Modules, file: str, test: str) -> None:
    assert test not in (modules.tests_of([file]) or {test})


@pytest.mark.parametrize(
    "file", ["pyproject.toml", "tests/conftest.py", "aviso_workers/_fast.c", "aviso_workers/gone.py", "unheard.of"]
)
def test_all_are_picked_where_it_is_not_known_what_depends_on_a_change(modules: Modules, file: str) -> None:
    assert modules.tests_of(["docs/metrics.md", file]) is None


def test_a_change_is_all_that_differs_from_where_the_branch_left_main(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    def commit(*names: str) -> None:
        for name in names:
            (tmp_path / name).write_text(name)
        git("add", ".")
        git("commit", "-m", "a step")

    git("init", "--initial-branch", "main")
    commit("kept", "edited", "moved", ".gitignore")
    git("switch", "--create", "branch")
    git("mv", "moved", "here")
    commit("committed")
    git("switch", "main")
    commit("of others")
    git("switch", "branch")
    (tmp_path / "edited").write_text("differently")
    (tmp_path / "new").write_text("new")

    assert changed(tmp_path) == ("main", ["committed", "edited", "here", "moved", "new"])


def test_without_a_branch_main_there_is_no_answer(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        changed(tmp_path)


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
