"""The status port, asked as a probe and as Prometheus would ask it."""

from __future__ import annotations

import queue
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from aviso_workers.config import Secret
from aviso_workers.errors import ConfigError
from aviso_workers.telemetry import status
from aviso_workers.telemetry.status import FAILED_SECONDS, MAX_FAILED, Health, StatusServer
from tests.waits import PATIENCE_SECONDS

TEXT = "text/plain; version=0.0.4; charset=utf-8"


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
def server(health: Health) -> Iterator[StatusServer]:
    with StatusServer(
        host="127.0.0.1", port=0, health=health, metrics=lambda _: (b"aviso_worker_up 1\n", TEXT)
    ) as server:
        yield server


def get(server: StatusServer, path: str, *, authorization: str = "") -> tuple[int, str]:
    request = urllib.request.Request(server.url + path, headers={"Authorization": authorization})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_worker_is_alive_while_its_loop_turns(server: StatusServer) -> None:
    assert get(server, "/livez") == (200, "ok\n")


def test_head_has_the_answer_without_its_body(server: StatusServer) -> None:
    for path, length in (("/metrics", "18"), ("/livez", "3")):
        with urllib.request.urlopen(urllib.request.Request(server.url + path, method="HEAD")) as answer:
            assert (answer.status, answer.headers["Content-Length"], answer.read()) == (200, length, b"")


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
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))):  # one that never asks
        assert get(server, "/livez") == (200, "ok\n")


def test_connections_that_say_nothing_keep_no_probe_from_its_answer(server: StatusServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) for _ in range(300)]
    try:
        assert get(server, "/livez") == (200, "ok\n")
        # The oldest are closed: else each would take a thread and a descriptor for as long as it likes.
        assert [connection.recv(1) for connection in idle[: 300 - status.MAX_CONNECTIONS]] == [b""] * (
            300 - status.MAX_CONNECTIONS
        )
    finally:
        for connection in idle:
            connection.close()


@pytest.mark.slow
def test_a_connection_that_says_nothing_is_closed_after_a_while(
    health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "READ_SECONDS", 0.05)
    with StatusServer(host="127.0.0.1", port=0, health=health, metrics=lambda _: (b"", "text/plain")) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as idle:
            assert idle.recv(1) == b""


@pytest.mark.parametrize("header", ["", "Bearer wrong", "Bearer ", "Basic the-token", "Bearer the-tokenx"])
def test_metrics_with_a_token_are_for_who_sends_it(health: Health, header: str) -> None:
    token = Secret("the-token")
    with StatusServer(
        host="127.0.0.1", port=0, health=health, metrics=lambda _: (b"up 1\n", "text/plain"), token=token
    ) as server:
        code, body = get(server, "/metrics", authorization=header)
        assert (code, "Authorization: Bearer" in body) == (401, True)
        assert get(server, "/metrics", authorization="Bearer the-token") == (200, "up 1\n")
        assert get(server, "/livez") == (200, "ok\n")


def test_wrong_tokens_are_logged_and_slowed(health: Health, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, answered = queue.Queue[float](), threading.Event()

    def sleep(seconds: float) -> None:
        waits.put(seconds)
        answered.wait(PATIENCE_SECONDS)

    monkeypatch.setattr(status, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    with (
        capture_logs() as logged,
        StatusServer(
            host="127.0.0.1", port=0, health=health, metrics=lambda _: (b"", TEXT), token=Secret("the-token")
        ) as server,
        ThreadPoolExecutor(MAX_FAILED) as pool,
    ):
        guess = partial(get, server, "/metrics", authorization="Bearer a-guess")
        slowed = [(pool.submit(guess), waits.get(timeout=PATIENCE_SECONDS)) for _ in range(MAX_FAILED)]
        assert [seconds for _, seconds in slowed] == [(n + 1) * FAILED_SECONDS for n in range(MAX_FAILED)]
        assert [guess()[0] for _ in range(MAX_FAILED)] == [429] * MAX_FAILED
        answered.set()
        assert [guessing.result()[0] for guessing, _ in slowed] == [401] * MAX_FAILED
        assert get(server, "/metrics")[0] == 401
        assert get(server, "/metrics", authorization="Bearer the-token")[0] == 200
    told = [(line["event"], line["address"]) for line in logged]
    assert told == [("status.login_failed", "127.0.0.1")] * MAX_FAILED
    assert "a-guess" not in str(logged)


@pytest.mark.parametrize("token", ["set-it-in-the-environment", "fifteen-letters"])
def test_others_are_not_let_in_by_a_token_that_can_be_guessed(health: Health, token: str) -> None:
    def serve(host: str) -> StatusServer:
        return StatusServer(host=host, port=0, health=health, metrics=lambda _: (b"", TEXT), token=Secret(token))

    with pytest.raises(ConfigError, match=r"workers\.status\.token: 0\.0\.0\.0 can be reached by others") as refused:
        serve("0.0.0.0")
    assert token not in str(refused.value)
    with serve("127.0.0.1"):
        pass


def test_a_port_in_use_is_named(server: StatusServer, health: Health) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"workers.status.port: cannot listen on 127.0.0.1:{port} \(Address already"):
        StatusServer(host="127.0.0.1", port=port, health=health, metrics=lambda _: (b"", "text/plain"))


def test_the_port_is_free_again_afterwards(health: Health) -> None:
    with StatusServer(host="127.0.0.1", port=0, health=health, metrics=lambda _: (b"", "text/plain")) as server:
        port = int(server.url.rpartition(":")[2])
        assert "status" in [thread.name for thread in threading.enumerate()]
    with StatusServer(host="127.0.0.1", port=port, health=health, metrics=lambda _: (b"", "text/plain")) as server:
        assert get(server, "/livez") == (200, "ok\n")


def test_a_connection_for_another_path_is_handed_over_with_its_request_unread(health: Health) -> None:
    handed: queue.Queue[socket.socket] = queue.Queue()

    def take(connection: socket.socket) -> str:
        handed.put(connection.dup())
        return ""

    with StatusServer(
        host="127.0.0.1", port=0, health=health, metrics=lambda _: (b"up 1\n", TEXT), hand_over=take
    ) as server:
        host, port = server.url.removeprefix("http://").split(":")
        for asked in (b"POST /mcp HTTP/1.1\r\n", b"GET /metricsx ", b"GET /", b"x" * 300):
            with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as client:
                client.sendall(asked)
                if asked == b"GET /":
                    assert get(server, "/livez") == (200, "ok\n")
                    assert handed.empty(), "the path may still become one of ours"
                    client.sendall(b"x HTTP/1.1\r\n")
                with handed.get(timeout=PATIENCE_SECONDS) as taken:
                    taken.settimeout(PATIENCE_SECONDS)
                    assert taken.recv(len(asked)) == asked
                    for _ in range(status.MAX_CONNECTIONS + 1):
                        assert get(server, "/metrics") == (200, "up 1\n")
                    taken.sendall(b"answer")
                    assert client.recv(6) == b"answer", "it is not among the open ones, of which the oldest is closed"


def test_who_is_not_taken_is_told_why(health: Health) -> None:
    with StatusServer(
        host="127.0.0.1", port=0, health=health, metrics=lambda _: (b"", TEXT), hand_over=lambda _: "not now"
    ) as server:
        assert get(server, "/") == (503, "not now\n")
        assert get(server, "/livez") == (200, "ok\n")
