"""S2 streams and the entries in them, byte by byte, without a server."""

from __future__ import annotations

import io
from pathlib import Path

import google_crc32c
import hypothesis
import hypothesis.strategies as some
import pytest

from aviso_workers.ops.backups import archive, s2
from aviso_workers.ops.backups.s2 import MalformedError

DATA = Path(__file__).parents[2] / "data" / "backups"
HELLO = b"hello world, "


def masked(data: bytes) -> bytes:
    crc: int = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8 & 0xFFFFFFFF).to_bytes(4, "little")


def chunk(kind: int, body: bytes) -> bytes:
    return bytes((kind,)) + len(body).to_bytes(3, "little") + body


def compressed(block: bytes, *, holding: bytes) -> bytes:
    """A stream of one block, with the checksum of what it is to hold."""
    size = len(holding)
    length = bytes((size,)) if size < 128 else bytes((size & 127 | 128, size >> 7)) if size < 1 << 14 else b""
    length = length or bytes((size & 127 | 128, size >> 7 & 127 | 128, size >> 14))
    return s2.IDENTIFIER + chunk(0, masked(holding) + length + block)


def read(stream: bytes) -> bytes:
    return b"".join(s2.decompressed(io.BytesIO(stream)))


LITERAL = bytes(((len(HELLO) - 1) << 2,)) + HELLO


@pytest.mark.parametrize(
    ("block", "holding"),
    [
        (LITERAL, HELLO),
        (bytes((60 << 2, 99)) + b"x" * 100, b"x" * 100),
        (bytes((61 << 2, 0xE7, 3)) + b"x" * 1000, b"x" * 1000),
        (LITERAL + bytes((0b000_001_01, 13)), HELLO + HELLO[:5]),
        (LITERAL + bytes((9 << 2 | 2, 13, 0)), HELLO + HELLO[:10]),
        (LITERAL + bytes((9 << 2 | 3, 13, 0, 0, 0)), HELLO + HELLO[:10]),
        (LITERAL + bytes((29 << 2 | 2, 13, 0)), (HELLO * 4)[:43]),
        (bytes((0,)) + b"x" + bytes((63 << 2 | 2, 1, 0)), b"x" * 65),
        (LITERAL + bytes((9 << 2 | 2, 13, 0, 0b000_010_01, 0)), (HELLO * 3)[:29]),
        (LITERAL + bytes((9 << 2 | 2, 13, 0, 0b000_101_01, 0, 2)), (HELLO * 3)[:33]),
        (LITERAL + bytes((9 << 2 | 2, 13, 0, 0b000_110_01, 0, 0, 1)), (HELLO * 50)[:539]),
        (LITERAL + bytes((9 << 2 | 2, 13, 0, 0b000_111_01, 0, 0, 0, 0)), (HELLO * 6000)[:65563]),
    ],
    ids=[
        "literal",
        "literal of one byte's length",
        "literal of two bytes' length",
        "short copy",
        "copy",
        "far copy",
        "copy that reads what it writes",
        "copy of one byte",
        "short repeat",
        "repeat",
        "long repeat",
        "longest repeat",
    ],
)
def test_a_block_is_decompressed(block: bytes, holding: bytes) -> None:
    assert read(compressed(block, holding=holding)) == holding


def test_a_stream_may_have_padding_and_another_stream_behind_it() -> None:
    stream = b"".join(s2.written([HELLO]))
    assert read(stream + chunk(0xFE, bytes(10)) + chunk(0x99, b"index") + stream) == HELLO * 2


@pytest.mark.parametrize(
    ("stream", "told"),
    [
        (b"", "is not an S2 stream"),
        (b"{}", "is not an S2 stream"),
        (s2.IDENTIFIER + chunk(0x02, b""), "chunk of an unknown type, 0x2"),
        (s2.IDENTIFIER + b"\x01\xff", "breaks off within a chunk"),
        (s2.IDENTIFIER + chunk(1, masked(HELLO) + HELLO)[:-1], "breaks off within a chunk"),
        (s2.IDENTIFIER + chunk(1, masked(HELLO) + b"?" + HELLO[1:]), "does not have its checksum"),
        (compressed(LITERAL[:-1], holding=HELLO), "does not have its size"),
        (compressed(LITERAL + b"\x02", holding=HELLO + b"x"), "a block breaks off"),
        (compressed(LITERAL + bytes((9 << 2 | 2, 99, 0)), holding=HELLO + b"x" * 10), "does not have its"),
        (compressed(LITERAL + bytes((0b000_111_01, 0, 0, 0, 255)), holding=HELLO), "holds more than it says"),
        (s2.IDENTIFIER + chunk(0, bytes(4) + b"\xff\xff\xff\x7f"), "larger than any can be"),
    ],
)
def test_what_is_malformed_is_told(stream: bytes, told: str) -> None:
    with pytest.raises(MalformedError, match=told):
        read(stream)


