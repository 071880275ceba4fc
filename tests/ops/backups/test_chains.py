"""Chains of backups on disk, without a server: read as one, and refused where a link is not what it was."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from aviso_workers.errors import BackupError
from aviso_workers.ops import backups
from aviso_workers.ops.backups import Backup, Identities, Keep, chains, storage
from aviso_workers.ops.backups.archive import ArchiveEntry
from aviso_workers.ops.backups.storage import Draft
from tests.ops.backups.entries import BEGAN, backed_up

MOMENTS: tuple[Mapping[int, bytes], ...] = (
    {1: b"one", 2: b"two", 3: b"three"},
    {1: b"one", 3: b"three", 4: b"four"},
    {1: b"one", 4: b"four", 5: b"five"},
)
"""A stream as it was at each backup: 2 and then 3 were deleted."""


@pytest.fixture
def links(tmp_path: Path) -> list[Backup]:
    return chained(tmp_path, MOMENTS)


def chained(directory: Path, moments: tuple[Mapping[int, bytes], ...]) -> list[Backup]:
    made: list[Backup] = []
    for hours, moment in enumerate(moments):
        made.append(backed_up(directory, moment, since=made[-1] if made else None, hours=hours))
    return made


def bodies(backup: Backup, identities: Identities | None = None) -> dict[int, bytes]:
    with chains.opened_entries(backup, identities) as entries:
        return {entry.sequence: entry.body for entry in entries if entry.sequence}


def own_bodies(backup: Backup) -> dict[int, bytes]:
    with chains.opened_own_entries(backup, None) as entries:
        return {entry.sequence: entry.body for entry in entries if entry.sequence}


def test_each_backup_of_a_chain_gives_the_stream_as_it_was(links: list[Backup]) -> None:
    assert [bodies(link) for link in links] == list(MOMENTS)
    assert [own_bodies(link) for link in links[1:]] == [{4: b"four"}, {5: b"five"}], "each is stored once"
    for link, moment in zip(links, MOMENTS, strict=True):
        contents = backups.verify(link)
        assert contents is not None
        assert (contents.messages, contents.missing, list(contents.consumers)) == (len(moment), 0, ["index"])


def test_an_increment_is_no_backup_to_the_nats_cli(links: list[Backup]) -> None:
    assert sorted(path.name for path in links[1].directory.iterdir()) == ["backup.json", "increment.arc.s2"]


def miss(link: Backup) -> None:
    shutil.rmtree(link.directory)


def flip_a_bit(link: Backup) -> None:
    data = bytearray(link.archive.read_bytes())
    data[len(data) // 2] ^= 0x10
    link.archive.write_bytes(data)


def replace(link: Backup) -> None:
    shutil.rmtree(link.directory)
    other = backed_up(link.directory.parents[1] / "other", MOMENTS[0], hours=1)
    shutil.copytree(other.directory, link.directory)


def exchange(link: Backup) -> None:
    """It and the one after it, each in the directory of the other."""
    after = sorted(link.directory.parent.iterdir())[2]
    aside = link.directory.with_name("aside")
    link.directory.rename(aside)
    after.rename(link.directory)
    aside.rename(after)


@pytest.mark.parametrize(
    ("harm", "which", "found"),
    [
        (miss, 0, r"needs .*{link}, which cannot be read: .*No such file"),
        (miss, 1, r"needs .*{link}, which cannot be read"),
        (flip_a_bit, 0, r"{link} is damaged"),
        (flip_a_bit, 1, r"{link} is damaged"),
        (replace, 1, r"was made after another backup than the one in .*{link}"),
        (exchange, 1, r"was made after another backup than the one in .*{link}"),
    ],
)
def test_a_link_that_is_not_what_it_was_is_named(
    links: list[Backup], harm: Callable[[Backup], None], which: int, found: str
) -> None:
    harm(links[which])
    newest = backups.find(links[0].directory.parent)[-1]
    with pytest.raises(BackupError, match=found.format(link=links[which].directory)):
        chains.require_whole(newest)


def test_of_a_damaged_link_no_stream_is_read(links: list[Backup]) -> None:
    os.truncate(links[1].archive, links[1].size - 5)
    with pytest.raises(BackupError, match=f"{links[1].directory}.* is damaged"):
        backups.verify(links[2])
    assert backups.verify(links[0]), "what was made before it is whole"


def test_what_needs_a_missing_backup_is_not_the_newest(links: list[Backup], tmp_path: Path) -> None:
    assert backups.newest(tmp_path) == links[2].made
    miss(links[1])
    assert backups.newest(tmp_path) == links[0].made
    assert backups.restorable(tmp_path) == [links[0]]


def test_a_backup_of_a_time_to_come_is_not_the_newest(tmp_path: Path) -> None:
    now = backed_up(tmp_path, MOMENTS[0], since=None, hours=0)
    ahead = backed_up(tmp_path, MOMENTS[0], since=None, hours=1)
    meta = ahead.directory / "backup.json"
    meta.write_text(meta.read_text().replace('"made": "2026-', '"made": "2999-'))
    assert backups.find(tmp_path)[-1].made.year == 2999
    assert backups.newest(tmp_path) == now.made, "or a schedule makes one after the other, and old ones go"


def test_no_more_is_kept_than_asked_for_and_no_link_less_than_needed(tmp_path: Path) -> None:
    first = chained(tmp_path, MOMENTS)
    second = backed_up(tmp_path, MOMENTS[2], hours=5)
    third = backed_up(tmp_path, MOMENTS[2], since=second, hours=6)
    assert backups.prune(tmp_path, "MARS", Keep(newest=3)).removed == []
    assert backups.prune(tmp_path, "MARS", Keep(newest=1)).removed == first
    assert backups.find(tmp_path) == [second, third]
    in_a_year = BEGAN + timedelta(days=365)
    assert backups.prune(tmp_path, "MARS", Keep(days=1), now=in_a_year).removed == []
    assert bodies(third) == MOMENTS[2]


def test_an_increment_of_which_a_link_is_damaged_does_not_count_as_kept(tmp_path: Path) -> None:
    whole = backed_up(tmp_path, MOMENTS[0])
    full = backed_up(tmp_path, MOMENTS[0], hours=1)
    backed_up(tmp_path, MOMENTS[1], since=full, hours=2)
    flip_a_bit(full)
    pruned = backups.prune(tmp_path, "MARS", Keep(newest=1))
    assert pruned.removed == []
    assert [str(full.directory) in found for found in pruned.not_counted] == [True, True]
    assert whole in backups.find(tmp_path)


def without(*sequences: int) -> list[dict[int, bytes]]:
    return [{number: body for number, body in each.items() if number not in sequences} for each in MOMENTS]


@pytest.mark.parametrize("named", [0, 1, 2])
def test_what_must_be_forgotten_is_in_no_link(links: list[Backup], named: int) -> None:
    plan = backups.plan_cleanse(links[named], lambda entry: entry.sequence in (1, 2, 4))
    assert (len(plan.removed), plan.kept) == (3, len(without(1, 2, 4)[named]))
    backups.cleanse(plan)
    found = backups.find(links[0].directory.parent)
    assert [bodies(link) for link in found] == without(1, 2, 4)
    assert all(backups.verify(link) for link in found)
    for link in found:
        stored = link.archive.read_bytes()
        assert not [body for body in (b"one", b"two", b"four") if body in stored], link.directory
    again = backups.plan_cleanse(found[named], lambda entry: entry.sequence in (1, 2, 4))
    assert (again.removed, again.changes) == (set(), [])


@pytest.mark.parametrize("killed_at", [0, 1, 2])
def test_a_cleansing_that_is_killed_leaves_backups_that_restore_and_is_repeated(
    links: list[Backup], killed_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def takes(entry: ArchiveEntry) -> bool:
        return entry.sequence in (1, 4)

    class KilledError(BaseException):
        pass

    finish, done = Draft.finish, 0

    def finish_some(self: Draft, *said: Any) -> Backup:
        nonlocal done
        if done == killed_at:
            raise KilledError
        done += 1
        return finish(self, *said)

    with monkeypatch.context() as patch:
        patch.setattr(Draft, "finish", finish_some)
        with pytest.raises(KilledError):
            backups.cleanse(backups.plan_cleanse(links[1], takes))
    left = backups.find(links[0].directory.parent)
    assert [bodies(link) for link in left] in ([*MOMENTS[: 3 - killed_at], *without(1, 4)[3 - killed_at :]],), (
        "newest first"
    )
    backups.cleanse(backups.plan_cleanse(left[1], takes))
    found = backups.find(links[0].directory.parent)
    assert [bodies(link) for link in found] == without(1, 4)
    assert all(backups.verify(link) for link in found)


def test_a_cleansing_that_was_killed_between_two_renames_is_put_back(links: list[Backup]) -> None:
    links[1].directory.rename(links[1].directory.with_name(links[1].directory.name + ".replaced"))
    assert bodies(links[2]) == MOMENTS[2]
    assert backups.load(links[1].directory) == links[1]


def test_what_a_killed_cleansing_was_to_remove_goes_when_it_is_repeated(links: list[Backup]) -> None:
    before = shutil.copytree(links[0].directory, links[0].directory.with_name("before"))
    backups.cleanse(backups.plan_cleanse(links[0], lambda entry: entry.sequence == 1))
    left = before.rename(links[0].directory.with_name(links[0].directory.name + ".replaced"))
    plan = backups.plan_cleanse(backups.load(links[0].directory), lambda entry: entry.sequence == 1)
    assert (plan.removed, left.exists()) == (set(), False)


def test_increments_are_made_after_a_chain_that_was_cleansed(links: list[Backup], tmp_path: Path) -> None:
    backups.cleanse(backups.plan_cleanse(links[0], lambda entry: entry.sequence == 1))
    again = backed_up(tmp_path, MOMENTS[2], since=backups.load(links[2].directory), hours=4)
    assert bodies(again) == MOMENTS[2], "what is in the stream still is stored again"
    assert own_bodies(again) == {1: b"one"}


def test_a_chain_with_a_broken_one_beside_it_is_not_cleansed(links: list[Backup], tmp_path: Path) -> None:
    other = backed_up(tmp_path, MOMENTS[0], hours=7)
    backed_up(tmp_path, MOMENTS[1], since=other, hours=8)
    shutil.rmtree(other.directory)
    with pytest.raises(BackupError, match=r"needs .*, which cannot be read"):
        backups.plan_cleanse(links[0], lambda entry: True)


def test_a_chain_is_merged_into_a_full_backup(links: list[Backup], tmp_path: Path) -> None:
    merged = backups.merge(links[2], tmp_path / "full")
    assert (merged.previous, bodies(merged)) == (None, MOMENTS[2])
    assert merged.archive.name == "stream.arc.s2"
    assert backups.verify(merged) == backups.verify(links[2])
    with pytest.raises(BackupError, match="exists: choose another directory"):
        backups.merge(links[2], tmp_path / "full")


def test_a_chain_ends_somewhere(tmp_path: Path) -> None:
    moments = tuple({1: b"one"} for _ in range(chains.MAX_LINKS + 1))
    made = chained(tmp_path, moments)
    assert bodies(made[-2]) == {1: b"one"}
    with pytest.raises(BackupError, match="a chain of more than 40"):
        chains.chain(made[-1])


@pytest.mark.parametrize("act", ["prune", "cleanse"])
def test_nothing_is_removed_or_rewritten_while_an_increment_is_made_after_it(
    links: list[Backup], act: str, tmp_path: Path
) -> None:
    newest = links[-1]

    def remove() -> None:
        if act == "prune":
            backups.prune(tmp_path, newest.stream, Keep(newest=1))
        else:
            backups.forget(newest, backups.of_subject(">"))

    added: list[Backup] = []
    with storage.locked_backups(newest.directory.parent, alone=False):
        removing = threading.Thread(target=remove)
        removing.start()
        added.append(backed_up(tmp_path, MOMENTS[2], since=newest, hours=5))
    removing.join()
    increment = backups.load(added[0].directory)
    backups.verify(increment)
    assert bodies(increment) == (MOMENTS[2] if act == "prune" else {})
