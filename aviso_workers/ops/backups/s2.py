"""S2 streams, the compression of nats-servers' snapshots: read, and written without compression.

Called by `archive`. A stream is a sequence of chunks with a type, a length and, where it carries data, a checksum of
what it holds uncompressed. Followed: the framing format of Snappy, and S2's extensions of it
(github.com/klauspost/compress, s2): blocks of up to 4 MiB, and copies that repeat the last offset. The Snappy libraries
of Python read neither, so the reader is ours. It decompresses some 60 to 120 MB a second.

Pieces may be prefetched: one thread makes those that another one takes, with a few pieces in between. That is for
`encryption`, whose library writes where a reader is wanted, and for `chains`, where a server waits for what may take
long to find.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from threading import Event, Thread
from typing import Protocol

import google_crc32c

IDENTIFIER = b"\xff\x06\x00\x00S2sTwO"
COMPRESSED, UNCOMPRESSED = 0x00, 0x01
SKIPPABLE = range(0x80, 0x100)
"""Padding, an index, the identifier of another stream."""
LARGEST_BLOCK = 4 * 1024 * 1024
LARGEST_CHUNK = LARGEST_BLOCK + 64 * 1024
"""Bytes of a chunk: those of a block, its checksum, and how much a block grows that cannot be compressed."""
SIZE_BITS = 28
"""Where the last byte of a block's size begins, at most."""
WRITTEN_BLOCK = 64 * 1024
"""The largest that Snappy's readers take as well."""
PADDING = b"\xfe\x04\x00\x00" + bytes(4)
"""A chunk that readers pass over. It may stand between any two."""
PIECES_WAITING = 8


