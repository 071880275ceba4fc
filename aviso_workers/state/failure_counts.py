"""The bucket of an app's failure counts, of the records of handlers that have begun, and of what became of the
decisions of persons about notifications that are retried (`orders`). `engine.attempts` writes the first two,
`engine.decisions` the third.

A count has the key `<agent>.<stream>.<sequence>.<store time>`, a record of a handler the same with `.began`, and that
of a decision the same with `.decided`.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from aviso_workers.aviso.codec import read_number
from aviso_workers.backends import Entry, KeyValue
from aviso_workers.jetstream.fields import Time
from aviso_workers.jetstream.key_value import TTL, record_of, ttl_text
from aviso_workers.state import bucket_names
from aviso_workers.state.orders import DECISION_SECONDS

BESIDE_OTHERS = b"beside_others"
ALONE = b"alone"
DECIDED = ".decided"
"""How the key of the record of a decision ends."""
BEGAN_SUBJECT = "$KV.*.*.*.*.*.began"
"""The filter subject of the records that a handler has begun, in the bucket of any app."""
KEPT_SECONDS = 7 * 86400.0
"""For how long a new bucket keeps an entry."""
Outcome = Literal["", "handled", "failed", "dead_letter", "skipped"]


class Taken(Struct, frozen=True, kw_only=True):
    """That a worker has begun to carry out what a person has decided, and what became of that."""

    order: int
    """The revision of the decision."""
    outcome: Outcome = ""
    """What became of the notification; empty until that is known."""
    error: str = ""
    """The error with which it failed again, or for which its dead letter could not be stored."""
    again_at: Time | None = None
    """When it is tried again, where it has failed again."""


def bucket_of(app: str) -> str:
    """Return the bucket of the app's failure counts."""
    return bucket_names.bucket_of(app, "failures")


def key_of(agent: str, stream: str, sequence: int, timestamp_ns: int) -> str:
    """Return the key of a notification's failure count."""
    return f"{agent}.{stream}.{sequence}.{timestamp_ns}"


def parse_key(key: str) -> tuple[int, int]:
    """Return sequence and store time of the notification that a key is about. Raises `UndecodableError`."""
    _, _, sequence, timestamp_ns, *_ = key.split(".")
    return read_number(sequence), read_number(timestamp_ns)


def taken(entry: Entry | None, *, order: int) -> Taken | None:
    """Return what an entry says of the decision of this revision; None where it says nothing of it."""
    found = record_of(entry, Taken)
    return found if found and found.order == order else None


async def store_taken(bucket: KeyValue, key: str, taken: Taken, *, revision: int) -> int:
    """Store the record of a decision in the place of this revision, and return its own. It outlives the decision, or
    that would be carried out again. Raises as `KeyValue.put` does.
    """
    headers = {TTL: ttl_text(DECISION_SECONDS)}  # by hand: a bucket with an age takes it as well
    return await bucket.put(f"{key}{DECIDED}", msgspec.json.encode(taken), revision=revision, headers=headers)


def app_of(stream: str) -> str:
    """Return the app whose bucket of failure counts is kept in that stream; empty where it is none."""
    found = bucket_names.parse(stream.removeprefix("KV_")) if stream.startswith("KV_") else None
    return found.app if found and found.kind == "failures" else ""


def parse_began(subject: str) -> tuple[str, str, int]:
    """Return agent, stream and sequence of the notification that a subject as `BEGAN_SUBJECT` is about.

    Raises `UndecodableError`.
    """
    _, _, agent, stream, sequence, _, _ = subject.split(".")
    return agent, stream, read_number(sequence)
