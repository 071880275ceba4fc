"""The fields of streams and consumers: one table of each, in JetStream's own names.

`DeclaredStream` and `DeclaredConsumer` say what an operator can state, and beside each field what JetStream does with
it: its zero value, when it can be changed, what it excludes or needs. `STREAM` and `CONSUMER` are the same as data.
From them come the section `streams` of the configuration, the difference between two configurations (`plans`), what
the in-memory backend reports, and how values are shown.

A field that is not given is not ours to say: nobody compares it, and nobody changes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct, structs

from aviso_workers.aviso.codec import LARGEST_NUMBER
from aviso_workers.aviso.literals import SECOND, Duration, Size, SizeLimit

DAY = 86_400 * SECOND
NAMES = frozenset({"name", "durable_name"})
SERVER_METADATA = "_nats."
"""The prefix of metadata that servers write."""
DEFAULT_DUPLICATE_WINDOW = 120 * SECOND

Change = Literal["always", "when created", "only on"]
"""When a server lets a field be changed; `only on`: it can be switched on, and never off again."""
Kind = Literal["limit", "duration", "list", "time", "word", "flag", "other"]


class Field(Struct, frozen=True, kw_only=True):
    """The rules of JetStream for one field."""

    name: str
    kind: Kind
    zero: Any = None
    """The value that a server means that leaves the field out, or reports null; None where nothing is meant by that."""
    nothing: str = ""
    """How people write the zero value."""
    in_bytes: bool = False
    """Whether it is a number of bytes, which people write with a unit."""
    change: Change = "always"
    excludes: Mapping[str, tuple[Any, ...]] = {}
    """By other field, the values that a server does not take together with this one."""
    needs: tuple[str, ...] = ()
    """Other fields without which it means nothing."""
    needs_deliver_policy: str = ""
    only_pulled: bool = False
    """It is about pull requests, which a consumer with a `deliver_subject` does not take."""
    of_origin: bool = False
    """A mirror has it from its origin, or has no use for it without publishes."""
    not_for_events: str = ""
    """Why the stream of an event type must not have it."""
    since: tuple[int, int] = (2, 11)
    """The first nats-server that knows it. An older one passes it over, or refuses the request."""


LONGEST_SECONDS = 1e9
LONGEST_SAID = 512

Text = Annotated[str, Meta(min_length=1)]
Positive = Annotated[int, Meta(gt=0)]
Count = Annotated[int, Meta(ge=0)]
Limit = Annotated[int, Meta(ge=-1)]
Time = Annotated[datetime, Meta(tz=True)]
Number = Annotated[int, Meta(ge=0, lt=LARGEST_NUMBER)]
"""What we count, and sequences, in records that somebody else may have written: a server can be asked for the next."""
Seconds = Annotated[float, Meta(ge=0, le=LONGEST_SECONDS)]
"""How long something lasts, in such records: a time can be that much earlier or later."""
Said = Annotated[str, Meta(max_length=LONGEST_SAID)]
"""What such a record says in words."""


def about(**known: Any) -> Meta:
    """Return what the `Field` of a field says beside what its type does."""
    return Meta(extra={"field": known})


class Placement(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The servers that may hold the replicas of a stream."""

    cluster: Text | None = None
    """Name of the cluster. Default: the cluster of the client that creates the stream."""
    tags: tuple[Text, ...] = ()
    """Tags that a server must have, all of them, such as az:1."""


