from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from aviso_workers.cli.targets import ConfigSource, OpenedServer, connected
from tests.cli.conftest import Ran

Run = Callable[..., Ran]


@pytest.fixture
def stored(run: Run, config: Path) -> Path:
    for step in (1, 2):
        assert run("notify", "mars", "class=od", f"step={step}", "--payload", '"here"', "-c", config).code == 0
    return config


def test_without_yes_nothing_is_erased(run: Run, stored: Path) -> None:
    ran = run("erase", "mars", "step=1", "-c", stored)
    assert (ran.code, ran.err) == (2, "nothing was done; say --yes to erase all of them\n")
    assert "notifications of mars" in ran.out
    assert "not searched: backups: `aviso-workers backup cleanse DIR --erasure RECORD` rewrites them." in ran.lines
    assert run("erase", "mars", "step=1", "--dry-run", "-c", stored).code == 0
    assert len(run("replay", "mars", "-c", stored).lines) == 2


def test_it_erases_and_leaves_a_record(run: Run, stored: Path, tmp_path: Path) -> None:
    ran = run("erase", "mars", "step=1", "--yes", "--audit", "erased.json", "-c", stored)
    assert (ran.code, ran.lines[-3]) == (0, "1 erased, 0 left; the record is erased.json")
    record = json.loads((tmp_path / "erased.json").read_text())
    until = datetime.fromisoformat(record["subjects_on_disk_until"])
    assert timedelta(minutes=2.5) < until - datetime.fromisoformat(record["ended"]) < timedelta(minutes=4)
    assert f"stay in the index files of the servers until {until:%Y-%m-%dT%H:%M}" in ran.lines[-2]
    assert "aviso-workers backup cleanse DIR --erasure erased.json" in ran.lines[-1]
    assert json.loads((tmp_path / "erased.json").read_bytes())["erased"] == {"MARS": 1}
    [left] = map(json.loads, run("replay", "mars", "-c", stored).lines)
    assert left["data"]["identifier"]["step"] == "2"


def test_what_matches_nothing_is_said(run: Run, stored: Path) -> None:
    assert run("erase", "mars", "step=9", "-c", stored).code == 0
    ran = run("erase", "mars", "step=9", "--yes", "--audit", "erased.json", "-c", stored)
    assert (ran.code, ran.lines[0]) == (0, "nothing matches")
    assert ran.lines[-1] == "0 erased, 0 left; the record is erased.json"


def test_what_matches_nothing_because_there_is_no_stream_is_not_proven(run: Run, config: Path) -> None:
    for last in ((), ("--yes", "--audit", "erased.json")):
        ran = run("erase", "mars", "step=1", "-c", config, *last)
        assert (ran.code, ran.lines[0]) == (1, "nothing matches"), ran
        assert "not reached: MARS: there is no such stream on this server, which may be the wrong one" in ran.out, ran
    assert "not proven: MARS: there is no such stream" in ran.out
    assert run("streams", "apply", "-c", config).code == 0
    assert run("erase", "mars", "step=1", "-c", config).code == 0


def test_fields_that_are_separated_by_commas_are_no_filter_that_matches_nothing(run: Run, stored: Path) -> None:
    ran = run("erase", "mars", "class=od,step=1", "-c", stored)
    assert (ran.code, "put spaces between them: class=od step=1" in ran.err) == (2, True)


def test_a_record_that_exists_is_not_overwritten(run: Run, stored: Path, tmp_path: Path) -> None:
    (tmp_path / "erased.json").write_text("of another erasure")
    ran = run("erase", "mars", "step=1", "--yes", "--audit", "erased.json", "-c", stored)
    assert (ran.code, "erased.json exists, and no record is overwritten" in ran.err) == (1, True)
    assert (tmp_path / "erased.json").read_text() == "of another erasure"


def test_keys_of_tables_that_may_hold_copies_are_named(run: Run, stored: Path) -> None:
    async def keep(server: OpenedServer) -> None:
        bucket = await server.admin.key_value("index__table__sums")
        await bucket.put("step=2F1", b"7")
        await bucket.put("total", b"8")

    connected(ConfigSource(stored), keep)
    ran = run("erase", "mars", "step=1", "--dry-run", "-c", stored)
    at = ran.lines.index("may hold copies: table index__table__sums, 2 keys, of which 1 have a value of what matches:")
    assert ran.lines[at + 1] == "  --key index__table__sums/step=2F1"


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ((), "say which notifications to erase: give KEY=VALUE or --id N; `streams wipe` removes all of them"),
        (("step=1", "--id", "1"), "give either KEY=VALUE or --id, not both"),
    ],
)
def test_either_a_filter_or_an_id_is_needed(
    run: Run, unreachable: Path, given: tuple[str, ...], complaint: str
) -> None:
    assert run("erase", "mars", *given, "--yes", "-c", unreachable) == Ran(2, "", f"aviso-workers: {complaint}\n")
