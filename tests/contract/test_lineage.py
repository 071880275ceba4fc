"""Run events of OpenLineage: of a worker, its agents and its windows, in JetStream, and what a failure changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, UUID, uuid5

import anyio
import pytest
from msgspec import structs
from openlineage.client import event_v2

from aviso_agents import spark_events
from aviso_workers import App, Notification, Notify, Window, Windowing, config
from aviso_workers.backends import Admin, Message, open_backend
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.config import Config
from aviso_workers.config.settings import Lineage
from aviso_workers.events import Acked, Event, LineageTold, SparkRunChanged, WindowDone
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.spark import job_events
from aviso_workers.spark.job_events import SparkApplication
from aviso_workers.telemetry import lineage
from tests.contract.settings import app_config
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

SUBJECT = "lineage.runs"
OLD = datetime(2026, 11, 20, 6, 30, tzinfo=UTC)


@pytest.fixture
def settings(kind: str, nats_url: str, tmp_path: Path) -> Config:
    loaded = config.load(app_config(kind, nats_url), environ={})
    workers = structs.replace(
        loaded.workers,
        lineage=Lineage(subject=SUBJECT, namespace="tests"),
        agents={"spark-events": {"event_log_dirs": [str(tmp_path)], "poll_seconds": 0.01}},
    )
    return structs.replace(loaded, workers=workers)


@pytest.fixture
async def kept(settings: Config) -> AsyncGenerator[Admin, None]:
    """The backend, which outlives the app."""
    if settings.notification_backend.kind == "in_memory":
        async with InMemoryBackend(config.InMemory(max_history_per_topic=100)) as in_memory:
            yield in_memory
        return
    async with open_backend(settings) as backend:
        yield backend


@pytest.fixture
def app(settings: Config, kept: Admin) -> App:
    """An app with an agent that publishes."""
    app = App("fields", config=settings)
    if settings.notification_backend.kind == "in_memory":

        @asynccontextmanager
        async def opening(*_: Any, **__: Any) -> AsyncIterator[Admin]:
            yield kept

        app.configure(settings, opening=opening)

    @app.agent("plain")
    async def tell(notification: Notification) -> Notify:
        """Tell an area."""
        return Notify("area", {"date": "2026-11-20", "polygon": "(1,1,1,2,2,2,1,1)"})

    return app


def counted(total: int, notification: Notification[Any]) -> int:
    return total + 1


async def make_stream(backend: Admin) -> None:
    await backend.create_stream(StreamSpec(name="LINEAGE", subjects=("lineage.>",), storage="memory"))


async def stored(backend: Admin) -> list[Message]:
    last = (await backend.stream_info("LINEAGE")).last_sequence
    return [message async for message in backend.read("LINEAGE", filter_subjects=(), last_sequence=last)]


def runs(messages: list[Message]) -> dict[str, list[dict[str, Any]]]:
    """The events of each job, in order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for message in messages:
        event = json.loads(message.data)
        found.setdefault(event["job"]["name"], []).append(event)
    return found


def states(events: list[dict[str, Any]]) -> list[str]:
    return [event["eventType"] for event in events]


def heard(app: App, kind: type[Event]) -> anyio.Event:
    """An event that is set by the first fact of this kind."""
    found = anyio.Event()
    app.events.listen(lambda _: found.set(), kind)
    return found


async def work_once(app: App) -> None:
    """Run the app until it has handled a notification."""
    acked = heard(app, Acked)
    with anyio.fail_after(PATIENCE_SECONDS):
        async with app.running():
            await app.notify("plain", {"a": "1", "b": "2"})
            await acked.wait()


async def test_a_worker_and_its_agents_tell_their_runs(app: App, kept: Admin) -> None:
    await make_stream(kept)
    await work_once(app)
    messages = await stored(kept)
    found = runs(messages)
    assert {job: states(events) for job, events in found.items()} == {
        "fields": ["START", "COMPLETE"],
        "fields.tell": ["START", "COMPLETE"],
    }
    worker, agent = found["fields"][-1], found["fields.tell"][-1]
    assert [each["inputs"][0]["inputFacets"]["inputStatistics"]["rowCount"] for each in (worker, agent)] == [1, 1]
    assert {each["name"]: each["outputFacets"]["outputStatistics"]["rowCount"] for each in worker["outputs"]} == {
        "area": 1,
        "plain": 1,
    }
    assert [each["name"] for each in agent["outputs"]] == ["area"]
    assert agent["run"]["facets"]["parent"]["run"]["runId"] == worker["run"]["runId"]
    assert agent["job"]["namespace"] == "tests"
    assert agent["job"]["facets"]["jobType"]["processingType"] == "STREAMING"
    assert agent["job"]["facets"]["documentation"]["description"] == "Tell an area."
    server = app.config.notification_backend
    assert agent["inputs"][0]["namespace"] == (
        server.jetstream.masked_servers[0] if server.kind == "jetstream" else "memory"
    )


