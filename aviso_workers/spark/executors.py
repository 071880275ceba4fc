"""The check, before any query, that the executors have the packages that the data source needs.

Without this, what is missing shows as tasks that fail again and again, or as a worker that "exited unexpectedly".
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pyspark.sql import SparkSession

from aviso_workers.errors import ExecutorError

NEEDED = ("aviso_workers", "pyarrow")
MISMATCH = "PYTHON_VERSION_MISMATCH"


def check(spark: SparkSession) -> None:
    """Check by a small job that the executors have the packages that are needed. Raises `ExecutorError` with the
    cure.
    """
    if not hasattr(spark, "_jsparkSession"):
        return  # Spark Connect: there is no way to ask but by a query
    context = spark.sparkContext
    count = max(1, context.defaultParallelism)
    try:
        found = context.parallelize(range(count), count).mapPartitions(_probe(NEEDED)).collect()
    except Exception as error:  # PySpark's, or py4j's, which says what happened to the worker
        raise _failed(str(error)) from None
    for missing, host, python in found:
        if missing:
            raise ExecutorError(
                f"the executor on {host} has no package {missing} in {python}: install aviso-workers[spark] there, "
                "ship an environment with spark.archives, or set PYSPARK_PYTHON to a Python that has it"
            )


def _probe(needed: tuple[str, ...]) -> Callable[[Iterable[Any]], Iterator[tuple[str, str, str]]]:
    """Return a function that Spark pickles by value, because it finds out whether this package is installed there."""

    def probe(rows: Iterable[Any]) -> Iterator[tuple[str, str, str]]:
        import importlib
        import socket
        import sys

        missing = ""
        for name in needed:
            try:
                importlib.import_module(name)
            except ImportError as error:
                missing = missing or (error.name or name)
        yield missing, socket.gethostname(), sys.executable

    return probe


def _failed(said: str) -> ExecutorError:
    ours = "{}.{}".format(*sys.version_info)
    if MISMATCH in said:
        return ExecutorError(
            f"the executors run another Python than the driver, which has {ours}: set PYSPARK_PYTHON, or "
            f"spark.pyspark.python, to a Python {ours} that they have"
        )
    line = next((line for line in said.splitlines() if "Error" in line or "Exception" in line), said[:300])
    return ExecutorError(f"the executors cannot run Python: {line.strip()}; set PYSPARK_PYTHON to the one to use")
