"""Streams and consumers as we want them, and the plan that leads there from what a server has.

Pure: `engine.provisioning` carries a stream's plan out, `ops.stream_policy` a consumer's. Field names, units
(nanoseconds) and values are those of JetStream's own JSON. A field that is `UNSET`, or not among those stated, is not
ours to say: it is left out when a stream is created, never compared, and never changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import datetime
from itertools import chain
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, structs

from aviso_workers import subjects
from aviso_workers.config import Config
from aviso_workers.config.declared_streams import SECOND, as_jetstream
from aviso_workers.config.stream_keys import event_streams, stated_by_aviso
from aviso_workers.literals import Duration
from aviso_workers.schema import EventType, topic_of
from aviso_workers.topics import stream_name

__all__ = [
    "FENCED",
    "GROUP",
    "PINNED",
    "PRIORITIZED",
    "SECOND",
    "UNFINISHED",
    "UNREADABLE",
    "UPDATABLE",
    "ConsumerPlan",
    "ConsumerSpec",
    "Difference",
    "Plan",
    "Removal",
    "Stored",
    "StreamSpec",
    "after_reset",
    "beginning_after",
    "consumer_differences",
    "consumer_plan",
    "declared",
    "event_stream",
    "filters_of",
    "is_of_set",
    "is_unfinished",
    "noted_versions",
    "own_stream",
    "part_used",
    "plan",
    "readable",
    "reads_all",
    "resets_of",
    "shared",
    "shorter_age",
    "starting",
    "stated",
    "version_of",
    "with_ack_wait",
    "with_removals",
]

DAY = 86_400 * SECOND
DEFAULT_DUPLICATE_WINDOW = 120 * SECOND


UNREADABLE = "aviso_workers_unreadable"
"""The empty stream that says of a server that it cannot read another one that it has."""
PRIORITY = frozenset({"priority_policy", "priority_groups", "priority_timeout"})
UPDATABLE = PRIORITY | {"ack_wait", "filter_subjects", "max_ack_pending", "max_deliver", "metadata"}
"""The consumer fields that we state and that a server lets change."""


STARTING = frozenset({"deliver_policy", "opt_start_seq", "opt_start_time", "metadata"})
"""What says where a consumer begins: told apart by what was declared, not by what became of that."""
START = "aviso-workers-start"
RESETS = "aviso-workers-resets"
VERSIONS = "aviso-workers-versions"
"""The metadata of a durable consumer that says which versions of an agent read it: see `noted_versions`."""
ACK_WAIT = "ack_wait="
"""What the name of a version in the metadata begins with, before its nanoseconds and its filter subjects."""
LONGEST_ACK_WAIT = 2**63 - 1
"""In nanoseconds: a server counts them in 64 bits."""
MOST_HEARD = 2**32
"""More often than a version is heard of while it lives."""
MOST_NOTED = 200
"""Words of all versions that are noted in one consumer. A version has up to nine; to unite many takes long."""
MOST_DIGITS = 19
"""As many as a number of 64 bits has."""
FENCED = "aviso-workers-fenced"
"""The metadata of a stream that was fenced when its mirror was promoted: which subjects it had."""
UNFINISHED = "aviso-workers-unfinished"
"""The metadata of a stream that is not whole, because a restore of it is under way or was killed."""
OF_SET = "of set "
"""What the metadata's value has where a set of streams is restored as one; the set's id follows."""

LONGEST_NAME = 255
"""Characters that the name of a stream may have."""
FOR_GOOD = frozenset({"allow_msg_schedules", "allow_msg_ttl", "deny_delete", "deny_purge", "sealed"})
"""What can be switched on and never off again."""
WHEN_CREATED = frozenset({"allow_msg_counter", "first_seq", "mirror", "persist_mode", "storage"})
"""What a server does not change of a stream; of a consumer it is `CONSUMER_WHEN_CREATED`."""
CONSUMER_WHEN_CREATED = frozenset(
    {
        "ack_policy",
        "deliver_policy",
        "flow_control",
        "idle_heartbeat",
        "max_waiting",
        "mem_storage",
        "opt_start_seq",
        "opt_start_time",
        "replay_policy",
    }
)
LIMITS = ("max_msgs", "max_bytes", "max_age", "max_msgs_per_subject", "max_msg_size", "max_consumers")
LISTS = frozenset({"backoff", "filter_subjects", "priority_groups", "subjects"})
COUNTS = frozenset({"max_bytes", "max_consumers", "max_msg_size", "max_msgs", "max_msgs_per_subject"})
"""Of these, a server reports -1 where there is no limit."""
DURATIONS = frozenset(
    {
        "ack_wait",
        "duplicate_window",
        "idle_heartbeat",
        "inactive_threshold",
        "max_age",
        "max_expires",
        "priority_timeout",
        "subject_delete_marker_ttl",
    }
)
WORDS = {
    "compression": "none",
    "deliver_policy": "all",
    "discard": "old",
    "persist_mode": "default",
    "priority_policy": "none",
    "replay_policy": "instant",
    "retention": "limits",
    "storage": "file",
}
"""What a server may leave out."""


class StreamSpec(Struct, frozen=True, kw_only=True):
    """What we state about a stream."""

    name: str
    subjects: tuple[str, ...] | UnsetType = UNSET
    description: str | UnsetType = UNSET
    storage: str | UnsetType = UNSET
    retention: str | UnsetType = UNSET
    discard: str | UnsetType = UNSET
    max_msgs: int | UnsetType = UNSET
    max_bytes: int | UnsetType = UNSET
    max_age: int | UnsetType = UNSET
    """Nanoseconds."""
    max_msgs_per_subject: int | UnsetType = UNSET
    num_replicas: int | UnsetType = UNSET
    compression: str | UnsetType = UNSET
    duplicate_window: int | UnsetType = UNSET
    """Nanoseconds."""
    allow_direct: bool | UnsetType = UNSET
    allow_rollup_hdrs: bool | UnsetType = UNSET
    allow_msg_ttl: bool | UnsetType = UNSET
    subject_delete_marker_ttl: int | UnsetType = UNSET
    """Nanoseconds for which it is told that a subject's last message was too old."""
    allow_msg_counter: bool | UnsetType = UNSET
    allow_msg_schedules: bool | UnsetType = UNSET
    further: Mapping[str, Any] = {}
    """What operators declare beyond that, in JetStream's own JSON."""
    takes_batches: bool = True
    """Whether it takes batches, of those that its server knows, when it is created and nothing else is stated."""
    keys: Mapping[str, str] = {}
    """By field, the key of the configuration that states it, for people to find."""


