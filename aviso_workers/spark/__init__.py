"""The Spark wing: notifications as data frames, Spark jobs as notifications.

Importing this package needs no pyspark, so that the event log of a Spark somewhere else can be followed without one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """Make the format `aviso` known to a session: then `spark.read.format("aviso")`, and the same with `readStream`,
    `write` and `writeStream`.

    Raises `ExecutorError` where the executors lack something that it needs.
    """
    from aviso_workers.spark import data_source

    data_source.register(spark)
