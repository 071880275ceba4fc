"""The blocks of docs/spark.md and docs/spark/, in their order, with one session of Spark and a server of their own.

What differs from the pages: paths like /data are the test's, and names that a block takes for granted are given to it.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import anyio
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from aviso_workers import App, Notification, Notify, cli
from aviso_workers.errors import NotFoundError
from aviso_workers.server import NatsServer
from aviso_workers.spark import completeness, sessions
from tests.documented import lines, texts
from tests.waits import PATIENCE_SECONDS

READING = "docs/spark.md"
WRITING = "docs/spark/writing.md"
PIPELINES = "docs/spark/pipelines.md"
JOB_EVENTS = "docs/spark/job-events.md"
FIELDS = ("class", "date", "time", "stream", "step")
JOB = ("cluster", "application", "kind", "event", "id")
IDENTIFIER = {"class": "od", "date": "20261120", "time": "0000", "stream": "oper"}
DAY = date(2026, 11, 20)


class Reader:
    """Somebody who goes through the pages, with a folder and a server."""

    def __init__(self, folder: Path, server: NatsServer) -> None:
        self.folder = folder
        self.config = folder / "config.yaml"
        self.config.write_text(json.dumps(configuration(server.url)))
        self.names: dict[str, Any] = {"__name__": "page"}

    def runs(self, block: str, **names: Any) -> None:
        """Run a block of the page, and wait for the queries that it starts."""
        self.names |= names
        exec(compile(self.here(block), "page", "exec"), self.names)

    def here(self, block: str) -> str:
        """Return a block with the files of the test in place of the page's."""
        for there in ("config/dev.yaml", "config.yaml"):
            block = block.replace(f'"{there}"', repr(str(self.config)))
        return block.replace("/data", str(self.folder / "data"))

    def publish(self, *notifications: Notify) -> None:
        async def publish() -> None:
            async with App("outside", config=self.config) as app:
                await app.notify_many(notifications)

        anyio.run(publish)

    def stored(self, event: str) -> list[Notification[Any]]:
        async def stored() -> list[Notification[Any]]:
            async with App("outside", config=self.config) as app:
                return [each async for each in app.replay(event)]

        return anyio.run(stored)


def configuration(url: str) -> dict[str, Any]:
    """Return the event types of the pages."""

    def event_type(base: str, fields: Sequence[str], rules: dict[str, str]) -> dict[str, Any]:
        return {
            "topic": {"base": base, "key_order": list(fields)},
            "identifier": {each: {"type": rules.get(each, "StringHandler"), "required": True} for each in fields},
            "storage_policy": {"allow_duplicates": True},
        }

    fields = {"date": "DateHandler", "time": "TimeHandler", "step": "IntHandler"}
    return {
        "notification_backend": {"kind": "jetstream", "jetstream": {"nats_url": url, "reconnect_delay_ms": 100}},
        "notification_schema": {
            "mars": event_type("mars", FIELDS, fields),
            "copy": event_type("copy", FIELDS, fields),
            "spark_job": event_type("spark", JOB, {}),
        },
    }


@pytest.fixture
def reader(tmp_path: Path, nats_server: NatsServer) -> Reader:
    return Reader(tmp_path, nats_server)


@pytest.fixture
def spark(
    start_spark: Callable[..., SparkSession], reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SparkSession]:
    """A session whose driver and tasks find the configuration that the environment names."""
    monkeypatch.setenv("AVISO_WORKERS_CONFIG_FILE", str(reader.config))
    settings = {
        "spark.executorEnv.AVISO_WORKERS_CONFIG_FILE": str(reader.config),
        "spark.sql.session.timeZone": "UTC",
    }
    spark = start_spark(tmp_path / "logs", settings)
    yield spark
    spark.stop()


