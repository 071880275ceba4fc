"""Chains: a full backup and the increments after it, read as one, and verified: counted, and compared with its record.

Called by all modules that read the messages of a backup. An increment names the backup before it by its directory,
beside its own, and by its digest, so that a link that is missing, replaced, out of order or changed is an error that
names it. A full backup is a chain of one link. A chain is read link by link at the same time, message by message; no
copy of it is put together in memory or on disk.

An increment is an archive of entries like a server's (`archive`): the stream's state and its consumers as they are now,
then the messages by sequence. A message that the backup before has is not stored again. In its place stands an entry
that says from which sequence to which the backup before is to be read, and how many messages that gives. Other messages
of the backup before were gone from the stream. The last entry is a digest of all messages of the stream, so that a
chain that does not give exactly what the server gave is an error and not a stream.

The whole stream is compared with the backup before, message by message and byte by byte. Reading the stream from the
last sequence on would save the transfer, and would not show what was deleted since, nor a stream that was recreated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from aviso_workers.aviso.codec import UNREADABLE_JSON
from aviso_workers.errors import BackupError, StreamReplacedError
from aviso_workers.jetstream.info import ConsumerState, SnapshotState, StreamConfig
from aviso_workers.ops.backups import archive, encryption, s2
from aviso_workers.ops.backups.archive import ArchiveEntry
from aviso_workers.ops.backups.encryption import Identities
from aviso_workers.ops.backups.s2 import MalformedError, Pieces, Prefetch, Readable, prefetched
from aviso_workers.ops.backups.storage import (
    Backup,
    CountedFile,
    Previous,
    Progress,
    damage,
    find,
    ignore,
    load,
    opened,
    readable,
)

MAX_LINKS = 40
"""The most backups of a chain. The files of all are open while it is read, and every message passes through each."""


PADDING_SECONDS = 1.0
UNCHANGED = b"unchanged"
"""The name of an entry that stands for messages of the backup before."""
DIGEST = b"sha256"
"""The name of the last entry."""

Count = Annotated[int, Meta(ge=1)]


class _Unchanged(Struct, frozen=True):
    """A reference to all messages that the backup before has from one sequence to another."""

    first: Count
    last: Count
    messages: Count


def encode_increment(now: Iterator[ArchiveEntry], before: Iterator[ArchiveEntry]) -> Iterator[bytes]:
    """Yield the archive of an increment, in pieces: the entries of a stream now, with references to those of the backup
    before.

    Raises `StreamReplacedError` where a message is another one than the message of that sequence before.
    """
    yield archive.MAGIC
    earlier = _messages(before)
    old = next(earlier, None)
    digest = hashlib.sha256()
    unchanged: _Unchanged | None = None
    for entry in now:
        if not entry.sequence:
            yield entry.raw
            continue
        digest.update(entry.raw)
        gone = False
        while old and old.sequence < entry.sequence:
            old, gone = next(earlier, None), True
        known = old is not None and old.sequence == entry.sequence
        if unchanged and (gone or not known):
            yield _about(UNCHANGED, msgspec.json.encode(unchanged))
            unchanged = None
        if not known:
            yield entry.raw
            continue
        if old is None or old.raw != entry.raw:
            raise StreamReplacedError(f"message {entry.sequence} is another one than in the backup before")
        first, messages = (unchanged.first, unchanged.messages) if unchanged else (entry.sequence, 0)
        unchanged = _Unchanged(first=first, last=entry.sequence, messages=messages + 1)
        old = next(earlier, None)
    if unchanged:
        yield _about(UNCHANGED, msgspec.json.encode(unchanged))
    yield _about(DIGEST, digest.digest())
    yield archive.END


def merge_increment(increment: Iterator[ArchiveEntry], before: Iterator[ArchiveEntry]) -> Iterator[ArchiveEntry]:
    """Yield the entries of the stream as it was when the increment was made, as a server's archive has them.

    Raises `MalformedError` where the two do not give what the increment was made of.
    """
    earlier = _messages(before)
    digest, expected = hashlib.sha256(), b""
    for entry in increment:
        if expected:
            raise MalformedError("something comes after the digest of its messages")
        if entry.sequence:
            digest.update(entry.raw)
            yield entry
        elif entry.name == UNCHANGED:
            for message in _range(earlier, _unchanged(entry)):
                digest.update(message.raw)
                yield message
        elif entry.name == DIGEST:
            expected = entry.body
        else:
            yield entry
    if digest.digest() != expected:
        raise MalformedError("with the backups before it, it does not give the messages that the stream had")


def _range(earlier: Iterator[ArchiveEntry], wanted: _Unchanged) -> Iterator[ArchiveEntry]:
    found = 0
    for message in earlier:
        if message.sequence < wanted.first:
            continue
        if message.sequence <= wanted.last:
            found += 1
            yield message
        if message.sequence >= wanted.last:
            break
    if found != wanted.messages:
        raise MalformedError(
            f"the backup before it has {found} of its {wanted.messages} messages from {wanted.first} to {wanted.last}"
        )


def _unchanged(entry: ArchiveEntry) -> _Unchanged:
    try:
        return msgspec.json.decode(entry.body, type=_Unchanged)
    except UNREADABLE_JSON as error:
        raise MalformedError(f"an entry cannot be read: {error}") from error


def _messages(entries: Iterator[ArchiveEntry]) -> Iterator[ArchiveEntry]:
    return (entry for entry in entries if entry.sequence)


def _about(name: bytes, data: bytes) -> bytes:
    return archive.encode(name, data, timestamp_ns=0)


def chain(backup: Backup) -> list[Backup]:
    """Return the chain of a backup: a full backup, and the increments up to this one in their order.

    Raises `BackupError`, which names the link that is missing or another one. Archives are not read.
    """
    links, broken = _links(backup)
    if broken:
        raise broken
    return links


def link_to(backup: Backup) -> Previous:
    """Return the link by which an increment names the backup before it, which must be one of ours."""
    assert backup.record is not None
    return Previous(directory=backup.directory.resolve().name, digest=backup.record.digest)


def required(backups: Iterable[Backup]) -> set[Path]:
    """Return the directories of all links of these backups, as far as they can be found."""
    return {link.directory.resolve() for backup in backups for link in _links(backup)[0]}


def family(backup: Backup) -> list[Backup]:
    """Return all backups that are made after the same full one as this, each before those that are made after it, the
    full one first.

    Raises `BackupError` where the chain of any backup beside it is broken, as it might be one of them.
    """
    full = chain(backup)[0]
    if full.record is None:
        return [full]
    place = full.directory.resolve()
    beside = [each for each in find(place.parent, stream=backup.stream) if each.record]
    chains = [links for each in beside if (links := chain(each))[0].directory.resolve() == place]
    return [links[-1] for links in sorted(chains, key=len)]


def restorable(directory: Path, *, stream: str | None = None) -> list[Backup]:
    """Return the backups in a directory, of all streams or of one, whose chains are complete; the oldest first."""
    return [found for found in find(directory, stream=stream) if not _links(found)[1]]


def newest(directory: Path, *, stream: str | None = None) -> datetime | None:
    """Return when the newest restorable backup in a directory was begun, of any stream or of one; None where there is
    none.

    A backup whose time is in the future does not count: a clock was wrong, so its age is not known.
    """
    now = datetime.now(UTC)
    return max((found.made for found in restorable(directory, stream=stream) if found.made <= now), default=None)


def size(backup: Backup) -> int:
    """Return the size in bytes of all archives of a backup's chain, as far as they are found."""
    return sum(link.size for link in _links(backup)[0])


