"""What an increment stores, and what it gives together with the backup before it."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aviso_workers.errors import StreamReplacedError
from aviso_workers.ops.backups import archive, chains, s2
from aviso_workers.ops.backups.archive import ArchiveEntry
from aviso_workers.ops.backups.s2 import MalformedError
from tests.ops.backups.entries import message

Messages = Mapping[int, bytes]
"""Bodies by sequence."""


def stored(messages: Messages) -> Iterator[ArchiveEntry]:
    head = archive.encode(archive.STATE, b"{}", timestamp_ns=1)
    pieces = (archive.MAGIC, head, *(message(n, messages[n]) for n in sorted(messages)), archive.END)
    return read(b"".join(pieces))


def read(data: bytes) -> Iterator[ArchiveEntry]:
    return archive.entries(io.BytesIO(b"".join(s2.written([data]))))


def increment(now: Messages, before: Messages) -> bytes:
    return b"".join(chains.encode_increment(stored(now), stored(before)))


def bodies(entries: Iterator[ArchiveEntry]) -> dict[int, bytes]:
    return {entry.sequence: entry.body for entry in entries if entry.sequence}


def about(data: bytes, name: bytes) -> list[bytes]:
    return [entry.body for entry in read(data) if entry.name == name]


def numbered(*sequences: int) -> Messages:
    return {sequence: b"%d" % sequence for sequence in sequences}


@pytest.mark.slow
@given(st.data())
def test_an_increment_and_what_was_before_give_what_is_now(data: st.DataObject) -> None:
    sequences = st.sets(st.integers(1, 30))
    before, now = numbered(*data.draw(sequences)), numbered(*data.draw(sequences))
    stored_again = bodies(read(increment(now, before)))
    assert stored_again.keys() == now.keys() - before.keys()
    assert bodies(chains.merge_increment(read(increment(now, before)), stored(before))) == now


@settings(max_examples=30)
@given(st.lists(st.sets(st.integers(1, 20)), min_size=1, max_size=6))
def test_a_chain_gives_each_of_its_moments(moments: list[set[int]]) -> None:
    def chain(until: int) -> Iterator[ArchiveEntry]:
        if until == 0:
            return stored(numbered(*moments[0]))
        own = b"".join(chains.encode_increment(stored(numbered(*moments[until])), chain(until - 1)))
        return chains.merge_increment(read(own), chain(until - 1))

    for number, moment in enumerate(moments):
        assert bodies(chain(number)) == numbered(*moment)


def test_gaps_that_were_there_before_cost_nothing() -> None:
    before = numbered(*range(1, 100, 2))
    data = increment(numbered(*range(1, 100, 2), 100), before)
    assert about(data, b"unchanged") == [b'{"first":1,"last":99,"messages":50}']


def test_what_is_gone_ends_a_range() -> None:
    data = increment(numbered(1, 2, 4, 5), numbered(1, 2, 3, 4, 5))
    assert about(data, b"unchanged") == [b'{"first":1,"last":2,"messages":2}', b'{"first":4,"last":5,"messages":2}']


def test_another_message_of_a_sequence_is_another_stream() -> None:
    with pytest.raises(StreamReplacedError, match="message 2 is another one"):
        increment({1: b"1", 2: b"another"}, numbered(1, 2, 3))


@pytest.mark.parametrize(
    ("before", "found"),
    [
        ({1: b"1", 3: b"3"}, "has 2 of its 3 messages from 1 to 3"),
        ({1: b"1", 2: b"another", 3: b"3"}, "does not give the messages"),
        ({}, "has 0 of its 3 messages"),
    ],
)
def test_another_backup_before_it_is_found(before: Messages, found: str) -> None:
    data = increment(numbered(1, 2, 3, 4), numbered(1, 2, 3))
    with pytest.raises(MalformedError, match=found):
        list(chains.merge_increment(read(data), stored(before)))


def test_an_increment_without_its_digest_is_found() -> None:
    whole = archive.MAGIC + message(1, b"1") + archive.END
    with pytest.raises(MalformedError, match="does not give the messages"):
        list(chains.merge_increment(read(whole), stored({})))
