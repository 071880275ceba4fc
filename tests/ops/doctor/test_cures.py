"""Each cure of the doctor, in its situation on a real server: what it prints is run, and then the finding is gone.

A case makes the situation in an account of its own, lets the doctor say the cure, writes the settings that the cure
names, runs the commands that it prints, and lets the doctor look again.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec import Struct, structs

from aviso_workers import config
from aviso_workers.backends import Administration
from aviso_workers.backends.jetstream import JetStreamBackend
from aviso_workers.jetstream.metadata import UNFINISHED
from aviso_workers.ops import health
from aviso_workers.ops.doctor.checks import consumers
from aviso_workers.ops.mirrors import PROMOTED
from aviso_workers.server import NatsServer
from aviso_workers.state import own_streams
from tests.commands import Command
from tests.conftest import Start
from tests.ops.conftest import Run
from tests.ops.doctor.conftest import MONITORED, SECOND, add_consumer, add_stream, publish
from tests.waits import PROMPT_SECONDS

COMMAND = re.compile(r"`aviso-workers ([^`]*)`")
JETSTREAM = "notification_backend.jetstream"
DEAD_LETTERS = own_streams.of_app(own_streams.DEAD_LETTERS, "field")
HOUR = 3600 * SECOND

FIELD = """
from aviso_workers import App, Notification, Notify, RetryPolicy, Tick

app = App("field")


@app.agent("mars", concurrency=16)
async def index(notification: Notification) -> None:
    print("handled", flush=True)


@app.every("1h", singleton=False)
async def tidy(tick: Tick) -> None: ...
"""
DERIVES = """
from aviso_workers import App, Notification, Notify, RetryPolicy

app = App("derives")


@app.agent("mars", retry=RetryPolicy(first=60, factor=2, max=600, attempts=4, jitter=0))
async def derive(notification: Notification) -> Notify | None: ...
"""

REJECTS = """
from aviso_workers import App, Notification, Reject

app = App("field")


@app.agent("mars")
async def index(notification: Notification) -> None:
    print("rejecting", flush=True)
    raise Reject("no such field")
"""
BLOCKED = """
from aviso_workers import App, Notification, RetryPolicy

app = App("field")


@app.agent("mars", order_by=["class"], retry=RetryPolicy(first=0.02, attempts=None))
async def index(notification: Notification) -> None:
    print("failing", flush=True)
    raise ValueError("no such field")
"""
FAILS = """
from pathlib import Path

from aviso_workers import App, Tick

app = App("field")


@app.every("1s", singleton=False)
async def fails(tick: Tick) -> None:
    if not Path("repaired").exists():
        print("failing", flush=True)
        raise RuntimeError("the archive is away")
"""

Step = Callable[[Administration], Awaitable[None]]


class Place(Struct, frozen=True):
    """Where an operator works: a directory with a configuration, for an account of its own on the server."""

    directory: Path
    url: str
    user: str
    run: Run
    start: Start

    @property
    def app(self) -> str:
        """MODULE:APP. A module of the case's own, because each one is imported once in a process."""
        return f"{self.source.stem}:app"

    @property
    def source(self) -> Path:
        return self.directory / f"field_{self.user}.py"

    @property
    def file(self) -> Path:
        return self.directory / "aviso.yaml"

    def write(self, settings: Mapping[str, Any]) -> None:
        """Write settings to the configuration, each by its path."""
        document = json.loads(self.file.read_text()) if self.file.exists() else {}
        for path, value in settings.items():
            *above, name = path.split(".")
            section = document
            for each in above:
                section = section.setdefault(each, {})
            section[name] = value
        self.file.write_text(json.dumps(document))

    def carry_out(self, command: list[str]) -> None:
        """Run a command, and say what it asks to be told. A worker runs on."""
        if command[0] == "worker":
            self.work()
            return
        for word in command:
            if word.endswith("/TIME"):
                (backup,) = (self.directory / word).parent.iterdir()
                command = [str(backup) if each == word else each for each in command]
        ran = self.run(*command)
        for option in ("--workers-stopped", "--yes"):
            if ran.code and option in ran.err:
                command = [*command, option]
                ran = self.run(*command)
        assert ran.code == 0, ran

    def work(self) -> Command:
        return self.start("worker", self.app)

    def findings(self, *options: str) -> Iterator[dict[str, str]]:
        """Yield what the doctor finds that is a WARN or a FAIL."""
        ran = self.run("doctor", "--seconds", "0.1", "--format", "json", *options)
        assert ran.out, ran.err
        for check in json.loads(ran.out)["checks"]:
            for finding in check["findings"]:
                if finding["state"] in ("WARN", "FAIL"):
                    yield {**finding, "code": check["code"]}

    def administer(self, ask: Callable[[Administration], Awaitable[Any]]) -> Any:
        async def connected() -> Any:
            settings = config.load(self.file, environ={}).notification_backend.jetstream
            async with JetStreamBackend(settings) as backend:
                return await ask(backend.administration())

        return anyio.run(connected)


