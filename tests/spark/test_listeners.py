"""The driver's own listeners, on a real Spark and a real server, alone and beside the agent that follows its log."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from aviso_agents import spark_events
from aviso_workers import App
from aviso_workers.config import load
from aviso_workers.errors import ConfigError, UnknownEventTypeError
from aviso_workers.server import NatsServer
from aviso_workers.spark import listen, listeners
from aviso_workers.spark.job_events import SparkApplication
from aviso_workers.spark.listeners import Listener
from tests.spark.logs import ids_in, logs_in
from tests.waits import LONG_SECONDS, PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


@pytest.mark.slow
async def test_the_listener_alone_tells_of_jobs_and_queries_as_the_log_does(
    app: App, config: Path, start_spark: Callable[..., SparkSession], tmp_path: Path
) -> None:
    async with app:
        spark = await anyio.to_thread.run_sync(start_spark, tmp_path / "logs", {})
        with listen(spark, config=config) as listener:
            await anyio.to_thread.run_sync(work, spark, tmp_path)
            await anyio.to_thread.run_sync(spark.stop)
        stored = await ids(app)
    logged = in_log(tmp_path / "logs")
    before = {"application.start", "executor.added"}
    assert {which for which in logged if which not in stored} == {
        which for which in logged if which.split(":")[4] in before
    }
    assert stored == Counter(which for which in logged if which in stored), "each once"
    assert (listener.stored, listener.dropped) == (len(stored), 0)


@pytest.mark.slow
async def test_listener_and_agent_together_store_each_event_once(
    app: App, config: Path, start_spark: Callable[..., SparkSession], tmp_path: Path
) -> None:
    async with app, anyio.create_task_group() as tasks:
        tasks.start_soon(spark_events.follow_event_logs, app)
        spark = await anyio.to_thread.run_sync(start_spark, tmp_path / "logs", {})
        with listen(spark, config=config) as listener:
            for _ in range(3):
                await anyio.to_thread.run_sync(work, spark, tmp_path)
            await anyio.to_thread.run_sync(spark.stop)
        await until_published(app, tmp_path / "logs")
        tasks.cancel_scope.cancel()
        assert await ids(app) == Counter(in_log(tmp_path / "logs"))
    assert listener.stored > 0


@pytest.mark.slow
async def test_an_agent_that_comes_later_adds_what_is_missing_and_nothing_else(
    app: App, config: Path, start_spark: Callable[..., SparkSession], tmp_path: Path
) -> None:
    outcomes: Counter[str] = Counter()
    app.events.listen(lambda event: outcomes.update([getattr(event, "outcome", "")]))
    async with app, anyio.create_task_group() as tasks:
        spark = await anyio.to_thread.run_sync(start_spark, tmp_path / "logs", {})
        with listen(spark, config=config):
            await anyio.to_thread.run_sync(work, spark, tmp_path)
            await anyio.to_thread.run_sync(spark.stop)
        tasks.start_soon(spark_events.follow_event_logs, app)
        await until_published(app, tmp_path / "logs")
        tasks.cancel_scope.cancel()
        assert await ids(app) == Counter(in_log(tmp_path / "logs"))
    assert outcomes["duplicate"] == 0, "it needs no duplicate window"


async def test_what_spark_tells_its_listeners_late_is_left_to_the_agent(app: App, config: Path) -> None:
    """The agent may have published it for longer than the stream recognises its id."""
    minute_ago = int(time.time() * 1000) - 61_000
    event = f'{{"Event":"SparkListenerJobStart","Job ID":1,"Submission Time":{minute_ago},"Stage Infos":[]}}'

    def tell(spark: None, hear: Callable[[str], None]) -> Callable[[], None]:
        hear(event)
        return lambda: None

    listener = Listener(load(config), SparkApplication(id="local-1"))
    await anyio.to_thread.run_sync(listener.start, tell, None)
    await anyio.to_thread.run_sync(listener.close)
    assert (listener.stored, listener.dropped) == (0, 1)


async def test_a_closed_listener_hears_nothing_and_the_context_goes_on(
    app: App, config: Path, start_spark: Callable[..., SparkSession], tmp_path: Path
) -> None:
    async with app:
        spark = await anyio.to_thread.run_sync(start_spark, tmp_path / "logs", {})
        try:
            listener = listen(spark, config=config)
            await anyio.to_thread.run_sync(spark.range(3).count)
            listener.close()
            stored = listener.stored
            await anyio.to_thread.run_sync(spark.range(3).count)
            listener.close()
        finally:
            await anyio.to_thread.run_sync(spark.stop)
        assert stored == listener.stored == (await ids(app)).total() > 0


async def test_without_a_server_spark_works_on_and_what_is_dropped_is_counted(
    config: Path,
    server: NatsServer,
    start_spark: Callable[..., SparkSession],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listeners, "MAX_WAITING", 5)
    server.stop()
    spark = await anyio.to_thread.run_sync(start_spark, tmp_path / "logs", {})
    try:
        listener = listen(spark, config=config)
        for _ in range(3):
            assert spark.range(3).count() == 3
    finally:
        await anyio.to_thread.run_sync(spark.stop)
    listener.close(within_seconds=0.1)
    assert listener.stored == 0
    assert listener.dropped >= 12, "three jobs with their stages start and end"


async def test_without_the_event_type_it_says_so_at_once(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("notification_backend: {kind: in_memory}\n")
    with pytest.raises(UnknownEventTypeError, match="spark_job"):
        listen(None, config=config)  # type: ignore[arg-type]


async def test_without_the_package_that_its_traces_need_it_says_so_at_once(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AVISO_WORKERS_WORKERS__TRACES__ENABLED", "true")
    monkeypatch.setattr("aviso_workers.config.settings.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"workers\.traces\.enabled: traces need the package opentelemetry-api"):
        listen(None, config=config)  # type: ignore[arg-type]


@pytest.mark.slow
async def test_a_driver_that_just_ends_leaves_nothing_unpublished(
    app: App, config: Path, start_driver: Callable[..., subprocess.Popen[str]]
) -> None:
    program = """
