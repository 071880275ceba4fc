"""The Spark driver that `spark_kills` kills: a program that does the jobs which it reads from standard input, at once.

Each line is a `Job` in JSON, and each answer a line on standard output. Drivers are started often, so what a JVM and
Spark's Python workers need to start is cut down; a job is what a user would write, and nothing in it knows of kills.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from aviso_workers.spark import archives, backfill, register

LOCAL = "local[10]"
"""The driver does all by itself, and starts in half of the time."""
CLUSTER = "local-cluster[2,5,1024]"
"""Two executors in processes of their own. There and here, tasks of all jobs run at the same time."""

BATCHES = 8
"""Micro-batches of a streaming query."""
DAEMON = """
import aviso_workers.backends.jetstream
import aviso_workers.spark.data_source
import aviso_workers.spark.readers
import aviso_workers.spark.writers
import pyspark.worker
from pyspark.daemon import manager

if __name__ == "__main__":
    manager()
"""
"""What Spark forks its Python workers from, with all loaded that they import."""
SETTINGS = {
    "spark.executor.memory": "1024m",
    "spark.deploy.maxExecutorRetries": "-1",  # executors that are killed do not count
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.python.daemon.module": "loaded_daemon",
    "spark.python.authenticate.socketTimeout": "120s",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1000",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.eventLog.enabled": "true",
}


class Job(Struct, frozen=True, kw_only=True):
    """What is to be done, and where."""

    name: str
    config: str
    target: str
    """The event type that it publishes, if it does."""
    count: int
    """Rows."""
    directory: str
    """Of this job alone: what it keeps is there when it is done again."""
    kept: str
    """An archive of the source."""


class Answer(Struct, frozen=True, kw_only=True):
    """How a job ended."""

    name: str = ""
    """The job's; empty when the driver is ready."""
    problem: str = ""
    """Empty where it succeeded."""
    numbers: Sequence[int] = ()
    """Of the notifications in an archive, where the job is to read one."""


def command(master: str, event_logs: Path) -> Sequence[str]:
    return [sys.executable, "-m", "_chaos.spark_driver", master, event_logs.as_uri()]


def environment(directory: Path) -> dict[str, str]:
    """Return what is set for a driver, and make in `directory` what its executors run as Python."""
    (directory / "loaded_daemon.py").write_text(DAEMON)
    python = directory / "python"
    # Spark puts a zip of PySpark before the one that is installed, and Python would compile it in each process.
    variables = f'PYTHONPATH="{directory}" OPENBLAS_NUM_THREADS=1'
    python.write_text(f'#!/bin/sh\nexport {variables}\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return {"PYSPARK_PYTHON": str(python), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOCAL_DIRS": str(directory / "spark")}


def _write(spark: SparkSession, job: Job) -> None:
    _save(_rows(spark, job), job)


def _write_with_ids(spark: SparkSession, job: Job) -> None:
    rows = _rows(spark, job)
    _save(rows.withColumn("id", F.col("identifier.number").cast("string")), job, msgIdColumn="id")


def _stream_write(spark: SparkSession, job: Job) -> None:
    rows = _source(spark, job).select("identifier", "payload")
    options = {"config": job.config, "event": job.target, "checkpointLocation": f"{job.directory}/checkpoint"}
    rows.writeStream.format("aviso").options(**options).trigger(availableNow=True).start().awaitTermination()


def _archive(spark: SparkSession, job: Job) -> None:
    archives.archive(_source(spark, job), f"{job.directory}/archive").awaitTermination()


def _backfill(spark: SparkSession, job: Job) -> None:
    backfill.backfill(archives.read(spark, job.kept), job.target, config=job.config)


def _read_archive(spark: SparkSession, job: Job) -> Answer:
    rows = archives.read(spark, f"{job.directory}/archive").select("identifier.number", "payload")
    intact = rows.where(F.col("payload") == _payload(F.col("number")))
    return Answer(numbers=[row["number"] for row in intact.select("number").collect()])


JOBS: dict[str, Callable[[SparkSession, Job], Answer | None]] = {
    "write": _write,
    "write with msgIdColumn": _write_with_ids,
    "stream write": _stream_write,
    "archive": _archive,
    "backfill": _backfill,
    "read archive": _read_archive,
}


def _rows(spark: SparkSession, job: Job) -> DataFrame:
    """Return the notifications of the source, as rows in four partitions."""
    number = F.col("id")
    identifier = F.struct((number % 20).alias("lane"), number.alias("number"))
    rows = spark.range(0, job.count, 1, 4)
    return rows.select(identifier.alias("identifier"), _payload(number).alias("payload"))


def _payload(number: Column) -> Column:
    return F.to_json(F.struct(F.repeat(F.sha2(number.cast("string"), 256), 4).alias("body")))


def _source(spark: SparkSession, job: Job) -> DataFrame:
    options = {"config": job.config, "event": "deed", "startingOffsets": "earliest"}
    reader = spark.readStream.format("aviso").options(**options)
    return reader.option("maxMessagesPerTrigger", max(1, job.count // BATCHES)).load()


def _save(rows: DataFrame, job: Job, **options: str) -> None:
    rows.write.format("aviso").mode("append").options(config=job.config, event=job.target, **options).save()


def main() -> None:
    master, event_logs = sys.argv[1:]
    builder = SparkSession.builder.appName("aviso-workers kills")
    for name, value in {**SETTINGS, "spark.master": master, "spark.eventLog.dir": event_logs}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    register(spark)
    _tell(Answer())
    with ThreadPoolExecutor(len(JOBS)) as threads:
        for line in sys.stdin:
            threads.submit(_do, spark, msgspec.json.decode(line, type=Job))
    spark.stop()


def _do(spark: SparkSession, job: Job) -> None:
    java: Any = spark._jvm
    # In a thread that has no active session, Spark 4.3 finds no Python data source to write to.
    java.org.apache.spark.sql.classic.SparkSession.setActiveSession(spark._jsparkSession)
    try:
        answer = JOBS[job.name](spark, job) or Answer()
    except Exception as error:  # whatever it is, it is the answer
        answer = Answer(problem=f"{type(error).__name__}: {error}"[:2000])
    _tell(structs.replace(answer, name=job.name))


def _tell(answer: Answer) -> None:
    os.write(1, msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main()