class Case(Struct, frozen=True, kw_only=True):
    """A situation, and how its cure is carried out."""

    code: str
    where: str
    """The place of the finding."""
    given: Mapping[str, Any] = {}
    """Settings before the situation, by their paths."""
    steps: tuple[str | Step, ...] = ()
    """What leads to the situation: commands, and what is done at the server."""
    app: str = ""
    """The source of a module, whose `app` the doctor looks at too."""
    works: bool = False
    """Whether the worker among the steps runs on, which is ended else when it has printed a line."""
    options: tuple[str, ...] = ()
    """Of the doctor."""
    found: str = ""
    """Of several findings at the place, the one that begins so."""
    sets: Mapping[str, Any] = {}
    """Settings that the cure names, by their paths, with values as somebody chooses them."""
    runs: tuple[str, ...] = ()
    """The commands that are run, by how they begin; each is in the cure."""
    words: Mapping[str, str] = {}
    """What somebody writes in place of the words in capitals, for which `{directory}` is that of the case."""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.code, self.where, *self.runs[:1]))).replace(" ", "_")


def agent(settings: Mapping[str, Any] = {}, **of_consumer: Any) -> Callable[[Administration], Awaitable[None]]:
    """The stream of mars, with a message, and the consumer of an agent that no worker has."""

    async def add(server: Administration) -> None:
        await add_stream(server, "MARS", subjects=["mars.>"], **settings)
        await publish(server, "mars", 1)
        await add_consumer(server, "MARS", "field__index", metadata={"aviso-workers-start": "all"}, **of_consumer)

    return add


def stream(name: str, **settings: Any) -> Callable[[Administration], Awaitable[None]]:
    return lambda server: add_stream(server, name, **settings)


def consumer(**settings: Any) -> Callable[[Administration], Awaitable[None]]:
    async def add(server: Administration) -> None:
        await add_stream(server, "OTHER")
        await publish(server, "OTHER", 1)
        await add_consumer(server, "OTHER", "reader", **settings)

    return add


def full(name: str, **settings: Any) -> Callable[[Administration], Awaitable[None]]:
    async def fill(server: Administration) -> None:
        await add_stream(server, name, discard="new", **settings)
        await publish(server, name, 10, size=900)

    return fill


async def sealed(server: Administration) -> None:
    await add_stream(server, "SEALED")
    await server.api("STREAM.UPDATE.SEALED", {"name": "SEALED", "subjects": ["SEALED.>"], "sealed": True})


async def promoted(server: Administration) -> None:
    await add_stream(server, "ORIGIN")
    await add_stream(server, "FOLLOWER", metadata={PROMOTED: "$JS.API ORIGIN 0"})


async def other_history(server: Administration) -> None:
    await add_stream(server, "ORIGIN")
    await add_stream(server, "MIRROR", subjects=None, mirror={"name": "ORIGIN"})
    await publish(server, "ORIGIN", 3)
    with anyio.fail_after(PROMPT_SECONDS):
        while (await server.api("STREAM.INFO.MIRROR"))["state"]["last_seq"] < 3:  # noqa: ASYNC110
            await anyio.sleep(0.02)
    await server.api("STREAM.DELETE.ORIGIN")
    await add_stream(server, "ORIGIN")
    await publish(server, "ORIGIN", 3)


async def crowded(server: Administration) -> None:
    await add_stream(server, "OTHER", max_consumers=1)
    await add_consumer(server, "OTHER", "reader")


async def half_read(server: Administration) -> None:
    await add_stream(server, "OTHER", retention="workqueue")
    await add_consumer(server, "OTHER", "reader", filter_subject="OTHER.a")
    await publish(server, "OTHER", 1, key="b")


