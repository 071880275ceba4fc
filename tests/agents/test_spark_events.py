"""The tail in memory and on a real server: it follows, is killed, comes back, and nothing is there twice."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import yaml
import zstandard

from aviso_agents import spark_events
from aviso_workers import App, KeyValue, Receipt
from aviso_workers.errors import (
    DeniedError,
    FullError,
    OutcomeUnknownError,
    RefusedError,
    UnavailableError,
    UnknownEventTypeError,
)
from aviso_workers.events import Event, Measured, Published
from aviso_workers.spark import job_events, listeners
from aviso_workers.spark.event_log import LogPosition
from aviso_workers.spark.job_events import SparkApplication
from tests import forgeries
from tests.stories.processes import Server
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

KEYS = ("cluster", "application", "kind", "event", "id")


class SparkLog:
    """The compressed event log of an application that starts jobs and ends them: a single file, or rolling ones."""

    def __init__(self, directory: Path, name: str, *, rolling: bool = False, started: int = 1) -> None:
        self.name = name
        self._directory = directory / f"eventlog_v2_{name}" if rolling else directory
        self._directory.mkdir(parents=True, exist_ok=True)
        self._path = self._directory / (f"events_1_{name}.zstd" if rolling else f"{name}.zstd.inprogress")
        self._status = self._directory / f"appstatus_{name}.inprogress" if rolling else self._path
        self._status.touch()
        self._jobs = 0
        self.write("SparkListenerLogStart")
        self.write("SparkListenerApplicationStart", **{"App Name": name, "Timestamp": started})

    def jobs(self, count: int) -> None:
        for job in range(self._jobs, self._jobs + count):
            self.write("SparkListenerJobStart", **{"Job ID": job, "Submission Time": 1, "Stage Infos": []})
            self.write("SparkListenerTaskEnd")
            self.write("SparkListenerJobEnd", **{"Job ID": job, "Completion Time": 2, "Job Result": SUCCEEDED})
        self._jobs += count

    def end(self) -> None:
        self.write("SparkListenerApplicationEnd", Timestamp=9)
        ended = self._status.rename(self._status.with_suffix(""))
        self._path = ended if self._path == self._status else self._path
        self._status = ended

    def roll(self) -> None:
        """Go on in the next file."""
        self._path = self._file(self._index + 1)

    def compact(self, *, without: int) -> None:
        """What a history server makes of all files but the newest, without the events of one job, that has ended."""
        events = b"".join(
            zstandard.ZstdDecompressor().stream_reader(file.read_bytes(), read_across_frames=True).read()
            for file in map(self._file, range(1, self._index))
        )
        kept = [line for line in events.splitlines(keepends=True) if f'"Job ID":{without},'.encode() not in line]
        compacted = self._file(self._index - 1).with_suffix(".zstd.compact")
        compacted.write_bytes(zstandard.ZstdCompressor().compress(b"".join(kept)))
        for index in range(1, self._index):
            self._file(index).unlink()

    def silent_for(self, seconds: float) -> None:
        """As if nothing had been written for so long."""
        for file in {self._path, self._status}:
            os.utime(file, (time.time() - seconds,) * 2)

    @property
    def _index(self) -> int:
        return int(self._path.name.split("_")[1])

    def _file(self, index: int) -> Path:
        return self._directory / f"events_{index}_{self.name}.zstd"

    def write(self, event: str, /, **fields: Any) -> None:
        self.write_line(json.dumps({"Event": event, **fields}, separators=(",", ":")))

    def write_line(self, text: str) -> None:
        with self._path.open("ab") as out:
            out.write(zstandard.ZstdCompressor().compress(f"{text}\n".encode()))

    @property
    def facts(self) -> list[str]:
        """What the notifications of this log say, in order; before its end, without it."""
        jobs = [f"job.{event} {job}" for job in range(self._jobs) for event in ("start", "end")]
        end = [] if self._status.suffix == ".inprogress" else [f"application.end {self.name}"]
        return [f"application.start {self.name}", *jobs, *end]


class Signal:
    """Something to wait for that happens more than once."""

    def __init__(self) -> None:
        self._next = anyio.Event()

    def happens(self) -> None:
        self._next.set()
        self._next = anyio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        with anyio.fail_after(PATIENCE_SECONDS):
            while not condition():
                await self._next.wait()


class Positions:
    """The bucket, with an eye on it; while `lost`, it takes a position and its writer waits until it is killed. That a
    log has the place of its application, which is stored before anything of it is published, it takes like any bucket.
    """

    def __init__(self, bucket: KeyValue) -> None:
        self.get = bucket.get
        self.keys = bucket.keys
        self.lost = False
        self.put_to: list[str] = []
        self.signal = Signal()
        self._bucket = bucket

    async def put(self, key: str, value: bytes) -> int:
        if msgspec.json.encode(LogPosition()) in value:
            return await self._bucket.put(key, value)
        if not self.lost:
            await self._bucket.put(key, value)
        self.put_to.append(key)
        self.signal.happens()
        if self.lost:
            await anyio.sleep_forever()
        return 0


class Told:
    """What the router logs."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.signal = Signal()

    @property
    def last(self) -> dict[str, Any]:
        return self.entries[-1] if self.entries else {}

    def _tell(self, event: str, **fields: Any) -> None:
        self.entries.append({"event": event, **fields})
        self.signal.happens()

    info = warning = error = _tell


