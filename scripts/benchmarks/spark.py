"""The Spark data source, with four tasks side by side: rows written and read, a stream copied, an archive, the delay.

Spark is warm: the first round is not counted. The delay is that of one notification from a stream through a query into
another stream, as whoever published it sees it.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery

from aviso_workers import App, Notify
from aviso_workers.server import NatsServer
from aviso_workers.spark import register
from benchmarks.ground import Cores
from benchmarks.rivals import Rivals
from benchmarks.rounds import Figures, Say, Size

__all__ = ["transfer"]

COUNT = 1_000_000
TASKS = 4
SUBJECTS = 1000
PAYLOAD_CHARACTERS = 180
DELAYS = 12
FIELDS = {"class": "StringHandler", "date": "DateHandler", "time": "TimeHandler", "step": "IntHandler"}
FIXED = {"class": "od", "date": "20261120", "time": "0000"}


def transfer(cores: Cores, rivals: Rivals, size: Size, say: Say) -> Figures:
    """The figures `spark.<what>.per_second` and `spark.delay.p50_ms`."""
    figures: Figures = {}
    count = size.count(COUNT)
    deeds = {"write": ("mars", count), "read": ("mars",), "copy": ("mars", "copy"), "archive": ("mars",)}
    for repetition in range(size.repetitions):
        with _wing(cores) as wing:
            wing.write("warm", TASKS * 1000)
            wing.copy("warm", "lukewarm")
            for what, arguments in deeds.items():
                say(f"spark: {what}, {repetition + 1} of {size.repetitions}")
                began = time.perf_counter()
                getattr(wing, what)(*arguments)
                figures.setdefault(f"spark.{what}.per_second", []).append(count / (time.perf_counter() - began))
            say(f"spark: delay, {repetition + 1} of {size.repetitions}")
            figures.setdefault("spark.delay.p50_ms", []).append(wing.delay_ms("warm", "delayed"))
    return figures


@contextmanager
def _wing(cores: Cores) -> Iterator[_Wing]:
    with (
        TemporaryDirectory(prefix="aviso-workers-bench-") as directory,
        NatsServer.start(store_dir=Path(directory) / "nats") as server,
        _session(cores) as spark,
    ):
        yield _Wing(spark, Path(directory), server.url)


@contextmanager
def _session(cores: Cores) -> Iterator[SparkSession]:
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    if cores.others:
        os.sched_setaffinity(0, cores.measured | cores.others)  # it is the whole machine that is measured
    settings: dict[str, Any] = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    builder = SparkSession.builder.master(f"local[{TASKS}]").appName("aviso-workers benchmark")
    spark = builder.config(map=settings).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        register(spark)
        yield spark
    finally:
        spark.stop()
        if cores.others:
            os.sched_setaffinity(0, cores.others)


class _Wing:
    def __init__(self, spark: SparkSession, directory: Path, nats_url: str) -> None:
        self._spark = spark
        self._directory = directory
        self._config = directory / "aviso.yaml"
        rules = {field: {"type": kind, "required": True} for field, kind in FIELDS.items()}
        schema = {
            name: {
                "topic": {"base": name, "key_order": list(FIELDS)},
                "identifier": rules,
                "storage_policy": {"allow_duplicates": True},
            }
            for name in ("mars", "copy", "warm", "lukewarm", "delayed")
        }
        backend = {"kind": "jetstream", "jetstream": {"nats_url": nats_url}}
        document = {"notification_backend": backend, "notification_schema": schema}
        self._config.write_bytes(msgspec.json.encode(document))  # JSON is YAML

    def write(self, event: str, count: int) -> None:
        fixed = [F.lit(value).alias(field) for field, value in FIXED.items()]
        location = F.rpad(F.col("id").cast("string"), PAYLOAD_CHARACTERS, "x")
        payload = F.concat(F.lit('{"location":"'), location, F.lit('"}')).alias("payload")
        rows = self._spark.range(0, count, 1, TASKS)
        rows = rows.select(*fixed, (F.col("id") % SUBJECTS).alias("step"), payload)
        rows.write.format("aviso").mode("append").options(config=str(self._config), event=event).save()

    def read(self, event: str) -> None:
        everything = (F.sum("sequence"), F.sum(F.length("payload")), F.max("time"), F.max("topic"), F.max("identifier"))
        self._load(event).agg(*everything).collect()

    def archive(self, event: str) -> None:
        rows = self._load(event).withColumn("day", F.to_date("time"))
        rows.write.partitionBy("day").parquet(str(self._directory / "archive"))

    def copy(self, event: str, to: str) -> None:
        self._copying(event, to, availableNow=True).awaitTermination()

    def delay_ms(self, event: str, to: str) -> float:
        """The median of some."""
        query = self._copying(event, to, starting="latest", processingTime="0 seconds")
        try:
            query.processAllAvailable()
            return statistics.median(anyio.run(self._delays_ms, event, to))
        finally:
            query.stop()

    async def _delays_ms(self, event: str, to: str) -> list[float]:
        found = []
        async with App("delay", config=self._config) as app:
            await app.session.replayer(to, {})  # makes the stream
            for number in range(DELAYS):
                arriving = app.watch(to, from_id=number + 1)
                began = time.perf_counter()
                await app.notify_many([Notify(event, {**FIXED, "step": number})])
                await anext(arriving)
                found.append((time.perf_counter() - began) * 1000)
                await arriving.aclose()
        return found

    def _load(self, event: str) -> DataFrame:
        return self._spark.read.format("aviso").options(config=str(self._config), event=event).load()

    def _copying(self, event: str, to: str, *, starting: str = "earliest", **trigger: Any) -> StreamingQuery:
        reading = self._spark.readStream.format("aviso").options(config=str(self._config), event=event)
        rows = reading.option("startingOffsets", starting).load().select("identifier", "payload")
        writing = rows.writeStream.format("aviso").options(config=str(self._config), event=to)
        return writing.option("checkpointLocation", str(self._directory / f"to-{to}")).trigger(**trigger).start()