@hypothesis.given(some.lists(some.binary(max_size=200_000), max_size=5))
def test_what_is_written_is_read(pieces: list[bytes]) -> None:
    assert read(b"".join(s2.written(pieces))) == b"".join(pieces)


def an_archive(*messages: bytes, cut: int | None = None, more: bytes = b"") -> io.BytesIO:
    entries = [archive.encode(b"state.json", b"{}", timestamp_ns=1_795_255_878_799_789_100)]
    entries += [archive.encode(b"mars", message, timestamp_ns=1) for message in messages]
    return io.BytesIO(b"".join(s2.written([(archive.MAGIC + b"".join(entries) + archive.END)[:cut], more])))


def test_entries_are_read_however_the_blocks_fall() -> None:
    messages = [bytes([size % 256]) * size for size in (0, 1, 127, 128, 65_536, 300_000, 20_000)]
    head, *found = archive.entries(an_archive(*messages))
    assert (head.name, head.timestamp_ns, head.body) == (b"state.json", 1_795_255_878_799_789_100, b"{}")
    assert [entry.body for entry in found] == messages
    assert archive.has_end(an_archive(*messages), of_entries=True)


@pytest.mark.parametrize(
    ("file", "told"),
    [
        (an_archive(b"x", cut=-1), "breaks off before its end"),
        (an_archive(b"x", cut=-5), "breaks off before its end"),
        (an_archive(b"x", cut=20), "breaks off before its end"),
        (an_archive(b"x", more=b"x"), "something comes after its end"),
        (io.BytesIO(b"".join(s2.written([b"a tar file"]))), "is not an archive of messages"),
    ],
)
def test_an_archive_that_is_not_whole_is_told(file: io.BytesIO, told: str) -> None:
    with pytest.raises(MalformedError, match=told):
        list(archive.entries(file))


def test_a_servers_own_archive_of_files_is_recognised() -> None:
    path = DATA / "nats-server-2.9" / "stream.tar.s2"
    for ending, whole in ((None, True), (-1000, False)):
        file = io.BytesIO(b"".join(s2.written([read(path.read_bytes())[:ending]])))
        assert not archive.has_entries(file)
        file.seek(0)
        assert archive.has_end(file, of_entries=False) == whole


@pytest.mark.parametrize("timestamp_ns", [0, 1, -25, 2**63 - 1, -(2**63)])
def test_an_entry_has_the_time_that_it_was_given(timestamp_ns: int) -> None:
    """A damaged archive may say a time before 1970, which cleansing writes again."""
    data = archive.MAGIC + archive.encode(b"state.json", b"{}", timestamp_ns=timestamp_ns) + archive.END
    [entry] = archive.entries(io.BytesIO(b"".join(s2.written([data]))))
    assert (entry.timestamp_ns, entry.name, entry.body) == (timestamp_ns, b"state.json", b"{}")


def test_a_time_of_more_than_64_bits_is_malformed() -> None:
    data = archive.MAGIC + b"\x00" + b"\xff" * 9 + b"\x02" + bytes(3) + archive.END
    with pytest.raises(MalformedError, match="more than 64 bits"):
        list(archive.entries(io.BytesIO(b"".join(s2.written([data])))))


@pytest.mark.parametrize("stored", [b"{", b"{}", b'{"state": {}}', b'{"state": {"delivered": 3}}'])
def test_a_consumer_that_is_none_says_which(stored: bytes) -> None:
    raw = archive.encode(b"consumers/field__index", stored, timestamp_ns=0)
    at = raw.index(stored)
    entry = archive.ArchiveEntry(b"consumers/field__index", 0, 0, raw, header_at=at, body_at=at)
    with pytest.raises(MalformedError, match=r"^consumer field__index: "):
        archive.consumer(entry)
