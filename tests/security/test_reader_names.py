"""Who may replay a stream of several apps reads by consumers of its own, and reaches those of no other app."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import nats
import pytest

from aviso_workers import App, Notification
from aviso_workers.backends import Admin, Message, open_backend
from aviso_workers.backends.jetstream import JetStreamBackend, readers
from aviso_workers.declare.agents import agent_of
from aviso_workers.errors import DeclarationError, DeniedError, UnavailableError
from aviso_workers.events import StreamNotRead
from aviso_workers.jetstream import error_codes, identities
from aviso_workers.ops import permissions
from aviso_workers.server import NatsServer
from aviso_workers.state import bucket_names, delayed_messages
from tests.conftest import write_mars_config
from tests.security.test_roles import EVERYTHING, NOWHERE, denied, make_streams, user
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

APPS = ("a", "b")
STEPS = range(20)


def an_app(name: str, config: Path) -> App:
    app = App(name, config=config)

    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        pass

    return app


class Account:
    """A server with a worker's user for each app, with its rendered role, and an operator."""

    def __init__(self, server: NatsServer, directory: Path) -> None:
        self.server = server
        self._directory = directory

    def app(self, name: str, *, user: str = "") -> App:
        login = user or name
        path = self._directory / f"{login}.yaml"
        return an_app(name, write_mars_config(path, self.server.url, user=login, password=login))

    @asynccontextmanager
    async def operator(self) -> AsyncGenerator[Admin, None]:
        async with open_backend(self.app("any", user="everything").config) as admin:
            yield admin


@pytest.fixture
def account(tmp_path: Path) -> Iterator[Account]:
    with _started(tmp_path) as found:
        yield found


@contextmanager
def _started(directory: Path, *more: str) -> Iterator[Account]:
    users = [EVERYTHING, *more]
    for name in APPS:
        app = an_app(name, write_mars_config(directory / "roles.yaml", NOWHERE, user=name, password=name))
        users.append(user(name, permissions.of_worker(app, app.config)))
    accounts = f"accounts: {{ DATA: {{ jetstream: enabled, users: [{', '.join(users)}] }} }}\n"
    with NatsServer.start(store_dir=directory / "store", config=accounts) as server:
        for name in APPS:
            everything = Account(server, directory).app(name, user="everything")
            own = permissions.streams_of_worker(everything, everything.config)
            with ThreadPoolExecutor() as beside:  # a test may run in an event loop
                beside.submit(anyio.run, make_streams, directory / "everything.yaml", own).result()
        yield Account(server, directory)


async def publish(app: App) -> None:
    for step in STEPS:
        await app.notify("mars", {"class": "od", "step": step}, {"n": 1})


async def steps(app: App) -> list[int]:
    with anyio.fail_after(PATIENCE_SECONDS):
        return [int(each.identifier["step"]) async for each in app.replay("mars", from_id=1)]


async def test_replays_of_one_configuration_at_once_each_see_everything(account: Account) -> None:
    found: list[list[int]] = []
    async with account.app("a") as one, account.app("a") as other, account.app("b") as of_another_app:
        await publish(one)

        async def replay(app: App) -> None:
            found.append(await steps(app))

        async with anyio.create_task_group() as tasks:
            for app in (one, one, other, other, of_another_app):
                tasks.start_soon(replay, app)
        async with account.operator() as admin:
            assert await admin.consumer_names("MARS") == []
    assert found == [list(STEPS)] * 5
    assert " Violation - " not in account.server.log


async def test_a_worker_reaches_no_reader_of_another_app(account: Account) -> None:
    async with account.app("b") as app, account.operator() as admin:
        await publish(app)
        async with aclosing(app.watch("mars", from_id=1)) as watch:
            await anext(watch)
            (reader,) = await admin.consumer_names("MARS")
            assert reader in identities.reader_names("b", "MARS")
            assert agent_of(reader) is None
            for request in (
                f"CONSUMER.CREATE.MARS.{reader}",
                f"CONSUMER.CREATE.MARS.{reader}.mars.>",
                f"CONSUMER.MSG.NEXT.MARS.{reader}",
                f"CONSUMER.DELETE.MARS.{reader}",
                "CONSUMER.CREATE.MARS",
                "CONSUMER.MSG.NEXT.MARS.b__index",
                "CONSUMER.DELETE.MARS.b__index",
            ):
                assert await denied(account.server, "a", publish=f"$JS.API.{request}"), request


