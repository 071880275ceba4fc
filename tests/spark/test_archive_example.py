"""The archive of docs/examples/spark-archive, as Parquet; tests/interop has the one of Delta Lake."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from aviso_workers import App, Notify, config
from aviso_workers.server import NatsServer
from aviso_workers.spark import archives

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "spark-archive"

pytestmark = pytest.mark.anyio


@pytest.fixture
def example() -> Any:
    spec = importlib.util.spec_from_file_location("spark_archive", EXAMPLE / "spark_archive.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
async def test_each_run_archives_what_came_since_the_last_one(
    spark: SparkSession, nats_server: NatsServer, example: Any, tmp_path: Path
) -> None:
    file, archive = tmp_path / "aviso.yaml", str(tmp_path / "archive")
    file.write_text((EXAMPLE / "aviso.yaml").read_text().replace("nats://127.0.0.1:4222", nats_server.url))

    async def publish(*steps: int) -> None:
        async with App("outside", config=config.load(file)) as app:
            await app.notify_many(
                Notify("field", {"class": "od", "step": step}, {"location": f"/{step}", "size": 3}) for step in steps
            )

    def archived() -> list[tuple[int, str]]:
        archives.archive(example.notifications(spark, str(file)), archive).awaitTermination()
        kept: DataFrame = archives.read(spark, archive)
        return sorted(
            (row["step"], row["location"]) for row in kept.select("identifier.step", "payload.location").collect()
        )

    await publish(0, 6)
    assert archived() == [(0, "/0"), (6, "/6")]
    await publish(12)
    assert archived() == [(0, "/0"), (6, "/6"), (12, "/12")]
