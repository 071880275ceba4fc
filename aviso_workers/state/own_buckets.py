"""In which buckets an app keeps its own state: the one list of them, by what the app declares.

`replicas` gives them the configured replicas, and `ops.permissions` gives workers the right to use them. Each bucket is
opened by the module that names it here. Counters are in a stream of their own (`table_store.COUNTERS`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from aviso_workers.declare.agents import Agent
from aviso_workers.declare.tables import Counter, Table
from aviso_workers.declare.timers import Timer
from aviso_workers.declare.windows import Window
from aviso_workers.state import consumer_records, failure_counts, table_records, timer_records, window_records

__all__ = ["OwnBuckets", "of_app"]


class OwnBuckets(Struct, frozen=True, kw_only=True):
    """The names of an app's buckets."""

    by_key: tuple[str, ...]
    """Those of which workers read one key at a time."""
    listed: tuple[str, ...]
    """Those of which they also list the keys."""


def of_app(
    app: str,
    *,
    agents: Iterable[Agent[Any, Any]],
    timers: Iterable[Timer[Any, Any]],
    tables: Mapping[str, Table[Any] | Counter],
) -> OwnBuckets:
    """Return the buckets of an app of this name that declares these."""
    agents = tuple(agents)
    windows = [agent.name for agent in agents if agent.form is Window]
    led = any(timer.leader for timer in timers)
    leases, claims = timer_records.buckets_of(app)
    by_key: list[str] = []
    if agents:
        by_key += [consumer_records.BUCKET, f"{app}{failure_counts.BUCKET_SUFFIX}"]
    if led or windows:
        by_key.append(leases)
    if led:
        by_key.append(claims)
    return OwnBuckets(
        by_key=tuple(by_key),
        listed=(
            *(window_records.bucket_of(app, agent) for agent in windows),
            *(table_records.bucket_of(app, name) for name, table in tables.items() if not isinstance(table, Counter)),
        ),
    )
