"""The bucket of an app's failure counts, of the records of handlers that have begun, and of the notifications that are
parked; `engine.attempts` writes them.

A count has the key `<agent>.<stream>.<sequence>.<store time>`, a record of a handler the same with `.began`, and that
of a notification that is parked the same with `.parked`. A person decides on it (`ops.parked`): to try it again, its
count becomes 0 and this record is deleted; to skip it, the record says so.
"""

from __future__ import annotations

from datetime import datetime

from msgspec import Struct

from aviso_workers.aviso.codec import read_json, read_number
from aviso_workers.errors import UndecodableError
from aviso_workers.state.kept import Kept

__all__ = [
    "ALONE",
    "BEGAN_SUBJECT",
    "BESIDE_OTHERS",
    "BUCKET_SUFFIX",
    "KEPT",
    "PARKED",
    "PARKED_SUBJECT",
    "ParkedRecord",
    "app_of",
    "parked",
    "parse_began",
]

BESIDE_OTHERS = b"beside_others"
ALONE = b"alone"
PARKED = ".parked"
"""How the key of a record of what is parked ends."""
BUCKET_SUFFIX = "_failures"
BEGAN_SUBJECT = "$KV.*.*.*.*.*.began"
"""The filter subject of the records that a handler has begun, in the bucket of any app."""
PARKED_SUBJECT = f"$KV.*.*.*.*.*{PARKED}"
"""The same of the records of what is parked."""
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
        key=f"<agent>.<stream>.<sequence>.<store time>{PARKED}",
        holds="a notification that waits for a person (`ParkedRecord`)",
        until="until it is tried again or skipped",
    ),
)


class ParkedRecord(Struct, frozen=True, kw_only=True):
    """A notification that has failed in all of its attempts, and waits for a person."""

    since: datetime
    attempts: int
    error: str
    """The class and the text of the last error."""
    ordering_key: str = ""
    """Its ordering key; empty where the agent has no order."""
    behind: int = 0
    """How many notifications of this key waited behind it when this was written."""
    skip: bool = False
    """Whether a person has decided to skip it."""


def parked(value: bytes) -> ParkedRecord | None:
    """Return the record of a notification that is parked; None where the value is none, as of a deletion."""
    try:
        return read_json(value, ParkedRecord) if value else None
    except UndecodableError:
        return None


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
