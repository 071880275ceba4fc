"""A stream copied to another server, cluster or account, and compared with what it was.

Called by the command `streams copy`. It is a backup that is restored elsewhere: messages keep their sequences and
times, consumers their positions. What is stored while it goes on is not in the copy, so whoever moves a stream for good
fences it first (`mirroring`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import anyio
from msgspec import Struct

from aviso_workers.app import App
from aviso_workers.errors import BackupError
from aviso_workers.ops import backups
from aviso_workers.ops.backups import Drill, Progress, Restored, restoring

__all__ = ["Copied", "copy"]


class Copied(Struct, frozen=True, kw_only=True):
    """What became of a copy."""

    restored: Restored
    compared: Drill
    meanwhile: int
    """Messages that were stored in the original since, and are not in the copy."""


async def copy(
    source: App,
    target: App,
    stream: str,
    *,
    name: str | None = None,
    storage: str | None = None,
    replicas: int | None = None,
    progress: Progress,
) -> Copied:
    """Copy a stream from where one app is connected to where another one is; see `backups.restore` for the rest.

    It needs room for the stream in the directory for temporary files. Inside of both apps' `async with`. Raises
    `BackupError` and `BackendError`; then there is no stream under the final name.
    """
    restoring.require_name(name)
    with tempfile.TemporaryDirectory(prefix="aviso-workers-copy-") as directory:
        backup = await backups.create(source, stream, Path(directory), progress=progress)
        before = await anyio.to_thread.run_sync(backups.verify, backup)
        if before is None:
            raise BackupError(f"{stream} is on a nats-server before 2.15, whose archive cannot be read to compare")
        restored = await backups.restore(
            target, backup, name=name, storage=storage, replicas=replicas, progress=progress
        )
    after = await backups.read_back(target, restored.stream)
    now = await source.session.backend.stream_info(stream)
    return Copied(
        restored=restored,
        compared=Drill(backup=before, restored=after),
        meanwhile=now.last_sequence - before.last_sequence,
    )
