from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from aviso_workers.errors import UndecodableError
from aviso_workers.spark import job_events
from aviso_workers.spark.job_events import JobEvent, SparkApplication

APPLICATION = SparkApplication(id="local-1795221705647")
SQL = "org.apache.spark.sql.execution.ui.SparkListenerSQLExecution"
QUERY = "org.apache.spark.sql.streaming.StreamingQueryListener$Query"
STAGE = {"Stage ID": 7, "Stage Attempt ID": 1, "Stage Name": "collect at job.py:16", "Number of Tasks": 200}


def line(name: str, /, **fields: Any) -> bytes:
    """An event as Spark writes it, of which the tests state what counts."""
    return json.dumps({"Event": name, **fields}, separators=(",", ":")).encode()


def decode(name: str, fields: dict[str, Any]) -> JobEvent:
    event = job_events.decode(line(name, **fields), APPLICATION)
    assert event is not None, f"{name} says nothing"
    return event


@pytest.mark.parametrize(
    ("name", "fields", "kind", "event", "id", "payload"),
    [
        pytest.param(
            "SparkListenerApplicationStart",
            {"App Name": "index", "App ID": "local-1795221705647", "Timestamp": 5, "User": "root"},
            *("application", "start", "local-1795221705647"),
            {"time": 5, "name": "index", "application_id": "local-1795221705647"},
            id="application start",
        ),
        pytest.param(
            "SparkListenerApplicationEnd",
            {"Timestamp": 9, "ExitCode": 0},
            *("application", "end", "local-1795221705647"),
            {"time": 9, "exit_code": 0},
            id="application end",
        ),
        pytest.param(
            "SparkListenerApplicationEnd",
            {"Timestamp": 9},
            *("application", "end", "local-1795221705647"),
            {"time": 9},
            id="application end, before Spark 4",
        ),
        pytest.param(
            "SparkListenerJobStart",
            {
                "Job ID": 0,
                "Submission Time": 5,
                "Stage Infos": [STAGE, STAGE],
                "Stage IDs": [7, 8],
                "Properties": {
                    "spark.job.description": "index the fields",
                    "spark.jobGroup.id": "nightly",
                    "spark.sql.execution.id": "3",
                    "sql.streaming.queryId": "q",
                    "streaming.sql.batchId": "12",
                    "spark.hadoop.fs.s3a.secret.key": "secret",
                },
            },
            *("job", "start", "0"),
            {
                "time": 5,
                "description": "index the fields",
                "group": "nightly",
                "sql_execution": "3",
                "query": "q",
                "batch_id": 12,
                "stages": 2,
                "tasks": 400,
            },
            id="job start",
        ),
        pytest.param(
            "SparkListenerJobEnd",
            {"Job ID": 0, "Completion Time": 9, "Job Result": {"Result": "JobSucceeded"}},
            *("job", "end", "0"),
            {"time": 9, "status": "succeeded"},
            id="job end",
        ),
        pytest.param(
            "SparkListenerJobEnd",
            {
                "Job ID": 3,
                "Completion Time": 9,
                "Job Result": {"Result": "JobFailed", "Exception": {"Message": "boom", "Stack Trace": []}},
            },
            *("job", "end", "3"),
            {"time": 9, "status": "failed", "error": "boom"},
            id="job failed",
        ),
        pytest.param(
            "SparkListenerStageSubmitted",
            {"Stage Info": {**STAGE, "Submission Time": 5}, "Properties": {}},
            *("stage", "start", "7.1"),
            {"time": 5, "name": "collect at job.py:16", "tasks": 200},
            id="stage submitted",
        ),
        pytest.param(
            "SparkListenerStageCompleted",
            {"Stage Info": {**STAGE, "Submission Time": 5, "Completion Time": 9, "Failure Reason": "boom"}},
            *("stage", "end", "7.1"),
            {
                "time": 9,
                "name": "collect at job.py:16",
                "tasks": 200,
                "duration_ms": 4,
                "status": "failed",
                "error": "boom",
            },
            id="stage failed",
        ),
        pytest.param(
            SQL + "Start",
            {"executionId": 4, "rootExecutionId": 3, "description": "count", "time": 5, "jobGroupId": None},
            *("sql", "start", "4"),
            {"time": 5, "description": "count", "root": "3"},
            id="sql start",
        ),
        pytest.param(
            SQL + "End",
            {"executionId": 4, "time": 9, "errorMessage": ""},
            *("sql", "end", "4"),
            {"time": 9, "status": "succeeded"},
            id="sql end",
        ),
        pytest.param(
            SQL + "End",
            {"executionId": 4, "time": 9, "errorMessage": "boom"},
            *("sql", "end", "4"),
            {"time": 9, "status": "failed", "error": "boom"},
            id="sql failed",
        ),
        pytest.param(
            QUERY + "StartedEvent",
            {"id": "q", "runId": "r", "name": None, "timestamp": "2026-11-21T00:41:55.899Z"},
            *("query", "start", "q"),
            {"time": 1795221715899, "run_id": "r"},
            id="query started",
        ),
        pytest.param(
            QUERY + "ProgressEvent",
            {
                "progress": {
                    "id": "q",
                    "runId": "r",
                    "name": "archive",
                    "timestamp": "2026-11-21T00:41:56.024Z",
                    "batchId": 1,
                    "batchDuration": 239,
                    "durationMs": {"triggerExecution": 238},
                    "eventTime": {"watermark": "1970-01-01T00:00:01.000Z"},
                    "sources": [
                        {
                            "description": "RateStreamV2",
                            "startOffset": "0",
                            "endOffset": "1",
                            "latestOffset": "2",
                            "numInputRows": 5,
                        }
                    ],
                    "sink": {"description": "MemorySink", "numOutputRows": 5},
                }
            },
            *("query", "progress", "q"),
            {
                "time": 1795221716024,
                "name": "archive",
                "run_id": "r",
                "batch_id": 1,
                "duration_ms": 239,
                "rows": 5,
                "watermark": 1000,
                "sources": [
                    {
                        "description": "RateStreamV2",
                        "start_offset": "0",
                        "end_offset": "1",
                        "latest_offset": "2",
                        "rows": 5,
                    }
                ],
                "sink": {"description": "MemorySink", "rows": 5},
            },
            id="query progress",
        ),
        pytest.param(
            QUERY + "TerminatedEvent",
            {"id": "q", "runId": "r", "exception": "boom", "errorClassOnException": "USER_RAISED"},
            *("query", "end", "q"),
            {"run_id": "r", "status": "failed", "error": "boom", "error_class": "USER_RAISED"},
            id="query failed",
        ),
        pytest.param(
            "SparkListenerExecutorAdded",
            {"Timestamp": 5, "Executor ID": "12", "Executor Info": {"Host": "node1", "Total Cores": 8}},
            *("executor", "added", "12"),
            {"time": 5, "host": "node1", "cores": 8},
            id="executor added",
        ),
        pytest.param(
            "SparkListenerExecutorRemoved",
            {"Timestamp": 9, "Executor ID": "12", "Removed Reason": "lost"},
            *("executor", "removed", "12"),
            {"time": 9, "reason": "lost"},
            id="executor removed",
        ),
    ],
)
def test_an_event_says(
    name: str, fields: dict[str, Any], kind: str, event: str, id: str, payload: dict[str, Any]
) -> None:
    found = decode(name, fields)
    assert found.identifier("hpc") == {
        "cluster": "hpc",
        "application": APPLICATION.id,
        "kind": kind,
        "event": event,
        "id": id,
    }
    assert found.payload == payload