class MalformedError(ValueError):
    """The bytes are not an S2 stream, or an incomplete or a changed one."""


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Pieces:
    """A file-like reader of pieces that come one after another."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._buffer = bytearray()

    def read(self, size: int, /) -> bytes:
        """Return `size` bytes, fewer at the end only. Raises what the pieces raise."""
        while len(self._buffer) < size and (piece := next(self._pieces, None)) is not None:
            self._buffer += piece
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data


def compressed_blocks(file: Readable) -> Iterator[tuple[int, bytes]]:
    """Yield the chunks that carry data, each as its type, and its checksum and data as they are in the file.

    Raises `MalformedError`.
    """
    if file.read(len(IDENTIFIER)) != IDENTIFIER:
        raise MalformedError("it is not an S2 stream")
    while head := file.read(4):
        kind, size = head[0], int.from_bytes(head[1:], "little")
        if kind not in SKIPPABLE and size > LARGEST_CHUNK:
            raise MalformedError("a block is larger than any can be")
        chunk = file.read(size)
        if len(head) < 4 or len(chunk) < size:
            raise MalformedError("it breaks off within a chunk")
        if kind in (COMPRESSED, UNCOMPRESSED):
            yield kind, chunk
        elif kind not in SKIPPABLE:
            raise MalformedError(f"it has a chunk of an unknown type, {kind:#x}")


def decompress(kind: int, chunk: bytes) -> bytes:
    """Return the data of one of the `compressed_blocks`. Raises `MalformedError` where its checksum differs."""
    try:
        block = chunk[4:] if kind == UNCOMPRESSED else _decompress(chunk[4:])
    except IndexError as error:
        raise MalformedError("a block breaks off") from error
    if _checksum(block) != chunk[:4]:
        raise MalformedError("a block does not have its checksum")
    return block


def decompressed(file: Readable) -> Iterator[bytes]:
    """Yield the data of a stream, block by block. Raises `MalformedError`."""
    for kind, chunk in compressed_blocks(file):
        yield decompress(kind, chunk)


def written(data: Iterable[bytes]) -> Iterator[bytes]:
    """Yield an S2 stream of the data, not compressed, in blocks of 64 KiB."""
    yield IDENTIFIER
    waiting = bytearray()
    for piece in chain(data, (None,)):
        waiting += piece or b""
        while len(waiting) >= WRITTEN_BLOCK or (piece is None and waiting):
            block = bytes(waiting[:WRITTEN_BLOCK])
            del waiting[:WRITTEN_BLOCK]
            yield bytes((UNCOMPRESSED,)) + (len(block) + 4).to_bytes(3, "little") + _checksum(block) + block


def _checksum(block: bytes) -> bytes:
    """Return the masked CRC-32C of a block, little-endian, as the format has it."""
    crc: int = google_crc32c.value(block)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF).to_bytes(4, "little")


def _size(block: bytes) -> tuple[int, int]:
    """Return the uncompressed size of a block in bytes, and the position of its first tag."""
    size = shift = at = 0
    while (byte := block[at]) >= 0x80:
        size |= (byte & 0x7F) << shift
        shift += 7
        at += 1
        if shift > SIZE_BITS:
            raise MalformedError("a block has no size")
    size |= byte << shift
    if size > LARGEST_BLOCK:
        raise MalformedError("a block is larger than any can be")
    return size, at + 1


def _long_repeat(block: bytes, at: int, width: int, *, most: int) -> int:
    """Return the length of a copy from the last offset that stands behind its tag, in `width` bytes."""
    length = int.from_bytes(block[at : at + width], "little") + (8, 260, 65540)[width - 1]
    if length > most:
        raise MalformedError("a block holds more than it says")
    return length


def _decompress(block: bytes) -> bytes:
    """Return a block decompressed from its literals and copies; the two low bits of a tag tell which of them it is.

    All in one function, because it turns once for every few bytes. What is not checked here the checksum finds.
    """
    size, at = _size(block)
    out, offset, done, end = bytearray(), 0, 0, len(block)
    while at < end:
        tag = block[at]
        kind = tag & 3
        if kind == 0:
            at += 1
            if tag < 60 << 2:
                length = (tag >> 2) + 1
            else:
                width = (tag >> 2) - 59
                length = int.from_bytes(block[at : at + width], "little") + 1
                at += width
            out += block[at : at + length]
            at += length
            done += length
            continue
        if kind == 1:
            length = tag >> 2 & 7
            if new := (tag & 0xE0) << 3 | block[at + 1]:
                offset = new
                length += 4
                at += 2
            elif length < 5:  # no offset: S2 repeats the last one, with lengths of its own
                length += 4
                at += 2
            else:
                width = length - 4
                length = _long_repeat(block, at + 2, width, most=size - done)
                at += 2 + width
        elif kind == 2:
            length = (tag >> 2) + 1
            offset = block[at + 1] | block[at + 2] << 8
            at += 3
        else:
            length = (tag >> 2) + 1
            offset = int.from_bytes(block[at + 1 : at + 5], "little")
            at += 5
        start = done - offset
        if length <= offset:
            out += out[start : start + length]
        else:  # it reads what it writes; without an offset, that is nothing
            out += (out[start:] * (length // (offset or 1) + 1))[:length]
        done += length
    if len(out) != size:
        raise MalformedError("a block does not have its size")
    return bytes(out)


class NotReadError(Exception):
    """The reader does not take pieces any more."""


class Prefetch:
    def __init__(self) -> None:
        self._waiting: queue.Queue[bytes | Exception] = queue.Queue(maxsize=PIECES_WAITING)
        self._closed = Event()

    def put(self, piece: bytes) -> None:
        """Add a piece, and wait while there are enough. Raises `NotReadError` where the reader is closed."""
        if self._closed.is_set():
            raise NotReadError
        self._waiting.put(piece)

    def next(self, *, within_seconds: float | None = None) -> bytes:
        """Return the next piece, which is never empty; b"" at the end. Raises what `make` raised, and
        `TimeoutError`.
        """
        try:
            piece = self._waiting.get(timeout=within_seconds)
        except queue.Empty as error:
            raise TimeoutError from error
        if isinstance(piece, Exception):
            raise piece
        return piece

    def run(self, make: Callable[[Callable[[bytes], None]], None]) -> None:
        """Call `make` with the function that adds pieces, then add the end. An exception is passed to the reader."""
        try:
            make(self.put)
            self.put(b"")
        except NotReadError:
            pass
        except Exception as error:
            self._waiting.put(error)

    def close(self) -> None:
        self._closed.set()
        with suppress(queue.Empty):
            while True:  # so that a `put` that waits for space returns
                self._waiting.get_nowait()


@contextmanager
def prefetched(make: Callable[[Callable[[bytes], None]], None]) -> Iterator[Prefetch]:
    """Run `make` in a thread of its own, and give the reader of its pieces. The thread has ended when the block is
    left.
    """
    prefetch = Prefetch()
    thread = Thread(target=prefetch.run, args=(make,), name="reading a backup", daemon=True)
    thread.start()
    try:
        yield prefetch
    finally:
        prefetch.close()
        thread.join()
