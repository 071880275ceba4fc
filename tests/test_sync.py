"""Publishing from code without an event loop: threads, processes that fork, scripts that end."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from aviso_workers import App, Notification, Receipt, event_loops
from aviso_workers.errors import (
    ConfigError,
    DeclarationError,
    InvalidIdentifierError,
    OutcomeUnknownError,
    UnavailableError,
)
from aviso_workers.server import NatsServer
from aviso_workers.sessions.portal import Portal
from aviso_workers.testing import harness
from tests.conftest import write_mars_config
from tests.waits import PATIENCE_SECONDS

THREADS, CALLS = 8, 200

FORKING = """
import multiprocessing, os, sys, threading, warnings
from concurrent.futures import ThreadPoolExecutor
from aviso_workers import App

warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of a fork beside threads
app = App("sync", config=sys.argv[1])
halfway = threading.Barrier(5)

def publish(first):
    for step in range(first, first + 50):
        if step == first + 25:
            halfway.wait()
        app.sync(app.notify, "mars", {"class": "od", "step": step})

def publish_in_child(first):
    for step in range(first, first + 25):
        assert not app.sync(app.notify, "mars", {"class": "od", "step": step}).duplicate

with ThreadPoolExecutor(4) as threads:
    running = [threads.submit(publish, 100 * number) for number in range(4)]
    halfway.wait()
    children = [
        multiprocessing.get_context("fork").Process(target=publish_in_child, args=(500 + 100 * number,))
        for number in range(3)
    ]
    for child in children:
        child.start()
    for each in running:
        each.result()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
pid = os.fork()
app.sync(app.notify, "mars", {"class": "od", "step": 900 if pid else 901})
if not pid:
    sys.exit(7)  # with all that an interpreter does at its end
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
app.sync(app.notify, "mars", {"class": "od", "step": 902})
"""

FORKING_WHILE_CONNECTED = """
import multiprocessing, sys, warnings
import anyio, anyio.to_thread
from aviso_workers import App

warnings.simplefilter("ignore", DeprecationWarning)
app = App("sync", config=sys.argv[1])

def publish(step):
    app.sync(app.notify, "mars", {"class": "od", "step": step})

def fork():
    child = multiprocessing.get_context("fork").Process(target=publish, args=(2,))
    child.start()
    child.join()
    return child.exitcode

async def main():
    async with app.running():
        await anyio.to_thread.run_sync(publish, 1)
        assert await anyio.to_thread.run_sync(fork) == 0
        await anyio.to_thread.run_sync(publish, 3)

anyio.run(main)
"""

ENDING = """
import sys
from aviso_workers import App

