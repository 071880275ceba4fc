"""The bucket of an app's failure counts, of the records of handlers that have begun, and of what persons have decided
about notifications that are retried. `engine.attempts` writes the first two, `ops.retried` and `engine.decisions` the
third.

A count has the key `<agent>.<stream>.<sequence>.<store time>`, a record of a handler the same with `.began`, and a
decision the same with `.decided`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec
from msgspec import Struct

from aviso_workers.aviso.codec import read_json, read_number
from aviso_workers.backends import Entry, KeyValue
from aviso_workers.errors import UndecodableError
from aviso_workers.jetstream.key_value import TTL, ttl_text
from aviso_workers.state.kept import Kept

__all__ = [
    "ALONE",
    "BEGAN_SUBJECT",
    "BESIDE_OTHERS",
    "BUCKET_SUFFIX",
    "DECIDED",
    "DECISION_SECONDS",
    "KEPT",
    "KEPT_SECONDS",
    "Decides",
    "Decision",
    "Outcome",
    "app_of",
    "decision",
    "key_of",
    "parse_began",
    "parse_key",
    "store_decision",
]

BESIDE_OTHERS = b"beside_others"
ALONE = b"alone"
DECIDED = ".decided"
"""How the key of a decision ends."""
BUCKET_SUFFIX = "_failures"
BEGAN_SUBJECT = "$KV.*.*.*.*.*.began"
"""The filter subject of the records that a handler has begun, in the bucket of any app."""
KEPT_SECONDS = 7 * 86400.0
"""For how long a new bucket keeps an entry."""
DECISION_SECONDS = 3600.0
"""For how long a decision stands that no worker has carried out."""
OUTCOME_SECONDS = 60.0
"""For how long it can be read what became of a decision."""
KEPT = (
    Kept(
        bucket=f"<app>{BUCKET_SUFFIX}",
        key="<agent>.<stream>.<sequence>.<store time>",
        holds="how often a notification has failed",
        until="7 days after the last failure, or twice as long as it waits",
    ),
    Kept(
        bucket=f"<app>{BUCKET_SUFFIX}",
        key="<agent>.<stream>.<sequence>.<store time>.began",
        holds="that a handler has begun with a notification that came again without a failure",
        until="until it ends",
    ),
    Kept(
        bucket=f"<app>{BUCKET_SUFFIX}",
        key=f"<agent>.<stream>.<sequence>.<store time>{DECIDED}",
        holds="what a person has decided about a notification that is retried (`Decision`)",
        until="an hour, or a minute after it was carried out",
    ),
)
Decides = Literal["retry", "skip"]
"""What a person may decide: to try a notification again now, or to have it become a dead letter."""
Outcome = Literal["", "handled", "failed", "dead_letter", "skipped"]


class Decision(Struct, frozen=True, kw_only=True):
    """What a person has decided about a notification that is retried, and what became of that."""

    decides: Decides
    at: datetime
    by: str = ""
    """The person; empty where that is not known."""
    last_error: str = ""
    """The error for which the notification was retried; empty where that is not known."""
    taken: bool = False
    """Whether a worker has begun to carry it out."""
    outcome: Outcome = ""
    """What became of the notification; empty until that is known."""
    error: str = ""
    """The error with which it failed again, or for which its dead letter could not be stored."""
    again_at: datetime | None = None
    """When it is tried again, where it has failed again."""


def key_of(agent: str, stream: str, sequence: int, timestamp_ns: int) -> str:
    """Return the key of a notification's failure count."""
    return f"{agent}.{stream}.{sequence}.{timestamp_ns}"


def parse_key(key: str) -> tuple[int, int]:
    """Return sequence and store time of the notification that a key is about. Raises `UndecodableError`."""
    _, _, sequence, timestamp_ns, *_ = key.split(".")
    return read_number(sequence), read_number(timestamp_ns)


def decision(entry: Entry | None) -> Decision | None:
    """Return the decision of an entry; None where there is none, as after it was deleted."""
    if entry is None or entry.deleted:
        return None
    try:
        return read_json(entry.value, Decision)
    except UndecodableError:
        return None  # neither a person's tool nor a worker has written it


async def store_decision(bucket: KeyValue, key: str, decision: Decision, *, revision: int | None = None) -> int:
    """Store a decision for the time that it stands, or for a minute once its outcome is known, and return its revision.

    Raises as `KeyValue.put` does.
    """
    seconds = OUTCOME_SECONDS if decision.outcome else DECISION_SECONDS
    # The header by hand: a bucket with an age takes it as well. Before nats-server 2.11, the age has to do.
    headers = {TTL: ttl_text(seconds)}
    return await bucket.put(f"{key}{DECIDED}", msgspec.json.encode(decision), revision=revision, headers=headers)


def app_of(stream: str) -> str:
    """Return the app whose bucket of failure counts is kept in that stream; empty where it is none."""
    is_one = stream.startswith("KV_") and stream.endswith(BUCKET_SUFFIX)
    return stream.removeprefix("KV_").removesuffix(BUCKET_SUFFIX) if is_one else ""


def parse_began(subject: str) -> tuple[str, str, int]:
    """Return agent, stream and sequence of the notification that a subject as `BEGAN_SUBJECT` is about.

    Raises `UndecodableError`.
    """
    _, _, agent, stream, sequence, _, _ = subject.split(".")
    return agent, stream, read_number(sequence)