class Republish(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Publishing of stored messages once more, for subscribers without JetStream."""

    src: Text = ">"
    """Subjects of the messages, with wildcards."""
    dest: Text
    """Subject to publish them to. It takes over the wildcards, as in copy.>."""
    headers_only: bool = False
    """Without the payloads: only the headers."""


class SubjectTransform(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A subject under which messages are stored instead of the one they were published to."""

    src: Text = ">"
    """Subjects of the messages, with wildcards."""
    dest: Text
    """Subject to store them under, such as stored.>."""


class External(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The domain or account of a stream that is followed."""

    api: Text
    """Prefix of its JetStream API, such as $JS.hub.API for the domain hub."""
    deliver: Text | None = None
    """Prefix of the subjects on which another account delivers the messages."""


class Origin(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stream that a mirror follows, or whose messages are stored in this one too."""

    name: Text
    """Name of that stream."""
    external: External | None = None
    """Domain or account of that stream. Default: the same as of this one."""
    filter_subject: Text | None = None
    """Subjects of the messages to take, with wildcards. Default: all."""
    subject_transforms: tuple[SubjectTransform, ...] | None = None
    """Subjects of the messages to take, and the subjects to store them under."""
    opt_start_seq: Positive | None = None
    """Sequence at which to begin. Default: the first."""
    opt_start_time: Time | None = None
    """Time at which to begin, such as 2026-11-20T06:00:00Z."""


class ConsumerLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the stream's consumers, which are also their defaults."""

    inactive_threshold: Duration | None = None
    """Time without use after which a consumer is removed, such as 1h."""
    max_ack_pending: Limit | None = None
    """Maximum number of deliveries without acknowledgement."""


class DeclaredConsumer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A durable consumer for a program that is not an agent. Agents create their own consumers."""

    description: str | None = None
    """Description for people."""
    filter_subjects: Annotated[tuple[Text, ...] | None, about(nothing="everything")] = None
    """Subjects of the messages to deliver, with wildcards; [] is all. Default: all."""
    deliver_policy: Annotated[
        Literal["all", "last", "new", "by_start_sequence", "by_start_time", "last_per_subject"] | None,
        about(zero="all", change="when created"),
    ] = None
    """Where the consumer begins. Default: all, which is the first message."""
    opt_start_seq: Annotated[
        Positive | None, about(change="when created", needs_deliver_policy="by_start_sequence")
    ] = None
    """Sequence at which by_start_sequence begins."""
    opt_start_time: Annotated[Time | None, about(change="when created", needs_deliver_policy="by_start_time")] = None
    """Time at which by_start_time begins, such as 2026-11-20T06:00:00Z."""
    ack_policy: Annotated[Literal["explicit", "all", "none"] | None, about(change="when created")] = None
    """explicit: each message is acknowledged by itself; all: together with those before it; none: not at all. Default:
    explicit."""
    ack_wait: Duration | None = None
    """Time after which a message without acknowledgement is delivered again. Default: 30s."""
    backoff: Annotated[tuple[Duration, ...] | None, about(nothing="none")] = None
    """Times instead of ack_wait, one for each delivery. The last one also applies to all further deliveries."""
    max_deliver: Annotated[Limit | None, about(zero=-1, kind="other")] = None
    """Maximum number of deliveries of a message; -1 means no limit. Default: no limit."""
    max_ack_pending: Annotated[Limit | None, about(zero=-1, kind="other")] = None
    """Maximum number of deliveries without acknowledgement; -1 means no limit. Default: 1000."""
    replay_policy: Annotated[Literal["instant", "original"] | None, about(zero="instant", change="when created")] = None
    """instant: deliver messages at once; original: at the pace at which they were stored. Default: instant."""
    sample_freq: Annotated[int, Meta(ge=0, le=100)] | None = None
    """Percentage of the acknowledgements of which the server publishes advisories. Default: 0."""
    headers_only: bool | None = None
    """Without the payloads: only the headers."""
    inactive_threshold: Annotated[Duration | None, about(nothing="unlimited")] = None
    """Time without use after which the server removes the consumer; 0s is never. Default: never."""
    pause_until: Time | None = None
    """Time before which nothing is delivered. A time in the past ends a pause."""
    num_replicas: Annotated[Count | None, about(zero=0)] = None
    """Number of replicas of its state; 0 is as many as the stream has. Default: 0."""
    mem_storage: Annotated[bool | None, about(change="when created")] = None
    """Keep its state in memory, and not on disk."""
    metadata: dict[str, str] | None = None
    """Metadata of your own, by name. Entries of others stay."""

    # Pull consumers.
    max_waiting: Annotated[Positive | None, about(zero=0, change="when created", only_pulled=True)] = None
    """Maximum number of waiting pull requests. Default: 512."""
    max_batch: Annotated[Positive | None, about(only_pulled=True)] = None
    """Maximum number of messages that one pull request may ask for. Default: no limit."""
    max_expires: Annotated[Duration | None, about(only_pulled=True)] = None
    """Maximum time for which a pull request may wait. Default: no limit."""
    max_bytes: Annotated[Size | None, about(zero=-1, only_pulled=True)] = None
    """Maximum size of the messages that one pull request may ask for, such as 4Mi. Default: no limit."""
    priority_groups: Annotated[
        tuple[Text, ...] | None, about(nothing="none", needs=("priority_policy",), only_pulled=True)
    ] = None
    """Names of priority groups, of which each pull request names one."""
    priority_policy: Annotated[
        Literal["overflow", "pinned_client", "prioritized"] | None, about(zero="none", needs=("priority_groups",))
    ] = None
    """How pull requests of a group are served. overflow: only if their thresholds are reached; pinned_client: those of
    one client, until it is silent; prioritized: those of the lowest priority number first."""
    priority_timeout: Annotated[Duration | None, about(needs=("priority_policy",))] = None
    """Time without pull requests after which another client is pinned."""

    # Push consumers.
    deliver_subject: Text | None = None
    """Subject to which messages are pushed. Default: clients pull them."""
    deliver_group: Annotated[Text | None, about(needs=("deliver_subject",))] = None
    """Queue group whose members share the pushed messages."""
    flow_control: Annotated[bool | None, about(change="when created", needs=("deliver_subject", "idle_heartbeat"))] = (
        None
    )
    """Pause for clients that are slow. It needs idle_heartbeat."""
    idle_heartbeat: Annotated[Duration | None, about(change="when created", needs=("deliver_subject",))] = None
    """Time without a message after which a heartbeat is sent, such as 15s."""
    rate_limit_bps: Annotated[Count | None, about(needs=("deliver_subject",))] = None
    """Maximum rate, in bits per second; 0 means no limit. Default: no limit."""


class DeclaredStream(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stream, or further settings of an event type's stream. A key that is not given is left as the server has it;
    its default holds for a new stream. A limit of -1, `unlimited` or 0s means no limit.
    """

    description: str | None = None
    """Description for people."""
    subjects: Annotated[tuple[Text, ...] | None, about(nothing="everything", of_origin=True)] = None
    """Subjects of the messages that it stores, with wildcards. Default: the stream's name."""
    storage: Annotated[Literal["file", "memory"] | None, about(zero="file", change="when created")] = None
    """Storage: on disk (file), or in memory. Default: file."""
    retention: Annotated[Literal["limits", "interest", "workqueue"] | None, about(zero="limits")] = None
    """When a message is removed. limits: at the limits; interest: also once every consumer has acknowledged it;
    workqueue: also once one consumer has. Default: limits."""
    discard: Annotated[Literal["old", "new"] | None, about(zero="old")] = None
    """What a full stream does with a new message. old: remove old messages for it; new: refuse it. Default: old."""
    discard_new_per_subject: Annotated[bool | None, about(excludes={"discard": ("old",)})] = None
    """Also refuse a new message if its subject has max_msgs_per_subject messages. It needs discard: new."""
    max_msgs: Annotated[Limit | None, about(zero=-1)] = None
    """Maximum number of messages. Default: no limit."""
    max_bytes: Annotated[SizeLimit | None, about(zero=-1)] = None
    """Maximum size of the stream, such as 2Gi. Default: no limit."""
    max_age: Annotated[Duration | None, about(nothing="unlimited")] = None
    """Age up to which a message is kept, such as 30d. Default: no limit."""
    max_msgs_per_subject: Annotated[Limit | None, about(zero=-1)] = None
    """Maximum number of messages of one subject. Default: no limit."""
    max_msg_size: Annotated[SizeLimit | None, about(zero=-1)] = None
    """Maximum size of one message, such as 1Mi. Default: no limit."""
    max_consumers: Annotated[Limit | None, about(zero=-1)] = None
    """Maximum number of consumers. Default: no limit."""
    num_replicas: Annotated[Annotated[int, Meta(ge=1, le=5)] | None, about(zero=1)] = None
    """Number of replicas in the cluster. Default: 1."""
    placement: Placement | None = None
    """Servers that may hold the replicas; {} is any server. Default: any server."""
    compression: Annotated[Literal["none", "s2"] | None, about(zero="none")] = None
    """Compression on the disk. Default: none."""
    duplicate_window: Annotated[Duration | None, about(nothing="unlimited", of_origin=True)] = None
    """Time for which message ids are known, so that repeats are stored once; at most max_age. Default: 2m."""
    mirror: Annotated[Origin | None, about(change="when created")] = None
    """Stream to mirror, with its sequences. A mirror takes no publishes. It can be set only when the stream is
    created."""
    sources: Annotated[tuple[Origin, ...] | None, about(of_origin=True)] = None
    """Streams whose messages are stored in this one too; [] is none. Default: none."""
    first_seq: Annotated[Positive | None, about(change="when created", of_origin=True)] = None
    """Sequence of the first message. It can be set only when the stream is created. Default: 1."""
    subject_transform: Annotated[
        SubjectTransform | None, about(of_origin=True, not_for_events="agents find notifications by their subject")
    ] = None
    """Store messages under another subject."""
    republish: Republish | None = None
    """Publish stored messages again, to another subject."""
    consumer_limits: ConsumerLimits | None = None
    """Limits of the stream's consumers, which are also their defaults."""
    metadata: dict[str, str] | None = None
    """Metadata of your own, by name. Entries of others stay."""
    no_ack: Annotated[bool | None, about(not_for_events="publishing waits for the acknowledgement")] = None
    """Do not acknowledge publishes. Default: false."""
    allow_direct: bool | None = None
    """Let every replica answer requests for a message, and not only the leader."""
    mirror_direct: bool | None = None
    """Let a mirror answer requests for messages of its origin."""
    allow_rollup_hdrs: Annotated[bool | None, about(excludes={"deny_purge": (True,)})] = None
    """Let a message with the header Nats-Rollup replace all messages before it. Default: false."""
    allow_msg_ttl: Annotated[bool | None, about(change="only on")] = None
    """Let a message set how long it is kept. It cannot be switched off again. Default: false."""
    subject_delete_marker_ttl: Duration | None = None
    """Time for which a marker says that the last message of a subject has expired."""
    allow_msg_schedules: Annotated[
        bool | None, about(change="only on", excludes={"discard": ("new",)}, of_origin=True, since=(2, 12))
    ] = None
    """Let a message set when it is published. It cannot be switched off again. Default: false."""
    allow_msg_counter: Annotated[
        bool | None,
        about(
            change="when created",
            excludes={"retention": ("interest", "workqueue"), "discard": ("new",), "allow_msg_ttl": (True,)},
            of_origin=True,
            not_for_events="a notification is not a number",
            since=(2, 12),
        ),
    ] = None
    """Make every subject a counter. It can be set only when the stream is created. Default: false."""
    allow_atomic: Annotated[bool | None, about(of_origin=True, since=(2, 12))] = None
    """Accept atomic batches, of which all messages are stored or none. Default: false."""
    allow_batched: Annotated[bool | None, about(of_origin=True, since=(2, 14))] = None
    """Accept fast batches, which are acknowledged together and not message by message. Default: false."""
    persist_mode: Annotated[
        Literal["default", "async"] | None,
        about(
            zero="default",
            change="when created",
            excludes={"allow_atomic": (True,), "storage": ("memory",)},
            not_for_events="what was acknowledged must be stored",
            since=(2, 12),
        ),
    ] = None
    """async: acknowledge a message before it is written to disk. It can be set only when the stream is created.
    Default: default."""
    deny_delete: Annotated[bool | None, about(change="only on")] = None
    """Refuse to delete messages. It cannot be switched off again. Default: false."""
    deny_purge: Annotated[bool | None, about(change="only on")] = None
    """Refuse to purge messages. It cannot be switched off again. Default: false."""
    sealed: Annotated[bool | None, about(change="only on")] = None
    """Refuse every change of the stored messages. It cannot be switched off again. Default: false."""
    consumers: dict[str, DeclaredConsumer] = {}
    """Durable consumers by name."""


def as_jetstream(declared: Struct | None) -> dict[str, Any]:
    """Return the fields that are given, in JetStream's own JSON: durations are nanoseconds, times RFC 3339."""
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


_KINDS: dict[object, dict[str, Any]] = {
    Duration: {"kind": "duration", "zero": 0},
    bool: {"kind": "flag", "zero": False},
    datetime: {"kind": "time"},
    tuple: {"kind": "list", "zero": []},
    Literal: {"kind": "word"},
    tuple[Origin, ...]: {"kind": "other"},
}
"""The rules of a field that follow from its type, or from what its type is made of."""


def _table(declared: type[Struct]) -> dict[str, Field]:
    # Not by msgspec.inspect, which takes a tenth of a second for these two.
    hints = get_type_hints(declared, include_extras=True)
    return {name: _field(name, hint) for name, hint in hints.items()}


def _field(name: str, hint: Any) -> Field:
    stated, meta = get_args(hint) if get_origin(hint) is Annotated else (hint, about())
    known = (meta.extra or {})["field"]
    wanted = next((each for each in get_args(stated) if each is not NoneType), stated)
    if get_origin(wanted) is Annotated:
        wanted = get_args(wanted)[0]
    number: dict[str, Any] = {"kind": "limit" if known.get("zero") == -1 else "other"}
    rules = _KINDS.get(wanted) or _KINDS.get(get_origin(wanted)) or number
    return Field(name=name, in_bytes=wanted in (Size, SizeLimit), **{**rules, **known})


STREAM = _table(DeclaredStream)
CONSUMER = _table(DeclaredConsumer)
_EITHER = CONSUMER | STREAM
"""The fields of streams and of consumers, by name: a name that both have means the same."""


def normalised(name: str, value: Any) -> Any:
    """Return a value as the server reports it: it turns what is missing, and what means unlimited, into one form."""
    match _EITHER.get(name):
        case Field(kind="limit"):
            return value if value and value > 0 else -1
        case Field(kind="list"):
            return list(value or ())
        case Field(kind="duration" | "word" | "flag", zero=zero):
            return value or zero
    return value


def comparable(name: str, value: Any) -> Any:
    """Return one value for all values that mean the same to a server, which leaves out what is empty, zero or off."""
    if name == "sample_freq":
        return (value or "").rstrip("%") or None
    if name in _EITHER and _EITHER[name].kind == "time":
        return msgspec.convert(value, datetime | None)
    return something(normalised(name, value))


def something(value: Any) -> Any:
    """Return a value without what is empty, zero or off in it, however deep; None where nothing is left."""
    if isinstance(value, dict):
        value = {key: kept for key, inside in value.items() if (kept := something(inside)) is not None}
    elif isinstance(value, list):
        value = [something(inside) for inside in value]
    return value or None


def readable(name: str, value: Any) -> str:
    """Return the value of a field as people write it."""
    value = normalised(name, value)
    match _EITHER.get(name):
        case Field(kind="list", nothing=nothing):
            return ", ".join(each if isinstance(each, str) else _duration(each) for each in value) or nothing
        case Field(kind="duration", nothing=nothing):
            return _duration(value) if value or not nothing else nothing
        case Field(in_bytes=True) if value and value > 0:
            return Size(value).literal()
    if value is None or isinstance(value, bool | dict | list):
        return msgspec.json.encode(value).decode() if value else "false" if value is False else "none"
    return "unlimited" if value == -1 else str(value)


def _duration(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, SECOND)
    return f"{nanoseconds / SECOND:g}s" if rest else Duration(seconds).literal()


def configured(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the fields of a stream's or consumer's configuration whose values are not the zero ones, as people write
    these, without its name.
    """
    for name, value in config.items():
        if name == "metadata":
            value = {key: text for key, text in value.items() if not key.startswith(SERVER_METADATA)}
        if name not in NAMES and comparable(name, value) not in (None, -1):
            yield name, readable(name, value)
