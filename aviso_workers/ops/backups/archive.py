"""The archive of a snapshot: its entries, one for each message, each consumer and the stream's state.

Called by `chains`, `cleansing` and `completion`, among others. Both kinds of archives are S2 streams (`s2`). A
nats-server since 2.15 makes a list of entries: the stream's state, its consumers, its messages by sequence, and an
empty entry as the end. Followed: ADR "JetStream Stream Backup and Restore V2". Servers before it pack their own files
into a tar archive; those can be checked for completeness, but not read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, structs

from aviso_workers.aviso.codec import UNREADABLE_JSON
from aviso_workers.aviso.literals import rfc3339
from aviso_workers.jetstream.info import SnapshotState
from aviso_workers.ops.backups import s2
from aviso_workers.ops.backups.s2 import MalformedError, Readable

MAGIC = b"NATSARC1"
STATE = b"state.json"
CONSUMERS = b"consumers/"
"""How the name of a consumer's entry begins."""
TAR_END = bytes(1024)
FIELDS = 5
FIELD_BITS = 63
"""Where the last byte of a number of 64 bits begins."""
LARGEST_ENTRY = 256 * 1024 * 1024
"""No message is larger than 64 MiB, and no consumer's state anywhere near."""


Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class ArchiveEntry(Struct, frozen=True, gc=False):
    """An entry of an archive: a message or, without a sequence, the stream's state or a consumer."""

    name: bytes
    """A message's subject."""
    timestamp_ns: int
    sequence: int
    raw: bytes
    """All of it, as it is in the archive."""
    header_at: int
    """The positions in `raw` at which the message's headers and, below, its body begin."""
    body_at: int

    @property
    def headers(self) -> bytes:
        return self.raw[self.header_at : self.body_at]

    @property
    def body(self) -> bytes:
        return self.raw[self.body_at :]


Takes = Callable[[ArchiveEntry], bool]
"""A function that tells whether a message is to be removed."""


class StreamState(Struct, frozen=True, gc=False):
    """The fields that every stream's state has, in JetStream's words; others are ignored."""

    messages: Count
    bytes: Count
    first_seq: Count
    last_seq: Count
    consumer_count: Count
    last_ts: str


class _ConsumerConfig(Struct, frozen=True):
    durable_name: str = ""
    inactive_threshold: int = 0


class _Delivered(Struct, frozen=True):
    stream_seq: int


class ConsumerProgress(Struct, frozen=True):
    """What is needed here of a consumer's state."""

    delivered: _Delivered
    pending: dict[str, Any] | None = None


class StoredConsumer(Struct, frozen=True):
    """A consumer as its backup has it, in JetStream's words."""

    state: dict[str, Any]
    config: _ConsumerConfig = _ConsumerConfig()

    def __post_init__(self) -> None:
        _ = self.progress  # raises where the state is none

    @property
    def progress(self) -> ConsumerProgress:
        return msgspec.convert(self.state, ConsumerProgress)

    @property
    def is_durable(self) -> bool:
        """Whether the consumer is durable, so that it outlives its readers."""
        return bool(self.config.durable_name)

    @property
    def lasts(self) -> bool:
        """Whether the consumer stays until it is deleted."""
        return self.is_durable and not self.config.inactive_threshold


def consumer(entry: ArchiveEntry) -> tuple[str, StoredConsumer]:
    """Return the name of the consumer in an entry, and the consumer. Raises `MalformedError`."""
    name = entry.name.removeprefix(CONSUMERS)
    try:
        return name.decode(), msgspec.json.decode(entry.body, type=StoredConsumer)
    except UNREADABLE_JSON as error:
        raise MalformedError(f"consumer {name.decode(errors='replace')}: {error}") from error


def has_entries(file: Readable) -> bool:
    """Return whether a file is an archive of entries, and not of files. Raises `MalformedError`."""
    return next(s2.decompressed(file), b"").startswith(MAGIC)


def has_end(file: Readable, *, of_entries: bool) -> bool:
    """Return whether an archive has its end, without parsing its entries. Raises `MalformedError`."""
    last = deque(s2.compressed_blocks(file), maxlen=2)  # an end may begin in the last block but one
    return b"".join(s2.decompress(*block) for block in last).endswith(END if of_entries else TAR_END)


