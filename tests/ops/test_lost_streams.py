"""Three servers of which one was killed that alone had two streams: how often reports wait for what nobody answers."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest
from msgspec import Struct

from aviso_workers import App, Notification
from aviso_workers.backends import Admin, open_backend
from aviso_workers.config import Config
from aviso_workers.errors import UnavailableError
from aviso_workers.ops import agent_report, snapshots
from aviso_workers.ops.doctor import facts
from aviso_workers.server.processes import Node
from tests.ops.doctor.conftest import write
from tests.ops.doctor.test_cluster import lead
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio
LOST = ("DISS", "MARS")


class Asked(Struct, frozen=True):
    """An operator's connection to the servers that are left."""

    admin: Admin
    config: Config

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[list[str]]:
        """Collect what JetStream is asked for while the block runs, in order. It is complete behind the block."""
        asked: list[str] = []
        administration = self.admin.administration()
        async with administration.listen("$JS.API.>") as requests:
            yield asked
            end = "$JS.API.the.end"
            administration.send(end, b"")
            with anyio.fail_after(PATIENCE_SECONDS):
                while (subject := (await requests.receive()).subject) != end:
                    asked.append(subject.removeprefix("$JS.API."))


@pytest.fixture(scope="module")
def config(nodes: tuple[Node, ...], tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("config") / "aviso.yaml"

    def write_config(*urls: str) -> Config:
        return write(path, ",".join(urls), event_types=("mars", "diss", "kept"), replicas=3)

    app = App("field", config=write_config(*(node.url for node in nodes)))
    for event_type in ("mars", "diss", "kept"):

        @app.agent(event_type, name=f"index_{event_type}")
        async def index(notification: Notification[Any]) -> None: ...

    async def lose() -> None:
        async with app.running(), open_backend(app.config) as admin:
            for stream in LOST:
                await lead(admin.administration(), stream, leader=nodes[1].name)
                info = await admin.stream_info(stream)
                await admin.update_stream({**info.config, "num_replicas": 1})
                with anyio.fail_after(PATIENCE_SECONDS):
                    while (await admin.stream_info(stream)).cluster.followers:  # noqa: ASYNC110
                        await anyio.sleep(0.05)
                assert (await admin.stream_info(stream)).cluster.leader == nodes[1].name

    anyio.run(lose)
    os.kill(nodes[1].pid, signal.SIGKILL)
    return write_config(nodes[0].url, nodes[2].url)


@pytest.fixture
async def asked(config: Config) -> AsyncIterator[Asked]:
    async with open_backend(config) as admin:
        with anyio.fail_after(PATIENCE_SECONDS):
            await until_led(admin)
        yield Asked(admin, config)


async def until_led(admin: Admin) -> None:
    """Wait until one of the servers that are left leads each other stream, and each consumer of one."""
    while True:
        with suppress(UnavailableError):
            for stream in {*await admin.stream_names()} - {*LOST}:
                await admin.stream_info(stream, timeout_seconds=1.0)
                for consumer in await admin.consumer_names(stream):
                    await admin.consumer_info(stream, consumer, timeout_seconds=1.0)
            return


@pytest.mark.slow
async def test_of_agents_of_lost_streams_it_is_not_known_how_they_are(asked: Asked) -> None:
    before, now = await snapshots.take(asked.admin), await snapshots.take(asked.admin)
    found = await agent_report.of_server(asked.admin, asked.config, now, before)
    states = {each.facts.agent: each.judgement for each in found}
    assert {agent: each.state for agent, each in states.items() if each.state == "unknown"} == {
        "index_diss": "unknown",
        "index_mars": "unknown",
    }
    assert "no server answers for MARS" in states["index_mars"].why


async def test_a_snapshot_and_the_doctor_wait_for_one_listing(asked: Asked) -> None:
    async with asked.listening() as requests:
        snapshot = await snapshots.take(asked.admin)
    assert snapshot.unavailable == [*LOST]
    assert requests.count("STREAM.LIST") == 1, requests
    async with asked.listening() as requests:
        found = await facts.gather(asked.admin, asked.config, facts.Scope(seconds=0.1))
    assert found.before.unavailable == found.after.unavailable == frozenset(LOST)
    assert {"KEPT", "aviso_workers_retries__field"} <= found.after.streams.keys()
    assert "streams" not in found.unknown
    assert requests.count("STREAM.LIST") == 1, requests
