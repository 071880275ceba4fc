"""The commands that pause timers and run their missed ticks, with workers on a real server."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aviso_workers.errors import UnavailableError
from aviso_workers.ops import timer_control
from tests.cli.conftest import Ran
from tests.conftest import Start

Run = Callable[..., Ran]

APP = """
from collections.abc import AsyncIterator

from aviso_workers import App, Tick

app = App("field")


@app.every("1s", singleton=True)
async def report() -> None:
    print("reported", flush=True)


@app.every("1h", singleton=False)
async def tidy(tick: Tick) -> None:
    if tick.time.hour == 3:
        raise RuntimeError("nothing to tidy")
    print(f"tidied for {tick.time.hour}, {tick.token}")


@app.every("1h", singleton=False)
async def fails() -> None:
    raise RuntimeError("the archive is away")


@app.resource(scope="call")
async def session() -> AsyncIterator[dict]:
    yield {}


@app.every("1h", singleton=False)
async def purge(session: dict) -> None: ...
"""
DAY = "2026-01-01T0{}:00:00Z"


@pytest.fixture
def app(tmp_path: Path) -> str:
    name = f"timed_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(APP)
    return f"{name}:app"


def rows(run: Run, config: Path, app: str, *of: str) -> dict[str, dict[str, Any]]:
    ran = run("timers", "ls", app, "--json", *of, "--config", config)
    assert ran.code == 0
    return {row["timer"]: row for row in map(json.loads, ran.lines)}


@pytest.mark.slow
def test_a_pause_holds_in_running_workers_and_in_those_that_start_later(
    run: Run, config: Path, app: str, start: Start
) -> None:
    worker = start("worker", app, "--config", config)
    worker.lines(1)
    note = ("--note", "the archive is down")
    ran = run("timers", "pause", app, "report", "--for", "1h", *note, "--config", config)
    assert (ran.code, ran.err) == (0, "")
    assert re.fullmatch(r"report is paused until 20\S+Z\n", ran.out)
    worker.end(signal.SIGTERM)
    last = rows(run, config, app)["report"]["last"]

    later = start("worker", app, "--config", config)
    while not rows(run, config, app)["report"]["leader"].endswith(f":{later.process.pid}"):
        pass
    found = rows(run, config, app)
    assert found["tidy"]["paused"] is None
    paused = found["report"]["paused"]
    assert (paused["note"], "@" in paused["by"]) == ("the archive is down", True)
    assert found["report"]["next"][0] > paused["until"]
    ran = run("timers", "ls", app, "--config", config)
    assert ran.code == 0
    assert re.search(r"paused until 20\S+Z, since 20\S+Z by \S+@\S+: the archive is down$", ran.lines[1])

    assert rows(run, config, app)["report"]["last"] == last, "no tick was claimed"
    assert run("timers", "resume", app, "report", "--config", config) == Ran(0, "report is resumed\n", "")
    later.lines(1)
    assert rows(run, config, app)["report"]["paused"] is None


def test_a_timer_is_run_also_while_it_is_paused(run: Run, config: Path, app: str) -> None:
    ran = run("timers", "pause", app, "report", "--config", config)
    assert ran == Ran(0, "report is paused until it is resumed\n", "")
    assert rows(run, config, app)["report"]["next"] == []
    assert "  -  " in run("timers", "ls", app, "--config", config).lines[1]
    assert run("timers", "run", app, "report", "--config", config).out.startswith("reported\nreport ran, in ")


@pytest.mark.slow
def test_a_worker_runs_a_timer_that_is_asked_for(
    run: Run, config: Path, app: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no server answers for a moment."""
    worker = start("worker", app, "--config", config)
    worker.lines(1)
    looked, away = timer_control.asked, [UnavailableError("no server")]

    async def asked(*what: Any) -> Any:
        if away:
            raise away.pop()
        return await looked(*what)

    monkeypatch.setattr(timer_control, "asked", asked)
    run("timers", "pause", app, "report", "--config", config)
    ran = run("timers", "run", app, "report", "--ask", "--config", config)
    assert (ran.code, ran.err) == (0, "")
    assert re.fullmatch(rf"report: taken by \S+:{worker.process.pid}, done in 0\.\d s\n", ran.out)
    failed = run("timers", "run", app, "fails", "--ask", "--config", config)
    assert (failed.code, failed.out) == (1, "")
    assert re.search(r"fails: taken by \S+, failed after 0\.\d s: RuntimeError: the archive is away", failed.err)
    worker.end(signal.SIGTERM)
    nobody = run("timers", "run", app, "report", "--ask", "--wait", "1s", "--config", config)
    assert (nobody.code, nobody.out, nobody.err) == (1, "", "report: no worker has taken it yet\n")
    again = run("timers", "run", app, "report", "--ask", "--config", config)
    assert (again.code, "has asked for a run of report already" in again.err) == (2, True)


