"""The event logs that Spark's own tests read, of Spark 1.2 to 4.1, beside a plain reading of their lines.

The first ones (Spark 1.2) are folders with one file; the others are single files, not compressed.
"""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from aviso_workers.spark import event_log
from aviso_workers.spark.event_log import EventLogReader, LogPosition
from aviso_workers.spark.job_events import Decoder, JobEvent, SparkApplication
from tests.interop import programs
from tests.spark.logs import NAMES, logs_in

LOGS = "spark-events/"
OF_FOLDER = "EVENT_LOG_1"
VALUES = {"1.6.3": 264, "2.4.8": 428, "3.0.3": 508, "3.5.7": 787, "4.1.0": 787}
"""How many values of the logs in each jar are compared, the ids of what events are about included."""
TIME = {
    "application.start": "Timestamp",
    "application.end": "Timestamp",
    "job.start": "Submission Time",
    "job.end": "Completion Time",
    "executor.added": "Timestamp",
    "executor.removed": "Timestamp",
    "sql.start": "time",
    "sql.end": "time",
}


@pytest.fixture(params=programs.SPARK_CORES, ids="-".join)
def version_and_logs(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """The version of Spark, and a directory with the logs of its tests, each a single file."""
    program, version = request.param
    with zipfile.ZipFile(programs.spark_core_tests(program, version)) as jar:
        for name in jar.namelist():
            if not name.startswith(LOGS) or name.endswith("/"):
                continue
            folder, _, file = name.removeprefix(LOGS).partition("/")
            if file in ("", OF_FOLDER):
                (tmp_path / folder).write_bytes(jar.read(name))
    return version, tmp_path


def plain(file: Path) -> list[dict[str, Any]]:
    """The events of a log, a line each."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def kind_of(line: dict[str, Any]) -> str:
    """What we call the event of a line; empty where we publish none of it."""
    name = str(line["Event"]).rpartition(".")[2]
    return {**NAMES, "SparkListenerExecutorRemoved": "executor.removed"}.get(name, "")


def values_of(kind: str, line: dict[str, Any]) -> dict[str, Any]:
    """The values of a line that its event has to have, read in the plainest way."""
    values = {"time": line.get(TIME.get(kind, ""))}
    if kind.startswith("stage."):
        stage = line["Stage Info"]
        moment = stage.get("Submission Time" if kind == "stage.start" else "Completion Time")
        values = {"time": moment, "name": stage["Stage Name"], "tasks": stage["Number of Tasks"]}
        if kind == "stage.end":
            values["status"] = "failed" if stage.get("Failure Reason") else "succeeded"
    match kind:
        case "application.start":
            values |= {"name": line["App Name"], "application_id": line.get("App ID")}
        case "job.start":
            stages = line["Stage Infos"]
            values |= {"stages": len(stages), "tasks": sum(stage["Number of Tasks"] for stage in stages)}
        case "job.end":
            values["status"] = "succeeded" if line["Job Result"]["Result"] == "JobSucceeded" else "failed"
        case "executor.added":
            values |= {"host": line["Executor Info"]["Host"], "cores": line["Executor Info"]["Total Cores"]}
        case "sql.start":
            values["description"] = line["description"]
    return {name: value for name, value in values.items() if value is not None}


def subject_of(kind: str, line: dict[str, Any]) -> str | None:
    """The id of what an event is about; None for an application."""
    if kind.startswith("stage."):
        return f"{line['Stage Info']['Stage ID']}.{line['Stage Info']['Stage Attempt ID']}"
    names = {"job": "Job ID", "executor": "Executor ID", "sql": "executionId"}
    name = names.get(kind.partition(".")[0])
    return None if name is None else str(line[name])


def published(log: event_log.EventLog) -> list[JobEvent]:
    with closing(EventLogReader(Decoder(SparkApplication.of_log(log.name)), LogPosition())) as reader:
        batch = reader.read(log)
    assert (batch.problems, batch.more) == ([], False), log.name
    return batch.events


def test_each_event_is_published_with_the_values_of_its_line(version_and_logs: tuple[str, Path]) -> None:
    version, directory = version_and_logs
    logs, compared = logs_in(directory), Counter[str]()
    assert {*logs} == {file.name for file in directory.iterdir()}
    for name, log in logs.items():
        lines = [(kind, line) for line in plain(directory / name) if (kind := kind_of(line))]
        events = published(log)
        assert [f"{event.kind}.{event.event}" for event in events] == [kind for kind, _ in lines], name
        for event, (kind, line) in zip(events, lines, strict=True):
            wanted = values_of(kind, line)
            assert {field: event.payload.get(field) for field in wanted} == wanted, (name, line)
            assert event.id == (subject_of(kind, line) or event.application.id), (name, line)
            compared[kind] += len(wanted) + 1
        assert len({event.message_id("local") for event in events}) == len(events), name
    assert compared.total() == VALUES[version], compared
