"""What our commands say of streams, consumers and the account equals what `nats ... --json` says, field by field.

The streams and consumers are drawn at random from all that a server takes, from the same seed in each run.
"""

from __future__ import annotations

import base64
import io
import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import nats
import pytest
from nats.aio.client import Client

from aviso_workers import cli
from aviso_workers.server import NatsServer
from tests.interop.nats_cli import Shell, differences, successful
from tests.waits import PATIENCE_SECONDS, flushed

SEED = 9
STREAMS, CONSUMERS = 40, 100
DAY = 86_400_000_000_000

STREAM_CHOICES: dict[str, list[Any]] = {
    "retention": ["limits", "interest", "workqueue"],
    "storage": ["file", "memory"],
    "discard": ["old", "new"],
    "discard_new_per_subject": [True],
    "compression": ["none", "s2"],
    "max_msgs": [-1, 1, 1000],
    "max_bytes": [-1, 1_000_000],
    "max_age": [0, DAY],
    "max_msg_size": [-1, 2000],
    "max_msgs_per_subject": [-1, 1, 5],
    "max_consumers": [-1, 20],
    "duplicate_window": [0, 1_000_000_000, 120_000_000_000],
    "description": ["Fields that have arrived"],
    "metadata": [{"owner": "operations", "site": "Bologna"}],
    "no_ack": [True],
    "allow_rollup_hdrs": [True],
    "deny_delete": [True],
    "deny_purge": [True],
    "allow_direct": [True],
    "allow_msg_ttl": [True],
    "subject_delete_marker_ttl": [60_000_000_000],
    "allow_msg_counter": [True],
    "allow_atomic": [True],
    "allow_batched": [True],
    "allow_msg_schedules": [True],
    "persist_mode": ["default", "async"],
    "first_seq": [7],
    "consumer_limits": [{"inactive_threshold": DAY, "max_ack_pending": 500}],
    "republish": [{"src": "{name}.>", "dest": "again.{name}.>", "headers_only": True}],
    "subject_transform": [{"src": "{name}.a.*", "dest": "{name}.b.{{wildcard(1)}}"}],
    "mirror": [{"name": "ORIGIN"}, {"name": "ORIGIN", "filter_subject": "ORIGIN.a.>", "opt_start_seq": 2}],
    "sources": [[{"name": "ORIGIN", "opt_start_time": "2026-01-01T00:00:00Z"}, {"name": "SECOND"}]],
    "placement": [{"tags": []}],
}
CONSUMER_CHOICES: dict[str, list[Any]] = {
    "ack_policy": ["none", "all", "explicit"],
    "deliver_policy": ["all", "last", "new", "by_start_sequence", "by_start_time", "last_per_subject"],
    "replay_policy": ["instant", "original"],
    "description": ["Reads what is new"],
    "ack_wait": [5_000_000_000, 60_000_000_000],
    "max_deliver": [-1, 7],
    "backoff": [[1_000_000_000, 5_000_000_000]],
    "filter_subject": ["{name}.a.>"],
    "filter_subjects": [["{name}.a.>", "{name}.b.>"]],
    "sample_freq": ["50%"],
    "rate_limit_bps": [1_000_000],
    "max_waiting": [10],
    "max_ack_pending": [-1, 3],
    "headers_only": [True],
    "max_batch": [100],
    "max_expires": [10_000_000_000],
    "max_bytes": [100_000],
    "inactive_threshold": [DAY],
    "mem_storage": [True],
    "metadata": [{"app": "fields"}],
    "num_replicas": [0, 1],
    "deliver_subject": ["to.{name}"],
    "deliver_group": ["group"],
    "flow_control": [True],
    "idle_heartbeat": [5_000_000_000],
    "pause_until": ["2030-01-01T00:00:00Z"],
    "priority_groups": [["one"]],
    "priority_policy": ["overflow", "pinned_client", "prioritized"],
    "priority_timeout": [60_000_000_000],
}
NEEDED: dict[str, dict[str, Any]] = {
    "by_start_sequence": {"opt_start_seq": 2},
    "by_start_time": {"opt_start_time": "2026-01-01T00:00:00Z"},
    "idle_heartbeat": {"deliver_subject": "to.x"},
    "flow_control": {"idle_heartbeat": 5_000_000_000, "deliver_subject": "to.x"},
    "deliver_group": {"deliver_subject": "to.x"},
    "rate_limit_bps": {"deliver_subject": "to.x"},
    "backoff": {"max_deliver": 7},
    "pinned_client": {"priority_groups": ["one"], "ack_policy": "explicit"},
    "overflow": {"priority_groups": ["one"], "ack_policy": "explicit"},
    "prioritized": {"priority_groups": ["one"], "ack_policy": "explicit"},
    "discard_new_per_subject": {"discard": "new", "max_msgs_per_subject": 5},
    "subject_delete_marker_ttl": {"allow_msg_ttl": True, "allow_rollup_hdrs": True, "deny_purge": False},
    "allow_msg_schedules": {"allow_rollup_hdrs": True},
}
"""What else a server wants of who chooses that."""

