"""`aviso-workers dev`: agents with a nats-server of their own. (`worker` is in tests/stories.)"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Ran
from tests.conftest import Start

Run = Callable[..., Ran]

AGENTS = """
from aviso_workers import App, Notification

app = App("dev-tests")

@app.agent("mars")
async def index(notification: Notification) -> None: ...
"""


@pytest.fixture
def config(tmp_path: Path, free_port: int, write_config: Callable[..., Path]) -> Path:
    (tmp_path / "agents.py").write_text(AGENTS)
    return write_config(f"localhost:{free_port}")


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(("options", "kept"), [((), 2), (("--ephemeral", "--reload"), 1)])
def test_dev_brings_its_own_server_and_takes_it_away(
    start: Start, run: Run, config: Path, free_port: int, tmp_path: Path, options: tuple[str, ...], kept: int
) -> None:
    for _ in range(2):
        dev = start("dev", "agents:app", "--config", config, *options)
        dev.until("agent.started")
        assert run("notify", "mars", "class=od", "step=6", "--config", config).code == 0
        stored = run("replay", "mars", "--config", config).lines
        os.killpg(dev.process.pid, signal.SIGINT)  # Ctrl-C reaches every process of a terminal
        assert dev.end() == 0
        assert not listens(free_port)
        assert [line["event"] for line in dev.log if line["event"] == "connection.down"] == []
        assert dev.told[0].startswith(f"nats-server nats://127.0.0.1:{free_port}, streams in ")
    assert len(stored) == kept
    assert (tmp_path / ".aviso-workers").exists() == (not options)


def test_dev_names_the_port_that_is_in_use(start: Start, config: Path, free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)):
        dev = start("dev", "agents:app", "--config", config, "--ephemeral")
        assert dev.end() == 1
    assert dev.told == [
        f"aviso-workers: port {free_port} on 127.0.0.1 is in use: stop what listens there, or choose another\n"
    ]


def test_dev_serves_this_machine_only(run: Run, config: Path, write_config: Callable[..., Path]) -> None:
    ran = run("dev", "agents:app", "--config", write_config("nats://nats.example.org"))
    assert ran.code == 2
    assert ran.err.startswith("aviso-workers: notification_backend.jetstream.nats_url: dev serves 127.0.0.1 only")
