"""Retention of backups: how many of a stream are kept, with those that increments need and the newest complete set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import anyio
import anyio.to_thread
from msgspec import Struct

from aviso_workers.backends import Admin
from aviso_workers.clocks import SKEW
from aviso_workers.errors import BackupError
from aviso_workers.ops.backups import chains, sets
from aviso_workers.ops.backups.storage import Backup, damage, find, load, locked_backups, remove


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
    not_counted: Sequence[str] = ()
    """Sentences on backups that are kept and do not count: damaged ones, and those of the future."""


def prune(directory: Path, stream: str, keep: Keep, *, now: datetime | None = None) -> Pruned:
    """Remove the backups of a stream that are not kept. Only those that we have made are touched.

    A backup counts as kept only where its digests are right, and those of all that it was made after: one that is
    damaged stays, and an older one beside it. So does one whose time is in the future, which says nothing of its age.
    Nothing is read where nothing is to be removed. Raises `BackupError`.
    """
    if keep == Keep() or not (directory / stream).is_dir():
        return Pruned()
    with locked_backups(directory / stream, alone=True):  # or an increment may be under way after one of them
        return _prune(directory, stream, keep, now or datetime.now(UTC))


async def prune_by_server(admin: Admin, directory: Path, stream: str, keep: Keep) -> Pruned:
    """Prune as `prune` does, if this machine's clock agrees with the server's. Raises `BackupError`, `BackendError`."""
    if keep != Keep():
        await require_same_clock(admin, stream)
    return await anyio.to_thread.run_sync(prune, directory, stream, keep)


async def require_same_clock(admin: Admin, stream: str) -> None:
    """Raise `BackupError` where this machine's clock differs by more than a minute from that of the server: then it is
    not known which backups are old. Raises `BackendError`.
    """
    told = (await admin.stream_info(stream)).time
    differs = datetime.now(UTC) - told if told else timedelta()
    if abs(differs) > SKEW:
        how = f"{abs(differs.total_seconds()):.0f} s {'ahead of' if differs > timedelta() else 'behind'}"
        raise BackupError(
            f"no backup of {stream} is removed: this machine's clock is {how} the server's. Set the wrong clock right"
        )


def _prune(directory: Path, stream: str, keep: Keep, now: datetime) -> Pruned:
    found_here = [found for found in find(directory / stream, stream=stream) if found.record]
    ours = [found for found in found_here if found.made <= now + SKEW]
    of_future = found_here[len(ours) :]
    not_counted = [f"{backup.directory} has a time in the future, from a wrong clock" for backup in of_future]
    since = datetime.max.replace(tzinfo=UTC) if keep.days is None else now - timedelta(days=keep.days)
    most = max(1, keep.newest or 1)
    if not any(backup.made < since for backup in ours[:-most]):
        return Pruned(not_counted=not_counted)
    damage_of = cache(_damage)
    whole: list[Backup] = []
    unwanted: list[Backup] = []
    damaged: list[tuple[Backup, str]] = []
    for backup in reversed(ours):
        if len(whole) >= most and backup.made < since:
            unwanted.append(backup)
        elif found := _damage_of_chain(backup, damage_of):
            damaged.append((backup, found))
        else:
            whole.append(backup)
    last_set = sets.newest(directory, until=now + SKEW)
    needed = sets.members(last_set) if last_set else []
    required = chains.required([*whole, *(backup for backup, _ in damaged), *of_future, *needed])
    removed = [backup for backup in unwanted if backup.directory.resolve() not in required]
    for backup in removed:  # increments before what they were made after
        sets.remove_those_with(backup, directory)
        remove(backup)
    return Pruned(removed=removed[::-1], not_counted=[*(found for _, found in damaged), *not_counted])


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
