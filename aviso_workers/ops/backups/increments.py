"""The content of an increment: the messages that the backup before it does not have, and references to all others.

Called by `creation`, `cleanse` and `chains`; pure, entries in and entries out. An increment is an archive of entries
like a server's (`archive`): the stream's state and its consumers as they are now, then the messages by sequence. A
message that the backup before has is not stored again. In its place stands an entry that says from which sequence to
which the backup before is to be read, and how many messages that gives. Other messages of the backup before were gone
from the stream. The last entry is a digest of all messages of the stream, so that a chain that does not give exactly
what the server gave is an error and not a stream.

The whole stream is compared with the backup before, message by message and byte by byte. Reading the stream from the
last sequence on would save the transfer, and would not show what was deleted since, nor a stream that was recreated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from aviso_workers.aviso.codec import UNREADABLE_JSON
from aviso_workers.errors import StreamReplacedError
from aviso_workers.ops.backups import archive
from aviso_workers.ops.backups.archive import ArchiveEntry
from aviso_workers.ops.backups.s2 import MalformedError

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


def encode(now: Iterator[ArchiveEntry], before: Iterator[ArchiveEntry]) -> Iterator[bytes]:
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


def merge(increment: Iterator[ArchiveEntry], before: Iterator[ArchiveEntry]) -> Iterator[ArchiveEntry]:
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
