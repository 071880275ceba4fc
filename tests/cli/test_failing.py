"""What commands say of agents, timers and tasks that fail, with a worker on a real server."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Ran
from tests.commands import Command
from tests.conftest import Start

Run = Callable[..., Ran]

APP = """
import asyncio
from aviso_workers import App, RetryPolicy, Notification, Retry

app = App("field")


@app.agent("mars", order_by=["class"], retry=RetryPolicy(first=600, jitter=0))
async def index(notification: Notification) -> None:
    if int(notification.identifier["step"]) == 1:
        raise ValueError("no index for this step")


@index.on_error(ValueError)
def again(error: ValueError) -> Retry:
    return Retry()


@app.agent("mars")
async def healthy(notification: Notification) -> None: ...


@app.every("1s", singleton=True)
async def report() -> None:
    raise RuntimeError("no report")


@app.every("1h", singleton=False)
async def tidy() -> None:
    print("tidied")


@app.task
async def watch() -> None:
    raise OSError("no such directory")
"""


@pytest.fixture
def app(tmp_path: Path) -> str:
    name = f"failing_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(APP)
    return f"{name}:app"


@pytest.fixture
def worker(run: Run, config: Path, start: Start, app: str) -> Command:
    """A worker whose agent `index` has failed for the first of three notifications, and whose timer and task fail."""
    for step in (1, 2, 3):
        assert run("notify", "mars", "class=od", f"step={step}", "--config", config).code == 0
    worker = start("worker", app, "--config", config)
    worker.until("notification.retried")
    worker.until("timer.failed")
    return worker


def rows(run: Run, config: Path, *of: str) -> dict[str, dict[str, Any]]:
    ran = run("agents", "ls", "--seconds", "0.1", "--json", *of, "--config", config)
    return {row["agent"]: row for row in map(json.loads, ran.lines)}


def until_failing(run: Run, config: Path, *names: str, of: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """The rows of `agents ls`, when all of these are told to fail."""
    while True:
        found = rows(run, config, *of)
        if all(found.get(name, {}).get("state") == "failing" for name in names):
            return found


FAILING = ("index", "timer report", "task watch")


@pytest.mark.slow
def test_the_list_names_the_last_error_of_what_fails(run: Run, config: Path, app: str, worker: Command) -> None:
    for of in ((), (app,)):
        found = until_failing(run, config, *FAILING, of=of)
        assert ", once: ValueError: no index for this step (failing_" in found["index"]["why"]
        assert found["healthy"]["state"] == "idle"
        assert "times: RuntimeError: no report (failing_" in found["timer report"]["why"]
        assert "OSError: no such directory (failing_" in found["task watch"]["why"]
    lines = run("agents", "ls", "--seconds", "0.1", "--config", config).lines
    (timer,) = [line for line in lines if "timer report" in line]
    assert timer.split()[:9] == ["field", "timer", "report", "-", "-", "-", "-", "-", "-"]
    of_other = run("agents", "ls", "other", "--config", config)
    assert "timer report" not in of_other.out


@pytest.mark.slow
def test_the_list_that_is_watched_has_what_fails_too(run: Run, config: Path, start: Start, worker: Command) -> None:
    until_failing(run, config, *FAILING)
    watching = start("agents", "ls", "--watch", "--seconds", "0.1", "--config", config)
    told = "".join(watching.lines(5))
    assert "timer report" in told
    assert "task watch" in told
    watching.end(signal.SIGINT)


@pytest.mark.slow
def test_what_is_retried_is_listed_with_what_waits_behind_it(run: Run, config: Path, worker: Command) -> None:
    until_failing(run, config, "index")
    ran = run("agents", "retrying", "field/index", "--config", config)
    names, row, state = ran.lines
    assert (ran.code, ran.err) == (0, "")
    assert names.split("  ")[0] == "SEQUENCE"
    sequence, attempt, _, error, key, behind, blocked = re.split(" {2,}", row)
    assert (sequence, attempt, key, behind, blocked) == ("1", "2 of 6", "od", "2", "no")
    assert error.startswith("ValueError: no index for this step")
    assert state.startswith("MARS: failing: since 20")
    (document,) = run("agents", "retrying", "field/index", "--json", "--config", config).lines
    assert (json.loads(document)["sequence"], json.loads(document)["attempt"]) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "complaint"),
    [
        ("field/indx", "no agent indx of app field is known"),
        ("fild/index", "no agent of app fild is known; there are apps: field"),
    ],
)
def test_an_agent_that_is_not_there_has_nothing_to_retry(
    run: Run, config: Path, worker: Command, agent: str, complaint: str
) -> None:
    assert run("agents", "retrying", agent, "--config", config) == Ran(1, "", f"aviso-workers: {complaint}\n")


@pytest.mark.slow
def test_an_agent_is_shown_with_its_last_failure(run: Run, config: Path, app: str, worker: Command) -> None:
    until_failing(run, config, "index")
    ran = run("agents", "show", app, "--json", "--config", config)
    shown = {document["agent"]: document for document in map(json.loads, ran.lines)}
    assert "ValueError: no index for this step" in shown["index"]["last failure"]
    assert "last failure" not in shown["healthy"]


@pytest.mark.slow
def test_timers_are_listed_with_their_next_ticks_and_who_leads(
    run: Run, config: Path, app: str, worker: Command
) -> None:
    until_failing(run, config, "timer report")
    ran = run("timers", "ls", app, "--json", "--config", config)
    report, tidy = sorted(map(json.loads, ran.lines), key=lambda row: str(row["timer"]))
    assert ran.code == 1, "one fails"
    assert (report["schedule"], tidy["schedule"]) == ("every 1s", "every 3600s")
    assert report["leader"].endswith(f":{worker.process.pid}")
    assert tidy["leader"] == "every worker"
    assert report["last"] < report["next"][0] < report["next"][1]
    assert (report["state"].startswith("failing: since 20"), tidy["state"]) == (True, "ok")

    assert worker.end(signal.SIGTERM) == 0
    ran = run("timers", "ls", app, "--config", config)
    assert [line.split()[0] for line in ran.lines] == ["TIMER", "report", "tidy"]
    assert "none" in ran.lines[1]


def test_a_timer_is_run_now(run: Run, config: Path, app: str) -> None:
    ran = run("timers", "run", app, "tidy", "--config", config)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("tidied\ntidy ran, in 0.")
    ran = run("timers", "run", app, "report", "--config", config)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("report failed after 0.")
    assert ran.err.endswith(" s: RuntimeError: no report\n")
    ran = run("timers", "run", app, "tidi", "--config", config)
    assert ran == Ran(2, "", "aviso-workers: app 'field' has no timer 'tidi'; it has: report, tidy\n")


@pytest.mark.slow
def test_a_timer_that_an_operator_has_run_fails_no_more(
    run: Run, config: Path, app: str, worker: Command, tmp_path: Path
) -> None:
    """Its next tick may be in a year."""
    until_failing(run, config, "timer report")
    assert worker.end(signal.SIGTERM) == 0
    mended = f"mended_{app}".partition(":")[0]
    (tmp_path / f"{mended}.py").write_text(APP.replace('raise RuntimeError("no report")', "pass"))
    assert run("timers", "run", f"{mended}:app", "report", "--config", config).code == 0
    ran = run("timers", "ls", f"{mended}:app", "--json", "--config", config)
    states = {line["timer"]: line["state"] for line in map(json.loads, ran.lines)}
    assert (ran.code, states["tidy"]) == (0, "ok")
    assert states["report"].startswith("at rest: no worker of its app runs; the last record of one is of 20")


@pytest.mark.slow
def test_the_doctor_names_timers_and_tasks_that_fail(run: Run, config: Path, worker: Command) -> None:
    until_failing(run, config, *FAILING)
    ran = run("doctor", "--seconds", "0.1", "--format", "json", "--config", config)
    (check,) = [check for check in json.loads(ran.out)["checks"] if check["code"] == "JS077"]
    found = {finding["where"]: finding["found"] for finding in check["findings"]}
    assert found.keys() == {"field > timer report", "field > task watch"}
    assert "RuntimeError: no report" in found["field > timer report"]
