"""The Spark data source, with four tasks side by side: rows written and read, a stream copied, an archive, the delay.

Writing and reading take turns with `raw_source`, the least that does the same. Spark is warm: everything is done once
before it is measured. The delay is that of one notification from a stream through a query at rest into another
stream, as whoever published it sees it. The lag is that of a job's end in the event log, measured by a process of its
own.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import msgspec
from anyio import to_thread
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery

from _bench.ground import Cores
from _bench.raw_source import RawSource
from _bench.rivals import Rivals
from _bench.rounds import Figures, Say, Size
from _demo.children import ShortfallError
from aviso_workers import App, Notify
from aviso_workers.config import streams
from aviso_workers.server import NatsServer
from aviso_workers.spark import archives, register

COUNT = 1_000_000
TASKS = 4
SUBJECTS = 1000
PAYLOAD_CHARACTERS = 185
"""Of a location, which the JSON around it makes 200 bytes."""
WARMER = 5
"""A fifth of it is done before."""
DELAYS = 12
JOBS, LEAST_JOBS = 300, 20
MEASURE_JOB_EVENTS = Path(__file__).parents[1] / "measure_job_events.py"
FIELDS = {"class": "StringHandler", "date": "DateHandler", "time": "TimeHandler", "step": "IntHandler"}
EVENTS = ("mars", "mars_raw", "mars_copy", "warm", "warm_raw", "warm_copy", "delayed")
FIXED = {"class": "od", "date": "20261120", "time": "0000"}


def transfer(cores: Cores, rivals: Rivals, size: Size, say: Say) -> Figures:
    """Return the figures `spark.<what>.per_second`, and `p50_ms` of `spark.delay` and `spark.job-events`."""
    figures: Figures = {}
    count = size.count(COUNT)
    for repetition in range(size.repetitions):
        with _wing(cores) as wing:
            say(f"spark: warming up, {repetition + 1} of {size.repetitions}")
            _run_all(wing, "warm", count // WARMER, backwards=False, raw=rivals.wanted)
            say(f"spark: moving {count:,} notifications, {repetition + 1} of {size.repetitions}")
            ran = _run_all(wing, "mars", count, backwards=repetition % 2 == 1, raw=rivals.wanted)
            for what, seconds in ran.items():
                figures.setdefault(f"spark.{what}.per_second", []).append(count / seconds)
            say(f"spark: delay, {repetition + 1} of {size.repetitions}")
            figures.setdefault("spark.delay.p50_ms", []).append(wing.delay_ms("warm", "delayed"))
    say("spark: job events")
    for name, value in _lag_ms(max(LEAST_JOBS, round(JOBS * size.scale))).items():
        figures[f"spark.job-events.{name}"] = [value]
    return figures


def _run_all(wing: _Wing, event: str, count: int, *, backwards: bool, raw: bool) -> dict[str, float]:
    """Return how many seconds each took. `backwards` begins with the other of two that are compared."""
    deeds: tuple[dict[str, Callable[[], None]], ...] = (
        {"write": lambda: wing.write(event, count), "raw-write": lambda: wing.write_raw(f"{event}_raw", count)},
        {"read": lambda: wing.read(event), "raw-read": lambda: wing.read_raw(event)},
        {"copy": lambda: wing.copy(event, f"{event}_copy")},
        {"archive": lambda: wing.archive(event)},
    )
    seconds = {}
    for compared in deeds:
        for what in reversed(compared) if backwards else compared:
            if raw or not what.startswith("raw"):
                began = time.perf_counter()
                compared[what]()
                seconds[what] = time.perf_counter() - began
    return seconds


def _lag_ms(jobs: int) -> dict[str, float]:
    """From a job's end to its notification, through the event log and the agent at its defaults."""
    command = (sys.executable, MEASURE_JOB_EVENTS, "--jobs", str(jobs), "--json")
    told = subprocess.run(command, capture_output=True, text=True)
    if told.returncode:
        raise ShortfallError(f"no job events were measured\n{told.stderr}")
    return msgspec.json.decode(told.stdout, type=dict[str, float])


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
        os.sched_setaffinity(0, cores.usable)  # it is the whole machine that is measured
    settings: dict[str, Any] = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    builder = SparkSession.builder.master(f"local[{TASKS}]").appName("aviso-workers benchmark")
    spark = builder.config(map=settings).getOrCreate()
    spark.sparkContext.setLogLevel("OFF")  # it calls a query that is stopped an error
    try:
        register(spark)
        spark.dataSource.register(RawSource)
        yield spark
    finally:
        spark.stop()
        if cores.others:
            os.sched_setaffinity(0, cores.others)


