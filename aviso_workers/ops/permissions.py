"""The least permissions with which each role works, for the users of a nats-server, and the streams that it needs.

`server render --role` prints them. What a worker needs follows from its app: the streams that its agents read, the
consumers by which they do, and the buckets of its state. No role but `operator` may create or update a stream: who may
do that can read and write everything of the account (`streams apply --role` makes what the others need).

A replay reads by a consumer. On a stream that several apps share, its name is one of the app's own
(`jetstream.identities`), and no role but `operator` may use another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from aviso_workers.backends import buckets
from aviso_workers.backends.jetstream import credentials, inboxes
from aviso_workers.backends.jetstream.management import PING
from aviso_workers.config import Config, streams
from aviso_workers.config.nats_server import Permissions, Subjects
from aviso_workers.config.streams import event_streams
from aviso_workers.declare.agents import Agent, Router
from aviso_workers.declare.tables import Counter
from aviso_workers.jetstream import identities
from aviso_workers.jetstream.specs import SCHEDULES, StreamSpec
from aviso_workers.state import (
    bucket_names,
    dead_letter_records,
    delayed_messages,
    own_buckets,
    own_streams,
    table_records,
)
from aviso_workers.state.own_streams import COUNTERS, DEAD_LETTERS, RETRIES

Role = Literal["worker", "publisher", "operator", "bridge", "spark"]

BRIDGE = "spark-events"
"""The agent that a bridge runs, and the bucket in which it keeps how far it has read."""
ADVISORIES = "$JS.EVENT.>"


def of_publisher(config: Config, *, user: str = "") -> Permissions:
    """Return the permissions of a program that publishes notifications of all event types of the configuration.

    Here and below, `user` is whose permissions they are; empty means the user of the configuration.
    """
    api = _Api(config, user)
    return _permissions(_publishing(api), api.inboxes)


def of_worker(app: Router, config: Config, *, buckets: Iterable[str] = (), user: str = "") -> Permissions:
    """Return the permissions of a worker of the app; `buckets` are those that its code opens by name."""
    api = _Api(config, user, owner=app.name)
    return _permissions(_working(api, app, buckets), api.inboxes)


def of_spark(config: Config, *, user: str = "") -> Permissions:
    """Return what the drivers and executors of Spark need to read and write notifications of all event types."""
    api = _Api(config, user, owner=identities.SPARK)
    return _permissions(_spark(api), api.inboxes)


def of_operator(config: Config, *, user: str = "") -> Permissions:
    """Return the permissions that all commands need."""
    api = _Api(config, user)
    apis = (f"{api.prefix}.>", *_apis_of_origins(config))
    subjects = (*apis, PING, "$JS.SNAPSHOT.>", "$KV.>", "aviso_workers.>", *_bases(config))
    return _permissions(subjects, api.inboxes, ADVISORIES)


BEYOND = {
    ".STREAM.INFO.": "a user who may publish to any stream can have the server store its acknowledgement under any "
    "subject of the account, by the reply subject of a publish: below other bases, and in the state of workers; put "
    "users who must not do so into accounts of their own (server.accounts.NAME.publishes)",
    ".CONSUMER.CREATE.": "a user who may replay a stream can have the server deliver it to any subject of the account, "
    "by the reply subject of a pull request; put apps that must not do so to each other into accounts of their own",
    f"{delayed_messages.SUBJECT}.": "a user who may have messages delivered later can remove and replace what others "
    "have delayed for the same event types, and a worker can change the consumers by which the workers of all apps "
    f"deliver these; take out the lines with {delayed_messages.SUBJECT} and {SCHEDULES} where no "
    "message is delayed",
}
"""By a part of a subject: what a server lets its publishers do beyond that subject."""
SHARED_INBOX = (
    "all users with these permissions hear each other's answers; name the user, by --user or in the configuration, so "
    "that its answers go below a prefix of its own"
)


def beyond(granted: Permissions) -> list[str]:
    """Return sentences on what these permissions let a user reach beyond the subjects that they name."""
    sentences = [sentence for part, sentence in BEYOND.items() if any(part in line for line in granted.publish.allow)]
    if f"{inboxes.SHARED}.>" in granted.subscribe.allow:
        sentences.append(SHARED_INBOX)
    return sentences


class _Api:
    """The subjects of JetStream's API for a stream and its consumers. The `owner` reads streams of several apps."""

    def __init__(self, config: Config, user: str, owner: str = "") -> None:
        jetstream = config.notification_backend.jetstream
        self.config = config
        self.owner = owner
        self.prefix = jetstream.api
        self.inboxes = f"{inboxes.prefix(jetstream, user or credentials.user(jetstream))}.>"

    def info(self, stream: str) -> str:
        return f"{self.prefix}.STREAM.INFO.{stream}"

    def read(self, stream: str) -> Iterator[str]:
        yield self.get(stream)
        names = identities.reader_names(self.owner, stream)
        if not names:
            yield f"{self.prefix}.CONSUMER.CREATE.{stream}"
        for name in names:
            yield f"{self.prefix}.CONSUMER.CREATE.{stream}.{name}"
        for name in names or ("*",):
            yield f"{self.prefix}.CONSUMER.MSG.NEXT.{stream}.{name}"
            yield f"{self.prefix}.CONSUMER.DELETE.{stream}.{name}"

    def get(self, stream: str) -> str:
        return f"{self.prefix}.STREAM.MSG.GET.{stream}"

    def consume(self, stream: str, durable: str, *, singleton: bool = False) -> Iterator[str]:
        """Yield the subjects to consume a stream by a durable."""
        yield f"{self.prefix}.CONSUMER.CREATE.{stream}.{durable}"
        yield f"{self.prefix}.CONSUMER.INFO.{stream}.{durable}"
        yield f"$JS.ACK.{stream}.{durable}.>"
        yield f"{self.prefix}.CONSUMER.MSG.NEXT.{stream}.{durable}"
        if singleton:
            yield f"{self.prefix}.CONSUMER.UNPIN.{stream}.{durable}"


