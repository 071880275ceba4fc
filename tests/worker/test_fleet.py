"""The supervisor of a fleet, without workers: processes that do not stay up. (Workers are in tests/stories.)"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import pytest
from structlog.testing import capture_logs

from aviso_workers import App
from aviso_workers.aviso.literals import Size
from aviso_workers.declare.retry import Backoff
from aviso_workers.errors import ConfigError, WorkerProcessError
from aviso_workers.worker import fleet
from aviso_workers.worker.fleet import Fleet, FleetPlan
from aviso_workers.worker.process import FleetMember, RecycleLimits
from tests.stories.processes import until
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

FIRST_CRASHES = """
import sys, time
if sys.argv[-1].startswith("1:"):
    open("starts", "a").write("again\\n")
    sys.exit(3)
time.sleep(60)
"""

FIRST_LEAVES = """
import sys, time
if sys.argv[-1].startswith("1:"):
    sys.exit(0)
time.sleep(60)
"""

CRASHES = """
open("starts", "a").write("again\\n")
raise SystemExit(3)
"""

DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("deaf", "w").close()
time.sleep(60)
"""

TAKES = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(int(sys.argv[-1].partition(":")[2]), b"\\n")
pathlib.Path(f"console-{os.getpid()}").touch()
os.kill(os.getpid(), signal.SIGSTOP)
"""
"""A console that takes connections and hangs: only SIGKILL ends it."""
FOREVER_SECONDS = 3600.0
STOPPED = "process.stopped"


@pytest.fixture
def app(write_config: Callable[..., Path]) -> App:
    return App("fleet-tests", config=write_config("nats://127.0.0.1:1"))


async def test_a_process_that_crashes_again_and_again_ends_the_fleet_and_says_why(
    app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fleet, "RESTARTS", Backoff(first=0.01, max=0.01))
    monkeypatch.setattr(fleet, "MOST_RESTARTS", 3)
    crashing = Fleet(app, FleetPlan(command=(sys.executable, "-c", FIRST_CRASHES), processes=2))
    with pytest.raises(WorkerProcessError) as raised:
        await crashing.work()
    assert str(raised.value) == (
        "process 1 crashed 3 times in a row, each time within 10 s of its start; "
        "the last one ended with exit code 3, and the log says why"
    )
    assert (tmp_path / "starts").read_text() == "again\n" * 3
    shown = crashing.metrics.render().decode()
    assert 'aviso_worker_process_exits_total{app="fleet-tests",ending="crashed",process="1"} 3.0' in shown
    assert 'aviso_worker_process_running{app="fleet-tests",process="2"} 0.0' in shown


async def test_a_process_that_leaves_with_0_though_nothing_has_stopped_it_counts_as_one_that_crashed(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "RESTARTS", Backoff(first=0.01, max=0.01))
    monkeypatch.setattr(fleet, "MOST_RESTARTS", 3)
    leaving = Fleet(app, FleetPlan(command=(sys.executable, "-c", FIRST_LEAVES), processes=2))
    with pytest.raises(WorkerProcessError, match=r"crashed 3 times in a row.* with exit code 0"):
        await leaving.work()
    shown = leaving.metrics.render().decode()
    assert 'aviso_worker_process_exits_total{app="fleet-tests",ending="crashed",process="1"} 3.0' in shown


async def test_a_console_that_crashes_again_and_again_does_not_end_the_fleet(
    app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AVISO_WORKERS_WORKERS__CONSOLE__ON_STATUS_PORT", "true")
    monkeypatch.setattr(fleet, "RESTARTS", Backoff(first=0.01, max=0.01))
    monkeypatch.setattr(fleet, "MOST_RESTARTS", 2)
    waits = (sys.executable, "-c", "import time; time.sleep(60)")
    going_on = Fleet(app, FleetPlan(command=waits, processes=1, console=(sys.executable, "-c", CRASHES)))
    starts = tmp_path / "starts"
    with capture_logs() as log:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(going_on.work)
            await until(lambda: starts.exists() and starts.read_text().count("again") > 4, what=lambda: log)
            assert going_on.readiness()[0] == ["process 1: is starting"], "its workers count, and the console does not"
            assert going_on.console is not None
            with socket.socket() as connection:
                assert going_on.console.hand_over(connection).startswith("the console ")
            os.kill(os.getpid(), signal.SIGTERM)
    assert not going_on.forced
    assert "console" not in going_on.metrics.render().decode()


@pytest.fixture
def hanging(app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """A fleet with a console that hangs, and that would wait for ever until it kills a process that is late."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AVISO_WORKERS_WORKERS__CONSOLE__ON_STATUS_PORT", "true")
    monkeypatch.setattr(fleet, "KILL_SECONDS", FOREVER_SECONDS)
    waits = (sys.executable, "-c", "import time; time.sleep(60)")
    return Fleet(app, FleetPlan(command=waits, processes=1, console=(sys.executable, "-c", TAKES)))


