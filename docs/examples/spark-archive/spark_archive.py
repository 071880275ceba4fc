"""Archives what came since the last run: as Parquet by day, or into a table of Delta Lake."""

import argparse

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery

from aviso_workers.spark import archives, register


def notifications(spark: SparkSession, config: str) -> DataFrame:
    """The notifications of the event type `field`, from the first that the stream holds."""
    register(spark)
    options = {"config": config, "event": "field", "payloadSchema": "location STRING, size BIGINT"}
    return spark.readStream.format("aviso").options(startingOffsets="earliest", **options).load()


def into_delta(stream: DataFrame, to: str) -> StreamingQuery:
    """Append to the table in the directory `to`. Delta stores each micro-batch of a checkpoint once."""
    dated = stream.withColumn("date", F.to_date("time"))
    writer = dated.writeStream.format("delta").partitionBy("date").option("checkpointLocation", f"{to}/_checkpoint")
    return writer.trigger(availableNow=True).start(to)


def main() -> None:
    parser = argparse.ArgumentParser(description="Archive the fields that came since the last run.")
    parser.add_argument("to", help="directory of the archive or of the table")
    parser.add_argument("--format", choices=("parquet", "delta"), default="parquet")
    parser.add_argument("--config", default="aviso.yaml", help="default: aviso.yaml")
    wanted = parser.parse_args()
    spark = SparkSession.builder.appName("archive").getOrCreate()
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    stream = notifications(spark, wanted.config)
    query = archives.archive(stream, wanted.to) if wanted.format == "parquet" else into_delta(stream, wanted.to)
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
