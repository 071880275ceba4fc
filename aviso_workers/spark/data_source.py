"""The Spark data source `aviso`: makes the readers and writers for `read`, `readStream`, `write` and `writeStream`.

Spark calls this on the driver, each time in a process of its own. What is found out here goes to the tasks with the
readers and writers; the connection does not, because it holds credentials: every process takes it from the
configuration that it finds itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from aviso_workers.errors import ExecutorError, InvalidOptionError
from aviso_workers.spark import options, readers, rows, writers
from aviso_workers.spark.connections import load_config
from aviso_workers.spark.schema import ddl

NEEDED = ("aviso_workers", "pyarrow")
MISMATCH = "PYTHON_VERSION_MISMATCH"


class AvisoDataSource(DataSource):
    """The data source `aviso`: notifications as rows."""

    @classmethod
    def name(cls) -> str:
        return "aviso"

    def schema(self) -> str:
        wanted = self._plan(None)
        return ddl(wanted.reading, wanted.layout)

    def reader(self, schema: StructType) -> readers.BatchReader:
        return readers.BatchReader(self._plan(False), schema)

    def streamReader(self, schema: StructType) -> readers.StreamReader:  # noqa: N802
        return readers.StreamReader(self._plan(True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> writers.BatchWriter:
        if overwrite:
            raise InvalidOptionError('a stream cannot be overwritten: write with mode("append")')
        return writers.BatchWriter(self._writing(schema, streaming=False))

    def streamWriter(self, schema: StructType, overwrite: bool) -> writers.StreamWriter:  # noqa: N802
        if overwrite:
            raise InvalidOptionError('a stream cannot be overwritten: write with outputMode("append")')
        return writers.StreamWriter(self._writing(schema, streaming=True))

    def _plan(self, streaming: bool | None) -> Any:
        wanted = options.parse_read_options(self.options, streaming=streaming)
        return readers.plan(wanted, load_config(wanted.config))

    def _writing(self, schema: StructType, *, streaming: bool) -> options.WriteOptions:
        wanted = options.parse_write_options(self.options, streaming=streaming)
        rows.check_columns(schema, wanted, load_config(wanted.config).event_type(wanted.event))
        return wanted


def register(spark: SparkSession) -> None:
    """Make the format `aviso` known to a session. Raises `ExecutorError` where its executors cannot run it."""
    require_packages(spark)
    spark.dataSource.register(AvisoDataSource)


def require_packages(spark: SparkSession) -> None:
    """Check by a small job, before any query, that the executors have the packages that the data source needs. Raises
    `ExecutorError` with the cure.

    Without this, what is missing shows as tasks that fail again and again, or as a worker that "exited unexpectedly".
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
