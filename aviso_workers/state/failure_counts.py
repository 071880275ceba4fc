"""The bucket of an app's failure counts, and of the records of handlers that have begun; `engine.attempts` writes both.

A count has the key `<agent>.<stream>.<sequence>.<store time>`, a record of a handler the same with `.began`.
"""

from __future__ import annotations

from aviso_workers.aviso.codec import read_number
from aviso_workers.state.kept import Kept

__all__ = ["ALONE", "BEGAN_SUBJECT", "BESIDE_OTHERS", "BUCKET_SUFFIX", "KEPT", "app_of", "parse_began"]

BESIDE_OTHERS = b"beside_others"
ALONE = b"alone"
BUCKET_SUFFIX = "_failures"
BEGAN_SUBJECT = "$KV.*.*.*.*.*.began"
"""The filter subject of the records that a handler has begun, in the bucket of any app."""
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
)


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
