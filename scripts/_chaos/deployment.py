"""Worker processes and what they say of themselves, in a directory of their own and on free loopback ports."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from msgspec import Struct

from _chaos import versions
from _chaos.agents import APP, router
from _demo.children import Child, free_port, running
from aviso_workers import App, config

SCRIPTS = Path(__file__).parents[1]
CONFIG = Path(__file__).with_name("config.yaml")
COMMAND = Path(sys.executable).with_name("aviso-workers")
ANSWER_SECONDS = 5.0


class Worker(Struct, frozen=True):
    """A worker process and its status port."""

    child: Child
    url: str

    def ask(self, path: str) -> tuple[int, str]:
        """Return the status and the text that it answers; (0, why) where it does not."""
        try:
            with urlopen(f"{self.url}{path}", timeout=ANSWER_SECONDS) as answer:
                return answer.status, answer.read().decode().strip()
        except HTTPError as answer:
            with answer:
                return answer.code, answer.read().decode().strip()
        except OSError as error:
            return 0, str(error)

    def is_ready(self) -> bool:
        return self.ask("/readyz")[0] == 200

    def cpu_seconds(self) -> float:
        """Return the processor time that the process has used so far."""
        fields = Path(f"/proc/{self.child.process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Deployment:
    """What is put around a server that listens, or will listen, on `nats_url`, or several of them."""

    def __init__(self, directory: Path, nats_url: str, *, replicas: int = 1) -> None:
        self.record = directory / "record"
        self.log_dir = directory / "logs"
        self.log_dir.mkdir()
        self.record.touch()
        self._over = {
            "AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__NATS_URL": nats_url,
            "AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__REPLICAS": str(replicas),
            "AVISO_WORKERS_WORKERS__AGENTS__ENDURANCE__RECORD": str(self.record),
        }

    @contextmanager
    def worker(self, name: str, *, version: str = "") -> Iterator[Worker]:
        """A worker process, of a version where there are several; it may not be ready yet."""
        port = free_port()
        command: list[str | Path] = [
            COMMAND,
            "worker",
            "_chaos.agents:app",
            "--config",
            CONFIG,
            "--status-port",
            str(port),
        ]
        environment = self._environment | {"PYTHONPATH": self._python_path, versions.VARIABLE: version}
        with running(name, command, log_dir=self.log_dir, environment=environment) as child:
            yield Worker(child, f"http://127.0.0.1:{port}")

    def client(self) -> App:
        """Return an app without agents: to publish, and to look."""
        return App(APP, config=config.load(CONFIG, environ=self._environment))

    def handled(self) -> dict[str, Counter[int]]:
        """Return how often each agent has handled each notification so far, by the notification's number."""
        handled = {agent.name: Counter[int]() for agent in router.agents}
        for line in self.record.read_text().splitlines():
            agent, number, *_ = line.split()
            handled.setdefault(agent, Counter())[int(number)] += 1
        return handled

    @property
    def windows(self) -> Path:
        """The record of the windows that have closed."""
        return self.record.with_name(f"{self.record.name}{versions.RECORD_SUFFIX}")

    def strays(self) -> dict[str, list[str]]:
        """Return the lines of each worker's log that are not entries: nobody caught what they tell of."""
        lines = {file.stem: file.read_text(errors="replace").splitlines() for file in self.log_dir.iterdir()}
        found = {name: [line for line in of_one if not line.startswith("{")] for name, of_one in lines.items()}
        return {name: stray for name, stray in found.items() if stray}

    @property
    def _environment(self) -> dict[str, str]:
        return environment() | self._over

    @property
    def _python_path(self) -> str:
        return os.pathsep.join(filter(None, (str(SCRIPTS), os.environ.get("PYTHONPATH", ""))))


def environment() -> dict[str, str]:
    """Return ours without what the caller has set for another aviso-workers."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("AVISO", "NATS_"))}
