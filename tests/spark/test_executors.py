"""What executors lack is said at once, with the cure."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from aviso_workers.errors import ExecutorError
from aviso_workers.spark import data_source, register


@pytest.mark.slow
def test_a_python_without_the_packages_is_found_before_any_query(
    start_spark: Callable[..., SparkSession], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    python = tmp_path / "bare" / "bin" / "python"
    monkeypatch.setenv("PYSPARK_PYTHON", str(python))
    spark = start_spark(tmp_path / "logs", {"spark.python.daemon.module": "pyspark.daemon"})
    try:
        with pytest.raises(ExecutorError, match=f"has no package .* in {python}: install") as refused:
            register(spark)
    finally:
        spark.stop()
    assert "PYSPARK_PYTHON" in str(refused.value)


@pytest.mark.parametrize(
    ("said", "cure"),
    [
        ("pyspark.errors: [PYTHON_VERSION_MISMATCH] Python in worker has 3.9", "the executors run another Python"),
        ('java.io.IOException: Cannot run program "python4": error=2', "the executors cannot run Python.*python4"),
    ],
)
def test_a_python_that_does_not_run_is_named(said: str, cure: str) -> None:
    with pytest.raises(ExecutorError, match=cure):
        raise data_source._failed(f"Job aborted\n{said}\n")


@pytest.mark.slow
def test_importing_the_wing_loads_neither_metrics_nor_the_status_port_nor_pyspark() -> None:
    modules = "aviso_workers.spark, aviso_workers.spark.event_log"
    forbidden = ("prometheus_client", "aviso_workers.telemetry.status", "aviso_workers.telemetry.metrics", "typer")
    script = f"import sys, {modules}; print([name for name in {(*forbidden, 'pyspark')} if name in sys.modules])"
    in_a_task = (
        "import sys, aviso_workers.spark.readers, aviso_workers.spark.writers, aviso_workers.backends.jetstream; "
        f"print([name for name in {forbidden} if name in sys.modules])"
    )

    for each in (script, in_a_task):
        done = subprocess.run([sys.executable, "-c", each], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"