MOVES = frozenset({"ts", "last_active", "active", "pinned_ts", "pause_remaining", "inactive_remaining"})
"""What is another one at each look."""


def drawn(chance: random.Random, choices: dict[str, list[Any]], few: int, name: str) -> dict[str, Any]:
    """Return a configuration with some of the choices, and what those need."""
    chosen: dict[str, Any] = {}
    for field in chance.sample(sorted(choices), chance.randint(1, few)):
        value = chance.choice(choices[field])
        chosen |= {field: value, **NEEDED.get(field, {})}
        chosen |= NEEDED.get(value, {}) if isinstance(value, str) else {}
    whole: dict[str, Any] = json.loads(json.dumps(chosen).replace("{name}", name))
    return whole


async def made(nc: Client, subject: str, request: dict[str, Any]) -> bool:
    answer = json.loads(
        (await nc.request(f"$JS.API.{subject}", json.dumps(request).encode(), timeout=PATIENCE_SECONDS)).data
    )
    return "error" not in answer


async def make_all(url: str) -> dict[str, list[str]]:
    """Make streams and consumers, publish, deliver, settle and delete; return the consumers by stream."""
    chance = random.Random(SEED)
    nc = await nats.connect(url)
    js = nc.jetstream()
    for origin in ("ORIGIN", "SECOND"):
        assert await made(
            nc, f"STREAM.CREATE.{origin}", {"name": origin, "subjects": [f"{origin}.>"], "storage": "memory"}
        )
        for number in range(5):
            await js.publish(f"{origin}.a.{number}", b"of the origin")
    consumers: dict[str, list[str]] = {"ORIGIN": [], "SECOND": []}
    while len(consumers) < STREAMS:
        name = f"S{len(consumers)}"
        wanted = drawn(chance, STREAM_CHOICES, 8, name)
        whole = {
            "name": name,
            "storage": "memory",
            **({} if "mirror" in wanted else {"subjects": [f"{name}.>"]}),
            **wanted,
        }
        if await made(nc, f"STREAM.CREATE.{name}", whole):
            consumers[name] = []
    number = 0
    while sum(map(len, consumers.values())) < CONSUMERS:
        number += 1
        stream, name = chance.choice(sorted(consumers)), f"C{number}"
        wanted = {"ack_policy": "explicit", **drawn(chance, CONSUMER_CHOICES, 7, stream), "durable_name": name}
        request = {"stream_name": stream, "config": wanted, "action": "create"}
        if await made(nc, f"CONSUMER.CREATE.{stream}.{name}", request):
            consumers[stream].append(name)
    for stream in consumers:
        for each in range(8):
            headers = {"Nats-Incr": "+2"} if each == 7 else {"Nats-Msg-Id": f"{stream}{each}"}
            await nc.publish(
                f"{stream}.{'ab'[each % 2]}.{each}", b"" if each == 7 else b"x" * each * 10, headers=headers
            )
        await flushed(nc)
        await made(nc, f"STREAM.MSG.DELETE.{stream}", {"seq": 3})
        await made(nc, f"STREAM.MSG.DELETE.{stream}", {"seq": 4})
    for stream, names in consumers.items():
        for name in names:
            await deliver_some(nc, stream, name)
    await nc.drain()
    return consumers


