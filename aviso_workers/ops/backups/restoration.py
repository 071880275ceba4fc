"""Restoration of streams from backups: in place of the original, beside it under another name, and for a drill;
and the merging of a chain into one full backup.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
import anyio.to_thread
from msgspec import Struct, structs

from aviso_workers.backends import Admin
from aviso_workers.errors import BackupError
from aviso_workers.jetstream import metadata, specs
from aviso_workers.jetstream.info import SnapshotState, StreamConfig, StreamInfo
from aviso_workers.jetstream.specs import LONGEST_NAME
from aviso_workers.ops import inventory
from aviso_workers.ops.backups import archive, chains, completion
from aviso_workers.ops.backups.archive import StoredConsumer
from aviso_workers.ops.backups.chains import Contents, read_contents, verify
from aviso_workers.ops.backups.encryption import Identities
from aviso_workers.ops.backups.s2 import Pieces
from aviso_workers.ops.backups.storage import Backup, Draft, Progress, ignore, place_of, readable, understood

ENTRIES_SINCE = (2, 15)
AT_WORK = ("mirror", "sources", "republish", "subject_transform")
"""Settings that a copy of a stream does not have, so that nothing changes it, and it changes nothing."""
SCRATCH = "AVISO_DRILL_"
CONSUMERS_SECONDS = 30.0
"""A cluster makes a stream's consumers, and elects their leaders, a moment after the stream."""
POLL_SECONDS = 0.1
STANDSTILL_SECONDS = 6.0
"""A server aborts a restore that received nothing for 5 s."""
PIECE_BYTES = 512 * 1024


class Restored(Struct, frozen=True, kw_only=True):
    stream: str
    state: SnapshotState
    """JetStream's state of the stream now."""
    messages_before: int
    """How many messages the stream had when it was backed up. A restore leaves out those that are too old by now for
    its limits."""


class Drill(Struct, frozen=True, kw_only=True):
    """A comparison of a backup with a stream that was restored from it and read back."""

    backup: Contents
    restored: Contents

    @property
    def differences(self) -> list[str]:
        """Sentences on the differences; none where the restored stream is the same, with all messages and consumers."""
        found = [
            f"{field}: {before} in the backup, {after} restored"
            for field in ("messages", "first_sequence", "last_sequence", "sha256")
            if (before := getattr(self.backup, field)) != (after := getattr(self.restored, field))
        ]
        consumers = sorted(self.backup.consumers.keys() | self.restored.consumers.keys())
        return found + [
            f"consumer {name}: not as it was"
            for name in consumers
            if self.backup.consumers.get(name) != self.restored.consumers.get(name)
        ]


async def restore(
    admin: Admin,
    backup: Backup,
    *,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    storage: str | None = None,
    replicas: int | None = None,
    identities: Identities | None = None,
    progress: Progress = ignore,
) -> Restored:
    """Restore the stream of a backup with its messages, sequences and consumers; that of an increment from its chain.

    Under another `name` it is a copy for inspection: it has none of the original's subjects, mirrors or sources.
    A `config` takes the place of the one that the backup has; `storage` is `file` or `memory`. Inside of
    `async with app:`. Raises `BackupError` where the backup is damaged or there is such a stream, `RefusedError` where
    the server is older than the backup's format needs, `BackendError`. Nothing is touched then, and what was begun is
    removed. If this process is killed meanwhile, the stream stays half-made: marked, without subjects, and replaced by
    the next `restore`.
    """
    require_name(name)
    stream = name or backup.stream
    wanted = dict(config or backup.config) if stream == backup.stream else _standing_still(backup.config, stream)
    changes = {"storage": storage, "num_replicas": replicas}
    wanted |= {field: value for field, value in changes.items() if value is not None}
    await require_restorable(admin, backup, wanted, identities)
    await _require_free(admin, wanted)
    made = await upload(admin, backup, wanted, identities, progress)
    return Restored(stream=stream, state=made.state, messages_before=backup.state.messages)


async def drill(
    admin: Admin, backup: Backup, *, identities: Identities | None = None, progress: Progress = ignore
) -> Drill:
    """Restore a backup into a stream of its own, read that back, compare the two, and delete it.

    It takes as much space on the server as the original, and for a while as much here as the backup. Raises as
    `restore` does, and `BackupError` for the archive of a nats-server before 2.15, which cannot be read here.
    """
    _require_reader(admin, backup)
    chains.require_identities(backup, identities)
    before = await anyio.to_thread.run_sync(lambda: verify(backup, identities=identities))
    if before is None:
        raise BackupError(f"{backup.archive} was made by a nats-server before 2.15, and cannot be read here to compare")
    scratch = SCRATCH + uuid4().hex[:8].upper()
    config = _standing_still(backup.config, scratch) | {"max_age": 0, "num_replicas": 1, "sealed": False}
    config.pop("placement", None)
    await upload(admin, backup, config, identities, progress)
    try:
        after = await read_back(admin, scratch)
    finally:
        with anyio.CancelScope(shield=True):
            await admin.delete_stream(scratch)
    return Drill(backup=before, restored=after)


def require_name(name: str | None) -> None:
    """Raise `BackupError` for a name that no stream can have."""
    if name is not None and not specs.is_name(name):
        raise BackupError(
            f"{name!r} is not a name of a stream: it has 1 to {LONGEST_NAME} characters, none of them a blank, "
            "a dot, a star, '>', a slash or a backslash"
        )


