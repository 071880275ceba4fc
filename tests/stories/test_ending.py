"""The end of a worker process while a handler waits, in each form of waiting: the table in docs/agents/stopping.md."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from aviso_workers.worker import NOT_ENDED
from tests.waits import LONG_SECONDS, PATIENCE_SECONDS, PROMPT_SECONDS

DRAIN_SECONDS = 0.5

MAIN = """
from aviso_workers.engine import shields
from aviso_workers.worker import ending

ending.GRACE_SECONDS, shields.SHIELDED_SECONDS = {grace}, 0.2
from aviso_workers.cli import main

main()
"""

FORMS = {
    "await": ("async def", "await asyncio.sleep(600)"),
    "asyncio.to_thread": ("async def", "await asyncio.to_thread(time.sleep, 600)"),
    "executor": ("async def", "await asyncio.get_running_loop().run_in_executor(THREADS, time.sleep, 600)"),
    "process pool": ("async def", "await asyncio.get_running_loop().run_in_executor(PROCESSES, sleep_in_child)"),
    "subprocess": ("async def", "await (await asyncio.create_subprocess_exec('sleep', '600')).wait()"),
    "anyio.to_thread": ("async def", "await anyio.to_thread.run_sync(time.sleep, 600)"),
    "shielded scope": ("async def", "await shielded()"),
    "loop that catches": ("async def", "await catching()"),
    "plain def": ("def", "time.sleep(600)"),
    "thread left": ("async def", "threading.Thread(target=time.sleep, args=(600,)).start()"),
    "blocked loop": ("async def", "time.sleep(600)"),
}
ENDS_IN_ORDER = {"await", "subprocess"}
RECYCLED = [form for form in FORMS if form != "blocked loop"]
"""A loop that is blocked does not note the limit."""

AGENTS = """
import asyncio, itertools, os, threading, time, warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import anyio
import anyio.to_thread

from aviso_workers import App, Notification

warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of a fork beside threads
THREADS, PROCESSES = ThreadPoolExecutor(1), ProcessPoolExecutor(1, mp_context=get_context("fork"))
FORMS = {forms!r}
form = os.environ.get("FORM")
for number in itertools.count() if form is None else ():
    try:
        open(f"started-{{number}}", "x").close()  # each process of a fleet has another form
    except FileExistsError:
        continue
    form = FORMS[number] if number < len(FORMS) else "await"
    break

app = App("ending")


@app.task
async def publish(app: App) -> None:
    for step in (1, 2):
        await app.notify("mars", {{"class": "od", "step": step}}, {{}})


def sleep_in_child():
    open(f"child-{{os.getpid()}}", "x").close()
    time.sleep(600)


async def shielded():
    with anyio.CancelScope(shield=True):
        await anyio.sleep(600)


async def catching():
    while True:
        try:
            await anyio.sleep(600)
        except asyncio.CancelledError:
            pass


def waiting(form):
{functions}


app.agent("mars", where={{"step": 1}})(waiting(form))
if "FORM" not in os.environ:

    @app.agent("mars")
    async def count(notification: Notification) -> None: ...
"""
FUNCTION = """
    if form == {form!r}:
        {kind} wait(notification: Notification) -> None:
            print("begun", form, flush=True)
            {line}
        return wait
"""

CONFIG = """
notification_backend: {{kind: in_memory}}
notification_schema:
  mars:
    topic: {{base: mars, key_order: [class, step]}}
    identifier: {{class: {{type: StringHandler, required: true}}, step: {{type: IntHandler, required: true}}}}