def _storing(api: _Api) -> Iterator[str]:
    yield from _bases(api.config)
    for stream in event_streams(api.config.notification_schema):
        yield api.info(stream)


def _spark(api: _Api) -> Iterator[str]:
    yield from _lineage(api.config)
    yield from _storing(api)
    for stream in event_streams(api.config.notification_schema):
        yield from api.read(stream)
        yield from _bucket(api, bucket_names.of_queries(stream))


def _publishing(api: _Api) -> Iterator[str]:
    yield from _storing(api)
    for stream in event_streams(api.config.notification_schema):
        schedules = delayed_messages.stream_of(stream)
        yield delayed_messages.all_waiting(stream)
        yield api.info(schedules)
        yield f"{api.prefix}.STREAM.PURGE.{schedules}"  # `cancel`


def _working(api: _Api, app: Router, buckets: Iterable[str]) -> Iterator[str]:
    yield from _publishing(api)
    yield from _lineage(api.config)
    for stream in event_streams(api.config.notification_schema):
        schedules = delayed_messages.stream_of(stream)
        yield from api.read(stream)
        yield from api.read(schedules)
        yield f"{api.prefix}.STREAM.MSG.DELETE.{schedules}"
        yield from api.consume(schedules, delayed_messages.DURABLE)
    for agent in app.agents:
        yield from _agent(api, app, agent)
    if app.agents:
        yield from _dead_letters(api, app)
    yield from _own_buckets(api, app)
    for bucket in buckets:
        yield from _bucket(api, bucket)
        yield from api.read(f"KV_{bucket}")
    for name, table in app.tables.items():
        if isinstance(table, Counter):
            yield f"{table_records.COUNTERS_SUBJECT}.{app.name}.{name}.>"
            yield api.info(own_streams.of_app(COUNTERS, app.name))
            yield from api.read(own_streams.of_app(COUNTERS, app.name))


