"""In which buckets an app keeps its own state: the one list of them, by what the app declares, and by their names.

`sessions.replicas` gives them the configured replicas, `ops.permissions` gives workers the right to use them, and the
other tools of operators tell by their names what they are. Counters are in a stream of their own
(`COUNTERS`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from msgspec import Struct

from aviso_workers.declare.agents import Agent, Task
from aviso_workers.declare.limits import Rate, Slots
from aviso_workers.declare.tables import Counter, Table
from aviso_workers.declare.timers import Timer
from aviso_workers.state import (
    consumer_records,
    failure_counts,
    lease_records,
    limit_records,
    table_records,
    timer_records,
    window_records,
    worker_records,
)

__all__ = ["Kind", "OwnBuckets", "is_of", "kind_of", "of_app"]

Kind = Literal["table", "windows", "timers", "failures", "other"]
"""What a bucket keeps: `timers` are leases, ticks and the workers that live, `failures` the counts of failures."""


class OwnBuckets(Struct, frozen=True, kw_only=True):
    """The names of an app's buckets."""

    by_key: tuple[str, ...]
    """Those of which workers read one key at a time."""
    listed: tuple[str, ...]
    """Those of which they also list the keys."""
    written: tuple[str, ...] = ()
    """Those of which they read nothing."""


def of_app(
    app: str,
    *,
    agents: Iterable[Agent[Any, Any]],
    timers: Iterable[Timer[Any, Any]],
    tasks: Collection[Task],
    tables: Mapping[str, Table[Any] | Counter],
) -> OwnBuckets:
    """Return the buckets of an app of this name that declares these."""
    agents, timers = tuple(agents), tuple(timers)
    windows = [agent.name for agent in agents if agent.policy.window]
    led = any(timer.leader for timer in timers)
    leases, claims = lease_records.bucket_of(app), timer_records.bucket_of(app)
    by_key: list[str] = []
    if agents or timers or tasks:
        by_key.append(consumer_records.BUCKET)
    if agents:
        by_key.append(f"{app}{failure_counts.BUCKET_SUFFIX}")
    limits = [limit for agent in agents for limit in agent.policy.limits]
    if led or windows or any(isinstance(limit, Slots) for limit in limits):
        by_key.append(leases)
    if any(isinstance(limit, Rate) for limit in limits):
        by_key.append(limit_records.bucket_of(app))
    if led:
        by_key.append(claims)
    return OwnBuckets(
        by_key=tuple(by_key),
        written=(worker_records.BUCKET,) if agents or timers or tasks else (),
        listed=(
            *(window_records.bucket_of(app, agent) for agent in windows),
            *(table_records.bucket_of(app, name) for name, table in tables.items() if not isinstance(table, Counter)),
        ),
    )


def kind_of(bucket: str) -> Kind:
    """Return what a bucket keeps, by its name: that of a table may end like the others, that of windows like the last.

    "other" is that of `consumer_records`, and whatever apps and other programs have named themselves.
    """
    if "__" in bucket:
        return "table"
    if window_records.BUCKET_INFIX in bucket:
        return "windows"
    if bucket.endswith((lease_records.LEASES, timer_records.CLAIMS)) or bucket == worker_records.BUCKET:
        return "timers"
    return "failures" if bucket.endswith(failure_counts.BUCKET_SUFFIX) else "other"


def is_of(bucket: str, app: str, agent: str = "") -> bool:
    """Return whether a bucket is one of an app, or keeps nothing but what is of one of its agents."""
    if agent:
        return bucket == window_records.bucket_of(app, agent)
    of_app = (
        f"{app}{failure_counts.BUCKET_SUFFIX}",
        lease_records.bucket_of(app),
        timer_records.bucket_of(app),
        limit_records.bucket_of(app),
    )
    return bucket in of_app or bucket.startswith((f"{app}__", window_records.bucket_of(app, "")))
