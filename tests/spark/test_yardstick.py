"""What `scripts/bench spark` compares the data source to moves the same notifications."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql import functions as F  # noqa: N812

from _bench import raw_source
from tests.spark.place import Place, steps

COUNT = 21_000
"""More than a request of it asks for, in one task."""


@pytest.fixture(autouse=True)
def _shipped() -> Iterator[None]:
    """Spark's workers have no benchmarks."""
    cloudpickle.register_pickle_by_value(raw_source)  # type: ignore[no-untyped-call]
    yield
    cloudpickle.unregister_pickle_by_value(raw_source)  # type: ignore[no-untyped-call]


@pytest.mark.slow
def test_it_reads_and_writes_what_the_data_source_does(place: Place) -> None:
    place.write(place.rows(COUNT))
    place.publish(0, event="copy")
    spark = place.read().sparkSession
    spark.dataSource.register(raw_source.RawSource)
    raw: dict[str, Any] = {"url": place.server.url, "stream": "MARS", "tasks": 1}

    found = spark.read.format("raw").options(**raw).load()
    assert found.exceptAll(place.read().select(*found.columns)).count() == 0
    assert found.count() == COUNT

    renamed = found.select(F.regexp_replace("topic", "^mars", "copy").alias("topic"), F.lit("{}").alias("payload"))
    renamed.write.format("raw").mode("append").options(url=place.server.url, stream="COPY").save()
    assert steps(place.read("copy")) == [0, *range(COUNT)]
