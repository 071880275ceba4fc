"""Answers of a server about streams, consumers and the account: a class for each answer, and one place that reads it.

The backends make these from JetStream's JSON, or from what they hold themselves. A configuration stays whole, so that a
field which is newer than this code survives a read and an update; who looks at one of its fields reads an attribute,
which has the field's zero value (`fields`) where the server left it out. Durations are nanoseconds.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec
from msgspec import Struct

from aviso_workers.aviso.codec import Message
from aviso_workers.aviso.literals import SECOND
from aviso_workers.jetstream import fields
from aviso_workers.jetstream.fields import Field

T = TypeVar("T")

NEVER = -1
"""`active` of a mirror or source that has not heard of its origin since it was made."""
SILENT_NANOSECONDS = 5_000_000_000
"""A leader hears of the other replicas every second, and takes one that has died for current until much later."""


class _JsonConfig(dict[str, Any]):
    """A configuration in JetStream's own JSON, whole. Only the attributes that somebody reads are declared below."""

    _table: ClassVar[Mapping[str, Field]]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in self._table:
                raise AttributeError(name)
            value = fields.normalised(name, self.get(name))
            return self._table[name].zero if value is None else value

    @property
    def name(self) -> str:
        return str(self["name"])

    @property
    def metadata(self) -> Mapping[str, str]:
        return self.get("metadata") or {}


class _OriginConfig(Struct, frozen=True, kw_only=True):
    """The stream that a mirror or a source follows."""

    name: str
    external: Mapping[str, str] | None = None

    @property
    def api(self) -> str:
        """The prefix of the API where it is; empty in the same account."""
        return (self.external or {}).get("api", "")


class SourceConfig(_OriginConfig, frozen=True, kw_only=True):
    """Which stream a mirror or a source follows, and what of it."""

    filter_subject: str = ""
    subject_transforms: tuple[Mapping[str, str], ...] | None = None
    opt_start_seq: int = 0
    opt_start_time: datetime | None = None

    @property
    def left_out(self) -> str:
        """The field by which only part of the origin is followed, or otherwise; empty where all of it is."""
        parts = ("filter_subject", "subject_transforms", "opt_start_seq", "opt_start_time")
        return next((field for field in parts if getattr(self, field)), "")


class StreamConfig(_JsonConfig):
    _table = fields.STREAM

    description: str | None
    subjects: list[str]
    storage: str
    retention: str
    discard: str
    discard_new_per_subject: bool
    num_replicas: int
    max_msgs: int
    max_bytes: int
    max_age: int
    max_msgs_per_subject: int
    max_consumers: int
    duplicate_window: int
    subject_delete_marker_ttl: int
    republish: Mapping[str, str] | None
    allow_batched: bool
    allow_direct: bool
    allow_rollup_hdrs: bool
    allow_msg_ttl: bool
    allow_msg_schedules: bool
    deny_delete: bool
    deny_purge: bool
    sealed: bool

    @property
    def mirror(self) -> SourceConfig | None:
        found = self.get("mirror")
        return msgspec.convert(found, SourceConfig) if found else None

    @property
    def sources(self) -> list[SourceConfig]:
        return msgspec.convert(self.get("sources") or [], list[SourceConfig])

    @property
    def origins(self) -> list[SourceConfig]:
        """Return the streams that it follows, as a mirror or by sources."""
        return [self.mirror, *self.sources] if self.mirror else self.sources


class ConsumerConfig(_JsonConfig):
    _table = fields.CONSUMER

    ack_policy: str
    ack_wait: int
    backoff: list[int]
    deliver_policy: str
    deliver_subject: str | None
    flow_control: bool
    idle_heartbeat: int
    inactive_threshold: int
    max_ack_pending: int
    max_deliver: int
    max_waiting: int
    num_replicas: int
    priority_policy: str

    @property
    def durable_name(self) -> str:
        return self.get("durable_name") or ""

    @property
    def filters(self) -> list[str]:
        """The subjects that it takes; none means everything. A single one may be under another name than several."""
        single = self.get("filter_subject")
        return [single] if single else list(self.get("filter_subjects") or ())

    @property
    def start_sequence(self) -> int:
        """The stream sequence at which it begins; 0 where none is stated."""
        return self.get("opt_start_seq") or 0

    @property
    def pause_until(self) -> datetime | None:
        return msgspec.convert(self.get("pause_until"), datetime | None)

    def reads_all(self, subjects: Collection[str]) -> bool:
        """Return whether its filters leave out nothing of a stream of these subjects."""
        return not self.filters or set(subjects) <= set(self.filters)


