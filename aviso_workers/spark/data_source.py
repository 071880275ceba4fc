"""The Spark data source `aviso`: makes the readers and writers for `read`, `readStream`, `write` and `writeStream`.

Spark calls this on the driver, each time in a process of its own. What is found out here goes to the tasks with the
readers and writers; the connection does not, because it holds credentials: every process takes it from the
configuration that it finds itself.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from aviso_workers.errors import InvalidOptionError
from aviso_workers.spark import executors, options, readers, rows, writers
from aviso_workers.spark.connections import load_config
from aviso_workers.spark.schema import ddl


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
    executors.check(spark)
    spark.dataSource.register(AvisoDataSource)