import sys
from pyspark.sql import SparkSession
from aviso_workers.spark import listen
# On a busy machine a heartbeat of Spark's own may come while its driver ends, and leave a stack trace.
quiet = {"spark.executor.heartbeatInterval": "1h", "spark.network.timeout": "2h"}
spark = SparkSession.builder.master("local[1]").config(map=quiet).getOrCreate()
listen(spark, config=sys.argv[1])
spark.range(3).count()
"""
    await told_by(start_driver(program, config))
    async with app:
        kinds = Counter(which.split(":")[4] for which in await ids(app))
    assert kinds["job.start"] == kinds["job.end"] > 0, kinds


@pytest.mark.slow
async def test_in_spark_connect_streaming_queries_are_told(
    app: App, config: Path, start_driver: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "1.txt").write_text("one\n")
    program = """
import sys, time
from pyspark.sql import SparkSession
from aviso_workers.spark import listen
spark = SparkSession.builder.remote("local[1]").getOrCreate()
with listen(spark, config=sys.argv[1]) as listener:
    rows = spark.readStream.format("text").load(sys.argv[2]).writeStream.format("noop")
    query = rows.option("checkpointLocation", sys.argv[3]).trigger(availableNow=True).start()
    query.awaitTermination()  # stopped within a batch it may tell of that with a stack trace
    while listener.stored < 3:
        time.sleep(0.05)
print(spark.conf.get("spark.app.id"), query.id)
"""
    driver = start_driver(program, config, tmp_path / "lines", tmp_path / "checkpoint")
    application, query = (await told_by(driver)).split()
    async with app:
        stored = await ids(app)
    assert {which.split(":")[2] for which in stored} == {application}
    assert Counter(which.split(":")[4] for which in stored).keys() == {"query.start", "query.progress", "query.end"}
    assert all(query in which for which in stored)
    assert set(stored) <= set(in_log(tmp_path / "logs")), "the log has the same ids"


async def told_by(driver: subprocess.Popen[str]) -> str:
    """What a driver writes until it ends, in order and without a stack trace."""
    with anyio.fail_after(LONG_SECONDS):  # it starts a JVM or two first
        out, err = await anyio.to_thread.run_sync(driver.communicate, abandon_on_cancel=True)
    assert driver.returncode == 0, err
    assert "Traceback" not in err, err
    assert "\tat " not in err, err
    return out


def work(spark: SparkSession, directory: Path) -> None:
    """A job, one that fails, and a streaming query."""
    spark.range(100).selectExpr("id % 3 AS remainder").groupBy("remainder").count().collect()
    with pytest.raises(PySparkException, match="boom"):
        spark.sql("SELECT raise_error('boom')").collect()
    rows = spark.readStream.format("rate").load().writeStream.format("noop").trigger(availableNow=True)
    rows.start().awaitTermination()


def in_log(directory: Path) -> list[str]:
    """The ids of all events of the one application that has its log there."""
    (log,) = logs_in(directory).values()
    return ids_in(log)


async def ids(app: App) -> Counter[str]:
    """How often the stream holds each id."""
    return Counter([which.headers["Nats-Msg-Id"] async for which in app.replay("spark_job", from_id=1)])


async def until_published(app: App, directory: Path) -> None:
    """Wait until the agent has published the end of the application, which it does last."""
    (last,) = in_log(directory)[-1:]
    with anyio.fail_after(PATIENCE_SECONDS):
        async for notification in app.watch("spark_job", from_id=1):
            if notification.headers["Nats-Msg-Id"] == last:
                break
        entry = None
        bucket = await app.key_value(spark_events.BUCKET)
        (log,) = logs_in(directory).values()
        while entry is None or str(log.files[-1].size) not in entry.value.decode():
            entry = await bucket.get(f"local/{log.name}")
            await anyio.sleep(0.01)
