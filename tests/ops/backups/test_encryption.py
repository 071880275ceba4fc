"""Backups that are encrypted: read with a key, and verified as files without one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyrage
import pytest

from aviso_workers.errors import BackupError, DeclarationError
from aviso_workers.ops import backups
from aviso_workers.ops.backups import Backup, Identities, encryption
from tests.ops.backups.entries import backed_up
from tests.ops.backups.test_chains import MOMENTS, bodies, flip_a_bit


class Key:
    """A secret key in a file as `age-keygen` makes it."""

    def __init__(self, file: Path) -> None:
        identity = pyrage.x25519.Identity.generate()
        file.write_text(f"# created: today\n# public key: {identity.to_public()}\n{identity}\n")
        self.file = file
        self.secret, self.public = str(identity), str(identity.to_public())
        self.identities = Identities.read(file)


@pytest.fixture
def key(tmp_path: Path) -> Key:
    return Key(tmp_path / "key.txt")


@pytest.fixture
def links(tmp_path: Path, key: Key) -> list[Backup]:
    made: list[Backup] = []
    for hours, moment in enumerate(MOMENTS):
        made.append(
            backed_up(
                tmp_path,
                moment,
                since=made[-1] if made else None,
                encrypt_to=[key.public],
                identities=key.identities,
                hours=hours,
            )
        )
    return made


def test_a_chain_is_read_with_the_key(links: list[Backup], key: Key) -> None:
    assert [bodies(link, key.identities) for link in links] == list(MOMENTS)
    for link in links:
        assert backups.verify(link, identities=key.identities)


def test_nothing_of_the_messages_is_in_the_clear(links: list[Backup]) -> None:
    for link in links:
        stored = b"".join(path.read_bytes() for path in link.directory.iterdir())
        assert not [word for word in (b"one", b"four", b"five", b"mars.od.1", b"index") if word in stored]
        assert link.archive.name.endswith(".arc.s2.age")


def test_without_a_key_the_files_are_verified_and_nothing_else(links: list[Backup]) -> None:
    assert backups.verify(links[2]) is None
    flip_a_bit(links[1])
    with pytest.raises(BackupError, match=f"{links[1].directory} is damaged"):
        backups.verify(links[2])
    for act in (bodies, lambda link: backups.plan_cleanse(link, lambda entry: True)):
        with pytest.raises(BackupError, match=r"is encrypted: say which keys open it"):
            act(links[2])


def test_another_key_opens_nothing(links: list[Backup], tmp_path: Path) -> None:
    other = Key(tmp_path / "other.txt")
    with pytest.raises(BackupError, match="is not encrypted to any of these identities"):
        backups.verify(links[2], identities=other.identities)


def test_a_file_that_breaks_off_is_told(links: list[Backup], key: Key) -> None:
    os.truncate(links[0].archive, links[0].size - 1)
    with pytest.raises(BackupError, match=r"age is damaged: it cannot be decrypted to its end"):
        bodies(links[2], key.identities)


def test_it_is_cleansed_with_the_key_and_stays_encrypted(links: list[Backup], key: Key) -> None:
    backups.cleanse(backups.plan_cleanse(links[1], lambda entry: entry.sequence == 1, identities=key.identities))
    found = backups.find(links[0].directory.parent)
    assert [1 in bodies(link, key.identities) for link in found] == [False, False, False]
    assert [link.encrypted for link in found] == [True, True, True]


def test_it_is_merged_for_others(links: list[Backup], key: Key, tmp_path: Path) -> None:
    other = Key(tmp_path / "other.txt")
    merged = backups.merge(links[2], tmp_path / "full", encrypt_to=[other.public], identities=key.identities)
    assert bodies(merged, other.identities) == MOMENTS[2]


def test_what_goes_wrong_meanwhile_is_raised_as_itself(key: Key) -> None:
    def broken_off() -> Iterator[bytes]:
        yield b"some"
        raise BackupError("the server is gone")

    def full(data: bytes) -> None:
        raise BackupError("the disk is full")

    with pytest.raises(BackupError, match="the server is gone"):
        encryption.encrypt(broken_off(), lambda data: None, [key.public])
    with pytest.raises(BackupError, match="the disk is full"):
        encryption.encrypt([b"some"], full, [key.public])


def test_keys_are_said_or_in_a_file(key: Key, tmp_path: Path) -> None:
    other = Key(tmp_path / "other.txt")
    (tmp_path / "public.txt").write_text(f"# ours\n{key.public}\n\n{other.public}\n")
    assert backups.read_recipients([key.public, str(tmp_path / "public.txt")]) == (key.public, other.public)


def test_what_is_no_key_is_told_and_no_secret_is_shown(key: Key, tmp_path: Path) -> None:
    (tmp_path / "wrong.txt").write_text("AGE-SECRET-KEY-1WRONG")
    (tmp_path / "public.txt").write_text(key.public)
    (tmp_path / "empty.txt").touch()
    for file, found in {
        "wrong.txt": "a secret key of age that cannot be read",
        "public.txt": "is not a secret key of age",
        "empty.txt": "has no secret key of age",
        "none.txt": "cannot read keys of age from",
    }.items():
        with pytest.raises(DeclarationError, match=found) as refused:
            Identities.read(tmp_path / file)
        assert "WRONG" not in str(refused.value)
    for said in ("age1wrong", key.secret, key.secret.lower(), str(key.file), str(tmp_path / "none.txt")):
        with pytest.raises(DeclarationError) as refused:
            backups.read_recipients([said])
        assert key.secret.lower() not in str(refused.value).lower()
    assert key.secret not in repr(key.identities)
