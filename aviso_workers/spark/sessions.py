"""The Spark session of a pipeline that runs as a command, and Spark's failures as one sentence.

`spark-submit` has settings of its own; a plain command runs on this machine unless Spark's configuration says else.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from aviso_workers.errors import PipelineError
from aviso_workers.spark import register

SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""Set by spark-submit."""
SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"
OURS = re.compile(r"aviso_workers\.errors\.\w+: (.+)")
UNREADABLE = re.compile(
    r"\[FAILED_READ_FILE\.(?:NO_HINT|CANNOT_READ_FILE_FOOTER|FILE_NOT_EXIST)\] [\w ]+? file (.+?\.\w+)\.\s"
)
CALLED = re.compile(r"An error occurred while calling .*\n: ")
"""What stands before a message of the JVM."""


@contextmanager
def session(name: str) -> Iterator[SparkSession]:
    """Open a session in UTC that knows the format `aviso`, and stop it at the end. Raises `PipelineError` where Spark
    fails.
    """
    if SUBMITTED not in os.environ:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else Spark takes any python3 of PATH
    builder = SparkSession.builder.appName(name).config("spark.sql.session.timeZone", "UTC")
    if sys.stderr.isatty():
        builder = builder.config("spark.ui.showConsoleProgress", "true")
    spark = builder.getOrCreate()
    _fit(spark)
    try:
        with translated():
            register(spark)
            yield spark
    finally:
        spark.stop()


def _fit(spark: SparkSession) -> None:
    """Let a shuffle have a partition for each core on this machine, unless Spark's configuration says how many: Spark's
    200 take longer than the work.
    """
    context = spark.sparkContext
    if (context.master or "").startswith("local") and not context.getConf().contains(SHUFFLE_PARTITIONS):
        spark.conf.set(SHUFFLE_PARTITIONS, context.defaultParallelism)


@contextmanager
def translated() -> Iterator[None]:
    """Raise a failure of Spark, or of a file system that it uses, as `PipelineError` of one sentence."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        raise PipelineError(_sentence(str(error))) from error


def _sentence(said: str) -> str:
    """Return the sentence of an error of ours that Spark passed on, else which file Spark cannot read, else Spark's
    first line.
    """
    if ours := OURS.findall(said):
        return str(ours[-1])
    if unreadable := UNREADABLE.search(said):
        return (
            f"cannot read {unreadable[1]}: it is damaged or missing. Put a good copy of it back, from a backup of the "
            "archive; what the stream still holds can be archived to a new directory"
        )
    said = said.strip()
    if called := CALLED.match(said):
        said = said[called.end() :]
    return said.split("\n")[0]
