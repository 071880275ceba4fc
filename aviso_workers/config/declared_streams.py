"""What operators can declare of streams and consumers: the section `streams`.

The names and values are JetStream's own; `as_jetstream` turns what was read into its JSON. What is not given is not
ours to say: nobody compares it, and nobody changes it. A stream that an event type has already can be given further
settings here, and `stated_by_aviso` says which of them have their key elsewhere.

`loading` calls `mistakes` for what types cannot say. Only what contradicts itself is found here; what a server has
already and does not change is known to `aviso_workers.streams`, and the rest to the server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct, structs

from aviso_workers import schema, topics
from aviso_workers.config.fields import Count, Positive, Text, about
from aviso_workers.literals import Duration, Size, SizeLimit
from aviso_workers.schema import EventType

if TYPE_CHECKING:
    from aviso_workers.config.settings import JetStream

__all__ = [
    "ConsumerLimits",
    "DeclaredConsumer",
    "DeclaredStream",
    "Placement",
    "Republish",
    "SubjectTransform",
    "as_jetstream",
    "event_streams",
    "mistakes",
    "stated_by_aviso",
]

SECOND = 1_000_000_000
OURS = "aviso_workers_"
"""What the names of streams of our own begin with."""

Limit = Annotated[int, Meta(ge=-1)]
Time = Annotated[datetime, Meta(tz=True)]


class Placement(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which servers may hold the copies of a stream."""

    cluster: Annotated[Text | None, about("Name of the cluster. Default: that of whoever creates the stream.")] = None
    tags: Annotated[tuple[Text, ...], about("Tags that such a server must have, all of them, such as az:1.")] = ()