async def test_each_message_has_the_id_of_its_event_and_is_one_of_openlineage(app: App, kept: Admin) -> None:
    await make_stream(kept)
    await work_once(app)
    for message in await stored(kept):
        event = json.loads(message.data)
        run_id, state, digest = (message.headers or {})["Nats-Msg-Id"].split(":")
        assert (run_id, state) == (str(UUID(event["run"]["runId"])), event["eventType"])
        assert digest == hashlib.sha256(message.data).hexdigest()
        assert event["schemaURL"].startswith("https://openlineage.io/spec/2-0-2/OpenLineage.json")
        event_v2.RunEvent(
            eventTime=event["eventTime"],
            producer=event["producer"],
            eventType=event_v2.RunState[state],
            run=event_v2.Run(**event["run"]),
            job=event_v2.Job(**event["job"]),
            inputs=[event_v2.InputDataset(**each) for each in event["inputs"]],
            outputs=[event_v2.OutputDataset(**each) for each in event["outputs"]],
        )


async def test_a_run_that_goes_on_is_told_again(app: App, kept: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "RUNNING_SECONDS", 0.01)
    await make_stream(kept)
    told = anyio.Event()
    sent: list[LineageTold] = []

    def note(event: LineageTold) -> None:
        sent.append(event)
        if len(sent) > 6:
            told.set()

    app.events.listen(note, LineageTold)
    with anyio.fail_after(PATIENCE_SECONDS):
        async with app.running():
            await told.wait()
    found = runs(await stored(kept))["fields.tell"]
    assert {*states(found)} == {"START", "RUNNING", "COMPLETE"}
    assert len({event["run"]["runId"] for event in found}) == 1


async def test_a_worker_that_fails_says_so(app: App, kept: Admin) -> None:
    await make_stream(kept)
    telling = lineage.LineageReporter(app, Lineage(subject=SUBJECT))
    with pytest.raises(RuntimeError, match="the disk"):
        async with telling.told(kept):
            raise RuntimeError("the disk is full")
    (events,) = runs(await stored(kept)).values()
    assert states(events) == ["START", "FAIL"]
    assert events[1]["run"]["facets"]["errorMessage"]["message"] == "the disk is full"


async def test_a_worker_that_is_cancelled_says_so(app: App, kept: Admin) -> None:
    await make_stream(kept)
    telling = lineage.LineageReporter(app, Lineage(subject=SUBJECT))
    with anyio.CancelScope() as scope:
        async with telling.told(kept):
            scope.cancel()
            await anyio.sleep_forever()
    (events,) = runs(await stored(kept)).values()
    assert states(events) == ["START", "ABORT"]


async def test_a_window_that_is_over_is_a_run_of_its_own(app: App, kept: Admin) -> None:
    @app.agent("plain", window=Windowing(size="1h", initial=0, fold=counted))
    async def sums(window: Window[int]) -> Notify:
        return Notify("area", {"date": "2026-11-20", "polygon": "(1,1,1,2,2,2,1,1)"})

    await make_stream(kept)
    for _ in range(2):  # by two workers, after each other
        telling = lineage.LineageReporter(app, Lineage(subject=SUBJECT))
        async with telling.told(kept):
            done = WindowDone(agent="sums", key="", start=OLD, end=OLD.replace(hour=7), seconds=2.0)
            app.events.emit(done)
            failed = structs.replace(done, key="other", error=ValueError("odd"))
            app.events.emit(structs.replace(failed, again_in_seconds=1.0))
            app.events.emit(structs.replace(failed, dead_lettered="rejected"))
    events = runs(await stored(kept))["fields.sums.window"]
    assert states(events) == ["START", "COMPLETE", "START", "FAIL"] * 2
    assert len({event["run"]["runId"] for event in events}) == 2
    assert events[0]["run"]["facets"]["nominalTime"]["nominalStartTime"] == OLD.isoformat()
    assert events[0]["eventTime"] < events[1]["eventTime"]
    assert events[0]["job"]["facets"]["jobType"]["processingType"] == "BATCH"
    assert [each["name"] for each in events[0]["outputs"]] == ["area"]


