"""What is said of a stream, under whichever key: Aviso's own, and those of the section `streams`.

`loading` calls `mistakes` for what types cannot say of declared streams. Only what contradicts itself is found here;
what a server has already and does not change is known to `aviso_workers.streams`, and the rest to the server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from aviso_workers import schema, topics
from aviso_workers.config.declared_streams import DeclaredConsumer, DeclaredStream, as_jetstream, jetstream_value
from aviso_workers.config.settings import JetStream
from aviso_workers.schema import EventType

__all__ = ["event_streams", "mistakes", "stated_by_aviso"]

OURS = "aviso_workers_"
"""What the names of streams of our own begin with."""

STREAM_EXCLUSIONS: tuple[tuple[str, Any, str, Any], ...] = (
    ("allow_rollup_hdrs", True, "deny_purge", True),
    ("discard_new_per_subject", True, "discard", "old"),
    ("allow_msg_counter", True, "retention", "interest"),
    ("allow_msg_counter", True, "retention", "workqueue"),
    ("allow_msg_counter", True, "discard", "new"),
    ("allow_msg_counter", True, "allow_msg_ttl", True),
    ("allow_msg_schedules", True, "discard", "new"),
    ("persist_mode", "async", "allow_atomic", True),
    ("persist_mode", "async", "storage", "memory"),
)
"""Two settings of a stream that a server does not take together."""

NOT_FOR_EVENTS: tuple[tuple[str, Any, str], ...] = (
    ("no_ack", True, "publishing waits for the acknowledgement"),
    ("persist_mode", "async", "what was acknowledged must be stored"),
    ("allow_msg_counter", True, "a notification is no number"),
    ("subject_transform", ..., "agents find notifications by their subject"),
)

NOT_FOR_MIRRORS = (
    "subjects",
    "sources",
    "subject_transform",
    "first_seq",
    "duplicate_window",
    "allow_atomic",
    "allow_batched",
    "allow_msg_counter",
    "allow_msg_schedules",
)
"""What a mirror has from its origin, or is of no use without publishes."""

CONSUMER_NEEDS = {
    "deliver_group": ("deliver_subject",),
    "idle_heartbeat": ("deliver_subject",),
    "flow_control": ("deliver_subject", "idle_heartbeat"),
    "rate_limit_bps": ("deliver_subject",),
    "priority_groups": ("priority_policy",),
    "priority_policy": ("priority_groups",),
    "priority_timeout": ("priority_policy",),
}
ONLY_PULLED = ("max_waiting", "max_batch", "max_expires", "max_bytes", "priority_groups")
BEGINNINGS = {"opt_start_seq": "by_start_sequence", "opt_start_time": "by_start_time"}


def event_streams(event_types: Mapping[str, EventType]) -> dict[str, str]:
    """The event type of each stream that one has."""
    return {topics.stream_name(schema.topic_of(name, each).base): name for name, each in event_types.items()}


def stated_by_aviso(name: str, event_type: EventType, jetstream: JetStream) -> dict[str, tuple[Any, str]]:
    """What Aviso's own keys say about an event type's stream: by JetStream's field, its value and the key.

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
        "max_msgs": _first(
            (policy.max_messages, f"{policies}.max_messages"), (jetstream.max_messages, f"{backend}.max_messages")
        ),
        "max_bytes": _first((policy.max_size, f"{policies}.max_size"), (jetstream.max_bytes, f"{backend}.max_bytes")),
        "max_age": _first(
            (policy.retention_time, f"{policies}.retention_time"),
            (jetstream.retention_time, f"{backend}.retention_time"),
        ),
        "max_msgs_per_subject": (-1 if policy.allow_duplicates else 1, f"{policies}.allow_duplicates"),
        "num_replicas": (jetstream.replicas, f"{backend}.replicas"),
        "compression": (
            None if policy.compression is None else "s2" if policy.compression else "none",
            f"{policies}.compression",
        ),
    }
    return {field: (jetstream_value(value), key) for field, (value, key) in stated.items() if value is not None}


def _first(above: tuple[Any, str], below: tuple[Any, str]) -> tuple[Any, str]:
    return above if above[0] else below


def mistakes(
    streams: Mapping[str, DeclaredStream], event_types: Mapping[str, EventType], jetstream: JetStream
) -> Iterator[tuple[str, str]]:
    """What types cannot say, as (key path, what is wrong)."""
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
            of_aviso = stated_by_aviso(event_type, event_types[event_type], jetstream)
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
    for field, value, why in NOT_FOR_EVENTS:
        if field in declared and value in (..., declared[field]):
            yield f"{path}.{field}", f"is not for the stream of an event type: {why}"


def _limit(value: Any) -> Any:
    return -1 if isinstance(value, int) and value <= 0 else value


def _stream_mistakes(stated: Mapping[str, tuple[Any, str]]) -> Iterator[tuple[str, str]]:
    values = {field: value for field, (value, _) in stated.items()}
    for field in NOT_FOR_MIRRORS:
        if values.get("mirror") and values.get(field):
            yield stated[field][1], f"must not be combined with {stated['mirror'][1]}: a mirror takes no publishes"
    for field, value, other, excluded in STREAM_EXCLUSIONS:
        if values.get(field) == value and values.get(other) == excluded:
            yield stated[field][1], f"must not be combined with {stated[other][1]}: JetStream refuses the two together"
    if values.get("max_age") and values.get("duplicate_window", 0) > values["max_age"]:
        yield stated["duplicate_window"][1], f"must not be longer than {stated['max_age'][1]}"
    if values.get("discard_new_per_subject") and values.get("max_msgs_per_subject", 1) < 1:
        yield stated["discard_new_per_subject"][1], f"needs a limit in {stated['max_msgs_per_subject'][1]}"


def _consumer_mistakes(path: str, consumer: DeclaredConsumer) -> Iterator[tuple[str, str]]:
    given = as_jetstream(consumer)
    for field, needed in CONSUMER_NEEDS.items():
        for other in needed:
            if given.get(field) and not given.get(other):
                yield f"{path}.{field}", f"needs {other}"
    for field in ONLY_PULLED:
        if consumer.deliver_subject and field in given:
            yield f"{path}.{field}", "must not be combined with deliver_subject: it is about pull requests"
    for field, policy in BEGINNINGS.items():
        if field in given and consumer.deliver_policy != policy:
            yield f"{path}.{field}", f"needs deliver_policy: {policy}"
        if field not in given and consumer.deliver_policy == policy:
            yield f"{path}.deliver_policy", f"needs {field}"
    if consumer.deliver_policy == "last_per_subject" and not consumer.filter_subjects:
        yield f"{path}.deliver_policy", "needs filter_subjects"
    if not consumer.backoff:
        return
    if consumer.ack_wait not in (None, consumer.backoff[0]):
        yield f"{path}.ack_wait", "must be left out: with backoff, its first delay takes the place of ack_wait"
    if 0 < (consumer.max_deliver or -1) < len(consumer.backoff):
        yield f"{path}.max_deliver", f"must be at least {len(consumer.backoff)}, as many as backoff has delays"
