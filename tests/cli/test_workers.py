"""What commands say of workers that are killed and of two versions, with worker processes on a real server."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from aviso_workers.backends import Admin
from aviso_workers.errors import DeniedError
from aviso_workers.ops import health
from aviso_workers.state import worker_records
from aviso_workers.state.worker_records import AppWorkers
from tests.cli.conftest import Ran
from tests.commands import Command
from tests.conftest import Start
from tests.waits import PATIENCE_SECONDS

Run = Callable[..., Ran]
Rows = dict[str, tuple[str, str]]

APP = """
import os
from aviso_workers import App, Notification
from aviso_workers.sessions import worker_recorder

worker_recorder.WRITE_SECONDS, worker_recorder.LOOK_SECONDS = 0.5, 0.25
app = App(os.environ["APP"], version=os.environ["CODE"])


@app.agent("mars")
async def index(notification: Notification) -> None: ...
"""


@pytest.fixture
def worker(tmp_path: Path, config: Path, start: Start) -> Callable[..., Command]:
    """Start a worker that runs this version, says twice a second that it lives, and reads."""
    name = f"workers_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(APP)

    def begin(version: str, app: str = "field") -> Command:
        found = start("worker", f"{name}:app", "--config", config, CODE=version, APP=app)
        found.until("agent.started")
        return found

    return begin


def name_of(worker: Command) -> str:
    return f"{socket.gethostname()}/{worker.process.pid}"


@pytest.fixture
def listed(run: Run, config: Path) -> Callable[[], tuple[int, Rows]]:
    """The exit code of `agents ls`, and the state and the sentence of each row."""

    def listed() -> tuple[int, Rows]:
        ran = run("agents", "ls", "--seconds", "0.1", "--json", "--config", config)
        rows = map(json.loads, ran.lines)
        return ran.code, {row["agent"]: (row["state"], row["why"]) for row in rows}

    return listed


def until(listed: Callable[[], tuple[int, Rows]], fits: Callable[[Rows], bool]) -> tuple[int, Rows]:
    """The exit code and the rows, once they fit."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not fits((found := listed())[1]):
        assert time.monotonic() < deadline, found
    return found


def told_by_doctor(run: Run, config: Path) -> list[tuple[str, str]]:
    ran = run("doctor", "--format", "json", "--seconds", "0.1", "--config", config)
    (check,) = [each for each in json.loads(ran.out)["checks"] if each["code"] == "JS080"]
    return [(each["where"], each["found"]) for each in check["findings"]]


@pytest.mark.slow
def test_a_killed_worker_is_told_until_another_one_runs_and_one_that_ends_in_order_is_not(
    run: Run,
    config: Path,
    worker: Callable[[str], Command],
    listed: Callable[[], tuple[int, Rows]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_records, "LIVES_SECONDS", 5.0)
    monkeypatch.setattr(health, "COMES_BACK", timedelta(0))
    goes_on, ends, killed = (worker("v1") for _ in range(3))  # the others are not in its place
    assert ends.end(signal.SIGTERM) == 0
    assert until(listed, lambda rows: len(rows) == 1) == (0, {"index": ("idle", "")})
    killed.end(signal.SIGKILL)
    row = f"worker {name_of(killed)}"
    code, rows = until(listed, lambda rows: rows.keys() == {"index", row})  # and not what has ended in order
    state, why = rows[row]
    assert (code, state) == (1, "lost")
    assert re.fullmatch(rf"killed or cut off within 30 s after \S+Z, on {re.escape(socket.gethostname())}", why)
    assert told_by_doctor(run, config) == [(f"field > {row}", f"lost: {why}")]
    assert goes_on.process.poll() is None
    worker("v1")
    assert until(listed, lambda rows: len(rows) == 1) == (0, {"index": ("idle", "")})
    assert told_by_doctor(run, config) == []


@pytest.mark.slow
def test_two_versions_that_run_side_by_side_are_told(
    run: Run,
    config: Path,
    worker: Callable[[str], Command],
    listed: Callable[[], tuple[int, Rows]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = worker("v1"), worker("v2")
    assert listed() == (0, {"index": ("idle", "")}), "it may be a deploy"
    monkeypatch.setattr(health, "DEPLOY", timedelta(0))
    code, rows = until(listed, lambda rows: len(rows) == 2)
    why = f"2 versions run: v1 on {name_of(first)}, v2 on {name_of(second)}"
    assert (code, rows) == (1, {"index": ("idle", ""), "all workers": ("several versions", why)})
    assert told_by_doctor(run, config) == [("field > all workers", f"several versions: {why}")]
    assert first.end(signal.SIGTERM) == 0
    assert until(listed, lambda rows: len(rows) == 1) == (0, {"index": ("idle", "")})


def test_an_app_whose_workers_may_not_be_read_hides_no_other_app(
    run: Run, config: Path, worker: Callable[..., Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_app, denied = worker_records.of_app, "$JS.API.STREAM.INFO.KV_other__live"

    async def of_some(admin: Admin, app: str) -> AppWorkers:
        if app == "other":
            raise DeniedError(f"{denied}: permissions violation")
        return await of_app(admin, app)

    worker("v1"), worker("v2"), worker("v1", "other")
    monkeypatch.setattr(worker_records, "of_app", of_some)
    monkeypatch.setattr(health, "DEPLOY", timedelta(0))
    rows = map(json.loads, run("agents", "ls", "--seconds", "0.1", "--json", "--config", config).lines)
    assert {(row["app"], row["agent"]): row["state"] for row in rows} == {
        ("field", "index"): "idle",
        ("field", "all workers"): "several versions",
        ("other", "index"): "unknown",
        ("other", "all workers"): "unknown",
    }
    found = dict(told_by_doctor(run, config))
    assert found["field > all workers"].startswith("several versions: ")
    assert found["other > all workers"].startswith(f"unknown: not known, since the server denies our user {denied}: ")
