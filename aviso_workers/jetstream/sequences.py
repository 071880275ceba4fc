"""Sequences of a stream as pages of bits, which say of each sequence whether something was done for its message.

A page is for `PAGE_SEQUENCES` sequences; the lowest bit of its first byte is that of the first one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

__all__ = ["PAGE_SEQUENCES", "by_page", "has_bit", "last_of_page", "page_of", "with_bits"]

PAGE_SEQUENCES = 16_384
"""How many sequences a page is for: 2 KiB of bits."""


def page_of(sequence: int) -> int:
    """Return the number of the page that a sequence is on."""
    return sequence // PAGE_SEQUENCES


def last_of_page(number: int) -> int:
    """Return the last sequence that is on the page of this number."""
    return (number + 1) * PAGE_SEQUENCES - 1


def by_page(times: Iterable[tuple[int, float]]) -> dict[int, dict[int, float]]:
    """Return sequences with their store times, by the number of their page."""
    found: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for sequence, stored in times:
        found[page_of(sequence)][sequence] = stored
    return found


def has_bit(bits: bytes, sequence: int) -> bool:
    """Return whether the bit of a sequence is set on its page."""
    byte, bit = divmod(sequence % PAGE_SEQUENCES, 8)
    return byte < len(bits) and bool(bits[byte] >> bit & 1)


def with_bits(bits: bytes, sequences: Iterable[int]) -> bytes:
    """Return the page with the bits of these sequences set as well."""
    changed = bytearray(bits.ljust(PAGE_SEQUENCES // 8, b"\0"))
    for sequence in sequences:
        byte, bit = divmod(sequence % PAGE_SEQUENCES, 8)
        changed[byte] |= 1 << bit
    return bytes(changed).rstrip(b"\0")
