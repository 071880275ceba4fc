"""Whether a backup is what it was when it was made: all of it read, and counted."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from aviso_workers.codec import UNREADABLE_JSON
from aviso_workers.errors import BackupError
from aviso_workers.ops.backups import archive, s2
from aviso_workers.ops.backups.s2 import MalformedError, Readable
from aviso_workers.ops.backups.storing import Backup, Progress, damage, ignore, opened

__all__ = ["Contents", "Counted", "read_contents", "verify"]


class Contents(Struct, frozen=True, kw_only=True):
    """What is in an archive."""

    state: Mapping[str, Any]
    """JetStream's state of the stream, as the archive has it."""
    messages: int
    bytes: int
    """As a server counts them."""
    first_sequence: int
    """0 where there are no messages."""
    last_sequence: int
    consumers: Mapping[str, Any]
    """JetStream's state of each: what is delivered, acked and pending."""
    sha256: str
    """Of the messages, with subject, headers, sequence and time."""

    @property
    def missing(self) -> int:
        """Messages that were in the stream when the snapshot began, and were deleted or expired while it was taken."""
        return int(self.state["messages"]) - self.messages


class _Consumer(Struct, frozen=True):
    """The entry of a consumer; its configuration is left out."""

    state: dict[str, Any]


class Counted:
    """A file that tells how much of it was read."""

    def __init__(self, file: Readable, progress: Progress) -> None:
        self._file = file
        self._progress = progress

    def read(self, size: int, /) -> bytes:
        data = self._file.read(size)
        self._progress(len(data))
        return data


def verify(backup: Backup, *, progress: Progress = ignore) -> Contents | None:
    """Read all of a backup and count what is in it; None where a nats-server before 2.15 made the archive, of which
    only checksums can be verified. It takes seconds for a million messages.

    Raises `BackupError` where anything is damaged, missing or too much.
    """
    if found := damage(backup):
        raise BackupError(f"{backup.directory} is damaged: {found}")
    with opened(backup) as file:
        counted = Counted(file, progress)
        if not backup.of_entries:
            for _ in s2.decompressed(counted):
                pass
            return None
        contents = read_contents(counted, in_memory=backup.config.get("storage") == "memory")
    if contradiction := _contradiction(backup, contents):
        raise BackupError(f"{backup.directory} is damaged: {contradiction}")
    return contents


def read_contents(file: Readable, *, in_memory: bool) -> Contents:
    """Return what the archive holds. Raises `MalformedError`."""
    try:
        return _read_contents(file, in_memory=in_memory)
    except UNREADABLE_JSON as error:
        raise MalformedError(f"an entry cannot be read: {error}") from error


def _read_contents(file: Readable, *, in_memory: bool) -> Contents:
    entries = archive.entries(file)
    head = next(entries, None)
    if head is None or head.name != archive.STATE:
        raise MalformedError("it does not begin with the stream's state")
    consumers: dict[str, Any] = {}
    messages = size = first = last = 0
    sha256 = hashlib.sha256()
    for entry in entries:
        if not entry.sequence:
            if messages or not entry.name.startswith(archive.CONSUMERS):
                raise MalformedError(f"it has an unknown entry {entry.name.decode(errors='replace')!r}")
            consumer = msgspec.json.decode(entry.body, type=_Consumer)
            consumers[entry.name.removeprefix(archive.CONSUMERS).decode()] = consumer.state
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
        state=state,
        messages=messages,
        bytes=size,
        first_sequence=first,
        last_sequence=last,
        consumers=consumers,
        sha256=sha256.hexdigest(),
    )


def _contradiction(backup: Backup, found: Contents) -> str:
    """What the archive says of itself that is not so. Of a stream in use, messages may go while it is read."""
    state = found.state
    if len(found.consumers) != state["consumer_count"]:
        return f"it has {len(found.consumers)} consumers of {state['consumer_count']}"
    if found.missing < 0 or found.last_sequence > state["last_seq"]:
        return f"it has {found.messages} messages up to {found.last_sequence}, and says {state['messages']}"
    if not found.missing and found.bytes != state["bytes"]:
        return f"its messages have {found.bytes} bytes of {state['bytes']}"
    if state["last_seq"] < backup.state["last_seq"]:
        return "backup.json is of a later backup"
    return ""