PINNED = "pinned_client"
PRIORITIZED = "prioritized"
GROUP = "workers"
"""A consumer of one of these two policies has one group, by which its readers ask."""


class ConsumerSpec(Struct, frozen=True, kw_only=True):
    """What we state about a durable pull consumer."""

    durable_name: str
    filter_subjects: tuple[str, ...]
    ack_wait: int
    """Nanoseconds."""
    max_ack_pending: int
    max_deliver: int = -1
    ack_policy: str = "explicit"
    deliver_policy: str = "all"
    opt_start_seq: int | UnsetType = UNSET
    opt_start_time: str | UnsetType = UNSET
    """RFC 3339."""
    metadata: Mapping[str, str] | UnsetType = UNSET
    priority_policy: str = "none"
    priority_groups: tuple[str, ...] = ()
    priority_timeout: int = 0
    """Nanoseconds after its last request for which a pinned reader stays the only one that is served."""


class Version(Struct, frozen=True, order=True):
    """What one version of an agent wants of the consumer that it shares with others."""

    filter_subjects: tuple[str, ...]
    """Sorted; none means everything."""
    ack_wait: int
    """Nanoseconds."""


class Stored(Struct, frozen=True, kw_only=True):
    """What a stream stores, as far as it tells what a change of its limits would remove."""

    messages: int = 0
    bytes: int = 0
    subjects: int = 0
    """How many subjects the messages have."""
    consumers: int = 0
    older: int | None = None
    """Messages that are older than the wanted `max_age`; None where nobody has counted them."""


Precision = Literal["", "about ", "up to "]


class Removal(Struct, frozen=True):
    """How many of its stored messages a stream would lose by a change."""

    count: int
    of: int
    precision: Precision = ""

    def __str__(self) -> str:
        return f"removes {self.precision}{self.count} of {self.of} messages"