@pytest.fixture
def command(
    spark: SparkSession, reader: Reader, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """`command("aviso-workers spark ...")`: what it prints, in the session of the test, which it would stop."""

    @contextmanager
    def session(name: str) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(sessions, "session", session)

    def command(typed: str) -> str:
        monkeypatch.setattr(sys, "argv", shlex.split(reader.here(typed), comments=True))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        assert ended.value.code == 0, captured.err
        return captured.out

    return command


@pytest.mark.slow
def test_the_pages(
    spark: SparkSession, reader: Reader, command: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    read, archive = texts(READING, "python")
    write, for_each_batch = texts(WRITING, "python")
    by_others, _, in_a_job = texts(PIPELINES, "python")
    _, listener = texts(JOB_EVENTS, "python")
    reader.publish(*(Notify("mars", {**IDENTIFIER, "step": step}, {"size": step}) for step in (0, 6, 12)))

    reader.runs(read, spark=spark)
    assert "|2026-11-20|    3|" in capsys.readouterr().out

    reader.runs(archive, path=str(reader.folder / "parquet"), checkpoint=str(reader.folder / "checkpoint"))
    ended(spark)
    assert spark.read.parquet(str(reader.folder / "parquet")).count() == 3

    reader.runs(write, rows=new_rows(spark))
    assert [each.identifier["step"] for each in reader.stored("mars")] == ["0", "6", "12", "18"]

    notifications = spark.readStream.format("aviso").options(event="mars", startingOffsets="earliest").load()
    block = for_each_batch.replace("/data", "/data/batches")
    reader.runs(block, notifications=notifications, DataFrame=DataFrame)
    until(lambda: spark.streams.active[0].recentProgress and len(reader.stored("copy")) == 4)
    for query in spark.streams.active:
        query.stop()

    assert command(lines(PIPELINES, 1)[0]) == ""
    (newest,) = lines(PIPELINES, 2)
    assert subprocess.run(["bash", "-c", reader.here(newest)], capture_output=True, text=True).stdout == "0.compact\n"
    import pyarrow.dataset  # and pandas, which takes a second, and all processes of the tests import this module

    dataset = by_others.splitlines()[1]
    table = eval(reader.here(dataset), {"pyarrow": pyarrow})
    assert table.count_rows() == 4

    from_archive, from_stream, restored = lines(PIPELINES, 3)
    assert "0 refused" in command(from_archive)
    assert "there before" in command(from_stream)
    assert command(restored) == "0 published, 4 there before, 0 refused\n"

    (schedule,) = texts(PIPELINES, "yaml")
    (reader.folder / "schedule.yaml").write_text(schedule)
    (report,) = lines(PIPELINES, 4)
    assert "4 cycles" in command(report.replace("schedule.yaml", str(reader.folder / "schedule.yaml")))
    assert (reader.folder / "data" / "report" / "report.html").exists()

    expected = completeness.expected(spark, schedule, "mars", first=DAY, last=DAY, config=str(reader.config))
    reader.runs(in_a_job, expected=expected, datetime=datetime, UTC=UTC)
    assert "cycle_late" in capsys.readouterr().out
    assert reader.names["kept"].count() == 4
    assert reader.names["checked"].where("reason is not null").count() == 0

    reader.runs(listener, SparkSession=SparkSession)
    spark.range(3).count()
    until(lambda: ("job", "end") in {(each.identifier["kind"], each.identifier["event"]) for each in jobs(reader)})


def new_rows(spark: SparkSession) -> DataFrame:
    """Return a row that is a notification, with an id."""
    fixed = [F.lit(value).alias(field) for field, value in IDENTIFIER.items()]
    step, identity = F.lit(18).cast("bigint").alias("step"), F.lit("field/18").alias("id")
    return spark.range(1).select(*fixed, step, identity, F.lit('{"size":18}').alias("payload"))


def jobs(reader: Reader) -> list[Notification[Any]]:
    try:
        return reader.stored("spark_job")
    except NotFoundError:  # there is no stream before the first event
        return []


def ended(spark: SparkSession) -> None:
    """Wait until the queries that run by `availableNow` have ended."""
    for query in spark.streams.active:
        assert query.awaitTermination(int(PATIENCE_SECONDS))


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)
