"""The console on the status port of a fleet, whose probes its crashes and its clients do not reach."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from aviso_workers import App
from aviso_workers.backends import open_backend
from aviso_workers.config import Config, settings
from aviso_workers.console import web as serving
from aviso_workers.errors import ConfigError
from aviso_workers.server import NatsServer
from aviso_workers.telemetry.status import STUCK_SECONDS
from aviso_workers.worker import fleet
from aviso_workers.worker.fleet import FleetPlan
from tests.commands import Command
from tests.conftest import Start, write_mars_config
from tests.waits import PATIENCE_SECONDS

AGENTS = """
from aviso_workers import App, Notification

app = App("field-index")

@app.agent("mars")
async def index(notification: Notification) -> None: ...
"""
ON = {"AVISO_WORKERS_WORKERS__CONSOLE__ON_STATUS_PORT": "true", "AVISO_WORKERS_WORKERS__LOGGING__FORMAT": "json"}
LOOK_SECONDS = 0.1
HELLO = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


def wait_until(condition: Callable[[], Any], *, what: Callable[[], Any]) -> None:
    """Wait until the condition holds; say `what` was there instead when it does not in time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"there was: {what()}"
        time.sleep(LOOK_SECONDS)


@pytest.fixture
def file(nats_server: NatsServer, tmp_path: Path) -> Path:
    (tmp_path / "agents.py").write_text(AGENTS)
    return write_mars_config(tmp_path / "aviso.yaml", nats_server.url)


class Served:
    """A fleet with a console on its status port."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.url = command.until("fleet.started")["status"]

    def get(self, path: str) -> tuple[int, str]:
        answer = httpx.get(f"{self.url}{path}", trust_env=False, timeout=PATIENCE_SECONDS)
        return answer.status_code, answer.text

    def probe(self, path: str) -> tuple[int, str]:
        """What the fleet answers; it is asked again where a slow machine kept a worker from answering within 0.8 s."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while "has not answered for" in (found := self.get(path))[1] and time.monotonic() < deadline:
            pass
        return found

    def shows(self, path: str, text: str) -> None:
        """Wait until the fleet shows this text there."""
        wait_until(lambda: text in self.get(path)[1], what=lambda: self.get(path))

    def connect(self, request: bytes = b"") -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS)
        connection.sendall(request)
        return connection

    def console(self) -> int:
        """The process of the console that is started next."""
        while (entry := self.command.until("process.started"))["process"] != "console":
            pass
        return int(entry["pid"])


@pytest.fixture
def serve(start: Start, file: Path) -> Callable[..., Served]:
    def serve(*options: str, target: str = "agents:app", **environment: str) -> Served:
        command = start("worker", target, "--status-port", "0", *options, **{**ON, **environment})
        return Served(command)

    return serve


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    return serve("--processes", "2", "--config", "aviso.yaml")


@pytest.fixture
def clients() -> Iterator[ExitStack]:
    with ExitStack() as clients:
        yield clients


@pytest.mark.slow
def test_one_port_has_the_probes_and_the_pages(served: Served) -> None:
    served.shows("/agents", "field-index")
    served.shows("/readyz", "ok")
    assert served.probe("/livez") == (200, "ok\n")
    assert 'aviso_worker_process_running{app="field-index",process="2"} 1.0' in served.get("/metrics?x=1")[1]
    assert "console" not in served.get("/metrics")[1], "it is no worker, and has none of their series"
    assert served.get("/static/console.css")[0] == 200
    with httpx.stream("GET", f"{served.url}/?live=stream", trust_env=False) as live:
        assert live.status_code == 200
        assert served.command.end(signal.SIGTERM) == 0


@pytest.mark.slow
def test_a_connection_of_the_console_answers_no_probe_and_says_so(served: Served) -> None:
    served.shows("/settings", "workers.console")
    with httpx.Client(base_url=served.url, trust_env=False, timeout=PATIENCE_SECONDS) as client:
        assert client.get("/settings").status_code == 200
        answers = [client.get("/metrics"), client.get("/metrics")]
    assert [answer.status_code for answer in answers] == [421, 200], "the second one has a connection of its own"
    assert answers[0].text == "/metrics is answered on a connection of its own: ask again.\n"


