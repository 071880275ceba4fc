"""A worker that may not read whether its timers are paused runs them, and on time."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import anyio
import pytest

from aviso_workers import App, Tick
from aviso_workers.server import NatsServer
from tests.conftest import write_mars_config
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


async def test_a_worker_without_the_right_runs_its_timers(tmp_path: Path) -> None:
    denied = {"publish": {"deny": ["$JS.API.STREAM.*.KV_field__orders"]}}
    user = {"user": "worker", "password": "worker", "permissions": denied}
    ticks: list[Tick] = []
    stop = anyio.Event()
    with NatsServer.start(store_dir=tmp_path, config=f"authorization: {json.dumps({'users': [user]})}") as server:
        app = App(
            "field", config=write_mars_config(tmp_path / "config.yaml", server.url, user="worker", password="worker")
        )

        @app.every("1s", singleton=False)
        async def look(tick: Tick) -> None:
            ticks.append(tick)
            if len(ticks) == 6:
                stop.set()

        with anyio.fail_after(PATIENCE_SECONDS):
            async with app:
                await app._work(stop)
    took = ticks[-1].time - ticks[-4].time
    assert timedelta(seconds=3) <= took < timedelta(seconds=10), "a busy machine leaves out a tick or two"
