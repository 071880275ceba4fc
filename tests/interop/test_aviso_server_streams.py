"""Streams that an aviso-server and workers share: each takes what the other has made, and neither changes it back."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import nats
import pytest
from anyio import to_thread
from nats.aio.msg import Msg

from aviso_workers import App, Notification
from aviso_workers.server import NatsServer
from tests.interop import conversations
from tests.interop.aviso_server import AvisoServer
from tests.waits import flushed

pytestmark = pytest.mark.anyio

UPDATED = "$JS.EVENT.ADVISORY.STREAM.UPDATED.*"
REQUESTED = "$JS.EVENT.ADVISORY.API"
"""It tells who has asked for what, which the advisory of an update does not."""
SIDES = {"rust": "theirs", "python3": "ours"}
"""By the language that a client tells its server."""
LIMITS = ("max_messages", "max_bytes", "retention_time", "replicas")
LIVES = 3
SHORT_SECONDS = 12.0


class Updates:
    """The advisories of updates of streams, as they came."""

    def __init__(self) -> None:
        self.updated: list[str] = []
        """The subjects of the advisories that a stream was updated."""
        self.requests: list[dict[str, Any]] = []

    async def hear(self, message: Msg) -> None:
        if message.subject == REQUESTED:
            self.requests.append(json.loads(message.data))
        else:
            self.updated.append(message.subject)

    def by_side(self, stream: str) -> Counter[str]:
        """Count who has updated it. Fails where not each update is of a side."""
        asked = [one for one in self.requests if one["subject"] == f"$JS.API.STREAM.UPDATE.{stream}"]
        counted = Counter(SIDES[one["client"]["lang"]] for one in asked)
        assert counted.total() == self.updated.count(UPDATED.replace("*", stream)), self.updated
        return counted


@asynccontextmanager
async def updates(server: NatsServer) -> AsyncIterator[Updates]:
    """Hear of all updates while the block runs."""
    heard = Updates()
    client = await nats.connect(server.url)
    try:
        for subject in (UPDATED, REQUESTED):
            await client.subscribe(subject, cb=heard.hear)
        await flushed(client)
        yield heard
        await flushed(client)
    finally:
        await client.close()


@pytest.mark.parametrize("first", ["ours", "theirs"])
async def test_a_stream_of_which_all_is_stated_is_updated_by_neither(
    server: AvisoServer, aviso_config: Path, nats_server: NatsServer, first: str, pytestconfig: pytest.Config
) -> None:
    """With `--minutes 5` for five minutes, else for seconds; both sides are restarted twice in it."""
    seconds = pytestconfig.getoption("minutes") * 60 or SHORT_SECONDS
    async with updates(nats_server) as heard:
        for life in range(LIVES):
            await both_at_work(server, aviso_config, "mars", mars(), first=first, seconds=seconds / LIVES)
            if life + 1 < LIVES:
                await to_thread.run_sync(server.stop)
                await to_thread.run_sync(server.start)

    counted = heard.by_side("MARS")
    assert (counted["ours"] <= 1, counted["theirs"] <= 1) == (True, True), counted


@pytest.mark.parametrize("first", ["ours", "theirs"])
async def test_a_stream_without_limits_is_updated_on_each_access_by_0_7_1_alone(
    aviso_server_version: str,
    start_aviso_server: Callable[..., AvisoServer],
    aviso_config: Path,
    nats_server: NatsServer,
    first: str,
) -> None:
    leave_out_limits(aviso_config)
    server = start_aviso_server(aviso_server_version, config=aviso_config)
    identifier = {"number": 1, "kind": "air", "count": 1, "level": 1, "polygon": "(0,0,1,0,1,1,0,0)"}

    async with updates(nats_server) as heard:
        await both_at_work(server, aviso_config, "area", identifier, first=first, seconds=SHORT_SECONDS / LIVES)

    counted = heard.by_side("AREA")
    assert counted["ours"] == 0, counted
    assert (counted["theirs"] > 1) == (aviso_server_version == "0.7.1"), counted


def leave_out_limits(config: Path) -> None:
    stated = config.read_text().splitlines()
    config.write_text("\n".join(line for line in stated if line.partition(":")[0].strip() not in LIMITS))


async def both_at_work(
    server: AvisoServer, config: Path, event_type: str, identifier: dict[str, Any], *, first: str, seconds: float
) -> None:
    """Publish, watch, replay and handle on both sides for so long; this side of ours is new each time."""
    stop = anyio.Event()
    handled = 0
    async with App("beside", config=config) as app:

        @app.agent(event_type)
        async def count(notification: Notification[Any]) -> None:
            nonlocal handled
            handled += 1

        if first == "theirs":
            assert (await to_thread.run_sync(server.notify, event_type, identifier, {}))[0] == 200
        else:
            await app.notify(event_type, identifier, {})
        before = len([each async for each in app.replay(event_type)])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(app._work, stop)
            until = time.monotonic() + seconds
            with await to_thread.run_sync(conversations.watch, server, event_type, identifier) as live:
                while time.monotonic() < until:
                    assert (await to_thread.run_sync(server.notify, event_type, identifier, {}))[0] == 200
                    await app.notify(event_type, identifier, {})
                    await to_thread.run_sync(live.until_count, 1)
                    ours = [each.id async for each in app.replay(event_type)]
                    assert [
                        event["id"] for event in await to_thread.run_sync(replayed, server, event_type, identifier)
                    ] == ours
            stop.set()
    assert len(ours) > before
    assert handled


def replayed(server: AvisoServer, event_type: str, identifier: dict[str, Any]) -> list[dict[str, Any]]:
    return conversations.replay(server, event_type, identifier, from_id="1")


def mars() -> dict[str, Any]:
    fields = {"class": "od", "expver": "0001", "domain": "g", "date": "20261120", "time": "1200"}
    return {**fields, "stream": "oper", "step": "1"}
