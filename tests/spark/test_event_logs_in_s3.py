"""Event logs in an object store: a server of the S3 API on this machine, and objects that appear whole."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from aviso_agents import spark_events
from aviso_workers import App
from aviso_workers.spark import log_directories
from aviso_workers.spark.event_log import EventLog, EventLogReader, LogPosition
from aviso_workers.spark.log_directories import LogDirectories
from tests.spark.test_event_log import line, on_disk, read_all, take
from tests.waits import PATIENCE_SECONDS

boto3 = pytest.importorskip("boto3")
moto_server = pytest.importorskip("moto.server")

KEYS = ("cluster", "application", "kind", "event", "id")


class Requests(logging.Handler):
    """What the server was asked."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())

    def take(self, method: str) -> list[str]:
        """Those with this method since the last time."""
        lines, self._lines = self._lines, []
        return [line for line in lines if f"{method} /" in line]


@pytest.fixture(scope="module")
def requests() -> Iterator[Requests]:
    requests = Requests()
    logger = logging.getLogger("werkzeug")
    logger.addHandler(requests)
    yield requests
    logger.removeHandler(requests)


@pytest.fixture(scope="module")
def endpoint(requests: Requests) -> Iterator[str]:
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patched.setenv("AWS_ACCESS_KEY_ID", "an-id")
        patched.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
        patched.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield f"http://{host}:{port}"
    server.stop()


class Bucket:
    """A bucket, as Spark sees it: with objects that are there or not."""

    def __init__(self, endpoint: str) -> None:
        self.name = f"logs-{uuid.uuid4().hex[:8]}"
        self._client = boto3.client("s3", endpoint_url=endpoint)

    @property
    def url(self) -> str:
        return f"s3a://{self.name}/spark/events"

    def make(self) -> Bucket:
        self._client.create_bucket(Bucket=self.name)
        return self

    def put(self, name: str, content: bytes = b"") -> None:
        self._client.put_object(Bucket=self.name, Key=f"spark/events/{name}", Body=content)

    def delete(self, name: str) -> None:
        self._client.delete_object(Bucket=self.name, Key=f"spark/events/{name}")


