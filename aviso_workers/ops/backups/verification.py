"""Verification of a backup: all of it is read, counted and compared with what it says of itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import msgspec
from msgspec import Struct

from aviso_workers.aviso.codec import UNREADABLE_JSON
from aviso_workers.errors import BackupError
from aviso_workers.jetstream.info import ConsumerState, SnapshotState, StreamConfig
from aviso_workers.ops.backups import archive, chains, s2
from aviso_workers.ops.backups.archive import ArchiveEntry
from aviso_workers.ops.backups.encryption import Identities
from aviso_workers.ops.backups.s2 import MalformedError
from aviso_workers.ops.backups.storage import Backup, CountedFile, Progress, damage, ignore, opened, readable


class Contents(Struct, frozen=True, kw_only=True):
    """The contents of an archive, counted."""

    state: SnapshotState
    """JetStream's state of the stream, as the archive has it."""
    messages: int
    bytes: int
    """The bytes of the messages, as a server counts them."""
    first_sequence: int
    """0 where there are no messages."""
    last_sequence: int
    consumers: Mapping[str, ConsumerState]
    """JetStream's state of each consumer: what is delivered, acked and pending."""
    sha256: str
    """The digest of the messages, with subject, headers, sequence and time."""

    @property
    def missing(self) -> int:
        """The number of messages that were in the stream when the snapshot began, and were deleted or expired while it
        was taken.
        """
        return self.state.messages - self.messages


def verify(backup: Backup, *, identities: Identities | None = None, progress: Progress = ignore) -> Contents | None:
    """Read all of a backup and return what is in it; with the backups before it, where it is an increment. It takes
    seconds for a million messages.

    None where only the files can be verified: against their digests, and the links of a chain against each other. That
    is so where a nats-server before 2.15 made the archive, and where it is encrypted and there are no identities.
    Raises `BackupError` where anything is damaged, missing or too much.
    """
    if found := damage(backup):
        raise BackupError(f"{backup.directory} is damaged: {found}")
    if not backup.of_entries:
        with opened(backup) as file:
            for _ in s2.decompressed(CountedFile(file, progress)):
                pass
        return None
    if identities is None and any(link.encrypted for link in chains.chain(backup)):
        chains.require_whole(backup)
        return None
    with readable(backup), chains.opened_entries(backup, identities, progress=progress) as entries:
        contents = read_contents(entries, in_memory=StreamConfig(backup.config).storage == "memory")
    if contradiction := _contradiction(backup, contents):
        raise BackupError(f"{backup.directory} is damaged: {contradiction}")
    return contents


def read_contents(entries: Iterator[ArchiveEntry], *, in_memory: bool) -> Contents:
    """Return the contents of an archive of these entries. Raises `MalformedError`."""
    try:
        return _read_contents(entries, in_memory=in_memory)
    except UNREADABLE_JSON as error:
        raise MalformedError(f"an entry cannot be read: {error}") from error


def _read_contents(entries: Iterator[ArchiveEntry], *, in_memory: bool) -> Contents:
    head = next(entries, None)
    if head is None or head.name != archive.STATE:
        raise MalformedError("it does not begin with the stream's state")
    consumers: dict[str, ConsumerState] = {}
    messages = size = first = last = 0
    sha256 = hashlib.sha256()
    for entry in entries:
        if not entry.sequence:
            if messages or not entry.name.startswith(archive.CONSUMERS):
                raise MalformedError(f"it has an unknown entry {entry.name.decode(errors='replace')!r}")
            name, consumer = archive.consumer(entry)
            consumers[name] = ConsumerState(consumer.state)
            continue
        entry.name.decode()  # a subject is text
        if entry.sequence <= last:
            raise MalformedError(f"message {entry.sequence} comes after message {last}")
        first, last = first or entry.sequence, entry.sequence
        messages += 1
        size += archive.stored_bytes(entry, in_memory=in_memory)
        sha256.update(entry.raw)
    state = msgspec.json.decode(head.body)
    msgspec.convert(state, archive.StreamState)
    return Contents(
        state=SnapshotState(state),
        messages=messages,
        bytes=size,
        first_sequence=first,
        last_sequence=last,
        consumers=consumers,
        sha256=sha256.hexdigest(),
    )


def _contradiction(backup: Backup, found: Contents) -> str:
    """Return a contradiction between an archive and its state; empty where there is none. Of a stream in use, messages
    may be deleted while it is read.
    """
    state = found.state
    if len(found.consumers) != state.consumers:
        return f"it has {len(found.consumers)} consumers of {state.consumers}"
    if found.missing < 0 or found.last_sequence > state.last_sequence:
        return f"it has {found.messages} messages up to {found.last_sequence}, and says {state.messages}"
    if not found.missing and found.bytes != state.bytes:
        return f"its messages have {found.bytes} bytes of {state.bytes}"
    if state.last_sequence < backup.state.last_sequence:
        return "backup.json is of a later backup"
    return ""
