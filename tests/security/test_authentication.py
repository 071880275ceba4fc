"""Who is let in by real servers, and what is said to who is not: each way to authenticate, right, wrong and expired."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import nkeys
import pytest

from aviso_workers import config
from aviso_workers.backends.jetstream import credentials
from aviso_workers.backends.jetstream.connection import NatsConnection
from aviso_workers.errors import RefusedError
from aviso_workers.server import NatsServer
from tests.security.certificates import Authority, Certificate
from tests.security.tokens import Key, Operator
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

RIGHT, OTHER = Key(nkeys.PREFIX_BYTE_USER), Key(nkeys.PREFIX_BYTE_USER)
TOKEN = "authorization { token: right }\n"
USERS = f'authorization {{ users: [{{user: worker, password: right}}, {{nkey: "{RIGHT.public}"}}] }}\n'


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, NatsServer]]:
    """A server that asks for a token, and one that knows users."""
    with (
        NatsServer.start(store_dir=tmp_path_factory.mktemp("token"), config=TOKEN) as token,
        NatsServer.start(store_dir=tmp_path_factory.mktemp("users"), config=USERS) as users,
    ):
        yield {"token": token, "users": users}


@pytest.fixture(scope="module")
def operator() -> Operator:
    return Operator()


@pytest.fixture(scope="module")
def jwt_server(tmp_path_factory: pytest.TempPathFactory, operator: Operator) -> Iterator[NatsServer]:
    with NatsServer.start(store_dir=tmp_path_factory.mktemp("jwt"), config=operator.server_config) as server:
        yield server


@pytest.fixture(scope="module")
def mutual_server(
    tmp_path_factory: pytest.TempPathFactory, authority: Authority, server_certificate: Certificate
) -> Iterator[NatsServer]:
    files = f'cert_file: "{server_certificate.cert_file}", key_file: "{server_certificate.key_file}"'
    tls = f'tls {{ {files}, ca_file: "{authority.ca_file}", verify: true }}\n'
    with NatsServer.start(store_dir=tmp_path_factory.mktemp("mutual"), config=tls) as server:
        yield server


def to(server: NatsServer, **settings: Any) -> NatsConnection:
    patient = {"retry_attempts": 1000, "reconnect_delay_ms": 10, **settings}
    return NatsConnection(config.JetStream(nats_url=config.ServerUrls(server.url), **patient), on_connection=None)


async def is_let_in(connection: NatsConnection) -> bool:
    with anyio.fail_after(PATIENCE_SECONDS):
        await connection.open()
        await connection.flush()  # however long the server takes to answer
        await connection.close()
    return True


async def refused(connection: NatsConnection) -> str:
    with anyio.fail_after(PATIENCE_SECONDS), pytest.raises(RefusedError) as raised:
        await connection.open()
    said = str(raised.value)
    assert "\n" not in said
    return said


async def test_a_token_lets_in_where_it_is_the_right_one(servers: dict[str, NatsServer]) -> None:
    assert await is_let_in(to(servers["token"], token=config.Secret("right")))
    said = await refused(to(servers["token"], token=config.Secret("wrong-one")))
    assert "refused the credentials" in said
    assert "wrong-one" not in said
    assert "refused the credentials" in await refused(to(servers["token"]))


async def test_a_password_lets_in_where_it_is_the_right_one(servers: dict[str, NatsServer]) -> None:
    assert await is_let_in(to(servers["users"], user="worker", password=config.Secret("right")))
    said = await refused(to(servers["users"], user="worker", password=config.Secret("wrong-one")))
    assert "refused the credentials" in said
    assert "wrong-one" not in said


async def test_an_nkey_lets_in_where_the_server_knows_it(servers: dict[str, NatsServer], tmp_path: Path) -> None:
    for key, is_known in ((RIGHT, True), (OTHER, False)):
        file = tmp_path / "seed"
        file.write_text(f"{key.seed}\n")
        connection = to(servers["users"], nkey_seed_file=str(file))
        if is_known:
            assert await is_let_in(connection)
        else:
            assert "refused the credentials" in await refused(connection)


async def test_credentials_let_in_where_they_are_of_the_operator_and_valid(
    jwt_server: NatsServer, operator: Operator, tmp_path: Path
) -> None:
    assert await is_let_in(to(jwt_server, credentials_file=str(operator.user(tmp_path / "user.creds"))))
    expired = operator.user(tmp_path / "expired.creds", expires_in=-10)
    assert "refused the credentials" in await refused(to(jwt_server, credentials_file=str(expired)))
    foreign = operator.user(tmp_path / "foreign.creds", account=Operator())
    assert "refused the credentials" in await refused(to(jwt_server, credentials_file=str(foreign)))


async def test_credentials_that_are_replaced_are_those_of_the_next_connection(
    jwt_server: NatsServer, operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = operator.user(tmp_path / "user.creds")
    connection = to(jwt_server, credentials_file=str(file), max_reconnect_attempts=0)
    await connection.open()
    read, back, text_of = anyio.Event(), anyio.Event(), credentials._text
    connection.on_reconnect.add(back.set)

    def note(file: str, what: str) -> str:
        read.set()
        return text_of(file, what)

    monkeypatch.setattr(credentials, "_text", note)
    file.write_text("half of a file")
    with anyio.fail_after(PATIENCE_SECONDS):
        await connection.nc.force_reconnect()
        await read.wait()
        operator.user(file)
        await back.wait()
        assert await connection.answers()
    await connection.close()


@pytest.mark.parametrize(
    "content", ["", "no seed", "SUAB", "SA" + "A" * 56, "\x00\xff", "A" * 100_000], ids=lambda content: content[:8]
)
@pytest.mark.parametrize("key", ["nkey_seed_file", "credentials_file"])
async def test_a_file_that_holds_something_else_is_an_error_of_one_line(
    servers: dict[str, NatsServer], key: str, content: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content.encode("latin-1"))
    said = await refused(to(servers["users"], **{key: str(file)}))
    assert said.startswith(f"{key} {file}: ")
    assert len(content) < 8 or content not in said


async def test_credentials_without_a_seed_that_can_be_used_are_an_error_of_one_line(
    jwt_server: NatsServer, operator: Operator, tmp_path: Path
) -> None:
    file = operator.user(tmp_path / "user.creds")
    whole = file.read_text().splitlines()
    for wrong in (whole[:4], [*whole[:5], "SUWRONG"], [*whole[:5], RIGHT.seed[:-1] + "0"]):
        file.write_text("\n".join(wrong))
        said = await refused(to(jwt_server, credentials_file=str(file)))
        assert said.startswith(f"credentials_file {file}: ")
        assert RIGHT.seed[:-1] not in said


async def test_a_client_certificate_lets_in_where_the_authority_has_signed_it(
    mutual_server: NatsServer, authority: Authority, client_certificate: Certificate, tmp_path: Path
) -> None:
    trusting = {"ca_file": authority.ca_file}
    ours = {"cert_file": client_certificate.cert_file, "key_file": client_certificate.key_file}
    assert await is_let_in(to(mutual_server, tls=config.Tls(**trusting, **ours)))

    expired = authority.sign("expired client", days=-1)
    foreign = Authority(tmp_path, "another").sign("foreign client")
    for wrong in (expired, foreign, None):
        files = {} if wrong is None else {"cert_file": wrong.cert_file, "key_file": wrong.key_file}
        connection = to(mutual_server, tls=config.Tls(**trusting, **files))
        assert "refused our certificate" in await refused(connection)


WRONG = [
    *((key, wrong) for key in ("ca_file", "cert_file", "key_file") for wrong in ("garbage", "empty", "missing")),
    ("key_file", "other key"),
    ("key_file", "passphrase"),
]


@pytest.mark.parametrize(("key", "wrong"), WRONG)
async def test_a_certificate_file_that_cannot_be_used_is_an_error_of_one_line(
    mutual_server: NatsServer,
    authority: Authority,
    client_certificate: Certificate,
    server_certificate: Certificate,
    key: str,
    wrong: str,
    tmp_path: Path,
) -> None:
    files = {
        "ca_file": authority.ca_file,
        "cert_file": client_certificate.cert_file,
        "key_file": client_certificate.key_file,
    }
    file = tmp_path / "file.pem"
    if wrong != "missing":
        file.write_text({"garbage": "-----BEGIN NOTHING-----\nx\n", "empty": ""}.get(wrong, ""))
    if wrong == "other key":
        file = Path(server_certificate.key_file)
    if wrong == "passphrase":
        authority.encrypt(client_certificate.key_file, file)
    said = await refused(to(mutual_server, tls=config.Tls(**{**files, key: str(file)})))
    assert said.startswith("tls.")
    assert str(file) in said
