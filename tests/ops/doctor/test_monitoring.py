"""What several servers say at the same time."""

from __future__ import annotations

import subprocess
import sys

MANY_AT_ONCE = """
import importlib, sys, threading
from aviso_workers.ops.doctor import answers, monitoring

GROUP = b'{"name": "", "leader": "a", "replicas": [{"name": "b", "current": true, "active": 1}]}'
ANSWERS = {
    "/varz": b'{"server_id": "A", "server_name": "a", "version": "2.15.0", "jetstream": {"meta": %s}}' % GROUP,
    "/healthz?details=true": b'{"status": "ok"}',
    "/routez": b'{"routes": []}',
    "/connz?state=closed&sort=stop": b'{"connections": []}',
}
sys.setswitchinterval(1e-6)
for _ in range(30):
    importlib.reload(answers)
    importlib.reload(monitoring)  # with types that nobody has decoded yet, as when a command begins
    monitoring._ask = lambda url, path: ANSWERS[path]
    together = threading.Barrier(8)
    found = []
    looking = [
        threading.Thread(target=lambda: (together.wait(), found.append(monitoring.look("http://a")))) for _ in range(8)
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
