"""Spark's listener events as notifications of the event type `spark_job`.

Called by those that get events as JSON: the agent that tails event logs (`aviso_agents.spark_events`) and the
listeners inside of a driver (`listeners`). It is the same JSON and makes the same ids, so that a stream that got both
ways holds each event once.

Pure. Each event is projected by one function below: a few fields that people ask for, under names of ours, times in
milliseconds since 1970. Never a task's events (most of every log), and never Spark's properties as a whole: they are
long and may hold secrets. An idle streaming query says nothing here either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import Struct, field, structs

from aviso_workers.aviso.codec import UNREADABLE_JSON
from aviso_workers.config import Config
from aviso_workers.errors import UndecodableError
from aviso_workers.events import SparkRunChanged
from aviso_workers.spark import trace_contexts

EVENT_TYPE = "spark_job"

TEXT_LIMIT = 2000
"""Characters kept of an error message or a description; Spark puts whole stack traces and queries there."""

HEAD = b'{"Event":"'
ENVIRONMENT = b"SparkListenerEnvironmentUpdate"
YARN_ATTEMPT = re.compile(r"(application_\d+_\d+)_(\d+)")
OBJECT_HASH = re.compile(r"@[0-9a-f]+$")
SPELLING = str.maketrans(dict.fromkeys(" :/", "-") | dict.fromkeys(".${}'\"", "_"))

STATES: Mapping[str, Literal["START", "RUNNING", "ABORT"]] = {"start": "START", "resumed": "RUNNING", "lost": "ABORT"}
LATEST = 253_402_300_799_000
"""The last millisecond that has a date; a log may say anything."""
SUCCEEDED, FAILED, UNKNOWN = "succeeded", "failed", "unknown"

Json = Mapping[str, Any]


class SparkApplication(Struct, frozen=True, kw_only=True):
    """A run of a Spark application, as its event log names it.

    `id` is Spark's application id in the spelling of file names: lower case, blanks, ':' and '/' as '-', and
    dots, quotes, braces and '$' as '_'. The ids that Spark's own cluster managers give are spelled so already.
    """

    id: str
    attempt: str = "0"
    """Only YARN makes more than one."""

    @classmethod
    def of_log(cls, name: str) -> SparkApplication:
        """Return the application whose event log has this name (without prefix and suffixes)."""
        if match := YARN_ATTEMPT.fullmatch(name):
            return cls(id=match[1], attempt=match[2])
        return cls(id=name)

    @classmethod
    def of_run(cls, application_id: str, attempt: str | None) -> SparkApplication:
        """Return the application by the id and the attempt that Spark gives; `attempt` is None where there is but
        one.
        """
        name = application_id if attempt is None else f"{application_id}_{attempt}"
        return cls.of_log(name.translate(SPELLING).lower())

    def message_ids(self, cluster: str) -> str:
        """Return the beginning of the message ids of all the application's events."""
        return f"spark:{cluster}:{self.id}:{self.attempt}:"


class JobEvent(Struct, frozen=True, kw_only=True):
    """An event of a Spark application, such as the start of a job or the end of a stage."""

    application: SparkApplication
    kind: str
    """`application`, `job`, `stage`, `sql`, `query` (a streaming one) or `executor`."""
    event: str
    """`start`, `end` or `lost`; of an application also `resumed`; of a query `progress`; of an executor `added` or
    `removed`.
    """
    id: str
    """The id of its subject: application id, job id, `stage.attempt`, SQL execution id, query id or executor id."""
    occurrence: str
    """What distinguishes it from others of the same kind, event and application."""
    payload: Mapping[str, Any]

    def identifier(self, cluster: str) -> dict[str, str]:
        return {
            "cluster": cluster,
            "application": self.application.id,
            "kind": self.kind,
            "event": self.event,
            "id": self.id,
        }

    def message_id(self, cluster: str) -> str:
        """Return the message id of the event: the same from every publisher, and on every repeat."""
        return f"{self.application.message_ids(cluster)}{self.kind}.{self.event}:{self.occurrence}"


def cluster_of(config: Config) -> str:
    """Return the cluster's name in message ids and identifiers, as the agent `spark-events` has it in its settings."""
    return str(config.workers.agents.get("spark-events", {}).get("cluster", "local"))


def decode(line: bytes | str, application: SparkApplication) -> JobEvent | None:
    """Return the event in one line of an event log; None where the line is not of interest. Raises
    `UndecodableError`.
    """
    line = line.encode() if isinstance(line, str) else line
    name = _name(line)
    project = PROJECTIONS.get(name)
    if project is None:
        return None
    try:
        fact = project(msgspec.json.decode(line))
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError, AttributeError, ValueError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else repr(error)
        raise UndecodableError(f"no {name.decode()} as Spark writes it: {why}") from error
    subject = application.id if fact.id is None else str(fact.id)
    return JobEvent(
        application=application,
        kind=fact.kind,
        event=fact.event,
        id=subject,
        occurrence=subject if fact.occurrence is None else fact.occurrence,
        payload={field: value for field, value in fact.payload.items() if value is not None},
    )


