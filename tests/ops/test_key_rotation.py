"""`server rotate-key`: the streams of stopped servers, moved to stores with another key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig, StreamSource

from aviso_workers.errors import ServerProcessError
from aviso_workers.server import processes, store
from aviso_workers.server.processes import Node
from aviso_workers.server.store import Replacement
from tests.ops.conftest import Run
from tests.server.conftest import load_server
from tests.waits import PATIENCE_SECONDS

DIRECTORY = Path("servers")
MARKER = b"a-payload-that-nobody-may-read"
COUNT, FETCHED, ACKED = 200, 60, 40
ANSWER_SECONDS = 10.0
ACCOUNTS = """
accounts:
  A: {users: {alice: {password: hush}}}
  B: {users: {bob: {password: hush}}}
  OFF: {jetstream: {enabled: false}, users: {carol: {password: hush}}}
"""

Configure = Callable[..., Path]


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Configure]:
    """`configure("encryption: {key: a}")`: the configuration file of servers, which end with the test."""
    monkeypatch.chdir(tmp_path)

    def configure(encryption: str, more: str = "") -> Path:
        server = (
            f"server_name: n\nport: 0\nmonitoring: {{port: 0}}\njetstream: {{store_dir: stores, {encryption}}}\n{more}"
        )
        load_server(Path("dev.yaml"), server)
        return Path("dev.yaml")

    yield configure
    for directory in (DIRECTORY, DIRECTORY / "moving" / "old", DIRECTORY / "moving" / "new"):
        processes.stop(directory)


@contextlib.asynccontextmanager
async def connected(node: Node, user: str = "") -> AsyncIterator[Client]:
    client = await nats.connect(node.url, **({"user": user, "password": "hush"} if user else {}))
    try:
        yield client
    finally:
        await client.close()


async def fill(client: Client, *, replicas: int = 1) -> None:
    """Streams of the kinds that a server keeps: used, never written to, emptied, mirrored, short-lived, sealed."""
    context = client.jetstream()
    streams: dict[str, dict[str, Any]] = {
        "DATA": {"num_replicas": replicas, "max_age": 3600.0},
        "ALONE": {},
        "EMPTY": {},
        "PURGED": {},
        "SEALED": {},
    }
    for name, settings in streams.items():
        await context.add_stream(StreamConfig(name=name, subjects=[f"{name}.>"], **settings))
        await context.add_consumer(name, ConsumerConfig(durable_name="reader", ack_policy=AckPolicy.EXPLICIT))
        for i in range(0 if name == "EMPTY" else COUNT):
            await context.publish(f"{name}.{i}", MARKER)
    await context.purge_stream("PURGED")
    await context.update_stream(StreamConfig(name="SEALED", subjects=["SEALED.>"], sealed=True))
    await context.add_stream(StreamConfig(name="A_MIRROR", mirror=StreamSource(name="DATA")))
    await context.add_consumer("DATA", ConsumerConfig(name="passing", inactive_threshold=3600.0))
    reader = await context.pull_subscribe_bind("reader", "DATA")
    fetched: list[Msg] = []
    while len(fetched) < FETCHED:  # one fetch may bring fewer than it asks for
        fetched += await reader.fetch(FETCHED - len(fetched))
    for message in fetched[:ACKED]:
        await message.ack_sync()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if (await context.stream_info("A_MIRROR")).state.messages == COUNT:
                break
            await asyncio.sleep(0.02)


async def listed(client: Client, kind: str, named: str = "") -> list[dict[str, Any]]:
    """The streams, or a stream's consumers, once those that elect a leader, which a list leaves out, are in it."""

    async def answer(request: str) -> list[Any]:
        subject = f"$JS.API.{kind}.{request}{named}"
        answer = json.loads((await client.request(subject, timeout=ANSWER_SECONDS)).data)
        return list(answer[f"{kind.lower()}s"] or ())

    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            # Only the leader of the cluster answers, so nobody does while there is none.
            with contextlib.suppress(nats.errors.TimeoutError):
                infos = await answer("LIST")
                if len(infos) == len(await answer("NAMES")):
                    return infos
            await asyncio.sleep(0.05)


