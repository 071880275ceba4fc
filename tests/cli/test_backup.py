"""`aviso-workers backup create|ls|verify|restore|drill|cleanse|merge` on a real server."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import anyio
import pytest
from rich.filesize import decimal

from aviso_workers import App
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.ops import backups
from aviso_workers.ops.backups import schedules
from tests.cli.conftest import Ran
from tests.ops.backups.test_encryption import Key

Run = Callable[..., Ran]


@pytest.fixture
def filled(run: Run, config: Path) -> Path:
    """The configuration of a server with three notifications of `mars`."""
    for step in (1, 2, 3):
        assert run("notify", "mars", "class=od", f"step={step}", "--config", config).code == 0
    return config


def made(run: Run, config: Path) -> Path:
    assert run("backup", "create", "mars", "--to", "kept", "--config", config).code == 0
    return backups.find(Path("kept"))[-1].directory


def test_a_backup_is_made_listed_verified_and_restored(run: Run, filled: Path) -> None:
    created = run("backup", "create", "mars", "--to", "kept", "--config", filled)
    assert (created.code, created.err) == (0, ""), "no bars where there is no terminal"
    (found,) = backups.find(Path("kept"))
    assert created.out == f"MARS: 3 messages, {decimal(found.size)} in {found.directory.absolute()}\n"
    (row,) = map(json.loads, run("backup", "ls", "kept", "--json").lines)
    assert (row["stream"], row["messages"], row["nats-server"]) == ("MARS", 3, "2.15.0"), row
    verified = run("backup", "verify", "kept")
    assert (verified.code, "3 messages" in verified.out, "0 consumers" in verified.out) == (0, True, True), verified
    drilled = run("backup", "drill", found.directory, "--config", filled)
    assert (drilled.code, "3 messages and 0 consumers restored and compared" in drilled.out) == (0, True), drilled
    beside = run("backup", "restore", found.directory, "--as", "OLD", "--storage", "memory", "--config", filled)
    assert (beside.code, beside.out) == (0, "OLD: 3 messages, from 1 on\n"), beside
    again = run("backup", "restore", found.directory, "--config", filled)
    assert (again.code, "MARS exists, with 3 messages" in again.err) == (1, True), again


def test_one_backup_that_cannot_be_read_is_one_line_of_the_list(run: Run, filled: Path) -> None:
    made(run, filled)
    bad = made(run, filled) / "backup.json"
    bad.write_text('{"config": {"name": "MARS"}, "state": {}}')
    listed = run("backup", "ls", "kept")
    assert len([line for line in listed.lines if "MARS" in line]) == 1, listed
    assert (listed.code, len(listed.err.splitlines()), str(bad) in listed.err) == (1, 1, True), listed


def test_all_streams_are_backed_up_and_old_backups_removed(run: Run, filled: Path) -> None:
    run("backup", "create", "mars", "--to", "kept", "--config", filled)
    first = backups.find(Path("kept"))[0].directory
    ran = run("backup", "create", "--all", "--to", "kept", "--keep", "1", "--config", filled)
    assert (ran.code, f"MARS: removed {first}" in ran.out) == (0, True), ran
    assert [found.stream for found in backups.find(Path("kept"))] == ["MARS"]


def test_a_set_is_made_listed_verified_and_restored(run: Run, filled: Path) -> None:
    created = run("backup", "create", "--all", "--to", "kept", "--config", filled)
    (file,) = Path("kept").glob("set-*.json")
    assert (created.code, f"1 streams are a set, to be restored as one: {file}" in created.out) == (0, True), created
    assert f"set: {file}" in run("backup", "ls", "kept").out
    assert f"{file}: a set of 1 streams, all of which are there" in run("backup", "verify", "kept").out
    there = run("backup", "restore", "--all", "kept", "--config", filled)
    assert (there.code, "MARS exist, so nothing is restored" in there.err) == (1, True), there
    assert run("streams", "rm", "MARS", "--yes", "--config", filled).code == 0
    restored = run("backup", "restore", "--all", file, "--config", filled)
    (row,) = (line for line in restored.lines if "MARS" in line)
    assert (restored.code, row.split()[:2]) == (0, ["MARS", "3"]), restored
    file.rename(file.with_name(f".unfinished-{file.name}"))
    verified = run("backup", "verify", "kept")
    assert (verified.code, "this set was not finished, and is none" in verified.err) == (1, True), verified


def test_what_to_back_up_must_be_said(run: Run, config: Path) -> None:
    for names in ([], ["mars", "--all"]):
        ran = run("backup", "create", *names, "--to", "kept", "--config", config)
        assert (ran.code, "say what to back up" in ran.err) == (2, True), ran
    missing = run("backup", "create", "mars", "--to", "kept", "--config", config)
    assert (missing.code, "no stream MARS; there are: none" in missing.err) == (1, True), missing


def test_one_that_fails_does_not_keep_the_others_from_it(run: Run, filled: Path) -> None:
    async def create_another() -> None:
        async with App("tests", config=filled) as app:
            await app.session.backend.create_stream(StreamSpec(name="OTHER", subjects=("other",)))

    anyio.run(create_another)
    Path("kept").mkdir()
    Path("kept/MARS").touch()
    ran = run("backup", "create", "--all", "--to", "kept", "--config", filled)
    assert (ran.code, "cannot write" in ran.err, "OTHER: 0 messages" in ran.out) == (1, True, True), ran


def test_every_damaged_backup_is_named(run: Run, filled: Path) -> None:
    directory = made(run, filled)
    os.truncate(directory / "stream.arc.s2", 100)
    whole = made(run, filled)
    ran = run("backup", "verify", "kept")
    assert (ran.code, f"{directory} is damaged" in ran.err, f"{whole}: 3 messages" in ran.out) == (1, True, True), ran
    assert run("backup", "verify", "nowhere").code == 1


def lose_its_record(directory: Path) -> None:
    (directory / "backup.json").unlink()


def empty_its_record(directory: Path) -> None:
    (directory / "backup.json").write_bytes(b"")


def lose_all_files(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()


def lose_its_name_and_record(directory: Path) -> None:
    lose_its_record(directory)
    directory.rename(directory.with_name("before-the-update"))


def lose_its_name_and_files(directory: Path) -> None:
    lose_all_files(directory)
    directory.rename(directory.with_name("before-the-update"))


@pytest.mark.parametrize(
    "harm", [lose_its_record, empty_its_record, lose_all_files, lose_its_name_and_record, lose_its_name_and_files]
)
def test_a_directory_that_should_be_a_backup_is_accounted_for(
    run: Run, filled: Path, harm: Callable[[Path], None]
) -> None:
    whole, harmed = made(run, filled), made(run, filled)
    harm(harmed)
    for command in ("verify", "ls"):
        ran = run("backup", command, "kept")
        assert (ran.code, len(ran.err.splitlines()), "kept/MARS/" in ran.err) == (1, 1, True), ran
        assert str(whole) not in ran.err, ran


def test_a_damaged_newest_backup_removes_no_whole_one(run: Run, filled: Path) -> None:
    whole = made(run, filled)
    damaged = made(run, filled)
    os.truncate(damaged / "stream.arc.s2", 100)
    ran = run("backup", "create", "mars", "--to", "kept", "--keep", "2", "--config", filled)
    assert (ran.code, f"{damaged} is damaged" in ran.err, whole.exists()) == (1, True, True), ran


def test_nothing_is_removed_while_the_clock_is_wrong(run: Run, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = made(run, filled)
    monkeypatch.setattr(schedules, "SKEW", timedelta(seconds=-1))
    ran = run("backup", "create", "mars", "--to", "kept", "--keep", "1", "--config", filled)
    assert (ran.code, "no backup of MARS is removed: this machine's clock" in ran.err, before.exists()) == (
        1,
        True,
        True,
    ), ran


def test_nothing_is_cleansed_without_a_yes(run: Run, filled: Path) -> None:
    directory = made(run, filled)
    before = (directory / "stream.arc.s2").read_bytes()
    asked = run("backup", "cleanse", directory, "class=od", 'step={"gte":2}', "--config", filled)
    assert (asked.code, "2 messages match, 1 stay" in asked.out, "--yes" in asked.err) == (2, True, True), asked
    assert (directory / "stream.arc.s2").read_bytes() == before
    done = run("backup", "cleanse", directory, "class=od", 'step={"gte":2}', "--yes", "--config", filled)
    assert (done.code, done.lines[-1]) == (0, f"{directory}: 2 messages removed"), done
    assert "1 messages" in run("backup", "verify", directory).out
    nothing = run("backup", "cleanse", directory, "--subject", "mars.od.3", "--yes")
    assert (nothing.code, "0 messages match" in nothing.out) == (0, True), nothing


def test_what_to_cleanse_must_be_said(run: Run, filled: Path) -> None:
    directory = made(run, filled)
    for said in ([], ["class=od", "--subject", ">"]):
        ran = run("backup", "cleanse", directory, *said, "--config", filled)
        assert (ran.code, "say which messages" in ran.err) == (2, True), ran
    unknown = run("backup", "cleanse", directory, "colour=red", "--config", filled)
    assert (unknown.code, "'colour'" in unknown.err) == (2, True), unknown


def test_what_expired_since_is_told(run: Run, filled: Path) -> None:
    directory = made(run, filled)
    meta = json.loads((directory / "backup.json").read_text())
    del meta["aviso_workers"]
    meta["config"]["max_msgs"] = 2
    (directory / "backup.json").write_text(json.dumps(meta))
    ran = run("backup", "restore", directory, "--as", "OLD", "--config", filled)
    assert (ran.code, ran.out, "it had 3" in ran.err) == (0, "OLD: 2 messages, from 2 on\n", True), ran


def test_an_encrypted_chain_is_made_verified_merged_and_restored(run: Run, filled: Path) -> None:
    key, name = Key(Path("key.txt")), ("--config", filled)
    making = ("backup", "create", "mars", "--to", "kept", "--encrypt-to", key.public, *name)
    first = run(*making, "--full-every", "7d")
    assert (first.code, "MARS: a full backup, because there is no earlier backup" in first.err) == (0, True), first
    run("notify", "mars", "class=od", "step=4", *name)
    unreadable = run(*making, "--since", "last")
    assert (unreadable.code, "--identity FILE" in unreadable.err) == (1, True), unreadable
    second = run(*making, "--since", "last", "--identity", key.file)
    full, increment = backups.find(Path("kept"))
    assert (second.code, second.err) == (0, ""), second
    assert second.out.endswith(f"in {increment.directory.absolute()}, after {full.directory.name}\n"), second
    listed = run("backup", "ls", "kept")
    assert (listed.code, "full, encrypted" in listed.out) == (0, True), listed
    files = run("backup", "verify", "kept")
    assert (files.code, files.out.count("only with --identity FILE can its messages be counted")) == (0, 2), files
    verified = run("backup", "verify", "kept", "--identity", key.file)
    assert (verified.code, "4 messages" in verified.out) == (0, True), verified
    aside = full.directory.rename("aside")
    listed = run("backup", "ls", "kept")
    assert (listed.code, f"{increment.directory} needs " in listed.err, "after" in listed.out) == (1, True, True), (
        listed
    )
    aside.rename(full.directory)
    locked = run("backup", "restore", increment.directory, "--as", "OLD", *name)
    assert (locked.code, "is encrypted: say which keys open it (--identity FILE)" in locked.err) == (1, True), locked
    restored = run("backup", "restore", increment.directory, "--as", "OLD", "--identity", key.file, *name)
    assert (restored.code, restored.out) == (0, "OLD: 4 messages, from 1 on\n"), restored
    merged = run("backup", "merge", increment.directory, "--to", "plain", "--identity", key.file)
    assert merged.code == 0, merged
    assert "4 messages" in run("backup", "verify", "plain").out


def test_how_to_make_backups_is_said_clearly(run: Run, config: Path) -> None:
    key = Key(Path("key.txt"))
    for said, found in {
        ("--every", "0s"): "0s is not a time to wait",
        ("--every", "6h", "--since", "last", "--encrypt-to", key.public): "need --identity, to compare with them",
        ("--since", "last", "--full-every", "7d"): "say --since or --full-every",
        ("--full-every", "soon"): "'soon'",
        ("--encrypt-to", "age1wrong"): "is not a public key of age",
    }.items():
        ran = run("backup", "create", "mars", "--to", "kept", *said, "--config", config)
        assert (ran.code, found in ran.err) == (2, True), ran


def test_a_directory_that_is_not_there_holds_no_backups_and_is_an_error(run: Run) -> None:
    ran = run("backup", "ls", "kept")
    assert (ran.code, ran.out, ran.err) == (1, "", "aviso-workers: kept is not a directory\n")
