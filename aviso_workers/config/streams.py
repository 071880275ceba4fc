"""The streams that a configuration states, under whichever key: Aviso's own, and those of the section `streams`.

`event_stream`, `declared` and `own_stream` make the specs that the engine brings about. `loading` calls `mistakes` for
what types cannot say of declared streams. Only what contradicts itself is found here; what a server has already and
does not change is known to `jetstream.plans`, and the rest to the server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from aviso_workers.aviso import schema, topics
from aviso_workers.aviso.schema import EventType
from aviso_workers.config.settings import Config, JetStream, NotificationBackend
from aviso_workers.jetstream.fields import (
    CONSUMER,
    STREAM,
    DeclaredConsumer,
    DeclaredStream,
    as_jetstream,
    jetstream_value,
)
from aviso_workers.jetstream.specs import KEY_ORDER, KEY_RULES, OURS, StreamSpec

SHOWN = {
    "subjects": "topic.base",
    "storage": "storage_type",
    "retention": "retention_policy",
    "discard": "discard_policy",
    "max_msgs": "max_messages",
    "max_bytes": "max_bytes / storage_policy.max_size",
    "max_age": "retention_time",
    "max_msgs_per_subject": "storage_policy.allow_duplicates",
    "num_replicas": "replicas",
    "compression": "storage_policy.compression",
    "duplicate_window": "(the server's, at most max_age)",
}
"""Aviso's keys for the fields of an event type's stream, in the order in which they are shown."""


def event_streams(event_types: Mapping[str, EventType]) -> dict[str, str]:
    """Return the event types by the names of their streams."""
    return {topics.stream_name(schema.topic_of(name, each).base): name for name, each in event_types.items()}


def stated_by_aviso(name: str, event_type: EventType, jetstream: JetStream) -> dict[str, tuple[Any, str]]:
    """Return what Aviso's own keys say about an event type's stream: by JetStream's field, its value and the key.

    Precedence: the schema's storage policy, then the backend's default, then the server's (Aviso's JetStream backend,
    "Precedence"). `allow_duplicates` unset means one message per subject, as Aviso creates it.
    """
    backend, policies = "notification_backend.jetstream", f"notification_schema.{name}.storage_policy"
    policy = event_type.storage_policy or schema.StoragePolicy()
    stated: dict[str, tuple[Any, str]] = {
        "subjects": (
            [topics.binding(schema.topic_of(name, event_type).base)],
            f"notification_schema.{name}.topic.base",
        ),
        "storage": (jetstream.storage_type, f"{backend}.storage_type"),
        "retention": (jetstream.retention_policy, f"{backend}.retention_policy"),
        "discard": (jetstream.discard_policy, f"{backend}.discard_policy"),
        "max_msgs": (jetstream.max_messages, f"{backend}.max_messages"),
        "max_bytes": (jetstream.max_bytes, f"{backend}.max_bytes"),
        "max_age": (jetstream.retention_time, f"{backend}.retention_time"),
        "max_msgs_per_subject": (-1 if policy.allow_duplicates else 1, f"{policies}.allow_duplicates"),
        "num_replicas": (jetstream.replicas, f"{backend}.replicas"),
        "compression": (
            None if policy.compression is None else "s2" if policy.compression else "none",
            f"{policies}.compression",
        ),
    }
    for field, key in {"max_msgs": "max_messages", "max_bytes": "max_size", "max_age": "retention_time"}.items():
        if value := getattr(policy, key):
            stated[field] = value, f"{policies}.{key}"
    return {field: (jetstream_value(value), key) for field, (value, key) in stated.items() if value is not None}


def event_stream(name: str, event_type: EventType, config: Config) -> StreamSpec:
    """Return the stream of an event type's base: as Aviso's keys state it, and the section `streams` beyond them."""
    of_aviso = stated_by_aviso(name, event_type, config.notification_backend.jetstream)
    stream = topics.stream_name(schema.topic_of(name, event_type).base)
    further = as_jetstream(config.streams.get(stream))
    mirrors = "mirror" in further
    if mirrors:
        del of_aviso["subjects"]  # it takes its origin's messages and no publishes
    spec = {
        "name": stream,
        **{field: value for field, (value, _) in of_aviso.items()},
        "further": {field: value for field, value in further.items() if field not in of_aviso},
        "takes_batches": not mirrors,
        "monitored": True,
        "read_as": read_as(name, event_type),
        "keys": _keys(stream, further) | {field: key for field, (_, key) in of_aviso.items()},
    }
    return msgspec.convert(spec, StreamSpec)


def read_as(name: str, event_type: EventType) -> dict[str, str]:
    """Return how the stream of an event type says that its subjects are read."""
    fields = schema.topic_of(name, event_type).key_order
    rules = [f"{field}={event_type.identifier[field].spelling}" for field in fields]
    return {KEY_ORDER: ",".join(fields), KEY_RULES: ",".join(rules)} if fields else {}


def declared(config: Config) -> list[StreamSpec]:
    """Return the streams of the section `streams` that no event type has."""
    of_events = event_streams(config.notification_schema)
    found = {name: as_jetstream(stream) for name, stream in config.streams.items() if name not in of_events}
    return [
        StreamSpec(name=name, further=further, takes_batches=False, keys=_keys(name, further))
        for name, further in found.items()
    ]


def own_stream(name: str, subject: str, config: Config, **stated: Any) -> StreamSpec:
    """Return a stream of our own state: kept by limits, stored and copied as the configuration says."""
    jetstream = config.notification_backend.jetstream
    return StreamSpec(
        name=name,
        subjects=(subject,),
        storage=jetstream.storage_type,
        retention="limits",
        monitored=True,
        num_replicas=config.workers.dead_letters.replicas or jetstream.replicas or UNSET,
        **stated,
    )


def mistakes(
    streams: Mapping[str, DeclaredStream], event_types: Mapping[str, EventType], backend: NotificationBackend
) -> Iterator[tuple[str, str]]:
    """Yield the mistakes that types do not exclude, as (key path, what is wrong)."""
    if streams and backend.kind == "in_memory":
        yield "streams", "is not supported by backend 'in_memory'"
        return
    of_events = event_streams(event_types)
    for name, stream in streams.items():
        path = f"streams.{name}"
        yield from _name_mistakes(path, name)
        if name.startswith(OURS):
            yield path, "is a stream of our own, which cannot be declared"
        if name not in of_events and name.upper() in of_events:
            yield path, f"must be {name.upper()}: that is the stream of event type {of_events[name.upper()]}"
        declared = as_jetstream(stream)
        stated = {field: (value, f"{path}.{field}") for field, value in declared.items()}
        if event_type := of_events.get(name):
            of_aviso = stated_by_aviso(event_type, event_types[event_type], backend.jetstream)
            yield from _event_stream_mistakes(path, declared, of_aviso)
            stated |= {field: value for field, value in of_aviso.items() if not (stream.mirror and field == "subjects")}
        yield from _stream_mistakes(stated)
        for consumer, settings in stream.consumers.items():
            yield from _name_mistakes(f"{path}.consumers.{consumer}", consumer)
            if event_type and "__" in consumer:
                yield f"{path}.consumers.{consumer}", "is named as agents' consumers are, which code declares"
            yield from _consumer_mistakes(f"{path}.consumers.{consumer}", settings)


def _name_mistakes(path: str, name: str) -> Iterator[tuple[str, str]]:
    if not name or set(name) & set(" .*>/\\") or not name.isprintable():
        yield path, "must be a name without blanks, '.', '*', '>', '/' and '\\'"


def _event_stream_mistakes(
    path: str, declared: Mapping[str, Any], of_aviso: Mapping[str, tuple[Any, str]]
) -> Iterator[tuple[str, str]]:
    for field, value in declared.items():
        aviso, key = of_aviso.get(field, (value, ""))
        if _limit(aviso) != _limit(value):
            yield f"{path}.{field}", f"contradicts {key}: leave one of them out, or make them say the same"
    for field, value in declared.items():
        if STREAM[field].not_for_events and _is_set(field, value):
            yield f"{path}.{field}", f"is not for the stream of an event type: {STREAM[field].not_for_events}"


def _is_set(field: str, value: Any) -> bool:
    return bool(value) and value != STREAM[field].zero


def _limit(value: Any) -> Any:
    return -1 if isinstance(value, int) and value <= 0 else value


def _stream_mistakes(stated: Mapping[str, tuple[Any, str]]) -> Iterator[tuple[str, str]]:
    values = {field: value for field, (value, _) in stated.items()}
    for field, value in values.items():
        if values.get("mirror") and value and STREAM[field].of_origin:
            yield stated[field][1], f"must not be combined with {stated['mirror'][1]}: a mirror takes no publishes"
    for field, value in values.items():
        for other, excluded in STREAM[field].excludes.items() if _is_set(field, value) else ():
            if values.get(other) in excluded:
                together = "JetStream refuses the two together"
                yield stated[field][1], f"must not be combined with {stated[other][1]}: {together}"
    if values.get("max_age") and values.get("duplicate_window", 0) > values["max_age"]:
        yield stated["duplicate_window"][1], f"must not be longer than {stated['max_age'][1]}"
    if values.get("discard_new_per_subject") and values.get("max_msgs_per_subject", 1) < 1:
        yield stated["discard_new_per_subject"][1], f"needs a limit in {stated['max_msgs_per_subject'][1]}"


def _consumer_mistakes(path: str, consumer: DeclaredConsumer) -> Iterator[tuple[str, str]]:
    given = as_jetstream(consumer)
    for name, field in CONSUMER.items():
        for other in field.needs:
            if given.get(name) and not given.get(other):
                yield f"{path}.{name}", f"needs {other}"
        if consumer.deliver_subject and field.only_pulled and name in given:
            yield f"{path}.{name}", "must not be combined with deliver_subject: it is about pull requests"
        if (policy := field.needs_deliver_policy) and (name in given) != (consumer.deliver_policy == policy):
            key, needed = (name, f"deliver_policy: {policy}") if name in given else ("deliver_policy", name)
            yield f"{path}.{key}", f"needs {needed}"
    if consumer.deliver_policy == "last_per_subject" and not consumer.filter_subjects:
        yield f"{path}.deliver_policy", "needs filter_subjects"
    if not consumer.backoff:
        return
    if consumer.ack_wait not in (None, consumer.backoff[0]):
        yield f"{path}.ack_wait", "must be left out: with backoff, its first delay takes the place of ack_wait"
    if 0 < (consumer.max_deliver or -1) < len(consumer.backoff):
        yield f"{path}.max_deliver", f"must be at least {len(consumer.backoff)}, as many as backoff has delays"


def _keys(stream: str, further: Mapping[str, Any]) -> dict[str, str]:
    return {field: f"streams.{stream}.{field}" for field in further}
