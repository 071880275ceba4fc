"""The alerts that are shipped, told by a real Prometheus that asks real workers: they fire, and they are over."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from aviso_workers import App
from aviso_workers.engine import dead_letter_store
from aviso_workers.server.processes import free_ports
from tests import programs
from tests.contract.settings import app_config
from tests.stories.processes import ROOT, Server, Worker, until
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

LOOK = "500ms"
WINDOW = "3s"
"""In place of the minutes over which the rules look back."""
UNHEEDED = {"AvisoDoctorMissing"}
"""Nobody runs the doctor here."""


class Prometheus:
    """A Prometheus that asks two workers, with the shipped rules, whose waits are shortened."""

    def __init__(self, directory: Path, *, port: int, workers: list[int]) -> None:
        rules = (ROOT / "config/prometheus-rules.yml").read_text()
        rules = re.sub(r"\[\d+m\]", f"[{WINDOW}]", rules)
        rules = re.sub(r"offset \d+m", f"offset {WINDOW}", rules)
        (directory / "prometheus-rules.yml").write_text(re.sub(r"for: \S+", "for: 0s", rules))
        shipped = yaml.safe_load((ROOT / "config/prometheus.yml").read_text())
        shipped["global"] = {"scrape_interval": LOOK, "scrape_timeout": LOOK, "evaluation_interval": LOOK}
        shipped["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{each}" for each in workers]}]
        config = directory / "prometheus.yml"
        config.write_text(yaml.safe_dump(shipped))
        self._url = f"http://127.0.0.1:{port}"
        self._log = directory / "prometheus.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    programs.find("prometheus", package="prometheus"),
                    f"--config.file={config}",
                    f"--storage.tsdb.path={directory / 'prometheus'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def firing(self) -> set[str]:
        """Return the alerts that fire; nothing that is known while it starts."""
        return {alert["labels"]["alertname"] for alert in self._alerts() if alert["state"] == "firing"} - UNHEEDED

    async def fires(self, *alerts: str) -> None:
        await until(lambda: set(alerts) <= self.firing(), what=lambda: f"{self.firing()}\n{self._log.read_text()}")

    async def is_quiet(self) -> None:
        """Wait until no alert fires."""
        await until(lambda: self._knows_workers() and not self.firing(), what=self._alerts)

    def _knows_workers(self) -> bool:
        found = self._ask(f"/api/v1/query?query=min_over_time(aviso_worker_ready[{WINDOW}])")
        return len(found["result"]) >= 2

    def _alerts(self) -> list[dict[str, Any]]:
        return list(self._ask("/api/v1/alerts").get("alerts", ()))

    def _ask(self, path: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"{self._url}{path}", timeout=PATIENCE_SECONDS) as answer:
                return dict(json.loads(answer.read())["data"])
        except OSError:
            return {"result": []}


@pytest.fixture
def status_ports() -> list[int]:
    """Of the worker, and of the one that observes."""
    return free_ports(2)


@pytest.fixture
def prometheus(tmp_path: Path, status_ports: list[int], free_port: int) -> Iterator[Prometheus]:
    with ExitStack() as running:
        started = Prometheus(tmp_path, port=free_port, workers=status_ports)
        running.callback(started.close)
        yield started


async def test_alerts_fire_and_are_over(
    run_worker: Callable[..., Worker],
    publish: Callable[..., Any],
    server: Server,
    status_ports: list[int],
    prometheus: Prometheus,
) -> None:
    def work() -> Worker:
        return run_worker(options=("--status-port", str(status_ports[0])))

    worker = work()
    run_worker(
        app="observing",
        settings={"workers.agents.observer.poll_seconds": 1},
        options=("--status-port", str(status_ports[1])),
    )
    await worker.ready()
    await prometheus.is_quiet()

    await publish([0], n="not a number")  # becomes a dead letter
    await prometheus.fires("AvisoDeadLetters")
    await limit_dead_letters(server)
    await prometheus.fires("AvisoStreamNearlyFull")
    await drop_dead_letters(server)
    await prometheus.is_quiet()

    worker.kill()
    await publish(range(3))
    await prometheus.fires("AvisoWorkerDown", "AvisoAgentStuck")
    await work().ready()
    await prometheus.is_quiet()

    server.kill()
    await prometheus.fires("AvisoWorkerDisconnected", "AvisoWorkerNotReady")
    server.start()
    await prometheus.is_quiet()


async def limit_dead_letters(server: Server) -> None:
    """Let what is stored be 95 % of what may be."""
    async with App("operator", config=app_config("jetstream", server.url)) as app:
        found = await app.session.backend.stream_info(dead_letter_store.STREAM)
        await app.session.backend.update_stream({**found.config, "max_bytes": int(found.bytes / 0.95)})


async def drop_dead_letters(server: Server) -> None:
    async with App("operator", config=app_config("jetstream", server.url)) as app:
        await app.session.backend.purge_stream(dead_letter_store.STREAM)
