"""Arguments that are empty, as where a shell variable is not set: nothing is done, least of all to everything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Ran

Run = Callable[..., Ran]


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (("streams", "purge", "MARS", "--subject", "", "--yes"), "--subject"),
        (("streams", "purge", "MARS", "--subject=", "--yes"), "--subject"),
        (("dead-letters", "drop", "--agent", "", "--yes"), "--agent"),
        (("agents", "pause", "field/index", "--for", ""), "--for"),
        (("dead-letters", "drop", "--error", "", "--yes"), "--error"),
        (("backup", "create", "mars", "--to", ""), "--to"),
        (("streams", "rm", "", "--yes"), "the argument after 'rm'"),
        (("",), "an argument"),
    ],
)
def test_an_empty_argument_is_refused(run: Run, unreachable: Path, command: tuple[str, ...], named: str) -> None:
    ran = run(*command, "--config", unreachable)
    complaint = f"{named} is empty: give it a value, or leave it out; is a shell variable not set?"
    assert ran == Ran(code=2, out="", err=f"aviso-workers: {complaint}\n")


def test_a_purge_before_no_sequence_is_refused(run: Run, unreachable: Path) -> None:
    ran = run("streams", "purge", "MARS", "--before", "0", "--yes", "--config", unreachable)
    assert (ran.code, ran.out) == (2, "")
    assert "0 is not in the range x>=1" in ran.err