@pytest.mark.slow
def test_clients_of_the_console_keep_no_probe_from_its_answer(served: Served, clients: ExitStack) -> None:
    served.shows("/agents", "field-index")
    open_ = [clients.enter_context(served.connect(HELLO if number % 2 else b"")) for number in range(300)]
    slow = clients.enter_context(served.connect(HELLO[:2]))
    assert served.probe("/livez") == (200, "ok\n")
    assert served.probe("/readyz") == (200, "ok\n")
    assert served.get("/metrics")[0] == 200
    assert served.get("/settings")[0] == 200
    slow.sendall(HELLO[2:])
    assert slow.recv(12) == b"HTTP/1.1 200", "what comes in pieces is the same request"
    assert {one.recv(12) for one in open_[1::2]} == {b"HTTP/1.1 200"}, "each that has asked is answered"


@pytest.mark.slow
def test_a_console_that_is_killed_is_started_again_and_the_fleet_is_ready_meanwhile(served: Served) -> None:
    console = served.console()
    served.shows("/agents", "field-index")
    served.shows("/readyz", "ok")
    os.kill(console, signal.SIGKILL)
    crashed = served.command.until("process.crashed")
    assert (crashed["process"], crashed["ended_with"]) == ("console", "signal 9 (Killed)")
    status, said = served.get("/")
    assert status == 503
    assert said in ("the console does not run; the log of the fleet says why\n", "the console is starting\n")
    assert httpx.post(f"{served.url}/", trust_env=False).status_code == 503
    assert served.probe("/readyz") == (200, "ok\n")
    served.shows("/agents", "field-index")
    assert served.command.end(signal.SIGTERM) == 0


@pytest.mark.slow
def test_a_console_that_hangs_keeps_no_probe_from_its_answer(served: Served, clients: ExitStack) -> None:
    console = served.console()
    served.shows("/agents", "field-index")
    served.shows("/readyz", "ok")
    os.kill(console, signal.SIGSTOP)
    try:
        asking = [clients.enter_context(served.connect(HELLO)) for _ in range(600)]
        assert served.probe("/readyz") == (200, "ok\n")
        assert served.probe("/livez") == (200, "ok\n")
        assert b"the console takes no connection: " in asking[-1].recv(4096), "those who wait are not without number"
    finally:
        with suppress(ProcessLookupError):  # after 10 s it is killed, and there is another one
            os.kill(console, signal.SIGCONT)
    served.shows("/agents", "field-index")
    assert served.command.end(signal.SIGTERM) == 0


@pytest.mark.anyio
async def test_a_console_tells_its_fleet_again_and_again_that_its_event_loop_turns(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "TURN_SECONDS", 0.01)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    told = b""
    with ours, theirs, anyio.fail_after(PATIENCE_SECONDS):
        async with open_backend(config) as admin, anyio.create_task_group() as tasks:
            tasks.start_soon(partial(serving.serve, admin, config, on_listening=lambda url: None, line=theirs))
            while len(told) < 3:
                await anyio.wait_readable(ours)
                told += ours.recv(1)
            tasks.cancel_scope.cancel()
    assert told == b"\n\n\n"


@pytest.mark.slow
def test_a_console_is_not_killed_after_its_machine_stood_still(served: Served) -> None:
    console = served.console()
    served.shows("/agents", "field-index")
    both = (served.command.process.pid, console)
    for process in both:
        os.kill(process, signal.SIGSTOP)
    time.sleep(STUCK_SECONDS + 1)  # nobody could tell that this time has passed
    for process in both:
        os.kill(process, signal.SIGCONT)
        time.sleep(0.5)  # the fleet goes on before the console does
    served.shows("/agents", "field-index")
    assert served.command.end(signal.SIGTERM) == 0
    assert "process.hung" not in [entry["event"] for entry in served.command.log]


