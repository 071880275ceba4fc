"""Which messages of a stream were seen: the newest as a list, the older ones as bits on pages.

Pure. A list is stored together with what its messages have changed, so that one write stores both. `features.seen`
moves the older half of a long list to pages. A stream that is deleted and recreated counts its sequences from 1 again,
so a message is known by its sequence and by the time at which it was stored, and a page has bits for each stream that
has had the name.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Set

from msgspec import Struct, structs

NEVER = -(2**53)
"""Before every time: the least whole number that JSON carries everywhere."""
PAGE_SEQUENCES = 16_384
"""How many sequences a page is for: at most 2 KiB of bits for each stream."""
MAX_STREAMS = 8
"""A page keeps the bits of at most so many streams that had the name one after another."""

Stored = tuple[int, float]
"""The sequence of a message, and when it was stored, in seconds since 1970."""


class SeenList(Struct, frozen=True, omit_defaults=True):
    """The newest messages that were seen, and how far those go that the list does not have any more."""

    newest: tuple[Stored, ...] = ()
    marked: tuple[Stored, ...] = ()
    """Those of `newest` that have a mark, which their page has as well."""
    left_out: Stored = (0, NEVER)
    """The greatest sequence and the greatest time of those that were in `newest`."""

    def may_have_left_out(self, message: Stored) -> bool:
        """Return whether the message may have been in the list before."""
        return message[0] <= self.left_out[0] and message[1] <= self.left_out[1]

    def plus(self, message: Stored, *, marked: bool = False) -> SeenList:
        """Return the list with one more message."""
        with_mark = (*self.marked, message) if marked else self.marked
        return structs.replace(self, newest=(*self.newest, message), marked=with_mark)

    def oldest(self) -> set[Stored]:
        """Return the older half of the list: what comes next is rarely older than that."""
        return set(sorted(self.newest)[: len(self.newest) // 2])

    def without(self, gone: Set[Stored]) -> SeenList:
        """Return the list that has left out these messages."""
        sequences, times = zip(self.left_out, *gone, strict=True)
        return SeenList(
            newest=tuple(each for each in self.newest if each not in gone),
            marked=tuple(each for each in self.marked if each not in gone),
            left_out=(max(sequences), max(times)),
        )


class SeenBits(Struct, frozen=True, omit_defaults=True):
    """The bits of one page for one stream. The lowest bit of the first byte is that of the page's first sequence."""

    created: float
    """When the stream was created. `NEVER` for messages that are older than their stream, such as those of a stream
    that was restored, or of a promoted mirror."""
    latest: float = NEVER
    """When the last of the messages was stored."""
    seen: bytes = b""
    """Compressed by zlib, as `marked`."""
    marked: bytes = b""

    def has(self, message: Stored) -> bool:
        """Return whether the message was seen."""
        return self.created <= message[1] <= self.latest and _has_bit(self.seen, message[0])

    def plus(self, messages: Collection[Stored], marked: Collection[Stored]) -> SeenBits:
        """Return the bits with these messages, and the marks of some of them."""
        return SeenBits(
            self.created,
            max(self.latest, *(time for _, time in messages)),
            _with_bits(self.seen, [sequence for sequence, _ in messages]),
            _with_bits(self.marked, [message[0] for message in messages if message in marked]),
        )


class SeenPage(Struct, frozen=True):
    """The bits of the same sequences in each stream that has had the name, the newest first.

    Those of an earlier stream are kept because its messages may come again: from a backup, a promoted mirror, or a dead
    letter.
    """

    streams: tuple[SeenBits, ...]

    @property
    def created(self) -> float:
        """When the newest stream was created of which the page has messages."""
        return max((bits.created for bits in self.streams), default=NEVER)

    @property
    def latest(self) -> float:
        """When the last of all its messages was stored."""
        return max((bits.latest for bits in self.streams), default=NEVER)

    def find(self, message: Stored) -> bool | None:
        """Return whether a message that was seen has a mark; None where it was not seen."""
        return next((_has_bit(bits.marked, message[0]) for bits in self.streams if bits.has(message)), None)

    def plus(self, messages: Iterable[Stored], *, created: float, marked: Collection[Stored] = ()) -> SeenPage:
        """Return the page with these messages, and the marks of some of them; `created` is when the stream was."""
        streams = {bits.created: bits for bits in self.streams}
        of_stream: defaultdict[float, list[Stored]] = defaultdict(list)
        for message in messages:
            of_stream[max((each for each in (*streams, created) if each <= message[1]), default=NEVER)].append(message)
        for when, found in of_stream.items():
            streams[when] = streams.get(when, SeenBits(when)).plus(found, marked)
        return SeenPage(tuple(streams[each] for each in sorted(streams, reverse=True)[:MAX_STREAMS]))


def page_of(sequence: int) -> int:
    """Return the number of the page that a sequence is on."""
    return sequence // PAGE_SEQUENCES


def last_of_page(number: int) -> int:
    """Return the last sequence that is on the page of this number."""
    return (number + 1) * PAGE_SEQUENCES - 1


def _bits(compressed: bytes) -> int:
    return int.from_bytes(zlib.decompress(compressed), "little") if compressed else 0


def _has_bit(compressed: bytes, sequence: int) -> bool:
    return bool(_bits(compressed) >> sequence % PAGE_SEQUENCES & 1)


def _with_bits(compressed: bytes, sequences: Iterable[int]) -> bytes:
    bits = _bits(compressed)
    for sequence in sequences:
        bits |= 1 << sequence % PAGE_SEQUENCES
    return zlib.compress(bits.to_bytes(PAGE_SEQUENCES // 8, "little")) if bits else b""
