"""Three servers with monitoring ports and two users, one of whom can lose rights while the servers run."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from _chaos import clusters
from aviso_workers.server.processes import free_ports

SERVERS = 3
USERS = """
authorization {{
  users: [
    {{ user: operator, password: operator }}
    {{ user: worker, password: worker, permissions: {{ publish: {{ allow: ">", deny: [{denied}] }} }} }}
  ]
}}
"""


class Cluster:
    """The servers, which can be killed and started again, and the rights of the user `worker`."""

    def __init__(self, directory: Path) -> None:
        self._users = directory / "users.conf"
        self._write_users(())
        ports = free_ports(SERVERS)
        self.monitors = [f"http://127.0.0.1:{port}" for port in ports]
        # A server reads what it includes from beside its own file, which is in a temporary directory of its own.
        included = Path("..") / os.path.relpath(self._users, tempfile.gettempdir())
        extra = [f"http: 127.0.0.1:{port}\ninclude '{included}'\n" for port in ports]
        self.nodes = clusters.start_nodes(directory, SERVERS, extra=extra)

    @property
    def urls(self) -> list[str]:
        return [node.url for node in self.nodes]

    def kill(self, *numbers: int) -> None:
        for number in numbers:
            self.nodes[number].stop(killed=True)

    def start(self, *numbers: int) -> None:
        for number in numbers:
            self.nodes[number].start()

    def deny(self, *subjects: str) -> None:
        """Take from the user `worker` the right to publish to these subjects, and no other."""
        self._write_users(subjects)
        for node in self.nodes:
            node.server.process.send_signal(signal.SIGHUP)

    def _write_users(self, denied: Sequence[str]) -> None:
        self._users.write_text(USERS.format(denied=", ".join(f'"{subject}"' for subject in denied)))


@contextmanager
def running(directory: Path) -> Iterator[Cluster]:
    """Three servers, which leaving the block ends."""
    cluster = Cluster(directory)
    try:
        yield cluster
    finally:
        clusters.stop_nodes(cluster.nodes)
