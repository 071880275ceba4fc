"""A backup that one command line has made is restored by the other: every message byte for byte, every consumer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from aviso_workers.server import NatsServer
from tests.interop.nats_cli import Shell, differences, successful
from tests.waits import PATIENCE_SECONDS

MESSAGES = 100_000
STREAM = {
    "name": "FIELDS",
    "subjects": ["fields.>"],
    "storage": "file",
    "allow_direct": True,
    "metadata": {"owner": "operations"},
}
CONSUMERS: dict[str, dict[str, Any]] = {
    "reader": {"ack_policy": "explicit", "max_ack_pending": 100},
    "of_one": {"ack_policy": "all", "filter_subject": "fields.1.>", "deliver_policy": "all"},
    "new_only": {"ack_policy": "explicit", "deliver_policy": "new", "metadata": {"app": "fields"}},
    "pushed": {"ack_policy": "none", "deliver_subject": "to.fields", "description": "Nobody listens"},
    "paused": {"ack_policy": "explicit", "pause_until": "2030-01-01T00:00:00Z"},
}
MOVES = frozenset({"ts", "created", "cluster", "pause_remaining", "num_waiting", "type"})
"""What is not part of what a consumer has done."""


async def fill(url: str) -> None:
    """Store the messages, delete some, and let consumers take, settle and keep some."""
    nc = await nats.connect(url, pending_size=-1)
    await ask(nc, "STREAM.CREATE.FIELDS", STREAM)
    for number in range(MESSAGES):
        headers = {"Nats-Msg-Id": str(number), "Parameter": "äß %2E"} if number % 3 else None
        body = bytes([number % 256]) * (number % 50)
        subject = f"fields.{number % 7}.step-{number}"
        if number % 1000 == 999:  # the answer says that it is stored, and all before it
            stored = json.loads((await nc.request(subject, body, headers=headers, timeout=PATIENCE_SECONDS)).data)
            assert stored.get("seq") == number + 1, stored
        else:
            await nc.publish(subject, body, headers=headers)
    for sequence in (1, 2, 77, 50_000, MESSAGES - 1):
        await ask(nc, "STREAM.MSG.DELETE.FIELDS", {"seq": sequence})
    for name, config in CONSUMERS.items():
        request = {"stream_name": "FIELDS", "config": {"durable_name": name, "name": name, **config}}
        await ask(
            nc,
            f"CONSUMER.CREATE.FIELDS.{name}"
            if "filter_subject" not in config
            else f"CONSUMER.CREATE.FIELDS.{name}.{config['filter_subject']}",
            request,
        )
    inbox = nc.new_inbox()
    heard = await nc.subscribe(inbox)
    for name in ("reader", "of_one"):
        await nc.publish(f"$JS.API.CONSUMER.MSG.NEXT.FIELDS.{name}", b'{"batch": 60}', reply=inbox)
        taken = [await heard.next_msg(timeout=PATIENCE_SECONDS) for _ in range(60)]
        for msg in taken[:40:3]:
            await nc.request(msg.reply, b"+ACK", timeout=PATIENCE_SECONDS)  # it is answered once it counts
    await nc.drain()


async def ask(nc: Client, subject: str, request: Any) -> dict[str, Any]:
    answer = await nc.request(f"$JS.API.{subject}", json.dumps(request).encode(), timeout=PATIENCE_SECONDS)
    decoded: dict[str, Any] = json.loads(answer.data)
    assert "error" not in decoded, (subject, decoded)
    return decoded


async def contents(url: str) -> tuple[str, int]:
    """The digest of all messages with their sequences, times, subjects and headers, and how many there are."""
    nc = await nats.connect(url)
    digest, count, all_read = hashlib.sha256(), 0, anyio.Event()
    messages = (await ask(nc, "STREAM.INFO.FIELDS", {}))["state"]["messages"]

    async def add(msg: Msg) -> None:
        nonlocal count
        tokens = msg.reply.split(".")
        for part in (tokens[5], tokens[7], msg.subject, json.dumps(msg.headers or {}, sort_keys=True)):
            digest.update(part.encode() + b"\0")
        digest.update(len(msg.data).to_bytes(4, "big") + msg.data)
        count += 1
        if count == messages:
            all_read.set()

    await nc.subscribe("digest", cb=add, pending_msgs_limit=-1, pending_bytes_limit=-1)
    config = {"deliver_subject": "digest", "ack_policy": "none", "mem_storage": True, "inactive_threshold": 60 * 10**9}
    made = await ask(nc, "CONSUMER.CREATE.FIELDS", {"stream_name": "FIELDS", "config": config})
    with anyio.fail_after(PATIENCE_SECONDS):
        await all_read.wait()
    await ask(nc, f"CONSUMER.DELETE.FIELDS.{made['name']}", {})
    await nc.close()
    return digest.hexdigest(), count


async def state(url: str) -> dict[str, Any]:
    """What the server tells of the stream and its consumers."""
    nc = await nats.connect(url)
    stream = await ask(nc, "STREAM.INFO.FIELDS", {"deleted_details": True})
    told: dict[str, Any] = {"config": stream["config"], "state": stream["state"]}
    for name in CONSUMERS:
        info = await ask(nc, f"CONSUMER.INFO.FIELDS.{name}", {})
        told[name] = {key: value for key, value in info.items() if key not in MOVES}
        for floor in ("delivered", "ack_floor"):
            told[name][floor].pop("last_active", None)  # no server keeps it
    await nc.close()
    return told


async def remove(url: str) -> None:
    nc = await nats.connect(url)
    await ask(nc, "STREAM.DELETE.FIELDS", {})
    await nc.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer.start(store_dir=tmp_path_factory.mktemp("jetstream")) as server:
        anyio.run(fill, server.url)
        yield server


@pytest.fixture(scope="module")
def original(server: NatsServer) -> tuple[dict[str, Any], tuple[str, int]]:
    """What the server tells of the stream, and the digest of its messages, before anything was restored."""
    return anyio.run(state, server.url), anyio.run(contents, server.url)


@pytest.fixture
def shell(tmp_path: Path, server: NatsServer) -> Shell:
    shell = Shell(tmp_path)
    successful(shell.nats("context", "add", "here", "--server", server.url, "--select"))
    return shell


@pytest.mark.parametrize("way", ["nats backup", "nats stream", "ours"])
def test_the_other_restores_it_as_it_was(
    shell: Shell, server: NatsServer, original: tuple[dict[str, Any], tuple[str, int]], way: str
) -> None:
    before, messages = original
    assert messages[1] == MESSAGES - 5
    made = shell.home / "backup"
    match way:
        case "nats backup":
            successful(shell.nats("backup", "stream", "FIELDS", made, "--no-progress"))
        case "nats stream":  # what the same was called before, and still may be
            successful(shell.nats("stream", "backup", "FIELDS", made, "--no-progress"))
        case "ours":
            successful(shell.ours("backup", "create", "FIELDS", "--to", made, "--context", "here"))
            (made,) = made.glob("FIELDS/*")
            successful(shell.nats("backup", "validate", made))
    anyio.run(remove, server.url)
    if way == "ours":
        successful(shell.nats("backup", "restore", "stream", made, "--no-progress"))
    else:
        restored = successful(shell.ours("backup", "restore", made, "--context", "here"))
        assert f"FIELDS: {MESSAGES - 5} messages" in restored
    assert anyio.run(contents, server.url) == messages
    assert differences(anyio.run(state, server.url), before) == []


def test_an_increment_is_refused_and_restored_once_it_was_merged(
    shell: Shell, server: NatsServer, original: tuple[dict[str, Any], tuple[str, int]]
) -> None:
    backups, here = shell.home / "backups", ("--context", "here")
    successful(shell.ours("backup", "create", "FIELDS", "--to", backups, *here))
    (full,) = backups.glob("FIELDS/*")
    successful(shell.ours("backup", "create", "FIELDS", "--to", backups, "--since", full, *here))
    (increment,) = set(backups.glob("FIELDS/*")) - {full}
    anyio.run(remove, server.url)
    refused = shell.nats("backup", "restore", "stream", increment, "--no-progress")
    assert refused.returncode == 1
    assert not shell.nats_json("stream", "ls", "--json")
    assert "no such file" in refused.stderr
    successful(shell.ours("backup", "merge", increment, "--to", shell.home / "merged"))
    (merged,) = (shell.home / "merged").glob("FIELDS/*")
    successful(shell.nats("backup", "restore", "stream", merged, "--no-progress"))
    assert anyio.run(contents, server.url) == original[1]
