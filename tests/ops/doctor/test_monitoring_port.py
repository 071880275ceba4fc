"""What several servers say at the same time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from aviso_workers.ops.doctor import monitoring_port

MANY_AT_ONCE = """
import importlib, sys, threading
from aviso_workers.ops.doctor import answers, monitoring_port

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
    importlib.reload(answers)
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
