"""Where TLS is configured nothing is sent without it, whatever a server, or who stands before it, says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from aviso_workers import config
from aviso_workers.backends.jetstream.connection import Connection
from aviso_workers.errors import RefusedError
from aviso_workers.server import NatsServer
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


def to(url: str, **settings: Any) -> Connection:
    """A connection that gives up late: what is refused for good ends it before."""
    given = {"retry_attempts": 1000, "max_reconnect_attempts": 0, "reconnect_delay_ms": 10, **settings}
    return Connection(config.JetStream(nats_url=config.ServerUrls(*url.split(",")), **given), on_connection=None)


async def refused(connection: Connection) -> str:
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
        with anyio.fail_after(PATIENCE_SECONDS), pytest.raises(RefusedError, match="offers no TLS"):
            await connection.failed()
        await connection.close()

    assert proxy.seen.connections > 1
    assert proxy.seen.plain == b""


@pytest.mark.parametrize("trusted", ["system", "ca_file"])
async def test_the_plain_greeting_leads_to_no_server_that_could_have_a_certificate_of_its_own(
    trusted: str, tls_server: NatsServer, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", authority.ca_file)
    tls = config.Tls(ca_file=authority.ca_file) if trusted == "ca_file" else None
    async with between(tls_server.port) as proxy:
        proxy.further = ("attacker.example.org:4222", "192.0.2.1:4222")
        connection = to(f"tls://127.0.0.1:{proxy.port}", tls=tls, token=config.Secret("s3cret"))
        await connection.open()
        found = {server.hostname for server in connection.nc.discovered_servers}
        await connection.close()

    assert found == {"192.0.2.1"} | ({"attacker.example.org"} if trusted == "ca_file" else set())


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
