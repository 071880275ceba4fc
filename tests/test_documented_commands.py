"""The commands of docs/, typed as they stand there by a reader who has a folder, and a server that is a test's own.

What differs from a page: addresses of servers and paths like /backups are the test's, and so are times and public keys,
which no page can know. A command that runs until Ctrl-C is ended when it does what its page says. Those that are not
run at all are listed with the reason in tests/test_documented_blocks.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import anyio
import nats
import pytest

from _bench import __main__ as bench
from _chaos.postgres import Postgres
from _newcomer import pages
from aviso_workers import App
from aviso_workers.server import NatsServer
from tests import programs
from tests.commands import Command
from tests.documented import EVENT_TYPE, PROJECT, lines, texts
from tests.examples.conftest import EXAMPLES, database, postgres_server
from tests.ops.test_mirrors import Site
from tests.waits import PATIENCE_SECONDS

__all__ = ["database", "postgres_server"]

BIN = Path(sys.executable).parent
DEFAULT_URL = "nats://127.0.0.1:4222"
WEB_SERVER = "http://127.0.0.1:8000"
"""Where the example of a webhook posts to."""
KEY = "a key of a store, which is long enough to be taken for one"
INTERRUPTED = 130
"""The exit code of a command that only shows something, after Ctrl-C."""
PRIVATE = {
    "AVISO_WORKERS_WORKERS__STATUS__PORT": "0",
    "AVISO_WORKERS_SERVER__MONITORING__PORT": "0",
    "AVISO_WORKERS_WORKERS__LOGGING__FORMAT": "json",
}
"""Ports that no other test has, and a log that `Command` reads."""
ANYWHERE = """
server: {port: 0, monitoring: {port: 0}, cluster: {port: 0}, leafnodes: {port: 0}}
"""


CONFIGURATION = texts("docs/tutorial.md", "yaml")[0] + EVENT_TYPE
PUBLISH = texts("docs/tutorial.md", "bash")[2].replace(" --app fields:app", "")


class Reader:
    """Somebody who types what a page says, in a folder of their own."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.instead: dict[str, str] = {}
        """What the page has, and what stands for it here."""
        self.environment = {"HOME": str(folder), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **PRIVATE}

    def write(self, name: str, text: str, *, url: str | None = None) -> None:
        """Write a file of the page, with the address of a server of the test."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(DEFAULT_URL, url or self.url))

    def types(self, commands: str, *, code: int | None = 0) -> str:
        """Type commands in bash, and return what they print. They are to end with this exit code, None with any."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("AVISO", "NATS_"))}
        ran = subprocess.run(
            ["bash", "-c", self.here(commands)],
            cwd=self.folder,
            env={**ours, **self.environment},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert code in (None, ran.returncode), f"{commands}\n{ran.stdout}{ran.stderr}"
        return ran.stdout + ran.stderr

    @contextmanager
    def runs(self, command: str, *, code: int = 0) -> Iterator[Command]:
        """Run a command that ends with Ctrl-C, until the block ends."""
        words = self.here(command).partition("#")[0].split()
        assert words[0] == "aviso-workers"
        running = Command(*words[1:], directory=self.folder, **self.environment)
        try:
            yield running
            assert running.end(signal.SIGINT) == code, running.told
        finally:
            running.close()

    def here(self, commands: str) -> str:
        """Return what the page has with what stands for it here."""
        for there, here in self.instead.items():
            commands = commands.replace(there, here)
        return commands


async def create_streams(url: str, names: Iterable[str]) -> None:
    client = await nats.connect(url)
    for name in names:
        config = json.dumps({"name": name, "subjects": [f"former.{name}"]}).encode()
        answer = await client.request(f"$JS.API.STREAM.CREATE.{name}", config, timeout=PATIENCE_SECONDS)
        assert "config" in json.loads(answer.data)
    await client.close()


@pytest.fixture
def reader(tmp_path: Path, nats_server: NatsServer) -> Reader:
    """A reader of the tutorial, with its files."""
    reader = Reader(tmp_path, nats_server.url)
    reader.write("aviso.yaml", CONFIGURATION)
    reader.write("fields.py", texts("docs/tutorial.md", "python")[0])
    return reader


@pytest.fixture
def other_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer.start(store_dir=tmp_path_factory.mktemp("other")) as server:
        yield server


@pytest.fixture
def with_users(reader: Reader) -> Reader:
    """A reader whose notifications name a person, of whom a table holds something as well."""
    reader.instead = {"/backups": str(reader.folder / "backups")}
    fields = {"class": "StringHandler", "step": "IntHandler", "user": "StringHandler"}
    document = {
        "notification_backend": {"kind": "jetstream", "jetstream": {"nats_url": reader.url}},
        "notification_schema": {
            "mars": {
                "topic": {"base": "mars", "key_order": list(fields)},
                "identifier": {field: {"type": kind, "required": True} for field, kind in fields.items()},
                "storage_policy": {"allow_duplicates": True},
            }
        },
    }
    (reader.folder / "aviso.yaml").write_text(json.dumps(document))

    async def fill() -> None:
        app = App("index", config=reader.folder / "aviso.yaml")
        sums = app.table("sums", int)
        async with app:
            for step in (12, 24, 36):
                await app.notify("mars", {"class": "od", "step": step, "user": "42"})
            await sums.put("42", 3)

    anyio.run(fill)
    return reader


@pytest.mark.slow
def test_the_tutorial(reader: Reader, free_port: int) -> None:
    new, _, publish, mistake, failure, _ = texts("docs/tutorial.md", "bash")
    check, dev = lines("docs/tutorial.md", 1)
    replay, watch = lines("docs/tutorial.md", 5)
    assert "wrote field_index/field_index/agents.py" in reader.types(new)
    reader.write("aviso.yaml", texts("docs/tutorial.md", "yaml")[0], url=f"nats://127.0.0.1:{free_port}")
    assert "no mistakes" in reader.types(check)
    with reader.runs(dev) as running:
        running.until_told("Ready.")
        assert "stored in MARS" in reader.types(publish)
        assert running.lines(1) == ["12 /data/12\n"]
        assert "'2026-11-40'" in reader.types(mistake, code=2)
        reader.types(failure)
        assert "an empty field" in str(running.until("notification.retried"))
        assert reader.types(replay).count('"type"') == 2
        with reader.runs(watch, code=INTERRUPTED) as watching:
            assert ['"mars@1"' in line or '"mars@2"' in line for line in watching.lines(2)] == [True, True]


def test_what_newcomer_types_are_lines_of_the_tutorial() -> None:
    page = pages.read((PROJECT / "docs" / "tutorial.md").read_text())
    typed = [shlex.split(line) for number in range(6) for line in lines("docs/tutorial.md", number)]
    assert [command for command in (page.check, page.dev, page.notify) if command not in typed] == []


@pytest.mark.slow
def test_a_replay_that_is_published_elsewhere(reader: Reader, other_server: NatsServer) -> None:
    reader.write("other.yaml", CONFIGURATION, url=other_server.url)
    reader.types(PUBLISH)
    assert "1 notifications stored" in reader.types(texts("docs/aviso.md", "bash")[0])


@pytest.mark.slow
class TestBackups:
    def test_of_one_stream(self, with_users: Reader) -> None:
        create, ls, verify, drill, increment, restore = lines("docs/backup.md", 0)
        assert "MARS: 3 messages" in with_users.types(create)
        (made,) = (with_users.folder / "backups" / "MARS").glob("2*")
        with_users.instead["20261120T060000.000Z"] = made.name
        assert made.name in with_users.types(ls)
        assert "3 messages" in with_users.types(verify)
        assert "3 messages and 0 consumers restored and compared" in with_users.types(drill)
        assert f"after {made.name}" in with_users.types(increment)
        assert "stream MARS exists" in with_users.types(restore, code=1)
        with_users.types("aviso-workers streams rm MARS --yes")
        assert "3 messages" in with_users.types(restore)

        (since_last, full_every), (scheduled,) = (
            lines("docs/backup/increments.md", 0),
            lines("docs/backup/schedule.md", 0),
        )
        assert "after" in with_users.types(since_last)
        assert "after" in with_users.types(full_every)
        with with_users.runs(scheduled) as running:
            running.until("backup.schedule_started")  # the newest backup is seconds old, so none is made

    def test_of_a_set(self, with_users: Reader) -> None:
        create, restore = lines("docs/backup.md", 1)
        assert "are a set" in with_users.types(create)
        assert "nothing is restored" in with_users.types(restore, code=1)
        with_users.types("aviso-workers streams rm MARS --yes; aviso-workers streams rm KV_index__table__sums --yes")
        assert "MARS" in with_users.types(restore)

    def test_encrypted(self, with_users: Reader) -> None:
        from pyrage import x25519

        _, _, create, verify = lines("docs/backup/encryption.md", 0)
        identity = x25519.Identity.generate()
        with_users.write("backups.key", str(identity))
        with_users.instead["age1..."] = str(identity.to_public())
        with_users.types(create)
        assert "3 messages" in with_users.types(verify)

    def test_what_must_be_forgotten(self, with_users: Reader) -> None:
        with_users.types("aviso-workers backup create --all --to /backups")
        (made,) = (with_users.folder / "backups" / "MARS").glob("2*")
        look, erase, erase_one, erase_with_key = lines("docs/erasing.md", 0)
        assert "nothing was done" in with_users.types(look, code=2)
        erased = with_users.types(erase)
        assert "1 erased, 0 left" in erased
        assert "nothing matches" in with_users.types(erase_one)
        assert "0 left" in with_users.types(erase_with_key)

        records = sorted(with_users.folder.glob("erasure-*.json"))
        with_users.instead["erasure-20261120T060000.123Z.json"] = records[-1].name
        with_users.instead["20261120T060000.000Z"] = made.name
        look, cleanse, *others = lines("docs/backup/forgetting.md", 0)
        with_users.types(look, code=2)
        for command in (cleanse, *others):
            with_users.types(command)
        assert "0 messages" in with_users.types("aviso-workers backup verify /backups")


@pytest.mark.slow
class TestCopies:
    @pytest.fixture(autouse=True)
    def elsewhere(self, with_users: Reader, other_server: NatsServer) -> None:
        text = (with_users.folder / "aviso.yaml").read_text()
        (with_users.folder / "elsewhere.yaml").write_text(text.replace(with_users.url, other_server.url))
        (with_users.folder / "old.yaml").write_text(text)
        (with_users.folder / "new.yaml").write_text(text.replace(with_users.url, other_server.url))

    def test_of_a_fenced_stream(self, with_users: Reader) -> None:
        fence, copy = lines("docs/backup/moving.md", 0)
        with_users.types(fence)
        assert "3 messages" in with_users.types(copy)

    def test_that_follows(self, with_users: Reader) -> None:
        copy, fence = lines("docs/backup/moving.md", 1)
        words = copy.partition("#")[0].split()[1:]
        following = Command(*words, directory=with_users.folder, **with_users.environment)
        try:
            assert "MARS" in following.lines(1)[0]
            with_users.types(fence)
            assert following.end() == 0
        finally:
            following.close()

    def test_to_a_server_with_another_key(self, with_users: Reader) -> None:
        (copy,) = lines("docs/server.md", 4)
        assert "3 messages" in with_users.types(copy)


@pytest.mark.slow
class TestFailover:
    """Of MARS from the hub, where it is published, to the other site, which has the mirror that the page declares."""

    @pytest.fixture
    def sites(self, tmp_path: Path, free_port: int) -> Iterator[tuple[Site, Reader, Reader]]:
        """The hub, a reader who has its configuration, and one who has that of the other site."""
        hub = Site(tmp_path / "hub", jetstream={"domain": "hub"}, leafnodes={"port": free_port})
        remotes = {"hub": {"urls": [f"127.0.0.1:{free_port}"]}}
        other = Site(tmp_path / "other", jetstream={"domain": "other"}, leafnodes={"remotes": remotes})
        hub.start()
        other.start()
        try:
            at_hub, at_other = (Reader(tmp_path / each, site.node.url) for each, site in (("a", hub), ("b", other)))
            at_hub.write("aviso.yaml", CONFIGURATION)
            declared = CONFIGURATION + texts("docs/failover.md", "yaml")[0]
            at_other.write("aviso.yaml", declared)
            at_hub.types(PUBLISH)
            until(lambda: "cannot" not in at_other.types("aviso-workers streams apply", code=None))
            until(lambda: " 1 " in at_other.types("aviso-workers streams ls", code=None))
            yield hub, at_hub, at_other
        finally:
            hub.stop()
            other.stop()

    def test_of_a_site_that_is_there(self, sites: tuple[Site, Reader, Reader]) -> None:
        _, at_hub, at_other = sites
        (report,), (promote,) = (lines("docs/failover.md", number) for number in (0, 1))
        until(lambda: "MARS" in at_other.types(report, code=None))
        assert "MARS" in at_other.types(promote)
        assert "fenced" in at_hub.types(PUBLISH, code=1)

    def test_of_a_site_that_is_lost(self, sites: tuple[Site, Reader, Reader]) -> None:
        hub, at_hub, at_other = sites
        (promote,), (fence,), (look, recover), (drill,) = (lines("docs/failover.md", number) for number in range(2, 6))
        hub.lose()
        at_other.types(promote, code=3)
        hub.start()
        at_hub.write("aviso.yaml", CONFIGURATION, url=hub.node.url)
        at_hub.types(PUBLISH)  # which only the hub has
        assert "is fenced" in at_hub.types(fence)
        until(lambda: "only the origin of MARS has 1 messages" in at_other.types(look, code=None))
        # A publish whose first answer is late is sent again, and found there.
        recovered = r"MARS: (1 messages published|0 messages published, 1 were there already)"
        assert re.search(recovered, at_other.types(recover))
        assert "1000 of 1000 published are stored" in at_other.types(drill)


class TestOperating:
    @pytest.fixture
    def monitored(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
        with NatsServer.start(store_dir=tmp_path_factory.mktemp("monitored"), config="http: 127.0.0.1:-1") as server:
            yield server

    @pytest.mark.slow
    def test_the_doctor(self, reader: Reader, monitored: NatsServer) -> None:
        """It finds that a server for tests is none for production, and says so by its exit code."""
        reader.write("mine.py", texts("docs/tutorial.md", "python")[0])
        (port,) = re.findall(r"Starting http monitor on [\d.]+:(\d+)", monitored.log)
        reader.instead = {f"http://n{number}:8222": f"http://127.0.0.1:{port}" for number in (1, 2, 3)}
        reader.write("aviso.yaml", CONFIGURATION, url=monitored.url)
        reader.instead["/backups"] = str(reader.folder / "backups")
        reader.types(PUBLISH)
        reader.types("aviso-workers backup create mars --to /backups")
        (plain, full), (prometheus, nagios) = (lines("docs/operations/doctor.md", number) for number in (0, 1))
        with ThreadPoolExecutor() as threads:
            asked = {
                command: threads.submit(reader.types, command, code=code)
                for command, code in ((plain, None), (full, 1), (prometheus, 0), (nagios, 2))
            }
        plain, full, _, nagios = (each.result() for each in asked.values())
        assert "JS" in plain
        assert "Losses when a server" in full
        assert "aviso_doctor_check" in (reader.folder / "doctor.prom").read_text()
        assert "CRITICAL" in nagios

    @pytest.mark.slow
    def test_what_shows_how_it_is(self, reader: Reader) -> None:
        top, *others = lines("docs/operations/lag.md", 0)
        reader.types(PUBLISH)
        with ThreadPoolExecutor() as threads, reader.runs(top, code=INTERRUPTED) as running:
            agents, consumers, streams = threads.map(reader.types, others)
            assert running.lines(2)[1].startswith("MARS ")
        assert (agents, consumers) == ("no agents\n", "no consumers\n")
        assert "MARS" in streams
        assert "no stream follows another one" in reader.types(texts("docs/failover.md", "bash")[0])

    @pytest.mark.slow
    def test_streams_that_are_declared(self, reader: Reader) -> None:
        """On the one server of the test, which can have neither three replicas nor a tag."""
        declared, _ = texts("docs/streams.md", "yaml")
        declared = re.sub(r"    (num_replicas|placement): .*\n", "", declared)
        reader.write("aviso.yaml", CONFIGURATION + declared)
        plan, apply, show = lines("docs/streams.md", 0)
        assert re.search(r"^ORDERS +create", reader.types(plan), re.MULTILINE)
        reader.types(apply)
        assert "deny_purge  true" in reader.types(show)

    @pytest.mark.slow
    def test_an_app_that_is_described(self, reader: Reader) -> None:
        reader.write("rides.py", texts("docs/agents/event-types.md", "python")[0])
        as_json, as_yaml = lines("docs/agents/event-types.md", 0)
        reader.types(as_json)
        assert json.loads((reader.folder / "asyncapi.json").read_text())["info"]["version"] == "1.4.0"
        assert "address: ride.{vendor}.{n}" in reader.types(as_yaml)

    @pytest.mark.slow
    def test_the_streams_of_an_app_and_of_former_versions(self, reader: Reader, nats_server: NatsServer) -> None:
        reader.instead = {"mine.agents": "fields"}
        for made in lines("docs/security/apps.md", 0):
            reader.types(made)
        names = reader.types("aviso-workers streams ls")
        assert "aviso_workers_dead_letters__fields" in names
        assert "aviso_workers_schedule__MARS" in names

        *removed, listed, applied, shown = lines("docs/operations/begin-anew.md", 0)
        former = [remove.split()[3] for remove in removed]
        anyio.run(create_streams, nats_server.url, former)
        for remove in removed:
            reader.types(remove)
        left = reader.types(listed).split()
        assert [stream for stream in former if stream in left] == []
        assert "differs" not in reader.types(applied)
        reader.types(shown)

    @pytest.mark.slow
    def test_what_is_rendered(self, reader: Reader) -> None:
        reader.instead = {"/etc/nats": str(reader.folder), "mine.agents": "fields"}
        (role,) = lines("docs/security.md", 0)
        assert "mars.>" in reader.types(role)
        production, one_of_three = texts("docs/server.md", "bash")[1:3]
        reader.write("aviso.yaml", CONFIGURATION + texts("docs/server.md", "yaml")[0])
        rendered = reader.folder / "nats-server.conf"
        reader.types(one_of_three)
        assert '"n1"' in rendered.read_text()
        assert "n3.example.org:6222" in rendered.read_text()
        rendered.unlink()
        reader.environment["AVISO_WORKERS_SERVER__SERVER_NAME"] = "n2"
        reader.types(production)
        assert '"n2"' in rendered.read_text()

    @pytest.mark.slow
    def test_a_cluster(self, reader: Reader) -> None:
        reader.write("aviso.yaml", CONFIGURATION + ANYWHERE)
        start, status, _, reload, stop = lines("docs/server.md", 0)
        try:
            reader.types(start)
            assert reader.types(status).count("ok") == 3
            reader.types(reload)
        finally:
            assert reader.types(stop).count("ended") == 3

    @pytest.mark.slow
    def test_a_server_that_gets_another_key(self, reader: Reader, free_port: int) -> None:
        (rotate,) = lines("docs/server.md", 3)
        start, *_, stop = lines("docs/server.md", 0)
        reader.instead = {"/etc/nats/jetstream.key": str(reader.folder / "jetstream.key"), "--nodes 3": ""}
        encrypted = texts("docs/server.md", "yaml")[3].replace(
            "server:\n", f"server:\n  port: {free_port}\n  monitoring: {{port: 0}}\n"
        )
        document = CONFIGURATION + reader.here(encrypted)
        reader.write("aviso.yaml", document, url=f"nats://127.0.0.1:{free_port}")
        reader.write("old.key", KEY)
        reader.write("jetstream.key", KEY)
        try:
            reader.types(start)
            reader.types(PUBLISH)
            reader.types(stop)
            reader.write("jetstream.key", KEY[::-1])
            assert "MARS" in reader.types(rotate)
            assert "12" in reader.types("aviso-workers replay mars")
        finally:
            reader.types(stop)

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [0, 1])
    def test_workers(self, reader: Reader, number: int) -> None:
        reader.instead = {"mine:app": "fields:app"}
        with reader.runs(*lines("docs/fleets.md", number)) as running:
            running.until("agent.started")

    @pytest.mark.slow
    def test_a_worker_that_is_reloaded(self, reader: Reader, free_port: int) -> None:
        reader.instead = {"mine:app": "fields:app"}
        reader.write("aviso.yaml", CONFIGURATION, url=f"nats://127.0.0.1:{free_port}")
        with reader.runs(*lines("docs/fleets.md", 2)) as running:
            running.until_told("The agents start again when a file changes.")
            reader.types(PUBLISH)
            assert running.lines(1) == ["12 /data/12\n"]

    def test_every_benchmark_is_one_that_there_is(self) -> None:
        typed = [line.partition("#")[0].split()[1:] for line in lines("docs/performance.md", 0)]
        assert [words for words in typed if words[0] not in (*bench.BENCHMARKS, "all")] == []


class TestExamples:
    @pytest.fixture
    def developer(self, tmp_path: Path, free_port: int) -> Callable[[str], Reader]:
        """`developer("completeness")`: a reader in that example's folder, whose `dev` listens on a port of its own."""

        def developer(example: str) -> Reader:
            reader = Reader(tmp_path / example, f"nats://127.0.0.1:{free_port}")
            for file in (EXAMPLES / example).iterdir():
                if file.is_file():
                    reader.write(file.name, file.read_text())
            return reader

        return developer

    @pytest.mark.slow
    def test_completeness(self, developer: Callable[[str], Reader]) -> None:
        reader = developer("completeness")
        (dev, publish), (complete, late) = (lines("docs/examples/completeness.md", number) for number in (0, 1))
        with reader.runs(dev) as running:
            running.until_told("Ready.")
            reader.types(publish)
            until(lambda: "cycle_complete" in reader.types(complete, code=None))
            reader.types(late, code=None)  # of a cycle that is late it is told within a minute

    @pytest.mark.slow
    @pytest.mark.usefixtures("database")
    def test_field_index(self, developer: Callable[[str], Reader], postgres_server: Postgres) -> None:
        programs.find("psql", package="postgresql-client")
        reader = developer("field-index")
        reader.environment |= dict(postgres_server.environment)
        (create, dev), (publish, look) = (lines("docs/examples/field-index.md", number) for number in (0, 1))
        reader.types(create)
        with reader.runs(dev) as running:
            running.until_told("Ready.")
            reader.types(publish)
            until(lambda: "/data/12" in reader.types(look))

    @pytest.mark.slow
    @pytest.mark.usefixtures("database")
    def test_inbox_and_outbox(self, developer: Callable[[str], Reader], postgres_server: Postgres) -> None:
        programs.find("psql", package="postgresql-client")
        reader = developer("inbox-outbox")
        reader.environment |= dict(postgres_server.environment)
        (create, dev), (publish, look, replay) = (lines("docs/examples/inbox-outbox.md", number) for number in (0, 1))
        reader.types(create)
        with reader.runs(dev) as running:
            running.until_told("Ready.")
            reader.types(publish)
            until(lambda: re.search(r"od .* 3$", reader.types(look), re.MULTILINE))
            until(lambda: '"bytes":3' in reader.types(replay, code=None))

    @pytest.mark.slow
    def test_a_webhook_relay(self, developer: Callable[[str], Reader]) -> None:
        reader = developer("webhook-relay")
        dev, publish = lines("docs/examples/webhook-relay.md", 0)
        with web_server() as (url, posted):
            reader.write("aviso.yaml", (reader.folder / "aviso.yaml").read_text().replace(WEB_SERVER, url))
            with reader.runs(dev) as running:
                running.until_told("Ready.")
                reader.types(publish)
                until(lambda: posted)
        assert posted == ["/fields"]

    @pytest.mark.slow
    def test_a_review_of_dead_letters(self, reader: Reader) -> None:
        """Of one that no rule applies to."""
        reader.write("dead_letter_review.py", (EXAMPLES / "dead-letter-review" / "dead_letter_review.py").read_text())
        reader.types("aviso-workers notify mars class=od date=2026-11-20 step=12 --payload 7")
        with reader.runs("aviso-workers worker fields:app") as running:
            running.until("notification.dead_lettered")
        (review,) = texts("docs/examples/dead-letter-review.md", "bash")
        assert re.match(r"keep +1  index_field  mars.od.20261120.12  ", reader.types(review))


def until(holds: Callable[[], object]) -> None:
    """Wait until it holds. Fails where one has waited for too long."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


@contextmanager
def web_server() -> Iterator[tuple[str, list[str]]]:
    """A server that takes what is posted, with the paths that were posted to."""
    posted: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            posted.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", posted
        finally:
            server.shutdown()
            thread.join()