async def deliver_some(nc: Client, stream: str, name: str) -> None:
    """Take three messages: settle one, give one back, and keep one."""
    inbox = nc.new_inbox()
    heard = await nc.subscribe(inbox)
    request = {"batch": 3, "no_wait": True, "group": "one"}
    await nc.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}", json.dumps(request).encode(), reply=inbox)
    taken: list[Any] = []
    try:
        with anyio.fail_after(0.2):
            while len(taken) < 3:
                taken.append(await heard.next_msg(timeout=0.2))
    except (TimeoutError, nats.errors.TimeoutError):
        pass
    for msg, answer in zip((msg for msg in taken if msg.reply), (b"+ACK", b"-NAK"), strict=False):
        await nc.publish(msg.reply, answer)
    await heard.unsubscribe()
    await flushed(nc)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer.start(store_dir=tmp_path_factory.mktemp("jetstream")) as server:
        yield server


@pytest.fixture(scope="module")
def consumers(server: NatsServer) -> dict[str, list[str]]:
    return anyio.run(make_all, server.url)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, server: NatsServer) -> Shell:
    shell = Shell(tmp_path_factory.mktemp("home"))
    successful(shell.nats("context", "add", "here", "--server", server.url, "--select"))
    return shell


@pytest.fixture
def ours(shell: Shell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`ours("streams", "ls")`: what the command prints, run in this process by the context."""
    for name in os.environ.keys() - shell.environ.keys():
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", shell.environ["XDG_CONFIG_HOME"])
    monkeypatch.chdir(shell.home)

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["aviso-workers", *arguments, "--context", "here"])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
        with pytest.raises(SystemExit):
            cli.main()
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return run


def rows(listed: str) -> list[dict[str, Any]]:
    """Return the rows that our command line has listed with `--json`."""
    return [json.loads(line) for line in listed.splitlines()]


def settled(document: Any) -> Any:
    """Return the document without what is another one at each look."""
    if isinstance(document, dict):
        return {key: settled(value) for key, value in document.items() if key not in MOVES}
    if isinstance(document, list):
        return [settled(value) for value in document]
    return document


def test_streams(shell: Shell, ours: Callable[..., str], consumers: dict[str, list[str]]) -> None:
    assert sorted(shell.nats_json("stream", "ls", "--all", "--json")) == sorted(consumers)
    assert sorted(row["stream"] for row in rows(ours("streams", "ls", "--json"))) == sorted(consumers)
    for stream in consumers:
        said, theirs = (
            json.loads(ours("streams", "info", stream, "--json")),
            shell.nats_json("stream", "info", stream, "--json"),
        )
        said.pop("type")
        for source in (*said.get("sources", ()), said.get("mirror", {})):
            source.pop("seq", None)  # how far a source is: a nats-server 2.15 tells it, and natscli 0.5.1 leaves it out
        for told in (said, theirs):
            told.get("sources", []).sort(key=lambda source: source["name"])  # a server tells them in any order
        assert differences(settled(said), settled(theirs)) == [], stream


def test_consumers(shell: Shell, ours: Callable[..., str], consumers: dict[str, list[str]]) -> None:
    for stream, names in consumers.items():
        assert sorted(
            row["consumer"] for row in rows(ours("consumers", "ls", stream, "--seconds", "0.1", "--json"))
        ) == sorted(names)
        for name in names:
            theirs = shell.nats_json("consumer", "info", stream, name, "--json")
            said = json.loads(ours("consumers", "show", stream, name, "--json"))
            said.pop("type")
            assert differences(settled(said), settled(theirs)) == [], (stream, name)


def test_reports_of_streams(shell: Shell, ours: Callable[..., str], consumers: dict[str, list[str]]) -> None:
    told = [json.loads(line) for line in ours("report", "streams", "--seconds", "0.1", "--json").splitlines()]
    by_name = {row["stream"]: row for row in told if "stream" in row}
    assert by_name.keys() == consumers.keys()
    for name, row in by_name.items():
        theirs = shell.nats_json("stream", "state", name, "--json")["state"]
        fields = {"messages": "messages", "bytes": "bytes", "deleted": "num_deleted", "consumers": "consumer_count"}
        assert {key: row[key] for key in fields} == {key: theirs.get(field, 0) for key, field in fields.items()}, name


def test_reports_of_consumers(shell: Shell, ours: Callable[..., str], consumers: dict[str, list[str]]) -> None:
    told = [json.loads(line) for line in ours("consumers", "ls", "--seconds", "0.1", "--json").splitlines()]
    assert {(row["stream"], row["consumer"]) for row in told} == {
        (stream, name) for stream, names in consumers.items() for name in names
    }
    for row in told:
        theirs = shell.nats_json("consumer", "info", row["stream"], row["consumer"], "--json")
        fields = {"pending": "num_pending", "ack_pending": "num_ack_pending", "redelivered": "num_redelivered"}
        assert {key: row[key] for key in fields} == {key: theirs.get(field, 0) for key, field in fields.items()}, row
        assert row["deliveries"] == theirs["delivered"]["consumer_seq"], row
        assert row["paused"] == bool(theirs.get("paused")), row


def test_gaps(shell: Shell, ours: Callable[..., str], consumers: dict[str, list[str]]) -> None:
    compared = 0
    for stream in consumers:
        found = shell.nats("stream", "gaps", stream, "--json", "--force")
        if found.returncode != 0:
            continue  # it reads the whole stream by a consumer, which a work queue does not take
        theirs, _ = json.JSONDecoder().raw_decode(found.stdout)
        ranges = [[row["first"], row["last"]] for row in rows(ours("streams", "gaps", stream, "--json"))]
        assert ranges == list(theirs or ()), stream
        compared += bool(ranges)
    assert compared >= 10


def test_messages(shell: Shell, ours: Callable[..., str], consumers: dict[str, list[str]]) -> None:
    compared = 0
    for stream in consumers:
        state = shell.nats_json("stream", "state", stream, "--json")["state"]
        if not state["messages"]:
            continue
        said = json.loads(ours("streams", "get", stream, str(state["last_seq"])))
        theirs = shell.nats_json("stream", "get", stream, str(state["last_seq"]), "--json")
        assert (said["subject"], said["sequence"], said["time"]) == (theirs["subject"], theirs["seq"], theirs["time"])
        assert said["data"].encode() == base64.b64decode(theirs.get("data") or "")
        wire = "".join(f"{name}: {value}\r\n" for name, value in said["headers"].items())
        assert base64.b64decode(theirs.get("hdrs") or "").decode() == (f"NATS/1.0\r\n{wire}\r\n" if wire else "")
        compared += 1
    assert compared >= 20


def test_the_account(shell: Shell, ours: Callable[..., str], consumers: dict[str, list[str]]) -> None:
    said = {row["what"]: (row["used"], row["limit"]) for row in rows(ours("report", "account", "--json"))}
    theirs = successful(shell.nats("account", "info"))
    told = dict(re.findall(r"^ *(Streams|Consumers): ([0-9]+)$", theirs, flags=re.MULTILINE))
    consumed, _ = said["consumers; the limit is for each stream"]
    assert {"Streams": str(said["streams"][0]), "Consumers": str(consumed)} == told
    reserved = dict(re.findall(r"^ *(Memory|Storage): .* of (\S+) \(", theirs, flags=re.MULTILINE))
    assert reserved == {"Memory": "Unlimited", "Storage": "Unlimited"}
    assert (said["bytes in memory"][1], said["bytes on disk"][1]) == (-1, -1)