class Republish(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is stored is published once more, for whoever listens without JetStream."""

    src: Annotated[Text, about("Which subjects.")] = ">"
    dest: Annotated[Text, about("Under which; wildcards are taken over, as in copy.>.")]
    headers_only: Annotated[bool, about("Without the payload.")] = False


class SubjectTransform(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Messages are stored under another subject than they are published to."""

    src: Annotated[Text, about("Which subjects.")] = ">"
    dest: Annotated[Text, about("Under which, such as stored.>.")]


class ConsumerLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What consumers of the stream have unless they say less."""

    inactive_threshold: Annotated[Duration | None, about("How long one may be unused.")] = None
    max_ack_pending: Annotated[Limit | None, about("Deliveries without acknowledgement.")] = None


class DeclaredConsumer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A durable consumer for other programs; agents have theirs by themselves."""

    description: Annotated[str | None, about("For people.")] = None
    filter_subjects: Annotated[tuple[Text, ...] | None, about("What it delivers; [] is everything.")] = None
    deliver_policy: Annotated[
        Literal["all", "last", "new", "by_start_sequence", "by_start_time", "last_per_subject"] | None,
        about("Where it begins. Default: all."),
    ] = None
    opt_start_seq: Annotated[Positive | None, about("Where by_start_sequence begins.")] = None
    opt_start_time: Annotated[Time | None, about("Where by_start_time begins, such as 2026-11-20T06:00:00Z.")] = None
    ack_policy: Annotated[
        Literal["explicit", "all", "none"] | None, about("What an acknowledgement is for. Default: explicit.")
    ] = None
    ack_wait: Annotated[Duration | None, about("How long until it is delivered again. Default: 30s.")] = None
    backoff: Annotated[
        tuple[Duration, ...] | None, about("How long instead, attempt by attempt; the last of them from then on.")
    ] = None
    max_deliver: Annotated[Limit | None, about("Deliveries of a message; -1: no limit.")] = None
    max_ack_pending: Annotated[
        Limit | None, about("Deliveries without acknowledgement; -1: no limit. Default: 1000.")
    ] = None
    replay_policy: Annotated[
        Literal["instant", "original"] | None, about("At once, or as slowly as they came. Default: instant.")
    ] = None
    sample_freq: Annotated[
        Annotated[int, Meta(ge=0, le=100)] | None, about("Percent of acknowledgements that are told in advisories.")
    ] = None
    headers_only: Annotated[bool | None, about("Without the payload.")] = None
    inactive_threshold: Annotated[Duration | None, about("After how long unused a server removes it; 0s: never.")] = (
        None
    )
    pause_until: Annotated[Time | None, about("Deliver nothing before this time; one that is over: deliver.")] = None
    num_replicas: Annotated[Count | None, about("Copies of its state; 0: as many as of the stream.")] = None
    mem_storage: Annotated[bool | None, about("Keep its state in memory.")] = None
    metadata: Annotated[dict[str, str] | None, about("Of your own, by name; others' stay.")] = None

    # Pull consumers.
    max_waiting: Annotated[Positive | None, about("Pull requests that may wait. Default: 512.")] = None
    max_batch: Annotated[Positive | None, about("Messages that one pull request may ask for.")] = None
    max_expires: Annotated[Duration | None, about("How long a pull request may wait.")] = None
    max_bytes: Annotated[Size | None, about("Bytes that one pull request may ask for.")] = None
    priority_groups: Annotated[tuple[Text, ...] | None, about("Groups of readers, which pulls name.")] = None
    priority_policy: Annotated[
        Literal["overflow", "pinned_client", "prioritized"] | None, about("Which readers of a group are given work.")
    ] = None
    priority_timeout: Annotated[
        Duration | None, about("How long a pinned reader may be silent before another is pinned.")
    ] = None

    # Push consumers.
    deliver_subject: Annotated[Text | None, about("Where to push; without it, readers pull.")] = None
    deliver_group: Annotated[Text | None, about("Queue group whose members share what is pushed.")] = None
    flow_control: Annotated[bool | None, about("Wait for readers that are slow; needs idle_heartbeat.")] = None
    idle_heartbeat: Annotated[Duration | None, about("Say after so long without a message that it is alive.")] = None
    rate_limit_bps: Annotated[Count | None, about("Bits per second at most; 0: no limit.")] = None


class DeclaredStream(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stream, or further settings of an event type's. A limit of -1, `unlimited` or 0s is none."""

    description: Annotated[str | None, about("For people.")] = None
    subjects: Annotated[tuple[Text, ...] | None, about("What it stores. Default: the subject of its name.")] = None
    storage: Annotated[Literal["file", "memory"] | None, about("Where. Default: file.")] = None
    retention: Annotated[
        Literal["limits", "interest", "workqueue"] | None,
        about("What lets a message go: the limits, that every consumer has it, or that one has. Default: limits."),
    ] = None
    discard: Annotated[Literal["old", "new"] | None, about("What gives way when the stream is full. Default: old.")] = (
        None
    )
    discard_new_per_subject: Annotated[
        bool | None, about("With discard: new, also refuse what is new where its subject is full.")
    ] = None
    max_msgs: Annotated[Limit | None, about("Messages.")] = None
    max_bytes: Annotated[SizeLimit | None, about("Bytes, such as 2Gi.")] = None
    max_age: Annotated[Duration | None, about("How long a message is kept.")] = None
    max_msgs_per_subject: Annotated[Limit | None, about("Messages of one subject.")] = None
    max_msg_size: Annotated[SizeLimit | None, about("Bytes of one message.")] = None
    max_consumers: Annotated[Limit | None, about("Consumers.")] = None
    num_replicas: Annotated[Annotated[int, Meta(ge=1, le=5)] | None, about("Copies in the cluster.")] = None
    placement: Annotated[Placement | None, about("Which servers may hold the copies; {} is any.")] = None
    compression: Annotated[Literal["none", "s2"] | None, about("On the disk.")] = None
    duplicate_window: Annotated[
        Duration | None, about("How long a message id is known; no longer than max_age. Default: 2m.")
    ] = None
    first_seq: Annotated[Positive | None, about("The first sequence, when the stream is created.")] = None
    subject_transform: Annotated[SubjectTransform | None, about("Store under another subject.")] = None
    republish: Annotated[Republish | None, about("Publish once more what is stored.")] = None
    consumer_limits: Annotated[ConsumerLimits | None, about("What consumers have unless they say less.")] = None
    metadata: Annotated[dict[str, str] | None, about("Of your own, by name; others' stay.")] = None
    no_ack: Annotated[bool | None, about("Acknowledge nothing to who publishes.")] = None
    allow_direct: Annotated[bool | None, about("Let every copy answer who asks for a message.")] = None
    mirror_direct: Annotated[bool | None, about("Let mirrors answer in the name of their origin.")] = None
    allow_rollup_hdrs: Annotated[
        bool | None, about("Let a message take the place of all before it, by Nats-Rollup.")
    ] = None
    allow_msg_ttl: Annotated[bool | None, about("Let a message say how long it is kept. Once on, for good.")] = None
    subject_delete_marker_ttl: Annotated[
        Duration | None, about("How long it is told that a subject's last message was too old.")
    ] = None
    allow_msg_schedules: Annotated[
        bool | None, about("Let a message say when it is to be published. Once on, for good.")
    ] = None
    allow_msg_counter: Annotated[bool | None, about("Every subject is a counter. Only when it is created.")] = None
    allow_atomic: Annotated[bool | None, about("Take several messages or none.")] = None
    allow_batched: Annotated[bool | None, about("Take fast batches.")] = None
    persist_mode: Annotated[
        Literal["default", "async"] | None,
        about("async: acknowledge before it is written. Only when it is created."),
    ] = None
    deny_delete: Annotated[bool | None, about("Refuse to delete messages. Once on, for good.")] = None
    deny_purge: Annotated[bool | None, about("Refuse to purge. Once on, for good.")] = None
    sealed: Annotated[bool | None, about("Refuse every change of what is stored. Once on, for good.")] = None
    consumers: Annotated[dict[str, DeclaredConsumer], about("Durable consumers by name.")] = {}


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


def as_jetstream(declared: Struct | None) -> dict[str, Any]:
    """The fields that are given, in JetStream's own JSON: durations are nanoseconds, times RFC 3339."""
    given = structs.asdict(declared) if declared else {}
    given.pop("consumers", None)
    return {name: _as_jetstream(name, value) for name, value in given.items() if value is not None}


def _as_jetstream(name: str, value: Any) -> Any:
    match value:
        case Duration():
            return int(value) * SECOND
        case Size():
            return int(value)
        case datetime():
            return value.isoformat().replace("+00:00", "Z")
        case Struct():
            return as_jetstream(value)
        case tuple():
            return [_as_jetstream(name, item) for item in value]
        case _:
            return str(value) if name == "sample_freq" else value


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
    return {field: (_as_jetstream(field, value), key) for field, (value, key) in stated.items() if value is not None}


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
            stated |= of_aviso
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
