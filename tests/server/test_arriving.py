"""Every setting, read back from servers that run with it."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import nats
import nkeys
import pytest
from msgspec import Struct, inspect
from nats.aio.client import Client

from aviso_workers.config import Config, Server
from aviso_workers.server import processes
from aviso_workers.server.processes import Node, ask
from tests.server.conftest import Load, Start, load_server
from tests.waits import PATIENCE_SECONDS, flushed

SEED = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER)
NKEY = nkeys.from_seed(bytearray(SEED)).public_key.decode()

CLUSTER = f"""
server_name: hub
server_tags: ["az:x", "disk:ssd"]
port: 0
monitoring: {{port: 0}}
max_connections: 100
max_subscriptions: 1000
max_payload: 2Mi
jetstream:
  store_dir: streams
  max_memory_store: 64Mi
  max_file_store: 1Gi
  domain: hub
  sync_interval: 5s
  unique_tag: "az:"
  max_outstanding_catchup: 32Mi
  limits: {{max_ack_pending: 5000, max_ha_assets: 100, max_request_batch: 2000, duplicate_window: 1h}}
  encryption: {{cipher: aes, key: hush-1}}
accounts:
  SYS: {{users: {{admin: {{password: hush-2}}}}}}
  PLAIN: {{jetstream: {{enabled: false}}, users: {{eve: {{password: hush-3}}}}}}
  DATA:
    jetstream:
      max_memory: 1Mi
      max_storage: 100Mi
      max_streams: 10
      max_consumers: 100
      max_ack_pending: 500
      max_bytes_required: true
      memory_max_stream_bytes: 512Ki
      disk_max_stream_bytes: 50Mi
    users:
      alice:
        password: hush-4
        permissions:
          publish: {{allow: ["data.>", "$JS.API.>"], deny: [data.not]}}
          subscribe: {{allow: ["_INBOX.>", "data.>"], deny: [data.not]}}
          allow_responses: true
      bob: {{nkey: {NKEY}}}
system_account: SYS
tls: {{cert_file: cert.pem, key_file: key.pem, ca_file: cert.pem, verify: true}}
cluster:
  name: c1
  port: 0
  user: route
  password: hush/5
  compression: s2_fast
  tls: {{cert_file: cert.pem, key_file: key.pem, ca_file: cert.pem, verify: true}}
leafnodes:
  port: 0
  compression: s2_better
  tls: {{cert_file: cert.pem, key_file: key.pem, ca_file: cert.pem, verify: true}}
"""
SECRETS = [f"hush-{i}" for i in range(1, 5)] + ["hush/5", "hush%2F5"]

SHOWN_ELSEWHERE = {
    "jetstream.sync_always": "test_flushing_every_write_arrives",
    "jetstream.max_outstanding_catchup": "nats-server accepts it and shows it nowhere",
    "jetstream.encryption": "test_encryption.py",
    "lame_duck": "test_running.py",
    "gateways": "test_gateways.py",
    "leafnodes.remotes": "test_a_leaf_node_joins_with_its_account",
}


class Facts(Struct, frozen=True, kw_only=True):
    """What the servers of a cluster say of themselves."""

    loaded: Config
    directory: Path
    nodes: tuple[Node, ...]

    def varz(self, *keys: str) -> Any:
        found: Any = ask(self.nodes[0], "/varz")
        for key in keys:
            found = found.get(key)
        return found

    @property
    def settings(self) -> Server:
        return self.loaded.server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, certificate: Path) -> Iterator[Facts]:
    """Three nodes with everything that can be set."""
    directory = tmp_path_factory.mktemp("cluster")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(directory)
        for name in ("cert.pem", "key.pem"):
            Path(name).symlink_to(certificate / name)
        loaded = load_server(directory / "dev.yaml", CLUSTER, replicas=3)
        try:
            nodes = processes.start(loaded, directory=directory, nodes=3, detached=False)
            yield Facts(loaded=loaded, directory=directory, nodes=nodes)
        finally:
            processes.stop(directory)


def greeting(port: int) -> dict[str, Any]:
    """The INFO line of a port."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as connection,
        connection.makefile("rb") as lines,
    ):
        found: dict[str, Any] = json.loads(lines.readline().removeprefix(b"INFO "))
        return found


