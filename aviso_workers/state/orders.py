"""The bucket of what operators order of an app: pauses and runs of its timers, who has paused an agent
(`timer_requests`), and decisions about notifications that are retried.

Operators alone write it, and create it. Workers read it, and record in their own buckets what became of an order. Where
there is no such bucket, nothing is ordered. It is a bucket of its own, so that permissions can tell it from what
workers write.

A decision has the key of its notification's failure count (`failure_counts`).
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from aviso_workers.backends import Admin
from aviso_workers.jetstream.fields import Time
from aviso_workers.jetstream.key_value import Entry, KeyValue, record_of
from aviso_workers.state import bucket_names

DECISION_SECONDS = 3600.0
"""For how long a decision stands that no worker has carried out."""
Decides = Literal["retry", "skip"]
"""What a person may decide: to try a notification again now, or to have it become a dead letter."""


class Decision(Struct, frozen=True, kw_only=True):
    """What a person has decided about a notification that is retried."""

    decides: Decides
    at: Time
    by: str = ""
    """The person; empty where that is not known."""
    last_error: str = ""
    """The error for which the notification was retried; empty where that is not known."""


def bucket_of(app: str) -> str:
    """Return the name of the app's bucket."""
    return bucket_names.bucket_of(app, "orders")


async def bucket(admin: Admin, app: str) -> KeyValue:
    """Return the bucket of an app for an operator, created where it is missing. Raises `BackendError`."""
    return await admin.key_value(bucket_of(app), own=True)


async def decide(bucket: KeyValue, key: str, decision: Decision) -> int:
    """Store a decision for the time that it stands, and return its revision. Raises as `KeyValue.put` does."""
    return await bucket.put(key, msgspec.json.encode(decision), ttl_seconds=DECISION_SECONDS)


def decision(entry: Entry | None) -> Decision | None:
    """Return the decision of an entry; None where there is none, as after it was deleted."""
    return record_of(entry, Decision)
