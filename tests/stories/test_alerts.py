"""The alerts that are shipped, told by a real Prometheus that asks real workers: they fire, and they are over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from _incidents.prometheus import Prometheus
from aviso_workers import App
from aviso_workers.server.processes import free_ports
from aviso_workers.state import own_streams
from tests import programs
from tests.contract.settings import app_config
from tests.stories.processes import Server, Worker, until

DEAD_LETTERS = own_streams.of_app(own_streams.DEAD_LETTERS, "stories")

pytestmark = pytest.mark.anyio

WINDOW = "3s"
"""In place of the minutes over which the rules look back."""
UNHEEDED = {"AvisoDoctorMissing"}
"""Nobody runs the doctor here."""


class Told:
    """What a Prometheus tells of two workers."""

    def __init__(self, prometheus: Prometheus) -> None:
        self._prometheus = prometheus

    def firing(self) -> set[str]:
        return self._prometheus.firing() - UNHEEDED

    async def fires(self, *alerts: str) -> None:
        await until(lambda: set(alerts) <= self.firing(), what=lambda: f"{self.firing()}\n{self._prometheus.log}")

    async def is_quiet(self) -> None:
        """Wait until no alert fires."""
        await until(lambda: self._prometheus.knows(2) and not self.firing(), what=self._prometheus.alerts)


@pytest.fixture
def status_ports() -> list[int]:
    """Of the worker, and of the one that observes."""
    return free_ports(2)


@pytest.fixture
def prometheus(tmp_path: Path, status_ports: list[int], free_port: int) -> Iterator[Told]:
    program = programs.find("prometheus", package="prometheus")
    with closing(Prometheus(tmp_path, port=free_port, workers=status_ports, program=program, window=WINDOW)) as started:
        yield Told(started)


@pytest.mark.slow
async def test_alerts_fire_and_are_over(
    run_worker: Callable[..., Worker],
    publish: Callable[..., Any],
    server: Server,
    status_ports: list[int],
    prometheus: Told,
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
    await prometheus.fires("AvisoWorkerDown", "AvisoAgentNeedsSomebody")
    await work().ready()
    await prometheus.is_quiet()

    server.kill()
    await prometheus.fires("AvisoWorkerDisconnected", "AvisoWorkerNotReady")
    server.start()
    await prometheus.is_quiet()


async def limit_dead_letters(server: Server) -> None:
    """Let what is stored be 95 % of what may be."""
    async with App("operator", config=app_config("jetstream", server.url)) as app:
        found = await app.session.backend.stream_info(DEAD_LETTERS)
        await app.session.backend.update_stream({**found.config, "max_bytes": int(found.bytes / 0.95)})


async def drop_dead_letters(server: Server) -> None:
    async with App("operator", config=app_config("jetstream", server.url)) as app:
        await app.session.backend.purge_stream(DEAD_LETTERS)
