"""The rates of the last hour, asked of a Prometheus."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from _incidents.prometheus import Prometheus
from aviso_workers.config import Config
from aviso_workers.console.history import rates, sparkline, spoken
from aviso_workers.server import NatsServer
from aviso_workers.server.processes import free_ports
from tests import programs
from tests.conftest import Start, write_mars_config
from tests.console.conftest import served, shown, with_console

pytestmark = pytest.mark.anyio

AGENTS = """
from aviso_workers import App, Notification

app = App("field-index")

@app.agent("mars")
async def index(notification: Notification) -> None: ...
"""


@pytest.mark.slow
async def test_the_rate_of_an_agent_is_drawn_from_a_real_prometheus(
    start: Start, nats_server: NatsServer, tmp_path: Path, config: Config
) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)
    file = write_mars_config(tmp_path / "aviso.yaml", nats_server.url)
    status, port = free_ports(2)
    start("worker", "agents:app", "--config", file, "--status-port", str(status)).until("agent.started")
    program = programs.find("prometheus", package="prometheus")
    publishing = {"class": "od", "step": "1"}
    (tmp_path / "prometheus").mkdir()
    with closing(Prometheus(tmp_path / "prometheus", port=port, workers=[status], program=program, window="3s")):
        async with (
            served(with_console(config, prometheus=f"http://127.0.0.1:{port}")) as console,
            console.client(None) as client,
        ):
            for step in range(5):
                fields = [f"{name}={value}" for name, value in {**publishing, "step": step}.items()]
                assert start("notify", "mars", *fields, "--config", file).end() == 0
            page = await shown(client, "/agents", "last hour")
            html = (await client.get("/agents")).text
    assert "field-index/index" in page
    assert 'aria-label="acked per second in the last hour: now ' in html
    assert '<path d="M' in html


async def test_a_prometheus_that_does_not_answer_is_said(
    free_port: int, nats_server: NatsServer, config: Config
) -> None:
    url = f"http://127.0.0.1:{free_port}"
    assert "Prometheus has not answered: " in (await rates(url)).error
    async with served(with_console(config, prometheus=url)) as console, console.client(None) as client:
        await shown(client, "/agents", "Prometheus has not answered: ", "0 of 0 agents.")


@pytest.mark.parametrize(
    ("values", "data"),
    [
        ([], ""),
        ([math.nan], ""),
        ([0.0, 0.0], "M0,21.0h0L2,21.0"),
        ([0.0, math.nan, 5.0, 10.0], "M0,21.0h0M4,11.0h0L6,1.0"),
    ],
)
def test_a_sparkline_is_as_high_as_its_values_and_has_gaps(values: list[float], data: str) -> None:
    assert sparkline(values) == data


@pytest.mark.parametrize(
    ("values", "said"),
    [([math.nan], "not known"), ([1.0, math.nan, 1500.0, 3.25], "now 3.2, at most 1,500.0, at least 1.0")],
)
def test_a_sparkline_is_said_in_words(values: list[float], said: Any) -> None:
    assert spoken(values) == said
