"""The buckets of tables, and the stream of counters; `features.tables` keeps both.

A counter's key is a subject, `aviso_workers.counters.<app>.<counter>.<key>`, whose last message has its value.
"""

from __future__ import annotations

from aviso_workers.config import Config, streams
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.state import bucket_names, own_streams
from aviso_workers.state.own_streams import COUNTERS

COUNTERS_SUBJECT = "aviso_workers.counters"


def counters_spec(app: str, config: Config) -> StreamSpec:
    """Return the stream of an app's counters."""
    return streams.own_stream(
        own_streams.of_app(COUNTERS, app),
        f"{COUNTERS_SUBJECT}.{app}.>",
        config,
        max_msgs_per_subject=1,
        allow_msg_counter=True,
    )


def bucket_of(app: str, table: str) -> str:
    """Return the name of the bucket of an app's table."""
    return bucket_names.bucket_of(app, "table", table)
