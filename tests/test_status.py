"""The status port, asked as a probe and as Prometheus would ask it."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from aviso_workers import status
from aviso_workers.errors import ConfigError
from aviso_workers.status import Health, StatusServer
from tests.waits import PATIENCE_SECONDS


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
def server(health: Health) -> Iterator[StatusServer]:
    with StatusServer(host="127.0.0.1", port=0, health=health, metrics=lambda: b"aviso_worker_up 1\n") as server:
        yield server


def get(server: StatusServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(server.url + path, timeout=PATIENCE_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_worker_is_alive_while_its_loop_turns(server: StatusServer) -> None:
    assert get(server, "/livez") == (200, "ok\n")


def test_a_stuck_loop_is_seen_and_not_hidden(
    server: StatusServer, health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "STUCK_SECONDS", 0.0)
    code, body = get(server, "/livez")
    assert (code, body) == (503, "the event loop has not turned for 0 s\n")
    monkeypatch.setattr(status, "STUCK_SECONDS", 60.0)
    health.turned(next_in_seconds=1.0)
    assert get(server, "/livez") == (200, "ok\n")


def test_a_loop_that_comes_round_late_says_by_how_much(health: Health, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    health.turned(next_in_seconds=1.0)
    assert health.late_seconds() == 0
    now = 101.5
    health.turned(next_in_seconds=1.0)
    now = 102.0
    assert health.late_seconds() == 0.5
    now = 109.5
    assert health.late_seconds() == 7.0, "it is stuck now, and says so before it comes round"


def test_a_worker_that_is_not_ready_says_why(server: StatusServer, health: Health) -> None:
    assert get(server, "/readyz") == (503, "starting\n")
    health.unready = ["not connected yet", "agent index: has not started"]
    assert get(server, "/readyz") == (503, "not connected yet\nagent index: has not started\n")
    health.unready = []
    assert get(server, "/readyz") == (200, "ok\n")


def test_metrics_are_served_as_prometheus_reads_them(server: StatusServer) -> None:
    with urllib.request.urlopen(f"{server.url}/metrics?name=up", timeout=PATIENCE_SECONDS) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert answer.read() == b"aviso_worker_up 1\n"


def test_any_other_path_says_what_there_is(server: StatusServer) -> None:
    assert get(server, "/") == (404, "/livez /readyz /metrics\n")


def test_it_answers_many_at_once(server: StatusServer) -> None:
    with socket.create_connection(server.url.removeprefix("http://").split(":")):  # one that never asks
        assert get(server, "/livez") == (200, "ok\n")


def test_a_port_in_use_is_named(server: StatusServer, health: Health) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"workers.status.port: cannot listen on 127.0.0.1:{port} \(Address already"):
        StatusServer(host="127.0.0.1", port=port, health=health, metrics=bytes)


def test_the_port_is_free_again_afterwards(health: Health) -> None:
    with StatusServer(host="127.0.0.1", port=0, health=health, metrics=bytes) as server:
        port = int(server.url.rpartition(":")[2])
        assert "status" in [thread.name for thread in threading.enumerate()]
    with StatusServer(host="127.0.0.1", port=port, health=health, metrics=bytes) as server:
        assert get(server, "/livez") == (200, "ok\n")
