"""Merging of a chain into a full backup, such as the nats CLI restores, with other encryption or without."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from aviso_workers.errors import BackupError
from aviso_workers.ops.backups import chains
from aviso_workers.ops.backups.encryption import Identities
from aviso_workers.ops.backups.storage import Backup, Draft, Progress, ignore, place_of
from aviso_workers.ops.backups.verification import verify

PIECE_BYTES = 512 * 1024


def merge(
    backup: Backup,
    to: Path,
    *,
    encrypt_to: Sequence[str] = (),
    identities: Identities | None = None,
    progress: Progress = ignore,
) -> Backup:
    """Write the merged chain of a backup as a full backup into `<to>/<stream>/<time>`.

    Raises `BackupError` where it is damaged, where a key is missing, or where there is a backup at that place.
    """
    place = place_of(to, backup.stream, backup.made)
    if place.exists():
        raise BackupError(f"{place} exists: choose another directory")
    chains.require_identities(backup, identities)
    verify(backup, identities=identities)
    with (
        chains.opened_archive(backup, identities, progress=progress) as file,
        Draft(place, encrypt_to=encrypt_to) as draft,
    ):
        draft.write_all(iter(partial(file.read, PIECE_BYTES), b""))
        return draft.finish(
            config=backup.config,
            state=backup.state,
            made=backup.made,
            server_version=backup.record.server_version if backup.record else None,
            cleansed=backup.record.cleansed if backup.record else None,
        )