workers:
  drain_timeout_seconds: {drain}
  status: {{port: 0}}
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start("--processes", "2", form=..., drain=...)`: a worker whose handler waits in this form."""
    started: list[subprocess.Popen[str]] = []
    functions = "".join(FUNCTION.format(form=form, kind=kind, line=line) for form, (kind, line) in FORMS.items())
    forms = ["await", *RECYCLED]  # the supervisor imports the module first
    (tmp_path / "agents.py").write_text(AGENTS.format(functions=functions, forms=forms))

    def start(*options: str, form: str | None, drain: float) -> subprocess.Popen[str]:
        (tmp_path / "config.yaml").write_text(CONFIG.format(drain=drain))
        # No test waits for what ends in order, which may take long on a busy machine.
        main = MAIN.format(grace=PROMPT_SECONDS / 2 if form in ENDS_IN_ORDER else 0.6)
        with (tmp_path / "log").open("w") as log:
            worker = subprocess.Popen(
                [sys.executable, "-c", main, "worker", "agents:app", "--config", "config.yaml", *options],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(tmp_path), **({"FORM": form} if form is not None else {})},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        started.append(worker)
        return worker

    yield start
    for worker in started:
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)  # what a handler has started as well
        worker.wait()
        assert worker.stdout is not None
        worker.stdout.close()  # not read to its end: a process of a fleet has it for some moments more


def until_begun(worker: subprocess.Popen[str]) -> None:
    assert worker.stdout is not None
    assert worker.stdout.readline().startswith("begun")


def until_heard(worker: subprocess.Popen[str], form: str, log: Path) -> None:
    """Wait until the process has taken the SIGTERM: it says so, unless its event loop is blocked."""
    deadline, status = time.monotonic() + PATIENCE_SECONDS, Path(f"/proc/{worker.pid}/status")
    while int(status.read_text().partition("ShdPnd:")[2].split()[0], 16) >> (signal.SIGTERM - 1) & 1 or (
        form != "blocked loop" and "worker.stopping" not in log.read_text()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def end_of(worker: subprocess.Popen[str], log: Path) -> tuple[int, float]:
    """The exit code, and how many seconds it took."""
    began = time.monotonic()
    try:
        return worker.wait(PROMPT_SECONDS), time.monotonic() - began
    except subprocess.TimeoutExpired:
        raise AssertionError(f"it is still there: {log.read_text()}") from None


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_worker_ends_soon_after_its_drain_timeout(start: Start, tmp_path: Path, form: str) -> None:
    worker = start(form=form, drain=DRAIN_SECONDS)
    until_begun(worker)
    worker.terminate()
    code, seconds = end_of(worker, tmp_path / "log")
    log = (tmp_path / "log").read_text()
    assert code == (0 if form in ENDS_IN_ORDER else NOT_ENDED), log
    assert ("worker.not_ended" in log) == (code == NOT_ENDED)
    assert seconds >= DRAIN_SECONDS - 0.1 or form == "thread left"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow
def test_a_second_signal_ends_a_worker_long_before_its_drain_timeout(start: Start, tmp_path: Path, form: str) -> None:
    worker = start(form=form, drain=LONG_SECONDS)
    until_begun(worker)
    worker.terminate()
    until_heard(worker, form, tmp_path / "log")  # else the two are one
    worker.terminate()
    code, _ = end_of(worker, tmp_path / "log")
    assert code == (0 if form in ENDS_IN_ORDER else NOT_ENDED), (tmp_path / "log").read_text()


@pytest.mark.slow
def test_a_fleet_replaces_each_process_that_has_to_end(start: Start, tmp_path: Path) -> None:
    fleet = start("--processes", "3", "--max-notifications", "1", form=None, drain=DRAIN_SECONDS)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (log := (tmp_path / "log").read_text()).count("process.replaced") < len(RECYCLED):
        assert fleet.poll() is None, log
        assert time.monotonic() < deadline, log
        time.sleep(0.05)
    assert "process.crashed" not in log
    assert "process.killed" in log  # their own grace is longer than the supervisor's is here
    fleet.terminate()
    end_of(fleet, tmp_path / "log")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["await", "anyio.to_thread", "blocked loop"])
def test_a_fleet_ends_with_its_processes(start: Start, tmp_path: Path, form: str) -> None:
    fleet = start("--processes", "2", form=form, drain=DRAIN_SECONDS)
    until_begun(fleet)
    fleet.terminate()
    code, _ = end_of(fleet, tmp_path / "log")
    assert code == (0 if form in ENDS_IN_ORDER else NOT_ENDED), (tmp_path / "log").read_text()


UNNAMED = """
import asyncio
from collections.abc import AsyncIterator

import anyio
from aviso_workers import App, Notification

app = App("unnamed")


class Db: ...


async def shielded():
    with anyio.CancelScope(shield=True):
        await anyio.sleep(600)


{code}
"""
WAITING = {
    "timer": """
@app.every("1s", singleton=False)
async def tick() -> None:
    print("begun", flush=True)
    await shielded()  # here
""",
    "task": """
@app.task
async def work() -> None:
    print("begun", flush=True)
    await shielded()  # here
""",
    "resource": """
@app.resource
async def db() -> AsyncIterator[Db]:
    print("begun", flush=True)
    yield Db()
    await shielded()  # here

@app.task
async def use(db: Db) -> None: ...
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("waits", WAITING)
def test_the_line_says_where_the_author_s_code_waits(start: Start, tmp_path: Path, waits: str) -> None:
    code = UNNAMED.format(code=WAITING[waits])
    (tmp_path / "agents.py").write_text(code)
    worker = start(form=None, drain=DRAIN_SECONDS)
    until_begun(worker)
    time.sleep(0.2)  # else it would be told before it has begun to wait
    worker.terminate()
    assert end_of(worker, tmp_path / "log")[0] == NOT_ENDED
    line = 1 + next(number for number, text in enumerate(code.splitlines()) if "# here" in text)
    assert f"awaits=['{tmp_path / 'agents.py'}:{line}']" in (tmp_path / "log").read_text()


def test_children_of_multiprocessing_end_with_a_worker_that_ends_itself(start: Start, tmp_path: Path) -> None:
    worker = start(form="process pool", drain=DRAIN_SECONDS)
    until_begun(worker)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (children := list(tmp_path.glob("child-*"))) and time.monotonic() < deadline:
        time.sleep(0.02)
    (child,) = (int(path.name.removeprefix("child-")) for path in children)
    worker.send_signal(signal.SIGTERM)
    assert end_of(worker, tmp_path / "log")[0] == NOT_ENDED
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(child)


def is_running(pid: int) -> bool:
    """Whether it runs, and is no zombie that waits for who has inherited it."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
