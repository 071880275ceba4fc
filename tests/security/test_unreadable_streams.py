"""A server that was started with the wrong key has streams that it cannot read, and erases each that is recreated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from aviso_workers import App, Notification
from aviso_workers.errors import NotFoundError, UnreadableStreamError
from aviso_workers.server import NatsServer
from tests.conftest import write_mars_config
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

COUNT = 5


@contextmanager
def encrypted(store: Path, key: str) -> Iterator[NatsServer]:
    """A server that somebody has started by hand with this key: nothing looks at it before clients come."""
    jetstream = f'jetstream {{store_dir: "{store}", cipher: chacha, key: "{key}"}}\n'
    with NatsServer.start(store_dir=store, name="encrypted", config=jetstream) as server:
        yield server


def app_on(server: NatsServer, directory: Path) -> tuple[App, anyio.Event]:
    """An app with an agent, and the event that ends its work when all notifications were handled."""
    app, stop = App("reader", config=write_mars_config(directory / "config.yaml", server.url)), anyio.Event()

    @app.agent("mars")
    async def read(notification: Notification[dict[str, int]]) -> None:
        if int(notification.identifier["step"]) == COUNT - 1:
            stop.set()

    return app, stop


async def work(server: NatsServer, directory: Path) -> None:
    app, stop = app_on(server, directory)
    async with app:
        with anyio.fail_after(PATIENCE_SECONDS):
            await app.work(stop)


async def publish(server: NatsServer, directory: Path) -> int:
    """Publish `COUNT` notifications, and return how many there are in all."""
    app, _ = app_on(server, directory)
    async with app:
        for step in range(COUNT):
            await app.notify("mars", {"class": "od", "step": step}, {"n": 1})
        return (await app.session.backend.stream_info("MARS")).messages


@pytest.fixture
async def store(tmp_path: Path) -> Path:
    """What a server with the right key has stored: notifications that were handled."""
    with encrypted(tmp_path / "store", "right") as server:
        await publish(server, tmp_path)
        await work(server, tmp_path)
    return tmp_path / "store"


async def test_a_worker_erases_nothing_on_a_server_that_was_started_with_the_wrong_key(
    store: Path, tmp_path: Path
) -> None:
    with encrypted(store, "wrong") as server:
        for _ in range(3):  # a supervisor starts the worker again
            with pytest.raises(UnreadableStreamError, match="key"):
                await work(server, tmp_path)
        with pytest.raises(UnreadableStreamError, match="key"):
            await publish(server, tmp_path)

    with encrypted(store, "right") as server:
        assert await publish(server, tmp_path) == 2 * COUNT
        await work(server, tmp_path)


async def test_a_publisher_that_comes_first_makes_no_second_stream_there(store: Path, tmp_path: Path) -> None:
    with encrypted(store, "wrong") as server:
        for _ in range(2):
            with pytest.raises(UnreadableStreamError, match="MARS"):
                await publish(server, tmp_path)
        with pytest.raises(UnreadableStreamError, match="aviso_workers_unreadable"):
            await work(server, tmp_path)


async def test_a_replay_destroys_nothing_there(store: Path, tmp_path: Path) -> None:
    async def replayed(server: NatsServer) -> int:
        app, _ = app_on(server, tmp_path)
        async with app:
            return len([each async for each in app.replay("mars", from_id=1)])

    with encrypted(store, "wrong") as server:
        for _ in range(3):
            with pytest.raises(NotFoundError, match="cannot read the stream"):
                await replayed(server)
    with encrypted(store, "right") as server:
        assert await replayed(server) == COUNT