class _Wing:
    def __init__(self, spark: SparkSession, directory: Path, nats_url: str) -> None:
        self._spark = spark
        self._directory = directory
        self._nats_url = nats_url
        self._config = directory / "aviso.yaml"
        rules = {field: {"type": kind, "required": True} for field, kind in FIELDS.items()}
        schema = {
            name: {
                "topic": {"base": name, "key_order": list(FIELDS)},
                "identifier": rules,
                "storage_policy": {"allow_duplicates": True},
            }
            for name in EVENTS
        }
        backend = {"kind": "jetstream", "jetstream": {"nats_url": nats_url}}
        document = {"notification_backend": backend, "notification_schema": schema}
        self._config.write_bytes(msgspec.json.encode(document))  # JSON is YAML

    def write(self, event: str, count: int) -> None:
        fixed = [F.lit(value).alias(field) for field, value in FIXED.items()]
        rows = self._numbers(count).select(*fixed, _step().alias("step"), _payload().alias("payload"))
        rows.write.format("aviso").mode("append").options(config=str(self._config), event=event).save()

    def write_raw(self, event: str, count: int) -> None:
        anyio.run(self._make_stream, event)
        topic = F.concat_ws(".", F.lit(event), *map(F.lit, FIXED.values()), _step())
        rows = self._numbers(count).select(topic.alias("topic"), _payload().alias("payload"))
        rows.write.format("raw").mode("append").options(url=self._nats_url, stream=event.upper()).save()

    def read(self, event: str) -> None:
        self._load(event).write.format("noop").mode("overwrite").save()

    def read_raw(self, event: str) -> None:
        loading = self._spark.read.format("raw").options(url=self._nats_url, stream=event.upper(), tasks=TASKS)
        loading.load().write.format("noop").mode("overwrite").save()

    def archive(self, event: str) -> None:
        archives.archive(self._stream(event, "earliest"), str(self._directory / f"archive-{event}")).awaitTermination()

    def copy(self, event: str, to: str) -> None:
        self._copying(event, to, availableNow=True).awaitTermination()

    def delay_ms(self, event: str, to: str) -> float:
        """Return the median of some."""
        anyio.run(self._make_stream, to)
        query = self._copying(event, to, starting="latest", processingTime="0 seconds")
        try:
            query.processAllAvailable()
            return statistics.median(anyio.run(self._delays_ms, event, to, query.processAllAvailable))
        finally:
            query.stop()

    async def _delays_ms(self, event: str, to: str, rest: Callable[[], None]) -> list[float]:
        found = []
        async with App("delay", config=self._config) as app:
            for number in range(DELAYS):
                await to_thread.run_sync(rest)  # else it still writes down what the one before was
                arriving = app.watch(to, from_id=number + 1)
                began = time.perf_counter()
                await app.notify_many([Notify(event, {**FIXED, "step": number})])
                await anext(arriving)
                found.append((time.perf_counter() - began) * 1000)
                await arriving.aclose()
        return found

    async def _make_stream(self, event: str) -> None:
        async with App("make", config=self._config) as app:
            await app.session.provisioner.ensure(
                streams.event_stream(event, app.config.notification_schema[event], app.config)
            )

    def _numbers(self, count: int) -> DataFrame:
        return self._spark.range(0, count, 1, TASKS)

    def _load(self, event: str) -> DataFrame:
        return self._spark.read.format("aviso").options(config=str(self._config), event=event).load()

    def _stream(self, event: str, starting: str) -> DataFrame:
        reading = self._spark.readStream.format("aviso").options(config=str(self._config), event=event)
        return reading.option("startingOffsets", starting).load()

    def _copying(self, event: str, to: str, *, starting: str = "earliest", **trigger: Any) -> StreamingQuery:
        rows = self._stream(event, starting).select("identifier", "payload")
        writing = rows.writeStream.format("aviso").options(config=str(self._config), event=to)
        return writing.option("checkpointLocation", str(self._directory / f"to-{to}")).trigger(**trigger).start()


def _step() -> Column:
    return F.col("id") % SUBJECTS


def _payload() -> Column:
    location = F.rpad(F.col("id").cast("string"), PAYLOAD_CHARACTERS, "x")
    return F.concat(F.lit('{"location":"'), location, F.lit('"}'))
