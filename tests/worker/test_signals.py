"""The signals of a worker, and those of the children that its handlers fork."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aviso_workers.worker import ending
from tests.commands import Command
from tests.waits import PATIENCE_SECONDS

FORKING = """
import asyncio, multiprocessing, os, signal, time, warnings

from aviso_workers import App, Notification, Notify

warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of a fork beside threads
app = App("forking")
fork = multiprocessing.get_context("fork")


@app.task
async def publish(app: App) -> None:
    if {handles_signals!r}:  # asyncio opens its socket for signals at the first handler
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
    await app.notify("mars", {{"class": "od", "step": 1}}, {{}})


def double(number):
    return 2 * number


def begin():
    child = fork.Process(target=time.sleep, args=(600,))
    child.start()
    return child


def terminated():
    child = begin()
    child.terminate()
    child.join(60)
    return child.exitcode


def hung_up():
    child = begin()
    os.kill(child.pid, signal.SIGHUP)
    child.join(60)
    return child.exitcode


def pool():
    with fork.Pool(2) as pool:
        return sum(pool.map(double, range(3)))


def forked():
    if (child := os.fork()) == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    return -os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@app.agent("mars")
{form}
    app_says = [{what}() for _ in range(3)]
    print("seen", app_says, flush=True)
"""


PLAIN = "def fork_and_end(notification: Notification) -> None:"
ASYNC = "async def fork_and_end(notification: Notification) -> None:"

CONFIG = """
notification_backend: {kind: in_memory}
notification_schema:
  mars:
    topic: {base: mars, key_order: [class, step]}
    identifier: {class: {type: StringHandler, required: true}, step: {type: IntHandler, required: true}}
workers:
  status: {port: 0}
  logging: {format: json}
"""


@pytest.fixture
def start_forking(start: Callable[..., Command], tmp_path: Path) -> Callable[..., Command]:
    """A worker whose handler does `what` with children that it forks."""

    def start_forking(what: str, *, form: str = PLAIN, handles_signals: bool = False) -> Command:
        (tmp_path / "agents.py").write_text(FORKING.format(form=form, what=what, handles_signals=handles_signals))
        (tmp_path / "config.yaml").write_text(CONFIG)
        return start("worker", "agents:app", "--config", tmp_path / "config.yaml")

    return start_forking


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "handles_signals"),
    [
        (PLAIN, False),
        (ASYNC, True),
        pytest.param(PLAIN, True, marks=pytest.mark.slow),
        pytest.param(ASYNC, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("what", "seen"),
    [("terminated", -signal.SIGTERM), ("hung_up", -signal.SIGHUP), ("pool", 6), ("forked", int(signal.SIGTERM))],
)
def test_a_signal_to_a_forked_child_ends_the_child_and_not_its_worker(
    start_forking: Callable[..., Command], what: str, seen: int, form: str, handles_signals: bool
) -> None:
    worker = start_forking(what, form=form, handles_signals=handles_signals)
    assert worker.lines(1) == [f"seen {[int(seen)] * 3}\n"]
    assert worker.process.poll() is None
    assert worker.end(signal.SIGTERM) == 0
    assert [line["signal"] for line in worker.log if line["event"] == "worker.stopping"] == ["SIGTERM"]


@pytest.mark.slow
@pytest.mark.parametrize("number", ending.TOLD_TO_END)
def test_each_of_these_signals_drains(start_forking: Callable[..., Command], number: signal.Signals) -> None:
    worker = start_forking("pool")
    worker.lines(1)
    assert worker.end(number) == 0
    assert [line["event"] for line in worker.log if line["event"].startswith("worker.")][-2:] == [
        "worker.stopping",
        "worker.stopped",
    ]


FIRST = """
import os, signal, sys

class Importing:
    def find_spec(self, name, *_):
        if name == "aviso_workers.app":
            os.kill(process, signal.SIGTERM)
            sys.exit("SIGTERM was not heard")

process = os.getpid()
os.getpid = lambda: {number}
sys.argv = ["/opt/bin/{program}"]
sys.meta_path.insert(0, Importing())
from aviso_workers import App
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "program", "ended_with"),
    [
        (1, "aviso-workers", 128 + signal.SIGTERM),
        (2, "aviso-workers", -signal.SIGTERM),
        (1, "another", -signal.SIGTERM),
    ],
)
def test_the_command_is_ended_as_the_first_process_of_a_container_while_it_is_imported(
    number: int, program: str, ended_with: int
) -> None:
    source = FIRST.format(number=number, program=program)
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, timeout=PATIENCE_SECONDS, check=False)
    assert ran.returncode == ended_with


NOHUP = """
import os, signal, time
from aviso_workers.worker import ending

signal.signal(signal.SIGHUP, signal.SIG_IGN)
heard = []
ending.hear(heard.append)
os.kill(os.getpid(), signal.SIGHUP)
os.kill(os.getpid(), signal.SIGTERM)
print([number.name for number in heard])
"""


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", NOHUP], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    assert ran.stdout == "['SIGTERM']\n"
