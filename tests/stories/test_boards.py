"""The boards for Grafana, asked of a real Prometheus that asks a real fleet: each of their queries has an answer."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from _docs import boards
from _incidents.operator import Exporter
from _incidents.prometheus import Prometheus
from aviso_workers.config import display
from aviso_workers.server.processes import free_ports
from tests import programs
from tests.stories.processes import CONFIG, MAIN, ROOT, Server, Worker, until

pytestmark = pytest.mark.anyio

EVENTS = ("SparkListenerLogStart", "SparkListenerApplicationStart")
CHOSEN = {"$app": ".*", "$agent": ".*", "$__rate_interval": "1m"}
"""What Grafana puts in place of these names."""
UNTRUE = {"AvisoSparkSearchStopped", "AvisoWorkerNotReady", "AvisoWorkerRestarts"}
"""Alerts that a fleet at work must not raise."""


def queries() -> Iterator[str]:
    """All that the boards ask for."""
    for name in boards.files():
        for panel in json.loads(display.shipped(name))["panels"]:
            yield from (target["expr"] for target in panel["targets"])


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    exporter = Exporter()
    with exporter.serving():
        yield exporter


@pytest.fixture
def status_port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def prometheus(tmp_path: Path, status_port: int, free_port: int, exporter: Exporter) -> Iterator[Prometheus]:
    program = programs.find("prometheus", package="prometheus")
    asked = Prometheus(
        tmp_path, port=free_port, workers=[status_port], program=program, window="1s", doctor=exporter.port
    )
    with closing(asked):
        yield asked


@pytest.mark.slow
async def test_each_query_of_each_board_has_an_answer(
    run_worker: Callable[..., Worker],
    publish: Callable[..., Any],
    server: Server,
    exporter: Exporter,
    status_port: int,
    prometheus: Prometheus,
    tmp_path: Path,
) -> None:
    log = tmp_path / "logs" / "local-1"
    log.parent.mkdir()
    log.write_text("".join(json.dumps({"Event": event, "App Name": "a", "Timestamp": 1}) + "\n" for event in EVENTS))
    fleet = run_worker(
        app="shown",
        settings={
            "workers.dead_letters.max_bytes": "1Mi",
            "workers.agents.observer.poll_seconds": 0.5,
            "workers.agents.spark_events.event_log_dirs": json.dumps([str(log.parent)]),
        },
        options=("--processes", "1", "--status-port", str(status_port)),
    )
    await fleet.ready()
    await until(lambda: prometheus.knows(1), what=lambda: prometheus.log)  # so that it sees what is counted from now on
    await publish([1, 2])
    await publish([3], fails=True)
    await publish([0], n="no number")
    await someone_disturbs(server)
    exporter.text = await doctor(server)
    await publish([0], n="no number")  # so that an agent is failing from now on

    unanswered = set(queries())

    def all_answered() -> bool:
        unanswered.difference_update([query for query in unanswered if answers(prometheus, query)])
        return not unanswered

    await until(all_answered, what=lambda: "\n".join([*unanswered, fleet.log]))
    assert prometheus.firing() & UNTRUE == set()


def answers(prometheus: Prometheus, query: str) -> list[float]:
    for name, value in CHOSEN.items():
        query = query.replace(name, value)
    return [value for value in prometheus.query(query) if not math.isnan(value)]


async def someone_disturbs(server: Server) -> None:
    """Delete the consumer of an agent, and publish what only aviso-workers may."""
    import nats

    client = await nats.connect(server.url)
    await client.publish("aviso_workers.retries.shown.show", b"+OK")
    await client.jetstream().delete_consumer("MARS", "shown__show")
    await client.close()


async def doctor(server: Server) -> str:
    """What it prints for Prometheus."""
    command = [
        sys.executable,
        "-c",
        MAIN,
        "doctor",
        "--seconds",
        "1",
        "--format",
        "prometheus",
        "--config",
        str(CONFIG),
    ]
    variables = {"AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__NATS_URL": server.url}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env={"PYTHONPATH": str(ROOT), **variables}, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    return printed.decode()
