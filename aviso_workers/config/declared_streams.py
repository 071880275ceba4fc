"""What operators can declare of streams and consumers: the section `streams`.

The names and values are JetStream's own; `as_jetstream` turns what was read into its JSON. What is not given is not
ours to say: nobody compares it, and nobody changes it. A stream that an event type has already can be given further
settings here. What types cannot say is in `stream_keys`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, structs

from aviso_workers.config.fields import Count, Positive, Text, about
from aviso_workers.literals import Duration, Size, SizeLimit

__all__ = [
    "ConsumerLimits",
    "DeclaredConsumer",
    "DeclaredStream",
    "External",
    "Origin",
    "Placement",
    "Republish",
    "SubjectTransform",
    "as_jetstream",
    "jetstream_value",
]

SECOND = 1_000_000_000

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


class External(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a stream of another domain or account is."""

    api: Annotated[Text, about("Prefix of its JetStream API, such as $JS.hub.API for the domain hub.")]
    deliver: Annotated[Text | None, about("Prefix under which another account lets it deliver.")] = None


class Origin(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stream that is followed."""

    name: Annotated[Text, about("Name of the stream.")]
    external: Annotated[External | None, about("Where it is. Default: in the same account.")] = None
    filter_subject: Annotated[Text | None, about("Which subjects of it. Default: all.")] = None
    subject_transforms: Annotated[
        tuple[SubjectTransform, ...] | None, about("Which subjects of it, and under which they are stored.")
    ] = None
    opt_start_seq: Annotated[Positive | None, about("From which sequence on. Default: the first.")] = None
    opt_start_time: Annotated[Time | None, about("From which time on, such as 2026-11-20T06:00:00Z.")] = None


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
    mirror: Annotated[
        Origin | None, about("Follow that stream, under its sequences, and take no publishes. Only when it is created.")
    ] = None
    sources: Annotated[tuple[Origin, ...] | None, about("Take in what those streams store; [] is none.")] = None
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


def as_jetstream(declared: Struct | None) -> dict[str, Any]:
    """The fields that are given, in JetStream's own JSON: durations are nanoseconds, times RFC 3339."""
    given = structs.asdict(declared) if declared else {}
    given.pop("consumers", None)
    if given.get("sample_freq") is not None:
        given["sample_freq"] = str(given["sample_freq"])
    return {name: jetstream_value(value) for name, value in given.items() if value is not None}


def jetstream_value(value: Any) -> Any:
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
            return [jetstream_value(item) for item in value]
        case _:
            return value