class Decoder:
    """A decoder of the lines of one event log, in their order.

    Spark before 3.4 does not write how an SQL execution ended. The status is then that of its jobs, as in Spark's
    history server, and `unknown` where it has none, or not all of them were read.
    """

    def __init__(
        self,
        application: SparkApplication,
        *,
        trace: Mapping[str, str] | None = None,
        name: str = "",
        started: str = "",
    ) -> None:
        self.trace = dict(trace or {})
        """The headers that its properties say: in which trace it runs."""
        self.name = name
        """The name of the application; empty until the log has said it."""
        self.started = started
        """When the application started, as the log says it; empty until then. It distinguishes two runs of one id."""
        self._application = application
        self._jobs: dict[str, dict[str, str]] = {}
        """By SQL execution that has begun, the status of each of its jobs."""

    def __call__(self, line: bytes) -> JobEvent | None:
        """Return the event in the next line, as `decode` does. Raises `UndecodableError`."""
        if _name(line) == ENVIRONMENT:
            with suppress(*UNREADABLE_JSON):  # it says nothing else that is of interest
                self.trace = trace_contexts.of_properties(msgspec.json.decode(line, type=_Environment).properties.get)
        event = decode(line, self._application)
        match event:
            case JobEvent(kind="application", event="start"):
                self.name = str(event.payload.get("name", ""))
                self.started = str(event.payload["time"])
            case JobEvent(kind="sql", event="start"):
                self._jobs[event.id] = {}
            case JobEvent(kind="job", event="start"):
                if (jobs := self._jobs.get(event.payload.get("sql_execution", ""))) is not None:
                    jobs[event.id] = UNKNOWN
            case JobEvent(kind="job", event="end"):
                for jobs in self._jobs.values():
                    jobs |= {event.id: event.payload["status"]} if event.id in jobs else {}
            case JobEvent(kind="sql", event="end"):
                found = set(self._jobs.pop(event.id, {}).values())
                if event.payload["status"] == UNKNOWN:
                    status = FAILED if FAILED in found else SUCCEEDED if found == {SUCCEEDED} else UNKNOWN
                    return structs.replace(event, payload={**event.payload, "status": status})
        return event


class Begun(Struct, frozen=True):
    """A job, a stage, an SQL execution or a streaming query of an application."""

    kind: str
    id: str
    occurrence: str


class Unfinished:
    """The jobs, stages, SQL executions and queries of an application that have begun and not ended, by its published
    events.
    """

    def __init__(self, application: SparkApplication, cluster: str) -> None:
        self._ids = application.message_ids(cluster)
        self._begun: dict[tuple[str, str], Begun] = {}

    def add(self, message_id: str, identifier: Mapping[str, str]) -> None:
        """Take the next published event, in the order of the stream. An event of another attempt is ignored."""
        if not message_id.startswith(self._ids):
            return
        _, _, occurrence = message_id.removeprefix(self._ids).partition(":")
        kind, event = identifier["kind"], identifier["event"]
        if event == "start" and kind != "application":
            self._begun[kind, occurrence] = Begun(kind, identifier["id"], occurrence)
        elif event == "end":
            self._begun.pop((kind, occurrence), None)

    def __iter__(self) -> Iterator[Begun]:
        return iter(self._begun.values())


def lost(application: SparkApplication, begun: Begun | None = None, *, since: float) -> JobEvent:
    """Return the event that Spark cannot write: the application's log has not grown from `since` on, seconds since
    1970.

    It is of the application, or of what had begun in it. That the driver is gone is a guess. One that was only idle
    goes on writing (`resumed`), and may be lost again.
    """
    return _of_loss(application, begun, "lost", since)


def resumed(application: SparkApplication, *, since: float) -> JobEvent:
    """Return the event that an application which was reported lost goes on; its log had not grown from `since` on,
    seconds since 1970.
    """
    return _of_loss(application, None, "resumed", since)


def _of_loss(application: SparkApplication, begun: Begun | None, event: str, since: float) -> JobEvent:
    begun = begun or Begun("application", application.id, application.id)
    milliseconds = int(since * 1000)
    return JobEvent(
        application=application,
        kind=begun.kind,
        event=event,
        id=begun.id,
        occurrence=f"{begun.occurrence}/{milliseconds}",
        payload={"last_heard": milliseconds},
    )


