"""Servers that are broken each in one way."""

from __future__ import annotations

import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from msgspec import structs

from aviso_workers import App
from aviso_workers.config import Config
from aviso_workers.errors import BackendError, UnavailableError
from aviso_workers.jetstream.info import Cluster as Group
from aviso_workers.jetstream.info import Replica, StreamConfig
from aviso_workers.ops.doctor import Scope, State, facts, monitoring_port
from aviso_workers.ops.doctor.facts import Facts
from aviso_workers.server import NatsServer
from aviso_workers.state import own_streams
from tests.ops.conftest import Run
from tests.ops.doctor.conftest import (
    MONITORED,
    Seen,
    add_consumer,
    add_stream,
    between_samples,
    changed,
    examined,
    gathered,
    judged,
    publish,
    served,
    write,
)
from tests.waits import PATIENCE_SECONDS, PROMPT_SECONDS, stand_still

DEAD_LETTERS = own_streams.of_app(own_streams.DEAD_LETTERS, "<app>")
RETRIES = own_streams.of_app(own_streams.RETRIES, "<app>")

ACCOUNTS = """
accounts {
  DATA {
    users [
      {user: alice, password: hush}
      {user: bob, password: hush, permissions: {publish: "$JS.API.>", subscribe: ["_INBOX.>", "$JS.EVENT.>"]}}
    ]
    jetstream {max_file: 1MB, max_mem: 1MB, max_streams: 5, max_consumers: 4}
  }
  TIGHT {
    users [{user: carol, password: hush}]
    jetstream {max_file: 1MB, max_bytes_required: true}
  }
  PLAIN {users [{user: eve, password: hush}]}
}
"""


def jetstream(directory: Path, settings: str) -> str:
    return f"{MONITORED}jetstream {{store_dir: '{directory}', {settings}}}\n"


@contextmanager
def running(directory: Path, settings: str = "") -> Iterator[tuple[Config, str]]:
    """A configuration that names a server of its own, with these settings of JetStream, and its monitoring port."""
    directory.mkdir(exist_ok=True)
    with served(directory, jetstream(directory, settings)) as (server, monitor):
        yield write(directory / "config.yaml", server.url), monitor


async def consume(loaded: Config, stream: str, name: str) -> None:
    async with App("adds", config=loaded) as app:
        await add_consumer(app.session.admin.administration(), stream, name)


async def add(loaded: Config, *names: str, **config: Any) -> None:
    async with App("adding", config=loaded) as app:
        for name in names:
            await add_stream(app.session.admin.administration(), name, **config)


@pytest.fixture(scope="module")
def plain(directory: Path) -> Iterator[Seen]:
    """A server as it comes, but for a limit that no disk has."""
    with running(directory / "plain", "max_file_store: 9000TB") as (loaded, monitor):
        anyio.run(lambda: add(loaded, "MARS", subjects=["mars.>"]))
        yield examined(loaded, monitors=(monitor,))


def test_a_power_cut_of_a_server_as_it_comes(plain: Seen) -> None:
    stands = (
        "all messages are lost if the server's disk fails; "
        "a power cut of its server loses up to 2m of acknowledged messages"
    )
    assert plain.found("JS043") == {"MARS": stands}
    assert plain.state("JS043") is State.WARN
    in_production = structs.replace(plain.facts, scope=structs.replace(plain.facts.scope, production=True))
    assert judged(in_production).state("JS043") is State.FAIL


def test_streams_among_temporary_files(plain: Seen) -> None:
    in_production = structs.replace(plain.facts, scope=structs.replace(plain.facts.scope, production=True))
    (server,) = plain.facts.monitored
    directory = server.varz.jetstream.config.store_dir
    found = judged(in_production).found("JS052")
    assert found == ({server.name: f"store_dir {directory}"} if directory.startswith("/tmp/") else {})


@pytest.mark.covers("004-33")
def test_a_disk_that_is_too_small(plain: Seen) -> None:
    (server,) = plain.facts.monitored
    assert "the server may still store " in plain.found("JS053")[server.name]


