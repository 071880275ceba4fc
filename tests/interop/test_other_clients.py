"""Clients in Go and in Node: what they publish is handled, and they read what we publish, byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from aviso_workers import App, Notification
from aviso_workers.server import NatsServer
from tests.conftest import WriteConfig
from tests.interop import programs
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

CLIENTS = Path(__file__).with_name("clients")
COUNT = 20


def of_go(directory: Path) -> tuple[list[str], dict[str, str]]:
    """The command of the client in Go, which is built here, and its environment."""
    module = programs.go_client()
    for file in ("go.mod", "go.sum"):
        (directory / file).write_bytes((module / file).read_bytes())
    (directory / "client.go").write_bytes((CLIENTS / "client.go").read_bytes())
    subprocess.run(["go", "build", "-o", "client", "."], cwd=directory, check=True, timeout=2 * PATIENCE_SECONDS)
    return [str(directory / "client")], {}


def of_node(directory: Path) -> tuple[list[str], dict[str, str]]:
    return ["node", str(CLIENTS / "client.js")], {"NODE_PATH": str(programs.node_client() / "node_modules")}


@pytest.fixture(params=[of_go, of_node], ids=["go", "node"])
def client(request: pytest.FixtureRequest, tmp_path: Path, nats_server: NatsServer) -> Callable[..., str]:
    """`client("publish", 3)`: what the client says."""
    command, environment = request.param(tmp_path)

    def client(what: str, count: int) -> str:
        done = subprocess.run(
            [*command, nats_server.url, what, str(count)],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return client


async def test_what_a_client_publishes_is_handled(
    client: Callable[..., str], write_config: WriteConfig, nats_server: NatsServer
) -> None:
    app, stop, handled = App("field", config=write_config(nats_server.url)), anyio.Event(), []
    all_handled = anyio.Event()

    @app.agent("mars")
    async def index(notification: Notification[dict[str, Any]]) -> None:
        handled.append((notification.identifier["step"], notification.payload["n"], notification.payload["from"]))
        if len(handled) == COUNT:
            all_handled.set()

    async with app, anyio.create_task_group() as tasks:
        begun = anyio.Event()
        tasks.start_soon(lambda: app.session.work(app, stop, agents=app.agents, begun=begun))
        with anyio.fail_after(2 * PATIENCE_SECONDS):
            await begun.wait()
            for _ in range(2):  # the second time with the same message ids
                await anyio.to_thread.run_sync(client, "publish", COUNT)
            await all_handled.wait()
        stop.set()
    assert sorted((int(step), n) for step, n, _ in handled) == [(step, step) for step in range(COUNT)]
    assert len({language for _, _, language in handled}) == 1


async def test_a_client_reads_what_we_publish(
    client: Callable[..., str], write_config: WriteConfig, nats_server: NatsServer
) -> None:
    async with App("field", config=write_config(nats_server.url)) as app:
        for step in range(COUNT):
            await app.notify("mars", {"class": "od", "step": step}, {"größe": step / 4}, message_id=f"id-{step}")
        read = await anyio.to_thread.run_sync(client, "read", COUNT)
    for step, line in enumerate(map(json.loads, read.splitlines())):
        assert line["subject"] == f"mars.od.{step}"
        assert line["data"] == json.dumps({"größe": step / 4}, separators=(",", ":"), ensure_ascii=False)
        assert line["headers"]["Nats-Msg-Id"] == [f"id-{step}"]
    assert len(read.splitlines()) == COUNT
