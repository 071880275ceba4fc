"""One Spark for the whole test run: its JVM takes seconds to start, another application within it almost none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from aviso_workers.server import NatsServer
from aviso_workers.spark import register
from tests.spark.place import Place

QUICK_START = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


@pytest.fixture(scope="session")
def start_spark() -> Iterator[Callable[..., SparkSession]]:
    """`start_spark(directory, {"spark.…": …})`: a new application whose event log is in `directory`; stop it."""

    def start_spark(event_logs: Path, settings: dict[str, str]) -> SparkSession:
        event_logs.mkdir(exist_ok=True)
        builder = SparkSession.builder.master("local[2]").appName("aviso-workers tests")
        logging = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": event_logs.as_uri()}
        for key, value in {**QUICK_START, **logging, **settings}.items():
            builder = builder.config(key, value)
        return builder.getOrCreate()

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYSPARK_PYTHON", sys.executable)  # else Spark runs whatever `python3` is on PATH
        patched.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        yield start_spark
        _end_jvm()


@pytest.fixture(scope="module")
def spark(start_spark: Callable[..., SparkSession], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """An application with the data source. A failed task is tried once more."""
    settings = {"spark.master": "local[2,2]", "spark.sql.session.timeZone": "UTC"}
    spark = start_spark(tmp_path_factory.mktemp("logs"), settings)
    spark.sparkContext.setLogLevel("OFF")  # of tasks that are to fail
    register(spark)
    yield spark
    spark.stop()


@pytest.fixture
def place(spark: SparkSession, nats_server: NatsServer, tmp_path: Path) -> Place:
    return Place(spark, nats_server, tmp_path)


def _end_jvm() -> None:
    gateway: Any = SparkContext._gateway
    if gateway is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()  # by which the JVM knows that it is to end
        gateway.proc.wait(10)
        SparkContext._gateway = SparkContext._jvm = None
