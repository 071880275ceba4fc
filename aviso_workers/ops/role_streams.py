"""The streams and buckets in which the programs of a role keep their own state, and that an operator makes for them.

`streams apply --role` makes them: only the role `operator` may create a stream (`permissions`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from aviso_workers.backends import buckets
from aviso_workers.config import Config
from aviso_workers.config.streams import event_streams
from aviso_workers.declare.agents import Router
from aviso_workers.declare.tables import Counter
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.state import dead_letter_records, delayed_messages, own_buckets, query_records, table_records


def of_publisher(config: Config) -> list[StreamSpec]:
    """Return the streams of what publishers have delayed."""
    streams = event_streams(config.notification_schema)
    return [delayed_messages.stream_spec(stream, config) for stream in streams]


def of_worker(app: Router, config: Config, *, opened: Iterable[str] = ()) -> list[StreamSpec]:
    """Return those of a worker of the app; `opened` are the buckets that its code opens by name."""
    own = own_buckets.of_app(app.name, agents=app.agents, timers=app.timers, tasks=app.tasks, tables=app.tables)
    return [
        *of_publisher(config),
        *(_bucket(config, name, own.ttl_seconds.get(name), own.history.get(name, 1)) for name in own.all),
        *(_bucket(config, name) for name in opened),
        *_streams(app, config),
    ]


def of_spark(config: Config) -> list[StreamSpec]:
    """Return the buckets of Spark's streaming queries."""
    return [_bucket(config, query_records.bucket_of(stream)) for stream in event_streams(config.notification_schema)]


def _streams(app: Router, config: Config) -> Iterator[StreamSpec]:
    if app.agents:
        yield dead_letter_records.stream_spec(app.name, config)
        yield dead_letter_records.retries_spec(app.name, config)
    if any(isinstance(table, Counter) for table in app.tables.values()):
        yield table_records.counters_spec(app.name, config)


def _bucket(config: Config, name: str, ttl_seconds: float | None = None, history: int = 1) -> StreamSpec:
    replicas = config.notification_backend.jetstream.replicas or 1
    return buckets.bucket_spec(name, ttl_seconds=ttl_seconds, history=history, replicas=replicas)
