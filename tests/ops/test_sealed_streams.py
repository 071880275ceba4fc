"""A stream that somebody sealed, although the configuration has publishers for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aviso_workers.jetstream import plans
from tests.ops.conftest import Api, Declare, Run

NOT_OPEN = "a sealed stream takes no publish any more, and cannot be opened: copy it (`aviso-workers streams copy"


@pytest.fixture
def config(run: Run, declare: Declare) -> Path:
    """An event type whose stream is sealed, with one notification."""
    path = declare({}, retention_time="30d")
    assert run("notify", "mars", "class=od", "step=1", "-c", path).code == 0
    assert run("streams", "seal", "MARS", "--yes", "-c", path).code == 0
    return path


def sealed(run: Run, config: Path) -> list[dict[str, Any]]:
    """Return what the doctor finds of the stream's settings."""
    ran = run("doctor", "--seconds", "0.1", "--format", "json", "-c", config)
    (check,) = (each for each in json.loads(ran.out)["checks"] if each["code"] == "JS013")
    return [each for each in check["findings"] if "sealed" in each["found"]]


def test_each_command_that_shows_streams_says_so(run: Run, config: Path) -> None:
    for step in ("plan", "apply"):
        ran = run("streams", step, "-c", config)
        assert NOT_OPEN in " ".join(ran.out.split()), ran
        assert "done" not in ran.out
    assert ran.code == 1, "a server ignores max_age and discard of a sealed stream, so apply does nothing"
    assert run("streams", "show", "mars", "-c", config).code == 1
    for command in (("streams", "ls"), ("report", "streams", "--seconds", "0.1")):
        ran = run(*command, "-c", config)
        assert "sealed: it takes no publish any more" in " ".join(ran.out.split()), ran
    assert ran.code == 1


def test_the_doctor_fails_and_its_cure_works(run: Run, config: Path, api: Api) -> None:
    (finding,) = sealed(run, config)
    assert (finding["state"], finding["stream"]) == ("FAIL", "MARS")
    assert "`aviso-workers streams copy STREAM --to-config FILE --as NAME`" in finding["cure"]
    assert run("streams", "copy", "MARS", "--to-config", config, "--as", "MARS_BEFORE", "-c", config).code == 0
    assert run("streams", "rm", "MARS", "--yes", "-c", config).code == 0
    assert run("streams", "apply", "-c", config).code == 0
    assert sealed(run, config) == []
    assert run("notify", "mars", "class=od", "step=2", "-c", config).code == 0
    assert api("STREAM.INFO.MARS_BEFORE")["state"]["messages"] == 1


def test_one_that_is_to_be_sealed_is_as_configured(run: Run, config: Path, declare: Declare) -> None:
    path = declare({"MARS": {"sealed": True, "description": "closed"}}, retention_time="30d")
    assert sealed(run, path) == []
    ran = run("streams", "apply", "-c", path)
    assert (ran.code, ran.lines[-1]) == (0, "MARS: done"), ran
    assert run("streams", "plan", "--exit-code", "-c", path).code == 0


def test_a_change_that_the_server_does_not_keep_is_told(
    run: Run, config: Path, declare: Declare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: we do not know that the server ignores the max_age of a sealed stream."""
    monkeypatch.setattr(plans, "SEALING", frozenset[str]())
    path = declare({"MARS": {"sealed": True}}, retention_time="30d")
    ran = run("streams", "apply", "-c", path)
    assert (ran.code, "MARS: not as configured: " in ran.out, "max_age" in ran.lines[-1]) == (1, True, True), ran
