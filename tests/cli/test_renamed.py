"""Commands are taken by the names that they had before, which is said on stderr."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from aviso_workers import cli
from tests.cli.conftest import Ran


@pytest.mark.parametrize(("before", "now"), cli.RENAMED.items(), ids=" ".join)
def test_a_former_name_leads_to_a_command(
    before: tuple[str, ...], now: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli._renamed([*before, "argument"]) == [*now, "argument"]
    said = capsys.readouterr().err
    assert said == f"aviso-workers {' '.join(before)} is now called: aviso-workers {' '.join(now)}\n"
    group, command = now
    assert command in typer.main.get_command(cli.command).commands[group].commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("first", ["mine.agents:app", "mine.agents", "--agent", "-c"])
def test_agents_was_a_command(first: str) -> None:
    assert cli._renamed(["agents", first]) == ["agents", "show", first]


@pytest.mark.parametrize("first", ["ls", "show", "--help", "-h"])
def test_agents_is_a_group(first: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._renamed(["agents", first]) == ["agents", first]
    assert capsys.readouterr().err == ""


def test_what_is_printed_is_that_of_the_command(run: Callable[..., Ran], config: Path) -> None:
    ran = run("report", "consumers", "--seconds", "0.1", "-c", config)
    assert ran == Ran(
        code=0,
        out="no consumers\n",
        err="aviso-workers report consumers is now called: aviso-workers consumers ls\n",
    )