async def held(client: Client) -> dict[str, Any]:
    """What there is: of each stream its messages and last sequence, of each consumer how far it has come."""
    found: dict[str, Any] = {}
    for stream in await listed(client, "STREAM"):
        config, state = stream["config"], stream["state"]
        name = config["name"]
        found[name] = state["messages"], state["last_seq"], config["max_age"], config["sealed"]
        for consumer in await listed(client, "CONSUMER", f".{name}"):
            found[f"{name} > {consumer['name']}"] = (
                consumer["ack_floor"]["stream_seq"],
                consumer["num_ack_pending"],
                consumer["num_pending"],
            )
    return found


def in_files(directory: Path) -> int:
    return sum(file.read_bytes().count(MARKER) for file in directory.rglob("*") if file.is_file())


def started(run: Run, config: Path, *arguments: str) -> list[Node]:
    ran = run("server", "start", "--config", config, "--directory", DIRECTORY, *arguments)
    assert ran.code == 0, ran
    return processes.recorded(DIRECTORY)


def rotate(config: Path, *arguments: str | Path) -> list[str | Path]:
    return ["server", "rotate-key", "--config", config, "--directory", DIRECTORY, *arguments]


def rotated(run: Run, config: Path, *arguments: str | Path) -> list[Node]:
    ran = run(*rotate(config, *arguments))
    assert ran.code == 0, ran
    assert all(state.health == "ok" for state in processes.states(DIRECTORY))
    return processes.recorded(DIRECTORY)


@pytest.mark.slow
def test_streams_of_all_accounts_get_a_first_key_and_another_one(run: Run, configure: Configure) -> None:
    async def fill_accounts(node: Node) -> None:
        async with connected(node, "alice") as client:
            await fill(client)
        async with connected(node, "bob") as client:
            await client.jetstream().add_stream(StreamConfig(name="DATA", subjects=["of.b"]))
            await client.jetstream().publish("of.b", MARKER)
            await client.jetstream().add_stream(StreamConfig(name="INCOMPRESSIBLE", subjects=["noise"]))
            for _ in range(60):  # chunks of S2 that are in several chunks of the snapshot
                await client.jetstream().publish("noise", os.urandom(20_000))

    async def held_by_all(node: Node) -> list[dict[str, Any]]:
        found = []
        for user in ("alice", "bob"):
            async with connected(node, user) as client:
                found.append(await held(client))
        return found

    (node,) = started(run, configure("", ACCOUNTS))
    asyncio.run(fill_accounts(node))
    before = asyncio.run(held_by_all(node))
    assert before[0]["DATA > reader"] == (ACKED, FETCHED - ACKED, COUNT - FETCHED)
    refused = run(*rotate(Path("dev.yaml")))
    assert refused.code == 1
    assert "n in servers: stop workers and publishers, then the servers" in refused.err
    processes.stop(DIRECTORY)

    Path("key").write_text("the first key")
    (node,) = rotated(run, configure("encryption: {key_file: key}", ACCOUNTS))
    assert asyncio.run(held_by_all(node)) == before
    (plain,) = Path("stores").glob("jetstream.previous-*")
    assert in_files(plain) > COUNT
    assert in_files(Path("stores/jetstream")) == 0
    processes.stop(DIRECTORY)

    other = configure("encryption: {key: the second key, cipher: aes}", ACCOUNTS)
    assert "name the file of their key" in run(*rotate(other)).err
    (node,) = rotated(run, other, "--previous-key-file", "key")
    assert asyncio.run(held_by_all(node)) == before
    assert len(list(Path("stores").iterdir())) == 3
    assert not (DIRECTORY / "moving").exists()


def test_a_wrong_previous_key_changes_nothing(run: Run, configure: Configure) -> None:
    async def fill_one(node: Node) -> None:
        async with connected(node) as client:
            await client.jetstream().add_stream(StreamConfig(name="DATA", subjects=["data"]))

    (node,) = started(run, configure("encryption: {key: right}"))
    asyncio.run(fill_one(node))
    processes.stop(DIRECTORY)
    Path("wrong").write_text("wrong")
    config = configure("encryption: {key: other}")
    ran = run(*rotate(config, "--previous-key-file", "wrong"))
    assert ran.code == 1
    assert "could not be recovered" in ran.err
    assert [path.name for path in Path("stores").iterdir()] == ["jetstream"]
    started(run, configure("encryption: {key: right}"))