def run_of(event: JobEvent, cluster: str, *, name: str) -> SparkRunChanged | None:
    """Return what an event says of the run of its application, whose name is given, or of a job; None where it is of
    something else.
    """
    if event.kind not in ("application", "job"):
        return None
    given = event.payload
    error = f"exit code {given['exit_code']}" if given.get("exit_code") else str(given.get("error", ""))
    ended: Literal["FAIL", "COMPLETE"] = "FAIL" if error or given.get("status") == FAILED else "COMPLETE"
    time = given.get("last_heard" if event.event == "lost" else "time")
    return SparkRunChanged(
        run=event.application.message_ids(cluster),
        application=name or event.application.id,
        job=event.id if event.kind == "job" else "",
        state=STATES.get(event.event, ended),
        time=datetime.fromtimestamp(time / 1000, UTC) if isinstance(time, int) and 0 < time < LATEST else None,
        error=error,
    )


class _Environment(Struct):
    properties: dict[str, Any] = field(name="Spark Properties", default_factory=dict)


class _EventName(Struct):
    event: str = field(name="Event")


def _name(line: bytes) -> bytes:
    """Return the event's name. Spark writes it first, so its own lines are not parsed; a program that writes a log
    again may put blanks or other fields before it.

    Raises `UndecodableError`.
    """
    if line.startswith(HEAD):
        return line[len(HEAD) : line.find(b'"', len(HEAD))]
    try:
        return msgspec.json.decode(line, type=_EventName).event.encode()
    except UNREADABLE_JSON as error:
        raise UndecodableError("not an event of Spark's") from error


class _Fact(Struct, frozen=True):
    """The content of one of Spark's events, without the application that it happened in."""

    kind: str
    event: str
    id: str | int | None
    """The id of its subject; None for the application itself."""
    payload: Json
    """The payload; fields that are None are left out of the event."""
    occurrence: str | None = None
    """The occurrence; None where it is the id, because the subject starts and ends but once."""


def _application_start(spark: Json) -> _Fact:
    payload = {
        "time": spark["Timestamp"],
        "name": spark["App Name"],
        "application_id": spark.get("App ID"),
        "attempt": spark.get("App Attempt ID"),
    }
    return _Fact("application", "start", None, payload)


def _application_end(spark: Json) -> _Fact:
    return _Fact("application", "end", None, {"time": spark["Timestamp"], "exit_code": spark.get("ExitCode")})


def _job_start(spark: Json) -> _Fact:
    properties = spark.get("Properties") or {}
    batch = properties.get("streaming.sql.batchId")
    payload = {
        "time": spark.get("Submission Time"),
        "description": _short(properties.get("spark.job.description")),
        "group": _short(properties.get("spark.jobGroup.id")),
        "sql_execution": properties.get("spark.sql.execution.id"),
        "query": properties.get("sql.streaming.queryId"),
        "batch_id": None if batch is None else int(batch),
        "stages": len(spark["Stage Infos"]),
        "tasks": sum(stage["Number of Tasks"] for stage in spark["Stage Infos"]),
    }
    return _Fact("job", "start", spark["Job ID"], payload)


def _job_end(spark: Json) -> _Fact:
    result = spark["Job Result"]
    payload = {
        "time": spark.get("Completion Time"),
        "status": SUCCEEDED if result["Result"] == "JobSucceeded" else FAILED,
        "error": _short(result.get("Exception", {}).get("Message")),
    }
    return _Fact("job", "end", spark["Job ID"], payload)


def _stage_start(spark: Json) -> _Fact:
    stage = spark["Stage Info"]
    payload = {
        "time": stage.get("Submission Time"),
        "name": _short(stage["Stage Name"]),
        "tasks": stage["Number of Tasks"],
    }
    return _Fact("stage", "start", _stage_id(stage), payload)


def _stage_end(spark: Json) -> _Fact:
    stage = spark["Stage Info"]
    submitted, completed = stage.get("Submission Time"), stage.get("Completion Time")
    payload = {
        "time": completed,
        "name": _short(stage["Stage Name"]),
        "tasks": stage["Number of Tasks"],
        "duration_ms": completed - submitted if completed and submitted else None,
        **_outcome(stage.get("Failure Reason")),
    }
    return _Fact("stage", "end", _stage_id(stage), payload)


def _stage_id(stage: Json) -> str:
    return f"{stage['Stage ID']}.{stage['Stage Attempt ID']}"


def _sql_start(spark: Json) -> _Fact:
    payload = {
        "time": spark["time"],
        "description": _short(spark["description"]),
        "group": _short(spark.get("jobGroupId")),
        "root": str(spark.get("rootExecutionId", spark["executionId"])),
    }
    return _Fact("sql", "start", spark["executionId"], payload)


def _sql_end(spark: Json) -> _Fact:
    error = spark.get("errorMessage")  # empty for a success; Spark before 3.4 writes none
    payload = {"time": spark["time"], **({"status": UNKNOWN} if error is None else _outcome(error))}
    return _Fact("sql", "end", spark["executionId"], payload)