class Replica(Struct, frozen=True, kw_only=True):
    """A follower, as the leader sees it."""

    name: str
    current: bool = False
    offline: bool = False
    active: int = 0
    """Nanoseconds since it was heard of."""
    lag: int = 0


class Cluster(Struct, frozen=True, kw_only=True):
    """Who keeps a stream, a consumer, or what there is of both; empty on a server by itself."""

    name: str = ""
    leader: str = ""
    replicas: tuple[Replica, ...] | None = ()
    cluster_size: int = 0

    @property
    def followers(self) -> tuple[Replica, ...]:
        return self.replicas or ()

    @property
    def members(self) -> frozenset[str]:
        return frozenset({self.leader, *(replica.name for replica in self.followers)} - {""})


class SourceInfo(_OriginConfig, frozen=True, kw_only=True):
    """How far a mirror or a source has followed its origin."""

    lag: int = 0
    active: int = NEVER
    """Nanoseconds since the origin was heard of."""
    error: Mapping[str, Any] | None = None

    @property
    def trouble(self) -> str:
        """Why it does not follow; empty where it does."""
        return str((self.error or {}).get("description", ""))


class Lost(Struct, frozen=True, kw_only=True):
    """Messages that the server could not read when it started: their blocks are damaged."""

    msgs: tuple[int, ...] | None = None
    bytes: int = 0


_OF_STREAM = {
    "time": "ts",
    "subjects": "num_subjects",
    "consumers": "consumer_count",
    "deleted": "num_deleted",
    "deleted_sequences": "deleted",
    "first_sequence": "first_seq",
    "first_time": "first_ts",
    "last_sequence": "last_seq",
    "last_time": "last_ts",
}
"""By attribute, the server's name for it, where that is another one."""


class StreamInfo(Struct, frozen=True, kw_only=True, rename=_OF_STREAM):
    config: StreamConfig
    time: datetime
    """When the server said this, by its clock, which store times are of too."""
    messages: int = 0
    bytes: int = 0
    subjects: int = 0
    """How many subjects the messages have."""
    consumers: int = 0
    deleted: int = 0
    """How many sequences between the first and the last have no message any more."""
    deleted_sequences: tuple[int, ...] = ()
    """Which ones, where they were asked for."""
    lost: Lost | None = None
    first_sequence: int = 0
    first_time: datetime | None = None
    """When the first message was stored; None where there is none."""
    last_sequence: int = 0
    last_time: datetime | None = None
    """When the last message was stored; None where there is none."""
    last_stored: datetime | None = None
    """When a message was last stored, also where it is gone; None where that is not known."""
    created: datetime | None = None
    cluster: Cluster = Cluster()
    mirror: SourceInfo | None = None
    sources: tuple[SourceInfo, ...] = ()
    answer: Mapping[str, Any] = {}
    """As the server gave it, to be handed on; empty where there is no server."""

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def created_text(self) -> str:
        """When it was created, to the nanosecond, as its server writes it: two streams of one name differ in it."""
        return str(self.answer["created"])

    @property
    def state(self) -> SnapshotState:
        """Its state as the server gave it, whole."""
        return SnapshotState(self.answer["state"])

    @property
    def origins(self) -> tuple[SourceInfo, ...]:
        return (self.mirror, *self.sources) if self.mirror else self.sources

    @property
    def behind(self) -> tuple[str, ...]:
        """The servers whose replica is not current, or was not heard of for some seconds."""
        return tuple(
            each.name
            for each in self.cluster.followers
            if each.active > SILENT_NANOSECONDS or each.offline or not each.current
        )

    @property
    def part_used(self) -> float | None:
        """How much of the nearest of its limits of messages and bytes it uses; None where it has none."""
        config = self.config
        limits = ((self.messages, config.max_msgs), (self.bytes, config.max_bytes))
        return max((counted / limit for counted, limit in limits if limit > 0), default=None)