def consoles(directory: Path) -> int:
    """How many consoles have begun to take connections."""
    return len([*directory.glob("console-*")])


async def test_a_console_that_hangs_is_killed_and_started_again(
    hanging: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "STUCK_SECONDS", 0.2)
    with capture_logs() as log:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hanging.work)
            await until(lambda: consoles(tmp_path) == 3, what=lambda: log)
            os.kill(os.getpid(), signal.SIGTERM)
    hung = {"event": "process.hung", "process": "console", "seconds": 0.2, "log_level": "error"}
    assert log.count(hung) >= 2
    replaced = [entry for entry in log if entry["event"] == "process.replaced"]
    assert [(entry["process"], entry["exit_code"]) for entry in replaced[:2]] == [("console", -signal.SIGKILL)] * 2
    assert not hanging.forced


@pytest.mark.slow
async def test_a_console_that_hangs_keeps_no_fleet_from_its_end(
    hanging: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "STUCK_SECONDS", FOREVER_SECONDS)
    with capture_logs() as log, anyio.fail_after(PATIENCE_SECONDS):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hanging.work)
            await until(lambda: consoles(tmp_path) == 1, what=lambda: log)
            os.kill(os.getpid(), signal.SIGTERM)
    ended = [(entry["event"], entry["process"]) for entry in log if entry["event"] in ("process.killed", STOPPED)]
    assert ended == [(STOPPED, "1"), ("process.killed", "console"), (STOPPED, "console")]
    assert not hanging.forced


async def test_a_third_signal_kills_what_does_not_obey(
    app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stubborn = Fleet(app, FleetPlan(command=(sys.executable, "-c", DEAF), processes=1))
    with capture_logs() as log:

        def is_logged(event: str) -> bool:
            return event in [entry["event"] for entry in log]

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stubborn.work)
            await until((tmp_path / "deaf").exists, what=lambda: log)
            for event in ("fleet.stopping", "fleet.cancelling", "fleet.killing"):
                await until(lambda: "process 1: is starting" in stubborn.readiness()[0], what=lambda: log)
                os.kill(os.getpid(), signal.SIGTERM)
                await until(partial(is_logged, event), what=lambda: log)
    assert stubborn.readiness()[0] == ["stopping", "process 1: does not run"]


async def test_a_process_that_cannot_be_started_counts_as_one_that_crashed(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "RESTARTS", Backoff(first=0.01, max=0.01))
    monkeypatch.setattr(fleet, "MOST_RESTARTS", 2)
    with pytest.raises(WorkerProcessError, match=r"crashed 2 times in a row.* with exit code 127"):
        await Fleet(app, FleetPlan(command=("/no/such/python",), processes=1)).work()


async def test_a_fleet_is_not_ready_before_its_processes_are(app: App) -> None:
    starting = Fleet(app, FleetPlan(command=(), processes=2))
    assert starting.readiness()[0] == ["process 1: does not run", "process 2: does not run"]
    assert starting.stuck() == []


async def test_a_fleet_says_what_a_ready_process_waits_for(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet._Slot, "ask", lambda *_: (200, "ok\nagent index: waits for the end of an outage: away\n"))
    waiting = Fleet(app, FleetPlan(command=(), processes=2))
    assert waiting.readiness()[0] == []
    assert waiting.readiness()[1] == [
        f"process {name}: agent index: waits for the end of an outage: away" for name in (1, 2)
    ]


def test_a_reload_without_watchfiles_says_how_to_get_it(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    with pytest.raises(ConfigError, match=r"--reload needs watchfiles: pip install 'aviso-workers\[reload\]'"):
        Fleet(app, FleetPlan(command=(), processes=1, reload=True))


def test_a_limit_that_is_no_room_to_start_in_is_refused() -> None:
    ours, theirs = socket.socketpair()
    refused = pytest.raises(ConfigError, match=r"--max-rss: 1Mi is less than a worker needs at its start \(\d+Mi\)")
    with ours, theirs, refused:
        FleetMember("1", line=theirs.fileno(), limits=RecycleLimits(max_rss=Size.parse("1Mi")))
