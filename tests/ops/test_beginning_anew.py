"""What docs/operations/begin-anew.md says: agents go on at their consumers, also where all else is gone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from aviso_workers import App, Notification
from aviso_workers.server import NatsServer
from tests.security.test_roles import working
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


async def test_an_agent_goes_on_where_it_was(nats_server: NatsServer, write_config: Callable[..., Path]) -> None:
    handled: list[int] = []

    def fields() -> App:
        app = App("fields", config=write_config(nats_server.url))

        @app.agent("mars", start="all")
        async def index(notification: Notification[dict[str, int]]) -> None:
            handled.append(int(notification.identifier["step"]))

        return app

    async def work(*steps: int) -> None:
        async with (app := fields()), working(app):
            for step in steps:
                await app.notify("mars", {"class": "od", "step": step}, {})
            with anyio.fail_after(PATIENCE_SECONDS):
                while not {*steps} <= {*handled}:  # noqa: ASYNC110
                    await anyio.sleep(0.05)

    await work(1, 2)
    async with App("operator", config=write_config(nats_server.url)) as operator:
        await operator.notify("mars", {"class": "od", "step": 3}, {})
        admin = operator.session.admin
        for stream in await admin.stream_names():
            if stream != "MARS":
                await admin.delete_stream(stream)
        assert await admin.consumer_names("MARS") == ["fields__index"]
    await work(4)
    assert handled == [1, 2, 3, 4]