@pytest.fixture
def bucket(endpoint: str) -> Bucket:
    return Bucket(endpoint)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every search lists."""
    monkeypatch.setattr(log_directories, "LISTING_SECONDS", 0.0)
    monkeypatch.setattr(log_directories, "LISTING_SHARE", 0.0)


def found(directories: LogDirectories) -> dict[str, EventLog]:
    paths, problems = directories.find()
    assert problems == {}
    logs = [directories.snapshot(path, None) for path in paths]
    return {log.name: log for log in logs if isinstance(log, EventLog)}


def reader_of(directories: LogDirectories, log: EventLog, position: LogPosition) -> EventLogReader[bytes]:
    return EventLogReader(take, position, open_file=lambda path: directories.open(path, log=log.path))


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("codec", ["", ".zstd"])
def test_a_rolling_log_is_read_file_by_file_as_its_objects_appear(bucket: Bucket, codec: str) -> None:
    bucket.make().put("eventlog_v2_app-1/appstatus_app-1.inprogress")
    bucket.put(f"eventlog_v2_app-1/events_1_app-1{codec}", on_disk([line(1), line(2)], codec))
    directories = LogDirectories([bucket.url])
    log = found(directories)["app-1"]
    reader = reader_of(directories, log, LogPosition())
    assert (read_all(reader, log), log.complete) == (([line(1), line(2)], []), False)

    bucket.put(f"eventlog_v2_app-1/events_2_app-1{codec}", on_disk([line(3)], codec))
    assert read_all(reader, found(directories)["app-1"]) == ([line(3)], [])

    bucket.put(f"eventlog_v2_app-1/events_2_app-1{codec}.compact", on_disk([line(2)], ".zstd"))
    bucket.put(f"eventlog_v2_app-1/events_3_app-1{codec}", on_disk([line(4)], codec))
    bucket.put("eventlog_v2_app-1/appstatus_app-1")  # a rename is a copy, and then a removal
    again = reader_of(directories, log, LogPosition(index=3))
    log = found(directories)["app-1"]
    assert log.complete
    assert [file.place for file in log.files] == [(2, True), (3, False)]
    assert read_all(again, log) == ([line(4)], [])


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("codec", ["", ".zstd"])
def test_a_single_log_is_read_on_where_its_object_is_replaced_by_one_that_has_more(bucket: Bucket, codec: str) -> None:
    bucket.make().put(f"app-1{codec}.inprogress", on_disk([line(1)], codec))
    directories = LogDirectories([bucket.url])
    log = found(directories)["app-1"]
    reader = reader_of(directories, log, LogPosition())
    assert read_all(reader, log) == ([line(1)], [])

    bucket.put(f"app-1{codec}", on_disk([line(1), line(2)], codec))
    both = found(directories)["app-1"]
    assert (both.complete, read_all(reader, both)) == (True, ([line(2)], []))
    bucket.delete(f"app-1{codec}.inprogress")
    assert found(directories)["app-1"].files == both.files


@pytest.mark.usefixtures("at_once")
def test_what_is_no_log_is_left_out(bucket: Bucket) -> None:
    bucket.make().put("eventlog_v2_app-1/events_1_app-1")
    for name in ("eventlog_v2_app-2_$folder$", ".hidden", "old/app-3", "old/eventlog_v2_app-4/events_1_app-4", "app-5"):
        bucket.put(name)
    assert sorted(found(LogDirectories([f"{bucket.url}/"]))) == ["app-1", "app-5"]


def test_all_applications_are_listed_by_one_request_and_not_again_at_once(bucket: Bucket, requests: Requests) -> None:
    bucket.make()
    for application in range(30):
        bucket.put(f"eventlog_v2_app-{application}/appstatus_app-{application}")
        bucket.put(f"eventlog_v2_app-{application}/events_1_app-{application}", on_disk([line(1)]))
    requests.take("PUT")
    directories = LogDirectories([bucket.url])
    for _ in range(3):
        assert len(found(directories)) == 30
    assert len(requests.take("GET")) == 1


def test_a_file_is_read_by_ranges_from_where_the_reader_is(bucket: Bucket, requests: Requests) -> None:
    events = [line(number, "SparkListenerTaskEnd") for number in range(80_000)]
    content = b"".join(event + b"\n" for event in events)
    assert 3 < len(content) / log_directories.READ_AHEAD < 4
    bucket.make().put("app-1", content)
    directories = LogDirectories([bucket.url])
    log = found(directories)["app-1"]
    requests.take("GET")

    first = reader_of(directories, log, LogPosition())
    assert read_all(first, log) == (events, [])
    whole = requests.take("GET")
    half = sum(len(event) + 1 for event in events[:75_000])
    rest = reader_of(directories, log, LogPosition(offset=half, size=half))
    assert read_all(rest, log) == (events[75_000:], [])
    assert (len(whole), len(requests.take("GET"))) == (4, 1)
    assert all(" 206 " in request for request in whole)


def test_a_store_that_does_not_answer_is_told_and_the_other_directories_are_found(
    bucket: Bucket, tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app-1").touch()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port}")
    paths, problems = LogDirectories([bucket.url, str(tmp_path)]).find()
    assert paths == {str(tmp_path / "app-1")}
    assert list(problems) == [bucket.url]
    assert "Could not connect to server" in problems[bucket.url]
    assert "a-secret" not in problems[bucket.url]


@pytest.mark.usefixtures("at_once")
def test_an_object_that_is_gone_since_the_listing_is_no_event_and_no_loss(bucket: Bucket) -> None:
    bucket.make().put("app-1", on_disk([line(1)]))
    directories = LogDirectories([bucket.url])
    log = found(directories)["app-1"]
    bucket.delete("app-1")
    bucket.put("app-2")
    reader = reader_of(directories, log, LogPosition())
    with pytest.raises(FileNotFoundError):
        reader.read(log)
    assert reader.position == LogPosition()
    assert set(found(directories)) == {"app-2"}


# The agent


@pytest.fixture
async def app(bucket: Bucket, tmp_path: Path) -> AsyncIterator[App]:
    document = {
        "notification_backend": {"kind": "in_memory"},
        "notification_schema": {
            "spark_job": {
                "topic": {"base": "spark", "key_order": list(KEYS)},
                "identifier": {key: {"type": "StringHandler", "required": True} for key in KEYS},
            }
        },
        "workers": {"agents": {"spark-events": {"event_log_dirs": [bucket.url], "poll_seconds": 0.01}}},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(document))
    app = App("spark", config=file)
    app.include(spark_events.router)
    async with app:
        yield app


@asynccontextmanager
async def following(app: App) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(spark_events.follow_event_logs, app)
        yield
        tasks.cancel_scope.cancel()


async def arrived(app: App, ids: list[str]) -> None:
    """Wait until the stream holds so many events; they are these."""
    stored = []
    with anyio.fail_after(PATIENCE_SECONDS):
        async for notification in app.watch("spark_job", from_id=1):
            stored.append(f"{notification.identifier['application']} {notification.identifier['id']}")
            if len(stored) == len(ids):
                break
    assert stored == ids


@pytest.mark.anyio
@pytest.mark.usefixtures("at_once")
async def test_the_agent_waits_for_a_bucket_and_publishes_each_event_once_also_after_a_restart(
    app: App, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    monkeypatch.setattr(spark_events, "SEARCH_SECONDS", 0.02)
    async with following(app):
        with anyio.fail_after(PATIENCE_SECONDS):
            await told.something.wait()
        bucket.make().put("eventlog_v2_app-1/appstatus_app-1.inprogress")
        bucket.put("eventlog_v2_app-1/events_1_app-1.zstd", on_disk([job_end(1), job_end(2)], ".zstd"))
        await arrived(app, ["app-1 1", "app-1 2"])
    bucket.put("eventlog_v2_app-1/events_2_app-1.zstd", on_disk([job_end(3)], ".zstd"))
    async with following(app):
        await arrived(app, ["app-1 1", "app-1 2", "app-1 3"])
        bucket.put("eventlog_v2_app-1/events_3_app-1.zstd", on_disk([job_end(4)], ".zstd"))
        await arrived(app, ["app-1 1", "app-1 2", "app-1 3", "app-1 4"])
    assert [entry["directory"] for entry in told.entries] == [bucket.url, bucket.url]
    assert "bucket does not exist" in told.entries[0]["problem"]


def job_end(job: int) -> bytes:
    result = b'{"Result":"JobSucceeded"}'
    return b'{"Event":"SparkListenerJobEnd","Job ID":%d,"Completion Time":2,"Job Result":%s}' % (job, result)


class Told:
    """What the agent logs."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.something = anyio.Event()

    def _tell(self, event: str, **fields: Any) -> None:
        self.entries.append({"event": event, **fields})
        self.something.set()

    info = warning = error = _tell


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()
    monkeypatch.setattr(spark_events, "log", told)
    return told
