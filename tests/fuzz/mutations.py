"""Bytes that are nearly what they should be: what a fuzz test gives to whatever reads untrusted bytes."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

__all__ = ["Rounds", "mutated", "with_another_value"]

NASTY = (
    b"null",
    b"-1",
    b"[]",
    b"1e999",
    b'"\\ud800"',
    b"9" * 40,
    b"[" * 5000,
    b"\xff" * 9,
    b"\x80" * 50,
    b"\x00",
    b"\r\n",
)
VALUES: tuple[Any, ...] = (None, -1, 1.5, 2**70, True, "", "../x", "2026-01-01T00:00:00", [], ["a"], {}, {"a": None})


class Rounds:
    """Rounds with a source of randomness each: a number of them, or as many as fit into some minutes.

    `which` says which round it is, for the message of a failure.
    """

    def __init__(self, count: int, *, minutes: float) -> None:
        self._count = count
        self._ends = time.monotonic() + 60 * minutes if minutes else None
        self._seed = random.randrange(1 << 32) if minutes else 0  # the same in each run of the suite
        self.done = 0

    @property
    def which(self) -> str:
        return f"round {self.done} of seed {self._seed}"

    def __iter__(self) -> Iterator[random.Random]:
        while self.done < self._count if self._ends is None else time.monotonic() < self._ends:
            self.done += 1
            yield random.Random(self._seed * 1_000_003 + self.done)
        if self._ends is not None:
            print(f"{self.done} rounds of seed {self._seed}")


def mutated(data: bytes, chance: random.Random) -> bytes:
    """The bytes with one change or a few."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at, end = sorted((chance.randrange(len(changed) + 1), chance.randrange(len(changed) + 1)))
        match chance.randrange(6):
            case 0:
                changed[at : at + 1] = chance.randbytes(1)
            case 1:
                del changed[at : at + chance.randrange(1, 20)]
            case 2:
                changed[at:at] = chance.randbytes(chance.randrange(1, 10))
            case 3:
                del changed[at:]
            case 4:
                changed[at:at] = chance.choice(NASTY)
            case _:
                changed[at:at] = changed[at:end]
    return bytes(changed)


def with_another_value(document: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """The JSON object with one value of it, or below it, replaced or left out."""
    key = chance.choice(list(document))
    below = document[key]
    if isinstance(below, dict) and below and chance.random() < 0.8:
        return {**document, key: with_another_value(below, chance)}
    if chance.random() < 0.2:
        return {name: value for name, value in document.items() if name != key}
    return {**document, key: chance.choice(VALUES)}