@pytest.mark.slow
def test_a_console_that_hangs_for_long_is_killed_and_started_again(served: Served) -> None:
    console = served.console()
    served.shows("/agents", "field-index")
    served.shows("/readyz", "ok")
    os.kill(console, signal.SIGSTOP)
    hung = served.command.until("process.hung")
    assert (hung["process"], hung["seconds"]) == ("console", 10.0)
    served.shows("/agents", "field-index")
    assert served.probe("/readyz") == (200, "ok\n")
    os.kill(served.console(), signal.SIGSTOP)
    assert served.command.end(signal.SIGTERM) == 0
    assert "process.hung" not in [entry["event"] for entry in served.command.log[-8:]], "its end came before that"


@pytest.mark.slow
def test_the_console_ends_when_the_fleet_is_killed(served: Served) -> None:
    console = served.console()
    served.shows("/agents", "field-index")
    served.command.process.kill()

    def is_gone() -> bool:
        stat = Path(f"/proc/{console}/stat")
        return not stat.exists() or stat.read_text().rpartition(") ")[2].startswith("Z")

    wait_until(is_gone, what=lambda: console)


@pytest.mark.slow
def test_the_console_reads_the_configuration_of_the_app_where_no_file_is_named(
    serve: Callable[..., Served], file: Path, tmp_path: Path
) -> None:
    file.rename(tmp_path / "other.yaml")
    (tmp_path / "agents.py").write_text(AGENTS.replace('"field-index"', '"field-index", config="other.yaml"'))
    served = serve("--processes", "1")
    served.shows("/settings", "other.yaml")
    assert served.command.end(signal.SIGTERM) == 0


@pytest.mark.slow
def test_a_console_of_a_reloaded_fleet_has_the_new_configuration(serve: Callable[..., Served], file: Path) -> None:
    served = serve("--reload", "--config", "aviso.yaml")
    served.shows("/settings", "workers.console")
    file.write_text(file.read_text().replace("1000", "many"))
    crashed = served.command.until("process.crashed"), served.command.until("process.crashed")
    assert {(one["process"], one["again"]) for one in crashed} == {
        (name, "after a change") for name in ("1", "console")
    }
    section = '"application": {"base_url": "http://changed.example"}, "workers": {'
    file.write_text(file.read_text().replace("many", "1000").replace('"workers": {', section))
    served.shows("/settings", "http://changed.example")
    assert served.command.end(signal.SIGTERM) == 0, "".join(served.command.told)


def test_a_console_that_others_would_reach_without_users_is_refused(start: Start, file: Path) -> None:
    variables = {**ON, "AVISO_WORKERS_WORKERS__STATUS__HOST": "0.0.0.0"}
    command = start("worker", "agents:app", "--config", file, "--processes", "2", "--status-port", "0", **variables)
    assert command.end() == 2
    said = "".join(command.told)
    assert "workers.status.host, at which workers.console.on_status_port serves the console: 0.0.0.0 can be" in said


def test_a_console_without_its_packages_is_refused(
    write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AVISO_WORKERS_WORKERS__CONSOLE__ON_STATUS_PORT", "true")
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    app = App("fleet-tests", config=write_config("nats://127.0.0.1:1"))
    with pytest.raises(ConfigError, match=r"needs starlette, which is missing: pip install 'aviso-workers\["):
        fleet.run(app, FleetPlan(command=(), processes=1), status_port=0)


@pytest.mark.slow
def test_a_worker_without_a_fleet_says_that_it_serves_none(start: Start, file: Path) -> None:
    command = start("worker", "agents:app", "--config", file, "--status-port", "0", **ON)
    warned = command.until("config.warning")
    assert "only a fleet serves the console" in warned["text"]
    started: dict[str, Any] = command.until("worker.started")
    assert httpx.get(f"{started['status']}/", trust_env=False).status_code == 404
    assert command.end(signal.SIGTERM) == 0
