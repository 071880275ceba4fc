#!/usr/bin/env python3
"""How soon is a Spark job's end a stored notification, and what does waiting for the next one cost?

    scripts/measure_job_events.py            the agent, which tails event logs, at its defaults
    scripts/measure_job_events.py --listen   the driver's own listener instead
    scripts/measure_job_events.py --idle     the agent's processor time while ten applications are idle

Starts a nats-server, a Spark and a worker of its own. Lag is from the completion time that Spark gives a job to the
time at which the stream stored its `job.end`; both are of this machine's clock, the former in whole milliseconds.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import anyio
import yaml
from pyspark.sql import SparkSession

from aviso_workers import App
from aviso_workers.server import NatsServer
from aviso_workers.spark import listen

KEYS = ("cluster", "application", "kind", "event", "id")
WARM_UP = 20
IDLE_APPLICATIONS = 10
SETTLE_SECONDS = 3
IDLE_SECONDS = 30


def configure(directory: Path, url: str) -> Path:
    fields = {key: {"type": "StringHandler", "required": True} for key in KEYS}
    topic = {"base": "spark", "key_order": list(KEYS)}
    document = {
        "notification_backend": {"kind": "jetstream", "jetstream": {"nats_url": url}},
        "notification_schema": {
            "spark_job": {"topic": topic, "identifier": fields, "storage_policy": {"allow_duplicates": True}}
        },
        "workers": {"agents": {"spark-events": {"event_log_dirs": [str(directory / "logs")]}}, "status": {"port": 0}},
    }
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@contextmanager
def worker(config: Path) -> Iterator[int]:
    """The agent in a process of its own, by its id."""
    command = [Path(sys.executable).with_name("aviso-workers"), "worker", "--agent", "spark-events", "--config", config]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        yield process.pid
        process.terminate()


def start_spark(directory: Path) -> SparkSession:
    settings = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": (directory / "logs").as_uri(),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    return SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()


async def lags(config: Path) -> list[float]:
    """Milliseconds, in the order of the jobs."""
    async with App("measure", config=config) as app:
        ends = app.replay("spark_job", {"kind": "job", "event": "end"}, from_id=1)
        return [each.time.timestamp() * 1000 - each.payload["time"] async for each in ends]


def measure_lag(directory: Path, config: Path, *, jobs: int, listening: bool) -> None:
    chance = random.Random(6)
    with nullcontext() if listening else worker(config):
        spark = start_spark(directory)
        with listen(spark, config=config) if listening else nullcontext():
            for _ in range(WARM_UP + jobs):
                spark.sparkContext.parallelize([1], 1).count()
                time.sleep(chance.uniform(0.05, 0.25))
            spark.stop()
        time.sleep(SETTLE_SECONDS)
    found = anyio.run(lags, config)
    if len(found) != WARM_UP + jobs:
        sys.exit(f"{len(found)} of {WARM_UP + jobs} jobs were published")
    percentiles = statistics.quantiles(found[WARM_UP:], n=100)
    print(
        f"{jobs} jobs: p50 {percentiles[49]:.1f} ms, p99 {percentiles[98]:.1f} ms, most {max(found[WARM_UP:]):.1f} ms"
    )


def measure_idle(directory: Path, config: Path) -> None:
    spark = start_spark(directory)
    spark.sparkContext.parallelize([1], 1).count()
    (recorded,) = (directory / "logs").glob("eventlog_v2_*/events_1_*")
    for number in range(IDLE_APPLICATIONS - 1):
        log = directory / "logs" / f"eventlog_v2_local-{number}"
        log.mkdir()
        (log / f"events_1_local-{number}.zstd").write_bytes(recorded.read_bytes())
        (log / f"appstatus_local-{number}.inprogress").touch()
    with worker(config) as pid:
        time.sleep(SETTLE_SECONDS)
        for state, wait in (("just fallen silent", 0), ("silent for more than a minute", 60 - IDLE_SECONDS)):
            time.sleep(wait)
            before = cpu_seconds(pid)
            time.sleep(IDLE_SECONDS)
            share = (cpu_seconds(pid) - before) / IDLE_SECONDS
            print(f"{IDLE_APPLICATIONS} applications, {state}: {share:.2%} of a core over {IDLE_SECONDS} s")
    spark.stop()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", action="store_true")
    parser.add_argument("--idle", action="store_true")
    parser.add_argument("--jobs", type=int, default=300)
    arguments = parser.parse_args()
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    with tempfile.TemporaryDirectory() as name, NatsServer.start(store_dir=Path(name) / "jetstream") as server:
        directory = Path(name)
        (directory / "logs").mkdir()
        config = configure(directory, server.url)
        if arguments.idle:
            measure_idle(directory, config)
        else:
            measure_lag(directory, config, jobs=arguments.jobs, listening=arguments.listen)


if __name__ == "__main__":
    main()
