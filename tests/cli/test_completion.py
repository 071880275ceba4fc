"""Completion in shells: what a shell gets when it asks, as bash does, for the words that fit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aviso_workers import App
from tests.cli.conftest import Ran
from tests.conftest import WriteConfig
from tests.waits import PATIENCE_SECONDS

Complete = Callable[..., list[str]]


@pytest.fixture
def complete(tmp_path: Path) -> Complete:
    def complete(*words: str | Path) -> list[str]:
        """Return what fits in the place of the last of these words."""
        line = " ".join(map(str, ("aviso-workers", *words)))
        asked = {"_AVISO_WORKERS_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
        command = (sys.executable, "-c", "from aviso_workers.cli import main; main()")
        ran = subprocess.run(
            command, env=os.environ | asked, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )
        assert ran.stderr == ""
        return ran.stdout.split()

    return complete


def test_commands(complete: Complete) -> None:
    assert complete("streams", "in") == ["info"]


def test_event_types_of_the_configuration(complete: Complete, config: Path) -> None:
    for command in (("watch",), ("replay",), ("notify",), ("erase",), ("streams", "show"), ("spark", "archive")):
        assert complete(*command, "--config", config, "ma") == ["mars"], command
    assert complete("watch", "--config", config, "x") == []


def test_streams_and_consumers_of_the_server(
    complete: Complete, config: Path, run: Callable[..., Ran], declared_consumer: str
) -> None:
    assert complete("streams", "info", "--config", config, "MA") == ["MARS"]
    assert complete("consumers", "show", "--config", config, "MARS", declared_consumer[:2]) == [declared_consumer]


def test_agents_and_apps_of_the_server(complete: Complete, config: Path, agent: tuple[str, str]) -> None:
    app, name = agent
    assert complete("agents", "pause", "--config", config, name[:3]) == [name]
    assert complete("agents", "pause", "--config", config, "--app", "other", name[:3]) == []
    assert complete("agents", "rm", "--config", config, app[:2]) == [app]
    assert complete("dead-letters", "ls", "--config", config, "--agent", name[:3]) == [name]


def test_nothing_where_no_server_is(complete: Complete, write_config: WriteConfig, free_port: int) -> None:
    config = write_config(f"nats://127.0.0.1:{free_port}")
    assert complete("streams", "info", "--config", config, "MA") == []
    assert complete("watch", "--config", "/none/such.yaml", "ma") == []