SEEN: dict[str, Callable[[Facts], tuple[Any, Any]]] = {
    "server_name": lambda facts: (facts.varz("server_name"), "hub-1"),
    "server_tags": lambda facts: (facts.varz("tags"), ["az:1", "disk:ssd"]),
    "host": lambda facts: (facts.varz("host"), "127.0.0.1"),
    "port": lambda facts: (facts.varz("port"), facts.nodes[0].port),
    "monitoring.host": lambda facts: (facts.varz("http_host"), "127.0.0.1"),
    "monitoring.port": lambda facts: (facts.varz("http_port"), facts.nodes[0].monitoring_port),
    "max_connections": lambda facts: (facts.varz("max_connections"), 100),
    "max_subscriptions": lambda facts: (facts.varz("max_subscriptions"), 1000),
    "max_payload": lambda facts: (facts.varz("max_payload"), 2 * 2**20),
    "jetstream.store_dir": lambda facts: (
        facts.varz("jetstream", "config", "store_dir"),
        str(facts.directory / "streams" / "hub-1" / "jetstream"),
    ),
    "jetstream.max_memory_store": lambda facts: (facts.varz("jetstream", "config", "max_memory"), 64 * 2**20),
    "jetstream.max_file_store": lambda facts: (facts.varz("jetstream", "config", "max_storage"), 2**30),
    "jetstream.domain": lambda facts: (facts.varz("jetstream", "config", "domain"), "hub"),
    "jetstream.sync_interval": lambda facts: (facts.varz("jetstream", "config", "sync_interval"), 5 * 10**9),
    "jetstream.unique_tag": lambda facts: (facts.varz("jetstream", "config", "unique_tag"), "az:"),
    "jetstream.limits.max_ack_pending": lambda facts: (facts.varz("jetstream", "limits", "max_ack_pending"), 5000),
    "jetstream.limits.max_ha_assets": lambda facts: (facts.varz("jetstream", "limits", "max_ha_assets"), 100),
    "jetstream.limits.max_request_batch": lambda facts: (facts.varz("jetstream", "limits", "max_request_batch"), 2000),
    "jetstream.limits.duplicate_window": lambda facts: (
        facts.varz("jetstream", "limits", "max_duplicate_window"),
        3600 * 10**9,
    ),
    "system_account": lambda facts: (facts.varz("system_account"), "SYS"),
    "accounts.*": lambda facts: (set(ask(facts.nodes[0], "/accountz")["accounts"]), {"SYS", "PLAIN", "DATA", "$G"}),
    "tls.cert_file": lambda facts: (facts.varz("tls_required"), True),
    "tls.verify": lambda facts: (facts.varz("tls_verify"), True),
    "cluster.name": lambda facts: (facts.varz("cluster", "name"), "c1"),
    "cluster.host": lambda facts: (facts.varz("cluster", "addr"), "127.0.0.1"),
    "cluster.port": lambda facts: (facts.varz("cluster", "cluster_port"), facts.nodes[0].cluster_port),
    "cluster.routes": lambda facts: (
        {route["remote_name"] for route in ask(facts.nodes[0], "/routez")["routes"]},
        {"hub-2", "hub-3"},
    ),
    "cluster.compression": lambda facts: (
        {route["compression"] for route in ask(facts.nodes[0], "/routez")["routes"]},
        {"s2_fast"},
    ),
    "cluster.tls.cert_file": lambda facts: (facts.varz("cluster", "tls_required"), True),
    "cluster.tls.verify": lambda facts: (facts.varz("cluster", "tls_verify"), True),
    "leafnodes.host": lambda facts: (facts.varz("leaf", "host"), "127.0.0.1"),
    "leafnodes.port": lambda facts: (facts.varz("leaf", "port"), facts.nodes[0].leaf_port),
    "leafnodes.compression": lambda facts: (greeting(facts.nodes[0].leaf_port).get("compression"), "s2_better"),
    "leafnodes.tls.cert_file": lambda facts: (facts.varz("leaf", "tls_required"), True),
    "leafnodes.tls.verify": lambda facts: (facts.varz("leaf", "tls_verify"), True),
}
"""Key path -> what the server says, and what it should."""

ACCOUNT = {
    "max_memory": ("max_memory", 2**20),
    "max_storage": ("max_storage", 100 * 2**20),
    "max_streams": ("max_streams", 10),
    "max_consumers": ("max_consumers", 100),
    "max_ack_pending": ("max_ack_pending", 500),
    "max_bytes_required": ("max_bytes_required", True),
    "memory_max_stream_bytes": ("memory_max_stream_bytes", 512 * 2**10),
    "disk_max_stream_bytes": ("storage_max_stream_bytes", 50 * 2**20),
}
"""Key below accounts.*.jetstream -> its name in the account's info, and what it should be."""

