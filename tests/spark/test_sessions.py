"""The session of a command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pyspark.sql import SparkSession

from aviso_workers.spark import sessions


def test_a_shuffle_has_a_partition_for_each_core_unless_the_configuration_says_how_many(
    start_spark: Callable[..., SparkSession], tmp_path: Path
) -> None:
    with sessions.session("as shipped") as spark:
        assert spark.conf.get(sessions.SHUFFLE_PARTITIONS) == str(spark.sparkContext.defaultParallelism)

    start_spark(tmp_path / "logs", {sessions.SHUFFLE_PARTITIONS: "3"})
    with sessions.session("as configured") as spark:
        assert spark.conf.get(sessions.SHUFFLE_PARTITIONS) == "3"