class Shown:
    """What the agent measures."""

    def __init__(self, app: App) -> None:
        self._gauges: dict[str, dict[tuple[str, ...], float]] = {}
        self._signal = Signal()
        self._cluster = cluster_of(app)
        app.events.listen(self._listen)

    def value(self, name: str, *labels: str) -> float | None:
        return self._gauges.get(f"aviso_spark_events_{name}", {}).get((self._cluster, *labels))

    async def until(self, name: str, value: float, *labels: str) -> None:
        try:
            await self._signal.until(lambda: self.value(name, *labels) == value)
        except TimeoutError:
            raise AssertionError(f"this is shown: {self._gauges}") from None

    def _listen(self, event: Event) -> None:
        if isinstance(event, Measured):
            self._gauges[event.name] = dict(event.values)
            self._signal.happens()


class Story:
    """An app that follows a directory, and what its stream holds."""

    def __init__(self, app: App, directory: Path, positions: Positions) -> None:
        self.app = app
        self.directory = directory
        self.positions = positions
        self.outcomes: Counter[str] = Counter()
        app.events.listen(self._count)

    @property
    def bytes_on_disk(self) -> int:
        """Of all compressed logs."""
        return sum(file.stat().st_size for file in self.directory.glob("*.zstd*"))

    def log(self, name: str = "local-1", *, rolling: bool = False) -> SparkLog:
        return SparkLog(self.directory, name, rolling=rolling)

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """The tail at work; killed at the end of the block."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(spark_events.follow_event_logs, self.app)
            yield
            tasks.cancel_scope.cancel()

    async def arrived(self, count: int) -> None:
        """Wait until the stream holds so many notifications."""
        arrived: list[str] = []
        with anyio.move_on_after(PATIENCE_SECONDS):
            async for notification in self.app.watch("spark_job", from_id=1):
                arrived.append(fact(notification.identifier))
                if len(arrived) == count:
                    return
        raise AssertionError(f"{len(arrived)} of {count} notifications arrived: {arrived}")

    async def publish_as_a_listener(self, line: str) -> None:
        """What the driver's own listener does with an event."""
        event = job_events.decode(line, SparkApplication(id="local-1"))
        assert event is not None
        cluster = cluster_of(self.app)
        await self.app.notify(
            job_events.EVENT_TYPE, event.identifier(cluster), event.payload, message_id=event.message_id(cluster)
        )

    async def stored(self, application: str = "local-1") -> list[str]:
        where = {"application": application}
        return [fact(found.identifier) async for found in self.app.replay("spark_job", where, from_id=1)]

    def _count(self, event: Event) -> None:
        if isinstance(event, Published):
            self.outcomes[event.outcome] += 1


WINDOW_SECONDS = 0.2
SUCCEEDED = {"Result": "JobSucceeded"}
SQL = "org.apache.spark.sql.execution.ui.SparkListenerSQLExecution"
STAGE = {"Stage ID": 3, "Stage Attempt ID": 0, "Stage Name": "count", "Number of Tasks": 2}


def made_elsewhere(story: Story) -> tuple[SparkLog, bytes, Path]:
    """The log of an application that has ended, what its file holds, and where that is to be copied to."""
    elsewhere = story.directory.parent / "elsewhere"
    log = SparkLog(elsewhere, "local-1")
    log.jobs(10)
    log.end()
    story.directory.mkdir()
    return log, (elsewhere / "local-1.zstd").read_bytes(), story.directory / "local-1.zstd"


def job_start(job: int) -> str:
    fields = {"Event": "SparkListenerJobStart", "Job ID": job, "Submission Time": 1, "Stage Infos": []}
    return json.dumps(fields, separators=(",", ":"))


def fact(identifier: Any) -> str:
    return f"{identifier['kind']}.{identifier['event']} {identifier['id']}"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_events, "SEARCH_SECONDS", 0.05)
    monkeypatch.setattr(spark_events, "RETRY_SECONDS", 0.05, raising=False)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "spark-logs"


@pytest.fixture(params=["in_memory", "jetstream"])
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "in_memory":
        return {"kind": "in_memory"}
    return {"kind": "jetstream", "jetstream": {"nats_url": request.getfixturevalue("server").url}}


@pytest.fixture
def make_app(tmp_path: Path, directory: Path, backend: dict[str, Any]) -> Callable[..., App]:
    """An app with a stream and positions of its own; keywords are settings of the router."""
    cluster = f"c{uuid.uuid4().hex[:8]}"

    def make_app(*, event_type: str = "spark_job", **settings: Any) -> App:
        declared: dict[str, Any] = {
            "topic": {"base": f"spark-{cluster}", "key_order": list(KEYS)},
            "identifier": {key: {"type": "StringHandler", "required": True} for key in KEYS},
        }
        if backend["kind"] == "jetstream":
            declared["storage_policy"] = {"allow_duplicates": True}
        settings = {"event_log_dirs": [str(directory)], "cluster": cluster, "poll_seconds": 0.01} | settings
        document = {
            "notification_backend": backend,
            "notification_schema": {event_type: declared},
            "workers": {"agents": {"spark-events": settings}},
        }
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(document))
        app = App("spark", config=file)
        app.include(spark_events.router)
        return app

    return make_app


@pytest.fixture
async def story(make_app: Callable[..., App], directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Story]:
    async with make_app() as app:
        positions = Positions(await app.key_value(spark_events.BUCKET))
        monkeypatch.setattr(app, "key_value", constantly(positions))
        yield Story(app, directory, positions)


@pytest.fixture
def shown(story: Story) -> Shown:
    return Shown(story.app)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()
    monkeypatch.setattr(spark_events, "log", told)
    return told


