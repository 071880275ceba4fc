"""Spark: notifications as data frames, and what Spark's jobs do as notifications.

Importing this package needs no pyspark, so that the event log of a Spark somewhere else can be followed without one.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from aviso_workers.config import Config
from aviso_workers.errors import DeclarationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from aviso_workers.spark.listeners import Listener

__all__ = ["listen", "register"]

LEAST_PYSPARK = (4, 2)
"""The first in which a Python data source can limit what a streaming query reads at once."""
FOR_SPARK = "pip install 'aviso-workers[spark]'"
FOR_EVENT_LOGS = "pip install 'aviso-workers[spark-events]'"


def require_pyspark() -> None:
    """Raise `DeclarationError` where PySpark is missing, or older than the data source needs."""
    if find_spec("pyspark") is None:
        raise DeclarationError(f"PySpark is not installed: {FOR_SPARK}")
    from pyspark import __version__

    if tuple(map(int, re.findall(r"\d+", __version__)[:2])) < LEAST_PYSPARK:
        least = ".".join(map(str, LEAST_PYSPARK))
        raise DeclarationError(f"PySpark {__version__} is installed, and {least} or newer is needed: {FOR_SPARK}")


def register(spark: SparkSession) -> None:
    """Make the format `aviso` known to a session: then `spark.read.format("aviso")`, and the same with `readStream`,
    `write` and `writeStream`.

    Raises `DeclarationError` where PySpark is too old, and `ExecutorError` where the executors lack something that it
    needs.
    """
    require_pyspark()
    from aviso_workers.spark import data_source

    data_source.register(spark)


def listen(spark: SparkSession, *, config: Config | str | Path | None = None) -> Listener:
    """Publish what happens in the application of this session, from now on until it or this process ends.

    `config` is a path, a loaded `Config`, or None for the file that the environment names. Needs no NATS server to be
    there: events wait for one, for a minute at most. Raises `ConfigError` and `UnknownEventTypeError`.
    """
    from aviso_workers.spark import listeners

    return listeners.listen(spark, config=config)
