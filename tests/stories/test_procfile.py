"""The Procfile, under the runner that comes with the development tools."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from _demo.children import is_ready, wait_until
from aviso_workers.server.processes import free_ports
from tests.waits import PATIENCE_SECONDS

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory with what the Procfile names, where the processes may leave what they like."""
    for name in ("Procfile", "config", "scripts"):
        (tmp_path / name).symlink_to(PROJECT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def test_procfile_brings_everything_up_and_ctrl_c_stops_it_within_five_seconds(home: Path) -> None:
    nats, index, spark_events = free_ports(3)
    variables = {"NATS_PORT": str(nats), "INDEX_STATUS_PORT": str(index), "SPARK_EVENTS_STATUS_PORT": str(spark_events)}
    log_file = home / "log"
    with log_file.open("wb") as log:
        honcho = subprocess.Popen(
            [".venv/bin/honcho", "start"],
            cwd=home,
            env=os.environ | variables,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(
            lambda: all(is_ready(f"http://127.0.0.1:{port}/readyz") for port in (index, spark_events)),
            lambda: f"not everything is up\n{log_file.read_text()}",
            within_seconds=PATIENCE_SECONDS,
        )
        honcho.send_signal(signal.SIGINT)
        honcho.wait(PATIENCE_SECONDS)
    finally:
        honcho.terminate()
        honcho.wait(PATIENCE_SECONDS)

    log_text = log_file.read_text()
    assert log_text.count("stopped (rc=0)") == 3, log_text
