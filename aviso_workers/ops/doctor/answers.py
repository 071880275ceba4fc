"""What servers answer, as far as a check looks at it: JetStream's API, its advisories, and the monitoring port.

`facts` reads them. Names and units (bytes, nanoseconds) are the server's; what it leaves out has the value that this
means. Nothing is sent back, so that what is not known here is not lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from msgspec import Struct, field

from aviso_workers.jetstream.metadata import START

__all__ = [
    "Account",
    "Advisory",
    "Consumer",
    "ConsumerConfig",
    "Group",
    "Jsz",
    "Origin",
    "PriorityGroup",
    "Replica",
    "Server",
    "Stream",
    "StreamConfig",
    "Varz",
]

NEVER = -1
"""`active` of a mirror or source that has not heard of its origin since it was made."""


class Replica(Struct, frozen=True, kw_only=True):
    """A follower, as the leader sees it."""

    name: str
    current: bool = False
    offline: bool = False
    active: int = 0
    """Nanoseconds since it was heard of."""
    lag: int = 0


class Group(Struct, frozen=True, kw_only=True):
    """Who keeps a stream, a consumer, or what there is of both; empty on a server by itself."""

    name: str = ""
    leader: str = ""
    replicas: tuple[Replica, ...] = ()
    cluster_size: int = 0

    @property
    def members(self) -> frozenset[str]:
        return frozenset({self.leader, *(replica.name for replica in self.replicas)} - {""})


class Origin(Struct, frozen=True, kw_only=True):
    """What a mirror or a source has of its origin."""

    name: str
    lag: int = 0
    active: int = NEVER
    """Nanoseconds since the origin was heard of."""
    error: Mapping[str, Any] | None = None


class StreamConfig(Struct, frozen=True, kw_only=True):
    name: str
    subjects: tuple[str, ...] = ()
    retention: str = "limits"
    storage: str = "file"
    discard: str = "old"
    discard_new_per_subject: bool = False
    num_replicas: int = 1
    max_msgs: int = -1
    max_bytes: int = -1
    max_age: int = 0
    max_msgs_per_subject: int = -1
    duplicate_window: int = 0
    deny_delete: bool = False
    deny_purge: bool = False
    allow_msg_ttl: bool = False
    allow_rollup_hdrs: bool = False
    mirror: Mapping[str, Any] | None = None
    metadata: Mapping[str, str] = {}


class Lost(Struct, frozen=True, kw_only=True):
    msgs: tuple[int, ...] | None = None
    bytes: int = 0


class StreamState(Struct, frozen=True, kw_only=True):
    messages: int = 0
    bytes: int = 0
    last_seq: int = 0
    num_subjects: int = 0
    num_deleted: int = 0
    lost: Lost | None = None
    consumer_count: int = 0


class Stream(Struct, frozen=True, kw_only=True):
    config: StreamConfig
    created: datetime | None = None
    state: StreamState = StreamState()
    cluster: Group = Group()
    mirror: Origin | None = None
    sources: tuple[Origin, ...] = ()

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def origins(self) -> tuple[Origin, ...]:
        return (self.mirror, *self.sources) if self.mirror else self.sources


class ConsumerConfig(Struct, frozen=True, kw_only=True):
    durable_name: str = ""
    ack_policy: str = "none"
    ack_wait: int = 0
    max_deliver: int = -1
    backoff: tuple[int, ...] = ()
    max_ack_pending: int = -1
    max_waiting: int = 0
    filter_subject: str = ""
    filter_subjects: tuple[str, ...] = ()
    deliver_subject: str = ""
    flow_control: bool = False
    idle_heartbeat: int = 0
    priority_policy: str = ""
    metadata: Mapping[str, str] = {}


class Position(Struct, frozen=True, kw_only=True):
    consumer_seq: int = 0
    stream_seq: int = 0
    last_active: datetime | None = None


class PriorityGroup(Struct, frozen=True, kw_only=True):
    group: str
    pinned_client_id: str = ""


class Consumer(Struct, frozen=True, kw_only=True):
    stream_name: str
    name: str
    created: datetime
    config: ConsumerConfig
    delivered: Position = Position()
    ack_floor: Position = Position()
    num_ack_pending: int = 0
    num_redelivered: int = 0
    num_waiting: int = 0
    num_pending: int = 0
    push_bound: bool = False
    paused: bool = False
    pause_remaining: int = 0
    priority_groups: tuple[PriorityGroup, ...] = ()
    cluster: Group = Group()

    @property
    def ours(self) -> bool:
        """Whether a worker of ours made it: then attempts, delays and dead letters are the worker's business."""
        return START in self.config.metadata

    @property
    def pulled(self) -> bool:
        return not self.config.deliver_subject

    @property
    def durable(self) -> bool:
        return bool(self.config.durable_name)


class AccountLimits(Struct, frozen=True, kw_only=True):
    max_memory: int = -1
    max_storage: int = -1
    max_streams: int = -1
    max_consumers: int = -1
    max_bytes_required: bool = False


class Api(Struct, frozen=True, kw_only=True):
    level: int = 0
    total: int = 0
    errors: int = 0


class Account(Struct, frozen=True, kw_only=True):
    memory: int = 0
    storage: int = 0
    reserved_memory: int = 0
    reserved_storage: int = 0
    streams: int = 0
    consumers: int = 0
    limits: AccountLimits = AccountLimits()
    api: Api = Api()


class Server(Struct, frozen=True, kw_only=True):
    """The server that we are connected to."""

    name: str
    ver: str
    id: str = ""
    """Empty where it was not told."""
    cluster: str = ""


class Advisory(Struct, frozen=True, kw_only=True):
    """What a server tells unasked: an advisory, or a metric."""

    kind: str = ""
    """The subject after `$JS.EVENT.`, such as `ADVISORY.STREAM.QUORUM_LOST.MARS`."""
    stream: str = ""
    consumer: str = ""
    subject: str = ""
    """Of the request, where it tells of one."""
    ack_time: int = 0
    """Nanoseconds from a delivery to its acknowledgement."""


class JetStreamConfig(Struct, frozen=True, kw_only=True):
    max_storage: int = 0
    store_dir: str = ""
    sync_interval: int = 0
    sync_always: bool = False
    unique_tag: str = ""


class Jsz(Struct, frozen=True, kw_only=True):
    """What a server answers to /jsz."""

    config: JetStreamConfig = JetStreamConfig()


class VarzJetStreamStats(Struct, frozen=True, kw_only=True):
    storage: int = 0
    accounts: int = 0


class VarzJetStream(Struct, frozen=True, kw_only=True):
    config: JetStreamConfig = JetStreamConfig()
    stats: VarzJetStreamStats = VarzJetStreamStats()
    meta: Group | None = None


class VarzGroup(Struct, frozen=True, kw_only=True):
    """The cluster that it is in, or as which it is known to other clusters."""

    name: str = ""


class Varz(Struct, frozen=True, kw_only=True):
    server_id: str
    server_name: str
    version: str
    connections: int = 0
    max_connections: int = 0
    slow_consumers: int = 0
    tags: tuple[str, ...] = ()
    cluster: VarzGroup = VarzGroup()
    gateway: VarzGroup = VarzGroup()
    jetstream: VarzJetStream = field(default_factory=VarzJetStream)
