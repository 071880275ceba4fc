"""What the start of a command takes: the commands that are not given are not imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aviso_workers import cli
from aviso_workers.cli import COMMANDS, SUMMARIES
from tests.cli.conftest import Ran

IMPORTED_BY = """
import atexit, sys
from aviso_workers import cli
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
cli.main()
"""


def imported_by(*arguments: str) -> set[str]:
    """The modules that a process has imported when it ends."""
    ended = subprocess.run([sys.executable, "-c", IMPORTED_BY, *arguments], capture_output=True, text=True, check=True)
    return set(ended.stderr.split())


@pytest.mark.slow
def test_a_command_does_not_import_the_others() -> None:
    prefix = "aviso_workers.cli."
    imported = {name.removeprefix(prefix) for name in imported_by("worker", "--help") if name.startswith(prefix)}
    assert imported == {"options", "targets", "worker"}


@pytest.mark.parametrize("arguments", [("--help",), ("--version",)])
def test_the_help_imports_no_more_than_it_needs(arguments: tuple[str, ...]) -> None:
    imported = imported_by(*arguments)
    dear = {
        "asyncio",
        "anyio",
        "msgspec",
        "nats",
        "prometheus_client",
        "rich",
        "structlog",
        "yaml",
        "aviso_workers.app",
    }
    assert imported & dear == set()
    assert len(imported) < 300, "beside Python's own"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_has_the_first_sentence_of_each_command(name: str) -> None:
    assert SUMMARIES[name] == cli._summary(cli._load(name))


def test_every_module_that_declares_commands_is_in_the_table() -> None:
    declaring = {path.stem for path in Path(cli.__file__).parent.glob("*.py") if "def " in path.read_text()}
    without_commands = {"__init__", "arguments", "completion", "options", "output", "progress", "signals", "targets"}
    assert set(COMMANDS.values()) == declaring - without_commands


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_is_there(name: str, run: Callable[..., Ran]) -> None:
    ran = run(name, "--help")
    assert (ran.code, ran.lines[0].startswith(f"Usage: aviso-workers {name} ")) == (0, True), ran
