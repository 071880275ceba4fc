"""Ten things that go wrong, and which of them `aviso-workers doctor`, `nats server check` and `nats audit` tell of.

docs/operations/nats-cli.md has the table ("Which tool finds which problem"). `nats server check` is asked about the
stream or consumer that is broken, as it comes and with a threshold that fits; the doctor is asked once, and finds it by
itself.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import anyio
import pytest
from msgspec import Struct

from aviso_workers import App, config
from aviso_workers.backends import Administration
from aviso_workers.errors import BackendError
from aviso_workers.server import processes
from aviso_workers.server.processes import Node
from tests.interop.nats_cli import Shell, successful
from tests.ops.doctor.conftest import SECOND, add_consumer, add_stream, publish, pull
from tests.waits import PATIENCE_SECONDS

SERVER = """
notification_backend: {kind: jetstream}
server:
  server_name: n
  port: 0
  monitoring: {port: 0}
  system_account: SYS
  jetstream: {unique_tag: "az:"}
  server_tags: ["az:x"]
  accounts:
    SYS: {users: {sys: {password: sys}}}
    DATA: {users: {data: {password: data}}, jetstream: {max_streams: 6, max_storage: 1Gi}}
"""
OK, WARNING, CRITICAL = 0, 1, 2


class Situation(Struct, frozen=True):
    doctor: tuple[str, str]
    """Code, and where."""
    check: str
    """What `nats server check` is asked."""
    threshold: str
    """What it has to be told besides."""
    by_itself: int = OK
    told: int = CRITICAL


META = "meta --expect 3 --lag-critical 100 --seen-critical 5s"
CONSUMER = "consumer --stream FIELDS --consumer "
SITUATIONS = {
    "a stream is full and refuses what comes": Situation(
        ("JS006", "FULL"), "stream --stream FULL", "--msgs-warn 5 --msgs-critical 2", told=OK
    ),
    "nobody asks for what waits": Situation(
        ("JS030", "FIELDS > nobody"), f"{CONSUMER}nobody", "--unprocessed-critical 5"
    ),
    "nothing is acknowledged any more": Situation(
        ("JS031", "FIELDS > stalled"), f"{CONSUMER}stalled", "--outstanding-ack-critical 4"
    ),
    "deliveries fail again and again": Situation(
        ("JS022", "FIELDS > failing"), f"{CONSUMER}failing", "--redelivery-critical 5"
    ),
    "a push consumer has no listener": Situation(
        ("JS029", "FIELDS > pushed"), f"{CONSUMER}pushed", "--last-delivery-critical 1s"
    ),
    "a consumer was paused and forgotten": Situation(
        ("JS036", "FIELDS > paused"), f"{CONSUMER}paused", "--unprocessed-critical 5"
    ),
    "a work queue has a message that nobody gets": Situation(
        ("JS038", "WORK"),
        "consumer --stream WORK --consumer poisoned",
        "--unprocessed-critical 0 --outstanding-ack-critical 0 --redelivery-critical 0",
        told=OK,
    ),
    "the origin of a mirror is gone": Situation(("JS019", "COPY"), "stream --stream COPY", "--seen-critical 1s"),
    "an account has used up its streams": Situation(
        ("JS039", "account streams"), "jetstream", "--streams-warn 80 --streams-critical 90"
    ),
}


async def break_all(server: Administration) -> None:
    here = {"placement": {"tags": ["az:1"]}}  # not on the server that is killed in the end
    await add_stream(server, "FULL", max_msgs=10, discard="new", **here)
    await publish(server, "FULL", 10)
    await add_stream(server, "FIELDS", **here)
    await publish(server, "FIELDS", 20)
    await add_consumer(server, "FIELDS", "nobody")
    await add_consumer(server, "FIELDS", "stalled", max_ack_pending=5, ack_wait=300 * SECOND)
    await pull(server, "FIELDS", "stalled", 5)
    await add_consumer(server, "FIELDS", "failing", ack_wait=300 * SECOND)
    for _ in range(3):
        for reply in await pull(server, "FIELDS", "failing", 20):
            server.send(reply, b"-NAK")
    await add_consumer(server, "FIELDS", "pushed", deliver_subject="to.nobody")
    await add_consumer(server, "FIELDS", "paused", pause_until="2030-01-01T00:00:00Z")
    await add_stream(server, "WORK", retention="workqueue", **here)
    await publish(server, "WORK", 1)
    await add_consumer(server, "WORK", "poisoned", max_deliver=1, ack_wait=SECOND // 10)
    await pull(server, "WORK", "poisoned", 1)
    await add_stream(server, "ORIGIN", **here)
    await publish(server, "ORIGIN", 3)
    await add_stream(server, "COPY", subjects=None, mirror={"name": "ORIGIN"}, **here)
    await until(server, "COPY", lambda copy: copy["state"]["messages"] == 3)
    await server.api("STREAM.DELETE.ORIGIN")
    await add_stream(server, "THREE", num_replicas=3)
    await lead(server, "THREE", "n-1")
    await add_stream(server, "LAST", **here)


async def lead(server: Administration, stream: str, leader: str) -> None:
    """Have a server lead a stream. One that was elected when the leader before it died has never heard from that one,
    and for minutes reports it as seen 0 s ago, which `nats server check` takes for well.
    """

    with anyio.fail_after(PATIENCE_SECONDS):
        while True:
            with suppress(BackendError):  # while a leader is elected
                if (await server.api(f"STREAM.INFO.{stream}"))["cluster"].get("leader") == leader:
                    return
                await server.api(f"STREAM.LEADER.STEPDOWN.{stream}", {"placement": {"preferred": leader}})
            await anyio.sleep(0.5)


async def until(server: Administration, stream: str, has_come: Callable[[dict[str, Any]], bool]) -> None:
    with anyio.fail_after(PATIENCE_SECONDS):
        while True:
            with suppress(BackendError):
                if has_come(await server.api(f"STREAM.INFO.{stream}")):
                    return
            await anyio.sleep(0.1)


class Broken(Struct, frozen=True):
    nodes: tuple[Node, ...]
    shell: Shell

    def doctor(self) -> dict[str, dict[str, str]]:
        """What it finds wrong, by code and where."""
        monitors = [f"--monitor=http://127.0.0.1:{node.monitoring_port}" for node in self.nodes]
        asked = self.shell.ours("doctor", *monitors, "--seconds", "1", "--format", "json", "--context", "data")
        return {
            check["code"]: {
                finding["where"]: finding["found"]
                for finding in check["findings"]
                if finding["state"] in ("WARN", "FAIL")
            }
            for check in json.loads(asked.stdout)["checks"]
        }

    def doctor_until(self, has_come: Callable[[dict[str, dict[str, str]]], bool]) -> dict[str, dict[str, str]]:
        until = time.monotonic() + PATIENCE_SECONDS
        while not has_come(found := self.doctor()):
            assert time.monotonic() < until, found
        return found

    def check(self, what: str, *, context: str = "data") -> tuple[int, str]:
        asked = self.shell.nats("server", "check", *what.split(), "--context", context)
        return asked.returncode, asked.stdout

    def check_until(self, expected: int, what: str, *, context: str = "data") -> None:
        """Ask again until it is what is expected: a dead server is silent for some seconds before it counts as dead."""
        until = time.monotonic() + PATIENCE_SECONDS
        while (answer := self.check(what, context=context))[0] != expected:
            assert time.monotonic() < until, (what, answer)

    def audit(self) -> set[str]:
        """The codes of what it finds wrong."""
        archive = self.shell.home / "audit.zip"
        options = ("--no-progress", "--no-server-profiles", "--context", "sys")
        successful(self.shell.nats("audit", "gather", "--output", archive, *options))
        found = self.shell.nats("audit", "analyze", archive).stdout.splitlines()
        return {line.split("[")[2].partition("]")[0] for line in found if line.startswith(("[WARN]", "[FAIL]"))}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    """A cluster of three in which all but the last of the ten have happened."""
    directory = tmp_path_factory.mktemp("broken")
    (directory / "server.yaml").write_text(SERVER)
    shell = Shell(directory)
    try:
        nodes = processes.start(config.load(directory / "server.yaml", environ={}), directory=directory, nodes=3)
        urls = ",".join(node.url for node in nodes)
        for name in ("data", "sys"):
            successful(shell.nats("context", "add", name, "--server", urls, "--user", name, "--password", name))
        loaded = config.load(context="data", environ=shell.environ)

        async def use() -> None:
            async with App("breaking", config=loaded) as app:
                await break_all(app.session.admin.administration())

        anyio.run(use)
        yield Broken(nodes, shell)
    finally:
        processes.stop(directory)


@pytest.fixture(scope="module")
def found(broken: Broken) -> dict[str, dict[str, str]]:
    """What the doctor finds once it believes that the origin of the mirror is away: after 30 s of silence."""
    return broken.doctor_until(lambda found: "COPY" in found.get("JS019", {}))


@pytest.mark.parametrize("name", SITUATIONS)
def test_what_each_says(broken: Broken, found: dict[str, dict[str, str]], name: str) -> None:
    situation = SITUATIONS[name]
    code, where = situation.doctor
    assert where in found[code]
    by_itself, said = broken.check(situation.check)
    assert by_itself == situation.by_itself, said
    told, said = broken.check(f"{situation.check} {situation.threshold}")
    assert told == situation.told, said


def test_an_audit_finds_the_full_stream_and_the_server_that_is_down(
    broken: Broken, found: dict[str, dict[str, str]]
) -> None:
    assert broken.audit() == {"JETSTREAM_003"}
    code, said = broken.check(META, context="sys")
    assert code == OK, said
    os.kill(broken.nodes[2].pid, signal.SIGKILL)
    # The stream's leader and the meta leader notice it each in its own time.
    down = broken.doctor_until(
        lambda found: "n-3" in found.get("JS017", {}).get("THREE", "") and "n-3" in found.get("JS044", {})
    )
    assert "FULL" not in down["JS017"]
    broken.check_until(CRITICAL, "jetstream")
    broken.check_until(CRITICAL, "stream --stream THREE --peer-expect 3 --peer-seen-critical 5s")
    broken.check_until(CRITICAL, META, context="sys")
    assert broken.check("connection")[0] != CRITICAL
    assert broken.audit() == {"JETSTREAM_003"}
