"""A user who may publish to one stream only has the server store acknowledgements in the state of workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import nats
import pytest

from aviso_workers import App, Notification, RetryPolicy
from aviso_workers.events import Settled, Ticked, Unreadable
from aviso_workers.server import NatsServer
from aviso_workers.state import dead_letter_records, own_streams
from tests.conftest import write_mars_config
from tests.waits import PATIENCE_SECONDS, flushed

RETRIES = own_streams.of_app(own_streams.RETRIES, "field")

pytestmark = pytest.mark.anyio

RIGHTS = '{publish: {allow: ["mars.>"]}, subscribe: {allow: ["_INBOX.>"]}}'
USERS = f"{{user: worker, password: right}}, {{user: publisher, password: right, permissions: {RIGHTS}}}"
ACCOUNTS = f"accounts: {{ DATA: {{ jetstream: enabled, users: [{USERS}] }} }}\n"


@asynccontextmanager
async def working(app: App) -> AsyncGenerator[None]:
    stop = anyio.Event()
    async with app, anyio.create_task_group() as tasks:
        tasks.start_soon(app._work, stop)
        yield
        stop.set()


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(PATIENCE_SECONDS):
        while not holds():  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def test_a_worker_goes_on_after_all_of_its_state_was_forged_and_tells_of_each_key(tmp_path: Path) -> None:
    with NatsServer.start(store_dir=tmp_path / "store", config=ACCOUNTS) as server:
        app = App("field", config=write_mars_config(tmp_path / "c.yaml", server.url, user="worker", password="right"))
        unreadable: list[Unreadable] = []
        settled: list[Settled] = []
        ticked: list[Ticked] = []
        for kind, heard in ((Unreadable, unreadable), (Settled, settled), (Ticked, ticked)):
            app.events.listen(heard.append, kind)

        @app.agent("mars", retry=RetryPolicy(first=1, factor=1, attempts=100, jitter=0))
        async def index(notification: Notification[Any]) -> None:
            if notification.identifier["class"] == "bad":
                raise ValueError("as asked for")

        @app.every("1s", singleton=True)
        async def tick() -> None:
            pass

        async with working(app):
            await app.notify("mars", {"class": "bad", "step": 1}, {})
            await until(lambda: bool(settled) and bool(ticked))
        attacker = await nats.connect(server.url, user="publisher", password="right")
        forged: dict[str, int] = {}
        async with app:
            admin = app.session.admin
            buckets = [name for name in await admin.stream_names() if name.startswith("KV_")]
            for name in [name for name in buckets if name != "KV_field__live"]:  # which workers do not read
                bucket = await admin.key_value(name.removeprefix("KV_"))
                for key in await bucket.keys():
                    before = await bucket.revision()
                    subject = f"$KV.{name.removeprefix('KV_')}.{key}"
                    await attacker.publish("mars.attack.1", b"{}", reply=subject)
                    await flushed(attacker)
                    with anyio.fail_after(PATIENCE_SECONDS):
                        while await bucket.revision() == before:  # noqa: ASYNC110
                            await anyio.sleep(0.01)
                    forged[subject] = before + 1
        await attacker.publish("mars.attack.2", b"{}", reply=dead_letter_records.retry_subject("field", "index"))
        await attacker.close()
        assert len(forged) >= 7
        del ticked[:]

        async with working(app):
            receipt = await app.notify("mars", {"class": "od", "step": 1}, {})
            await until(lambda: any(each.sequence == receipt.sequence for each in settled))
            await until(lambda: len(ticked) > 1)
            await until(lambda: len(unreadable) > len(forged))
        assert {event.reason for event in unreadable} == {"foreign"}
        told = [str(event.error) for event in unreadable if event.stream != RETRIES]
        for subject in forged:
            assert sum(error.endswith(f"reply subject {subject}") for error in told) == 1
        assert [event.stream for event in unreadable if event.stream == RETRIES] == [RETRIES]
