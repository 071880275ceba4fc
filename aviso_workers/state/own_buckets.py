"""In which buckets an app keeps its own state: the one list of them, by what the app declares, and by their names.

`sessions.session` gives those that workers write the configured replicas, `ops.permissions` gives workers the right to
use them, and the other tools of operators tell by their names what they are. Counters are in a stream of their own
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
    bucket_names,
    consumer_records,
    failure_counts,
    lease_records,
    orders,
    table_records,
    timer_records,
    window_records,
    worker_records,
)
from aviso_workers.state.bucket_names import Kind


class OwnBuckets(Struct, frozen=True, kw_only=True):
    """The names of an app's buckets."""

    by_key: tuple[str, ...]
    """Those of which workers read one key at a time."""
    listed: tuple[str, ...]
    """Those of which they also list the keys."""
    written: tuple[str, ...] = ()
    """Those of which they read nothing."""
    obeyed: tuple[str, ...] = ()
    """Those of which they read one key at a time, and which operators alone create and write."""
    ttl_seconds: Mapping[str, float] = {}
    """By name, how long keys are kept, where they are not kept for ever."""
    history: Mapping[str, int] = {}
    """By name, how many values of a key are kept, where there are more than one."""

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.by_key, *self.listed, *self.written, *self.obeyed)


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
    led = any(timer.singleton for timer in timers)
    leases = lease_records.bucket_of(app)
    limits = [limit for agent in agents for limit in agent.policy.limits]
    by_key = {
        consumer_records.bucket_of(app): agents or timers or tasks,
        failure_counts.bucket_of(app): agents,
        leases: led or windows or any(isinstance(limit, Slots) for limit in limits),
        lease_records.limits_bucket_of(app): any(isinstance(limit, Rate) for limit in limits),
        timer_records.bucket_of(app): led,
    }
    kept = {name: table for name, table in tables.items() if not isinstance(table, Counter)}
    return OwnBuckets(
        ttl_seconds={
            failure_counts.bucket_of(app): failure_counts.KEPT_SECONDS,
            leases: lease_records.LEASE_SECONDS,
            lease_records.limits_bucket_of(app): lease_records.LIMITS_KEPT_SECONDS,
            worker_records.bucket_of(app): worker_records.TTL_SECONDS,
        },
        history={table_records.bucket_of(app, name): table.keeps_history for name, table in kept.items()},
        by_key=tuple(bucket for bucket, is_used in by_key.items() if is_used),
        written=(worker_records.bucket_of(app),) if agents or timers or tasks else (),
        obeyed=(orders.bucket_of(app),) if agents or timers else (),
        listed=(
            *(window_records.bucket_of(app, agent) for agent in windows),
            *(table_records.bucket_of(app, name) for name in kept),
        ),
    )


def kind_of(bucket: str) -> Kind | Literal["other"]:
    """Return what a bucket keeps: "other" is whatever apps and other programs have named themselves."""
    found = bucket_names.parse(bucket)
    return found.kind if found else "other"


def is_of(bucket: str, app: str, agent: str = "") -> bool:
    """Return whether a bucket is one of an app, or keeps nothing but what is of one of its agents."""
    if agent:
        return bucket == window_records.bucket_of(app, agent)
    found = bucket_names.parse(bucket)
    return found is not None and found.app == app
