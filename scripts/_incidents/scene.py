"""The scene of one situation: its app on the cluster, its workers, what was published and what was handled."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio

from _chaos.deployment import COMMAND, Worker, environment
from _demo.children import Child, ShortfallError, free_port, running, wait_until
from _incidents import variables
from _incidents.cluster import SERVERS, Cluster
from _incidents.operator import Exporter, Operator
from _incidents.prometheus import Prometheus
from aviso_workers import App, Notify, config
from aviso_workers.errors import BackendError
from aviso_workers.server.processes import free_ports

SCRIPTS = Path(__file__).parents[1]
TARGET = "_incidents.agents:app"
PROMETHEUS = Path(sys.executable).with_name("prometheus")
WAIT_SECONDS = 240.0
BETWEEN_SECONDS = 0.1
HOLD = "2s"
"""In place of the minutes for which a rule must hold; more than one answer that comes late on a busy machine."""
ACCEPTED = {
    "JS018": "The servers are killed and started in turn.",
    "JS043": "The servers are on one machine, and are not flushed.",
    "JS053": "The disk is that of a development machine.",
}
USER = "AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__USER"
PASSWORD = "AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__PASSWORD"


class Scene:
    """What a situation does and what is done about it goes by this. Leaving the `with` block ends its processes."""

    def __init__(
        self,
        name: str,
        directory: Path,
        cluster: Cluster,
        *,
        attempts: int | None,
        window: str,
        alerts: bool,
        patience: float = 0,
        target: str = TARGET,
    ) -> None:
        directory.mkdir()
        self.name = name
        self.stream = name.upper()
        self.cluster = cluster
        self.exporter = Exporter()
        self.published: set[int] = set()
        self.worker: Worker | None = None
        """The worker whose status port the operator looks at; None where there shall be none."""
        self.document: dict[str, Any] = _document(name, cluster.urls)
        self._directory = directory
        self._window = window
        self._alerts = alerts
        self.target = target
        self._prometheus: Prometheus | None = None
        self._config = directory / "aviso.yaml"
        self._environment = environment() | {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(SCRIPTS), os.environ.get("PYTHONPATH", "")))),
            variables.NAME: name,
            variables.DIRECTORY: str(directory),
            variables.ATTEMPTS: "" if attempts is None else str(attempts),
            variables.PATIENCE: str(patience),
        }
        self._ports = dict(zip(("worker", "second", "third", "observer", "console"), free_ports(5), strict=True))
        self._started = Counter[str]()
        self._observer: Worker | None = None
        self._stack = ExitStack()
        self._children: list[Child] = []
        self.write_config()
        self.operator = Operator(
            config=self._config, target=target, monitors=cluster.monitors, environment=self._environment
        )

    def __enter__(self) -> Scene:
        self._stack.enter_context(self.exporter.serving())
        self._observed = [self._ports["observer"]]
        if self._alerts:
            self._prometheus = Prometheus(
                self._directory,
                port=free_port(),
                workers=self._observed,
                program=str(PROMETHEUS),
                window=self._window,
                hold=HOLD,
                doctor=self.exporter.port,
            )
            self._stack.callback(self._prometheus.close)
            self._observer = self._process("observer", "--agent", "observer")
            self.wait("Prometheus is not ready", self._prometheus.is_ready)
        console: list[str | Path] = [
            COMMAND,
            "console",
            "--port",
            str(self._ports["console"]),
            "--config",
            self._config,
        ]
        self._stack.enter_context(running("console", console, log_dir=self._directory, environment=self._environment))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def write_config(self) -> None:
        """Write what `document` says now, for the processes and commands that are started next."""
        self._config.write_text(json.dumps(self.document))  # JSON is YAML

    def start(self, name: str = "worker", *, until_ready: bool = True) -> Worker:
        """Start a worker, which Prometheus asks from now on."""
        worker = self._process(name, self.target)
        if name == "worker":
            self.worker = worker
        self.follow(name)
        if until_ready:
            self.wait(f"{name} is not ready", worker.is_ready, alive=worker.child)
        return worker

    def follow(self, name: str) -> None:
        """Let Prometheus ask this worker too."""
        if self._ports[name] not in self._observed:
            self._observed.append(self._ports[name])
            self._tell_prometheus()

    def unfollow(self, name: str) -> None:
        """Take a worker that nobody needs any more out of the configuration of Prometheus."""
        self._observed.remove(self._ports[name])
        self._tell_prometheus()

    def differing(self) -> list[str]:
        """Return what surfaces say of agents of which they do not all say the same."""
        url = f"http://127.0.0.1:{self._ports['console']}"
        return self.operator.differing(self.name, self.stream, url, self._observer)

    def firing(self) -> set[str]:
        """Return the alerts that fire."""
        return self._prometheus.firing() if self._prometheus else set()

    def _tell_prometheus(self) -> None:
        if self._prometheus:
            self._prometheus.follow(self._observed)

    def kill_worker(self) -> None:
        """End the worker as a crash would."""
        assert self.worker is not None
        self.worker.child.kill()

    def stop_worker(self) -> None:
        assert self.worker is not None
        self.worker.child.stop()

    def restart(self) -> None:
        """Restart the worker, as a supervisor does."""
        self.stop_worker()
        self.start()

    def stop_workers(self) -> None:
        """Stop all workers for good."""
        for child in self._children:
            child.stop()

    def supervise(self) -> threading.Event:
        """Start the worker again whenever it has ended, until the event that is returned is set."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.1):
                if self.worker is not None and self.worker.child.process.poll() is not None:
                    self.start(until_ready=False)

        thread = threading.Thread(target=watch)
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(over.set)
        return over

    def break_down(self, what: str, how: str) -> None:
        """Let the handler, the timer or the task do wrong in this way from now on."""
        (self._directory / f"{self.name}.{what}").write_text(how)

    def repair(self, what: str) -> None:
        (self._directory / f"{self.name}.{what}").unlink()

    def publish(self, count: int, payload: str = "") -> None:
        """Publish so many notifications."""
        numbers = self._next(count)
        found = [Notify(self.name, {"number": number}, payload) for number in numbers]
        anyio.run(self._publish, found)
        self.published.update(numbers)

    def publish_refused(self) -> None:
        """Publish one notification that the server shall refuse. Raises `ShortfallError` where it is stored."""
        try:
            anyio.run(self._publish, [Notify(self.name, {"number": 0})])
        except BackendError:
            return
        raise ShortfallError(f"{self.name}: a notification is stored that should have been refused")

    def publish_steadily(self, *, per_second: int) -> threading.Event:
        """Publish evenly until the event that is returned is set."""
        over = threading.Event()

        async def publish() -> None:
            async with self._client() as client:
                while not over.is_set():
                    numbers = self._next(max(1, round(per_second * BETWEEN_SECONDS)))
                    await client.notify_many([Notify(self.name, {"number": number}) for number in numbers])
                    self.published.update(numbers)
                    await anyio.sleep(BETWEEN_SECONDS)

        thread = threading.Thread(target=anyio.run, args=(publish,))
        thread.start()

        def end() -> None:
            over.set()
            thread.join()

        self._stack.callback(end)
        return over

    def handled(self) -> Counter[int]:
        """Return how often each notification was handled, by the ledger."""
        ledger = self._directory / f"{self.name}.ledger"
        return Counter(map(int, ledger.read_text().split())) if ledger.exists() else Counter()

    def wait_until_handled(self) -> None:
        self.wait("not all is handled", lambda: self.published <= self.handled().keys())

    def wait(self, what: str, condition: Any, *, alive: Child | None = None) -> None:
        wait_until(
            condition,
            lambda: f"{self.name}: {what}\n{self.last_words()}",
            within_seconds=WAIT_SECONDS,
            alive=[alive] if alive else [],
        )

    def last_words(self) -> str:
        return self.worker.child.last_words() if self.worker else ""

    def api(self, subject: str, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Ask JetStream's API, as `nats` would."""

        async def ask() -> dict[str, Any]:
            async with self._client() as client:
                return dict(await client.session.admin.administration().api(subject, request))

        return anyio.run(ask)

    def _next(self, count: int) -> range:
        return range(len(self.published) + 1, len(self.published) + count + 1)

    async def _publish(self, found: list[Notify]) -> None:
        async with self._client() as client:
            await client.notify_many(found)

    def _client(self) -> App:
        return App("client", config=config.load(self._config, environ={}))

    def _process(self, name: str, *arguments: str) -> Worker:
        self._started[name] += 1
        port = self._ports[name]
        command: list[str | Path] = [
            COMMAND,
            "worker",
            *arguments,
            "--config",
            self._config,
            "--status-port",
            str(port),
        ]
        environment = self._environment | {USER: "worker", PASSWORD: "worker"}
        process = running(f"{name}-{self._started[name]}", command, log_dir=self._directory, environment=environment)
        child = self._stack.enter_context(process)
        self._children.append(child)
        return Worker(child, f"http://127.0.0.1:{port}")


def _document(name: str, urls: list[str]) -> dict[str, Any]:
    number = {"type": "IntHandler", "range": [0, 1_000_000_000], "required": True}
    return {
        "notification_backend": {
            "kind": "jetstream",
            "jetstream": {
                "nats_url": urls,
                "user": "operator",
                "password": "operator",
                "replicas": SERVERS,
                "max_reconnect_attempts": 0,
                "reconnect_delay_ms": 100,
            },
        },
        "notification_schema": {
            name: {
                "payload": {"required": False},
                "topic": {"base": name, "key_order": ["number"]},
                "identifier": {"number": number},
                "storage_policy": {"allow_duplicates": True},
            }
        },
        "workers": {
            "logging": {"format": "json"},
            "drain_timeout_seconds": 2,
            "agents": {"observer": {"poll_seconds": 1}},
        },
        "doctor": {
            "accepted": [
                {"code": code, "where": "*", "reason": reason, "until": "2100-01-01T00:00:00Z"}
                for code, reason in ACCEPTED.items()
            ]
        },
    }