def _own_buckets(api: _Api, app: Router) -> Iterator[str]:
    own = own_buckets.of_app(app.name, agents=app.agents, timers=app.timers, tasks=app.tasks, tables=app.tables)
    for bucket in (*own.by_key, *own.listed):
        yield from _bucket(api, bucket)
    for bucket in own.written:
        yield f"$KV.{bucket}.>"
        yield api.info(f"KV_{bucket}")
    for bucket in own.obeyed:
        yield api.info(f"KV_{bucket}")
        yield api.get(f"KV_{bucket}")
    for bucket in own.listed:
        yield from api.read(f"KV_{bucket}")


def _lineage(config: Config) -> Iterator[str]:
    if (lineage := config.workers.lineage) and lineage.subject:
        yield lineage.subject


def _agent(api: _Api, app: Router, agent: Agent[Any, Any]) -> Iterator[str]:
    stream = streams.event_stream(agent.event_type, api.config.notification_schema[agent.event_type], api.config).name
    durable, singleton = agent.durable_name(app.name), agent.policy.singleton
    yield from api.consume(stream, durable, singleton=singleton)
    yield f"{api.prefix}.CONSUMER.LIST.{stream}"  # to recognise an agent that another app had before
    yield from api.consume(own_streams.of_app(RETRIES, app.name), durable, singleton=singleton)


def _dead_letters(api: _Api, app: Router) -> Iterator[str]:
    yield f"{dead_letter_records.SUBJECT}.{app.name}.>"
    yield api.info(own_streams.of_app(DEAD_LETTERS, app.name))
    yield api.get(own_streams.of_app(DEAD_LETTERS, app.name))
    yield api.info(own_streams.of_app(RETRIES, app.name))


def _bucket(api: _Api, bucket: str) -> Iterator[str]:
    yield f"$KV.{bucket}.>"
    yield api.info(f"KV_{bucket}")
    yield api.get(f"KV_{bucket}")


def _bases(config: Config) -> Iterator[str]:
    for name, event_type in config.notification_schema.items():
        spec = streams.event_stream(name, event_type, config)
        yield from spec.subjects or ()


def _apis_of_origins(config: Config) -> Iterator[str]:
    """Yield the API subjects of declared mirrors' and sources' origins: `mirror promote` fences an origin there."""
    for declared in config.streams.values():
        for origin in (declared.mirror, *(declared.sources or ())):
            if origin and origin.external:
                yield f"{origin.external.api}.>"


def _permissions(publish: Iterable[str], *subscribe: str) -> Permissions:
    return Permissions(publish=Subjects(allow=tuple(sorted(set(publish)))), subscribe=Subjects(allow=subscribe))


def streams_of_publisher(config: Config) -> list[StreamSpec]:
    """Return the streams of what publishers have delayed."""
    return [delayed_messages.stream_spec(stream, config) for stream in event_streams(config.notification_schema)]


def streams_of_worker(app: Router, config: Config, *, opened: Iterable[str] = ()) -> list[StreamSpec]:
    """Return the streams and buckets of a worker of the app; `opened` are the buckets that its code opens by name."""
    own = own_buckets.of_app(app.name, agents=app.agents, timers=app.timers, tasks=app.tasks, tables=app.tables)
    return [
        *streams_of_publisher(config),
        *(_bucket_spec(config, name, own.ttl_seconds.get(name), own.history.get(name, 1)) for name in own.all),
        *(_bucket_spec(config, name) for name in opened),
        *_own_streams(app, config),
    ]


def streams_of_spark(config: Config) -> list[StreamSpec]:
    """Return the buckets of Spark's streaming queries."""
    return [
        _bucket_spec(config, bucket_names.of_queries(stream)) for stream in event_streams(config.notification_schema)
    ]


def _own_streams(app: Router, config: Config) -> Iterator[StreamSpec]:
    if app.agents:
        yield dead_letter_records.stream_spec(app.name, config)
        yield dead_letter_records.retries_spec(app.name, config)
    if any(isinstance(table, Counter) for table in app.tables.values()):
        yield table_records.counters_spec(app.name, config)


def _bucket_spec(config: Config, name: str, ttl_seconds: float | None = None, history: int = 1) -> StreamSpec:
    replicas = config.notification_backend.jetstream.replicas or 1
    return buckets.bucket_spec(name, ttl_seconds=ttl_seconds, history=history, replicas=replicas)
