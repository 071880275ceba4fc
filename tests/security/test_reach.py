"""The table in docs/security.md, "What a role can reach beyond its subjects": each of its cells on a real server."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anyio
import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from aviso_workers import config as settings
from aviso_workers.server import NatsServer, processes
from tests.conftest import write_mars_config
from tests.documented import PROJECT
from tests.security import reach
from tests.security.reach import ATTACKS, Cell, Place, Reach
from tests.security.test_roles import NOWHERE, granted
from tests.waits import PATIENCE_SECONDS, flushed

pytestmark = pytest.mark.anyio

ONE_ACCOUNT, AS_RENDERED = "one for all", "as rendered"
ROLES = ("publisher", "worker", "bridge", "spark", "operator")
TABLE: dict[tuple[str, str], tuple[Cell, ...]] = {
    ("publisher", ONE_ACCOUNT): ("yes", "answers", "answers", "no", "no", "no", "no", "no"),
    ("publisher", AS_RENDERED): ("yes", "no", "no", "no", "no", "no", "no", "no"),
    ("worker", ONE_ACCOUNT): ("yes", "answers", "answers", "resets", "no", "yes", "no", "no"),
    ("worker", AS_RENDERED): ("yes", "answers", "answers", "resets", "no", "yes", "no", "no"),
    ("bridge", ONE_ACCOUNT): ("yes", "answers", "answers", "resets", "no", "yes", "no", "no"),
    ("bridge", AS_RENDERED): ("yes", "answers", "answers", "resets", "no", "yes", "no", "no"),
    ("spark", ONE_ACCOUNT): ("yes", "answers", "answers", "resets", "no", "yes", "no", "no"),
    ("spark", AS_RENDERED): ("yes", "answers", "answers", "resets", "no", "yes", "no", "no"),
    ("operator", ONE_ACCOUNT): ("yes", "yes", "yes", "yes", "yes", "yes", "yes", "yes"),
    ("operator", AS_RENDERED): ("yes", "yes", "yes", "yes", "yes", "yes", "yes", "yes"),
}
CELLS = [
    pytest.param(role, accounts, column, cell, id=f"{role}, {accounts}, {column}")
    for (role, accounts), row in TABLE.items()
    for column, cell in zip(ATTACKS, row, strict=True)
]


def server_section(directory: Path, accounts: str) -> dict[str, Any]:
    """The section `server` with a user of each role, who has the permissions that `server render --role` prints."""
    users: dict[str, Any] = {"everything": {"password": "everything"}}
    for role in ROLES:
        own = write_mars_config(
            directory / f"{role}.yaml", NOWHERE, stream_management="observe", inbox_prefix=f"_INBOX_{role}"
        )
        rights = granted(role, own)  # type: ignore[arg-type]
        allowed = {side: {"allow": getattr(rights, side).allow} for side in ("publish", "subscribe")}
        users[role] = {"password": role, "permissions": allowed}
    if accounts == ONE_ACCOUNT:
        return {"accounts": {"workers": {"users": users}}}
    del users["publisher"]
    anything = {"publish": {"allow": [">"]}, "subscribe": {"allow": [">"]}}
    insider = {"password": "insider", "permissions": anything}
    publishers = {"publishes": ["mars"], "users": {"publisher": {"password": "publisher"}, "insider": insider}}
    return {"accounts": {"workers": {"users": users}, "mars_centre": publishers}}


def start(directory: Path, accounts: str, *, nodes: int = 1) -> tuple[processes.Node, ...]:
    path = write_mars_config(directory / "server.yaml", NOWHERE)
    document = json.loads(path.read_text())
    ports = {"port": 0, "monitoring": {"port": 0}, "cluster": {"port": 0}}
    path.write_text(json.dumps({**document, "server": {**ports, **server_section(directory, accounts)}}))
    loaded = settings.load(path, environ={})
    return processes.start(loaded, directory=directory / "servers", nodes=nodes, detached=False)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Place]]:
    with ExitStack() as running:
        found = {}
        for accounts in (ONE_ACCOUNT, AS_RENDERED):
            directory = tmp_path_factory.mktemp("reach")
            running.callback(processes.stop, directory / "servers")
            (node,) = start(directory, accounts)
            found[accounts] = Place(node.url)
            anyio.run(reach.prepare, found[accounts])
        yield found


@pytest.mark.slow
@pytest.mark.parametrize(("role", "accounts", "column", "cell"), CELLS)
async def test_a_role_reaches_what_the_table_says(
    places: dict[str, Place], role: str, accounts: str, column: Reach, cell: Cell
) -> None:
    assert await reach.reached(places[accounts], role, column) == cell


@pytest.mark.parametrize("column", ATTACKS)
async def test_the_boundary_is_the_account_and_not_the_permissions_of_its_users(
    places: dict[str, Place], column: Reach
) -> None:
    """A user of the account of publishers who may do everything there."""
    as_of_a_publisher = dict(zip(ATTACKS, TABLE["publisher", AS_RENDERED], strict=True))
    assert await reach.reached(places[AS_RENDERED], "insider", column) == as_of_a_publisher[column]


FORGED = (
    "other.forged",
    "mars_extra.forged",
    "$KV.theirs__failures.forged",
    "aviso_workers.retries.theirs.forged",
    "aviso_workers.dead_letters.theirs.forged",
    "aviso_workers.schedule.forged.due",
    "$JS.API.STREAM.PURGE.forged",
    "$JS.API.STREAM.MSG.DELETE.forged",
    "$JS.API.CONSUMER.PAUSE.forged.consumer",
    "$JS.API.CONSUMER.MSG.NEXT.forged.consumer",
    "$JS.ACK.forged.consumer.1.1.1.1.1",
    "$SYS.REQ.ACCOUNT.workers.forged",
    "_INBOX_everything.forged",
    "_R_.forged",
    "other.forged.1.500.fail.1.2.$FI",
)
HEADERS = {
    "Nats-Schedule": "@at 2030-01-01T00:00:00Z",
    "Nats-Schedule-Target": "other.forged",
    "Nats-Stream-Source": "OTHER 1 > > other.forged",
    "Nats-Subject": "other.forged",
    "Nats-Expected-Stream": "OTHER",
    "Nats-Rollup": "all",
    "Nats-Incr": "+1",
    "Nats-TTL": "1s",
    "Nats-Msg-Id": "one",
}


async def test_neither_a_subject_nor_a_header_leads_out_of_an_account_of_publishers(places: dict[str, Place]) -> None:
    def connected(user: str) -> Awaitable[Client]:
        return nats.connect(places[AS_RENDERED].url, user=user, password=user, error_cb=ignore)

    owner, insider = await connected("everything"), await connected("insider")
    heard = {owner: await hear_everything(owner), insider: await hear_everything(insider)}
    before = {name: await last_sequence(owner, name) for name in reach.STREAMS}
    for subject in FORGED:
        await insider.publish(subject, b"{}")
        await insider.publish("mars.a", b"{}", reply=subject)
        await insider.publish("$JS.API.STREAM.INFO.MARS", b"", reply=subject)
    for header, value in HEADERS.items():
        await insider.publish("mars.a", b"{}", headers={header: value})
    await insider.request("mars.last", b"", timeout=PATIENCE_SECONDS)
    for subject in ("other.secret", "mars.secret"):
        await owner.request(subject, b"", timeout=PATIENCE_SECONDS)
    await flushed(owner)
    await flushed(insider)

    assert "mars.a" in heard[owner]
    assert not [subject for subject in heard[owner] if "forged" in subject]
    assert not [subject for subject in heard[insider] if "secret" in subject]
    grown = {name: await last_sequence(owner, name) - before[name] for name in ("OTHER", "KV_theirs__failures")}
    assert grown == {"OTHER": 1, "KV_theirs__failures": 0}  # the owner's own
    await owner.close()
    await insider.close()


async def hear_everything(client: Client) -> list[str]:
    """The subjects that a client hears, also those of queue groups."""
    heard: list[str] = []

    async def hear(message: Msg) -> None:
        heard.append(message.subject)

    await client.subscribe(">", cb=hear)
    await client.subscribe("*.>", queue="all", cb=hear)
    await flushed(client)
    return heard


async def test_a_message_that_is_delivered_into_another_stream_keeps_its_subject(places: dict[str, Place]) -> None:
    """What a pull request of a user who may replay asks for is not stored as a message of the other base."""
    url = places[ONE_ACCOUNT].url
    owner = await nats.connect(url, user="everything", password="everything")
    worker = await nats.connect(url, user="worker", password="worker", inbox_prefix=b"_INBOX_worker")
    config = {
        "stream_name": "MARS",
        "config": {"name": "field-r0", "ack_policy": "none", "filter_subject": "mars.kept"},
    }
    await worker.request("mars.kept", b"{}", timeout=PATIENCE_SECONDS)
    reader = "MARS.field-r0"
    await worker.request(f"$JS.API.CONSUMER.CREATE.{reader}", json.dumps(config).encode(), timeout=PATIENCE_SECONDS)
    await worker.publish(f"$JS.API.CONSUMER.MSG.NEXT.{reader}", b"1", reply="other.kept")
    found: dict[str, int] = {}
    with anyio.fail_after(PATIENCE_SECONDS):
        while not found:
            request = json.dumps({"subjects_filter": "*.kept"}).encode()
            answer = await owner.request("$JS.API.STREAM.INFO.OTHER", request, timeout=PATIENCE_SECONDS)
            found = json.loads(answer.data)["state"].get("subjects", {})
    assert found == {"mars.kept": 1}
    await worker.close()
    await owner.close()


async def last_sequence(owner: Client, stream: str) -> int:
    answer = await owner.request(f"$JS.API.STREAM.INFO.{stream}", timeout=PATIENCE_SECONDS)
    return int(json.loads(answer.data)["state"]["last_seq"])


async def ignore(_: Exception) -> None:
    """What is denied is no error of the test."""


@pytest.mark.slow
async def test_a_publisher_of_another_server_of_a_cluster_reaches_the_same(tmp_path: Path) -> None:
    nodes = start(tmp_path, AS_RENDERED, nodes=3)
    try:
        place = Place(nodes[0].url, copies=3)
        await reach.prepare(place)
        for user in ("publisher", "insider"):
            found = [await reach.reached(place, user, column, url=nodes[-1].url) for column in ATTACKS]
            assert tuple(found) == TABLE["publisher", AS_RENDERED]
    finally:
        processes.stop(tmp_path / "servers")


async def test_an_acknowledgement_purges_another_stream_where_the_server_is_not_strict(tmp_path: Path) -> None:
    with lax_server(tmp_path) as server:
        place = Place(server.url)
        await reach.prepare(place)
        assert await reach.reached(place, "publisher", "JetStream's API") == "answers"


@contextmanager
def lax_server(directory: Path, *, strict: bool | None = False) -> Iterator[NatsServer]:
    """A server with one account that ignores unknown fields of requests, as 2.11 does where `strict` is not said."""
    users = [
        {"user": name, "password": name, "permissions": each.get("permissions", {})}
        for name, each in server_section(directory, ONE_ACCOUNT)["accounts"]["workers"]["users"].items()
    ]
    jetstream = {"store_dir": str(directory / "jetstream"), "strict": strict}
    config = {
        "jetstream": {key: value for key, value in jetstream.items() if value is not None},
        "accounts": {"workers": {"jetstream": "enabled", "users": users}},
    }
    settings = "".join(f"{key}: {json.dumps(value)}\n" for key, value in config.items())
    with NatsServer.start(store_dir=directory / "jetstream", config=settings) as server:
        yield server


def test_the_documented_table_is_the_tested_one() -> None:
    text = (PROJECT / "docs/security.md").read_text()
    head = f"| role | accounts | {' | '.join(ATTACKS)} |\n"
    _, rows = text.split(head)
    documented = [line.strip("| ").split(" | ") for line in rows.splitlines()[1 : len(TABLE) + 1]]
    assert documented == [[*of, *row] for of, row in TABLE.items()]
