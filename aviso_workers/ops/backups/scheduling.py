"""Backups made again and again, by a process that a supervisor keeps running.

Called by `backup create --every`. What is due follows from the backups in the directory alone: a stream is backed up
where its newest backup is as old as the interval. So a process that is started again goes on where the one before it
was, and one that is started beside another by mistake finds nothing to do. One process at a time backs up into a
directory. What fails is tried again within a minute, for as long as it takes, and each failure says how old the newest
backup is; a server that is away and a disk that is full may come back. What the command was told wrongly is found
before the first round.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import anyio.to_thread
import structlog
from msgspec import Struct

from aviso_workers.app import App
from aviso_workers.errors import BackendError, BackupError
from aviso_workers.ops.backups.chains import newest
from aviso_workers.ops.backups.creating import Made, named_streams
from aviso_workers.ops.backups.retention import Keep, prune
from aviso_workers.ops.backups.storing import exclusive

__all__ = ["Schedule", "keep_backing_up"]

log = structlog.get_logger("aviso_workers")

AGAIN_SECONDS = 60.0
"""After what failed, unless backups are made more often."""

Connect = Callable[[], AbstractAsyncContextManager[App]]
Make = Callable[[App, str], Awaitable[Made]]
"""Makes one backup of a stream."""


class Schedule(Struct, frozen=True, kw_only=True):
    """What is backed up, where to, and how often."""

    names: Sequence[str]
    """Event types or streams; of none, all streams."""
    to: Path
    every_seconds: float
    keep: Keep = Keep()

    @property
    def again_seconds(self) -> float:
        return min(AGAIN_SECONDS, self.every_seconds)


async def keep_backing_up(schedule: Schedule, connect: Connect, make: Make) -> None:
    """Back up what is due, and wait, until it is cancelled. Each round has a connection of its own."""
    log.info("backup.schedule_started", directory=str(schedule.to), every_seconds=schedule.every_seconds)
    while True:
        wait_seconds = await _round(schedule, connect, make)
        await anyio.sleep(wait_seconds)


async def _round(schedule: Schedule, connect: Connect, make: Make) -> float:
    """Back up what is due; returns in how many seconds something is due again."""
    try:
        with exclusive(schedule.to):
            async with connect() as app:
                streams = await named_streams(app, schedule.names)
                return min([await _back_up(schedule, app, each, make) for each in streams], default=AGAIN_SECONDS)
    except BlockingIOError:
        log.info("backup.left_to_another", directory=str(schedule.to))
    except (BackendError, BackupError) as error:
        _say_failed(schedule, error)
    return schedule.again_seconds


async def _back_up(schedule: Schedule, app: App, stream: str, make: Make) -> float:
    """Back up a stream if it is due; returns in how many seconds it is due again."""
    if (wait := await _due_in(schedule, stream)) > 0:
        return wait
    try:
        made = await make(app, stream)
        pruned = await anyio.to_thread.run_sync(prune, schedule.to, stream, schedule.keep)
    except (BackendError, BackupError) as error:  # the others are backed up all the same
        _say_failed(schedule, error, stream)
        return schedule.again_seconds
    backup = made.backup
    log.info(
        "backup.made",
        stream=stream,
        directory=str(backup.directory),
        messages=backup.state["messages"],
        bytes=backup.size,
        after=backup.previous.directory if backup.previous else None,
        full_because=made.full_because or None,
    )
    for removed in pruned.removed:
        log.info("backup.removed", stream=stream, directory=str(removed.directory))
    for found in pruned.damaged:
        log.error("backup.damaged", stream=stream, error=found)
    return await _due_in(schedule, stream)


async def _due_in(schedule: Schedule, stream: str) -> float:
    made = await anyio.to_thread.run_sync(lambda: newest(schedule.to / stream, stream=stream))
    now = datetime.now(UTC)
    if made is None or made > now:  # a clock that went back keeps no backup from being made
        return 0.0
    return (made + timedelta(seconds=schedule.every_seconds) - now).total_seconds()


def _say_failed(schedule: Schedule, error: Exception, stream: str | None = None) -> None:
    made = newest(schedule.to / stream if stream else schedule.to, stream=stream)
    log.error(
        "backup.failed",
        stream=stream,
        error=str(error),
        newest=made.isoformat(timespec="seconds") if made else None,
        newest_age_seconds=round((datetime.now(UTC) - made).total_seconds()) if made else None,
        again_in_seconds=schedule.again_seconds,
    )
