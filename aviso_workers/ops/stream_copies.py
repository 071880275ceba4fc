"""Copies of a stream on another server, cluster or account, compared with the original.

Called by the command `streams copy`; `following_copies` goes on where a copy has ended. It is a backup that is restored
elsewhere: messages keep their sequences and times, consumers their positions. While it is not whole, the copy is fenced
(see `mirrors`), so that no client publishes into it: a message that is stored in it under a sequence of its own could
not be joined with one that the original stores under the same sequence. It gets the subjects of the original when it
was compared, and when the original stores no more, or has stored nothing since.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
from msgspec import Struct, structs

from aviso_workers.backends import Admin
from aviso_workers.errors import BackupError
from aviso_workers.jetstream import metadata
from aviso_workers.jetstream.info import StreamConfig
from aviso_workers.jetstream.metadata import FENCED
from aviso_workers.ops import backups, inventory
from aviso_workers.ops.backups import Drill, Progress, Restored
from aviso_workers.ops.backups.restoration import taken
from aviso_workers.ops.mirrors import COPY_OF, NOWHERE

AT_WORK = ("sources", "republish", "subject_transform")
"""Settings that a copy does not have before it is whole."""
OFF = {"allow_atomic": False, "allow_batched": False, "deny_delete": False, "deny_purge": False, "sealed": False}
NO_LIMITS = {"discard": "old", "discard_new_per_subject": False, "max_bytes": -1, "max_msgs": -1, "max_msg_size": -1}
"""How a copy is configured before it is whole, so that it can be appended to: see `following_copies`. Limits of age and
of messages per subject stay, as they say what becomes of single messages."""
OF_THE_COPY = ("storage", "num_replicas", "placement")
"""Settings that may be otherwise than in the original."""


class Copied(Struct, frozen=True, kw_only=True):
    """The result of copying a stream: the copy, its comparison with the original, and what was stored meanwhile."""

    restored: Restored
    compared: Drill
    meanwhile: int
    """Messages that were stored in the original since, and are not in the copy."""
    subjects: tuple[str, ...]
    """The subjects of the copy now; none where it is fenced, or was made under another name."""
    original_is_fenced: bool

    @property
    def whole(self) -> bool:
        """Whether the copy has everything that the original had when it was compared."""
        return not (self.compared.differences or self.meanwhile)


async def copy(
    source: Admin,
    target: Admin,
    stream: str,
    *,
    name: str | None = None,
    storage: str | None = None,
    replicas: int | None = None,
    keep_fenced: bool = False,
    progress: Progress,
) -> Copied:
    """Copy a stream from where one app is connected to where another one is; see `backups.restore` for the rest.

    With `keep_fenced` it takes publishes only where the original takes none, for `following_copies` to go on. It needs
    space for the stream in the directory for temporary files. Inside of both apps' `async with`. Raises `BackupError`
    and `BackendError`; then there is no stream under the final name, or one that takes no publishes.
    """
    await target.administration().require_readable(name or stream)
    original = await source.stream_info(stream)
    is_moved = name in (None, stream)
    found = await inventory.existing(target.stream_info(stream)) if is_moved else None
    # One whose restore was interrupted is replaced.
    if found and COPY_OF in found.config.metadata and not metadata.is_unfinished(found.config):
        raise BackupError(f"{stream} on the target is an unfinished copy: continue it with --follow, or delete it")
    with tempfile.TemporaryDirectory(prefix="aviso-workers-copy-") as directory:
        backup = await backups.create(source, stream, Path(directory), progress=progress)
        before = await anyio.to_thread.run_sync(backups.verify, backup)
        if before is None:
            raise BackupError(f"{stream} is on a nats-server before 2.15, whose archive cannot be read to compare")
        if is_moved and (other := await taken(target, subjects_of(backup.config), besides=(stream,))):
            raise BackupError(f"{other} of {stream}: delete that stream first")
        restored = await backups.restore(
            target,
            backup,
            name=name,
            config=_held_back(backup.config, created=original.created_text) if is_moved else None,
            storage=storage,
            replicas=replicas,
            progress=progress,
        )
    compared = Drill(backup=before, restored=await backups.read_back(target, restored.stream))
    now = await source.stream_info(stream)
    if now.created_text != original.created_text:
        raise BackupError(f"{stream} was deleted and recreated while it was copied: the copy is of what it was before")
    copied = Copied(
        restored=restored,
        compared=compared,
        meanwhile=now.last_sequence - before.state.last_sequence,
        subjects=(),
        original_is_fenced=is_fenced(now.config),
    )
    if not (is_moved and copied.whole) or (keep_fenced and not copied.original_is_fenced):
        return copied
    return structs.replace(copied, subjects=await release(target, stream, now.config))


async def release(target: Admin, stream: str, original: Mapping[str, Any]) -> tuple[str, ...]:
    """Give a copy the configuration and the subjects of its original, and return the subjects.

    Raises `BackendError`.
    """
    copy_config = (await target.stream_info(stream)).config
    subjects = subjects_of(original)
    config = {key: value for key, value in original.items() if key not in OF_THE_COPY}
    config |= {key: copy_config[key] for key in OF_THE_COPY if key in copy_config}
    config["metadata"] = {
        key: value for key, value in StreamConfig(original).metadata.items() if key not in (FENCED, COPY_OF)
    }
    if subjects:
        config["subjects"] = list(subjects)
    await target.update_stream(config)
    return subjects


def subjects_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the subjects of a stream; of a fenced one, those that it had before."""
    return tuple(StreamConfig(config).metadata[FENCED].split() if is_fenced(config) else StreamConfig(config).subjects)


def is_fenced(config: Mapping[str, Any]) -> bool:
    return FENCED in StreamConfig(config).metadata


def _held_back(config: Mapping[str, Any], *, created: str) -> dict[str, Any]:
    """Return the configuration with which a copy takes no publishes until it is whole; `created` is the original's."""
    held = {key: value for key, value in config.items() if key not in AT_WORK}
    subjects = subjects_of(config)
    if not subjects:
        return held
    metadata = {**StreamConfig(config).metadata, FENCED: " ".join(subjects), COPY_OF: created}
    held["subject_delete_marker_ttl"] = 0  # else it would store markers of its own
    return held | OFF | NO_LIMITS | {"subjects": [f"{NOWHERE}.{StreamConfig(config).name}"], "metadata": metadata}