def require_whole(backup: Backup) -> None:
    """Raise `BackupError` where a link is missing or its files are not as they were written. No key is needed."""
    for link in chain(backup):
        if found := damage(link):
            raise BackupError(f"{link.directory} is damaged: {found}")


def require_identities(backup: Backup, identities: Identities | None) -> None:
    """Raise `BackupError` where a link is encrypted and there are no keys."""
    if identities is None and (encrypted := next((link for link in chain(backup) if link.encrypted), None)):
        raise BackupError(f"{encrypted.archive} is encrypted: say which keys open it (--identity FILE)")


@contextmanager
def opened_own_entries(
    backup: Backup, identities: Identities | None, *, progress: Progress = ignore
) -> Iterator[Iterator[ArchiveEntry]]:
    """Open the entries of a backup's own archive. Raises `BackupError`, also while they are read."""
    with _opened_own(backup, identities, progress) as file:
        yield _explained(backup, archive.entries(file))


@contextmanager
def opened_entries(
    backup: Backup, identities: Identities | None, *, progress: Progress = ignore
) -> Iterator[Iterator[ArchiveEntry]]:
    """Open the entries of the stream as it was backed up, from all links of the chain. Raises as
    `opened_own_entries`.
    """
    full, *increments_after = chain(backup)
    with ExitStack() as stack:
        entries = stack.enter_context(opened_own_entries(full, identities, progress=progress))
        for link in increments_after:
            own = stack.enter_context(opened_own_entries(link, identities, progress=progress))
            entries = _explained(link, merge_increment(own, entries))
        yield entries


