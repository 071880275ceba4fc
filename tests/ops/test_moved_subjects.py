"""The subjects of an agent's stream are given to another stream, while its worker runs, on a real server."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from aviso_workers import App, Notification
from aviso_workers.aviso.codec import store_time
from aviso_workers.ops import agent_report, snapshots
from aviso_workers.ops.health import Judgement
from aviso_workers.server import NatsServer
from tests.contract.settings import app_config, mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


@pytest.fixture
def app(nats_server: NatsServer) -> App:
    app = App("field", config=app_config("jetstream", nats_server.url))

    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None: ...

    return app


async def until(app: App, state: str) -> Judgement:
    admin, found = app.session.admin, Judgement(state="")
    with anyio.fail_after(PATIENCE_SECONDS):
        while found.state != state:
            before, now = await snapshots.take(admin), await snapshots.take(admin)
            (agent,) = await agent_report.of_server(admin, app.config, now, before)
            found = agent.judgement
    return found


async def test_needs_somebody_although_the_stream_is_there(app: App) -> None:
    async with app.running():
        await app.notify("mars", mars(step=1), {})
        await until(app, "idle")
        admin = app.session.admin
        found = await admin.stream_info("MARS")
        await admin.update_stream({**found.config, "subjects": ["former.>"]})
        await admin.administration().api("STREAM.CREATE.OTHER", {"name": "OTHER", "subjects": ["mars.>"]})
        gone = await until(app, "stream gone")
    assert gone.needs
    assert "its stream MARS lacks its subjects; its subjects are those of OTHER now" in gone.why


async def test_what_has_come_since_the_last_worker_stopped_waits_since_it_has_come(app: App) -> None:
    async with app.running():
        await app.notify("mars", mars(step=1), {})
        await until(app, "idle")
    async with App("other", config=app.config) as other:
        await other.notify("mars", mars(step=2), {})
        waits = await until(other, "no worker")
        stored = await other.session.admin.message("MARS", 2)
    assert stored is not None
    assert (waits.since, waits.needs) == (store_time(stored), False)
