"""A Spark job as somebody writes it who reads notifications, and whose jobs become notifications."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from aviso_workers.spark import listen, register


def run(spark: SparkSession, config: Path) -> DataFrame:
    register(spark)
    listening = listen(spark, config=config)
    frame = spark.read.format("aviso").options(config=str(config), event="mars").load()
    frame.write.format("aviso").mode("append").options(config=str(config), event="copy").save()
    listening.close(within_seconds=5.0)
    return frame