def _query_start(spark: Json) -> _Fact:
    payload = {
        "time": _milliseconds(spark.get("timestamp")),
        "name": _short(spark.get("name")),
        "run_id": spark["runId"],
    }
    return _Fact("query", "start", spark["id"], payload, _run(spark))


def _query_progress(spark: Json) -> _Fact:
    progress = spark["progress"]
    payload = {
        "time": _milliseconds(progress["timestamp"]),
        "name": _short(progress.get("name")),
        "run_id": progress["runId"],
        "batch_id": progress["batchId"],
        "duration_ms": progress.get("batchDuration"),
        "rows": sum(source["numInputRows"] for source in progress["sources"]),
        "watermark": _milliseconds((progress.get("eventTime") or {}).get("watermark")),
        "sources": [
            {
                "description": _described(source),
                "start_offset": source.get("startOffset"),
                "end_offset": source.get("endOffset"),
                "latest_offset": source.get("latestOffset"),
                "rows": source["numInputRows"],
            }
            for source in progress["sources"]
        ],
        "sink": {
            "description": _described(progress["sink"]),
            # -1 is Spark's word for a sink that does not count.
            "rows": progress["sink"].get("numOutputRows", -1),
        },
    }
    # A query without data repeats its batch id: only the timestamp tells such reports apart.
    occurrence = f"{_run(progress)}/{progress['batchId']}/{progress['timestamp']}"
    return _Fact("query", "progress", progress["id"], payload, occurrence)


def _query_end(spark: Json) -> _Fact:
    payload = {
        "run_id": spark["runId"],
        **_outcome(spark.get("exception")),
        "error_class": spark.get("errorClassOnException"),
    }
    return _Fact("query", "end", spark["id"], payload, _run(spark))


def _run(query: Json) -> str:
    """Return what identifies a run of a query: restarted from its checkpoint it keeps its id, and gets a new run id."""
    return f"{query['id']}/{query['runId']}"


def _executor_added(spark: Json) -> _Fact:
    executor = spark["Executor Info"]
    payload = {"time": spark["Timestamp"], "host": executor["Host"], "cores": executor["Total Cores"]}
    return _Fact("executor", "added", spark["Executor ID"], payload)


def _executor_removed(spark: Json) -> _Fact:
    payload = {"time": spark["Timestamp"], "reason": _short(spark.get("Removed Reason"))}
    return _Fact("executor", "removed", spark["Executor ID"], payload)


def _outcome(error: str | None) -> Json:
    return {"status": FAILED, "error": _short(error)} if error else {"status": SUCCEEDED}


def _described(end: Json) -> str | None:
    """Return the name that a source or sink of a streaming query gives itself, without the hash of a Java object that
    has no name.

    Spark has no name for data sources in Python: ours is known by what its offsets say.
    """
    name = OBJECT_HASH.sub("", end["description"])
    if ".PythonMicroBatchStream" in name and (stream := _stream_of(end.get("endOffset"))):
        return f"aviso stream {stream}"
    return _short(name)


def _stream_of(offset: str | Json | None) -> str | None:
    """Return the stream that an offset of the data source `aviso` names; None where it is of another source."""
    try:
        fields = msgspec.json.decode(offset) if isinstance(offset, str) else offset
    except msgspec.DecodeError:
        return None
    return str(fields["stream"]) if isinstance(fields, Mapping) and {"stream", "sequence"} <= fields.keys() else None


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= TEXT_LIMIT else text[: TEXT_LIMIT - 1] + "…"


def _milliseconds(timestamp: str | None) -> int | None:
    return None if timestamp is None else round(datetime.fromisoformat(timestamp).timestamp() * 1000)


PROJECTIONS: Mapping[bytes, Callable[[Json], _Fact]] = {
    b"SparkListenerApplicationStart": _application_start,
    b"SparkListenerApplicationEnd": _application_end,
    b"SparkListenerJobStart": _job_start,
    b"SparkListenerJobEnd": _job_end,
    b"SparkListenerStageSubmitted": _stage_start,
    b"SparkListenerStageCompleted": _stage_end,
    b"SparkListenerExecutorAdded": _executor_added,
    b"SparkListenerExecutorRemoved": _executor_removed,
    b"org.apache.spark.sql.execution.ui.SparkListenerSQLExecutionStart": _sql_start,
    b"org.apache.spark.sql.execution.ui.SparkListenerSQLExecutionEnd": _sql_end,
    b"org.apache.spark.sql.streaming.StreamingQueryListener$QueryStartedEvent": _query_start,
    b"org.apache.spark.sql.streaming.StreamingQueryListener$QueryProgressEvent": _query_progress,
    b"org.apache.spark.sql.streaming.StreamingQueryListener$QueryTerminatedEvent": _query_end,
}
