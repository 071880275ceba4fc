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
    {{ user: worker, password: {password}, permissions: {{ publish: {{ allow: ">", deny: [{denied}] }} }} }}
  ]
}}
"""


class Cluster:
    """The servers, which can be killed and started again, and the rights of the user `worker`."""

    def __init__(self, directory: Path) -> None:
        self._users = directory / "users.conf"
        self._write_users()
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

    def freeze(self, number: int) -> None:
        """Stop a server without ending it, as a disk that does not answer does."""
        self.nodes[number].server.process.send_signal(signal.SIGSTOP)

    def thaw(self, number: int) -> None:
        self.nodes[number].server.process.send_signal(signal.SIGCONT)

    def deny(self, *subjects: str) -> None:
        """Take from the user `worker` the right to publish to these subjects, and no other."""
        self._write_users(denied=subjects)
        self._reload()

    def change_password(self, password: str = "worker") -> None:
        """Change the password of the user `worker`, whom the servers then disconnect."""
        self._write_users(password=password)
        self._reload()

    def _reload(self) -> None:
        for node in self.nodes:
            node.server.process.send_signal(signal.SIGHUP)

    def _write_users(self, *, denied: Sequence[str] = (), password: str = "worker") -> None:
        subjects = ", ".join(f'"{subject}"' for subject in denied)
        self._users.write_text(USERS.format(denied=subjects, password=password))


@contextmanager
def running(directory: Path) -> Iterator[Cluster]:
    """Three servers, which leaving the block ends."""
    cluster = Cluster(directory)
    try:
        yield cluster
    finally:
        clusters.stop_nodes(cluster.nodes)
