"""The session of a pipeline that runs as a command, and what Spark says where it fails, in a sentence.

`spark-submit` has settings of its own; a plain command runs on this machine unless Spark's configuration says else.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from aviso_workers.errors import PipelineError
from aviso_workers.spark import register

__all__ = ["session"]

SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""Set by spark-submit."""
OURS = re.compile(r"aviso_workers\.errors\.\w+: (.+)")


@contextmanager
def session(name: str) -> Iterator[SparkSession]:
    """A session in UTC that knows the format `aviso`, stopped at the end. Raises `PipelineError` where Spark fails."""
    if SUBMITTED not in os.environ:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else Spark takes any python3 of PATH
    spark = SparkSession.builder.appName(name).config("spark.sql.session.timeZone", "UTC").getOrCreate()
    try:
        register(spark)
        yield spark
    except PySparkException as error:
        raise PipelineError(_sentence(str(error))) from error
    finally:
        spark.stop()


def _sentence(said: str) -> str:
    """What we said ourselves in some process of Spark's, else Spark's first line."""
    ours = OURS.findall(said)
    return str(ours[-1]) if ours else said.strip().split("\n")[0]
