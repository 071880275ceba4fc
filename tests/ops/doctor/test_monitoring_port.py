"""What several servers say at the same time."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import pytest

from aviso_workers import App
from aviso_workers.errors import ServerProcessError
from aviso_workers.ops.doctor import Scope, facts, monitoring_port
from aviso_workers.server import NatsServer
from tests.ops.doctor.conftest import write
from tests.waits import PATIENCE_SECONDS

MANY_AT_ONCE = """
import importlib, sys, threading
from aviso_workers.ops.doctor import monitoring_port

TOLD = b'"server_id": "A", "server_name": "a", "version": "2.15.0", "now": "2026-01-01T00:00:00Z"'
GROUP = b'{"name": "", "leader": "a", "replicas": [{"name": "b", "current": true, "active": 1}]}'
ANSWERS = {
    "/varz": b'{%s, "jetstream": {"meta": %s}}' % (TOLD, GROUP),
    "/jsz": b'{"config": {"sync_interval": 1}}',
    "/healthz?details=true": b'{"status": "ok"}',
    "/routez": b'{"routes": []}',
    "/connz?state=closed&sort=stop": b'{"connections": []}',
}
sys.setswitchinterval(1e-6)
for _ in range(30):
    importlib.reload(monitoring_port)  # with types that nobody has decoded yet, as when a command begins
    monitoring_port._ask = lambda url, path: ANSWERS[path]
    together = threading.Barrier(8)
    found = []
    looking = [
        threading.Thread(target=lambda: (together.wait(), found.append(monitoring_port.inspect("http://a"))))
        for _ in range(8)
    ]
    for one in looking:
        one.start()
    for one in looking:
        one.join()
    assert [one.name for one in found] == ["a"] * 8, found
"""


@pytest.mark.slow
def test_servers_that_are_looked_at_side_by_side_do_not_crash_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", MANY_AT_ONCE], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_server_without_jetstream_is_known_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are answers of nats-server 2.15.0, as far as they are read."""
    answers = {
        "/varz": b'{"server_id": "A", "server_name": "a", "version": "2.15.0", "now": "2026-01-01T00:00:00Z", '
        b'"jetstream": {}}',
        "/jsz": b'{"disabled": true, "config": {"max_memory": 0, "max_storage": 0}, "streams": 0}',
        "/healthz?details=true": b'{"status": "ok"}',
        "/routez": b'{"routes": []}',
        "/connz?state=closed&sort=stop": b'{"connections": []}',
    }
    monkeypatch.setattr(monitoring_port, "_ask", lambda url, path: answers[path])

    found = monitoring_port.inspect("http://127.0.0.1:8222")

    assert (found.without_jetstream, found.disk, found.unserved) == (True, None, "")


def test_a_server_that_tells_its_configuration_in_one_answer_only_is_known_by_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one does that was asked for /varz before its JetStream had started."""
    answers = {
        "/varz": b'{"server_id": "A", "server_name": "a", "version": "2.15.0", "now": "2026-01-01T00:00:00Z"}',
        "/jsz": b'{"config": {"store_dir": "/elsewhere", "sync_interval": 5, "unique_tag": "az:"}}',
        "/healthz?details=true": b'{"status": "ok"}',
        "/routez": b'{"routes": []}',
        "/connz?state=closed&sort=stop": b'{"connections": []}',
    }
    monkeypatch.setattr(monitoring_port, "_ask", lambda url, path: answers[path])

    found = monitoring_port.inspect("http://127.0.0.1:8222").varz.jetstream.config

    assert (found.store_dir, found.sync_interval, found.unique_tag) == ("/elsewhere", 5, "az:")


BEGUN = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"
VARZ = b'{"server_id": "A", "server_name": "a", "version": "2.15.0", "now": "2026-01-01T00:00:00"}'


@pytest.mark.parametrize("head", [BEGUN, b"HTTP/1.1 200 OK\r\nX-Slow: "], ids=["body", "head"])
def test_an_answer_that_comes_byte_by_byte_is_not_awaited(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring_port, "WHOLE_SECONDS", 0.5)
    ended = threading.Event()

    def trickle(connection: socket.socket) -> None:
        connection.sendall(head)
        while not ended.wait(0.05):
            connection.sendall(b" ")

    began = time.monotonic()
    with answered_by(trickle) as url:
        try:
            with pytest.raises(ServerProcessError, match=r"no answer of a nats-server .* not complete after 0\.5 s"):
                monitoring_port.inspect(url)
            assert time.monotonic() - began < PATIENCE_SECONDS
        finally:
            ended.set()


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (BEGUN + b" " * 5000, "larger than 0 MiB"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n", "redirects to 'http://127.0.0.1:1/'"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"x": ' + b"[" * 3000, "recursion"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + VARZ, "timezone"),
    ],
    ids=["large", "elsewhere", "deep", "without a zone"],
)
def test_what_no_nats_server_answers_is_told(answer: bytes, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring_port, "MAX_BYTES", 4000)
    with (
        answered_by(lambda connection: connection.sendall(answer)) as url,
        pytest.raises(ServerProcessError, match=f"no answer of a nats-server from .*{problem}"),
    ):
        monitoring_port.inspect(url)


@contextmanager
def answered_by(say: Callable[[socket.socket], None]) -> Iterator[str]:
    """The URL of a server that answers one request so."""

    def answer() -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.recv(65536)
            say(connection)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join()


@pytest.mark.anyio
async def test_advisories_of_strangers_end_no_examination(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = [b'{"x": ' + b"[" * 3000, b'{"stream": "\xff"}', b'{"response": "' + b"[" * 3000 + b'"}', b""]
    monkeypatch.setattr(facts, "MAX_ADVISORY_BYTES", 200_000)
    async with App("the-doctor", config=write(tmp_path / "config.yaml", nats_server.url)) as app:
        administration = app.session.admin.administration()

        async def publish() -> None:
            while True:
                for data in forged:
                    administration.send("$JS.EVENT.ADVISORY.X", data)
                await anyio.sleep(0.001)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publish)
            found = await facts.gather(app.session.admin, app.config, Scope(seconds=1.0))
            tasks.cancel_scope.cancel()
    assert 0 < len(found.advisories) < 200
    assert not any(each.error for each in found.advisories)
