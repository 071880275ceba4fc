"""`aviso-workers dev`: agents with a nats-server of their own, and what it says of them."""

from __future__ import annotations

import os
import shlex
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import Ran
from tests.conftest import Start

Run = Callable[..., Ran]

AGENTS = """
import msgspec
import structlog
from aviso_workers import App, Notification

app = App("dev-tests")
log = structlog.get_logger()

class Field(msgspec.Struct):
    location: str
    size: int = 0

@app.agent("mars", where={"class": ["od", "rd"], "step": {"gt": 5}})
async def index(notification: Notification[Field]) -> None:
    print(notification.identifier["step"], notification.payload.location, flush=True)
    log.info("field.indexed")
"""


def add(config: Path, **sections: object) -> None:
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), **sections}))


@pytest.fixture
def config(tmp_path: Path, free_port: int, write_config: Callable[..., Path]) -> Path:
    (tmp_path / "agents.py").write_text(AGENTS)
    config = write_config(f"localhost:{free_port}")
    add(config, server={"monitoring": {"port": 0}})  # the default one may be of a test beside this one
    return config


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("options", "kept"), [((), 2), (("--ephemeral", "--reload"), 1)])
def test_it_brings_its_own_server_and_takes_it_away(
    start: Start, run: Run, config: Path, free_port: int, tmp_path: Path, options: tuple[str, ...], kept: int
) -> None:
    for _ in range(2):
        dev = start("dev", "agents:app", "--verbose", "--config", config, *options)
        dev.until("agent.started")
        told = run("notify", "mars", "class=od", "step=6", "--payload", '{"location": "a"}', "--config", config)
        assert told.code == 0, told
        stored = run("replay", "mars", "--config", config).lines
        os.killpg(dev.process.pid, signal.SIGINT)  # Ctrl-C reaches every process of a terminal
        assert dev.end() == 0
        assert not listens(free_port)
        assert [line["event"] for line in dev.log if line["event"] == "connection.down"] == []
    assert len(stored) == kept
    assert (tmp_path / ".aviso-workers/server").exists() == (not options)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "last"), [((), "Ready."), (("--reload",), "The agents start again")])
def test_it_says_what_there_is_to_try_and_that_works(
    start: Start, config: Path, free_port: int, options: tuple[str, ...], last: str
) -> None:
    """Our log is for those who ask for it, and the author's for everybody."""
    dev = start("dev", "agents:app", "--config", config, "--status-port", "0", *options)
    dev.until_told(last)
    told = {name: rest for name, _, rest in (line.strip().partition("  ") for line in dev.told)}
    assert (told["agent"].strip(), told["nats-server"].split(",")[0]) == (
        "index, which reads mars",
        f"nats://127.0.0.1:{free_port}",
    )
    command, *arguments = shlex.split(told["try"])
    assert (command, start(*arguments).end()) == ("aviso-workers", 0), told["try"]
    assert dev.lines(1) == ["6 a\n"]
    dev.until("field.indexed")
    os.killpg(dev.process.pid, signal.SIGINT)
    assert dev.end() == 0
    infos = {line["event"] for line in dev.log if line["level"] == "info"}
    assert not infos & {"worker.started", "agent.started", "stream.created"}, infos


def test_it_takes_the_next_status_port_where_one_is_taken(start: Start, config: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        add(config, workers={"status": {"port": port}})
        dev = start("dev", "agents:app", "--config", config)
        dev.until_told("Ready.")
        assert dev.told[0].startswith(f"port {port} is taken: the status port is ")
        assert dev.end(signal.SIGINT) == 0


def test_it_does_not_run_beside_a_server_of_the_same_directory(
    start: Start, run: Run, config: Path, free_port: int
) -> None:
    add(config, server={"port": 0, "monitoring": {"port": 0}})
    assert run("server", "start", "--config", config).code == 0
    try:
        ran = run("dev", "agents:app", "--config", config)
    finally:
        assert run("server", "stop").code == 0
    assert (ran.code, ran.err.partition(":")[2].partition(":")[0]) == (
        1,
        " a nats-server runs in .aviso-workers/server already",
    )


def test_it_names_the_port_that_is_in_use(start: Start, config: Path, free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)):
        dev = start("dev", "agents:app", "--config", config, "--ephemeral")
        assert dev.end() == 1
    assert dev.told == [
        f"aviso-workers: port {free_port} on 127.0.0.1 is in use: stop what listens there, or choose another in "
        "notification_backend.jetstream.nats_url\n"
    ]


def test_a_mistake_is_told_before_a_server_is_started(run: Run, config: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(AGENTS.replace('"mars"', '"marsh"'))
    ran = run("dev", "wrong:app", "--config", config)
    assert (ran.code, "marsh" in ran.err, (tmp_path / ".aviso-workers").exists()) == (2, True, False), ran


def test_it_serves_this_machine_only(run: Run, config: Path, write_config: Callable[..., Path]) -> None:
    ran = run("dev", "agents:app", "--config", write_config("nats://nats.example.org"))
    assert ran.code == 2
    assert ran.err.startswith("aviso-workers: notification_backend.jetstream.nats_url: dev serves 127.0.0.1 only")
