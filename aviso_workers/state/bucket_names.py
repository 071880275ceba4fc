"""The names of the buckets in which an app keeps its own state: `<app>__<kind>`, and `<app>__<kind>__<name>`.

A server's permissions bind whole names, and no part of one. So each app has buckets of its own, which no worker of
another app may read or write. An app's name has no `__` and ends with no `_`, so no two apps have one bucket. Spark's
streaming queries have a bucket for each stream, in which they record the stream that their batches were stored in
(`spark.writers`).
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal, NamedTuple, get_args

from aviso_workers.backends import Admin

Kind = Literal["state", "orders", "live", "failures", "leases", "limits", "timers", "windows", "table"]
"""What a bucket keeps: `state` what workers record, `orders` what operators order, `live` the workers that live,
`timers` the ticks that leaders have claimed. There is one of `windows` for each agent that has some, and one of `table`
for each table."""
BETWEEN = "__"
OF_QUERIES = "aviso_workers_spark__"
KEY_BYTES = 16


class BucketName(NamedTuple):
    """The parts of the name of a bucket."""

    app: str
    kind: Kind
    name: str
    """Of the agent or the table; else empty."""


def bucket_of(app: str, kind: Kind, name: str = "") -> str:
    """Return the name of a bucket of an app."""
    return BETWEEN.join((app, kind, name) if name else (app, kind))


def parse(bucket: str) -> BucketName | None:
    """Return the parts of a name; None where it is of no bucket of an app's own state."""
    app, _, rest = bucket.partition(BETWEEN)
    kind, _, name = rest.partition(BETWEEN)
    for known in get_args(Kind):
        if app and kind == known and bool(name) == (known in ("windows", "table")):
            return BucketName(app, known, name)
    return None


async def apps_with(admin: Admin, kind: Kind) -> list[str]:
    """Return the apps that have a bucket of this kind, in order. Raises `BackendError`."""
    buckets = [name.removeprefix("KV_") for name in await admin.stream_names() if name.startswith("KV_")]
    return sorted({found.app for bucket in buckets if (found := parse(bucket)) and found.kind == kind})


def of_queries(stream: str) -> str:
    """Return the name of the bucket with the records of the queries whose batches are stored in this stream."""
    return f"{OF_QUERIES}{stream}"


def key_of_query(query: str) -> str:
    """Return the key of a query, whose id may have characters that a key cannot have."""
    return blake2b(query.encode(), digest_size=KEY_BYTES).hexdigest()
