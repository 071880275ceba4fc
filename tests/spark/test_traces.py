"""The trace context that a Spark application was given, in its events. `test_traced_rows` has what it writes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from pyspark.sql import SparkSession

from aviso_agents import spark_events
from aviso_workers import App, Notification, Notify
from aviso_workers.spark import job_events, listen
from aviso_workers.spark.job_events import SparkApplication
from tests import spans
from tests.waits import PATIENCE_SECONDS

GIVEN = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PROPERTIES = {"spark.aviso.traceparent": GIVEN, "spark.aviso.tracestate": "a=1"}
HEADERS = {"traceparent": GIVEN, "tracestate": "a=1"}


def of_trace(notification: Notification[Any]) -> dict[str, str]:
    return {name: value for name, value in notification.headers.items() if name.startswith("trace")}


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("way", ["agent", "listener"])
async def test_events_of_an_application_carry_the_context_that_it_was_given(
    way: str, start_spark: Callable[..., SparkSession], app: App, config: Path, tmp_path: Path
) -> None:
    def work(spark: SparkSession) -> None:
        assert spark.range(10).count() == 10
        spark.stop()

    async with app:
        spark = await anyio.to_thread.run_sync(start_spark, tmp_path / "logs", PROPERTIES)
        if way == "listener":
            with listen(spark, config=config):
                await anyio.to_thread.run_sync(work, spark)
        else:
            await anyio.to_thread.run_sync(work, spark)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(spark_events.follow_event_logs, app)
                await ended(app)
                tasks.cancel_scope.cancel()
        found = [one async for one in app.replay("spark_job")]
    assert {one.identifier["kind"] for one in found} >= {"job", "sql", "stage"}
    assert {tuple(of_trace(one).items()) for one in found} == {tuple(HEADERS.items())}


@pytest.mark.slow
@pytest.mark.anyio
async def test_one_trace_goes_from_a_notification_through_agents_into_spark_and_back(
    start_spark: Callable[..., SparkSession], config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publish, an agent, what it returns, the agent that runs a Spark job on that, and one that hears of its end."""
    monkeypatch.setenv("AVISO_WORKERS_WORKERS__TRACES__ENABLED", "true")
    exporter = spans.exporter()
    exporter.clear()
    app = App("traced", config=config)
    app.event_type("field", key=["step"])
    app.event_type("archived", key=["step"])
    heard = anyio.Event()

    @app.agent("field")
    async def convert(notification: Notification[Any]) -> Notify:
        return Notify("archived", {"step": notification.identifier["step"]}, {})

    @app.agent("archived", ack_wait="5m")
    async def archive(notification: Notification[Any]) -> None:
        def work() -> None:
            spark = start_spark(tmp_path / "logs", {"spark.aviso.traceparent": notification.headers["traceparent"]})
            with listen(spark, config=config):
                assert spark.range(10).count() == 10
                spark.stop()

        await anyio.to_thread.run_sync(work)

    @app.agent("spark_job", where={"kind": "job", "event": "end"})
    async def hear(notification: Notification[Any]) -> None:
        heard.set()

    async with app.running():
        await app.notify("field", {"step": "1"}, {})
        with anyio.fail_after(PATIENCE_SECONDS):
            await heard.wait()
    # The listener hands on the context that the job was given, in a publish that belongs to the listener.
    made = [span for span in exporter.get_finished_spans() if span.name != "publish spark"]
    assert {span.name for span in made} == {
        *("publish field", "process field", "publish archived", "process archived", "process spark")
    }
    assert len({span.context.trace_id for span in made if span.context}) == 1


@pytest.mark.anyio
async def test_an_agent_that_is_started_again_knows_it_still(app: App, tmp_path: Path) -> None:
    """The properties stand at the beginning of a log, which it does not read again."""
    log = tmp_path / "logs" / "local-1.inprogress"
    log.parent.mkdir()
    properties = ",".join(f'"{name}":"{value}"' for name, value in PROPERTIES.items())
    log.write_text(
        f'{{"Event":"SparkListenerEnvironmentUpdate","Spark Properties":{{{properties}}}}}\n'
        '{"Event":"SparkListenerApplicationStart","App Name":"a","App ID":"local-1","Timestamp":1}\n'
    )
    async with app:
        for event, line in (("start", ""), ("end", '{"Event":"SparkListenerApplicationEnd","Timestamp":2}\n')):
            with log.open("a") as file:
                file.write(line)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(spark_events.follow_event_logs, app)
                found = await ended(app, event)
                await stored_position(app)
                tasks.cancel_scope.cancel()
            assert of_trace(found) == HEADERS


@pytest.mark.parametrize(
    "properties",
    [
        "{}",
        '{"spark.aviso.traceparent":"no"}',
        '{"spark.aviso.traceparent":7}',
        "7",
        '{"spark.aviso.tracestate":"a=1"}',
    ],
)
def test_properties_that_say_no_context_are_passed_over(properties: str) -> None:
    decode = job_events.Decoder(SparkApplication(id="local-1"))
    line = f'{{"Event":"SparkListenerEnvironmentUpdate","Spark Properties":{properties}}}'
    assert decode(line.encode()) is None
    assert decode.trace == {}


async def ended(app: App, event: str = "end") -> Notification[Any]:
    with anyio.fail_after(PATIENCE_SECONDS):
        async for notification in app.watch("spark_job", {"kind": "application", "event": event}, from_id=1):
            return notification
    raise AssertionError("a watch ended")


async def stored_position(app: App) -> None:
    """Wait until the agent has stored how far it has come, which it does after it has published."""
    positions = await app.key_value("spark-events")
    with anyio.fail_after(PATIENCE_SECONDS):
        async with aclosing(positions.changes()) as changes:
            async for _ in changes:
                return
