"""A server that was started with the wrong key has streams that it cannot read, and erases each that is recreated."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path

import anyio
import pytest

from aviso_workers import App, Notification
from aviso_workers.backends import Admin
from aviso_workers.errors import NotFoundError, UnreadableStreamError
from aviso_workers.jetstream.specs import UNREADABLE
from aviso_workers.ops import backups, promotion, stream_copies
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
            await app._work(stop)


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


async def restore(origin: Admin, target: Admin, kept: Path) -> None:
    await backups.restore(target, backups.find(kept / "MARS")[0])


async def restore_all(origin: Admin, target: Admin, kept: Path) -> None:
    await backups.restore_set(target, backups.load_set(kept), watch=lambda backup: nullcontext(lambda size: None))


async def copy(origin: Admin, target: Admin, kept: Path) -> None:
    await stream_copies.copy(origin, target, "MARS", progress=lambda size: None)


async def add(origin: Admin, target: Admin, kept: Path) -> None:
    await target.add_stream({"name": "MARS", "subjects": ["mars.>"]})


async def drill(origin: Admin, target: Admin, kept: Path) -> None:
    await promotion.rehearse(target, messages=2)


async def rehearse(origin: Admin, target: Admin, kept: Path) -> None:
    await backups.drill(target, backups.find(kept / "MARS")[0])


Create = Callable[[Admin, Admin, Path], Awaitable[None]]


@asynccontextmanager
async def two_sites(store: Path, directory: Path) -> AsyncIterator[tuple[App, App]]:
    """Connect to a server with a copy of the store, and to one with the wrong key; the first one's set is kept."""
    shutil.copytree(store, directory / "copied")
    with encrypted(directory / "copied", "right") as origin, encrypted(store, "wrong") as server:
        sites = {"right": origin, "wrong": server}
        for site in sites:
            (directory / site).mkdir()
        right, wrong = (app_on(server, directory / site)[0] for site, server in sites.items())
        async with right, wrong:
            admin = right.session.admin
            await backups.create_set(
                admin,
                directory / "kept",
                lambda stream, earlier: backups.create(admin, stream, directory / "kept", earlier=earlier),
                encrypted=False,
            )
            yield right, wrong


@pytest.mark.parametrize("create", [restore, restore_all, copy, add])
async def test_whatever_creates_a_stream_there_is_refused_and_leaves_the_mark(
    store: Path, tmp_path: Path, create: Create
) -> None:
    async with two_sites(store, tmp_path) as (origin, broken):
        target = broken.session.admin
        lost = "has files of a stream of that name.* the other streams are there again, and this one needs its backup"
        with pytest.raises(UnreadableStreamError, match=lost):
            await create(origin.session.admin, target, tmp_path / "kept")
        assert UNREADABLE in await target.stream_names()
        before = await target.stream_names()
        with pytest.raises(UnreadableStreamError, match="the server cannot read one that it has"):
            await broken.notify("mars", {"class": "od", "step": 1}, {"n": 1})
        assert await target.stream_names() == before


@pytest.mark.parametrize("create", [restore, restore_all, copy, add, drill, rehearse])
async def test_nothing_creates_a_stream_where_the_mark_is(store: Path, tmp_path: Path, create: Create) -> None:
    async with two_sites(store, tmp_path) as (origin, broken):
        target = broken.session.admin
        with pytest.raises(UnreadableStreamError, match="MARS"):
            await broken.notify("mars", {"class": "od", "step": 1}, {"n": 1})
        before = await target.stream_names()
        with pytest.raises(UnreadableStreamError, match="the server cannot read one that it has"):
            await create(origin.session.admin, target, tmp_path / "kept")
        assert await target.stream_names() == before == [UNREADABLE]
