"""Streams and consumers as we want them, and the plan that leads there from what a server has.

Pure: `engine.provisioning` carries a plan out. Field names, units (nanoseconds) and values are those of JetStream's
own JSON. A field that is `UNSET` is not ours to say: it is left out when a stream is created, never compared, and
never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from aviso_workers.config import Config
from aviso_workers.literals import Duration
from aviso_workers.schema import EventType
from aviso_workers.topics import binding, stream_name

__all__ = [
    "GROUP",
    "PINNED",
    "PRIORITIZED",
    "UPDATABLE",
    "ConsumerSpec",
    "Difference",
    "Plan",
    "StreamSpec",
    "after_reset",
    "consumer_differences",
    "event_stream",
    "filters_of",
    "own_stream",
    "plan",
    "readable",
    "starting",
]

SECOND = 1_000_000_000
DAY = 86_400 * SECOND
DEFAULT_DUPLICATE_WINDOW = 120 * SECOND


PRIORITY = frozenset({"priority_policy", "priority_groups", "priority_timeout"})
UPDATABLE = PRIORITY | {"ack_wait", "filter_subjects", "max_ack_pending", "max_deliver", "metadata"}
"""The consumer fields that we state and that a server lets change."""


STARTING = frozenset({"deliver_policy", "opt_start_seq", "opt_start_time", "metadata"})
"""What says where a consumer begins: told apart by what was declared, not by what became of that."""
START = "aviso-workers-start"


class StreamSpec(Struct, frozen=True, kw_only=True):
    """What we state about a stream."""

    name: str
    subjects: tuple[str, ...]
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
    deny_delete: bool | UnsetType = UNSET
    allow_msg_ttl: bool | UnsetType = UNSET
    subject_delete_marker_ttl: int | UnsetType = UNSET
    """Nanoseconds for which it is told that a subject's last message was too old."""
    allow_msg_counter: bool | UnsetType = UNSET


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


class Difference(Struct, frozen=True, kw_only=True):
    field: str
    found: Any
    wanted: Any

    def __str__(self) -> str:
        return f"{self.field}: {readable(self.field, self.found)} -> {readable(self.field, self.wanted)}"


class Plan(Struct, frozen=True, kw_only=True):
    """What has to be done: create, update to `config`, or nothing where there is no difference."""

    wanted: StreamSpec
    exists: bool
    config: Mapping[str, Any]
    """The whole configuration to send; unknown fields of the server's are in it unchanged."""
    differences: tuple[Difference, ...] = ()
    storage_mismatch: bool = False
    """Storage cannot be changed: nothing else is applied, and using the stream is an error."""

    @property
    def stream(self) -> str:
        return self.wanted.name

    @property
    def needed(self) -> bool:
        return not self.exists or bool(self.differences)


def event_stream(name: str, event_type: EventType, config: Config) -> StreamSpec:
    """The stream of an event type's base, as the configuration states it.

    Precedence: the schema's storage policy, then the backend's default, then the server's (contract: Aviso's
    JetStream backend, "Precedence"). `allow_duplicates` unset means one message per subject, as Aviso creates it.
    """
    base = event_type.topic.base if event_type.topic else name
    jetstream = config.notification_backend.jetstream
    policy = event_type.storage_policy
    retention_time = (policy and policy.retention_time) or jetstream.retention_time
    max_messages = (policy and policy.max_messages) or jetstream.max_messages
    max_bytes = (policy and policy.max_size) or jetstream.max_bytes
    compression = policy.compression if policy else None
    allow_duplicates = bool(policy and policy.allow_duplicates)
    return StreamSpec(
        name=stream_name(base),
        subjects=(binding(base),),
        storage=jetstream.storage_type,
        retention=jetstream.retention_policy,
        discard=jetstream.discard_policy,
        max_msgs=UNSET if max_messages is None else max_messages,
        max_bytes=UNSET if max_bytes is None else int(max_bytes),
        max_age=UNSET if retention_time is None else int(retention_time) * SECOND,
        max_msgs_per_subject=-1 if allow_duplicates else 1,
        num_replicas=UNSET if jetstream.replicas is None else jetstream.replicas,
        compression=UNSET if compression is None else ("s2" if compression else "none"),
    )


