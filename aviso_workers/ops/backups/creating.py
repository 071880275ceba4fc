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
from aviso_workers.ops.backups.storing import Backup, Draft, Progress, find, ignore, place_of, remove

__all__ = ["Keep", "create", "named_streams", "prune"]


class Keep(Struct, frozen=True):
    """Which backups of a stream are kept: the newest one always, and all of which one of these is true."""

    newest: int | None = None
    """It is one of so many."""
    days: float | None = None
    """It is not older."""


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


def prune(directory: Path, stream: str, keep: Keep, *, now: datetime | None = None) -> list[Backup]:
    """Remove the backups of a stream that are not kept; returns which. Only those that we have made are touched.

    Raises `BackupError`.
    """
    if keep == Keep():
        return []
    ours = [found for found in find(directory / stream, stream=stream) if found.record]
    since = (now or datetime.now(UTC)) - timedelta(days=keep.days or 0)
    older = ours[: -max(1, keep.newest or 1)]
    gone = [backup for backup in older if keep.days is None or backup.made < since]
    for backup in gone:
        remove(backup)
    return gone


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
