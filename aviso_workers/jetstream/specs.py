"""The fields that we state of a stream or a consumer, in JetStream's own field names, units (nanoseconds) and values.

A field that is `UNSET`, or not among those stated, is not ours to say: it is left out when a stream is created, never
compared, and never changed. `config.streams` makes the specs of event types, `engine` those of agents' consumers and of
our own state. What operators declare of other streams and consumers is in `fields`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType, structs

OURS = "aviso_workers_"
"""How the names of our own streams begin, and no app's name."""
SCHEDULES = f"{OURS}schedule__"
"""How the names of the streams begin that keep what is to be delivered later; the name of an event stream follows."""
BUCKET = "KV_"
"""How the name of a stream begins that is a bucket of key-values; the name of the bucket follows."""
UNREADABLE = f"{OURS}unreadable"
"""The empty stream that says of a server that it cannot read another one that it has."""
LONGEST_NAME = 255
"""Characters that the name of a stream may have."""
KEY_ORDER = "aviso-workers-key-order"
"""The metadata of a stream that says in which order its subjects have the values of identifiers: the fields, with
commas between."""
KEY_RULES = "aviso-workers-key-rules"
"""The metadata of a stream that says by which rules these values are spelled, in the same order: such as
`class=EnumHandler,date=DateHandler %Y%m%d`."""
PINNED = "pinned_client"
PRIORITIZED = "prioritized"
GROUP = "workers"
"""A consumer of one of these two policies has one group, by which its readers ask."""


MONITORING = "io.nats.monitor."
"""How the entries in the metadata of our streams and consumers begin that `nats server check` reads as its thresholds.

They are such that a healthy stream or consumer is never critical: those of the doctor's checks JS017, JS019 and JS031.
What operators have set there stays. A stream gets them when it is created, and an existing one with its next update: it
is not updated for them alone, as it may be an aviso-server's.
"""
MONITORED = {f"{MONITORING}enabled": "true"}
EXPECTED_PEERS = f"{MONITORING}peer-expect"
FAR_BEHIND = 1_000
"""By how many entries a replica is behind its leader when `nats server check` calls that critical."""
INACTIVE_SECONDS = 10
"""How long a leader has not heard of a replica when `nats server check` calls that critical."""
STALE_SECONDS = 30
"""How long a mirror has not heard of its origin when `nats server check` calls that critical."""


class StreamSpec(Struct, frozen=True, kw_only=True):
    """The fields that we state about a stream."""

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
    """Fields that operators declare beyond that, in JetStream's own JSON."""
    takes_batches: bool = True
    """Whether it takes batches, of those that its server knows, when it is created and nothing else is stated."""
    monitored: bool = False
    """Whether its metadata has what `nats server check` reads, see `MONITORING`."""
    read_as: Mapping[str, str] = {}
    """How its subjects are read, which its metadata says: `KEY_ORDER` and `KEY_RULES`; empty for other streams."""
    keys: Mapping[str, str] = {}
    """By field, the key of the configuration that states it, for people to find."""


class ConsumerSpec(Struct, frozen=True, kw_only=True):
    """The fields that we state about a durable pull consumer."""

    durable_name: str
    filter_subjects: tuple[str, ...]
    ack_wait: int
    """Nanoseconds."""
    max_ack_pending: int
    max_deliver: int = -1
    headers_only: bool = False
    backoff: tuple[int, ...] = ()
    """Nanoseconds after which a server delivers again, in place of `ack_wait`."""
    max_batch: int = 0
    """The most messages that one request may ask for; 0: no limit, as in the following two."""
    max_bytes: int = 0
    max_expires: int = 0
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


def stated(spec: StreamSpec) -> dict[str, Any]:
    """Return what is stated about a stream, as one JSON object of JetStream's."""
    fields: dict[str, Any] = msgspec.to_builtins(spec)
    del fields["takes_batches"], fields["keys"], fields["monitored"], fields["read_as"]
    fields |= fields.pop("further")
    if "num_replicas" in fields:
        fields["num_replicas"] = fields["num_replicas"] or 1
    return with_notes(fields, spec, stated=fields)


def with_notes(config: Mapping[str, Any], spec: StreamSpec, *, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a stream with our notes in its metadata, which it gets when it is created, and else
    with its next update. What is noted there stays, and where it is otherwise than we read, nothing is added to it.
    """
    noted = config.get("metadata") or {}
    if spec.read_as and not read_otherwise(noted, spec.read_as):
        config = {**config, "metadata": {**spec.read_as, **noted}}
    if not spec.monitored:
        return dict(config)
    # The number of its servers follows from the configuration, unless it is in the stated metadata.
    known = {key: text for key, text in (config.get("metadata") or {}).items() if key != EXPECTED_PEERS}
    return {**config, "metadata": {**_thresholds(config), **known, **(stated.get("metadata") or {})}}


def read_otherwise(noted: Mapping[str, str], read_as: Mapping[str, str]) -> list[str]:
    """Return the keys under which the metadata of a stream says that it is read otherwise. Absent ones say nothing."""
    return [key for key, text in read_as.items() if noted.get(key) not in (None, "", text)]


def is_name(text: str) -> bool:
    """Return whether a stream may have this name."""
    return 0 < len(text) <= LONGEST_NAME and text.isprintable() and not {*" .*>/\\"} & {*text}


def with_ack_wait(spec: ConsumerSpec, ack_wait: int) -> ConsumerSpec:
    """Return the consumer with another `ack_wait`, in nanoseconds, and with what follows from that."""
    return structs.replace(spec, ack_wait=ack_wait, priority_timeout=ack_wait if spec.priority_timeout else 0)


def beginning_after(spec: ConsumerSpec, sequence: int) -> ConsumerSpec:
    """Return the consumer that, where it has to be made, begins after a sequence.

    The start that was declared stays noted.
    """
    return structs.replace(spec, deliver_policy="by_start_sequence", opt_start_seq=sequence + 1, opt_start_time=UNSET)


def monitoring_of(max_ack_pending: int) -> dict[str, str]:
    """Return what `nats server check` reads of a consumer. One with a limit of 1 is at its limit whenever it works."""
    return MONITORED | ({f"{MONITORING}outstanding-ack-critical": str(max_ack_pending)} if max_ack_pending > 1 else {})


def _thresholds(config: Mapping[str, Any]) -> dict[str, str]:
    entries = dict(MONITORED)
    if (replicas := config.get("num_replicas") or 1) > 1:
        entries |= {
            EXPECTED_PEERS: str(replicas),
            f"{MONITORING}peer-lag-critical": str(FAR_BEHIND),
            f"{MONITORING}peer-seen-critical": f"{INACTIVE_SECONDS}s",
        }
    if config.get("mirror") or config.get("sources"):
        entries[f"{MONITORING}seen-critical"] = f"{STALE_SECONDS}s"
    return entries
