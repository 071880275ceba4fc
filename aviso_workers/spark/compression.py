"""Decompression of what Spark compresses, piece by piece, as a file grows.

Called by the reader of event logs. Each codec of Spark's has a form of its own:

* zstd: frames, one after the other. Spark ends one at every flush;
* lz4: the blocks of lz4-java's `LZ4BlockOutputStream`, which are not the frames of the LZ4 standard;
* snappy: the blocks of snappy-java's `SnappyOutputStream`, which are not Snappy's framing format.

The last frame or block may still be growing. The checksums of lz4's blocks are not compared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Any, ClassVar, Protocol

from aviso_workers.errors import UndecodableError
from aviso_workers.spark import FOR_EVENT_LOGS

try:
    import zstandard
except ImportError as error:
    raise ImportError(f"reading Spark's event logs needs zstandard: {FOR_EVENT_LOGS}") from error

MAGIC_BYTES = 8
"""The number of bytes that show how a file is compressed."""
BLOCK_BYTES = 32 << 20
"""The largest block that lz4-java writes; snappy-java's are no larger."""

LZ4_MAGIC = b"LZ4Block"
LZ4_HEADER = Struct("<8sBiii")
"""Magic, method and level, size of the block, its size decompressed, checksum."""
LZ4_METHOD = 0xF0
LZ4_STORED = 0x10
LZ4_COMPRESSED = 0x20

SNAPPY_MAGIC = b"\x82SNAPPY\0"
SNAPPY_HEADER_BYTES = 16
"""Magic and two versions."""
SNAPPY_SIZE = Struct(">i")


class Decompressor(Protocol):
    """A decompressor for one file that may still be growing."""

    @property
    def open(self) -> bool:
        """Whether the last frame or block has begun and not ended."""

    def decompress(self, data: bytes) -> Iterator[bytes]:
        """Yield what the next bytes of the file decompress to. Raises `UndecodableError` after the last good piece."""


class _ZstdFrames:
    def __init__(self) -> None:
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame: zstandard.ZstdDecompressionObj | None = None

    @property
    def open(self) -> bool:
        return self._frame is not None and not self._frame.eof

    def decompress(self, data: bytes) -> Iterator[bytes]:
        while data:
            if not self.open:
                self._frame = self._decompressor.decompressobj()
            assert self._frame is not None
            try:
                yield self._frame.decompress(data)
            except zstandard.ZstdError as error:
                raise UndecodableError(f"damaged: {error}") from error
            data = self._frame.unused_data


class _Blocks(ABC):
    """A decompressor for codecs of blocks, each of which is decompressed when it is complete."""

    _name: ClassVar[str]
    """Arrow's name of the codec."""

    def __init__(self) -> None:
        try:
            import pyarrow  # slow to import, and needed for these codecs only
        except ImportError as error:
            raise ImportError(f"reading {self._name} needs pyarrow: {FOR_EVENT_LOGS}") from error
        self._codec: Any = pyarrow.Codec(self._name)
        self._pending = bytearray()

    @property
    def open(self) -> bool:
        return bool(self._pending)

    def decompress(self, data: bytes) -> Iterator[bytes]:
        self._pending += data
        while (block := self._next()) is not None:
            yield block

    @abstractmethod
    def _next(self) -> bytes | None:
        """Return the next block, decompressed; None where it is not complete."""

    def _take(self, size: int) -> bytes:
        taken = bytes(self._pending[:size])
        del self._pending[:size]
        return taken

    def _decompressed(self, block: bytes, size: int) -> bytes:
        try:
            return bytes(self._codec.decompress(block, decompressed_size=size, asbytes=True))
        except (OSError, ValueError) as error:  # Arrow's errors are these
            raise UndecodableError(f"damaged: {error}") from error


class _Lz4Blocks(_Blocks):
    _name = "lz4_raw"

    def _next(self) -> bytes | None:
        if not LZ4_MAGIC.startswith(self._pending[: len(LZ4_MAGIC)]):
            raise UndecodableError("damaged: no block of lz4 where one should begin")
        if len(self._pending) < LZ4_HEADER.size:
            return None
        _, token, size, decompressed_size, _ = LZ4_HEADER.unpack_from(self._pending)
        if not (0 <= size <= decompressed_size <= BLOCK_BYTES):
            raise UndecodableError(f"damaged: a block of {size} bytes that were {decompressed_size}")
        if len(self._pending) < LZ4_HEADER.size + size:
            return None
        self._take(LZ4_HEADER.size)
        block = self._take(size)
        if token & LZ4_METHOD == LZ4_COMPRESSED:
            return self._decompressed(block, decompressed_size)
        if token & LZ4_METHOD != LZ4_STORED or size != decompressed_size:
            raise UndecodableError(f"damaged: a block of {size} bytes that is neither stored nor compressed")
        return block  # an empty one marks the end


class _SnappyBlocks(_Blocks):
    _name = "snappy"
    _begun = False

    def _next(self) -> bytes | None:
        if not self._begun or self._pending[:1] == SNAPPY_MAGIC[:1]:  # no size of a block begins so
            if not SNAPPY_MAGIC.startswith(self._pending[: len(SNAPPY_MAGIC)]):
                raise UndecodableError("damaged: does not begin as a file of snappy")
            if len(self._pending) < SNAPPY_HEADER_BYTES:
                return None
            self._take(SNAPPY_HEADER_BYTES)
            self._begun = True
        if len(self._pending) < SNAPPY_SIZE.size:
            return None
        (size,) = SNAPPY_SIZE.unpack_from(self._pending)
        if not 0 < size <= BLOCK_BYTES:
            raise UndecodableError(f"damaged: a block of {size} bytes")
        if len(self._pending) < SNAPPY_SIZE.size + size:
            return None
        self._take(SNAPPY_SIZE.size)
        block = self._take(size)
        return self._decompressed(block, _snappy_decompressed_size(block))


def _snappy_decompressed_size(block: bytes) -> int:
    """Return the decompressed size, in bytes, that a snappy block begins with, seven bits to a byte."""
    size = 0
    for place, byte in enumerate(block[:5]):
        size |= (byte & 0x7F) << (7 * place)
        if byte < 0x80 and size <= BLOCK_BYTES:
            return size
    raise UndecodableError("damaged: a block does not state its size")


CODECS: dict[str, Callable[[], Decompressor]] = {"zstd": _ZstdFrames, "lz4": _Lz4Blocks, "snappy": _SnappyBlocks}
"""What can be decompressed, by Spark's names, which files end with."""
MAGICS = {b"\x28\xb5\x2f\xfd": "zstd", LZ4_MAGIC: "lz4", SNAPPY_MAGIC: "snappy"}


def by_name(codec: str) -> Decompressor | None:
    """Return the decompressor for a codec by the suffix of a file name; None where the file is not compressed."""
    return CODECS[codec]() if codec else None


def by_content(head: bytes) -> Decompressor | None:
    """Return the decompressor for a file by its first `MAGIC_BYTES`; None where the file is not compressed."""
    return next((CODECS[codec]() for magic, codec in MAGICS.items() if head.startswith(magic)), None)