async def without_stream(server: Administration) -> None:
    await server.api("STREAM.DELETE.MARS")


async def without_consumer(server: Administration) -> None:
    await server.api("CONSUMER.DELETE.MARS.field__index")


async def half_paused(server: Administration) -> None:
    until = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    await server.api("CONSUMER.PAUSE.MARS.field__index", {"pause_until": until})


async def waiting_first(server: Administration) -> None:
    await add_stream(server, "MARS", subjects=["mars.>"])
    await waiting(server)


async def repaired(server: Administration) -> None:
    Path("repaired").touch()  # noqa: ASYNC240


async def waiting(server: Administration) -> None:
    await publish(server, "mars", 1, key="od")


async def half_restored(server: Administration) -> None:
    found = (await server.api("STREAM.INFO.OTHER"))["config"]
    await server.api("STREAM.UPDATE.OTHER", {**found, "metadata": {UNFINISHED: "true"}})


PRODUCTION = ("--production",)
CONSUMER = "streams.OTHER.consumers.reader"
READER = "OTHER > reader"
PUSHED = {"deliver_subject": "pushed"}
INDEX = "MARS > field__index"
APPLY, WORKER = ("streams apply",), ("worker",)
WORKED = "worker"

CASES = (
    Case(
        code="JS001", where="MARS", steps=APPLY, options=PRODUCTION, sets={f"{JETSTREAM}.max_bytes": 10**6}, runs=APPLY
    ),
    Case(
        code="JS001",
        where="OTHER",
        steps=(stream("OTHER"),),
        options=PRODUCTION,
        sets={"streams.OTHER.max_bytes": "1Mi"},
        runs=APPLY,
    ),
    Case(
        code="JS002",
        where="MARS",
        steps=APPLY,
        options=PRODUCTION,
        sets={f"{JETSTREAM}.retention_time": "7d"},
        runs=APPLY,
    ),
    Case(
        code="JS002",
        where="OTHER",
        steps=(stream("OTHER"),),
        options=PRODUCTION,
        sets={"streams.OTHER.max_age": "7d"},
        runs=APPLY,
    ),
    Case(
        code="JS005",
        where="OTHER",
        steps=(stream("OTHER", storage="memory"),),
        options=PRODUCTION,
        runs=("backup create", "streams rm", "backup restore"),
        words={"DIRECTORY": "backups"},
    ),
    Case(
        code="JS006",
        where="MARS",
        given={f"{JETSTREAM}.discard_policy": "new", f"{JETSTREAM}.max_messages": 10},
        steps=(full("MARS", subjects=["MARS.>", "mars.>"], max_msgs=10),),
        sets={f"{JETSTREAM}.max_messages": 1000},
        runs=APPLY,
    ),
    Case(
        code="JS006",
        where="OTHER",
        steps=(full("OTHER", max_bytes=10**4),),
        sets={"streams.OTHER.max_bytes": "1Mi"},
        runs=APPLY,
    ),
    Case(
        code="JS006",
        where="OTHER",
        steps=(full("OTHER", max_msgs=10),),
        sets={"streams.OTHER.max_msgs": 100},
        runs=APPLY,
    ),
    Case(
        code="JS006",
        where="OTHER",
        steps=(full("OTHER", max_msgs=10),),
        runs=("streams purge",),
        words={"COUNT": "1"},
    ),
    Case(
        code="JS008",
        where="MARS",
        given={f"{JETSTREAM}.retention_policy": "interest"},
        steps=APPLY,
        sets={f"{JETSTREAM}.retention_policy": "limits"},
        runs=APPLY,
    ),
    Case(
        code="JS008",
        where="OTHER",
        steps=(stream("OTHER", retention="interest"),),
        sets={"streams.OTHER.retention": "limits"},
        runs=APPLY,
    ),
    Case(
        code="JS009", where="MARS", steps=APPLY, app=DERIVES, sets={"streams.MARS.duplicate_window": "10m"}, runs=APPLY
    ),
    Case(
        code="JS010",
        where="OTHER",
        steps=(stream("OTHER", metadata={"critical": "true"}),),
        sets={"streams.OTHER.deny_delete": True, "streams.OTHER.deny_purge": True},
        runs=APPLY,
    ),
    Case(
        code="JS011",
        where="OTHER",
        steps=(stream("OTHER", metadata={"pii": "true"}, deny_delete=True),),
        runs=("streams rm",),
    ),
    Case(
        code="JS013",
        where="MARS",
        given={f"{JETSTREAM}.retention_time": "7d"},
        steps=(stream("MARS", subjects=["mars.>"], max_age=HOUR),),
        runs=("streams plan", "streams apply"),
    ),
    Case(
        code="JS013",
        where="SEALED",
        given={"streams.SEALED.subjects": ["SEALED.>"], "streams.SEALED.sealed": False},
        steps=(sealed,),
        runs=("streams copy", "streams rm", "streams apply"),
        words={"FILE": "aviso.yaml", "NAME": "BEFORE", "STREAM": "SEALED"},
    ),
    Case(
        code="JS014",
        where="OTHER",
        steps=(stream("OTHER", subjects=["mars.*"]),),
        sets={"streams.OTHER.subjects": ["other.>"]},
        runs=APPLY,
    ),
    Case(code="JS020", where="ORIGIN", steps=(promoted,), runs=("mirror fence", "mirror recover")),
    Case(code="JS024", where=READER, steps=(consumer(),), sets={f"{CONSUMER}.backoff": ["1s", "5s"]}, runs=APPLY),
    Case(code="JS025", where=READER, steps=(consumer(),), sets={f"{CONSUMER}.max_deliver": 5}, runs=APPLY),
    Case(
        code="JS027",
        where=READER,
        steps=(consumer(backoff=[SECOND, 2 * SECOND], max_deliver=2),),
        sets={f"{CONSUMER}.max_deliver": 5},
        runs=APPLY,
    ),
    Case(
        code="JS028",
        where=READER,
        steps=(consumer(**PUSHED),),
        sets={
            f"{CONSUMER}.flow_control": True,
            f"{CONSUMER}.idle_heartbeat": "5s",
            f"{CONSUMER}.deliver_subject": "pushed",
        },
        runs=("consumers rm", "streams apply"),
    ),
    Case(code="JS029", where=READER, steps=(consumer(**PUSHED),), runs=("consumers rm",)),
    Case(code="JS030", where=READER, steps=(consumer(),), runs=("consumers rm",)),
    Case(code="JS035", where=READER, steps=(consumer(),), runs=("consumers rm",)),
    Case(
        code="JS057",
        where="field, agent index > field__index",
        app=REJECTS,
        steps=(waiting_first, WORKED),
        runs=("dead-letters ls", "dead-letters drop --app"),
    ),
    Case(
        code="JS068",
        where="MIRROR",
        steps=(other_history,),
        runs=("backup create", "streams rm"),
        words={"DIRECTORY": "backups"},
    ),
    Case(
        code="JS026",
        where=READER,
        steps=(consumer(max_deliver=5),),
        sets={"streams.NAME.subjects": ["$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.OTHER.reader"]},
        runs=APPLY,
    ),
    Case(code="JS032", where=INDEX, steps=(agent(max_ack_pending=5),), app=FIELD, runs=WORKER),
    Case(
        code="JS034",
        where="OTHER",
        steps=(crowded,),
        runs=("consumers ls", "consumers rm"),
        words={"CONSUMER": "reader"},
    ),
    Case(code="JS035", where=INDEX, steps=(agent(),), runs=("agents rm",)),
    Case(code="JS036", where=INDEX, steps=(agent(), "agents pause field/index --for 2d"), runs=("agents resume",)),
    Case(
        code="JS036",
        where="field > timer tidy",
        app=FIELD,
        steps=("timers pause MODULE:APP tidy --for 2d",),
        runs=("timers resume",),
    ),
    Case(
        code="JS038",
        where="OTHER",
        steps=(half_read,),
        sets={"streams.OTHER.consumers.NAME.filter_subjects": ["OTHER.b"]},
        runs=APPLY,
    ),
    Case(code="JS042", where="MARS", app=FIELD, steps=(waiting_first, WORKED, without_stream), runs=APPLY),
    Case(
        code="JS046",
        where="MARS",
        steps=APPLY,
        options=("--backups", "."),
        runs=("backup create", "backup drill"),
        words={"DIRECTORY": "."},
    ),
    Case(
        code="JS048",
        where=f"{JETSTREAM}.max_reconnect_attempts",
        given={f"{JETSTREAM}.max_reconnect_attempts": 1},
        sets={f"{JETSTREAM}.max_reconnect_attempts": 0},
    ),
    Case(
        code="JS058",
        where=INDEX,
        found="stream gone",
        app=FIELD,
        steps=(waiting_first, WORKED, without_stream),
        runs=APPLY,
    ),
    Case(
        code="JS058",
        where=INDEX,
        found="consumer gone",
        app=FIELD,
        steps=(waiting_first, WORKED, without_consumer),
        runs=("agents rm",),
    ),
    Case(
        code="JS058",
        where=INDEX,
        found="half paused",
        app=FIELD,
        steps=(waiting_first, WORKED, half_paused),
        runs=("agents resume",),
    ),
    Case(code="JS058", where=INDEX, found="no worker", app=FIELD, steps=(waiting_first, WORKED, waiting), runs=WORKER),
    Case(
        code="JS058",
        where=INDEX,
        found="no worker",
        app=FIELD,
        steps=(waiting_first, WORKED, waiting),
        runs=("agents rm",),
    ),
    Case(
        code="JS058",
        where=INDEX,
        found="blocked",
        app=BLOCKED,
        steps=(waiting_first, WORKED),
        works=True,
        runs=("agents skip",),
    ),
    Case(code="JS059", where=INDEX, steps=(agent(max_deliver=5),), app=FIELD, runs=WORKER),
    Case(
        code="JS063",
        where="mars > field__index",
        steps=(agent({"max_msgs_per_subject": 1}),),
        sets={"notification_schema.mars.storage_policy.allow_duplicates": True},
        runs=APPLY,
    ),
    Case(code="JS064", where=INDEX, steps=(agent(ack_wait=SECOND),), app=FIELD, runs=WORKER),
    Case(
        code="JS070",
        where="OTHER",
        steps=(stream("OTHER"), "backup create OTHER --to backups", half_restored),
        runs=("backup restore",),
        words={"DIRECTORY": "backups/OTHER/TIME"},
    ),
    Case(code="JS076", where="MARS", app=FIELD, steps=("notify mars class=od --after 1s",), runs=WORKER),
    Case(
        code="JS077",
        where="field > timer fails",
        app=FAILS,
        steps=(WORKED, repaired),
        runs=("timers run",),
    ),
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with an account for each case."""
    directory = tmp_path_factory.mktemp("cures")
    accounts = "".join(
        f"A{n} {{jetstream: enabled, users: [{{user: u{n}, password: x}}]}}\n" for n in range(len(CASES))
    )
    with NatsServer.start(store_dir=directory, config=f"{MONITORED}accounts {{\n{accounts}}}\n") as server:
        yield server.url


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong only after some time is wrong at once."""
    monkeypatch.setattr(consumers, "UNUSED", consumers.UNUSED * 0)
    for name, condition in health.BY_NAME.items():
        monkeypatch.setitem(health.BY_NAME, name, structs.replace(condition, patience=0))


NOT_RUN = {
    "JS015": "what is missing is not made again; the commands only show it",
    "JS016": "no nats-server of these versions says it",
    "JS017": "a server is to be started: test_cluster, test_lost_jetstream",
    "JS019": "the network is to be mended; the commands only show it",
    "JS021": "the client is to become faster",
    "JS022": "the client is to be mended",
    "JS023": "the finding is of acknowledgements that a client sends meanwhile: test_consumers",
    "JS031": "the client is to be mended",
    "JS033": "the code is to be changed",
    "JS037": "a client is to be started; the command pins another one",
    "JS041": "the server is to be upgraded",
    "JS045": "a server with unique_tag makes no such stream: tests/ops/test_clusters.py moves a replica",
    "JS047": "certificates and users are the site's",
    "JS049": "servers are to be connected: test_cluster",
    "JS051": "the client is to be mended",
    "JS055": "tests/ops/test_key_rotation.py moves a store",
    "JS060": "credentials are the operator's of the account",
    "JS062": "a server is to be added",
    "JS066": "the code is to be mended; the command stops the deliveries meanwhile",
    "JS067": "certificates are the site's",
    "JS069": "the key of the store is to be found: test_servers",
    "JS072": "a store is to be emptied while its server is down: test_divergence",
    "JS073": "a clock is to be set",
    "JS080": "a worker is to be started; its other command is of the nats CLI: tests/cli/test_workers.py",
}
"""Checks of which no case runs the cure, and why. test_server_cures has cases too, and asks for completeness."""
STATES_NOT_RUN = {
    "not begun": "the log of the worker says what is to be done",
    "hindered": "a user is to be given a right",
    "stuck": "the handler is to be mended; the command only shows the notification",
    "two programs": "a deploy is to be finished",
    "away": "another service is to be started",
    "failing": "the handler is to be mended; the command only shows what is tried again",
    "pacing": "as failing",
    "behind": "the handler is to become faster",
    health.UNKNOWN: "a user is to be given a right, or a server is to be started",
}
"""States of agents of which no case runs the cure, and why."""


def test_each_state_of_an_agent_has_a_case_or_a_reason() -> None:
    states = {case.found for case in CASES if case.code == "JS058"}
    assert states ^ STATES_NOT_RUN.keys() == health.CURES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)), ids=map(str, CASES))
