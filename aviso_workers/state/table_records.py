"""The buckets of tables, and the stream of counters; `features.tables.store` keeps both.

A counter's key is a subject, `aviso_workers.counters.<app>.<counter>.<key>`, whose last message has its value.
"""

from __future__ import annotations

from aviso_workers.declare.tables import PAGES
from aviso_workers.state.kept import Kept
from aviso_workers.state.own_streams import COUNTERS

__all__ = ["COUNTERS_SUBJECT", "KEPT", "bucket_of"]

COUNTERS_SUBJECT = "aviso_workers.counters"
KEPT = (
    Kept(
        bucket="<app>__<table>",
        key="<key>",
        holds="a value of a table",
        until="until it is deleted, or its ttl is over",
    ),
    Kept(
        bucket="<app>__<table>",
        key=f"{PAGES}<agent>.<digest of the key>.<number>",
        holds="the notifications for which the key was updated once, older than those in its header",
        until="31 days after the last",
    ),
    Kept(
        stream=COUNTERS,
        key=f"{COUNTERS_SUBJECT}.<app>.<counter>.<key>",
        holds="a counter",
        until="until it is deleted",
    ),
)


def bucket_of(app: str, table: str) -> str:
    """Return the name of the bucket of an app's table."""
    return f"{app}__{table}"