def own_stream(name: str, subject: str, config: Config, **stated: Any) -> StreamSpec:
    """A stream of our own state: kept by limits, stored and copied as the configuration says."""
    jetstream = config.notification_backend.jetstream
    return StreamSpec(
        name=name,
        subjects=(subject,),
        storage=jetstream.storage_type,
        retention="limits",
        num_replicas=config.workers.dead_letters.replicas or jetstream.replicas or 1,
        **stated,
    )


def plan(wanted: StreamSpec, found: Mapping[str, Any] | None) -> Plan:
    """The way from the configuration that a server reports (None: no such stream) to the wanted one."""
    stated = {name: _normalised(name, value) for name, value in msgspec.to_builtins(wanted).items()}
    if found is None:
        return Plan(wanted=wanted, exists=False, config=stated)
    current = {name: _normalised(name, found.get(name)) for name in stated}
    differences = [
        Difference(field=name, found=current[name], wanted=value)
        for name, value in stated.items()
        if current[name] != value
    ]
    config = {**found, **{difference.field: difference.wanted for difference in differences}}
    shrunk = _shrunk_duplicate_window(config, stated)
    if shrunk is not None:
        differences.append(shrunk)
        config[shrunk.field] = shrunk.wanted
    return Plan(
        wanted=wanted,
        exists=True,
        config=config,
        differences=tuple(differences),
        storage_mismatch=any(difference.field == "storage" for difference in differences),
    )


def filters_of(consumer: Mapping[str, Any]) -> list[str]:
    """The filters of a consumer as a server reports it: a single one may be under another name than several."""
    single = consumer.get("filter_subject")
    return [single] if single else list(consumer.get("filter_subjects") or ())


def consumer_differences(wanted: ConsumerSpec, found: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Where a consumer, as a server reports it, is not as wanted; of these, `UPDATABLE` can be brought in line."""
    found = {**found, "filter_subjects": filters_of(found)}
    start = _start_differs(wanted, found)
    passed_over = STARTING
    if wanted.priority_policy == "none" and found.get("priority_policy") == PRIORITIZED:
        passed_over |= PRIORITY  # another worker's wish, which changes nothing for those that are near
    differences = tuple(
        Difference(field=name, found=_normalised(name, found.get(name)), wanted=_normalised(name, value))
        for name, value in msgspec.to_builtins(wanted).items()
        if name not in passed_over and _normalised(name, found.get(name)) != _normalised(name, value)
    )
    return differences if start is None else (*differences, start)


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
    """The metadata of a consumer that was taken to another place: any start may be declared from now on."""
    return {**(metadata or {}), START: ""}


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
    match name:
        case "subjects" | "filter_subjects":
            return ", ".join(value) or "everything"
        case "ack_wait" | "priority_timeout":
            return f"{value / SECOND:g}s"
        case "priority_groups":
            return ", ".join(value) or "none"
        case "max_age":
            return Duration(value // SECOND).literal() if value else "unlimited"
        case "duplicate_window":
            return Duration(value // SECOND).literal()
        case _:
            return "unlimited" if value == -1 else str(value)


def _normalised(name: str, value: Any) -> Any:
    """A value as the server reports it: it turns what is missing, and what means unlimited, into one form."""
    match name:
        case "max_msgs" | "max_bytes" | "max_msgs_per_subject":
            return value if value and value > 0 else -1
        case "num_replicas":
            return value or 1
        case "compression":
            return value or "none"
        case "storage":
            return value or "file"
        case "retention":
            return value or "limits"
        case "discard":
            return value or "old"
        case "max_age" | "duplicate_window" | "ack_wait" | "priority_timeout":
            return value or 0
        case "priority_policy":
            return value or "none"
        case "subjects" | "filter_subjects" | "priority_groups":
            return list(value or ())
        case _:
            return value


def _shrunk_duplicate_window(config: Mapping[str, Any], stated: Mapping[str, Any]) -> Difference | None:
    """A server refuses a duplicate window above max_age: shrink it with the age."""
    max_age = config.get("max_age") or 0
    window = config.get("duplicate_window") or DEFAULT_DUPLICATE_WINDOW
    if "max_age" not in stated or not max_age or window <= max_age:
        return None
    return Difference(field="duplicate_window", found=window, wanted=max_age)