def test_a_cure_cures(url: str, run: Run, start: Start, tmp_path: Path, number: int) -> None:
    case, place = CASES[number], Place(tmp_path, url, f"u{number}", run, start)
    options = prepare(place, case)
    carry_out(place, case, options)
    await_finding(place, case, options, there=False)


def carry_out(place: Place, case: Case, options: tuple[str, ...]) -> str:
    """Let the doctor say the cure, write the settings that it names, run its commands, and return it."""
    cure = await_finding(place, case, options, there=True)["cure"]
    assert [path for path in case.sets if not names(cure, path)] == [], cure
    place.write(case.sets)
    for command in printed(cure, place, case):
        place.carry_out(command)
    return cure


def configure(place: Place, case: Case) -> None:
    """Write the configuration, and the module with the app."""
    backend = {"kind": "jetstream", "jetstream": {"nats_url": place.url, "user": place.user, "password": "x"}}
    event_type = {
        "topic": {"base": "mars", "key_order": ["class"]},
        "identifier": {"class": {"type": "StringHandler", "required": True}},
        "storage_policy": {"allow_duplicates": True},
    }
    workers = {"status": {"port": 0}, "logging": {"format": "json"}}
    document = {"notification_backend": backend, "notification_schema": {"mars": event_type}, "workers": workers}
    place.write({**document, **case.given})
    place.source.write_text(case.app)