ACTED_OUT = {
    "cluster.user": "test_a_server_with_another_password_does_not_join",
    "cluster.password": "test_a_server_with_another_password_does_not_join",
    "accounts.*.jetstream.enabled": "test_an_account_without_jetstream_has_none",
    "accounts.*.users.*.password": "test_a_user_may_do_what_is_allowed_and_nothing_else",
    "accounts.*.users.*.permissions": "test_a_user_may_do_what_is_allowed_and_nothing_else",
    "accounts.*.users.*.nkey": "test_a_user_with_an_nkey_gets_in",
}


@pytest.mark.covers("002-35", "002-36", "002-42", "002-45", "002-46", "002-47", "002-48", "002-50", "002-51")
@pytest.mark.covers("004-05", "004-06", "004-07", "004-08", "004-11", "004-13", "004-15", "004-18", "004-19")
@pytest.mark.covers("004-22", "004-25", "004-31", "004-39", "004-41", "004-42", "004-46", "004-49", "004-50")
@pytest.mark.parametrize("path", SEEN)
def test_the_server_says_what_was_configured(cluster: Facts, path: str) -> None:
    said, configured = SEEN[path](cluster)
    assert said == configured


@pytest.mark.covers("004-12", "004-49", "004-50")
def test_no_setting_is_left_out() -> None:
    shown = [*SEEN, *(f"accounts.*.jetstream.{key}" for key in ACCOUNT), *ACTED_OUT, *SHOWN_ELSEWHERE]
    of_one_kind = (".key_file", ".ca_file")  # no port comes up with another key than its certificate's, or without
    missing = [
        path
        for path in _key_paths(inspect.type_info(Server))
        if not path.endswith(of_one_kind) and not any(path.startswith(known) for known in shown)
    ]
    assert missing == []


def _key_paths(type_: inspect.Type, path: str = "") -> Iterator[str]:
    match type_:
        case inspect.Metadata(type=inside):
            yield from _key_paths(inside, path)
        case inspect.UnionType(types=types):
            for inside in types:
                yield from _key_paths(inside, path)
        case inspect.DictType(value_type=inside):
            yield from _key_paths(inside, f"{path}.*")
        case inspect.StructType(fields=fields):
            for field in fields:
                yield from _key_paths(field.type, f"{path}.{field.name}".lstrip("."))
        case inspect.NoneType():
            pass
        case _:
            yield path


@pytest.fixture(scope="module")
def trust(certificate: Path) -> ssl.SSLContext:
    """Of a client that trusts the servers, and whom they trust."""
    context = ssl.create_default_context(cafile=certificate / "cert.pem")
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    return context


async def connect(facts: Facts, trust: ssl.SSLContext, **login: Any) -> Client:
    return await nats.connect(f"tls://127.0.0.1:{facts.nodes[0].port}", tls=trust, allow_reconnect=False, **login)


def test_a_server_with_another_password_does_not_join(cluster: Facts, trust: ssl.SSLContext) -> None:
    with (
        socket.create_connection(("127.0.0.1", cluster.nodes[0].cluster_port), timeout=PATIENCE_SECONDS) as plain,
        trust.wrap_socket(plain, server_hostname="localhost") as route,
        route.makefile("rb") as lines,
    ):
        lines.readline()
        login = {"user": "route", "pass": "hush/6", "cluster": "c1"}
        route.sendall(b"CONNECT " + json.dumps(login).encode() + b"\r\n")
        assert lines.readline() == b"-ERR 'Authorization Violation'\r\n"


@pytest.mark.covers("001-06", "002-44", "002-45", "002-46", "003-15", "004-35", "004-36", "004-37", "004-38")
@pytest.mark.anyio
async def test_the_account_has_the_limits_that_were_configured(cluster: Facts, trust: ssl.SSLContext) -> None:
    client = await connect(cluster, trust, user="alice", password="hush-4")
    info = json.loads((await client.request("$JS.API.INFO", timeout=PATIENCE_SECONDS)).data)
    await client.close()
    assert {key: info["limits"][name] for key, (name, _) in ACCOUNT.items()} == {
        key: value for key, (_, value) in ACCOUNT.items()
    }
    assert info["domain"] == "hub"


@pytest.mark.covers("003-15")
@pytest.mark.anyio
async def test_an_account_without_jetstream_has_none(cluster: Facts, trust: ssl.SSLContext) -> None:
    client = await connect(cluster, trust, user="eve", password="hush-3")
    info = json.loads((await client.request("$JS.API.INFO", timeout=PATIENCE_SECONDS)).data)
    await client.close()
    assert info["error"]["err_code"] == 10039