@contextmanager
def opened_archive(
    backup: Backup, identities: Identities | None, *, progress: Progress = ignore, padded: bool = False
) -> Iterator[Readable]:
    """Open the archive of the stream as a server takes it, from all links of the chain. Raises as
    `opened_own_entries`.

    It may be `padded` for a server that waits while the next message is searched for. A server aborts a restore that
    receives nothing for 5 seconds. It may take longer to read to the next message of a chain, over those that are gone.
    """
    with ExitStack() as stack:
        if backup.previous is None:
            yield stack.enter_context(_opened_own(backup, identities, progress))
            return
        entries = stack.enter_context(opened_entries(backup, identities, progress=progress))
        chunks = s2.written(archive.framed(entries))
        if not padded:
            yield Pieces(chunks)
            return

        def make(put: Callable[[bytes], None]) -> None:
            for chunk in chunks:
                put(chunk)

        yield _Padded(stack.enter_context(prefetched(make)))


class _Padded:
    """An S2 stream with padding between two chunks where the next one takes long."""

    def __init__(self, chunks: Prefetch) -> None:
        self._chunks = chunks
        self._begun = chunks.next()  # the stream's identifier, before which nothing may stand
        """The rest of a chunk, which no padding may interrupt."""

    def read(self, size: int, /) -> bytes:
        if not self._begun:
            try:
                self._begun = self._chunks.next(within_seconds=PADDING_SECONDS)
            except TimeoutError:
                return s2.PADDING
        data, self._begun = self._begun[:size], self._begun[size:]
        return data


def _links(backup: Backup) -> tuple[list[Backup], BackupError | None]:
    """Return the links that were found, and an error where the first of them is not a full backup."""
    links = [backup]
    while previous := links[0].previous:
        if len(links) == MAX_LINKS:
            return links, BackupError(f"{backup.directory} is in a chain of more than {MAX_LINKS} backups")
        place = backup.directory.resolve().parent / previous.directory
        try:
            link = load(place)
        except BackupError as error:
            return links, BackupError(f"{links[0].directory} needs {place}, which cannot be read: {error}")
        if not link.record or previous.digest not in (link.record.digest, *link.record.digests_before):
            return links, BackupError(f"{links[0].directory} was made after another backup than the one in {place}")
        if link.stream != backup.stream:
            return links, BackupError(f"{links[0].directory} is of another stream than {place}, and needs it")
        links.insert(0, link)
    return links, None


@contextmanager
def _opened_own(backup: Backup, identities: Identities | None, progress: Progress) -> Iterator[Readable]:
    with opened(backup) as file:
        if not backup.encrypted:
            yield CountedFile(file, progress)
            return
        require_identities(backup, identities)
        assert identities is not None
        with encryption.decrypted(file, identities) as plain:
            yield CountedFile(plain, progress)


def _explained(backup: Backup, entries: Iterator[ArchiveEntry]) -> Iterator[ArchiveEntry]:
    with readable(backup):
        yield from entries


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
    if identities is None and any(link.encrypted for link in chain(backup)):
        require_whole(backup)
        return None
    with readable(backup), opened_entries(backup, identities, progress=progress) as entries:
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