def prepare(place: Place, case: Case) -> tuple[str, ...]:
    """Make the situation, and return the doctor's options."""
    configure(place, case)
    for step in case.steps:
        if not isinstance(step, str):
            place.administer(step)
        elif step == WORKED:
            worker = place.work()
            worker.lines(1)
            assert case.works or worker.end(signal.SIGTERM) == 0
        else:
            place.carry_out(step.replace("MODULE:APP", place.app).split())
    return (*case.options, "--app", place.app) if case.app else case.options


def await_finding(place: Place, case: Case, options: tuple[str, ...], *, there: bool) -> dict[str, str]:
    """The finding of the case, once it is there, or nothing, once it is not. Only a worker takes a moment."""
    begun = time.monotonic()
    while time.monotonic() - begun < PROMPT_SECONDS:
        every = [*place.findings(*options)]
        same = [each for each in every if (each["code"], each["where"]) == (case.code, case.where)]
        found = [each for each in same if each["found"].startswith(case.found)]
        if bool(found) is there:
            return found[0] if there else {}
    raise AssertionError(found or every)


def names(cure: str, path: str) -> bool:
    """Whether a cure names a setting: by its whole path, or by its last part beside another path of its section."""
    section, _, name = path.rpartition(".")
    return path in cure or (section in cure and re.search(rf"\b{name}\b", cure) is not None)


def printed(cure: str, place: Place, case: Case) -> list[list[str]]:
    """The commands of a cure that the case runs, with words in place of those in capitals."""
    commands = COMMAND.findall(cure)
    chosen = []
    for begin in case.runs:
        text = next((each for each in commands if f"{each} ".startswith(f"{begin} ")), None)
        assert text, f"{begin} is not in {cure!r}"
        for word, meant in {"MODULE:APP": place.app, **case.words}.items():
            text = re.sub(rf"\b{word}\b", meant, text)
        chosen.append(shlex.split(text))
    return chosen