app = App("sync", config=sys.argv[1])
print(app.sync(app.notify, "mars", {"class": "od", "step": 1}).sequence)
"""

ENDING_IN_AN_ERROR = ENDING + "raise SystemExit(3)"


@pytest.fixture
def app(nats_server: NatsServer, write_config: Callable[..., Path]) -> App:
    return App("sync", config=write_config(nats_server.url))


def stored(app: App) -> list[int]:
    async def read() -> list[int]:
        async with app:
            return [int(one.identifier["step"]) async for one in app.replay("mars")]

    return anyio.run(read)


def run(program: str, config: Path) -> tuple[int, str, str]:
    ended = subprocess.run(
        [sys.executable, "-c", program, str(config)], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    return ended.returncode, ended.stdout, ended.stderr


def until_refused(opened: Portal) -> None:
    while True:
        event_loops.call(opened.blocking, anyio.sleep, 0)


@pytest.mark.slow
def test_many_threads_publish_at_once_over_one_connection(app: App, nats_server: NatsServer) -> None:
    def publish(thread: int) -> list[Receipt]:
        return [app.sync(app.notify, "mars", {"class": f"c{thread}", "step": step}) for step in range(CALLS)]

    with ThreadPoolExecutor(THREADS) as threads:
        receipts = [receipt for each in threads.map(publish, range(THREADS)) for receipt in each]

    assert sorted(receipt.sequence for receipt in receipts) == list(range(1, THREADS * CALLS + 1))
    assert len(stored(app)) == THREADS * CALLS
    assert [thread.name for thread in threading.enumerate()].count("aviso-workers-portal") == 1


def test_a_message_id_is_stored_once_and_what_is_given_is_what_notify_takes(app: App) -> None:
    first = app.sync(app.notify, "mars", {"class": "od", "step": 1}, {"n": 1}, message_id="one", headers={"A": "b"})
    second = app.sync(app.notify, "mars", {"class": "od", "step": 2}, message_id="one")
    later = app.sync(app.notify, "mars", {"class": "od", "step": 3}, due=3600, message_id="later")
    assert (second.sequence, second.duplicate) == (first.sequence, True)
    assert later.message_id == "later"
    assert stored(app) == [1]


def test_errors_arrive_as_themselves(app: App, tmp_path: Path) -> None:
    with pytest.raises(InvalidIdentifierError, match="'step' is missing"):
        app.sync(app.notify, "mars", {"class": "od"})
    with pytest.raises(ConfigError, match="is not a file"):
        App("sync", config=tmp_path / "none.yaml").sync(app.notify, "mars", {"class": "od", "step": 1})


def test_a_server_that_is_gone_is_told_to_all_who_wait_and_found_again(
    write_config: Callable[..., Path], free_port: int, tmp_path: Path
) -> None:
    config = write_config(
        f"nats://127.0.0.1:{free_port}", retry_attempts=2, max_reconnect_attempts=1, publish_deadline_seconds=3
    )
    app = App("sync", config=config)

    def publish(step: int) -> str:
        try:
            return str(app.sync(app.notify, "mars", {"class": "od", "step": step}).sequence)
        except (OutcomeUnknownError, UnavailableError) as error:  # unknown where the server went during a request
            return str(error).partition(":")[0]

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(publish, range(4))) == {"no NATS server at nats"}
        with NatsServer.start(store_dir=tmp_path / "store", port=free_port):
            assert sorted(threads.map(publish, range(4))) == ["1", "2", "3", "4"]
        assert all(not said.isdecimal() for said in threads.map(publish, range(4)))
        with NatsServer.start(store_dir=tmp_path / "store", port=free_port):
            assert all(said.isdecimal() for said in threads.map(publish, range(10, 14)))


@pytest.mark.anyio
async def test_inside_of_an_event_loop_it_says_what_to_write_instead(app: App) -> None:
    with pytest.raises(
        DeclarationError,
        match=r"^app.sync would stop the event loop that runs here: `await App.notify\(...\)` instead$",
    ):
        app.sync(app.notify, "mars", {"class": "od", "step": 1})


@pytest.mark.slow
@pytest.mark.parametrize(("program", "steps"), [(FORKING, 4 * 50 + 3 * 25 + 3), (FORKING_WHILE_CONNECTED, 3)])
def test_a_process_that_is_forked_publishes_too_and_its_parent_goes_on(
    program: str, steps: int, app: App, nats_server: NatsServer, tmp_path: Path
) -> None:
    assert run(program, tmp_path / "config.yaml") == (0, "", "")
    found = stored(app)
    assert (len(found), len(set(found))) == (steps, steps)


@pytest.mark.slow
@pytest.mark.parametrize(("program", "code"), [(ENDING, 0), (ENDING_IN_AN_ERROR, 3)])
def test_a_script_ends_right_after_its_last_call(program: str, code: int, app: App, tmp_path: Path) -> None:
    assert run(program, tmp_path / "config.yaml") == (code, "1\n", "")
    assert stored(app) == [1]


def test_closing_waits_for_what_is_under_way_and_refuses_what_comes_after() -> None:
    opened = Portal()
    begun, go = threading.Event(), threading.Event()

    async def slow() -> str:
        begun.set()
        await anyio.to_thread.run_sync(go.wait)
        return "done"

    with ThreadPoolExecutor(2) as threads:
        answer = threads.submit(event_loops.call, opened.blocking, slow)
        assert begun.wait(PATIENCE_SECONDS)
        closing = threads.submit(opened.close)
        with pytest.raises(UnavailableError, match="the event loop of the app has ended: This portal is not runn"):
            until_refused(opened)
        assert not closing.done()
        go.set()
        assert answer.result(PATIENCE_SECONDS) == "done"
        closing.result(PATIENCE_SECONDS)


@pytest.mark.anyio
async def test_where_the_app_is_connected_it_publishes_over_that_connection(tmp_path: Path) -> None:
    document = json.loads(write_mars_config(tmp_path / "config.yaml", "nats://127.0.0.1:1").read_text())
    document["notification_backend"] = {"kind": "in_memory"}
    del document["notification_schema"]["mars"]["storage_policy"]
    (tmp_path / "config.yaml").write_text(json.dumps(document))
    app = App("sync", config=tmp_path / "config.yaml")

    @app.agent("mars", where={"class": "od"})
    def index(notification: Notification[Any]) -> None:  # in a thread
        app.sync(app.notify, "mars", {"class": "rd", "step": notification.identifier["step"]})

    async with harness(app) as t:
        await t.notify("mars", {"class": "od", "step": 1})
        await t.settle()
        assert [one.identifier["class"] for one in t.published] == ["od", "rd"]
        await anyio.to_thread.run_sync(app.sync, app.notify, "mars", {"class": "od", "step": 2})
        await t.settle()
        assert t.outcomes(index) == ["acked", "acked"]
