"""Scheduled backups, made again and again by a process that a supervisor keeps running, and how many are kept.

Called by `backup create --every` and `backup prune`: of a stream are kept as many as `Keep` says, with those that
increments need and the newest complete set. What is due follows from the backups in the directory alone: a stream is
backed up where its newest backup is as old as the interval, and all streams are as a set where the newest whole set is.
So a process that is started again goes on where the one before it was, and one that is started beside another by
mistake finds nothing to do. One process at a time backs up into a directory. A backup that fails is tried again within
a minute, for as long as it takes, and each failure says how old the newest backup is; a server that is away and a disk
that is full may come back. Mistakes in the command's options are found before the first round. Where only some streams
of a set cannot be backed up, the backups of the others are whole, and stay. So that they do not fill the disk each next
attempt waits twice as long, up to the interval, and nothing is removed until there is a set.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from pathlib import Path

import anyio
import anyio.to_thread
import structlog
from msgspec import Struct

from aviso_workers.backends import Admin
from aviso_workers.clocks import SKEW
from aviso_workers.config import Config
from aviso_workers.errors import BackendError, BackupError
from aviso_workers.ops.backups import chains, sets
from aviso_workers.ops.backups.completion import Spool
from aviso_workers.ops.backups.creation import NewBackup, named_streams
from aviso_workers.ops.backups.sets import MadeSet, create_set
from aviso_workers.ops.backups.storage import Backup, damage, exclusive, find, load, locked_backups, remove

log = structlog.get_logger("aviso_workers")

AGAIN_SECONDS = 60.0
"""Seconds until a failed backup is tried again, unless backups are made more often."""

Connect = Callable[[], AbstractAsyncContextManager[Admin]]
Make = Callable[[Admin, str, Spool | None], Awaitable[NewBackup]]
"""Makes one backup of a stream, with what an earlier snapshot of it had."""


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
        return _pruned(directory, stream, keep, now or datetime.now(UTC))


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


def _pruned(directory: Path, stream: str, keep: Keep, now: datetime) -> Pruned:
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


class BackupSchedule(Struct, frozen=True, kw_only=True):
    """The schedule of backups: of which streams, to which directory, and how often."""

    names: Sequence[str]
    """Event types or streams; of none, all streams as a set."""
    to: Path
    every_seconds: float
    keep: Keep = Keep()
    encrypted: bool
    """Whether the backups are encrypted, so that nothing may be on the disk in the clear."""

    @property
    def again_seconds(self) -> float:
        return min(AGAIN_SECONDS, self.every_seconds)


async def keep_backing_up(schedule: BackupSchedule, config: Config, connect: Connect, make: Make) -> None:
    """Make backups when they are due, until cancelled. Each round has a connection of its own."""
    log.info("backup.schedule_started", directory=str(schedule.to), every_seconds=schedule.every_seconds)
    scheduled = _Streams(schedule, config, make) if schedule.names else _Set(schedule, make)
    while True:
        wait_seconds = await _round(schedule, connect, scheduled)
        await anyio.sleep(max(0.0, wait_seconds))  # one that took longer than the interval is due again at once


async def _round(schedule: BackupSchedule, connect: Connect, scheduled: _Streams | _Set) -> float:
    """Make the backups that are due, and return in how many seconds the next one is due."""
    try:
        with exclusive(schedule.to):
            async with connect() as admin:
                return await scheduled.back_up(admin)
    except BlockingIOError:
        log.info("backup.left_to_another", directory=str(schedule.to))
    except (BackendError, BackupError) as error:
        _say_failed(error, scheduled.newest(), schedule.again_seconds)
    return schedule.again_seconds


class _Streams:
    """Scheduled backups of single streams, each of which is due by itself."""

    def __init__(self, schedule: BackupSchedule, config: Config, make: Make) -> None:
        self._schedule = schedule
        self._config = config
        self._make = make

    def newest(self, stream: str | None = None) -> datetime | None:
        """Return when the newest backup was made, of one stream or of any; None where there is none."""
        to = self._schedule.to
        return chains.newest(to / stream if stream else to, stream=stream)

    async def back_up(self, admin: Admin) -> float:
        """Back up the streams that are due, and return in how many seconds the next one is due."""
        names = await named_streams(admin, self._config, self._schedule.names)
        return min([await self._back_up(admin, each) for each in names])

    async def _back_up(self, admin: Admin, stream: str) -> float:
        due_in = partial(_due_in, partial(self.newest, stream), self._schedule.every_seconds)
        if (wait := await due_in()) > 0:
            return wait
        try:
            made = await self._make(admin, stream, None)
            _say_made(stream, made)
            await _prune(admin, self._schedule, stream)
        except (BackendError, BackupError) as error:  # the others are backed up all the same
            _say_failed(error, self.newest(stream), self._schedule.again_seconds, stream=stream)
            return self._schedule.again_seconds
        return await due_in()


class _Set:
    """Scheduled sets of backups of all streams."""

    def __init__(self, schedule: BackupSchedule, make: Make) -> None:
        self._schedule = schedule
        self._make = make
        self._due_in = partial(_due_in, self.newest, schedule.every_seconds)
        self._again_seconds = schedule.again_seconds
        """Seconds until the next attempt, after one that made no set."""

    def newest(self) -> datetime | None:
        """Return when the newest complete set was begun. One whose time is in the future does not count."""
        found = sets.newest(self._schedule.to, until=datetime.now(UTC))
        return found.written.made if found else None

    async def back_up(self, admin: Admin) -> float:
        """Make a set if one is due, and return in how many seconds the next one is due.

        Raises errors that another attempt does not mend, as of a key that cannot be used, and those for which no set
        can be begun.
        """
        if (wait := await self._due_in()) > 0:
            return wait

        async def back_up(stream: str, earlier: Spool | None) -> Backup:
            made = await self._make(admin, stream, earlier)
            _say_made(stream, made)
            return made.backup

        made = await create_set(admin, self._schedule.to, back_up, encrypted=self._schedule.encrypted)
        if made.file is None:
            return self._failed_again(made)
        self._again_seconds = self._schedule.again_seconds
        log.info("backup.set_made", file=str(made.file), streams=len(made.backups))
        for backup in made.backups:
            try:
                await _prune(admin, self._schedule, backup.stream)
            except (BackendError, BackupError) as error:  # the set is made all the same
                _say_failed(error, self.newest(), await self._due_in(), stream=backup.stream)
        return await self._due_in()

    def _failed_again(self, made: MadeSet) -> float:
        for failure in made.failures:
            if not isinstance(failure, BackendError | BackupError):
                raise failure
        wait = self._again_seconds
        if made.backups:
            self._again_seconds = min(2 * wait, self._schedule.every_seconds)
        why = "; ".join(map(str, made.failures))
        _say_failed(BackupError(f"no set was made: {why}"), self.newest(), wait)
        return wait


async def _due_in(newest: Callable[[], datetime | None], every_seconds: float) -> float:
    """Return in how many seconds a backup is due, by the time of the newest one."""
    made = await anyio.to_thread.run_sync(newest)
    if made is None:
        return 0.0
    return (made + timedelta(seconds=every_seconds) - datetime.now(UTC)).total_seconds()


async def _prune(admin: Admin, schedule: BackupSchedule, stream: str) -> None:
    """Remove old backups of a stream. Raises `BackupError` and `BackendError`."""
    pruned = await prune_by_server(admin, schedule.to, stream, schedule.keep)
    for removed in pruned.removed:
        log.info("backup.removed", stream=stream, directory=str(removed.directory))
    for found in pruned.not_counted:
        log.error("backup.not_counted", stream=stream, error=found)


def _say_made(stream: str, made: NewBackup) -> None:
    backup = made.backup
    log.info(
        "backup.made",
        stream=stream,
        directory=str(backup.directory),
        messages=backup.state.messages,
        bytes=backup.size,
        after=backup.previous.directory if backup.previous else None,
        full_because=made.full_because or None,
    )


def _say_failed(
    error: Exception, newest: datetime | None, again_in_seconds: float, *, stream: str | None = None
) -> None:
    log.error(
        "backup.failed",
        stream=stream,
        error=str(error),
        newest=newest.isoformat(timespec="seconds") if newest else None,
        newest_age_seconds=round((datetime.now(UTC) - newest).total_seconds()) if newest else None,
        again_in_seconds=again_in_seconds,
    )
