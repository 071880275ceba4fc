"""The rates of the last hour, asked of a Prometheus."""

from __future__ import annotations

import base64
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest

from _incidents.prometheus import Prometheus
from aviso_workers.config import Config
from aviso_workers.console import history
from aviso_workers.console.history import MAX_BYTES, rates, sparkline, spoken
from aviso_workers.server import NatsServer
from aviso_workers.server.processes import free_ports
from tests import programs
from tests.conftest import Start, write_mars_config
from tests.console.conftest import served, shown, with_console
from tests.waits import PATIENCE_SECONDS

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
            page = await shown(client, "/agents", "1 h")
            html = (await client.get("/agents")).text
    assert "field-index/index" in page
    assert 'aria-label="handled per second in the last 1 h: now ' in html
    assert '<path d="M' in html


async def test_a_prometheus_that_does_not_answer_is_said(
    free_port: int, nats_server: NatsServer, config: Config
) -> None:
    url = f"http://127.0.0.1:{free_port}"
    assert "Prometheus has not answered: " in (await rates(url)).error
    async with served(with_console(config, prometheus=url)) as console, console.client(None) as client:
        await shown(client, "/agents", "Prometheus has not answered: ", "0 of 0 agents.")


def answer(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    lines = [b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def with_values(values: str) -> bytes:
    return answer(b'{"status":"success","data":{"result":[{"metric":{},"values":%s}]}}' % values.encode())


FOREIGN = {
    "no HTTP": b"SSH-2.0-x\r\n",
    "truncated": b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n{",
    "a bad chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a long header": b"HTTP/1.1 200 OK\r\nA: " + b"x" * 1_000_000,
    "refused": answer(b"", status=b"401 No"),
    "elsewhere": answer(b"", b"Location: http://127.0.0.1:1/", status=b"302 Found"),
    "HTML": answer(b"<html>"),
    "an error": answer(b'{"status":"error","error":"x"}'),
    "no number": with_values('[[1, "abc"]]'),
    "an absurd time": with_values('[[1e308, "1"], [-1e308, "1"]]'),
    "too large": answer(b" " * (MAX_BYTES + 1)),
    "nothing": b"",
}


@pytest.mark.parametrize("said", FOREIGN.values(), ids=FOREIGN)
async def test_what_no_prometheus_answers_is_no_figure(said: bytes) -> None:
    async with answering(said) as url:
        found = await rates(url)
    assert found.error.startswith("Prometheus has not answered: ")
    assert found.by_agent == {}


async def test_a_series_without_values_has_no_figures() -> None:
    async with answering(with_values("[]")) as url:
        found = await rates(url)
    assert (found.error, [each for each in found.by_agent[("", "")] if each == each]) == ("", [])


async def test_an_answer_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "ANSWER_SECONDS", 0.5)
    async with answering(b"HTTP/1.1 200 OK\r\n", b"A: b\r\n", every_seconds=0.1) as url:
        with anyio.fail_after(PATIENCE_SECONDS):
            found = await rates(url)
    assert found.error == "Prometheus has not answered: not within 0.5 s"


async def test_a_user_and_a_query_of_the_url_are_sent_and_no_proxy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    heard: list[bytes] = []
    async with answering(with_values("[]"), heard=heard) as url:
        found = await rates(url.replace("http://", "http://anna:p%40ss@") + "/base/?tenant=7")
    assert found.error == ""
    assert heard[0].startswith(b"GET /base/api/v1/query?query=")
    assert b"&tenant=7 HTTP/1.1" in heard[0]
    assert base64.b64encode(b"anna:p@ss") in heard[0]


@asynccontextmanager
async def answering(
    said: bytes, again: bytes = b"", *, every_seconds: float = 0.0, heard: list[bytes] | None = None
) -> AsyncIterator[str]:
    """A program that says this to everybody, and the rest again and again; its URL."""

    async def answer_one(stream: anyio.abc.SocketStream) -> None:
        with suppress(anyio.BrokenResourceError, anyio.EndOfStream):
            async with stream:
                request = await stream.receive()
                if heard is not None:
                    heard.append(request)
                await stream.send(said)
                while again:
                    await anyio.sleep(every_seconds)
                    await stream.send(again)

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer_one)
        yield f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("values", "data"),
    [
        ([], ""),
        ([math.nan], ""),
        ([0.0, 0.0], "M0,17.0h0L1,17.0"),
        ([0.0, math.nan, 5.0, 10.0], "M0,17.0h0M3,9.0h0L4,1.0"),
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