def test_a_timer_that_takes_a_resource_of_a_call_is_run(run: Run, config: Path, app: str) -> None:
    ran = run("timers", "run", app, "purge", "--config", config)
    assert (ran.code, ran.err) == (0, "")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--for", "0s"), "--for 0s would pause nothing"),
        (("--for", "1h", "--until", "2100-01-01T00:00:00Z"), "say --for or --until, not both"),
        (("--until", "2020-01-01T00:00:00Z"), "the pause would end at 2020-01-01T00:00:00Z, which is over"),
        (("--until", "tomorrow"), "--until"),
    ],
)
def test_a_pause_has_an_end_to_come(run: Run, config: Path, app: str, options: tuple[str, ...], complaint: str) -> None:
    ran = run("timers", "pause", app, "tidy", *options, "--config", config)
    assert (ran.code, ran.out) == (2, "")
    assert complaint in ran.err


def test_so_many_next_ticks_are_listed(run: Run, config: Path, app: str) -> None:
    found = rows(run, config, app, "--next", "5")
    assert [len(each["next"]) for each in found.values()] == [5, 5, 5, 5]
    assert len(run("timers", "ls", app, "--next", "5", "--config", config).lines) == 1 + 4 * 5


def test_missed_ticks_are_shown_and_run_with_yes(run: Run, config: Path, app: str) -> None:
    of = (app, "tidy", "--from", DAY.format(1), "--to", DAY.format(2), "--config", config)
    ran = run("timers", "catch-up", *of)
    assert ran.code == 2
    assert [line.split() for line in ran.lines[1:]] == [[DAY.format(hour), "to", "run"] for hour in (1, 2)]
    assert ran.err == "nothing was done; say --yes to run 2 ticks\n"
    ran = run("timers", "catch-up", *of, "--yes")
    assert (ran.code, ran.err) == (0, "")
    assert [line for line in ran.lines if line.startswith("tidied")] == ["tidied for 1, None", "tidied for 2, None"]
    assert ran.lines[-1] == "2 ran"


def test_the_first_tick_that_fails_ends_it_and_says_how_to_go_on(run: Run, config: Path, app: str) -> None:
    of = ("--from", DAY.format(2), "--to", DAY.format(5), "--config", config)
    ran = run("timers", "catch-up", app, "tidy", *of, "--yes")
    assert ran.code == 1
    assert "tidied for 2, None" in ran.out
    failed, advice = ran.err.splitlines()
    assert failed.startswith(f"{DAY.format(3)} failed: RuntimeError: nothing to tidy, in 0.")
    assert advice == f"1 ran, 1 failed, 2 did not run; to go on, repeat the command with --from {DAY.format(3)}"


def test_a_range_without_a_tick_is_no_mistake(run: Run, config: Path, app: str) -> None:
    of = ("--from", "2026-01-01T00:10:00Z", "--to", "2026-01-01T00:50:00Z", "--config", config)
    assert run("timers", "catch-up", app, "tidy", *of) == Ran(0, "tidy has no tick in this range\n0 ran\n", "")
