"""One Spark for the whole test run: its JVM takes seconds to start, another application within it almost none."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyspark import SparkContext
from pyspark.sql import SparkSession

from aviso_agents import spark_events
from aviso_workers import App
from aviso_workers.server import NatsServer
from aviso_workers.spark import register
from tests.spark.jvms import keep_classes, quick_jvm, storing_classes
from tests.spark.place import Place
from tests.waits import PATIENCE_SECONDS

KEYS = ("cluster", "application", "kind", "event", "id")
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
"""What Spark forks its Python workers from, with all loaded that they import. Spark's own daemon loads nothing before
it forks, because some modules start threads: of these, NumPy does, unless OPENBLAS_NUM_THREADS is 1.
"""
QUICK_START = {
    "spark.driver.extraJavaOptions": quick_jvm(),
    "spark.python.daemon.module": "loaded_daemon",
    "spark.python.authenticate.socketTimeout": f"{PATIENCE_SECONDS:.0f}s",  # for a Python worker to start
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Spark runs as Python, which otherwise is whatever `python3` is on PATH.

    Spark puts a zip of PySpark before the one that is installed. Python compiles all that it imports from a zip, in
    every process anew: 1.3 of the 1.7 seconds that a worker of Spark takes to start. Most of the rest are imports,
    and a session of tests starts hundreds of workers.
    """
    directory = tmp_path_factory.mktemp("python")
    (directory / "loaded_daemon.py").write_text(DAEMON)
    python = directory / "python"
    environment = f'export PYTHONPATH="{directory}" OPENBLAS_NUM_THREADS=1'
    python.write_text(f'#!/bin/sh\n{environment}\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


@pytest.fixture(scope="session")
def start_spark(python: Path) -> Iterator[Callable[..., SparkSession]]:
    """`start_spark(directory, {"spark.…": …})`: a new application whose event log is in `directory`; stop it."""

    def start_spark(event_logs: Path, settings: dict[str, str]) -> SparkSession:
        if (left := SparkSession._instantiatedSession) is not None:  # that of any thread
            left.stop()  # a test that failed left it, and the new one would keep its settings
        event_logs.mkdir(exist_ok=True)
        builder = SparkSession.builder.master("local[2]").appName("aviso-workers tests")
        logging = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": event_logs.as_uri()}
        storing = {"spark.driver.extraJavaOptions": storing_classes()}
        for key, value in {**QUICK_START, **storing, **logging, **settings}.items():
            builder = builder.config(key, value)
        return builder.getOrCreate()

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYSPARK_PYTHON", str(python))
        patched.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        yield start_spark
        _end_jvm()


@pytest.fixture
def start_driver(tmp_path: Path, python: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`start_driver(program, *arguments)`: a Spark driver of its own, whose event log is in `tmp_path / "logs"`."""
    (tmp_path / "logs").mkdir(exist_ok=True)
    logging = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": (tmp_path / "logs").as_uri()}
    settings = "".join(f"{key} {value}\n" for key, value in {**QUICK_START, **logging}.items())
    (tmp_path / "spark.conf").write_text(settings)
    # A directory of configuration would be part of the class path, and a JVM only takes classes that it stored for
    # the same one.
    options = f"--properties-file {shlex.quote(str(tmp_path / 'spark.conf'))} pyspark-shell"
    ours = {"PYSPARK_SUBMIT_ARGS": options, "PYSPARK_PYTHON": str(python), "SPARK_LOCAL_IP": "127.0.0.1"}
    with ExitStack() as running:

        def start_driver(program: str, *arguments: str | Path) -> subprocess.Popen[str]:
            driver = subprocess.Popen(
                [sys.executable, "-c", program, *arguments],
                env=os.environ | ours,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            running.enter_context(driver)
            running.callback(driver.kill)
            return driver

        yield start_driver


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer.start(store_dir=tmp_path / "jetstream") as server:
        yield server


@pytest.fixture
def config(server: NatsServer, tmp_path: Path) -> Path:
    """A file for drivers and agents: events of the logs in `tmp_path / "logs"` go to the server, every one is kept."""
    document = {
        "notification_backend": {"kind": "jetstream", "jetstream": {"nats_url": server.url, "reconnect_delay_ms": 100}},
        "notification_schema": {
            "spark_job": {
                "topic": {"base": "spark", "key_order": list(KEYS)},
                "identifier": {key: {"type": "StringHandler", "required": True} for key in KEYS},
                "storage_policy": {"allow_duplicates": True},
            }
        },
        "workers": {
            "agents": {"spark-events": {"event_log_dirs": [str(tmp_path / "logs")]}},
            "status": {"port": 0},
            "logging": {"format": "json"},
        },
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
def app(config: Path) -> App:
    app = App("spark", config=config)
    app.include(spark_events.router)
    return app


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
        gateway.proc.wait(5 * PATIENCE_SECONDS)  # it may store its classes
        keep_classes()
        SparkContext._gateway = SparkContext._jvm = None
