"""The Spark job: archives the index as Parquet, and says which steps of which cycle are missing.

    spark-submit completeness.py --index index.sqlite --schedule schedule.jsonl --output directory

Writes `fields/`, partitioned by date and stream, and `completeness/`: a row per cycle of the schedule with the number
of steps expected and the list of those missing. The schedule has a JSON object per line: the cycle and its `steps`.
Runs on its own, with nothing of aviso-workers.
"""

from __future__ import annotations

import argparse
import sqlite3
from contextlib import closing
from pathlib import Path

import pyarrow
from pyspark.sql import DataFrame, SparkSession, functions

CYCLE = ["class", "expver", "domain", "date", "time", "stream"]
SCHEDULE = ", ".join([*(f"{name} string" for name in CYCLE), "steps array<int>"])
FIELDS = pyarrow.schema(
    [
        *((name, pyarrow.string()) for name in CYCLE),
        ("step", pyarrow.int32()),
        ("location", pyarrow.string()),
        ("size", pyarrow.int64()),
        ("sequence", pyarrow.int64()),
    ]
)


def main() -> None:
    arguments = argparse.ArgumentParser()
    for name in ("--index", "--schedule", "--output"):
        arguments.add_argument(name, required=True)
    given = arguments.parse_args()
    spark = SparkSession.builder.appName("completeness").getOrCreate()
    try:
        fields = spark.createDataFrame(read_index(given.index)).cache()
        schedule = spark.read.schema(SCHEDULE).json(given.schedule)
        fields.write.mode("overwrite").partitionBy("date", "stream").parquet(f"{given.output}/fields")
        completeness(schedule, fields).write.mode("overwrite").parquet(f"{given.output}/completeness")
    finally:
        spark.stop()


def read_index(file: str) -> pyarrow.Table:
    """Return all fields, as they are at this moment."""
    with closing(sqlite3.connect(f"{Path(file).absolute().as_uri()}?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        rows = connection.execute(f"SELECT {', '.join(FIELDS.names)} FROM field").fetchall()
    return pyarrow.Table.from_pylist([dict(row) for row in rows], schema=FIELDS)


def completeness(schedule: DataFrame, fields: DataFrame) -> DataFrame:
    """Per cycle of the schedule, how many steps are expected and which are missing among the fields."""
    expected = schedule.withColumn("step", functions.explode("steps"))
    missing = (
        expected.join(fields, [*CYCLE, "step"], "left_anti")
        .groupBy(*CYCLE)
        .agg(functions.sort_array(functions.collect_list("step")).alias("missing"))
    )
    return schedule.join(missing, CYCLE, "left").select(
        *CYCLE,
        functions.size("steps").alias("expected"),
        functions.coalesce("missing", functions.array().cast("array<int>")).alias("missing"),
    )


if __name__ == "__main__":
    main()