class Difference(Struct, frozen=True, kw_only=True):
    field: str
    found: Any
    wanted: Any
    cure: str = ""
    """Why a server does not change the field, and what to do about it; empty where it does."""
    removal: Removal | None = None
    """What of the stored messages the change would remove."""

    def __str__(self) -> str:
        change = f"{self.field}: {readable(self.field, self.found)} -> {readable(self.field, self.wanted)}"
        if self.cure:
            return f"{change}; {self.cure}"
        if self.removal:
            return f"{change}, which {self.removal}"
        return f"{change}, for good" if self.field in FOR_GOOD and self.wanted else change


class _Step(Struct, frozen=True, kw_only=True):
    """What has to be done: create, update to `config`, or nothing where there is no difference."""

    exists: bool
    config: Mapping[str, Any]
    """The whole configuration to send; unknown fields of the server's are in it unchanged."""
    differences: tuple[Difference, ...] = ()
    """What an update changes."""
    fixed: tuple[Difference, ...] = ()
    """What no update changes. Where there is some before it exists, it cannot be created."""

    @property
    def needed(self) -> bool:
        return bool(self.differences) if self.exists else not self.fixed


class Plan(_Step, frozen=True, kw_only=True):
    """What has to be done about a stream."""

    wanted: StreamSpec
    removing: tuple[Difference, ...] = ()
    """What would remove stored messages: `config` is without it, `with_removals` adds it."""
    unstated: tuple[str, ...] = ()
    """The limits that the stream has and the configuration does not state: it keeps them."""
    fenced: bool = False
    """Another stream has taken its place: nothing is applied, and using it is an error."""
    unfinished: bool = False
    """A restore of it is under way, or was killed: nothing is applied, and it cannot be used yet."""

    @property
    def stream(self) -> str:
        return self.wanted.name

    @property
    def storage_mismatch(self) -> bool:
        """Storage cannot be changed: nothing else is applied, and using the stream is an error."""
        return any(difference.field == "storage" for difference in self.fixed)

    @property
    def needed(self) -> bool:
        return (super().needed or bool(self.removing)) and not self.storage_mismatch


class ConsumerPlan(_Step, frozen=True, kw_only=True):
    """What has to be done about a declared consumer."""

    stream: str
    consumer: str


def event_stream(name: str, event_type: EventType, config: Config) -> StreamSpec:
    """The stream of an event type's base: as Aviso's keys state it, and the section `streams` beyond them."""
    of_aviso = stated_by_aviso(name, event_type, config.notification_backend.jetstream)
    stream = stream_name(topic_of(name, event_type).base)
    further = as_jetstream(config.streams.get(stream))
    mirrors = "mirror" in further
    if mirrors:
        del of_aviso["subjects"]  # it takes its origin's messages and no publishes
    spec = {
        "name": stream,
        **{field: value for field, (value, _) in of_aviso.items()},
        "further": {field: value for field, value in further.items() if field not in of_aviso},
        "takes_batches": not mirrors,
        "keys": _keys(stream, further) | {field: key for field, (_, key) in of_aviso.items()},
    }
    return msgspec.convert(spec, StreamSpec)


def declared(config: Config) -> list[StreamSpec]:
    """The streams of the section `streams` that no event type has."""
    of_events = event_streams(config.notification_schema)
    found = {name: as_jetstream(stream) for name, stream in config.streams.items() if name not in of_events}
    return [
        StreamSpec(name=name, further=further, takes_batches=False, keys=_keys(name, further))
        for name, further in found.items()
    ]


def own_stream(name: str, subject: str, config: Config, **stated: Any) -> StreamSpec:
    """A stream of our own state: kept by limits, stored and copied as the configuration says."""
    jetstream = config.notification_backend.jetstream
    return StreamSpec(
        name=name,
        subjects=(subject,),
        storage=jetstream.storage_type,
        retention="limits",
        num_replicas=config.workers.dead_letters.replicas or jetstream.replicas or UNSET,
        **stated,
    )


def stated(spec: StreamSpec) -> dict[str, Any]:
    """What is stated about a stream, as one JSON object of JetStream's."""
    fields: dict[str, Any] = msgspec.to_builtins(spec)
    del fields["takes_batches"], fields["keys"]
    fields |= fields.pop("further")
    if "num_replicas" in fields:
        fields["num_replicas"] = fields["num_replicas"] or 1
    return fields