class SnapshotState(dict[str, Any]):
    """The state of a stream in JetStream's own JSON, whole: it comes with a snapshot and goes back with a restore."""

    @property
    def messages(self) -> int:
        return int(self["messages"])

    @property
    def bytes(self) -> int:
        return int(self["bytes"])

    @property
    def first_sequence(self) -> int:
        return int(self["first_seq"])

    @property
    def last_sequence(self) -> int:
        return int(self["last_seq"])

    @property
    def last_time_text(self) -> str:
        """When the last message was stored, to the nanosecond, as its server writes it."""
        return str(self["last_ts"])

    @property
    def consumers(self) -> int:
        return int(self["consumer_count"])


class ConsumerState(dict[str, Any]):
    """The state of a consumer in JetStream's own JSON, whole, as the archive of its stream has it."""

    @property
    def deliveries(self) -> int:
        """How often it has delivered, repeats included."""
        return int(self["delivered"]["consumer_seq"])


class PriorityGroup(Struct, frozen=True, kw_only=True):
    """Readers of a consumer, and which of them is served alone."""

    group: str
    pinned_client_id: str = ""
    pinned_ts: datetime | None = None


class ConsumerInfo(Struct, frozen=True, kw_only=True, rename={"time": "ts", "stream": "stream_name"}):
    name: str
    config: ConsumerConfig
    time: datetime
    """When the server said this, by its clock, which store times are of too."""
    stream: str = ""
    num_pending: int = 0
    """Messages that match and were never delivered."""
    num_ack_pending: int = 0
    """Messages delivered and not settled."""
    num_redelivered: int = 0
    num_waiting: int = 0
    """Pull requests that wait."""
    push_bound: bool = False
    """Whether somebody subscribes to what a push consumer delivers."""
    deliveries: int = 0
    """How often it has delivered, repeats included; a reset begins at 0 again."""
    position: int = 0
    """The stream sequence that it has come to: up to it, everything was delivered, or is not in the stream."""
    ack_floor: int = 0
    """The stream sequence up to which everything is settled."""
    last_delivered: datetime | None = None
    """When a message was last delivered."""
    last_settled: datetime | None = None
    """When a message was last acked or terminated, whether the floor rose or not."""
    created: datetime | None = None
    paused_until: datetime | None = None
    """Before this time nothing is delivered; None where it is not paused."""
    pinned_since: datetime | None = None
    """Since when one reader is served alone; None where none is, or none has to be."""
    priority_groups: tuple[PriorityGroup, ...] = ()
    cluster: Cluster = Cluster()
    answer: Mapping[str, Any] = {}
    """As the server gave it, to be handed on; empty where there is no server."""

    @property
    def settled(self) -> int:
        """The stream sequence up to which everything is settled, or was passed over when the consumer was created."""
        return max(self.ack_floor, 0 if self.num_ack_pending else self.position)

    @property
    def lag(self) -> int:
        """The number of messages that are not settled."""
        return self.num_pending + self.num_ack_pending

    @property
    def paused(self) -> bool:
        return self.paused_until is not None

    @property
    def durable(self) -> bool:
        return bool(self.config.durable_name)

    @property
    def pulled(self) -> bool:
        return not self.config.deliver_subject

    @property
    def ends_by_itself(self) -> bool:
        """Whether the server removes it soon after nobody reads from it any more, as a reader whose connection was
        lost: nobody has to remove it.
        """
        return not self.durable and self.config.inactive_threshold > 0


class Limits(Struct, frozen=True, kw_only=True):
    """The limits of an account; -1 means no limit."""

    max_memory: int = -1
    max_storage: int = -1
    max_streams: int = -1
    max_consumers: int = -1
    max_bytes_required: bool = False


class Use(Struct, frozen=True, kw_only=True):
    """The use of an account, altogether or in one tier."""

    memory: int = 0
    storage: int = 0
    reserved_memory: int = 0
    reserved_storage: int = 0
    streams: int = 0
    consumers: int = 0
    limits: Limits = Limits()


class Api(Struct, frozen=True, kw_only=True):
    level: int = 0
    total: int = 0
    """Requests."""
    errors: int = 0


