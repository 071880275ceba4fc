"""The program of docs/examples/spark-archive with a table of Delta Lake, with the Spark that its jars are for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

from aviso_workers import App, Notify, config
from aviso_workers.server import NatsServer
from tests.interop import programs
from tests.waits import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "spark-archive"

pytestmark = pytest.mark.anyio


def archive(file: Path, table: Path, directory: Path) -> None:
    pyspark, jars = programs.delta_spark()
    settings = {
        "spark.master": "local[2]",
        "spark.ui.enabled": "false",
        "spark.jars": ",".join(map(str, jars)),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    }
    (directory / "spark-defaults.conf").write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    environment = {
        "PYTHONPATH": os.pathsep.join([str(pyspark), str(ROOT)]),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_CONF_DIR": str(directory),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, EXAMPLE / "spark_archive.py", table, "--format", "delta", "--config", file],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3 * PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout


def stored(table: Path) -> list[tuple[int, str, str]]:
    """Read the table as its log says: what was added, as nothing is ever removed."""
    commits = sorted((table / "_delta_log").glob("*.json"))
    actions = [json.loads(line) for commit in commits for line in commit.read_text().splitlines()]
    files = [action["add"]["path"] for action in actions if "add" in action]
    rows = [row for file in files for row in pyarrow.parquet.ParquetFile(table / file).read().to_pylist()]
    return sorted((row["sequence"], row["identifier"]["class"], row["payload"]["location"]) for row in rows)


async def test_each_run_appends_what_came_since_the_last_one(nats_server: NatsServer, tmp_path: Path) -> None:
    file, table = tmp_path / "aviso.yaml", tmp_path / "table"
    file.write_text((EXAMPLE / "aviso.yaml").read_text().replace("nats://127.0.0.1:4222", nats_server.url))

    async def publish(*steps: int) -> None:
        async with App("outside", config=config.load(file)) as app:
            await app.notify_many(
                Notify("field", {"class": "od", "step": step}, {"location": f"/{step}", "size": 3}) for step in steps
            )

    await publish(0, 6)
    archive(file, table, tmp_path)
    assert stored(table) == [(1, "od", "/0"), (2, "od", "/6")]

    await publish(12)
    archive(file, table, tmp_path)
    assert stored(table) == [(1, "od", "/0"), (2, "od", "/6"), (3, "od", "/12")]
