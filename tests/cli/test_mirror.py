from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Ran

Run = Callable[..., Ran]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("promote", "fence the origin of MARS, and let MARS take publishes in its place"),
        ("fence", "take its subjects from MARS"),
        ("unfence", "give MARS its subjects back"),
    ],
)
def test_what_changes_a_stream_needs_a_yes(run: Run, unreachable: Path, command: str, told: str) -> None:
    ran = run("mirror", command, "MARS", "-c", unreachable)
    assert (ran.code, ran.err) == (2, f"nothing was done; say --yes to {told}\n")


def test_a_stream_is_fenced_and_taken_back(run: Run, config: Path) -> None:
    notify = ("notify", "mars", "class=od", "step=1", "-c", config)
    assert run(*notify).code == 0
    assert run("mirror", "fence", "MARS", "--yes", "-c", config).out == "MARS is fenced; it took mars.>\n"
    ran = run(*notify)
    assert (ran.code, "MARS is fenced" in ran.err) == (1, True)
    assert "fenced" in run("streams", "plan", "-c", config).out
    assert run("mirror", "unfence", "MARS", "--yes", "-c", config).out == "MARS takes mars.> again\n"
    assert run(*notify).code == 0


def test_nothing_follows_where_there_is_no_mirror(run: Run, config: Path) -> None:
    ran = run("report", "mirrors", "-c", config)
    assert (ran.code, ran.out) == (0, "no stream follows another one\n")


def test_a_failover_is_rehearsed(run: Run, config: Path) -> None:
    ran = run("mirror", "drill", "--messages", "20", "-c", config)
    assert ran.code == 0, ran.err
    assert ran.lines[-1] == "the fenced origin took 0; 20 of 20 published are stored"
