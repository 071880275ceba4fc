"""Completion in shells: what a shell gets when it asks, as bash does, for the words that fit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Start, WriteConfig
from tests.waits import PATIENCE_SECONDS

AGENT = """
from aviso_workers import App, Notification

app = App("field")


@app.agent("mars")
async def index(notification: Notification) -> None: ...
"""
MAIN = "from aviso_workers.cli import main; main()"
Complete = Callable[..., list[str]]


@pytest.fixture
def complete(tmp_path: Path) -> Complete:
    def complete(*words: str | Path) -> list[str]:
        """Return what fits in the place of the last of these words."""
        line = " ".join(map(str, ("aviso-workers", *words)))
        asked = {"_AVISO_WORKERS_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
        command = (sys.executable, "-c", MAIN)
        ran = subprocess.run(
            command, env=os.environ | asked, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )
        assert ran.stderr == ""
        return ran.stdout.split()

    return complete


def test_commands(complete: Complete) -> None:
    assert complete("streams", "in") == ["info"]


@pytest.mark.slow
def test_event_types_of_the_configuration(complete: Complete, config: Path) -> None:
    for command in (("watch",), ("replay",), ("notify",), ("erase",), ("streams", "show"), ("spark", "archive")):
        assert complete(*command, "--config", config, "ma") == ["mars"], command
    assert complete("watch", "--config", config, "x") == []


@pytest.mark.slow
def test_what_a_server_has(complete: Complete, config: Path, start: Start, tmp_path: Path) -> None:
    (tmp_path / "completed.py").write_text(AGENT)
    worker = start("worker", "completed:app", "--config", config)
    worker.until("agent.started")
    assert complete("streams", "info", "--config", config, "MA") == ["MARS"]
    assert complete("consumers", "show", "--config", config, "MARS", "f") == ["field__index"]
    assert complete("agents", "pause", "--config", config, "f") == ["field/index"]
    assert complete("agents", "pause", "--config", config, "other/") == []
    assert complete("agents", "rm", "--config", config, "f") == ["field"]
    assert complete("agents", "ls", "--config", config, "field/") == ["field/index"]
    assert complete("dead-letters", "ls", "--config", config, "--agent", "in") == ["index"]


@pytest.mark.slow
def test_nothing_where_no_server_is(complete: Complete, write_config: WriteConfig, free_port: int) -> None:
    config = write_config(f"nats://127.0.0.1:{free_port}")
    assert complete("streams", "info", "--config", config, "MA") == []
    assert complete("watch", "--config", "/none/such.yaml", "ma") == []
