"""The command `aviso-workers console`: a process of its own, from its start to SIGTERM."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import httpx
import pytest

from aviso_workers.server import NatsServer
from tests.conftest import Start, write_mars_config
from tests.console.conftest import hidden_fields


@pytest.fixture
def file(nats_server: NatsServer, tmp_path: Path) -> Path:
    return write_mars_config(tmp_path / "aviso.yaml", nats_server.url)


@pytest.mark.slow
def test_it_serves_until_sigterm_and_ends_well(start: Start, file: Path) -> None:
    command = start("console", "--port", "0", "--config", file)
    url = command.until_told("console: ").split()[-1]
    assert "No agent is known here." in httpx.get(url, trust_env=False).text
    with httpx.stream("GET", f"{url}?live=stream", trust_env=False) as live:
        assert live.status_code == 200
        assert command.end(signal.SIGTERM) == 0


@pytest.mark.slow
def test_an_action_and_what_was_refused_are_logged(start: Start, file: Path) -> None:
    command = start("console", "--port", "0", "--config", file, AVISO_WORKERS_WORKERS__LOGGING__FORMAT="json")
    url = command.until_told("console: ").split()[-1]
    with httpx.Client(base_url=url, trust_env=False) as client:
        foreign = client.post("/actions/apply-streams", data={"all": "yes"})
        assert foreign.status_code == 403
        client.headers["sec-fetch-site"] = "same-origin"
        asked = client.post("/actions/apply-streams", data={"all": "yes"})
        done = client.post("/actions/apply-streams", data=hidden_fields(asked.text, "apply-streams"))
        assert done.status_code == 303
    assert command.end(signal.SIGTERM) == 0
    logged = [(line["event"], line["who"]) for line in command.log if line["event"].startswith("console.")]
    assert logged == [
        ("console.foreign_page", "somebody on this machine"),
        ("console.acted", "somebody on this machine"),
    ]


def test_it_is_served_to_nobody_else_without_users(start: Start, file: Path) -> None:
    command = start("console", "--host", "0.0.0.0", "--port", "0", "--config", file)
    assert command.end() == 2
    assert "everybody would have all rights; configure users or a proxy" in "".join(command.told)


def test_a_port_that_is_taken_is_named(start: Start, file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = start("console", "--port", str(port), "--config", file)
        assert command.end() == 1
    assert f"the console cannot listen on 127.0.0.1:{port}: " in "".join(command.told)