@pytest.mark.covers("001-06", "003-02", "004-51")
@pytest.mark.anyio
async def test_a_user_may_do_what_is_allowed_and_nothing_else(cluster: Facts, trust: ssl.SSLContext) -> None:
    refused: list[str] = []

    async def note(error: Exception) -> None:
        refused.append(str(error))

    client = await connect(cluster, trust, user="alice", password="hush-4", error_cb=note)
    heard = await client.subscribe("data.a")
    for subject in ("data.a", "data.not", "other"):
        await client.publish(subject, b"")
    for subject in ("data.not", "other"):
        await client.subscribe(subject)
    assert (await heard.next_msg(timeout=PATIENCE_SECONDS)).subject == "data.a"
    asked = await client.subscribe("data.question")
    bob = await connect(cluster, trust, nkeys_seed_str=SEED.decode())
    answer = asyncio.create_task(bob.request("data.question", timeout=PATIENCE_SECONDS, old_style=True))
    await (await asked.next_msg(timeout=PATIENCE_SECONDS)).respond(b"yes")
    assert (await answer).data == b"yes"
    await flushed(client)
    await client.close()
    await bob.close()
    assert sorted(line.partition("ermissions ")[2].lower() for line in refused) == [
        'violation for publish to "data.not"',
        'violation for publish to "other"',
        'violation for subscription to "data.not"',
        'violation for subscription to "other"',
    ]


@pytest.mark.anyio
async def test_a_user_with_an_nkey_gets_in(cluster: Facts, trust: ssl.SSLContext) -> None:
    client = await connect(cluster, trust, nkeys_seed_str=SEED.decode())
    await client.publish("other", b"")
    await flushed(client)
    await client.close()


@pytest.mark.covers("002-82")
def test_what_is_not_configurable_is_off(cluster: Facts) -> None:
    assert [cluster.varz(key) for key in ("mqtt", "websocket", "gateway")] == [{}, {}, {}]


@pytest.mark.covers("004-10", "004-44")
def test_streams_may_be_compressed(cluster: Facts) -> None:
    assert cluster.varz("jetstream", "config", "compress_ok") is True


def test_no_secret_is_in_a_log_in_arguments_or_in_a_file_that_others_may_read(cluster: Facts) -> None:
    for node in cluster.nodes:
        arguments = Path(f"/proc/{node.pid}/cmdline")
        texts = [node.log, msgspec.json.encode(ask(node, "/varz")).decode()]
        texts += [arguments.read_text()] if arguments.exists() else []
        files = [file for file in node.directory.glob("*") if file.is_file() and file.stat().st_mode & 0o077]
        texts += [file.read_text() for file in files]
        assert [secret for secret in SECRETS for text in texts if secret in text] == []
        assert all(secret in (node.directory / "nats-server.conf").read_text() for secret in SECRETS)


@pytest.mark.covers("002-35", "002-49", "004-09", "004-16")
def test_flushing_every_write_arrives(load: Load, start: Start) -> None:
    (node,) = start(load("port: 0\nmonitoring: {port: 0}\njetstream: {sync_always: true}"))
    assert ask(node, "/jsz")["config"]["sync_always"] is True


@pytest.mark.covers("004-17")
def test_a_leaf_node_joins_with_its_account(load: Load, start: Start, certificate: Path) -> None:
    files = f"cert_file: {certificate}/cert.pem, key_file: {certificate}/key.pem"
    hub_config = load(
        f"""
        server_name: hub
        port: 0
        monitoring: {{port: 0}}
        accounts: {{HUB: {{users: {{leaf: {{password: "hush:1"}}}}}}}}
        leafnodes: {{port: 0, tls: {{{files}}}}}
        """
    )
    (hub,) = start(hub_config, directory="hub")
    leaf_config = load(
        f"""
        server_name: leaf
        port: 0
        monitoring: {{port: 0}}
        accounts: {{LOCAL: {{}}}}
        leafnodes:
          compression: s2_best
          remotes:
            up:
              urls: ["localhost:{hub.leaf_port}"]
              account: LOCAL
              user: leaf
              password: "hush:1"
              ca_file: {certificate}/cert.pem
        """
    )
    (leaf,) = start(leaf_config, directory="leaf")
    assert processes.eventually(lambda: ask(leaf, "/leafz")["leafnodes"] == 1, PATIENCE_SECONDS), (
        f"{leaf.log}\n{hub.log}"
    )
    (at_leaf,), (at_hub,) = ask(leaf, "/leafz")["leafs"], ask(hub, "/leafz")["leafs"]
    assert (at_leaf["account"], at_leaf["name"], at_leaf["is_spoke"]) == ("LOCAL", "hub", True)
    assert (at_hub["account"], at_hub["name"]) == ("HUB", "leaf")
    assert "hush" not in leaf.log + hub.log