PYTHON = "org.apache.spark.sql.execution.datasources.v2.python"
AVISO_OFFSET = {"stream": "MARS", "created": "2026-11-21T00:00:00Z", "sequence": 7}


@pytest.mark.parametrize(
    ("description", "offset", "shown"),
    [
        (f"{PYTHON}.PythonMicroBatchStream@2b71fc7e", json.dumps(AVISO_OFFSET), "aviso stream MARS"),
        (f"{PYTHON}.PythonMicroBatchStreamWithAdmissionControl@2b71fc7e", AVISO_OFFSET, "aviso stream MARS"),
        (f"{PYTHON}.PythonMicroBatchStream@2b71fc7e", "7", f"{PYTHON}.PythonMicroBatchStream"),
        (f"{PYTHON}.PythonMicroBatchStream@2b71fc7e", None, f"{PYTHON}.PythonMicroBatchStream"),
        ("KafkaV2[Subscribe[mars]]", json.dumps(AVISO_OFFSET), "KafkaV2[Subscribe[mars]]"),
    ],
)
def test_progress_names_what_is_read_and_no_hash(description: str, offset: Any, shown: str) -> None:
    source = {"description": description, "endOffset": offset, "numInputRows": 5}
    sink = {"description": f"{PYTHON}.PythonTable@1c"}
    progress = {"id": "q", "runId": "r", "timestamp": "2026-11-21T00:41:56.024Z", "batchId": 1}
    found = decode(QUERY + "ProgressEvent", {"progress": {**progress, "sources": [source], "sink": sink}})
    assert found.payload["sources"][0]["description"] == shown
    assert found.payload["sink"]["description"] == f"{PYTHON}.PythonTable"


