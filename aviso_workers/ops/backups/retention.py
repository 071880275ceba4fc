"""Retention of backups: how many of a stream are kept, with those that increments need and the newest complete set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

from msgspec import Struct

from aviso_workers.errors import BackupError
from aviso_workers.ops.backups import chains, sets
from aviso_workers.ops.backups.storage import Backup, damage, find, load, locked_backups, remove

__all__ = ["Keep", "Pruned", "prune"]


class Keep(Struct, frozen=True):
    """The rule by which backups of a stream are kept: the newest whole one always, all of which one of these is true,
    and what these were made after.
    """

    newest: int | None = None
    """Keep so many of the newest whole ones."""
    days: float | None = None
    """Keep those that are not older than so many days."""


class Pruned(Struct, frozen=True, kw_only=True):
    """The result of pruning the backups of a stream."""

    removed: Sequence[Backup] = ()
    """The oldest first."""
    damaged: Sequence[str] = ()
    """Sentences on damaged backups, which are kept and do not count."""


def prune(directory: Path, stream: str, keep: Keep, *, now: datetime | None = None) -> Pruned:
    """Remove the backups of a stream that are not kept. Only those that we have made are touched.

    A backup counts as kept only where its digests are right, and those of all that it was made after: one that is
    damaged stays, and an older one beside it. Nothing is read where nothing is to be removed. Raises `BackupError`.
    """
    if keep == Keep() or not (directory / stream).is_dir():
        return Pruned()
    with locked_backups(directory / stream, alone=True):  # or an increment may be under way after one of them
        return _prune(directory, stream, keep, now or datetime.now(UTC))


def _prune(directory: Path, stream: str, keep: Keep, now: datetime) -> Pruned:
    ours = [found for found in find(directory / stream, stream=stream) if found.record]
    since = now - timedelta(days=keep.days or 0)
    most = max(1, keep.newest or 1)
    if not any(keep.days is None or backup.made < since for backup in ours[:-most]):
        return Pruned()
    damage_of = cache(_damage)
    whole: list[Backup] = []
    unwanted: list[Backup] = []
    damaged: list[tuple[Backup, str]] = []
    for backup in reversed(ours):
        if len(whole) >= most and (keep.days is None or backup.made < since):
            unwanted.append(backup)
        elif found := _damage_of_chain(backup, damage_of):
            damaged.append((backup, found))
        else:
            whole.append(backup)
    last_set = sets.newest(directory)
    needed = sets.members(last_set) if last_set else []
    required = chains.required([*whole, *(backup for backup, _ in damaged), *needed])
    removed = [backup for backup in unwanted if backup.directory.resolve() not in required]
    for backup in removed:  # increments before what they were made after
        sets.remove_those_with(backup, directory)
        remove(backup)
    return Pruned(removed=removed[::-1], damaged=[found for _, found in damaged])


def _damage_of_chain(backup: Backup, damage_of: Callable[[Path], str]) -> str:
    """Return the damage of a backup or of one in its chain, found without reading messages; empty where there is
    none.
    """
    try:
        found = [damage_of(link.directory.resolve()) for link in chains.chain(backup)]
    except BackupError as error:
        return str(error)
    return next(filter(None, found), "")


def _damage(directory: Path) -> str:
    try:
        found = damage(load(directory))
    except BackupError as error:
        return str(error)
    return f"{directory} is damaged: {found}" if found else ""