async def require_restorable(
    admin: Admin, backup: Backup, config: Mapping[str, Any], identities: Identities | None
) -> None:
    """Raise `BackupError` where a backup is damaged or cannot be restored with this configuration, `RefusedError` where
    the server is older than its format needs, `UnreadableStreamError` where it cannot read a stream that it has.
    """
    await admin.administration().require_readable(config["name"])
    if not backup.of_entries and (config["name"], StreamConfig(config).storage) != (
        backup.stream,
        StreamConfig(backup.config).storage,
    ):
        raise BackupError(
            f"{backup.archive} was made by a nats-server before 2.15, so its name and storage cannot be changed"
        )
    _require_reader(admin, backup)
    chains.require_identities(backup, identities)
    # Nothing less than a verification would find a flipped bit in a backup of another program.
    await anyio.to_thread.run_sync(chains.require_whole if backup.record else verify, backup)


def _require_reader(admin: Admin, backup: Backup) -> None:
    if backup.of_entries:
        admin.connection.require_server(*ENTRIES_SINCE, to=f"restore {backup.directory}")


async def _require_free(admin: Admin, config: Mapping[str, Any]) -> None:
    """Raise `BackupError` where the name or a subject is taken. The rest of an interrupted restore is removed."""
    name = config["name"]
    if found := await inventory.existing(admin.stream_info(name)):
        if not metadata.is_unfinished(found.config):
            raise BackupError(
                f"stream {name} exists, with {found.messages} messages: "
                "restore under another name (--as NAME), or delete that stream first"
            )
        if metadata.is_of_set(found.config):
            raise BackupError(
                f"stream {name} belongs to a set that is not completely restored: run `backup restore --all` again"
            )
        await anyio.sleep(STANDSTILL_SECONDS)
        if (await admin.stream_info(name)).last_sequence != found.last_sequence:
            raise BackupError(f"stream {name} is being restored by another command")
        await admin.delete_stream(name)
    if other := await taken(admin, StreamConfig(config).subjects):
        raise BackupError(
            f"{other} of {name}: restore under another name (--as NAME), which takes none, or delete that stream first"
        )


async def taken(admin: Admin, subjects: Iterable[str], *, besides: Container[str] = ()) -> str:
    """Return the first part of a sentence on another stream that has one of the subjects; empty where there is none.

    Raises `BackendError`.
    """
    for subject in subjects:
        if others := [name for name in await admin.stream_names(subject=subject) if name not in besides]:
            return f"stream {others[0]} has the subjects {subject}"
    return ""


async def upload(
    admin: Admin,
    backup: Backup,
    config: Mapping[str, Any],
    identities: Identities | None,
    progress: Progress,
    *,
    stays_unfinished: bool = False,
) -> StreamInfo:
    """Send a backup to a server that has no such stream, and return the info of the restored stream.

    Where it `stays_unfinished`, it keeps its mark and has no subjects. Raises as `Administration.restore` does.
    """
    with chains.opened_archive(backup, identities, progress=progress, padded=True) as file:

        async def read(size: int) -> bytes:
            return await anyio.to_thread.run_sync(file.read, size)

        await admin.administration().restore(config, backup.state, read=read, stays_unfinished=stays_unfinished)
    await _wait_for_consumers(admin, config["name"], backup, identities)
    return await admin.stream_info(config["name"])


async def _wait_for_consumers(admin: Admin, stream: str, backup: Backup, identities: Identities | None) -> None:
    """Wait until the server lists all consumers of the backup that stay until they are deleted.

    Raises `BackupError` where it does not: then it is not known whether they exist.
    """
    stored = await anyio.to_thread.run_sync(consumers_in, backup, identities)
    lasting = {name for name, each in stored.items() if each.lasts}
    deadline = anyio.current_time() + CONSUMERS_SECONDS
    while missing := lasting - {each.name for each in await admin.consumers(stream)}:
        if anyio.current_time() > deadline:
            raise BackupError(
                f"stream {stream} is restored, but not proven to have its consumers {', '.join(sorted(missing))}: the "
                f"servers have not listed them for {CONSUMERS_SECONDS:.0f} s. Check with `aviso-workers streams "
                "show` before workers start; where they are missing, delete the stream and restore it again"
            )
        await anyio.sleep(POLL_SECONDS)


async def read_back(admin: Admin, stream: str) -> Contents:
    """Return the contents of a stream, as a backup of it would have them. No backup is made, and nothing is written to
    a disk.

    Raises `BackendError`, and `BackupError` where what the server sends cannot be read.
    """
    async with admin.administration().snapshot(stream) as snapshot, aclosing(snapshot.chunks) as chunks:
        in_memory = snapshot.config.storage == "memory"
        entries = archive.entries(Pieces(completion.arriving(chunks)))
        with understood(f"the server's archive of {stream} cannot be read"):
            return await anyio.to_thread.run_sync(lambda: read_contents(entries, in_memory=in_memory))


def _standing_still(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in AT_WORK} | {"name": name, "subjects": [name]}


def consumers_in(backup: Backup, identities: Identities | None) -> Mapping[str, StoredConsumer]:
    """Return the consumers in a backup by name; none for the archive of a server before 2.15, which cannot be read
    here.

    Raises `BackupError`.
    """
    if not backup.of_entries:
        return {}
    with readable(backup), chains.opened_entries(backup, identities) as entries:
        of_stream = takewhile(lambda entry: not entry.sequence, entries)
        return dict(archive.consumer(entry) for entry in of_stream if entry.name.startswith(archive.CONSUMERS))


def merge(
    backup: Backup,
    to: Path,
    *,
    encrypt_to: Sequence[str] = (),
    identities: Identities | None = None,
    progress: Progress = ignore,
) -> Backup:
    """Write the merged chain of a backup as a full backup into `<to>/<stream>/<time>`, such as the nats CLI
    restores, with other encryption or without.

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
        record = structs.replace(backup.facts, previous=None, digests_before=())
        return draft.finish(backup.config, backup.state, record)