async def test_an_endpoint_that_fails_disturbs_no_agent(app: App, kept: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no stream at first."""
    monkeypatch.setattr(lineage, "WAITS", ())
    monkeypatch.setattr(lineage, "RUNNING_SECONDS", 0.05)
    told: list[LineageTold] = []
    lost, sent = anyio.Event(), anyio.Event()

    def note(event: LineageTold) -> None:
        told.append(event)
        (lost if event.error else sent).set()

    app.events.listen(note, LineageTold)
    settled = heard(app, Acked)
    with anyio.fail_after(PATIENCE_SECONDS):
        async with app.running():
            await lost.wait()
            await app.notify("plain", {"a": "1", "b": "2"})
            await settled.wait()
            await make_stream(kept)
            await sent.wait()
    changes = [line.event for event in told for line in event.lines()]
    assert changes == ["lineage.not_sent", "lineage.sent_again"]
    assert "COMPLETE" in states(runs(await stored(kept))["fields.tell"])


def spark_run(
    kind: str, event: str, payload: dict[str, Any], *, name: str = "nightly", attempt: str = "0"
) -> SparkRunChanged:
    application = SparkApplication(id="application_1_0001", attempt=attempt)
    of = job_events.JobEvent(application=application, kind=kind, event=event, id="7", occurrence="7", payload=payload)
    found = job_events.run_of(of, "local", name=name)
    assert found is not None
    return found


async def spark_runs(
    app: App, kept: Admin, *told: SparkRunChanged, workers: int = 1
) -> dict[str, list[dict[str, Any]]]:
    """What is told of the runs of Spark, by so many workers after each other."""
    await make_stream(kept)
    for _ in range(workers):
        async with lineage.LineageReporter(app, Lineage(subject=SUBJECT, namespace="tests")).told(kept):
            for each in told:
                app.events.emit(each)
    return {job: events for job, events in runs(await stored(kept)).items() if job.startswith("spark.")}


async def test_a_job_of_spark_is_a_run_within_that_of_its_application(app: App, kept: Admin) -> None:
    found = await spark_runs(
        app,
        kept,
        spark_run("application", "start", {"time": 1000, "name": "nightly"}),
        spark_run("job", "start", {"time": 2000}),
        spark_run("job", "end", {"time": 3500, "status": "failed", "error": "no such file"}),
        spark_run("application", "end", {"time": 4000, "exit_code": 1}),
    )
    assert {job: states(events) for job, events in found.items()} == {
        "spark.nightly": ["START", "FAIL"],
        "spark.nightly.job": ["START", "FAIL"],
    }
    (began, ended), (job, failed) = found["spark.nightly"], found["spark.nightly.job"]
    of_application = str(uuid5(NAMESPACE_URL, "spark:local:application_1_0001:0:"))
    assert [each["run"]["runId"] for each in (began, ended)] == [of_application] * 2
    assert [each["run"]["runId"] for each in (job, failed)] == [
        str(uuid5(NAMESPACE_URL, "spark:local:application_1_0001:0:7"))
    ] * 2
    assert [each["eventTime"] for each in (began, job, failed, ended)] == [
        "1970-01-01T00:00:01+00:00",
        "1970-01-01T00:00:02+00:00",
        "1970-01-01T00:00:03.500000+00:00",
        "1970-01-01T00:00:04+00:00",
    ]
    for each in (job, failed):
        parent = each["run"]["facets"]["parent"]
        assert (parent["run"]["runId"], parent["job"]["name"]) == (of_application, "spark.nightly")
    assert [each["run"]["facets"]["errorMessage"]["message"] for each in (failed, ended)] == [
        "no such file",
        "exit code 1",
    ]
    assert "parent" not in began["run"]["facets"]


async def test_what_two_workers_tell_of_spark_is_of_the_same_runs_and_stored_once(app: App, kept: Admin) -> None:
    told = [
        spark_run("job", "end", {"time": 3000, "status": "succeeded"}),  # out of order
        spark_run("job", "start", {"time": 2000}),
    ]
    found = await spark_runs(app, kept, *told, workers=2)
    assert states(found["spark.nightly.job"]) == ["COMPLETE", "START"]
    (another,) = {spark_run("job", "end", {}, attempt="1").run} - {told[0].run}
    assert another == "spark:local:application_1_0001:1:"


async def test_the_router_of_event_logs_tells_what_it_reads(app: App, kept: Admin, tmp_path: Path) -> None:
    """Also after a restart in the middle of a log: the name stands at its beginning."""
    app.include(spark_events.router)
    app.event_type("spark_job", base="lineage-spark", key=["cluster", "application", "kind", "event", "id"])
    await make_stream(kept)
    ends = {state: anyio.Event() for state in ("START", "COMPLETE")}
    app.events.listen(lambda run: ends[run.state].set() if run.job else None, SparkRunChanged)
    log = tmp_path / "local-1.inprogress"
    began = {"Event": "SparkListenerApplicationStart", "App Name": "nightly", "Timestamp": 1}
    job = {"Event": "SparkListenerJobStart", "Job ID": 0, "Submission Time": 2, "Stage Infos": []}
    done = {
        "Event": "SparkListenerJobEnd",
        "Job ID": 0,
        "Completion Time": 3,
        "Job Result": {"Result": "JobSucceeded"},
    }
    for lines, state in (([began, job], "START"), ([done], "COMPLETE")):
        with log.open("a") as out:
            out.writelines(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines)
        with anyio.fail_after(PATIENCE_SECONDS):
            async with app.running():
                await ends[state].wait()
    found = runs(await stored(kept))
    assert (states(found["spark.nightly"]), states(found["spark.nightly.job"])) == (["START"], ["START", "COMPLETE"])
