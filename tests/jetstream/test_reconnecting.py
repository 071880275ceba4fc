"""Every program connects again, however long its servers were away and whatever was replaced meanwhile."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import nkeys
import pytest

from aviso_workers import App, config
from aviso_workers.backends.jetstream import credentials
from aviso_workers.backends.jetstream.connection import NatsConnection
from aviso_workers.errors import OutcomeUnknownError, UnavailableError
from aviso_workers.server import NatsServer
from tests.conftest import write_mars_config
from tests.security.certificates import Authority, Certificate
from tests.security.tokens import Key
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

ONCE_GIVEN_UP_AFTER = 5
"""So many attempts are the default of an aviso-server."""


def to(url: str, **settings: Any) -> NatsConnection:
    settings = {"reconnect_delay_ms": 10, **settings}
    return NatsConnection(config.JetStream(nats_url=config.ServerUrls(url), **settings), on_connection=None)


@asynccontextmanager
async def refusing(port: int) -> AsyncGenerator[anyio.Event, None]:
    """Accept connections there, and end each at once; set the event when so many came as once were the last."""
    attempts, enough = 0, anyio.Event()

    async def end(stream: anyio.abc.SocketStream) -> None:
        nonlocal attempts
        await stream.aclose()
        attempts += 1
        if attempts > 2 * ONCE_GIVEN_UP_AFTER:
            enough.set()

    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port, reuse_port=True) as listener,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(listener.serve, end)
        yield enough
        tasks.cancel_scope.cancel()


@pytest.mark.slow
async def test_a_program_that_publishes_stores_again_after_more_attempts_than_a_server_makes(tmp_path: Path) -> None:
    server = NatsServer.start(store_dir=tmp_path / "store")
    path = write_mars_config(
        tmp_path / "config.yaml",
        server.url,
        reconnect_delay_ms=10,
        publish_deadline_seconds=1,
        max_reconnect_attempts=None,
    )
    async with App("publisher", config=path) as app:
        await app.notify("mars", {"class": "od", "step": 1})
        server.stop()
        async with refusing(server.port) as enough:
            with anyio.fail_after(PATIENCE_SECONDS), pytest.raises((UnavailableError, OutcomeUnknownError)) as raised:
                await app.notify("mars", {"class": "od", "step": 2})
            assert f"not connected to {server.url} since 20" in str(raised.value)
            with anyio.fail_after(PATIENCE_SECONDS):
                await enough.wait()
        with NatsServer.start(store_dir=tmp_path / "store", port=server.port), anyio.fail_after(PATIENCE_SECONDS):
            while not app.connected:  # noqa: ASYNC110 - the app tells nobody
                await anyio.sleep(0.01)
            await app.notify("mars", {"class": "od", "step": 3})
    assert not app.connected


async def test_a_name_whose_first_address_is_silent_is_reached_at_its_second(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    found = loop.getaddrinfo

    async def two(host: str, port: int, **options: Any) -> list[Any]:
        return [*await found("127.0.0.3", port, **options), *await found("127.0.0.1", port, **options)]

    async def say_nothing(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await anyio.sleep_forever()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.3", local_port=nats_server.port)
    monkeypatch.setattr(loop, "getaddrinfo", two)
    monkeypatch.setattr(credentials, "ADDRESS_SECONDS", 0.2)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, say_nothing)
        connection = to(f"nats://nats.example.org:{nats_server.port}")
        with anyio.fail_after(PATIENCE_SECONDS):
            await connection.open()
            assert await connection.answers()
        await connection.close()
        tasks.cancel_scope.cancel()


@pytest.fixture
def authorities(tmp_path: Path) -> tuple[Authority, Authority]:
    return Authority(tmp_path, "former"), Authority(tmp_path, "new")


async def test_certificates_that_are_replaced_are_those_of_the_next_attempt(
    tmp_path: Path, authorities: tuple[Authority, Authority]
) -> None:
    trusted = tmp_path / "trusted.pem"

    def serving(authority: Authority, port: int = 0) -> NatsServer:
        made: Certificate = authority.sign("server")
        files = f"cert_file: {made.cert_file}, key_file: {made.key_file}"
        return NatsServer.start(store_dir=tmp_path / "store", port=port, config=f"tls {{{files}}}\n")

    former, new = authorities
    shutil.copy(former.ca_file, trusted)
    with serving(former) as server:
        connection = to(server.url.replace("nats:", "tls:"), tls=config.Tls(ca_file=str(trusted)))
        await connection.open()
    back = anyio.Event()
    connection.on_reconnect.add(back.set)
    with serving(new, server.port), anyio.fail_after(PATIENCE_SECONDS):
        while "certificate verify failed" not in connection.unconnected:  # noqa: ASYNC110 - nobody tells of an attempt
            await anyio.sleep(0.01)
        shutil.copy(new.ca_file, trusted)
        await back.wait()
        assert await connection.answers()
        await connection.close()


async def test_an_nkey_that_is_replaced_is_that_of_the_next_attempt(tmp_path: Path) -> None:
    former, new = Key(nkeys.PREFIX_BYTE_USER), Key(nkeys.PREFIX_BYTE_USER)
    seed = tmp_path / "worker.nk"

    def serving(key: Key, port: int = 0) -> NatsServer:
        users = f'authorization {{ users: [{{nkey: "{key.public}"}}] }}\n'
        return NatsServer.start(store_dir=tmp_path / "store", port=port, config=users)

    seed.write_text(former.seed)
    with serving(former) as server:
        connection = to(server.url, nkey_seed_file=str(seed))
        await connection.open()
    back = anyio.Event()
    connection.on_reconnect.add(back.set)
    with serving(new, server.port), anyio.fail_after(PATIENCE_SECONDS):
        while "Authorization" not in connection.unconnected:  # noqa: ASYNC110 - nobody tells of an attempt
            await anyio.sleep(0.01)
        seed.write_text(new.seed)
        await back.wait()
        assert await connection.answers()
        await connection.close()
