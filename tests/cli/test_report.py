from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from aviso_workers.cli import report
from aviso_workers.server import NatsServer
from tests.cli.conftest import Ran
from tests.commands import Command

Run = Callable[..., Ran]


@pytest.fixture
def stored(run: Run, config: Path) -> Path:
    for step in (1, 2):
        assert run("notify", "mars", "class=od", f"step={step}", "-c", config).code == 0
    return config


def test_streams_are_reported(run: Run, stored: Path) -> None:
    ran = run("report", "streams", "--seconds", "0.1", "-c", stored)
    assert ran.code == 0
    assert "MARS" in ran.out
    [document] = map(json.loads, run("report", "streams", "--seconds", "0.1", "--json", "-c", stored).lines)
    assert (document["stream"], document["messages"], document["rate"]) == ("MARS", 2, 0.0)


def test_a_server_whose_disk_is_asked_for_and_does_not_answer_is_trouble(
    run: Run, stored: Path, free_port: int
) -> None:
    ran = run("report", "streams", "--seconds", "0.1", "--monitor", f"http://127.0.0.1:{free_port}", "-c", stored)
    assert ran.code == 1
    assert f"no answer of a nats-server from http://127.0.0.1:{free_port}" in ran.out


def test_the_disks_of_servers_are_reported(run: Run, stored: Path, tmp_path: Path) -> None:
    with NatsServer.start(store_dir=tmp_path / "js", config="http: 127.0.0.1:-1\n") as server:
        line = next(line for line in server.log.splitlines() if "Starting http monitor" in line)
        ran = run(
            "report", "streams", "--seconds", "0.1", "--monitor", f"http://{line.split()[-1]}", "--json", "-c", stored
        )
    assert ran.code == 0
    document = json.loads(ran.lines[-1])
    assert (document["server"], document["trouble"]) == (server.name, "")
    assert document["free"] > 0


def test_a_server_that_is_another_one_is_left_out_unless_it_is_named(
    run: Run, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with NatsServer.start(store_dir=tmp_path / "js", config="http: 127.0.0.1:-1\n") as server:
        line = next(line for line in server.log.splitlines() if "Starting http monitor" in line)
        port = line.rpartition(":")[2]
        monkeypatch.setenv("AVISO_WORKERS_SERVER__MONITORING__PORT", port)
        ran = run("report", "streams", "--seconds", "0.1", "--json", "-c", stored)
    assert (ran.code, [json.loads(line)["stream"] for line in ran.lines]) == (0, ["MARS"])


def test_without_consumers_nothing_is_stuck(run: Run, stored: Path) -> None:
    for what in ("consumers", "agents"):
        ran = run(what, "ls", "--seconds", "0.1", "-c", stored)
        assert (ran.code, ran.out) == (0, f"no {what}\n")


def test_mirrors_are_reported(run: Run, stored: Path) -> None:
    assert run("report", "mirrors", "-c", stored).out == "no stream follows another one\n"


def test_top_goes_on_until_it_is_ended(start: Callable[..., Command], run: Run, stored: Path) -> None:
    top = start("top", "--seconds", "0.1", "-c", stored)
    assert any("MARS" in line for line in top.lines(12))


@pytest.mark.parametrize(
    ("values", "bars"),
    [([0, 0], "▁▁"), ([1, 2, 4, 8], "▂▃▅█"), ([5], "█")],
)
def test_the_highest_value_has_the_highest_bar(values: list[float], bars: str) -> None:
    assert report._sparkline(values) == bars
