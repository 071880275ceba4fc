"""What real Spark writes is what the reader and the projections expect."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct, structs
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from aviso_workers.spark import event_log, job_events
from aviso_workers.spark.event_log import EventLog, EventLogReader, LogPosition
from aviso_workers.spark.job_events import JobEvent, SparkApplication
from tests.spark.logs import NAMES, raw

MODES = {
    "rolling": {},  # Spark's default: compressed, several files
    "single": {"spark.eventLog.rolling.enabled": "false", "spark.eventLog.compression.codec": "lz4"},
    "plain": {"spark.eventLog.rolling.enabled": "false", "spark.eventLog.compress": "false"},
}


class Recorded(Struct, frozen=True, kw_only=True):
    """An application that has run: it counted, failed once, and streamed a file of three lines."""

    id: str
    directory: Path
    query_id: str


@pytest.fixture(scope="module", params=MODES)
def application(
    request: pytest.FixtureRequest,
    start_spark: Callable[..., SparkSession],
    tmp_path_factory: pytest.TempPathFactory,
) -> Recorded:
    directory = tmp_path_factory.mktemp(request.param)
    (directory / "lines").mkdir()
    (directory / "lines" / "1.txt").write_text("one\ntwo\nthree\n")
    spark = start_spark(directory / "logs", MODES[request.param])
    try:
        spark.sparkContext.setJobDescription("count by remainder")
        spark.range(100).selectExpr("id % 3 AS remainder").groupBy("remainder").count().collect()
        with pytest.raises(PySparkException, match="boom"):
            spark.sql("SELECT raise_error('boom')").collect()
        stream = spark.readStream.format("text").load(str(directory / "lines")).writeStream.format("noop")
        stream = stream.option("checkpointLocation", str(directory / "checkpoint")).trigger(availableNow=True)
        query = stream.start()
        query.awaitTermination()
        return Recorded(id=spark.sparkContext.applicationId, directory=directory / "logs", query_id=str(query.id))
    finally:
        spark.stop()


@pytest.fixture
def log(application: Recorded) -> EventLog:
    (path,) = event_log.find(str(application.directory))
    log = event_log.snapshot(path)
    assert log is not None
    return log


@pytest.fixture
def events(log: EventLog) -> list[JobEvent]:
    return read(log, LogPosition())


def read(log: EventLog, position: LogPosition) -> list[JobEvent]:
    decode = partial(job_events.decode, application=SparkApplication.of_log(log.name))
    with closing(EventLogReader(decode, position)) as reader:
        batch = reader.read(log)
    assert (batch.problems, batch.more) == ([], False)
    return batch.events


@pytest.mark.slow
def test_the_log_is_complete_and_named_by_its_application(log: EventLog, application: Recorded) -> None:
    assert (log.complete, log.problem) == (True, None)
    assert SparkApplication.of_log(log.name) == SparkApplication(id=application.id)


def test_each_event_but_those_of_tasks_is_there_once(log: EventLog, events: list[JobEvent]) -> None:
    written = Counter(NAMES.get(event["Event"].rpartition(".")[2]) for event in raw(log))
    del written[None]
    assert Counter(f"{event.kind}.{event.event}" for event in events) == written
    assert set(written) == set(NAMES.values()), "the recorded application does a bit of everything"
    ids = Counter(event.message_id("c") for event in events)
    repeated = {message_id: times for message_id, times in ids.items() if times > 1}
    assert repeated == {}


def test_what_started_ended(events: list[JobEvent]) -> None:
    for kind in ("application", "job", "stage", "sql", "query"):
        started, ended = (
            {event.id for event in events if (event.kind, event.event) == (kind, which)} for which in ("start", "end")
        )
        assert started == ended != set(), kind


def test_the_failure_is_told_with_its_reason(events: list[JobEvent]) -> None:
    failed = [event for event in events if event.payload.get("status") == "failed"]
    assert Counter(event.kind for event in failed) == {"stage": 1, "job": 1, "sql": 1}
    assert all("boom" in event.payload["error"] for event in failed), failed


def test_the_query_tells_what_it_read(events: list[JobEvent], application: Recorded) -> None:
    reports = [event for event in events if (event.kind, event.event) == ("query", "progress")]
    assert {event.id for event in reports} == {application.query_id}
    assert sum(event.payload["rows"] for event in reports) == 3
    jobs = [event.payload for event in events if (event.kind, event.event) == ("job", "start")]
    assert application.query_id in {job.get("query") for job in jobs}
    assert "count by remainder" in {job.get("description") for job in jobs}


def test_payloads_are_small_and_carry_no_properties(log: EventLog, events: list[JobEvent]) -> None:
    sizes = {event.message_id("c"): len(json.dumps(event.payload)) for event in events}
    assert max(sizes.values()) < 5000, sizes
    text = json.dumps([event.payload for event in events])
    assert "spark.app.id" in json.dumps(raw(log))
    assert "spark.app.id" not in text


def test_reading_goes_on_anywhere(log: EventLog, events: list[JobEvent]) -> None:
    (file,) = log.files
    lines = [json.dumps(event, separators=(",", ":")) for event in raw(log)]
    offset = len("".join(f"{line}\n" for line in lines[: len(lines) // 2]))
    rest = read(log, LogPosition(index=file.index, offset=offset, size=1))
    assert 0 < len(rest) < len(events)
    assert rest == events[-len(rest) :]


@pytest.mark.slow
def test_wherever_the_log_is_cut_it_is_read_on_when_it_has_grown(log: EventLog, tmp_path: Path) -> None:
    (file,) = log.files
    content = Path(file.path).read_bytes()
    whole = raw(log)
    cut = tmp_path / Path(file.path).name
    for end in [*range(1, 25), *range(25, len(content), len(content) // 20), *range(len(content) - 25, len(content))]:
        reader = EventLogReader(json.loads, LogPosition())
        events = []
        for size in (end, len(content)):
            cut.write_bytes(content[:size])
            growing = structs.replace(log, files=(structs.replace(file, path=str(cut), size=size),), complete=False)
            batch = reader.read(growing)
            assert (batch.problems, batch.more) == ([], False), end
            events += batch.events
        reader.close()
        assert events == whole, end


@pytest.mark.slow
def test_what_sparks_own_compaction_leaves_is_read(
    log: EventLog, events: list[JobEvent], start_spark: Callable[..., SparkSession], tmp_path: Path
) -> None:
    rolled = tmp_path / f"eventlog_v2_{log.name}"
    rolled.mkdir()
    (rolled / f"appstatus_{log.name}").touch()
    lines = [json.dumps(event, separators=(",", ":")) + "\n" for event in raw(log)]
    size = -(-len(lines) // 4)
    for index in range(4):
        (rolled / f"events_{index + 1}_{log.name}").write_text("".join(lines[index * size : (index + 1) * size]))
    spark = start_spark(tmp_path / "logs", {})
    try:
        compact(spark, rolled)
    finally:
        spark.stop()
    compacted = event_log.snapshot(str(rolled))
    assert compacted is not None
    assert [(file.place, file.codec) for file in compacted.files] == [
        ((2, True), ""),
        ((3, False), ""),
        ((4, False), ""),
    ]
    decode = partial(job_events.decode, application=SparkApplication(id=log.name))
    with closing(EventLogReader(decode, LogPosition())) as reader:
        batch = reader.read(compacted)
    left = [event for event in events if event in batch.events]
    assert batch.events == left
    assert "application" in {event.kind for event in left}
    assert {event.id for event in events[-5:]} <= {event.id for event in left}, "the newest files are as they were"
    assert len(batch.problems) == 1, batch.problems


def compact(spark: SparkSession, rolled: Path) -> None:
    """All but the last two files, as a history server does."""
    jvm: Any = spark._jvm
    context: Any = spark.sparkContext._jsc
    path = jvm.org.apache.hadoop.fs.Path(rolled.as_uri())
    files = path.getFileSystem(context.hadoopConfiguration())
    history = jvm.org.apache.spark.deploy.history
    found = history.EventLogFileReader.apply(files, path).get().listEventLogFiles()
    compactor = history.EventLogFileCompactor(context.sc().conf(), context.hadoopConfiguration(), files, 2, 0.0)
    outcome = compactor.compact(found)
    assert outcome.code().toString() == "SUCCESS", outcome.toString()