@pytest.mark.slow
def test_whoever_is_killed_leaves_the_old_store_and_begins_anew(run: Run, configure: Configure) -> None:
    async def work(node: Node, task: Callable[[Client], Any]) -> Any:
        async with connected(node) as client:
            return await task(client)

    Path("key").write_text("the first key")
    (node,) = started(run, configure("encryption: {key_file: key}"))
    asyncio.run(work(node, fill))
    before = asyncio.run(work(node, held))
    processes.stop(DIRECTORY)

    config = configure("encryption: {key: the second key}")
    command = [Path(sys.executable).with_name("aviso-workers"), *rotate(config, "--previous-key-file", "key")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as rotating:
        assert rotating.stderr is not None
        assert any("copied and compared" in line for line in rotating.stderr)
        rotating.send_signal(signal.SIGKILL)
    (node,) = started(run, configure("encryption: {key_file: key}"))
    assert asyncio.run(work(node, held)) == before
    processes.stop(DIRECTORY)

    (node,) = rotated(run, configure("encryption: {key: the second key}"), "--previous-key-file", "key")
    assert asyncio.run(work(node, held)) == before


@pytest.mark.slow
def test_a_cluster_gets_another_key_with_all_replicas(run: Run, configure: Configure) -> None:
    async def fill_cluster(node: Node) -> None:
        async with connected(node) as client:
            await fill(client, replicas=3)

    async def held_by(node: Node) -> dict[str, Any]:
        async with connected(node) as client:
            return await held(client)

    Path("key").write_text("the first key")
    nodes = started(run, configure("encryption: {key_file: key}"), "--nodes", "3")
    asyncio.run(fill_cluster(nodes[0]))
    before = asyncio.run(held_by(nodes[0]))
    processes.stop(DIRECTORY)
    config = configure("encryption: {key: the second key}")
    ran = run(*rotate(config, "--nodes", "3", "--previous-key-file", "key"))
    assert ran.code == 0, ran
    again = f"DATA: consumer reader goes on at its ack floor: up to {FETCHED - ACKED} messages are delivered again"
    assert again in ran.err.splitlines()
    now = asyncio.run(held_by(processes.recorded(DIRECTORY)[1]))
    assert now.pop("DATA > reader") == (ACKED, 0, COUNT - ACKED)
    assert before.pop("DATA > reader") == (ACKED, FETCHED - ACKED, COUNT - FETCHED)
    assert now == before
    assert len(list(Path("stores").glob("*/jetstream.previous-*"))) == 3


@pytest.mark.parametrize("renames", range(4))
def test_a_kill_between_any_two_renames_leaves_the_new_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    replacements = []
    for name in ("n-1", "n-2"):
        place = tmp_path / name
        for side in ("jetstream", "new/jetstream"):
            (place / side).mkdir(parents=True)
            (place / side / "content").write_text(f"{name} {side}")
        replacements.append(
            Replacement(place=place / "jetstream", new=place / "new/jetstream", previous=place / "previous")
        )
    store.begin_swap(tmp_path, replacements)
    rename, left = Path.rename, iter(range(renames))

    def rename_until_killed(path: Path, target: Path) -> Path:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename_until_killed)
        with pytest.raises(KeyboardInterrupt):
            store.finish_swap(tmp_path)
    assert store.finish_swap(tmp_path) == replacements
    assert store.finish_swap(tmp_path) == ()
    for each in replacements:
        name = each.place.parent.name
        assert (each.place / "content").read_text() == f"{name} new/jetstream"
        assert (each.previous / "content").read_text() == f"{name} jetstream"


def test_a_start_takes_the_new_store_where_rotate_key_was_killed_before_it_was_in_place(
    run: Run, configure: Configure
) -> None:
    config = configure("")
    started(run, config)
    processes.stop(DIRECTORY)
    place, new = Path("stores/jetstream"), Path("stores/jetstream.new/jetstream")
    shutil.copytree(place, new)
    (place / "old").touch()
    store.begin_swap(DIRECTORY, [Replacement(place=place, new=new, previous=Path("stores/previous"))])
    ran = run("server", "start", "--config", config, "--directory", DIRECTORY)
    told = "stores/jetstream is the new store, stores/previous the one before: `server rotate-key` was interrupted\n"
    assert (ran.code, ran.err.splitlines(keepends=True)[0]) == (0, told)
    assert not (place / "old").exists()
    assert Path("stores/previous/old").exists()


def test_no_server_is_started_on_stores_that_are_being_moved(configure: Configure) -> None:
    loaded = load_server(configure(""), "port: 0\nmonitoring: {port: 0}")
    with processes.alone(DIRECTORY), pytest.raises(ServerProcessError, match="started, or moved, by another command"):
        processes.start(loaded, directory=DIRECTORY)