def plan(wanted: StreamSpec, found: Mapping[str, Any] | None, stored: Stored) -> Plan:
    """The way from the configuration that a server reports (None: no such stream) to the wanted one.

    What would remove some of what is stored is told apart, as `removing`: a stream is shared, and what one
    configuration does not want to keep, others may.
    """
    fields = _fields(wanted)
    if found is None:
        return Plan(wanted=wanted, exists=False, config=fields, fixed=_not_when_created(fields))
    if FENCED in (found.get("metadata") or {}):
        return Plan(wanted=wanted, exists=True, config=found, fenced=True)
    if is_unfinished(found):
        return Plan(wanted=wanted, exists=True, config=found, unfinished=True)
    differences, fixed = _told_apart(_differences(fields, found), _stream_cure)
    # Judged together: whether a lower limit removes messages depends on `discard`, which may differ as well.
    whole, _ = _updated(found, differences, fields)
    judged = [structs.replace(each, removal=_removal(each, whole, stored)) for each in differences]
    harmless = tuple(each for each in judged if each.removal is None)
    config, harmless = _updated(found, harmless, fields)
    removing = tuple(each for each in judged if each.removal is not None)
    return Plan(
        wanted=wanted,
        exists=True,
        config=config,
        differences=harmless,
        fixed=fixed,
        removing=removing,
        unstated=tuple(
            limit for limit in LIMITS if limit not in fields and _something(found.get(limit)) not in (None, -1)
        ),
    )


def with_removals(plan: Plan) -> Plan:
    """The plan that also does what removes stored messages."""
    config, added = _updated(plan.config, plan.removing, _fields(plan.wanted))
    return structs.replace(plan, config=config, differences=(*plan.differences, *added), removing=())


def shorter_age(wanted: StreamSpec, found: Mapping[str, Any]) -> int | None:
    """The wanted `max_age` in nanoseconds, where that is shorter than the stream's."""
    age, current = _fields(wanted).get("max_age"), found.get("max_age")
    return age if age and (not current or age < current) else None


def consumer_plan(stream: str, name: str, wanted: Mapping[str, Any], found: Mapping[str, Any] | None) -> ConsumerPlan:
    """The same for a consumer of which these fields are stated."""
    if found is None:
        # Left to a server, nothing would be acknowledged.
        config = {"durable_name": name, "name": name, "ack_policy": "explicit", **wanted}
        return ConsumerPlan(stream=stream, consumer=name, exists=False, config=config)
    found = {**found, "filter_subjects": filters_of(found)}
    found.pop("filter_subject", None)  # of the two, a server takes one
    differences, fixed = _told_apart(_differences(wanted, found), _consumer_cure)
    config = {**found, **{difference.field: difference.wanted for difference in differences}}
    return ConsumerPlan(stream=stream, consumer=name, exists=True, config=config, differences=differences, fixed=fixed)


def is_unfinished(stream_config: Mapping[str, Any]) -> bool:
    """Whether a restore of the stream is under way, or was killed."""
    return UNFINISHED in (stream_config.get("metadata") or {})


def is_of_set(stream_config: Mapping[str, Any]) -> bool:
    """Whether it is unfinished because a restore of a set of backups is under way, or was killed."""
    return OF_SET in (stream_config.get("metadata") or {}).get(UNFINISHED, "")


def filters_of(consumer: Mapping[str, Any]) -> list[str]:
    """The filters of a consumer as a server reports it: a single one may be under another name than several."""
    single = consumer.get("filter_subject")
    return [single] if single else list(consumer.get("filter_subjects") or ())


def part_used(config: Mapping[str, Any], *, messages: int, bytes: int) -> float | None:
    """How much of the nearest of its limits of messages and bytes a stream uses; None where it has none."""
    parts = [
        counted / config[limit]
        for counted, limit in ((messages, "max_msgs"), (bytes, "max_bytes"))
        if config.get(limit, -1) > 0
    ]
    return max(parts, default=None)


def reads_all(consumer: Mapping[str, Any], subjects: Collection[str]) -> bool:
    """Whether a consumer's filters leave out nothing of a stream of these subjects."""
    filters = filters_of(consumer)
    return not filters or set(subjects) <= set(filters)


