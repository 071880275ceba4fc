"""Event log, notifications and Spark's history server tell the same of applications that work, fail and are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pyspark
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from aviso_agents import spark_events
from aviso_workers import App, http_answers
from tests.commands import Command
from tests.spark.logs import NAMES, logs_in, raw
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

JOBS = 20
FAILING = 5

KILLED = """
import sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[2]").getOrCreate()
for _ in range(3):
    spark.range(2).count()
rows = spark.readStream.format("rate").load().writeStream.format("noop")
query = rows.option("checkpointLocation", sys.argv[1]).trigger(processingTime="200 milliseconds").start()
while len(query.recentProgress) < 2:
    query.awaitTermination(0.1)
context = spark.sparkContext
print(context.applicationId, context._jvm.java.lang.ProcessHandle.current().pid(), flush=True)
context.setJobDescription("endless")
spark.range(1).selectExpr("java_method('java.lang.Thread', 'sleep', 600000L)").collect()
"""


@pytest.fixture
def start_history(free_port: int, tmp_path: Path) -> Iterator[Callable[[], str]]:
    """Spark's history server, from the installed PySpark; gives its URL."""
    home = Path(pyspark.__file__).parent
    options = {
        "spark.history.fs.logDirectory": (tmp_path / "logs").as_uri(),
        "spark.history.ui.port": str(free_port),
        "spark.history.fs.update.interval": "1s",
    }
    ours = {
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_HISTORY_OPTS": " ".join(f"-D{key}={value}" for key, value in options.items()),
        "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    command = [str(home / "bin" / "spark-class"), "org.apache.spark.deploy.history.HistoryServer"]
    running: list[subprocess.Popen[bytes]] = []

    def start_history() -> str:
        with (tmp_path / "history.log").open("wb") as log:
            running.append(subprocess.Popen(command, env=os.environ | ours, stdout=log, stderr=log))
        return f"http://127.0.0.1:{free_port}"

    yield start_history
    for process in running:
        process.kill()
        process.wait()


@pytest.mark.slow
async def test_counts_agree_three_ways(
    app: App,
    config: Path,
    start_spark: Callable[..., SparkSession],
    start_driver: Callable[..., subprocess.Popen[str]],
    start_history: Callable[[], str],
    start: Callable[..., Command],
    tmp_path: Path,
) -> None:
    async with app, anyio.create_task_group() as tasks:
        tasks.start_soon(spark_events.follow_event_logs, app)
        driver = start_driver(KILLED, tmp_path / "checkpoint")
        spark = await anyio.to_thread.run_sync(start_spark, tmp_path / "logs", {})
        whole = spark.sparkContext.applicationId
        await anyio.to_thread.run_sync(work, spark, tmp_path)
        assert driver.stdout is not None
        killed, _, pid = (await anyio.to_thread.run_sync(driver.stdout.readline)).partition(" ")
        history = start_history()
        await until_logged(tmp_path / "logs", killed, "endless")
        os.kill(int(pid), signal.SIGKILL)
        await anyio.to_thread.run_sync(spark.stop)
        make_stale(tmp_path / "logs" / f"eventlog_v2_{killed}")
        await until_stored(app, {f"application.end {whole}", f"application.lost {killed}"})
        tasks.cancel_scope.cancel()

    for application in (whole, killed):
        logged = facts_of(raw(logs_in(tmp_path / "logs")[application]))
        async with app:
            published = await facts_in(app, application)
        if application == killed:
            lost = {kind: published.pop(f"{kind}.lost", 0) for kind in ("application", "job", "stage", "sql", "query")}
            assert lost == {kind: logged[f"{kind}.start"] - logged[f"{kind}.end"] for kind in lost}
        assert published == logged, "what is published is what is logged"
        spark_says = await ask(history, application)
        assert spark_says == {key: logged[key] for key in ("job.start", "job.end", "job.end failed", "sql.start")}
    assert logged["application.end"] == 0, "the driver was killed"
    assert logged["job.start"] > logged["job.end"], "in the middle of a job"

    reconciled = start("spark", "reconcile", history, "--json", "--config", config)
    rows = [json.loads(line) for line in reconciled.process.stdout or ()]
    assert reconciled.end() == 0, rows
    assert {(row["application"], row["kind"]) for row in rows} == {
        (application, kind) for application in (whole, killed) for kind in ("application", "job", "stage", "sql")
    }
    assert [row for row in rows if row["differences"] or row["twice"] or row["only_published"]] == []

    async with app:
        where = {"application": whole, "kind": "job", "event": "end"}
        end, *_ = [each async for each in app.replay("spark_job", where, from_id=1)]
        await app.session.backend.delete_message("SPARK", end.sequence)
    reconciled = start("spark", "reconcile", history, "--application", whole, "--config", config)
    table = "".join(reconciled.process.stdout or ())
    assert reconciled.end() == 1, table
    assert f"{whole}: job {end.identifier['id']}: Spark says {end.payload['status']}, published is running" in table
    assert "DIFFERS" in table


def work(spark: SparkSession, directory: Path) -> None:
    """Jobs, some of which fail, and two streaming queries, one of which fails."""
    for _ in range(JOBS - FAILING):
        assert spark.range(3).count() == 3
    for _ in range(FAILING):
        with pytest.raises(PySparkException, match="boom"):
            spark.sql("SELECT raise_error('boom')").collect()
    rows = spark.readStream.format("rate").load()
    good = rows.writeStream.format("noop").option("checkpointLocation", str(directory / "good"))
    good.trigger(availableNow=True).start().awaitTermination()
    bad = rows.selectExpr("raise_error('boom')").writeStream.format("noop")
    query = bad.option("checkpointLocation", str(directory / "bad")).trigger(processingTime="200 milliseconds").start()
    with pytest.raises(PySparkException, match="boom"):
        query.awaitTermination(int(PATIENCE_SECONDS))


def facts_of(events: list[dict[str, Any]]) -> Counter[str]:
    """How many events of each name a log holds, and of jobs how many failed."""
    facts = Counter(NAMES.get(event["Event"].rpartition(".")[2]) for event in events)
    del facts[None]
    results = (event["Job Result"] for event in events if event["Event"] == "SparkListenerJobEnd")
    facts["job.end failed"] = sum(result["Result"] != "JobSucceeded" for result in results)
    return Counter({str(name): count for name, count in facts.items()})


async def facts_in(app: App, application: str) -> Counter[str]:
    facts: Counter[str] = Counter()
    async for each in app.replay("spark_job", {"application": application}, from_id=1):
        name = f"{each.identifier['kind']}.{each.identifier['event']}"
        facts.update([name, f"{name} failed"] if name == "job.end" and each.payload["status"] == "failed" else [name])
    return facts


async def ask(history: str, application: str) -> dict[str, int]:
    """What the history server counts."""

    def get(path: str) -> Any:
        url = f"{history}/api/v1/applications/{application}{path}"
        seconds = PATIENCE_SECONDS
        return json.loads(http_answers.read(url, seconds=seconds, silent_seconds=seconds, max_bytes=1 << 24, near=True))

    with anyio.fail_after(PATIENCE_SECONDS):
        while True:
            try:
                jobs = Counter(job["status"] for job in await anyio.to_thread.run_sync(get, "/jobs"))
                break
            except (OSError, ValueError):  # it is starting (with a page in place of JSON), or has not seen the log
                await anyio.sleep(0.2)
    return {
        "job.start": jobs.total(),
        "job.end": jobs["SUCCEEDED"] + jobs["FAILED"],
        "job.end failed": jobs["FAILED"],
        "sql.start": len(await anyio.to_thread.run_sync(get, "/sql?length=1000")),
    }


async def until_logged(directory: Path, application: str, description: str) -> None:
    """Wait until the log of the application holds a job of this description."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while f'"spark.job.description": "{description}"' not in json.dumps(raw(logs_in(directory)[application])):  # noqa: ASYNC110
            await anyio.sleep(0.05)


async def until_stored(app: App, missing: set[str]) -> None:
    with anyio.move_on_after(PATIENCE_SECONDS):
        async for each in app.watch("spark_job", {"kind": "application"}, from_id=1):
            missing.discard(f"application.{each.identifier['event']} {each.identifier['id']}")
            if not missing:
                return
    raise AssertionError(f"not published: {missing}")


def make_stale(log: Path) -> None:
    """As if the driver had been killed two hours ago."""
    for file in log.iterdir():
        os.utime(file, (time.time() - 7200,) * 2)