def test_a_disk_that_cannot_be_seen_is_not_a_large_one(plain: Seen) -> None:
    """By hand: the server of another machine."""
    assert judged(elsewhere(plain.facts)).state("JS053") is State.SKIP


def test_a_disk_that_is_full(plain: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: what is free."""
    (server,) = plain.facts.monitored
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10**12, used=10**12, free=0))
    full = judged(plain.facts)
    assert full.state("JS053") is State.FAIL
    finding = full.findings("JS053")[server.name]
    assert finding.found.startswith("0 of 1000000000000 bytes are free in ")
    assert "then restart that server. Until the restart, the server refuses messages" in finding.cure, finding


def test_a_server_without_jetstream(plain: Seen) -> None:
    """By hand: servers here have JetStream. test_monitoring_port has what one without it answers."""
    (server,) = plain.facts.monitored
    without = structs.replace(server, without_jetstream=True)
    nobody = {"streams": "STREAM.LIST: nobody answers; is JetStream enabled for this account?"}
    seen = judged(structs.replace(plain.facts, monitored=(without,), unknown=nobody))
    findings = seen.findings("JS044")
    assert findings[server.name].found == "runs without JetStream"
    for where in (server.name, "JetStream's API"):
        assert findings[where].cure.startswith("Set server.jetstream.store_dir")


def test_a_server_that_could_not_write_is_to_be_restarted(plain: Seen) -> None:
    """By hand: what a server said whose disk was full, and says after it was enlarged."""
    (server,) = plain.facts.monitored
    error = "JetStream stream '$G > MARS' write error: write 4.blk: no space left on device"
    shut = judged(structs.replace(plain.facts, monitored=(structs.replace(server, health=error),)))
    finding = shut.findings("JS044")[server.name]
    assert (finding.state, finding.found) == (State.FAIL, error)
    assert "then restart that server" in finding.cure
    assert "two must run" not in finding.cure


def test_a_server_that_has_turned_jetstream_off(plain: Seen, directory: Path) -> None:
    """By hand: what a server of three says whose disk is full. It names its store_dir no more."""
    (server,) = plain.facts.monitored
    off = structs.replace(server, health=monitoring_port.OFF, without_jetstream=True)
    mars = plain.facts.streams["MARS"]
    behind = structs.replace(mars, cluster=Group(leader="n-1", replicas=(Replica(name=server.name),)))
    after = structs.replace(plain.facts.after, streams={"MARS": behind})
    leader = structs.replace(server, varz=structs.replace(server.varz, server_name="n-1"))
    facts = structs.replace(plain.facts, monitored=(off, leader), before=after, after=after)
    seen = judged(facts)
    assert seen.found("JS044")[server.name] == "JetStream is off there; its disk is not known from here"
    assert seen.found("JS017")["MARS"] == f"{server.name} is not current; JetStream is off there"
    for code, where in (("JS044", server.name), ("JS017", "MARS")):
        assert seen.findings(code)[where].cure.startswith(f"Free space on the disk of {server.name} (`df -h` shows it)")
    section = structs.replace(facts.config.server.jetstream, store_dir=directory)
    there = structs.replace(facts.config, server=structs.replace(facts.config.server, jetstream=section))
    told = judged(structs.replace(facts, config=there)).found("JS044")[server.name]
    assert told.endswith(" bytes of its disk are free")
    blind = judged(structs.replace(facts, monitored=())).found("JS017")["MARS"]
    assert blind.endswith(f"is not current; its disk is not known: no monitoring port of {server.name} answers")


def test_a_server_that_has_stored_as_much_as_it_may(tmp_path: Path) -> None:
    with running(tmp_path / "js", "max_file_store: 1MB") as (loaded, monitor):
        anyio.run(lambda: fill(loaded, "MARS", 1_040_000))
        seen = examined(loaded, monitors=(monitor,))
    (finding,) = (each for each in seen.results["JS053"].findings if each.state is State.FAIL)
    assert finding.found.endswith("of the 1048576 bytes that the server may store are used")
    assert "Raise server.jetstream.max_file_store" in finding.cure


async def fill(loaded: Config, stream: str, size: int) -> None:
    async with App("filling", config=loaded) as app:
        server = app.session.admin.administration()
        await add_stream(server, stream)
        await publish(server, stream, 1, size=size)


def elsewhere(facts: Facts) -> Facts:
    (server,) = facts.monitored
    config = structs.replace(server.varz.jetstream.config, store_dir="/nowhere/jetstream", max_storage=2**30)
    varz = structs.replace(server.varz, jetstream=structs.replace(server.varz.jetstream, config=config))
    return structs.replace(facts, monitored=(structs.replace(server, varz=varz),))


@pytest.mark.parametrize(
    ("settings", "state"), [("sync_interval: always", State.PASS), ("sync_interval: 10s", State.WARN)]
)
def test_a_power_cut_of_a_server_that_flushes(tmp_path: Path, settings: str, state: State) -> None:
    with running(tmp_path / "js", f"max_file_store: 1GB, {settings}") as (loaded, monitor):
        anyio.run(lambda: add(loaded, "MARS", subjects=["mars.>"]))
        seen = examined(loaded, monitors=(monitor,), production=True)
    assert seen.state("JS043") is state
    assert seen.state("JS053") is State.PASS


async def gather_hot(loaded: Config, monitor: str) -> Facts:
    async with App("hot", config=loaded) as app:
        server = app.session.admin.administration()
        await add_stream(server, "HOT")
        await add_stream(server, "COLD")
        async with between_samples(server, lambda: publish(server, "HOT", 20)):
            return await gathered(loaded, monitors=(monitor,), seconds=0.5)


def test_a_hot_stream_that_waits_for_the_disk(tmp_path: Path) -> None:
    """A real rate; that it is high is by hand, because a disk may be slow."""
    with running(tmp_path / "js", "sync_interval: always") as (loaded, monitor):
        facts = anyio.run(gather_hot, loaded, monitor)
    assert judged(facts).state("JS054") is State.PASS
    hot = judged(structs.replace(facts, elapsed_seconds=0.01))
    assert hot.found("JS054") == {"HOT": "2000 messages a second, each flushed before its acknowledgement"}


def test_personal_data_on_an_encrypted_disk(tmp_path: Path) -> None:
    with running(tmp_path / "js", "cipher: chacha, key: hush") as (loaded, monitor):
        anyio.run(lambda: add(loaded, "PEOPLE", metadata={"pii": "true"}))
        seen = examined(loaded, monitors=(monitor,))
    assert seen.state("JS055") is State.PASS  # in plain text: test_streams
    assert judged(elsewhere(seen.facts)).state("JS055") is State.SKIP


def test_the_wrong_encryption_key(tmp_path: Path) -> None:
    with running(tmp_path / "js", "cipher: chacha, key: the-right-one") as (loaded, monitor):
        anyio.run(lambda: add(loaded, "MARS", subjects=["mars.>"]))
        assert examined(loaded, monitors=(monitor,)).state("JS042") is State.PASS
    with running(tmp_path / "js", "cipher: chacha, key: another-one") as (loaded, monitor):
        seen = examined(loaded, monitors=(monitor,))
    (server,) = seen.facts.monitored
    found = f"the stream of event type mars does not exist, and {server.name} cannot read it"
    assert seen.found("JS042") == {"MARS": found}
    assert seen.state("JS042") is State.FAIL
    assert "could not be recovered" in "".join(seen.found("JS044").values())
    assert "Stop the server before a worker creates MARS" in seen.findings("JS042")["MARS"].cure
    with running(tmp_path / "js", "cipher: chacha, key: the-right-one") as (loaded, monitor):
        again = examined(loaded, monitors=(monitor,))
    assert (again.state("JS042"), again.state("JS044")) == (State.PASS, State.PASS)


def test_a_consumer_that_its_server_cannot_read(tmp_path: Path) -> None:
    with running(tmp_path / "js", "cipher: chacha, key: hush") as (loaded, monitor):
        anyio.run(lambda: add(loaded, "MARS", subjects=["mars.>"]))
        anyio.run(lambda: consume(loaded, "MARS", "reader"))
        seen = examined(loaded, monitors=(monitor,))
        assert seen.state("JS069") is State.PASS
        assert judged(elsewhere(seen.facts)).state("JS069") is State.SKIP
    (key,) = tmp_path.rglob("obs/reader/meta.key")
    key.write_bytes(bytes(72))
    with running(tmp_path / "js", "cipher: chacha, key: hush") as (loaded, monitor):
        (told,) = examined(loaded, monitors=(monitor,)).found("JS069").values()
    assert told == "1 of 1 streams and 0 of 1 consumers of the store are served; not consumer reader of MARS"


def test_making_a_stream_with_the_wrong_key_erases_the_one_that_cannot_be_read(tmp_path: Path) -> None:
    """Of nats-server 2.15.0; this is why the cure is in such a hurry."""
    with running(tmp_path / "js", "cipher: chacha, key: the-right-one") as (loaded, _):
        anyio.run(lambda: add(loaded, "MARS", subjects=["mars.>"]))
    with running(tmp_path / "js", "cipher: chacha, key: another-one") as (loaded, _):
        assert list(tmp_path.rglob("MARS/meta.inf"))
        with pytest.raises(BackendError, match="10049"):
            anyio.run(lambda: add(loaded, "MARS", subjects=["mars.>"]))
        assert not list(tmp_path.rglob("MARS/meta.inf"))


def test_a_damaged_block(tmp_path: Path) -> None:
    """nats-server 2.15.0 leaves out what it cannot read, and says nothing."""

    async def fill(loaded: Config) -> None:
        async with App("filling", config=loaded) as app:
            server = app.session.admin.administration()
            await add_stream(server, "MARS", subjects=["MARS.>"], max_bytes=10 * 2**20)  # in blocks of 4 MB
            await publish(server, "MARS", 100, size=100_000)

    with running(tmp_path / "js") as (loaded, monitor):
        anyio.run(fill, loaded)
        assert examined(loaded, monitors=(monitor,)).state("JS015") is State.PASS
    block = next(tmp_path.rglob("MARS/msgs/1.blk"))
    content = bytearray(block.read_bytes())
    content[len(content) // 2] ^= 1
    block.write_bytes(content)
    block.with_name("index.db").unlink()  # as after a crash: else the server does not look at the blocks
    with running(tmp_path / "js") as (loaded, monitor):
        seen = examined(loaded, monitors=(monitor,))
    assert seen.found("JS015")["MARS"].endswith("messages are missing between the first and the last")
    assert seen.found("JS044") == {}


def test_a_slow_client_and_too_many_of_them(tmp_path: Path) -> None:
    async def flood(loaded: Config) -> None:
        async with App("flooding", config=loaded) as app:
            server = app.session.admin.administration()
            for _ in range(60):
                server.send("flood", b"x" * 500_000)
            await server.api("INFO")

    with ExitStack() as stack:
        server, monitor = stack.enter_context(served(tmp_path, f"{MONITORED}max_pending: 1MB\nmax_connections: 6\n"))
        loaded = write(tmp_path / "config.yaml", server.url)
        before = examined(loaded, monitors=(monitor,))
        for _ in range(4):
            subscribe(server.port, "quiet", stack)
        subscribe(server.port, "flood", stack)  # and never reads
        anyio.run(flood, loaded)
        seen = examined(loaded, monitors=(monitor,))
    assert before.state("JS056") is State.PASS
    slow, crowded = (finding.found for finding in seen.results["JS056"].findings)
    assert slow == "1 slow clients were cut off within a day, the last one without a name at 127.0.0.1"
    tomorrow = judged(changed(seen.facts, now=seen.facts.now + timedelta(days=1)))
    assert [finding.found for finding in tomorrow.results["JS056"].findings] == [crowded], "one incident is over"
    assert crowded in (
        "5 of 6 connections are used",
        "6 of 6 connections are used",
    )  # the slow one may still be leaving


def subscribe(port: int, subject: str, stack: ExitStack) -> None:
    """A client that has subscribed."""
    client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS))
    client.sendall(f'CONNECT {{"verbose":false}}\r\nSUB {subject} 1\r\nPING\r\n'.encode())
    with client.makefile("rb") as lines:
        while lines.readline() != b"PONG\r\n":
            pass


@pytest.fixture(scope="module")
def accounts(directory: Path) -> Iterator[tuple[str, str]]:
    """A server with several accounts; its URL, and that of its monitoring port."""
    (directory / "accounts").mkdir()
    with served(directory / "accounts", MONITORED + ACCOUNTS) as (server, monitor):
        yield server.url, monitor


@pytest.mark.covers("004-26")
def test_an_account_that_is_nearly_used_up(accounts: tuple[str, str], tmp_path: Path) -> None:
    async def use_up(loaded: Config) -> Facts:
        async def fail() -> None:
            for _ in range(30):
                await server.request("$JS.API.STREAM.INFO.NOT_THERE")

        async with App("using", config=loaded) as app:
            server = app.session.admin.administration()
            for i in range(4):
                await add_stream(server, f"S{i}", max_bytes=250_000 if i < 3 else 100_000)
                await add_consumer(server, f"S{i}", "reader")
            async with between_samples(server, fail):
                return await gathered(loaded, monitors=(accounts[1],), seconds=0.5)

    seen = judged(anyio.run(use_up, write(tmp_path / "config.yaml", accounts[0], user="alice", password="hush")))
    found = seen.found("JS039")
    assert found["account streams"] == "4 of 5 used"
    assert found["account storage"] == "850000 of 1048576 used"
    assert found["account api"].endswith("failed; most often STREAM.INFO.NOT_THERE: stream not found (10059)")
    states = {where: finding.state for where, finding in seen.findings("JS039").items()}
    assert (states["account streams"], states["account storage"]) == (State.WARN, State.WARN)
    assert "account memory" not in found
    assert "account consumers" not in found, "its 4 consumers are in 4 streams, and each may have 4"
    assert seen.found("JS034") == {}


def test_a_stream_with_as_many_consumers_as_the_account_allows(
    accounts: tuple[str, str], tmp_path: Path, run: Run
) -> None:
    loaded = write(tmp_path / "config.yaml", accounts[0], user="alice", password="hush")

    async def use_up() -> None:
        async with App("using", config=loaded) as app:
            server = app.session.admin.administration()
            await add_stream(server, "CROWDED", max_bytes=1000)
            for i in range(4):
                await add_consumer(server, "CROWDED", f"reader{i}")
            with pytest.raises(BackendError, match="maximum consumers limit reached"):
                await add_consumer(server, "CROWDED", "one-more")

    anyio.run(use_up)
    assert examined(loaded).found("JS034") == {"CROWDED": "4 of 4 consumers: the server refuses the next one"}
    assert run("consumers", "rm", "CROWDED", "reader0", "--yes", "-c", tmp_path / "config.yaml").code == 0
    assert examined(loaded).found("JS034") == {}
    assert "consumers; the limit is for each stream" in run("report", "account", "-c", tmp_path / "config.yaml").out


QUESTIONS = {
    "a worker's that retries: how often has this notification failed?": (
        "STREAM.MSG.GET.MARS",
        b'{"last_by_subj": "mars.none"}',
    ),
    "the observer's, before the first dead letter": ("STREAM.INFO.aviso_workers_dead_letters__field", b""),
    "a timer's, before the first order of an operator": ("STREAM.INFO.KV_field__orders", b""),
    "a command's, before the first counter": ("STREAM.INFO.aviso_workers_counters__field", b""),
}


@pytest.mark.parametrize(("subject", "request_body"), QUESTIONS.values(), ids=QUESTIONS)
def test_questions_for_what_is_not_there_are_no_failures(subject: str, request_body: bytes, tmp_path: Path) -> None:
    async def ask(loaded: Config) -> Facts:
        async def ask_for_messages() -> None:
            for _ in range(30):
                await server.request(f"$JS.API.{subject}", request_body)

        async with App("using", config=loaded) as app:
            server = app.session.admin.administration()
            await add_stream(server, "MARS", subjects=["mars.>"])
            async with between_samples(server, ask_for_messages):
                return await gathered(loaded, seconds=0.5)

    with running(tmp_path / "js") as (loaded, _):
        seen = judged(anyio.run(ask, loaded))
    assert seen.facts.after.account.api.errors - seen.facts.before.account.api.errors >= 30
    assert seen.found("JS039") == {}


def test_accounts_with_too_few_limits_and_too_strict_ones(accounts: tuple[str, str], tmp_path: Path) -> None:
    def seen(user: str) -> Seen:
        loaded = write(tmp_path / f"{user}.yaml", accounts[0], user=user, password="hush")
        return examined(loaded, monitors=(accounts[1],), production=True)

    alone = {"account": "one of 2 accounts on this server, without max_streams"}
    assert (seen("alice").state("JS040"), seen("carol").found("JS040")) == (State.PASS, alone)
    assert seen("carol").state("JS039") is State.PASS
    assert seen("alice").state("JS061") is State.PASS
    own = {DEAD_LETTERS, RETRIES, "aviso_workers_schedule__MARS"}
    assert seen("carol").found("JS061").keys() == own


def test_an_account_without_jetstream_is_not_taken_for_a_healthy_one(accounts: tuple[str, str], tmp_path: Path) -> None:
    loaded = write(tmp_path / "config.yaml", accounts[0], user="eve", password="hush")
    seen = examined(loaded, monitors=(accounts[1],))
    assert seen.state("JS044") is State.FAIL
    assert "10039" in seen.found("JS044")["JetStream's API"]
    blind = {code for code, result in seen.results.items() if "streams" in result.check.needs} - {"JS044"}
    assert {seen.state(code) for code in blind} == {State.SKIP}


def test_a_user_who_may_not_ask_which_server_it_is(accounts: tuple[str, str], tmp_path: Path) -> None:
    loaded = write(tmp_path / "config.yaml", accounts[0], user="bob", password="hush")
    seen = examined(loaded, monitors=(accounts[1],))
    assert (seen.facts.server.id, seen.facts.server.name) == ("", "nats-server")
    assert (seen.state("JS044"), seen.state("JS041")) == (State.PASS, State.PASS), "the port that was named is believed"
    assert examined(loaded).state("JS044") is State.SKIP


def test_a_monitoring_port_that_does_not_answer(plain: Seen, free_port: int, tmp_path: Path) -> None:
    with running(tmp_path / "js") as (loaded, _):
        named = examined(loaded, monitors=(f"http://127.0.0.1:{free_port}",))
        by_default = examined(loaded)
    assert named.state("JS044") is State.FAIL
    assert "no answer of a nats-server" in named.found("JS044")[f"http://127.0.0.1:{free_port}"]
    assert by_default.state("JS044") is State.SKIP
    assert by_default.state("JS043") is State.SKIP
    assert any("give --monitor URL" in finding.found for finding in by_default.results["JS043"].findings)


@pytest.mark.slow
def test_monitoring_ports_that_accept_and_say_nothing_are_waited_for_side_by_side(
    plain: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 2 * int(PROMPT_SECONDS)
    monkeypatch.setattr(monitoring_port, "ANSWER_SECONDS", 1.0)
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        monitors = tuple(f"http://127.0.0.1:{each.getsockname()[1]}" for each in silent)
        loaded, _ = stack.enter_context(running(tmp_path / "server"))
        began = time.monotonic()
        seen = examined(loaded, monitors=monitors)
    assert time.monotonic() - began < PROMPT_SECONDS
    assert seen.found("JS044").keys() == set(monitors)


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_server_that_hangs_is_told_of_within_seconds(nats_server: NatsServer, tmp_path: Path) -> None:
    loaded = write(tmp_path / "config.yaml", nats_server.url)
    async with App("the-doctor", config=loaded) as app:
        stand_still(nats_server)
        try:
            with anyio.fail_after(PROMPT_SECONDS), pytest.raises(UnavailableError, match="does not answer"):
                await facts.gather(app.session.admin, app.config, Scope())
        finally:
            nats_server.process.send_signal(signal.SIGCONT)


def test_a_monitoring_port_that_is_named_twice_is_one_server(tmp_path: Path) -> None:
    with running(tmp_path / "js") as (loaded, monitor):
        seen = examined(loaded, monitors=(monitor, f"{monitor.replace('127.0.0.1', 'localhost')}/"))
    assert [server.url for server in seen.facts.monitored] == [monitor]
    assert (seen.state("JS044"), seen.state("JS049")) == (State.PASS, State.PASS)


def test_the_monitoring_port_of_another_server(plain: Seen, tmp_path: Path) -> None:
    (other,) = plain.facts.monitored
    with running(tmp_path / "js") as (loaded, _):
        seen = examined(loaded, monitors=(other.url,))
    assert seen.facts.monitored == ()
    assert f"is the monitoring port of {other.name}" in seen.found("JS044")[other.url]


@pytest.mark.slow
def test_a_server_that_is_not_strict(plain: Seen, tmp_path: Path) -> None:
    """As nats-server 2.11 is by default. A server without users lets everybody purge, which JS047 tells."""
    users = "authorization {users: [{user: alice, password: hush}]}\n"
    denied = "authorization {users: [{user: alice, password: hush, permissions: {publish: {deny: '$JS.API.>'}}}]}\n"
    lax = jetstream(tmp_path / "lax", "strict: false")

    def found(settings: str) -> tuple[State, str]:
        with served(tmp_path / "lax", settings) as (server, monitor):
            loaded = write(tmp_path / "config.yaml", server.url, user="alice", password="hush")
            here, away = (examined(loaded, monitors=monitors).results["JS075"] for monitors in ((monitor,), ()))
        assert here == away
        return away.state, "; ".join(each.found for each in away.findings)

    assert found(lax + users) == (State.WARN, "requests with unknown fields are answered")
    assert found(MONITORED + users) == (State.PASS, "")
    assert found(MONITORED + denied) == (State.SKIP, "the server does not answer a request for the names of streams")
    assert plain.state("JS075") is State.PASS
    assert judged(structs.replace(plain.facts, is_strict=False)).state("JS075") is State.PASS


def test_versions(plain: Seen) -> None:
    """By hand: one version is installed here."""
    assert plain.state("JS041") is State.PASS
    (server,) = plain.facts.monitored
    other = structs.replace(server, varz=structs.replace(server.varz, server_name="n2", version="2.11.4"))
    found = judged(structs.replace(plain.facts, monitored=(server, other))).found("JS041")
    assert found["n2"] == "version 2.11.4 has neither fast batches nor `agents reset`"
    assert "n2 2.11.4" in found["cluster"]


def test_a_stream_that_needs_a_newer_server(plain: Seen) -> None:
    """By hand: one version is installed here."""
    mars = plain.facts.streams["MARS"]
    newer = structs.replace(mars, config=StreamConfig({**mars.config, "metadata": {"_nats.req.level": "9"}}))
    after = structs.replace(plain.facts.after, streams={"MARS": newer})
    assert judged(structs.replace(plain.facts, after=after)).found("JS041") == {
        "MARS": "needs API level 9, and the server has API level 5"
    }
    unknown = {"account": "INFO: permissions violation"}
    assert judged(structs.replace(plain.facts, after=after, unknown=unknown)).state("JS041") is State.SKIP


def test_two_servers_of_one_directory(plain: Seen) -> None:
    """By hand: they would destroy each other's files."""
    assert plain.state("JS049") is State.PASS
    (server,) = plain.facts.monitored
    other = structs.replace(server, varz=structs.replace(server.varz, server_name="n2"))
    found = judged(structs.replace(plain.facts, monitored=(server, other))).found("JS049")
    assert found[f"{server.name} and n2"].startswith("have the same store_dir /")
    elsewhere = structs.replace(other, url="http://n2.example.org:8222")
    assert judged(structs.replace(plain.facts, monitored=(server, elsewhere))).state("JS049") is State.PASS