def consumer_differences(wanted: ConsumerSpec, found: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Where a consumer, as a server reports it, is not as wanted; of these, `UPDATABLE` can be brought in line."""
    found = {**found, "filter_subjects": filters_of(found)}
    start = _start_differs(wanted, found)
    passed_over = STARTING
    if wanted.priority_policy == "none" and found.get("priority_policy") == PRIORITIZED:
        passed_over |= PRIORITY  # another worker's wish, which changes nothing for those that are near
    fields = {name: value for name, value in msgspec.to_builtins(wanted).items() if name not in passed_over}
    if noted := {name: text for name, text in (wanted.metadata or {}).items() if name != START}:
        fields["metadata"] = noted
    return (*_differences(fields, found), *([start] if start else ()))


def is_name(text: str) -> bool:
    """Whether a stream may have this name."""
    return 0 < len(text) <= LONGEST_NAME and text.isprintable() and not {*" .*>/\\"} & {*text}


def version_of(spec: ConsumerSpec) -> Version:
    """The version of an agent whose consumer would be that, if there were no other."""
    return Version(tuple(sorted(spec.filter_subjects)), spec.ack_wait)


def noted_versions(consumer: Mapping[str, Any]) -> dict[Version, int]:
    """Each version of an agent that reads the consumer, as a server reports that, and how often it was heard of.

    A consumer that no version has noted itself in is taken for that of one version, whose fields it has; so is one in
    which somebody else has noted what cannot be read.
    """
    ack_wait = int(consumer.get("ack_wait") or 0)
    noted = (consumer.get("metadata") or {}).get(VERSIONS)
    with suppress(ValueError):
        if noted:
            heard = msgspec.json.decode(noted, type=dict[str, Annotated[int, Meta(ge=0, le=MOST_HEARD)]])
            if sum(len(name.split()) for name in heard) <= MOST_NOTED:
                return {_version_named(name, ack_wait): number for name, number in heard.items()}
    return {Version(tuple(sorted(filters_of(consumer))), ack_wait): 0}


def shared(spec: ConsumerSpec, versions: Mapping[Version, int]) -> ConsumerSpec:
    """The consumer with these versions noted. Its filter lets through what any of them wants, and its `ack_wait` is the
    longest: so each of them says often enough what it is still working on.
    """
    noted = msgspec.json.encode({_name_of(version): heard for version, heard in sorted(versions.items())}).decode()
    filters = [version.filter_subjects for version in versions]
    everything = not all(filters)
    return structs.replace(
        with_ack_wait(spec, max((version.ack_wait for version in versions), default=spec.ack_wait)),
        filter_subjects=() if everything else subjects.union(chain.from_iterable(filters)),
        metadata={**(spec.metadata or {}), VERSIONS: noted},
    )


def with_ack_wait(spec: ConsumerSpec, ack_wait: int) -> ConsumerSpec:
    """The consumer with another `ack_wait`, in nanoseconds, and with what follows from that."""
    return structs.replace(spec, ack_wait=ack_wait, priority_timeout=ack_wait if spec.priority_timeout else 0)


def _name_of(version: Version) -> str:
    return " ".join((f"{ACK_WAIT}{version.ack_wait}", *version.filter_subjects))


def _version_named(name: str, ack_wait: int) -> Version:
    """Workers of before noted the filter subjects alone: then it is that of the consumer. Raises ValueError where it is
    the name of no version.
    """
    filters = name.split()
    if filters and filters[0].startswith(ACK_WAIT):
        ack_wait = _digits(filters.pop(0).removeprefix(ACK_WAIT))
    if not 0 < ack_wait <= LONGEST_ACK_WAIT:
        raise ValueError(f"no consumer has an ack_wait of {ack_wait} ns")
    for each in filters:
        if not each.isprintable() or "" in each.split("."):
            raise ValueError(f"{each!r} is no filter subject")
    return Version(tuple(filters), ack_wait)


def _digits(text: str) -> int:
    """Raises ValueError for what is no number, or a longer one than any of ours."""
    if not text.isdecimal() or len(text) > MOST_DIGITS:
        raise ValueError("no number of ours")
    return int(text)


def starting(start: str) -> dict[str, Any]:
    """The fields of a consumer that begins there, which `positions.parse_start` has read.

    The start is kept in the metadata as well: what a consumer was made with says nothing any more once it was reset.
    """
    fields: dict[str, Any] = {"metadata": {START: start}}
    if start in ("all", "new"):
        return fields | {"deliver_policy": start}
    if start.isdigit():
        return fields | {"deliver_policy": "by_start_sequence", "opt_start_seq": max(1, int(start))}
    return fields | {"deliver_policy": "by_start_time", "opt_start_time": start}


def after_reset(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """The metadata of a consumer that is taken to another place: any start may be declared from now on, and workers
    see that they are to forget what they have handled.
    """
    return {**(metadata or {}), START: "", RESETS: str(resets_of({"metadata": metadata}) + 1)}


def resets_of(consumer: Mapping[str, Any]) -> int:
    """How often a consumer, as a server reports it, was taken to another place."""
    with suppress(ValueError):
        return _digits((consumer.get("metadata") or {}).get(RESETS, ""))
    return 0


def beginning_after(spec: ConsumerSpec, sequence: int) -> ConsumerSpec:
    """The consumer that, where it has to be made, begins after a sequence. The start that was declared stays noted."""
    return structs.replace(spec, deliver_policy="by_start_sequence", opt_start_seq=sequence + 1, opt_start_time=UNSET)


def _start_differs(wanted: ConsumerSpec, found: Mapping[str, Any]) -> Difference | None:
    stated = wanted.metadata or {}
    begin = stated.get(START, wanted.deliver_policy)
    known = (found.get("metadata") or {}).get(START, found.get("deliver_policy"))
    if known == "":
        return Difference(field="metadata", found=found.get("metadata"), wanted=dict(stated))
    return Difference(field="start", found=known, wanted=begin) if known != begin else None


def readable(name: str, value: Any) -> str:
    """The value of a field as people write it."""
    value = _normalised(name, value)
    if name in LISTS - {"backoff"}:
        return ", ".join(value) or ("none" if name == "priority_groups" else "everything")
    if name in ("max_age", "duplicate_window", "inactive_threshold") and value % SECOND == 0:
        return Duration(value // SECOND).literal() if value else "unlimited"
    if name in DURATIONS:
        return f"{value / SECOND:g}s"
    if name == "backoff":
        return ", ".join(f"{delay / SECOND:g}s" for delay in value) or "none"
    if value is None or isinstance(value, bool | dict | list):
        return msgspec.json.encode(value).decode() if value else "false" if value is False else "none"
    return "unlimited" if value == -1 else str(value)


def _keys(stream: str, further: Mapping[str, Any]) -> dict[str, str]:
    return {field: f"streams.{stream}.{field}" for field in further}


def _fields(wanted: StreamSpec) -> dict[str, Any]:
    return {name: _normalised(name, value) for name, value in stated(wanted).items()}


def _updated(
    found: Mapping[str, Any], differences: tuple[Difference, ...], stated: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[Difference, ...]]:
    """The configuration with these differences applied, and they with what follows from them."""
    config = {**found, **{difference.field: difference.wanted for difference in differences}}
    shrunk = _shrunk_duplicate_window(config, stated)
    if shrunk is None:
        return config, differences
    return {**config, shrunk.field: shrunk.wanted}, (*differences, shrunk)


def _removal(difference: Difference, config: Mapping[str, Any], stored: Stored) -> Removal | None:
    """What the difference removes of what is stored, when the stream is updated to this configuration.

    As a nats-server 2.15 was seen to do it: a limit of messages or bytes removes nothing while `discard` is `new`, one
    per subject always does, and `interest` removes what no consumer waits for.
    """
    limit = difference.wanted
    precision: Precision = ""
    match difference.field:
        case "max_msgs" | "max_bytes" | "discard" if config.get("discard") == "new":
            return None
        case "max_msgs":
            count = _beyond_messages(config, stored)
        case "max_bytes":
            count, precision = _beyond_bytes(config, stored), "about "
        case "discard":
            count, precision = max(_beyond_messages(config, stored), _beyond_bytes(config, stored)), "about "
        case "max_msgs_per_subject" if limit > 0 and not 0 < difference.found < limit:
            # At most so many, when all that is beyond one per subject is of a single one.
            count, precision = stored.messages - stored.subjects + 1 - limit, "" if limit == 1 else "up to "
        case "max_age" if limit and not 0 < difference.found < limit:
            count, precision = (stored.messages, "up to ") if stored.older is None else (stored.older, "")
        case "retention" if limit == "interest":
            count, precision = stored.messages, "up to " if stored.consumers else ""
        case _:
            return None
    return Removal(count, stored.messages, precision) if count > 0 else None


def _beyond_messages(config: Mapping[str, Any], stored: Stored) -> int:
    limit = config.get("max_msgs") or -1
    return stored.messages - limit if limit > 0 else 0


def _beyond_bytes(config: Mapping[str, Any], stored: Stored) -> int:
    """About as many messages of mean size as are in the bytes beyond the limit."""
    limit = config.get("max_bytes") or -1
    if limit <= 0 or not stored.messages:
        return 0
    return math.ceil(stored.messages * (stored.bytes - limit) / stored.bytes)


def _differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[Difference, ...]:
    whole = {**wanted}
    if "metadata" in wanted:  # what others noted there stays
        whole["metadata"] = {**(found.get("metadata") or {}), **wanted["metadata"]}
    return tuple(
        Difference(
            field=name,
            found=_normalised(name, found.get(name, False if isinstance(value, bool) else None)),
            wanted=_normalised(name, value),
        )
        for name, value in whole.items()
        if _compared(name, found.get(name)) != _compared(name, value)
    )


def _told_apart(
    differences: tuple[Difference, ...], cure: Callable[[Difference], str]
) -> tuple[tuple[Difference, ...], tuple[Difference, ...]]:
    """The differences that an update changes, and those that none does, with their cure."""
    cured = [structs.replace(difference, cure=cure(difference)) for difference in differences]
    return tuple(each for each in cured if not each.cure), tuple(each for each in cured if each.cure)


def _stream_cure(difference: Difference) -> str:
    field, found, wanted = difference.field, difference.found, difference.wanted
    if field in FOR_GOOD and not wanted:
        return f"what is on stays on: leave {field} out, or delete the stream"
    if field == "mirror" and not found:
        return "it takes publishes, as after a promotion: leave mirror out, or delete the stream"
    if field in WHEN_CREATED or (field == "retention" and "workqueue" in (found, wanted)):
        return f"{field} is chosen when a stream is created: set what it has, or delete the stream"
    return ""


def _consumer_cure(difference: Difference) -> str:
    field, found, wanted = difference.field, difference.found, difference.wanted
    turned = field == "deliver_subject" and not (found and wanted)
    if field not in CONSUMER_WHEN_CREATED and not turned:
        return ""
    return f"{field} is chosen when a consumer is created: set what it has, or remove it, and a new one begins anew"


def _not_when_created(fields: Mapping[str, Any]) -> tuple[Difference, ...]:
    if not fields.get("sealed"):
        return ()
    cure = "no stream is created sealed: leave sealed out, and seal the stream when it holds what it is to hold"
    return (Difference(field="sealed", found=None, wanted=True, cure=cure),)


def _normalised(name: str, value: Any) -> Any:
    """A value as the server reports it: it turns what is missing, and what means unlimited, into one form."""
    if name in COUNTS:
        return value if value and value > 0 else -1
    if name in DURATIONS:
        return value or 0
    if name in LISTS:
        return list(value or ())
    if name in WORDS:
        return value or WORDS[name]
    return value


def _compared(name: str, value: Any) -> Any:
    """The same for everything that means the same to a server, which also leaves out what is nothing, nought or off."""
    match name:
        case "opt_start_time" | "pause_until":
            return msgspec.convert(value, datetime | None)
        case "sample_freq":
            return (value or "").rstrip("%") or None
    return _something(_normalised(name, value))


def _something(value: Any) -> Any:
    """What of a value is not nothing, nought or off, however deep; None where all of it is."""
    if isinstance(value, dict):
        value = {key: kept for key, inside in value.items() if (kept := _something(inside)) is not None}
    elif isinstance(value, list):
        value = [_something(inside) for inside in value]
    return value or None


def _shrunk_duplicate_window(config: Mapping[str, Any], stated: Mapping[str, Any]) -> Difference | None:
    """A server refuses a duplicate window above max_age: shrink it with the age."""
    max_age = config.get("max_age") or 0
    window = config.get("duplicate_window") or DEFAULT_DUPLICATE_WINDOW
    if "max_age" not in stated or not max_age or window <= max_age or config.get("mirror"):
        return None
    return Difference(field="duplicate_window", found=window, wanted=max_age)
