"""Commands that only read: what they ask a server for, as the server tells of it."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import nats
import pytest
from msgspec import Struct
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig, StreamSource

from aviso_workers import cli
from aviso_workers.cli import COMMANDS
from aviso_workers.server import NatsServer
from tests.cli.conftest import Ran
from tests.commands import Command
from tests.conftest import write_mars_config
from tests.waits import PATIENCE_SECONDS

T = TypeVar("T")

APP = """
from aviso_workers import App, Notification

app = App("mine")

@app.agent("mars")
async def act(notification: Notification) -> None: ...

@app.every("1h", singleton=False)
async def tidy() -> None: ...
"""
STORED = 5
READING = {
    "agents ls": ("mine:app", "--seconds", "0.1"),
    "agents retrying": ("mine/act",),
    "agents show": ("mine:app",),
    "backup create": ("--all", "--to", "backups"),
    "backup ls": ("backups",),
    "backup verify": ("backups",),
    "check": ("mine:app",),
    "config asyncapi": ("mine:app",),
    "config event-types": (),
    "config files": (),
    "config schema": (),
    "config show": (),
    "consumers ls": ("ORDERS", "--seconds", "0.1"),
    "consumers show": ("ORDERS", "shipping"),
    "dead-letters ls": (),
    "dead-letters show": ("1",),
    "doctor": ("--app", "mine:app", "--seconds", "0.1"),
    "mirror recover": ("FOLLOWER",),
    "new": ("fields",),
    "replay": ("mars", "--from-id", "1"),
    "report account": (),
    "report notification": ("mars@1", "--seconds", "0.1"),
    "report mirrors": (),
    "report streams": ("--seconds", "0.1"),
    "server render": ("--profile", "development"),
    "server status": (),
    "streams gaps": ("MARS",),
    "streams get": ("MARS", "1"),
    "streams info": ("MARS",),
    "streams ls": (),
    "streams plan": (),
    "streams show": ("mars",),
    "timers ls": ("mine:app",),
}
"""With arguments for a server on which they find something."""
READING_WITHOUT_END = {"top": ("--seconds", "0.1"), "watch": ("mars", "--from-id", "1")}
SHOWING = {
    "agents rm": ("mine",),
    "agents skip": ("mine/act", "--all"),
    "consumers rm": ("ORDERS", "shipping"),
    "delete": ("mars@1",),
    "erase": ("mars", "class=od", "--dry-run"),
    "streams purge": ("ORDERS",),
    "streams rm": ("ORDERS",),
    "streams seal": ("ORDERS",),
    "streams wipe": ("mars",),
    "streams wipe-all": (),
    "timers catch-up": ("mine:app", "tidy", "--from", "2026-01-01T00:00:00Z", "--to", "2026-01-01T02:00:00Z"),
}
"""They change something, and show what it would be where they are not told `--yes`."""
WITHOUT_CONFIG = {"backup ls", "backup verify", "config files", "config schema", "new", "server status"}
WITH_CONSUMERS = {"consumers ls", "doctor", "agents ls", "erase", "replay", "watch"}
"""They read through a consumer that ends by itself."""
CHANGING = {
    "backup cleanse",
    "backup drill",
    "backup merge",
    "backup restore",
    "console",
    "consumers unpin",
    "dead-letters drop",
    "dead-letters retry",
    "dev",
    "mirror drill",
    "mirror fence",
    "mirror promote",
    "mirror unfence",
    "notify",
    "agents pause",
    "agents rename",
    "agents reset",
    "agents resume",
    "agents retry",
    "server reload",
    "server rotate-key",
    "server start",
    "server stop",
    "streams apply",
    "streams copy",
    "streams remove-peer",
    "streams step-down",
    "timers pause",
    "timers resume",
    "timers run",
    "worker",
}
OF_SPARK = {"spark archive", "spark backfill", "spark reconcile", "spark report"}
"""Shown by the tests of Spark, as they need one."""


class Asked(Struct, frozen=True):
    """A request, as the server tells of it."""

    subject: str
    request: dict[str, Any]


class Server:
    """A server with streams that are not as the configuration says, and what it tells of requests."""

    def __init__(self, url: str, directory: Path) -> None:
        self.config = write_mars_config(directory / "config.yaml", url)
        self._advisories: list[dict[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client: Client = self._run(nats.connect(url))
        self._run(self._client.subscribe("$JS.EVENT.ADVISORY.>", cb=self._note))
        self._run(self._fill())

    def asked(self) -> list[Asked]:
        """What was asked since the last time, by others."""
        return self._run(self._asked())

    def held(self) -> dict[str, Any]:
        """The configurations of streams and consumers, and how many messages were ever stored."""
        return self._run(self._held())

    def close(self) -> None:
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_SECONDS)
        self._loop.close()

    def _run(self, task: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(task, self._loop).result(PATIENCE_SECONDS)

    async def _note(self, message: Any) -> None:
        self._advisories.append(json.loads(message.data))

    async def _asked(self) -> list[Asked]:
        mark = json.dumps({"mark": uuid4().hex})
        await self._client.request("$JS.API.INFO", mark.encode())
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:  # a server tells of requests in their order
                if any(mark == each.get("request") for each in self._advisories):
                    break
                await asyncio.sleep(0.01)
        told, self._advisories = self._advisories, []
        return [
            Asked(each["subject"], json.loads(each.get("request") or "{}"))
            for each in told
            if "subject" in each and each.get("request") != mark
        ]

    async def _held(self) -> dict[str, Any]:
        context = self._client.jetstream()
        found: dict[str, Any] = {}
        for stream in await context.streams_info():
            name = stream.config.name or ""
            consumers = await context.consumers_info(name)
            durable = sorted(each.name for each in consumers if each.config.durable_name)
            found[name] = (stream.config, stream.state.messages, stream.state.last_seq, durable)
        await self._asked()
        return found

    async def _fill(self) -> None:
        context = self._client.jetstream()
        await context.add_stream(StreamConfig(name="MARS", subjects=["mars.>"], max_msgs=1000))
        await context.add_stream(StreamConfig(name="ORDERS", subjects=["orders"]))
        await context.add_stream(StreamConfig(name="FOLLOWER", mirror=StreamSource(name="ORDERS")))
        await context.add_consumer("ORDERS", ConsumerConfig(durable_name="shipping", ack_policy=AckPolicy.EXPLICIT))
        for step in range(STORED):
            headers = {"Content-Type": "application/json"}
            await context.publish(f"mars.od.{step}", b'{"n": 1}', headers=headers)
            await context.publish("orders", b"1")
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                if (await context.stream_info("FOLLOWER")).state.messages == STORED:
                    break
                await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("reading")
    with NatsServer.start(store_dir=directory / "jetstream") as started:
        server = Server(started.url, directory)
        yield server
        server.close()


@pytest.fixture
def arguments(server: Server, tmp_path: Path) -> Callable[[str, tuple[str, ...]], list[str | Path]]:
    """`arguments("replay", ("mars",))`: with a configuration that wants another limit and another event type."""
    (tmp_path / "mine.py").write_text(APP)
    document = json.loads(server.config.read_text())
    absent = json.loads(json.dumps(document["notification_schema"]["mars"]).replace('"mars"', '"absent"'))
    document["notification_schema"]["absent"] = absent
    document["notification_backend"]["jetstream"]["max_messages"] = 2
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(document))

    def arguments(command: str, given: tuple[str, ...]) -> list[str | Path]:
        configured: list[str | Path] = [] if command in WITHOUT_CONFIG else ["--config", config]
        return [*command.split(), *given, *configured]

    return arguments


def of_all() -> set[str]:
    """All commands that there are."""

    def below(name: str, command: Any) -> set[str]:
        if not hasattr(command, "commands"):
            return {name}
        return {found for each in command.commands for found in below(f"{name} {each}", command.commands[each])}

    return {found for name in COMMANDS for found in below(name, cli._load(name))}


def require_only_reading(command: str, asked: list[Asked]) -> None:
    consumers = set[str]()
    for each in asked:
        verb, _, rest = each.subject.removeprefix("$JS.API.").partition(".")
        what, _, of = rest.partition(".")
        if verb == "CONSUMER" and what == "CREATE":
            config = each.request["config"]
            assert "durable_name" not in config, each
            consumers.add(config["name"])
        elif verb == "CONSUMER" and what == "DELETE":
            assert of.rpartition(".")[2] in consumers, each
        else:
            assert what in ("", "INFO", "LIST", "NAMES", "MSG", "SNAPSHOT"), each
            assert not of.startswith("DELETE."), each
    assert bool(consumers) <= (command in WITH_CONSUMERS), consumers


def test_every_command_is_known_to_read_or_to_change_something() -> None:
    named = [*READING, *READING_WITHOUT_END, *SHOWING, *CHANGING, *OF_SPARK]
    assert sorted(named) == sorted(of_all())


@pytest.mark.parametrize("command", [*READING, *SHOWING])
def test_it_makes_and_changes_no_stream(
    run: Callable[..., Ran], server: Server, arguments: Callable[..., list[str | Path]], command: str
) -> None:
    if command.startswith("backup") and command != "backup create":
        assert run(*arguments("backup create", READING["backup create"])).code == 0
    before = server.held()
    ran = run(*arguments(command, (READING | SHOWING)[command]))
    assert "Usage:" not in ran.err, ran
    require_only_reading(command, server.asked())
    assert server.held() == before


def test_a_replay_makes_no_stream_that_is_not_there(
    run: Callable[..., Ran], server: Server, arguments: Callable[..., list[str | Path]]
) -> None:
    before = server.held()
    ran = run(*arguments("replay", ("absent", "--from-id", "1")))
    assert (ran.code, ran.out) == (1, ""), ran
    assert "stream ABSENT does not exist" in ran.err
    require_only_reading("replay", server.asked())
    assert server.held() == before


@pytest.mark.parametrize("command", READING_WITHOUT_END)
def test_it_makes_and_changes_no_stream_until_it_is_ended(
    start: Callable[..., Command], server: Server, arguments: Callable[..., list[str | Path]], command: str
) -> None:
    before = server.held()
    reading = start(*arguments(command, READING_WITHOUT_END[command]))
    assert reading.lines(1) != [""], reading.told
    reading.end(signal.SIGINT)
    require_only_reading(command, server.asked())
    assert server.held() == before


def test_a_command_that_changes_a_stream_is_seen(
    run: Callable[..., Ran], server: Server, arguments: Callable[..., list[str | Path]]
) -> None:
    before = server.held()
    assert run(*arguments("streams purge", ("ORDERS", "--yes"))).code == 0
    with pytest.raises(AssertionError, match=r"STREAM\.PURGE\.ORDERS"):
        require_only_reading("streams purge", [each for each in server.asked() if "audit" not in each.subject])
    assert server.held() != before
