"""Spark: notifications as data frames, and what Spark's jobs do as notifications.

Importing this package needs no pyspark, so that the event log of a Spark somewhere else can be followed without one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from aviso_workers.config import Config

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from aviso_workers.spark.listeners import Listener

__all__ = ["listen", "register"]


def register(spark: SparkSession) -> None:
    """Make the format `aviso` known to a session: then `spark.read.format("aviso")`, and the same with `readStream`,
    `write` and `writeStream`.

    Raises `DeclarationError` where PySpark is too old, and `ExecutorError` where the executors lack something that it
    needs.
    """
    from aviso_workers.spark import installed

    installed.require()
    from aviso_workers.spark import data_source

    data_source.register(spark)


def listen(spark: SparkSession, *, config: Config | str | Path | None = None) -> Listener:
    """Publish what happens in the application of this session, from now on until it or this process ends.

    `config` is a path, a loaded `Config`, or None for the file that the environment names. Needs no NATS server to be
    there: events wait for one, for a minute at most. Raises `ConfigError` and `UnknownEventTypeError`.
    """
    from aviso_workers.spark import listeners

    return listeners.listen(spark, config=config)
