from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec import Struct

from aviso_workers import App, Notify
from aviso_workers.backends import Administration, Message
from aviso_workers.ops import backups
from aviso_workers.ops.backups import Backup
from aviso_workers.server import NatsServer
from tests.conftest import write_mars_config
from tests.waits import PATIENCE_SECONDS

HOUR_NS = 3_600_000_000_000
STORED = 12_000
"""Notifications in the original: its archive is larger than what a server sends before the first ack (8 MiB)."""


class Site:
    """An app on a server, and what an operator sees there."""

    def __init__(self, app: App) -> None:
        self.app = app

    @property
    def server(self) -> Administration:
        return self.app.session.admin.administration()

    async def fill(self, count: int) -> None:
        """So many notifications of `mars`, whose bytes do not compress to nothing."""
        await self.app.notify_many(
            Notify("mars", {"class": "od", "step": n % 1000}, {"n": n, "path": os.urandom(400).hex()})
            for n in range(count)
        )

    async def add_consumers(self) -> None:
        """`index` has unacked deliveries above its ack floor and an acked one between them, `idle` was given none."""
        await self.add_consumer("index", "mars.od.*")
        await self.add_consumer("idle", "mars.od.1")
        inbox = self.server.new_inbox()
        async with self.server.listen(inbox) as deliveries:
            self.server.send("$JS.API.CONSUMER.MSG.NEXT.MARS.index", b'{"batch": 10}', reply=inbox)
            with anyio.fail_after(PATIENCE_SECONDS):
                taken = [await deliveries.receive() for _ in range(10)]
                for delivery in (*taken[:6], taken[8]):
                    await self.server.request(delivery.reply, b"+ACK")

    async def add_consumer(self, name: str, subject: str) -> None:
        config = {"durable_name": name, "ack_policy": "explicit", "ack_wait": HOUR_NS, "filter_subject": subject}
        await self.server.api(f"CONSUMER.CREATE.MARS.{name}.{subject}", {"stream_name": "MARS", "config": config})

    async def put(self, subject: str, data: bytes, *, ttl: str = "") -> int:
        """With headers; its sequence."""
        headers = {"Nats-TTL": ttl} if ttl else {"Kind": "test"}
        message = Message(subject=subject, data=data, headers=headers)
        stored = await self.app.session.backend.publish(
            message, message_id=os.urandom(8).hex(), stream="MARS", timeout_seconds=PATIENCE_SECONDS
        )
        return stored.sequence

    async def account(self, stream: str = "MARS") -> dict[str, Any]:
        """All that a stream and its consumers are, but for when they were made and last used."""
        info = await self.server.api(f"STREAM.INFO.{stream}")
        found = {"config": info["config"], "state": info["state"]}
        for consumer in (await self.server.api(f"CONSUMER.LIST.{stream}"))["consumers"]:
            for position in ("delivered", "ack_floor"):
                consumer[position].pop("last_active", None)
            found[consumer["name"]] = {key: value for key, value in consumer.items() if key not in ("created", "ts")}
        return found

    async def until_messages(self, count: int) -> None:
        """Wait until MARS has so many: a server says nothing when one expires."""
        found = -1
        with anyio.move_on_after(PATIENCE_SECONDS):
            while found != count:
                await anyio.sleep(0.05)
                found = (await self.account())["state"]["messages"]
        assert found == count

    async def streams(self) -> list[str]:
        return await self.app.session.admin.stream_names()

    async def delete(self, stream: str = "MARS") -> None:
        await self.app.session.admin.delete_stream(stream)


class Original(Struct, frozen=True):
    """A backup, and what the stream was when it was made. Its server is no more."""

    backup: Backup
    account: dict[str, Any]


@pytest.fixture
async def site(nats_server: NatsServer, write_config: Callable[..., Path]) -> AsyncGenerator[Site, None]:
    async with App("tests", config=write_config(nats_server.url)) as app:
        yield Site(app)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """Notifications and two consumers, of which one has pending acks; one notification is deleted."""
    directory = tmp_path_factory.mktemp("original")

    async def make(nats_url: str) -> Original:
        async with App("tests", config=write_mars_config(directory / "config.yaml", nats_url)) as app:
            site = Site(app)
            await site.fill(STORED)
            await site.add_consumers()
            await app.session.backend.delete_message("MARS", STORED // 2)
            account = await site.account()
            return Original(await backups.create(app.session.admin, "MARS", directory / "backups"), account)

    with NatsServer.start(store_dir=directory / "jetstream") as server:
        return anyio.run(make, server.url)