@pytest.mark.parametrize(
    "text",
    [
        line("SparkListenerTaskStart"),
        line("SparkListenerTaskEnd"),
        line("SparkListenerEnvironmentUpdate"),
        line(QUERY + "IdleEvent"),
        b'{"Event":"SparkListenerTaskEnd","and then":it is not even JSON',
    ],
)
def test_other_events_say_nothing_and_are_not_parsed(text: bytes) -> None:
    assert job_events.decode(text, APPLICATION) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (line("SparkListenerJobEnd")[:-1], "truncated"),
        (line("SparkListenerJobEnd"), "as Spark writes it: it has no 'Job Result'"),
        (b"", "not an event of Spark's"),
        (b'["Event"]', "not an event of Spark's"),
        (line("SparkListenerJobEnd", **{"Job Result": 7, "Completion Time": 9}), "TypeError"),
        (line(QUERY + "StartedEvent", id="q", runId="r", timestamp="yesterday"), "yesterday"),
    ],
)
def test_an_event_that_is_not_as_spark_writes_it_is_refused(text: bytes, problem: str) -> None:
    with pytest.raises(UndecodableError, match=problem):
        job_events.decode(text, APPLICATION)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("SparkListenerJobStart", {"Job ID": 3, "Stage Infos": []}),  # Spark 1.2
        ("SparkListenerJobEnd", {"Job ID": 3, "Job Result": {"Result": "JobSucceeded"}}),  # Spark 1.2
        (QUERY + "StartedEvent", {"id": "q", "runId": "r", "name": None}),  # Spark 2.1 to 2.4
    ],
)
def test_an_event_of_a_spark_that_wrote_no_time_has_none(name: str, fields: dict[str, Any]) -> None:
    assert "time" not in decode(name, fields).payload


def test_fields_may_be_in_any_order_with_blanks_between_them() -> None:
    text = b'{ "Timestamp" : 9, "Event" : "SparkListenerApplicationEnd" }\r'
    assert job_events.decode(text, APPLICATION) == decode("SparkListenerApplicationEnd", {"Timestamp": 9})


SUCCEEDED = {"Result": "JobSucceeded"}
JOB_FAILED = {"Result": "JobFailed", "Exception": {"Message": "boom"}}


@pytest.mark.parametrize(
    ("jobs", "said", "status"),
    [
        ([SUCCEEDED, JOB_FAILED], {}, "failed"),
        ([SUCCEEDED, SUCCEEDED], {}, "succeeded"),
        ([SUCCEEDED, None], {}, "unknown"),
        ([], {}, "unknown"),
        ([SUCCEEDED], {"errorMessage": "boom"}, "failed"),
        ([JOB_FAILED], {"errorMessage": ""}, "succeeded"),
    ],
)
def test_an_sql_execution_ends_as_spark_says_and_where_it_says_nothing_as_its_jobs_do(
    jobs: list[dict[str, Any] | None], said: dict[str, str], status: str
) -> None:
    decode = job_events.Decoder(APPLICATION)
    decode(line(SQL + "Start", executionId=7, description="collect", time=1))
    for job, result in enumerate(jobs):
        properties = {"spark.sql.execution.id": "7"}
        decode(line("SparkListenerJobStart", **{"Job ID": job, "Stage Infos": [], "Properties": properties}))
        if result:
            decode(line("SparkListenerJobEnd", **{"Job ID": job, "Job Result": result}))
    end = decode(line(SQL + "End", executionId=7, time=9, **said))
    assert end is not None
    assert end.payload["status"] == status


def test_the_end_of_an_sql_execution_whose_beginning_was_not_read_is_not_known() -> None:
    decode = job_events.Decoder(APPLICATION)
    decode(line("SparkListenerJobEnd", **{"Job ID": 3, "Job Result": SUCCEEDED}))
    end = decode(line(SQL + "End", executionId=7, time=9))
    assert end is not None
    assert end.payload["status"] == "unknown"