async def test_a_request_for_a_reader_that_names_another_apps_reader_in_its_body_changes_none(account: Account) -> None:
    async with account.app("b") as app, account.operator() as admin:
        await publish(app)
        async with aclosing(app.watch("mars", from_id=1)) as watch:
            await anext(watch)
            (reader,) = await admin.consumer_names("MARS")
            before = await admin.consumer_info("MARS", reader)
            client = await nats.connect(account.server.url, user="a", password="a", inbox_prefix=b"_INBOX_a")
            config = {"name": reader, "ack_policy": "none", "filter_subject": "mars.nothing"}
            for action in ("", "create", "update"):
                request = {"stream_name": "MARS", "config": config, "action": action}
                answer = await client.request("$JS.API.CONSUMER.CREATE.MARS.a-r0", json.dumps(request).encode())
                assert json.loads(answer.data).get("name", "a-r0") == "a-r0"
            await client.close()
            assert (await admin.consumer_info("MARS", reader)).config == before.config


@pytest.mark.slow
async def test_more_readers_than_names_wait_say_so_and_go_on(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "NAMED_SECONDS", 0.2)
    said = anyio.Event()
    async with account.app("a") as app, AsyncExitStack() as busy:
        await publish(app)
        app.events.listen(lambda event: said.set(), StreamNotRead)
        watches = []
        for _ in identities.reader_names("a", "MARS"):
            watches.append(await busy.enter_async_context(aclosing(app.watch("mars", from_id=1))))
            await anext(watches[-1])
        with pytest.raises(UnavailableError, match=r"all 16 readers of MARS are at work, a-r0 to a-r15") as raised:
            await app.session.backend.count("MARS", filter_subjects=())
        assert raised.value.code == error_codes.CONSUMER_EXISTS
        async with account.app("b") as other:
            assert await steps(other) == list(STEPS)

        async with anyio.create_task_group() as tasks:

            async def replay() -> None:
                assert await steps(app) == list(STEPS)

            tasks.start_soon(replay)
            with anyio.fail_after(PATIENCE_SECONDS):
                await said.wait()
            await watches[0].aclose()


@pytest.mark.slow
async def test_the_name_of_a_reader_that_is_gone_is_free_after_a_while(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identities, "READERS", 1)
    monkeypatch.setattr(readers, "INACTIVE_SECONDS", 1)
    async with account.app("a") as app:
        await publish(app)
        async with open_backend(app.config, owner="a") as backend:
            async with aclosing(backend.read("MARS", filter_subjects=())) as reading:
                await anext(reading)
                assert isinstance(backend, JetStreamBackend)
                await backend.connection.close()
            assert await steps(app) == list(STEPS)


async def test_a_user_with_a_role_of_before_is_told_which_right_it_lacks(tmp_path: Path) -> None:
    before = {"publish": {"deny": ["$JS.API.CONSUMER.CREATE.MARS.>"]}}
    old = json.dumps({"user": "old", "password": "old", "permissions": before})
    with _started(tmp_path, old) as account:
        async with account.app("a", user="old") as app:
            await publish(app)
            with pytest.raises(
                DeniedError, match=r"CREATE\.MARS\.a-r\d+: permissions violation.* server render --role"
            ):
                await steps(app)


async def test_who_has_not_read_for_long_takes_nothing_from_another_reader_of_the_name(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identities, "READERS", 1)
    monkeypatch.setattr(readers, "AHEAD", 4)
    async with account.app("a") as app, account.operator() as admin, AsyncExitStack() as open_readings:

        async def reading() -> AsyncGenerator[Message, None]:
            found = app.session.backend.read("MARS", filter_subjects=())
            return await open_readings.enter_async_context(aclosing(found))

        await publish(app)
        slow = await reading()
        await anext(slow)
        await admin.delete_consumer("MARS", "a-r0")  # as a server does with one that is not used
        other = await reading()
        assert (await anext(other)).sequence == 1
        with pytest.raises(UnavailableError, match="reading MARS was interrupted"):
            [message async for message in slow]
        assert [(await anext(other)).sequence for _ in STEPS[1:]] == [step + 1 for step in STEPS[1:]]


def test_which_streams_apps_share() -> None:
    shared = [
        stream
        for stream in (
            "MARS",
            delayed_messages.stream_of("MARS"),
            "KV_by_name",
            f"KV_{bucket_names.bucket_of('A', 'state')}",
            f"KV_{bucket_names.bucket_of('A', 'table', 'newest')}",
            "aviso_workers_dead_letters__A",
        )
        if identities.reader_names("A", stream)
    ]
    assert shared == ["MARS", delayed_messages.stream_of("MARS"), "KV_by_name"]
    assert identities.reader_names("", "MARS") == ()
    assert len(identities.reader_names(identities.SPARK, "MARS")) == identities.READERS_OF_SPARK


@pytest.mark.parametrize("name", [identities.SPARK, "aviso_workers"])
def test_no_app_has_the_name_of_readers_of_ours(name: str) -> None:
    """Who removes the agents of an app must not remove what delivers all delayed notifications."""
    with pytest.raises(DeclarationError, match="names of our own streams and readers begin so"):
        App(name)
    assert agent_of(delayed_messages.DURABLE) is None
