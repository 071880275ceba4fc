"""What others have written is shown, and does nothing to the terminal."""

from __future__ import annotations

import json

import pytest

from aviso_workers import cli
from aviso_workers.cli import output
from aviso_workers.errors import RefusedError

STEERS = "od\x1b[2J\x9b31m\r\u202egnp\x00"
SHOWN = r"od\x1b[2J\x9b31m\r\u202egnp\x00"


def test_an_error_line(capsys: pytest.CaptureFixture[str]) -> None:
    cli._complain(RefusedError(f"publish mars.{STEERS}:\nno"))
    assert capsys.readouterr().err == f"aviso-workers: publish mars.{SHOWN}:\nno\n"


def test_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    output.echo(f"not reached: {STEERS}", err=True)
    assert capsys.readouterr().err == f"not reached: {SHOWN}\n"


def test_json(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    document = {"identifier": {"class": STEERS, "größe": '1 "a\\b" €'}}
    output.print_json(document)
    written = capfdbinary.readouterr().out.decode()
    assert json.loads(written) == document
    assert written.rstrip("\n").isprintable()
    assert "größe" in written
