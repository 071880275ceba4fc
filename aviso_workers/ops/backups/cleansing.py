"""Removal of messages from a backup, so that messages erased from a stream do not come back with a restore.

The archive is rewritten without them, entry by entry; sequences and consumers stay as they are. It is written
without compression, so that a cleansed backup may be several times as large. In a chain the newest backup is written
first: it no longer refers to messages that are removed from those before it, which are whole as long as they have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Struct, structs

from aviso_workers.errors import BackupError
from aviso_workers.jetstream.info import SnapshotState, StreamConfig
from aviso_workers.ops.backups import archive, chains, increments, s2
from aviso_workers.ops.backups.archive import ArchiveEntry, Takes
from aviso_workers.ops.backups.encryption import Identities
from aviso_workers.ops.backups.storage import Backup, Draft, Progress, ignore, load, sweep
from aviso_workers.ops.backups.verification import verify


class Cleansed(Struct, frozen=True):
    """A backup that changes, and the stream's state without the removed messages."""

    backup: Backup
    state: SnapshotState


class CleansePlan(Struct, frozen=True, kw_only=True):
    """The plan to cleanse a backup, and all that are made after the same full one."""

    backup: Backup
    removed: Set[tuple[int, int]]
    """The messages that would be removed, as sequence and time in nanoseconds."""
    kept: int
    """The number of messages that the backup has then."""
    changes: Sequence[Cleansed]
    """Each after those that it was made after."""
    identities: Identities | None


def plan_cleanse(
    backup: Backup, takes: Takes, *, identities: Identities | None = None, progress: Progress = ignore
) -> CleansePlan:
    """Return the plan to cleanse a backup. A message is stored in one backup of a chain, and others refer to it, so all
    that are made after the same full one are searched, whichever of them is named.

    Raises `BackupError` where one of them is damaged, or an older server's.
    """
    if not backup.of_entries:
        raise BackupError(f"{backup.archive} was made by a nats-server before 2.15, and cannot be cleansed")
    # What a cleansing that was killed has left still has the messages that are to be removed.
    sweep(backup.directory.resolve().parent)
    family = chains.family(backup)
    for each in family:
        chains.require_identities(each, identities)
        verify(each, identities=identities)
    removed: set[tuple[int, int]] = set()
    for each in family:
        with chains.opened_own_entries(each, identities, progress=progress) as entries:
            removed.update(_identity(entry) for entry in entries if entry.sequence and takes(entry))
    changes, kept = [], 0
    for each in family:
        state, changed = _state_without(each, removed, identities)
        kept = state.messages if each.directory.samefile(backup.directory) else kept
        if changed:
            changes.append(Cleansed(each, state))
    return CleansePlan(backup=backup, removed=removed, kept=kept, changes=changes, identities=identities)


def cleanse(plan: CleansePlan, *, progress: Progress = ignore) -> Backup:
    """Cleanse as planned: the backups are replaced, the newest one first, so that each can be restored at every moment.
    It can be repeated where it was interrupted.

    Raises `BackupError`, and leaves the backup that it was replacing as it was.
    """
    for change in reversed(plan.changes):
        _replace(change, plan, progress)
    return load(plan.backup.directory)


def _replace(change: Cleansed, plan: CleansePlan, progress: Progress) -> None:
    backup, record = change.backup, change.backup.facts
    with ExitStack() as stack:
        draft = stack.enter_context(Draft(backup.directory, encrypt_to=record.encrypted_to))
        entries = stack.enter_context(chains.opened_entries(backup, plan.identities, progress=progress))
        kept = _kept(entries, change.state, plan.removed)
        if backup.previous:
            before = chains.chain(backup)[-2]
            earlier = stack.enter_context(chains.opened_entries(before, plan.identities))
            draft.write_all(s2.written(increments.encode(kept, earlier)))
        else:
            draft.write_all(s2.written(archive.framed(kept)))
        if backup.record:
            record = structs.replace(record, digests_before=(*record.digests_before, record.digest))
        draft.finish(backup.config, change.state, structs.replace(record, cleansed=datetime.now(UTC)))


def _kept(
    entries: Iterator[ArchiveEntry], state: Mapping[str, Any], removed: Set[tuple[int, int]]
) -> Iterator[ArchiveEntry]:
    yield archive.with_state(next(entries), state)
    for entry in entries:
        if not entry.sequence or _identity(entry) not in removed:
            yield entry


def _identity(entry: ArchiveEntry) -> tuple[int, int]:
    return entry.sequence, entry.timestamp_ns


def _state_without(
    backup: Backup, removed: Set[tuple[int, int]], identities: Identities | None
) -> tuple[SnapshotState, bool]:
    """Return the stream's state without these messages, and whether it had any of them."""
    in_memory = StreamConfig(backup.config).storage == "memory"
    kept = size = 0
    first: tuple[int, int] | None = None
    changed = False
    with chains.opened_entries(backup, identities) as entries:
        state = SnapshotState(msgspec.json.decode(next(entries).body))
        for entry in entries:
            if not entry.sequence:
                continue
            if _identity(entry) in removed:
                changed = True
                continue
            first = first or _identity(entry)
            kept += 1
            size += archive.stored_bytes(entry, in_memory=in_memory)
    return archive.state_of(state, messages=kept, size=size, first=first), changed