class AccountInfo(Use, frozen=True, kw_only=True):
    api: Api = Api()
    tiers: Mapping[str, Use] | None = None
    """By name, as `R3`; where there are some, each has limits of its own."""

    def max_consumers(self, stream: StreamConfig) -> int:
        """Return how many consumers a stream may have, by its own limit or by that of the account, which a server keeps
        for each stream; 0 where there is no limit.
        """
        use = (self.tiers or {}).get(f"R{stream.num_replicas}", self)
        return min((most for most in (stream.max_consumers, use.limits.max_consumers) if most > 0), default=0)


def stream(answer: Mapping[str, Any]) -> StreamInfo:
    """Return what a server answers to STREAM.INFO, CREATE or UPDATE, or lists of a stream."""
    state = answer.get("state") or {}
    times = {"last_stored": state.get("last_ts") if state.get("last_seq") else None}
    if not state.get("messages"):  # a server reports the year 1 then
        times |= {"first_ts": None, "last_ts": None}
    return _parsed(StreamInfo, {**state, **answer, **times}, answer)


def consumer(answer: Mapping[str, Any]) -> ConsumerInfo:
    """Return what a server answers to CONSUMER.INFO, CREATE or RESET, or lists of a consumer."""
    config = ConsumerConfig(answer["config"])
    delivered, floor = answer.get("delivered") or {}, answer.get("ack_floor") or {}
    begins_after = int(config.get("opt_start_seq") or 1) - 1  # until its first ack, a cluster says that the floor is 0
    groups = answer.get("priority_groups") or ()
    told = {
        "deliveries": delivered.get("consumer_seq"),
        "position": delivered.get("stream_seq"),
        "ack_floor": max(floor.get("stream_seq", 0), begins_after),
        "last_delivered": delivered.get("last_active"),
        "last_settled": floor.get("last_active"),
        "paused_until": config.get("pause_until") if answer.get("paused") else None,
        "pinned_since": next((each.get("pinned_ts") for each in groups if each.get("pinned_client_id")), None),
    }
    return _parsed(ConsumerInfo, {**answer, **told}, answer)


def _parsed(kind: type[T], fields: Mapping[str, Any], answer: Mapping[str, Any]) -> T:
    """Return an answer in its class. What a server leaves out, or reports as null, has the default."""
    known = {name: value for name, value in fields.items() if value is not None}
    return msgspec.convert({**known, "answer": answer}, kind, dec_hook=lambda config, whole: config(whole))


def pause_seconds(answer: Mapping[str, Any]) -> float:
    """Return for how many seconds a consumer is paused, of what a server answers to CONSUMER.PAUSE."""
    return answer.get("pause_remaining", 0) / SECOND if answer.get("paused") else 0.0


def account(answer: Mapping[str, Any]) -> AccountInfo:
    """Return what a server answers to INFO."""
    return msgspec.convert(answer, AccountInfo)


def snapshot(answer: Mapping[str, Any]) -> tuple[StreamConfig, SnapshotState]:
    """Return what a server answers to STREAM.SNAPSHOT: the stream as it was when the snapshot began."""
    return StreamConfig(answer["config"]), SnapshotState(answer["state"])


def subject_counts(pages: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return how many messages of each subject there are, of the pages that a server answers to STREAM.INFO with a
    filter.
    """
    counts: dict[str, int] = {}
    for page in pages:
        counts |= page["state"].get("subjects") or {}
    return counts


def message(answer: Mapping[str, Any], read_headers: Callable[[bytes], Mapping[str, str]]) -> Message:
    """Return what a server answers to STREAM.MSG.GET. Headers come as they are on the wire."""
    found = answer["message"]
    block = b64decode(found.get("hdrs", ""))
    return Message(
        subject=found["subject"],
        data=b64decode(found.get("data", "")),
        headers=read_headers(block) if block else None,
        sequence=found["seq"],
        timestamp_ns=_nanoseconds(found["time"]),
    )


def _nanoseconds(time: str) -> int:
    """Return a time of RFC 3339 in UTC as nanoseconds since 1970; a datetime would cut it to microseconds."""
    seconds, _, fraction = time.removesuffix("Z").partition(".")
    whole = int(msgspec.convert(f"{seconds}Z", datetime).timestamp())
    return whole * SECOND + int(fraction.ljust(9, "0") or "0")
