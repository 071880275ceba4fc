"""The work for each message that a server sends, which takes the most of its time: in C where that is built.

`_fast.c` has the same functions. They are used unless the environment has AVISO_WORKERS_PURE, or there was no compiler
when the package was installed. `COMPILED` says which are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import Final

Arrival = tuple[bytes, bytes, bytes, bytes]
"""A message: its subject, reply, header block (both empty where there is none) and data."""
Stored = tuple[str, bytes, bytes, bytes, int, int, int, int, int]
"""A message of a consumer: its subject, reply, header block and data; and what the reply says: how often it was
delivered, its sequence in the stream, its number among all that the consumer has delivered, its store time in
nanoseconds since 1970 UTC, and how many messages were to be delivered for the first time after it."""
DATA: Final = 3
"""The index of the data in a `Stored`; the next three are the indexes of its sequence, number and count of pending."""
SEQUENCE: Final = 5
NUMBER: Final = 6
PENDING: Final = 8

MAX_DIGITS = 9
"""The most digits of a subscription's id, and of the sizes of a message."""
NUMBERS = 5
"""How many numbers follow the consumer's name in the reply subject of a stored message."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LEFT_OUT = frozenset({"", "*"})


def split(data: bytes, begin: int) -> tuple[int, list[Arrival], int, int]:
    """Read messages of one subscription from NATS's protocol, as many as follow each other and are whole.

    Returns the id of the subscription, its messages, where they end in the data, and their size in bytes, headers
    included. It stops, also before the first message, at all that is not plain: another command, a part of a message,
    a number that is none.
    """
    of, number, arrivals, size, find = b"\n", -1, list[Arrival](), 0, data.find
    while (line_end := find(b"\r\n", begin)) >= 0:
        # A server puts one space between the words. `bytes.split()` would also part a subject at a form feed or a
        # vertical tab, which any client may put there.
        match data[begin:line_end].split(b" "):
            case [b"HMSG", subject, sid, reply, head, whole]:
                pass
            case [b"MSG", subject, sid, reply, whole]:
                head = b"0"
            case [b"MSG", subject, sid, whole]:
                reply, head = b"", b"0"
            case [b"HMSG", subject, sid, head, whole]:
                reply = b""
            case _:
                break
        if sid != of:
            if not sid.isdigit() or len(sid) > MAX_DIGITS or (arrivals and int(sid) != number):
                break
            of, number = sid, int(sid)
        if not (head.isdigit() and whole.isdigit()) or len(head) > MAX_DIGITS or len(whole) > MAX_DIGITS:
            break
        body = line_end + 2
        middle, end = body + int(head), body + int(whole)
        if middle > end or end + 2 > len(data):
            break
        arrivals.append((subject, reply, data[body:middle], data[middle:end]))
        size += end - body
        begin = end + 2
    return number if arrivals else -1, arrivals, begin, size


def stored(arrivals: Sequence[Arrival], own: bytes) -> list[Stored]:
    """Return those messages that come from a stream: their reply has numbers behind `own`, as in
    `$JS.ACK.<stream>.<consumer>.<delivered>.<sequence>.<number>.<time>.<pending>`, and perhaps more.
    """
    found = list[Stored]()
    begin = len(own)
    for subject, reply, headers, data in arrivals:
        if not reply.startswith(own):
            continue
        numbers = reply[begin:].split(b".", NUMBERS)[:NUMBERS]
        if len(numbers) < NUMBERS or b"" in numbers or not b"".join(numbers).isdigit():
            continue
        delivered, sequence, number, time, pending = numbers
        found.append(
            (
                subject.decode("utf-8", "replace"),
                reply,
                headers,
                data,
                int(delivered),
                int(sequence),
                int(number),
                int(time),
                int(pending),
            )
        )
    return found


def identifier(subject: str, base: str, keys: tuple[str, ...]) -> dict[str, str] | None:
    """Return the values of the keys in a subject; None where it is not of this base, has another number of values, or
    one that is left out or encoded.
    """
    tokens = subject.split(".")
    if tokens[0] != base or len(tokens) != len(keys) + 1 or "%" in subject or not LEFT_OUT.isdisjoint(tokens):
        return None
    del tokens[0]
    return dict(zip(keys, tokens, strict=True))


def stored_at(nanoseconds: int) -> datetime:
    """Return a time that is in nanoseconds since 1970 UTC, of 64 bits, cut to whole microseconds."""
    return EPOCH + timedelta(microseconds=nanoseconds // 1000)


COMPILED = False
"""Whether those of the C file are used."""
if not os.environ.get("AVISO_WORKERS_PURE"):
    with suppress(ImportError):
        _compiled = import_module("aviso_workers._fast_c")
        globals().update({each: getattr(_compiled, each) for each in ("identifier", "split", "stored", "stored_at")})
        COMPILED = True
