"""Buckets of keys: `nats kv` reads and writes ours, and we read and write those that `nats kv` has made."""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import msgspec
import pytest
from anyio.streams.text import TextReceiveStream

from aviso_workers import App, Table, config
from aviso_workers.errors import ConflictError
from aviso_workers.server import NatsServer
from tests.interop.nats_cli import Shell, successful
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

KEYS = {
    "plain": b"text",
    "a.b.c": b"dots",
    "with-dash_and=more/even": b"\xff\x00binary",
    "empty": b"",
    "long": b"x" * 100_000,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer.start(store_dir=tmp_path_factory.mktemp("jetstream")) as server:
        yield server


@pytest.fixture
def shell(tmp_path: Path, server: NatsServer) -> Shell:
    shell = Shell(tmp_path)
    successful(shell.nats("context", "add", "here", "--server", server.url, "--select"))
    return shell


class Place(msgspec.Struct):
    name: str


@pytest.fixture
async def app(server: NatsServer) -> AsyncIterator[App]:
    backend = config.NotificationBackend(
        kind="jetstream", jetstream=config.JetStream(nats_url=config.ServerUrls(server.url))
    )
    app = App("beside", config=config.Config(notification_backend=backend))
    app.table("places", Place)
    async with app:
        yield app


def value(shell: Shell, bucket: str, key: str) -> bytes:
    got = subprocess.run(
        [shell.nats_program, "kv", "get", bucket, key, "--raw"], env=shell.environ, capture_output=True, check=True
    )
    return got.stdout


def names(shell: Shell, bucket: str) -> list[str]:
    return sorted(successful(shell.nats("kv", "ls", bucket)).split())


async def test_nats_reads_a_bucket_of_ours(app: App, shell: Shell) -> None:
    bucket = await app.key_value("ours")
    revisions = {key: await bucket.put(key, content) for key, content in KEYS.items()}
    assert "ours" in successful(shell.nats("kv", "ls", "--names")).split()
    assert names(shell, "ours") == sorted(KEYS)
    for key, content in KEYS.items():
        assert value(shell, "ours", key) == content
    await bucket.delete("plain")
    assert "plain" not in names(shell, "ours")
    assert shell.nats("kv", "get", "ours", "plain").returncode != 0
    shown = successful(shell.nats("kv", "get", "ours", "a.b.c"))
    assert f"revision: {revisions['a.b.c']}" in shown
    history = successful(shell.nats("kv", "history", "ours", "a.b.c"))
    assert "PUT" in history
    assert "DEL" in successful(shell.nats("kv", "history", "ours", "plain"))


async def test_nats_writes_into_a_bucket_of_ours(app: App, shell: Shell) -> None:
    bucket = await app.key_value("written")
    first = await bucket.put("key", b"ours")
    successful(shell.nats("kv", "put", "written", "key", "theirs"))
    entry = await bucket.get("key")
    assert entry is not None
    assert (entry.value, entry.revision, entry.deleted) == (b"theirs", first + 1, False)
    with pytest.raises(ConflictError):
        await bucket.put("key", b"too late", revision=first)
    await bucket.put("key", b"again")
    assert shell.nats("kv", "purge", "written", "key", "--force").returncode != 0, "no message replaces others there"
    successful(shell.nats("kv", "del", "written", "key", "--force"))
    entry = await bucket.get("key")
    assert entry is None or entry.deleted
    assert await bucket.keys() == []
    successful(shell.nats("kv", "create", "written", "key", "made again"))
    assert await bucket.keys() == ["key"]
    assert shell.nats("kv", "create", "written", "key", "is there").returncode != 0


async def test_we_read_and_write_a_bucket_that_nats_has_made(app: App, shell: Shell) -> None:
    successful(shell.nats("kv", "add", "theirs", "--history", "5", "--description", "made by nats"))
    before = shell.nats_json("stream", "info", "KV_theirs", "--json")["config"]
    for key, content in (("one", "1"), ("two", "2"), ("one", "1 again"), ("three", "3")):
        successful(shell.nats("kv", "put", "theirs", key, content))
    successful(shell.nats("kv", "del", "theirs", "two", "--force"))
    bucket = await app.key_value("theirs")
    assert await bucket.keys() == ["one", "three"]
    assert [(entry.key, entry.value) for entry in await bucket.entries()] == [("one", b"1 again"), ("three", b"3")]
    assert await bucket.revision() == 5
    seen = [(entry.key, entry.value, entry.deleted) async for entry in bucket.changes(until=5)]
    assert seen == [
        ("one", b"1", False),
        ("two", b"2", False),
        ("one", b"1 again", False),
        ("three", b"3", False),
        ("two", b"", True),
    ]
    assert await bucket.put("one", b"ours", revision=3) == 6
    assert value(shell, "theirs", "one") == b"ours"
    history = successful(shell.nats("kv", "history", "theirs", "one"))
    assert [line for line in history.splitlines() if "PUT" in line][-1].count("ours") == 1
    assert shell.nats_json("stream", "info", "KV_theirs", "--json")["config"] == before


async def test_both_watch_what_the_other_writes(app: App, shell: Shell) -> None:
    bucket = await app.key_value("watched")
    watch = [shell.nats_program, "kv", "watch", "watched"]
    async with await anyio.open_process(watch, env=shell.environ) as watching:
        assert watching.stdout is not None
        told = TextReceiveStream(watching.stdout)
        with anyio.fail_after(PATIENCE_SECONDS):
            await bucket.put("key", b"of ours")
            assert "PUT watched > key: of ours" in await told.receive()
            await bucket.delete("key")
            line = await told.receive()
        assert "watched > key" in line
        assert "PUT" not in line
        watching.kill()
    successful(shell.nats("kv", "put", "watched", "other", "of theirs"))
    async for entry in bucket.changes("other"):
        assert (entry.value, entry.deleted) == (b"of theirs", False)
        break


async def test_nats_reads_a_table(app: App, shell: Shell) -> None:
    (table,) = app.tables.values()
    assert isinstance(table, Table)
    await table.put("Bologna/1", Place("Tecnopolo"))
    (bucket,) = [name for name in successful(shell.nats("kv", "ls", "--names")).split() if "places" in name]
    (key,) = names(shell, bucket)
    assert json.loads(value(shell, bucket, key)) == {"name": "Tecnopolo"}


async def test_a_key_with_a_lifetime_is_forgotten_on_both_sides(app: App, shell: Shell) -> None:
    bucket = await app.key_value("leases")
    await bucket.put("short", b"x", ttl_seconds=1)
    await bucket.put("long", b"x", ttl_seconds=1000)
    with anyio.fail_after(PATIENCE_SECONDS):
        while await bucket.get("short") is not None:  # noqa: ASYNC110
            await anyio.sleep(0.1)
    assert names(shell, "leases") == ["long"]
    assert await bucket.keys() == ["long"]