async def test_what_happens_in_an_application_arrives_while_it_happens(story: Story) -> None:
    log = story.log()
    async with story.following():
        await story.arrived(1)
        log.jobs(3)
        await story.arrived(7)
        log.end()
        await story.arrived(8)
    assert await story.stored() == log.facts


async def test_killed_after_publishing_and_before_storing_its_position_it_publishes_nothing_twice(
    story: Story,
) -> None:
    log = story.log()
    log.jobs(20)
    story.positions.lost = True
    async with story.following():
        await story.positions.signal.until(lambda: story.positions.put_to != [])
    assert await story.stored() == log.facts
    assert story.outcomes == {"stored": 41}

    log.jobs(5)
    log.end()
    story.positions.lost = False
    story.positions.put_to.clear()
    async with story.following():
        await story.positions.signal.until(lambda: story.positions.put_to != [])
    assert await story.stored() == log.facts, "each once, and in order"
    assert story.outcomes == {"stored": 52}, "what the stream holds is not even sent again"

    async with story.following():
        later = story.log("local-2")
        await story.arrived(53)
    assert await story.stored("local-2") == later.facts
    assert story.outcomes == {"stored": 53}, "the first log is not read again"


async def test_what_cannot_be_stored_now_is_tried_until_it_is(
    story: Story, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = story.log()
    log.jobs(10)
    log.end()
    notify = story.app.notify
    refusals: list[Exception] = [
        UnavailableError("no server"),
        OutcomeUnknownError("no answer"),
        FullError("full"),
        DeniedError("permissions violation for publish"),
        RefusedError("subjects overlap with an existing stream", code=10065),
    ]

    async def notify_with_interruptions(*args: Any, **keywords: Any) -> Receipt:
        if story.outcomes["stored"] == 5 and refusals:
            raise refusals.pop(0)
        return await notify(*args, **keywords)

    monkeypatch.setattr(story.app, "notify", notify_with_interruptions)
    async with story.following():
        await story.arrived(22)
        await told.signal.until(lambda: told.entries[-1]["event"] == "spark_events.server_back")
    assert await story.stored() == log.facts
    assert story.outcomes == {"stored": 22}
    assert [entry["event"] for entry in told.entries] == ["spark_events.waiting", "spark_events.server_back"]
    assert told.entries[0]["problem"] == "no server"


async def test_a_real_server_that_is_gone_for_longer_than_publishing_waits_ends_nothing(
    tmp_path: Path, directory: Path, told: Told
) -> None:
    spark = SparkLog(directory, "local-1")
    with Server(tmp_path / "jetstream") as server:
        file = config_file(tmp_path, directory, server.url)
        async with app_of(file) as app, anyio.create_task_group() as tasks:
            story = Story(app, directory, Positions(await app.key_value(spark_events.BUCKET)))
            tasks.start_soon(spark_events.follow_event_logs, app)
            await story.arrived(1)
            server.kill()
            spark.jobs(10)
            await told.signal.until(lambda: bool(told.entries))  # publishing was given up once
            spark.jobs(10)
            spark.end()
            server.start()
            await told.signal.until(lambda: told.entries[-1]["event"] == "spark_events.server_back")
            await story.arrived(42)
            tasks.cancel_scope.cancel()
        async with app_of(file) as app:
            assert await Story(app, directory, story.positions).stored() == spark.facts
    assert {entry["event"] for entry in told.entries} <= {"spark_events.waiting", "spark_events.server_back"}


def config_file(tmp_path: Path, directory: Path, url: str) -> Path:
    """Of an app that waits for its server without end, and half a second for each notification."""
    connection = {"nats_url": url, "max_reconnect_attempts": 0, "reconnect_delay_ms": 50}
    document = {
        "notification_backend": {"kind": "jetstream", "jetstream": {**connection, "publish_deadline_seconds": 0.5}},
        "notification_schema": {
            "spark_job": {
                "topic": {"base": "spark", "key_order": list(KEYS)},
                "identifier": {key: {"type": "StringHandler", "required": True} for key in KEYS},
                "storage_policy": {"allow_duplicates": True},
            }
        },
        "workers": {"agents": {"spark-events": {"event_log_dirs": [str(directory)], "poll_seconds": 0.01}}},
    }
    file = tmp_path / "outage.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def app_of(file: Path) -> App:
    app = App("spark", config=file)
    app.include(spark_events.router)
    return app


def write_stray(directory: Path, name: str) -> Path:
    """Something that begins as an event log does, under this name: a rolling one, or a single file."""
    stray = directory / name
    file = stray / "events_1_x" if name.startswith("eventlog_v2_") else stray
    file.parent.mkdir(parents=True)
    file.write_bytes(START)
    return stray


START = b'{"Event":"SparkListenerApplicationStart","App Name":"x","Timestamp":1}\n'


@pytest.mark.parametrize("name", [" ", "*", ">", "a b", "eventlog_v2_", "eventlog_v2_*"])
async def test_a_log_whose_name_is_no_application_stops_no_other(
    story: Story, directory: Path, told: Told, name: str
) -> None:
    """A star would be a filter for all applications, and an empty name one for none."""
    stray = write_stray(directory, name)
    log = story.log()
    async with story.following():
        await told.signal.until(lambda: [entry.get("path") for entry in told.entries] == [str(stray)])
        log.jobs(3)
        await story.arrived(7)
    assert await story.stored() == log.facts
    [entry] = told.entries
    assert (entry["event"], "is not a Spark application id" in entry["problem"]) == ("spark_events.unreadable", True)


async def test_what_fails_for_one_application_stops_no_other(
    story: Story, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = job_events.decode

    def decode_one(line: bytes, application: SparkApplication) -> Any:
        if application.id == "local-2":
            raise ZeroDivisionError("of this one")
        return decode(line, application)

    monkeypatch.setattr(job_events, "decode", decode_one)
    log, _ = story.log(), story.log("local-2")
    async with story.following():
        await told.signal.until(lambda: told.entries != [])
        log.jobs(3)
        await story.arrived(7)
    assert await story.stored() == log.facts
    assert ["ZeroDivisionError: of this one" in entry["problem"] for entry in told.entries] == [True]


async def test_a_line_that_is_nested_too_deep_is_left_out_and_the_rest_is_published(story: Story, told: Told) -> None:
    log = story.log()
    log.write_line('{"Event":"SparkListenerJobStart","Stage Infos":' + "[" * 100_000 + "]" * 100_000 + "}")
    log.jobs(3)
    async with story.following():
        await story.arrived(7)
    assert await story.stored() == log.facts
    assert ["left out 1 lines" in entry["problem"] for entry in told.entries] == [True]


@pytest.mark.parametrize("backend", [{"kind": "in_memory"}])
async def test_a_checkpoint_that_a_server_has_stored_is_told_and_costs_nothing(story: Story, told: Told) -> None:
    log = story.log()
    log.jobs(3)
    async with story.following():
        await story.positions.signal.until(lambda: story.positions.put_to != [])
        (key,) = story.positions.put_to
    forgeries.store(story.app.session.backend, f"KV_{spark_events.BUCKET}", f"$KV.{spark_events.BUCKET}.{key}")
    log.jobs(1)
    async with story.following():
        await story.arrived(9)
    assert await story.stored() == log.facts
    assert ["is the answer of a server" in entry["problem"] for entry in told.entries] == [True]


async def test_a_checkpoint_that_cannot_be_read_is_told_and_costs_nothing(story: Story, told: Told) -> None:
    log = story.log()
    log.jobs(3)
    async with story.following():
        await story.positions.signal.until(lambda: story.positions.put_to != [])
        (key,) = story.positions.put_to
    await story.positions.put(key, b"not one")
    log.jobs(1)
    async with story.following():
        await story.arrived(9)
    assert await story.stored() == log.facts
    assert story.outcomes == {"stored": 9}
    (problem,) = told.entries
    assert (problem["event"], problem["then"]) == ("spark_events.checkpoint_unreadable", "read from its beginning")


async def test_a_file_that_shows_when_it_is_closed_adds_what_nobody_published(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn = spark_events._ApplicationLog._learn

    async def learn_after_an_hour(self: Any, *arguments: Any, **options: Any) -> None:
        self._known_at = -math.inf
        await learn(self, *arguments, **options)

    monkeypatch.setattr(spark_events._ApplicationLog, "_learn", learn_after_an_hour)
    log = story.log(rolling=True)
    async with story.following():
        await story.arrived(1)
        for job in (0, 1):
            await story.publish_as_a_listener(job_start(job))
        log.roll()
        log.jobs(2)
        await story.arrived(5)
    assert Counter(await story.stored()) == Counter(log.facts)
    assert story.outcomes == {"stored": 5}, "nothing is left for the duplicate window to find"


@pytest.mark.parametrize("backend", ["jetstream"], indirect=True)
async def test_events_that_the_server_forgets_soon_are_stored_once(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = story.log()
    async with story.following():
        await story.arrived(1)
        await shorten_duplicate_window(story.app)
        monkeypatch.setattr(listeners, "CACHE_SECONDS", 0.0)
        await story.publish_as_a_listener(job_start(0))
        await anyio.sleep(2 * WINDOW_SECONDS)  # by the server's clock, which tells nobody when it forgets
        log.jobs(2)
        await story.arrived(5)
    assert await story.stored() == log.facts


@pytest.mark.parametrize("backend", ["jetstream"], indirect=True)
async def test_an_event_that_spark_logs_long_after_a_listener_published_it_is_stored_once(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark has an event in a buffer until it flushes its log, and the agent may begin meanwhile."""
    monkeypatch.setattr(listeners.DuplicateWindow, "half_seconds", constantly(3600.0))
    log = story.log()
    async with story.following():
        await story.positions.signal.until(lambda: story.positions.put_to != [])
    await shorten_duplicate_window(story.app)
    await story.publish_as_a_listener(job_start(1))
    await anyio.sleep(2 * WINDOW_SECONDS)  # by the server's clock, which tells nobody when it forgets
    log.jobs(1)
    story.positions.put_to.clear()
    async with story.following():
        await story.positions.signal.until(lambda: story.positions.put_to != [])
        log.jobs(1)
        await story.arrived(5)
    assert Counter(await story.stored()) == Counter(log.facts)


async def shorten_duplicate_window(app: App) -> None:
    backend = app.session.backend
    config = (await backend.stream_info(f"SPARK-{cluster_of(app)}".upper())).config
    await backend.update_stream({**config, "duplicate_window": int(WINDOW_SECONDS * 1e9)})


async def test_what_was_asked_for_is_forgotten_when_it_is_read(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    learn = spark_events._ApplicationLog._learn
    held: list[int] = []

    async def learn_anew(self: Any, *arguments: Any, **options: Any) -> None:
        held.append(len(self._held))
        self._known_at = -math.inf
        await learn(self, *arguments, **options)

    monkeypatch.setattr(spark_events._ApplicationLog, "_learn", learn_anew)
    monkeypatch.setattr(spark_events, "SLACK_SECONDS", 0.0)
    log = story.log()
    async with story.following():
        for jobs in range(1, 11):
            log.jobs(1)
            await story.arrived(1 + 2 * jobs)
    assert max(held) < 8, "of one round, where 21 events were published"


async def test_a_log_goes_on_in_file_after_file(story: Story) -> None:
    log = story.log(rolling=True)
    async with story.following():
        for _ in range(3):
            log.jobs(2)
            log.roll()
        log.jobs(1)
        log.end()
        await story.arrived(16)
    assert await story.stored() == log.facts


async def test_what_was_compacted_meanwhile_is_read_and_nothing_of_it_stored_twice(story: Story, told: Told) -> None:
    log = story.log(rolling=True)
    log.jobs(2)
    async with story.following():
        await story.arrived(5)
    log.jobs(2)
    log.roll()
    log.jobs(1)
    log.roll()
    log.jobs(1)
    log.compact(without=2)
    log.end()
    async with story.following():
        await story.arrived(12)
    left = [fact for fact in log.facts if not fact.endswith(" 2")]
    assert await story.stored() == left
    assert story.outcomes == {"stored": len(left)}
    (problem,) = told.entries
    assert "compacted before all of it was read" in problem["problem"]


async def test_compaction_behind_what_was_read_changes_nothing(story: Story, told: Told) -> None:
    log = story.log(rolling=True)
    log.jobs(2)
    log.roll()
    log.jobs(1)
    async with story.following():
        await story.arrived(7)
        log.compact(without=0)
        log.jobs(1)
        await story.arrived(9)
    assert await story.stored() == log.facts
    assert (story.outcomes, told.entries) == ({"stored": 9}, [])


@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize("backend", ["jetstream"], indirect=True)  # which keeps every event of a subject
async def test_an_application_that_falls_silent_is_lost_once_and_may_come_back(story: Story, rolling: bool) -> None:
    log = story.log(rolling=rolling)
    log.jobs(1)
    log.silent_for(4000)
    lost = "application.lost local-1"
    for _ in range(2):
        async with story.following():
            await story.arrived(4)
    assert await story.stored() == [*log.facts, lost]
    log.jobs(1)
    async with story.following():
        await story.arrived(7)
        log.silent_for(5000)
        await story.arrived(8)
    assert (await story.stored())[4:] == ["application.resumed local-1", "job.start 1", "job.end 1", lost]
    assert story.outcomes == {"stored": 8}


@pytest.mark.parametrize("wrong_by_seconds", [-4000, 4000])
async def test_who_writes_a_log_by_a_clock_that_is_wrong_is_lost_when_it_stops(
    story: Story, wrong_by_seconds: float
) -> None:
    log = story.log()
    log.silent_for(wrong_by_seconds if wrong_by_seconds < 0 else 0)
    async with story.following():
        await story.arrived(1)
        for jobs in range(1, 4):
            log.jobs(1)
            log.silent_for(wrong_by_seconds)
            await story.arrived(1 + 2 * jobs)
        log.silent_for(wrong_by_seconds + 4000)
        await story.arrived(8)
    lost = [fact for fact in await story.stored() if "job" not in fact]
    assert lost == ["application.start local-1", "application.lost local-1"]


@pytest.mark.parametrize("backend", ["jetstream"], indirect=True)
async def test_what_a_lost_application_had_begun_is_lost_with_it(story: Story) -> None:
    log = story.log()
    log.jobs(1)
    log.write_line(job_start(7))
    log.write("SparkListenerStageSubmitted", **{"Stage Info": STAGE})
    query = {"id": "q", "runId": "r", "timestamp": "2026-11-21T00:00:00Z", "name": "copy"}
    log.write("org.apache.spark.sql.streaming.StreamingQueryListener$QueryStartedEvent", **query)
    log.silent_for(4000)
    lost = ["job.lost 7", "stage.lost 3.0", "query.lost q", "application.lost local-1"]
    for _ in range(2):
        async with story.following():
            await story.arrived(10)
    assert (await story.stored())[6:] == lost
    log.write("SparkListenerTaskEnd")
    async with story.following():
        await story.arrived(11)
    async with story.following():
        log.write(
            "SparkListenerJobEnd", **{"Job ID": 7, "Completion Time": 2, "Job Result": {"Result": "JobSucceeded"}}
        )
        await story.arrived(12)
        log.silent_for(5000)
        await story.arrived(15)
    again = ["application.resumed local-1", "job.end 7", "stage.lost 3.0", "query.lost q", "application.lost local-1"]
    assert (await story.stored())[10:] == again
    assert story.outcomes == {"stored": 15}


async def test_killed_after_publishing_a_loss_and_before_storing_so_it_is_not_lost_twice(story: Story) -> None:
    log = story.log()
    log.silent_for(4000)
    async with story.following():
        await story.positions.signal.until(lambda: len(story.positions.put_to) == 2)
    key = story.positions.put_to[-1]
    entry = await story.positions.get(key)
    assert entry is not None
    await story.positions.put(key, entry.value.replace(b'"lost":true', b'"lost":false'))
    async with story.following():
        await story.positions.signal.until(lambda: len(story.positions.put_to) == 4)
    assert await story.stored() == [*log.facts, "application.lost local-1"]
    assert story.outcomes == {"stored": 2}


async def test_an_application_that_has_ended_is_not_lost(story: Story) -> None:
    log = story.log(rolling=True)
    log.end()
    log.silent_for(4000)
    async with story.following():
        await story.arrived(2)
        story.log("local-2")
        await story.arrived(3)
    assert await story.stored() == log.facts


async def test_an_event_that_cannot_be_published_is_told_and_passed_over(story: Story, told: Told) -> None:
    log = story.log()
    progress = {"id": "q", "runId": "r", "timestamp": "2026-11-21T00:00:00Z", "batchId": 1}
    source = {"description": "huge", "numInputRows": 1, "endOffset": "9" * 2_000_000}
    log.write(
        "org.apache.spark.sql.streaming.StreamingQueryListener$QueryProgressEvent",
        progress={**progress, "sources": [source], "sink": {"description": "none"}},
    )
    log.jobs(1)
    async with story.following():
        await story.arrived(3)
    assert await story.stored() == log.facts
    (refused,) = told.entries
    assert refused["event"] == "spark_events.refused"
    assert "query.progress:q/r/1" in refused["event_id"]


async def test_without_the_event_type_nothing_counts_as_read(make_app: Callable[..., App], directory: Path) -> None:
    SparkLog(directory, "local-1")
    async with make_app(event_type="other") as app:
        with pytest.raises(UnknownEventTypeError, match="spark_job"):
            await spark_events.follow_event_logs(app)
        entry = await (await app.key_value(spark_events.BUCKET)).get(f"{cluster_of(app)}/local-1")
        assert entry is not None
        assert msgspec.json.decode(entry.value, type=spark_events.Checkpoint).position == LogPosition()


async def test_applications_do_not_wait_for_each_other_and_each_keeps_its_order(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_events, "OPEN_LOGS", 2)
    logs = [story.log(f"local-{number}") for number in range(10)]
    async with story.following():
        for _ in range(5):
            for log in logs:
                log.jobs(1)
        await story.arrived(110)
        for log in logs:
            log.end()
        await story.arrived(120)
    for log in logs:
        assert await story.stored(log.name) == log.facts


async def test_a_directory_that_is_missing_is_waited_for(story: Story, told: Told) -> None:
    async with story.following():
        await told.signal.until(lambda: told.entries != [])
        log = story.log()
        await story.arrived(1)
    assert await story.stored() == log.facts
    assert [(entry["event"], entry["directory"]) for entry in told.entries] == [
        ("spark_events.directory_missing", str(story.directory)),
        ("spark_events.directory_found", str(story.directory)),
    ]


async def test_a_directory_is_named_by_a_url_as_spark_names_it(make_app: Callable[..., App], directory: Path) -> None:
    log = SparkLog(directory, "local-1")
    async with make_app(event_log_dirs=[directory.as_uri()]) as app:
        story = Story(app, directory, Positions(await app.key_value(spark_events.BUCKET)))
        async with story.following():
            await story.arrived(1)
        assert await story.stored() == log.facts


@pytest.fixture
async def two_directories(make_app: Callable[..., App], directory: Path) -> AsyncIterator[Story]:
    directories = [str(directory / name) for name in "ab"]
    async with make_app(event_log_dirs=directories) as app:
        yield Story(app, directory, Positions(await app.key_value(spark_events.BUCKET)))


async def test_of_two_logs_of_one_application_id_one_is_published_and_the_other_is_told(
    two_directories: Story, told: Told
) -> None:
    story = two_directories
    log = SparkLog(story.directory / "b", "local-1")
    log.jobs(1)
    async with story.following():
        await story.arrived(3)
        SparkLog(story.directory / "a", "local-1", started=2).jobs(9)
        await told.signal.until(lambda: "path" in told.last)
        log.jobs(1)
        await story.arrived(5)
    told.entries.clear()
    async with story.following():  # the same one after a restart
        await told.signal.until(lambda: told.entries != [])
        log.jobs(1)
        await story.arrived(7)
    (entry,) = told.entries
    assert entry["path"] == str(story.directory / "a" / "local-1.zstd")
    assert f"{story.directory / 'b' / 'local-1.zstd'} has the same application id" in entry["problem"]
    assert await story.stored() == log.facts
    assert story.outcomes == {"stored": 7}


async def test_another_run_of_an_application_id_is_told_when_the_log_of_the_first_is_gone(
    two_directories: Story, told: Told
) -> None:
    story = two_directories
    log = SparkLog(story.directory / "a", "local-1")
    log.jobs(1)
    async with story.following():
        await story.arrived(3)
        (story.directory / "a" / "local-1.zstd.inprogress").unlink()
        SparkLog(story.directory / "away", "local-1", started=2).jobs(9)
        (story.directory / "away").rename(story.directory / "b")
        await told.signal.until(lambda: "another run" in told.last.get("problem", ""))
    assert told.last["path"] == str(story.directory / "b" / "local-1.zstd")
    assert await story.stored() == log.facts


async def test_a_log_that_another_run_overwrites_is_told(story: Story, told: Told) -> None:
    log = story.log()
    log.jobs(3)
    async with story.following():
        await story.arrived(7)
        (story.directory / "local-1.zstd.inprogress").unlink()
        other = SparkLog(story.directory, "local-1", started=2)
        await told.signal.until(lambda: "another run" in told.last.get("problem", ""))
    other.jobs(20)  # its log is longer than that of the first one was
    told.entries.clear()
    async with story.following():
        await told.signal.until(lambda: "another run" in told.last.get("problem", ""))
    assert await story.stored() == log.facts


async def test_a_log_that_is_moved_to_another_directory_goes_on_where_it_was(two_directories: Story) -> None:
    story = two_directories
    log = SparkLog(story.directory / "a", "local-1")
    log.jobs(2)
    (story.directory / "b").mkdir()
    async with story.following():
        await story.arrived(5)
        log.jobs(1)
        log.end()
        (story.directory / "a" / "local-1.zstd").rename(story.directory / "b" / "local-1.zstd")
        await story.arrived(8)
    assert await story.stored() == log.facts
    assert story.outcomes == {"stored": 8}


@pytest.mark.parametrize("backend", [{"kind": "in_memory"}])
@pytest.mark.parametrize(("seconds", "warnings"), [(59, 1), (60, 0), (0, 0)])
async def test_drivers_that_are_called_lost_within_a_minute_are_warned_of(
    make_app: Callable[..., App], directory: Path, told: Told, seconds: float, warnings: int
) -> None:
    SparkLog(directory, "local-1")
    async with make_app(lost_after_seconds=seconds) as app:
        story = Story(app, directory, Positions(await app.key_value(spark_events.BUCKET)))
        async with story.following():
            await story.arrived(1)
    assert [entry["event"] for entry in told.entries] == ["spark_events.lost_after_is_short"] * warnings


async def test_files_that_cannot_be_read_are_told_once_and_stop_nobody(story: Story, told: Told) -> None:
    log = story.log()
    (story.directory / "notes.txt").write_text("Dear all,")
    (story.directory / "local-7.zstd").write_bytes(b"not compressed at all")
    foreign = story.directory / "local-8.lzf.inprogress"
    foreign.touch()
    async with story.following():
        await story.arrived(1)
        log.jobs(5)
        await story.arrived(11)
        foreign.write_bytes(b"more")
        log.end()
        await story.arrived(12)
    assert await story.stored() == log.facts
    problems = {Path(entry["path"]).name: entry["problem"] for entry in told.entries}
    assert len(problems) == len(told.entries) == 3, told.entries
    assert problems["notes.txt"] == "not a Spark event log"
    assert "damaged" in problems["local-7.zstd"]
    assert "spark.eventLog.compression.codec=zstd" in problems["local-8.lzf"]


@pytest.mark.parametrize("rests_after", [0.0, 60.0], ids=["when it rested", "at once"])
async def test_a_log_that_is_copied_under_its_final_name_is_published_to_its_end(
    story: Story, told: Told, monkeypatch: pytest.MonkeyPatch, rests_after: float
) -> None:
    monkeypatch.setattr(spark_events, "REST_SECONDS", rests_after)
    log, original, copied = made_elsewhere(story)
    copied.write_bytes(original[: len(original) // 2])

    async with story.following():
        await told.signal.until(lambda: told.entries != [])
        with copied.open("ab") as out:
            out.write(original[len(original) // 2 :])
        await story.arrived(22)

    assert await story.stored() == log.facts
    assert story.outcomes == {"stored": 22}
    assert ["ends in the middle of an event" in entry["problem"] for entry in told.entries] == [True]


async def test_while_a_log_is_copied_one_warning_says_that_it_has_no_end_yet(story: Story, told: Told) -> None:
    log, original, copied = made_elsewhere(story)
    position = f"{cluster_of(story.app)}/local-1"
    parts = [len(original) * part // 4 for part in range(1, 4)]

    async with story.following():
        for number, end in enumerate(parts, 1):
            copied.write_bytes(original[:end])
            await story.positions.signal.until(partial(has, story.positions.put_to, position, number))
        copied.write_bytes(original)
        await story.arrived(22)

    assert await story.stored() == log.facts
    assert ["ends in the middle of an event" in entry["problem"] for entry in told.entries] == [True]


def has(keys: list[str], key: str, count: int) -> bool:
    return keys.count(key) >= count


async def test_the_sql_execution_of_a_spark_that_does_not_say_how_it_ended_ends_as_its_jobs_do(story: Story) -> None:
    log = story.log()
    log.write(f"{SQL}Start", executionId=0, description="collect", time=2)
    log.write(
        "SparkListenerJobStart", **{"Job ID": 0, "Stage Infos": [], "Properties": {"spark.sql.execution.id": "0"}}
    )
    log.write("SparkListenerJobEnd", **{"Job ID": 0, "Job Result": {"Result": "JobFailed", "Exception": {}}})
    log.write(f"{SQL}End", executionId=0, time=5)

    async with story.following():
        await story.arrived(5)

    ends = [found async for found in story.app.replay("spark_job", {"event": "end"}, from_id=1)]
    assert [(end.identifier["kind"], end.payload["status"]) for end in ends] == [("job", "failed"), ("sql", "failed")]


async def test_an_agent_that_starts_with_new_logs_publishes_no_older_one_also_when_it_starts_again(
    make_app: Callable[..., App], directory: Path
) -> None:
    async with make_app(start="new") as app:
        story = Story(app, directory, Positions(await app.key_value(spark_events.BUCKET)))
        old, running = story.log("local-1"), story.log("local-2")
        for log in (old, running):
            log.jobs(1)
        old.end()
        for log in (old, running):
            log.silent_for(3600)
        async with story.following():
            story.log("local-3").jobs(1)
            await story.arrived(3)
        running.jobs(1)
        async with story.following():
            await story.arrived(8)

        assert [await story.stored(name) for name in ("local-1", "local-2")] == [[], running.facts]


async def test_a_log_that_is_rewritten_in_place_is_read_again_and_nothing_of_it_stored_twice(
    story: Story, told: Told
) -> None:
    log = story.log()
    log.jobs(10)
    path = story.directory / "local-1.zstd.inprogress"
    original = path.read_bytes()
    async with story.following():
        await story.arrived(21)
        path.write_bytes(original[: len(original) // 2])
        await told.signal.until(lambda: told.entries != [])
    async with story.following():
        with path.open("ab") as out:
            out.write(original[len(original) // 2 :])
        log.jobs(5)
        await story.arrived(31)

    assert await story.stored() == log.facts
    assert story.outcomes == {"stored": 31}, "what the stream holds is not even sent again"
    assert ["was replaced" in entry["problem"] for entry in told.entries] == [True]


async def test_what_is_followed_behind_incomplete_and_lost_is_measured(
    story: Story, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    notify, full = story.app.notify, True

    async def notify_when_there_is_room(*args: Any, **keywords: Any) -> Receipt:
        if full:
            raise FullError("full")
        return await notify(*args, **keywords)

    monkeypatch.setattr(story.app, "notify", notify_when_there_is_room)
    async with story.following():
        await shown.until("directory_missing", 1, str(story.directory))
        log = story.log()
        (story.directory / "notes.txt").write_text("Dear all,")
        await shown.until("unread_bytes", story.bytes_on_disk)
        assert shown.value("oldest_unpublished_age_seconds") != 0
        assert shown.value("directory_missing", str(story.directory)) == 0
        await shown.until("incomplete_logs", 1, "not_supported")

        full = False
        await shown.until("unread_bytes", 0)
        await shown.until("oldest_unpublished_age_seconds", 0)
        assert await story.stored() == log.facts
        await shown.until("followed_logs", 2)
        assert shown.value("lost_applications") == 0
        log.silent_for(4000)
        await shown.until("lost_applications", 1)
        log.jobs(1)
        await shown.until("lost_applications", 0)
        assert time.time() - (shown.value("last_search_timestamp_seconds") or 0) < PATIENCE_SECONDS


async def test_a_damaged_log_is_measured_as_incomplete_while_it_is_there(story: Story, shown: Shown) -> None:
    story.log()
    damaged = story.directory / "local-7.zstd"
    damaged.write_bytes(b"not compressed at all")
    async with story.following():
        await shown.until("incomplete_logs", 1, "left_out")
        await shown.until("unread_bytes", 0)  # what is left out is not behind
        damaged.unlink()
        await shown.until("incomplete_logs", 0, "left_out")


async def test_what_was_left_out_is_measured_for_a_while_when_the_log_is_read_on(
    story: Story, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = story.log()
    log.write_line('{"Event":"SparkListenerJobEnd","Job ID":7,"Compl')
    log.jobs(1)
    async with story.following():
        await story.arrived(3)
        log.jobs(1)
        await story.arrived(5)
        await shown.until("incomplete_logs", 1, "left_out")
        monkeypatch.setattr(spark_events, "REST_SECONDS", 0.0)
        await shown.until("incomplete_logs", 0, "left_out")


async def test_a_damaged_log_is_published_when_a_good_copy_takes_its_place(story: Story, told: Told) -> None:
    log, good, copied = made_elsewhere(story)
    copied.write_bytes(good[:-300] + bytes(300))
    async with story.following():
        await told.signal.until(lambda: told.entries != [])
        copied.write_bytes(good)
        await story.arrived(22)
    assert await story.stored() == log.facts
    assert story.outcomes == {"stored": 22}
    assert ["damaged" in entry["problem"] for entry in told.entries] == [True]


async def test_a_log_that_is_removed_is_forgotten(story: Story) -> None:
    story.log()
    async with story.following():
        await story.arrived(1)
        (story.directory / "local-1.zstd.inprogress").unlink()
        story.log("local-2")
        await story.arrived(2)


@pytest.mark.parametrize("backend", [{"kind": "in_memory"}])
@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"event_log_dirs": []}, "event_log_dirs"),
        ({"event_log_dirs": ["/logs", "dbfs:/logs"]}, "dbfs:/logs: event logs cannot be read there: mount"),
        ({"cluster": "my cluster"}, "cluster"),
        ({"poll_seconds": 0}, "poll_seconds"),
        ({"lost_after_seconds": -1}, "lost_after_seconds"),
        ({"event_log_dir": "/tmp"}, "did you mean 'event_log_dirs'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    make_app: Callable[..., App], settings: dict[str, Any], problem: str
) -> None:
    (mistake,) = make_app(**settings).mistakes()
    assert "workers.agents.spark-events" in mistake
    assert problem in mistake


def constantly(value: Any) -> Callable[..., Awaitable[Any]]:
    async def answer(*_: Any) -> Any:
        return value

    return answer


def cluster_of(app: App) -> str:
    return str(app.settings(spark_events.router).cluster)


WITHOUT_PYSPARK = """
import sys


class NoPySpark:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "py4j"):
            raise ModuleNotFoundError(f"{name} was asked for")


sys.meta_path.insert(0, NoPySpark())
import aviso_agents.spark_events, aviso_workers.cli.spark, aviso_workers.spark.listeners
from aviso_workers.spark import log_directories
from aviso_workers.spark.event_log import EventLogReader, LogPosition

found = log_directories.LogDirectories([sys.argv[1]])
(path,), _ = found.find()
log = found.snapshot(path, None)
print(len(EventLogReader(lambda line: line, LogPosition()).read(log).events))
"""


@pytest.mark.slow
def test_event_logs_are_read_without_pyspark(directory: Path) -> None:
    log = SparkLog(directory, "local-1", rolling=False)
    log.jobs(2)
    ran = subprocess.run([sys.executable, "-c", WITHOUT_PYSPARK, str(directory)], capture_output=True, text=True)
    assert (ran.stdout.strip(), ran.stderr) == (str(len(log.facts) + 3), ""), "a line of Spark's version, two of tasks"
