"""Where TLS is configured nothing is sent without it, whatever a server, or who stands before it, says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from aviso_workers import App, Notification, Notify, config
from aviso_workers.backends.jetstream.connection import NatsConnection
from aviso_workers.backends.jetstream.wire import cluster_size
from aviso_workers.errors import RefusedError
from aviso_workers.server import NatsServer
from aviso_workers.testing import harness
from tests.commands import Command
from tests.conftest import write_mars_config
from tests.security.certificates import Authority, Certificate
from tests.security.servers import between, plain_server
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory, server_certificate: Certificate) -> Iterator[NatsServer]:
    tls = f"tls {{cert_file: {server_certificate.cert_file}, key_file: {server_certificate.key_file}}}\n"
    guarded = tls + "authorization {token: s3cret}\n"
    with NatsServer.start(store_dir=tmp_path_factory.mktemp("store"), config=guarded) as server:
        yield server


def to(url: str, **settings: Any) -> NatsConnection:
    """A connection that gives up late: what is refused for good ends it before."""
    given = {"retry_attempts": 1000, "max_reconnect_attempts": 0, "reconnect_delay_ms": 10, **settings}
    return NatsConnection(config.JetStream(nats_url=config.ServerUrls(*url.split(",")), **given), on_connection=None)


async def refused(connection: NatsConnection) -> str:
    with anyio.fail_after(PATIENCE_SECONDS), pytest.raises(RefusedError) as raised:
        await connection.open()
    return str(raised.value)


@pytest.mark.parametrize("configured", ["url", "one url of two", "authority", "client certificate", "hostname"])
@pytest.mark.parametrize("way", ["token", "password", "password in the url"])
async def test_a_server_without_tls_gets_nothing(
    configured: str, way: str, authority: Authority, client_certificate: Certificate
) -> None:
    ways: dict[str, config.Tls] = {
        "authority": config.Tls(ca_file=authority.ca_file),
        "client certificate": config.Tls(cert_file=client_certificate.cert_file, key_file=client_certificate.key_file),
        "hostname": config.Tls(server_hostname="nats.example.org"),
    }
    tls = ways.get(configured)
    logins: dict[str, dict[str, Any]] = {
        "token": {"token": config.Secret("s3cret")},
        "password": {"user": "worker", "password": config.Secret("s3cret")},
    }
    credentials = logins.get(way, {})
    user = "worker:s3cret@" if way == "password in the url" else ""
    async with plain_server() as (port, seen):
        url = f"{'nats' if tls else 'tls'}://{user}127.0.0.1:{port}"
        if configured == "one url of two":
            url = f"nats://{user}127.0.0.1:{port},{url}"

        said = await refused(to(url, tls=tls, **credentials))

    assert seen.plain == b""
    assert f"127.0.0.1:{port} offers no TLS" in said
    assert "s3cret" not in said


async def test_who_strips_tls_from_the_greeting_gets_nothing(tls_server: NatsServer, authority: Authority) -> None:
    async with between(tls_server.port) as proxy:
        proxy.strips = True

        said = await refused(
            to(
                f"nats://127.0.0.1:{proxy.port}",
                tls=config.Tls(ca_file=authority.ca_file),
                token=config.Secret("s3cret"),
            )
        )

    assert proxy.seen.plain == b""
    assert "offers no TLS" in said


async def test_who_strips_tls_later_gets_nothing_of_what_waits_either(
    tls_server: NatsServer, authority: Authority
) -> None:
    async with between(tls_server.port) as proxy:
        connection = to(
            f"tls://127.0.0.1:{proxy.port}", tls=config.Tls(ca_file=authority.ca_file), token=config.Secret("s3cret")
        )
        await connection.open()
        assert await connection.answers()
        lost = anyio.Event()
        connection.on_disconnect.add(lost.set)

        proxy.strips = True
        proxy.cut()
        await lost.wait()
        connection.wire.send(b"mars.od", b"a payload that nobody may read")
        with anyio.fail_after(PATIENCE_SECONDS):
            while "offers no TLS" not in connection.unconnected:  # noqa: ASYNC110 - nobody tells of an attempt
                await anyio.sleep(0.01)
        await connection.close()

    assert proxy.seen.connections > 1
    assert proxy.seen.plain == b""


CHANGES: list[dict[str, Any]] = [
    {"max_payload": 1_000},
    {"max_payload": 1 << 70},
    {"version": "2.9.0"},
    {"version": "9.9.9"},
    {"version": None},
    {"headers": False},
    {"headers": None},
    {"auth_required": False},
    {"connect_urls": ["attacker.example.org:4222", "192.0.2.1:4222"]},
    {"connect_urls": ["[", "192.0.2.1:99999", "192.0.2.1"]},
    {"cluster": "attacker", "connect_urls": ["127.0.0.1:1"], "domain": "attacker", "jetstream": False},
    {"ldm": True},
    {"nonce": "attacker"},
    {"tls_available": False, "tls_verify": True, "proto": 0, "client_id": "x", "xkey": 1},
]
"""What an attacker makes of the greeting, which is plain text."""


def known(connection: NatsConnection) -> tuple[int, tuple[int, int], int, list[Any]]:
    """What is known of the server: the largest payload, its version, the size of its cluster, and further servers."""
    of_cluster = cluster_size(connection.nc)
    return connection.max_payload, connection.server_version, of_cluster, connection.nc.discovered_servers


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("when", ["at first", "at a reconnect"])
async def test_what_the_plain_greeting_says_changes_nothing(
    changes: dict[str, Any], when: str, tls_server: NatsServer, authority: Authority
) -> None:
    settings: dict[str, Any] = {"tls": config.Tls(ca_file=authority.ca_file), "token": config.Secret("s3cret")}
    real = to(f"tls://127.0.0.1:{tls_server.port}", **settings)
    await real.open()
    expected = known(real)
    await real.close()
    async with between(tls_server.port) as proxy:
        connection = to(f"tls://127.0.0.1:{proxy.port}", **settings)
        proxy.changes = changes
        if when == "at a reconnect":
            proxy.changes = {}
        with anyio.fail_after(PATIENCE_SECONDS):
            await connection.open()
            if when == "at a reconnect":
                proxy.changes, reconnected = changes, anyio.Event()
                connection.on_reconnect.add(reconnected.set)
                proxy.cut()
                await reconnected.wait()
            found = known(connection)
            subscription = await connection.nc.subscribe("told")
            await connection.nc.publish("told", bytes(500_000), headers={"Some": "header"})
            message = await subscription.next_msg(timeout=PATIENCE_SECONDS)
        await connection.close()

    assert found == expected
    assert message.headers == {"Some": "header"}
    assert proxy.seen.connections == (1 if when == "at first" else 2)


@pytest.mark.parametrize("greeting", [b"INFO []", b"INFO " + b"9" * 200_000, b'INFO {"tls_', b"INFO", b""])
async def test_a_worker_connects_again_after_a_greeting_that_cannot_be_read(
    greeting: bytes, tls_server: NatsServer, authority: Authority
) -> None:
    async with between(tls_server.port) as proxy:
        tls = config.Tls(ca_file=authority.ca_file)
        connection = to(f"tls://127.0.0.1:{proxy.port}", tls=tls, token=config.Secret("s3cret"))
        with anyio.fail_after(PATIENCE_SECONDS):
            await connection.open()
            reconnected = anyio.Event()
            connection.on_reconnect.add(reconnected.set)
            proxy.instead = [greeting]
            proxy.cut()
            await reconnected.wait()
        await connection.close()

    assert proxy.seen.connections == 3


async def test_a_worker_publishes_all_that_it_has_whatever_the_plain_greeting_says(
    tls_server: NatsServer, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", authority.ca_file)
    async with between(tls_server.port) as proxy:
        proxy.changes = {"max_payload": 1_000, "version": "2.9.0", "headers": False}
        url = f"tls://s3cret@127.0.0.1:{proxy.port}"
        app = App("attacked", config=config.load(write_mars_config(tmp_path / "aviso.yaml", url)))
        app.event_type("index", key=("class",))

        @app.agent("mars", singleton=True)
        async def index(notification: Notification[Any]) -> Notify:
            return Notify("index", {"class": "od"}, "x" * 500_000)

        async with harness(app, server=url) as t:
            await t.notify("mars", {"class": "od", "step": "1"})
            await t.settle()

    assert t.dead_letters == []
    assert [len(one.payload) for one in t.published if one.event_type == "index"] == [500_000]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("agents", "ls"), ("notify", "mars", "class=od", "step=1")], ids=" ".join)
def test_a_command_says_nothing_of_its_connection(
    arguments: tuple[str, ...], tls_server: NatsServer, authority: Authority, tmp_path: Path
) -> None:
    settings = {"token": "s3cret", "tls": {"ca_file": authority.ca_file}}
    file = write_mars_config(tmp_path / "aviso.yaml", f"tls://127.0.0.1:{tls_server.port}", **settings)
    command = Command(*arguments, "--config", file, directory=tmp_path)

    assert command.end() == 0
    assert command.told == []


@pytest.mark.parametrize("problem", ["another authority", "no authority", "expired", "another name"])
async def test_a_certificate_that_cannot_be_trusted_fails_at_once(
    problem: str, tmp_path: Path, authority: Authority
) -> None:
    certificate = authority.sign(
        f"server with {problem}",
        days=-1 if problem == "expired" else 2,
        address="192.0.2.1" if problem == "another name" else "127.0.0.1",
    )
    trusted = Authority(tmp_path, "another") if problem == "another authority" else authority
    tls = f'tls {{cert_file: "{certificate.cert_file}", key_file: "{certificate.key_file}"}}\n'
    with NatsServer.start(store_dir=tmp_path / "store", config=tls) as server:
        said = await refused(
            to(server.url, tls=None if problem == "no authority" else config.Tls(ca_file=trusted.ca_file))
        )

    assert f"nats://127.0.0.1:{server.port}" in said
    assert "certificate" in said


async def test_without_tls_in_the_configuration_a_plain_server_is_as_good_as_before() -> None:
    async with plain_server() as (port, seen):
        connection = to(f"nats://127.0.0.1:{port}")
        await connection.open()
        assert await connection.answers()
        await connection.close()

    assert seen.plain.startswith(b"CONNECT ")