def test_long_texts_are_cut() -> None:
    event = decode(SQL + "End", {"executionId": 1, "time": 9, "errorMessage": "x" * 100_000})
    assert event.payload["error"] == "x" * (job_events.TEXT_LIMIT - 1) + "…"


@pytest.mark.parametrize(
    ("of", "event", "payload", "state", "error", "milliseconds"),
    [
        ("application", "end", {"time": 1, "exit_code": 0}, "COMPLETE", "", 1),
        ("application", "end", {"time": 1}, "COMPLETE", "", 1),
        ("application", "lost", {"last_heard": 5}, "ABORT", "", 5),
        ("application", "resumed", {"last_heard": 5}, "RUNNING", "", None),
        ("job", "lost", {"last_heard": 5}, "ABORT", "", 5),
        ("job", "end", {"time": 9, "status": "failed"}, "FAIL", "", 9),
        ("job", "end", {"time": 9, "status": "succeeded"}, "COMPLETE", "", 9),
        ("job", "start", {"time": "odd"}, "START", "", None),
        ("job", "start", {"time": 10**30}, "START", "", None),
    ],
)
def test_each_event_of_spark_is_a_state_of_a_run(
    of: str, event: str, payload: dict[str, Any], state: str, error: str, milliseconds: int | None
) -> None:
    found = job_events.run_of(
        JobEvent(application=APPLICATION, kind=of, event=event, id="7", occurrence="7", payload=payload),
        "local",
        name="",
    )
    assert found is not None
    time = None if milliseconds is None else datetime.fromtimestamp(milliseconds / 1000, UTC)
    assert (found.state, found.error, found.time) == (state, error, time)
    assert found.application == APPLICATION.id, "the log has not said its name"


def test_only_applications_and_jobs_are_runs() -> None:
    of = JobEvent(application=APPLICATION, kind="stage", event="start", id="1.0", occurrence="1.0", payload={})
    assert job_events.run_of(of, "local", name="a") is None


# Ids


def test_an_id_is_made_of_what_the_event_is() -> None:
    stage = {"Stage Info": {**STAGE, "Submission Time": 5}}
    ids = {
        decode("SparkListenerStageSubmitted", stage).message_id("hpc"),
        decode("SparkListenerStageCompleted", stage).message_id("hpc"),
        decode("SparkListenerStageCompleted", stage).message_id("hpc2"),
    }
    assert ids == {
        "spark:hpc:local-1795221705647:0:stage.start:7.1",
        "spark:hpc:local-1795221705647:0:stage.end:7.1",
        "spark:hpc2:local-1795221705647:0:stage.end:7.1",
    }


def test_each_run_of_a_query_and_each_of_its_reports_has_its_own_id() -> None:
    progress = {"batchId": 4, "sources": [], "sink": {"description": "MemorySink"}}
    ids = [
        decode(QUERY + "TerminatedEvent", {"id": "q", "runId": "r1"}).message_id("hpc"),
        decode(QUERY + "TerminatedEvent", {"id": "q", "runId": "r2"}).message_id("hpc"),
        *(
            decode(
                QUERY + "ProgressEvent", {"progress": {"id": "q", "runId": "r1", "timestamp": time, **progress}}
            ).message_id("hpc")
            for time in ("2026-11-21T00:00:00.000Z", "2026-11-21T00:00:10.000Z")
        ),
    ]
    assert len(set(ids)) == 4, ids


@pytest.mark.parametrize(
    ("log", "application"),
    [
        ("local-1795221705647", SparkApplication(id="local-1795221705647")),
        ("app-20261121004156-0000", SparkApplication(id="app-20261121004156-0000")),
        ("application_1795221705647_0001", SparkApplication(id="application_1795221705647_0001")),
        ("application_1795221705647_0001_2", SparkApplication(id="application_1795221705647_0001", attempt="2")),
        ("spark-4f1c2d_1", SparkApplication(id="spark-4f1c2d_1")),
    ],
)
def test_the_name_of_a_log_tells_the_application(log: str, application: SparkApplication) -> None:
    assert SparkApplication.of_log(log) == application


def test_text_and_bytes_are_read_alike() -> None:
    text = line("SparkListenerApplicationEnd", Timestamp=9)
    assert job_events.decode(text.decode(), APPLICATION) == job_events.decode(text, APPLICATION)
