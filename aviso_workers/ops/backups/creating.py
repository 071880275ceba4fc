"""Backups of streams that are in use, and how many of them are kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio.to_thread
from msgspec import Struct

from aviso_workers import streams
from aviso_workers.app import App
from aviso_workers.errors import BackupError, NotFoundError, UnknownEventTypeError
from aviso_workers.ops import wiping
from aviso_workers.ops.backups.storing import Backup, Draft, Progress, damage, find, ignore, place_of, remove

__all__ = ["Keep", "Pruned", "create", "named_streams", "prune"]


class Keep(Struct, frozen=True):
    """Which backups of a stream are kept: the newest whole one always, and all of which one of these is true."""

    newest: int | None = None
    """It is one of so many."""
    days: float | None = None
    """It is not older."""


class Pruned(Struct, frozen=True, kw_only=True):
    """What became of the backups of a stream."""

    removed: Sequence[Backup] = ()
    """The oldest first."""
    damaged: Sequence[str] = ()
    """What is wrong with those that are kept and do not count, one sentence each."""


async def create(app: App, stream: str, to: Path, *, progress: Progress = ignore) -> Backup:
    """Back up a stream with its consumers into `<to>/<stream>/<time>`, while it is in use.

    Inside of `async with app:`. Raises `BackupError` where it cannot be written, and `BackendError`; nothing of it
    stays then.
    """
    server = app.session.backend.administration()
    made = datetime.now(UTC)
    async with server.snapshot(stream) as snapshot, aclosing(snapshot.chunks) as chunks:
        if streams.is_unfinished(snapshot.config):
            raise BackupError(f"{stream} is what a restore left that was interrupted: restore it again first")
        with Draft(place_of(to, stream, made)) as draft:
            async for chunk in chunks:
                await anyio.to_thread.run_sync(draft.write, chunk)
                progress(len(chunk))
            return await anyio.to_thread.run_sync(
                lambda: draft.finish(
                    config=snapshot.config, state=snapshot.state, made=made, server_version=server.server_version
                )
            )


def prune(directory: Path, stream: str, keep: Keep, *, now: datetime | None = None) -> Pruned:
    """Remove the backups of a stream that are not kept. Only those that we have made are touched.

    A backup counts as kept only where its digests are right: one that is damaged stays, and an older one beside it.
    Nothing is read where nothing is to be removed. Raises `BackupError`.
    """
    if keep == Keep():
        return Pruned()
    ours = [found for found in find(directory / stream, stream=stream) if found.record]
    since = (now or datetime.now(UTC)) - timedelta(days=keep.days or 0)
    most = max(1, keep.newest or 1)
    if not any(keep.days is None or backup.made < since for backup in ours[:-most]):
        return Pruned()
    whole = 0
    removed: list[Backup] = []
    damaged: list[str] = []
    for backup in reversed(ours):
        if whole >= most and (keep.days is None or backup.made < since):
            removed.insert(0, backup)
        elif found := _damage(backup):
            damaged.append(found)
        else:
            whole += 1
    for backup in removed:
        remove(backup)
    return Pruned(removed=removed, damaged=damaged)


def _damage(backup: Backup) -> str:
    """Return what is wrong with a backup, without reading its messages; empty where nothing is."""
    try:
        found = damage(backup)
    except BackupError as error:
        return str(error)
    return f"{backup.directory} is damaged: {found}" if found else ""


async def named_streams(app: App, names: Sequence[str]) -> list[str]:
    """The streams of event types, or of that name; of no names, all streams that there are.

    Raises `NotFoundError`, which says what there is.
    """
    present = await app.session.backend.stream_names()
    if not names:
        return sorted(present)
    wanted = [_stream(app, name, present) for name in names]
    if missing := [stream for stream in wanted if stream not in present]:
        raise NotFoundError(f"no stream {', '.join(missing)}; there are: {', '.join(sorted(present)) or 'none'}")
    return list(dict.fromkeys(wanted))


def _stream(app: App, name: str, present: Sequence[str]) -> str:
    if name in present:
        return name
    try:
        return wiping.stream_of(app, name)
    except UnknownEventTypeError:
        return name