def entries(file: Readable) -> Iterator[ArchiveEntry]:
    """Yield all entries but the end. Raises `MalformedError` also where the end is missing, or anything comes after
    it.
    """
    blocks = s2.decompressed(file)
    buffer = _next(blocks, len(MAGIC))
    if not buffer.startswith(MAGIC):
        raise MalformedError("it is not an archive of messages")
    at = len(MAGIC)
    while True:
        if entry := _entry(buffer, at):
            at += len(entry.raw)
            if entry.raw == END:
                break
            yield entry
        elif more := _next(blocks, len(buffer) - at):
            buffer, at = buffer[at:] + more, 0
        else:
            raise MalformedError("it breaks off before its end")
    if at < len(buffer) or _next(blocks, 1):
        raise MalformedError("something comes after its end")


def _next(blocks: Iterator[bytes], least: int) -> bytes:
    """Return the next blocks joined, `least` bytes or more; empty at the end. As many as are waiting, so that an entry
    in many small blocks is not copied for each of them.
    """
    pieces: list[bytes] = []
    size = 0
    for block in blocks:
        pieces.append(block)
        size += len(block)
        if size >= least and size:
            break
    return b"".join(pieces)


def encode(name: bytes, data: bytes, *, timestamp_ns: int, sequence: int = 0, headers: bytes = b"") -> bytes:
    """Return the bytes of an entry: of a message or, without a sequence, about the stream. `headers` are as on the
    wire.
    """
    time = timestamp_ns << 1 if timestamp_ns >= 0 else ~(timestamp_ns << 1)
    fields = (len(name), time, sequence, len(headers), len(data))
    return b"".join(map(_varint, fields)) + name + headers + data


def with_state(head: ArchiveEntry, state: Mapping[str, Any]) -> ArchiveEntry:
    """Return the first entry of an archive with another state of the stream."""
    return structs.replace(head, raw=encode(head.name, msgspec.json.encode(state), timestamp_ns=head.timestamp_ns))


def framed(entries: Iterator[ArchiveEntry]) -> Iterator[bytes]:
    """Yield an archive of these entries, from its magic to its end."""
    yield MAGIC
    for entry in entries:
        yield entry.raw
    yield END


def state_of(
    before: SnapshotState,
    *,
    messages: int,
    size: int,
    first: tuple[int, int] | None,
    last_sequence: int | None = None,
) -> SnapshotState:
    """Return the state of a stream that has other messages than `before`: `size` in bytes as a server counts them,
    `first` the sequence and the time of the first one in nanoseconds, `last_sequence` where that differs too.
    """
    last = before.last_sequence if last_sequence is None else last_sequence
    first_sequence = first[0] if first else last + 1  # a server checks that an empty stream begins after its end
    counted = {
        "messages": messages,
        "bytes": size,
        "first_seq": first_sequence,
        "last_seq": last,
        "num_deleted": last + 1 - first_sequence - messages,
        "consumer_count": before.consumers,
    }
    times = {"last_ts": before.last_time_text} | ({"first_ts": rfc3339(first[1])} if first else {})
    return SnapshotState(counted | times)


def stored_bytes(entry: ArchiveEntry, *, in_memory: bool) -> int:
    """Return the bytes that a server counts for a message in the state of its stream."""
    size = len(entry.name) + len(entry.raw) - entry.header_at
    if in_memory:
        return size + 16
    return size + 30 + (4 if entry.body_at > entry.header_at else 0)


def _entry(buffer: bytes, at: int) -> ArchiveEntry | None:
    """Return the entry at a position of a buffer; None where it is not complete yet. Raises `MalformedError`."""
    begin, fields = at, [0] * FIELDS
    try:
        for field in range(FIELDS):
            value = shift = 0
            while (byte := buffer[at]) >= 0x80:
                value |= (byte & 0x7F) << shift
                shift += 7
                at += 1
                if shift > FIELD_BITS:
                    raise MalformedError("an entry has a number of more than 64 bits")
            if shift == FIELD_BITS and byte > 1:
                raise MalformedError("an entry has a number of more than 64 bits")
            fields[field] = value | byte << shift
            at += 1
    except IndexError:
        return None
    name_size, time, sequence, header_size, body_size = fields
    header_at = at + name_size
    body_at = header_at + header_size
    end = body_at + body_size
    if end > len(buffer):
        if end - begin > LARGEST_ENTRY:
            raise MalformedError("an entry is larger than any can be")
        return None
    timestamp_ns = time >> 1 ^ -(time & 1)
    return ArchiveEntry(
        buffer[at:header_at], timestamp_ns, sequence, buffer[begin:end], header_at - begin, body_at - begin
    )


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


END = encode(b"", b"", timestamp_ns=0)
