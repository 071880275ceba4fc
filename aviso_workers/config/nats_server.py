"""What can be configured of a nats-server of our own: the section `server`.

The names are nats-server's where it has one for the thing (JetStream's as in its documentation, "JetStream
configuration"); `aviso_workers.server.nats_conf` writes nats-server.conf from these Structs. Nothing here says how
workers connect: that is `notification_backend.jetstream`. MQTT, WebSocket and gateways cannot be configured and stay
off.

Loading checks types only. What they cannot say, `aviso_workers.server.profiles` does, for whoever renders or runs a
server: a worker that shares the file needs none of the server's passwords in its environment.
"""

# Annotations are evaluated here: as text, msgspec would parse each of them whenever a worker starts.

from typing import Annotated, Literal

from msgspec import Meta, Struct

from aviso_workers.aviso.literals import Duration, Size
from aviso_workers.config.secrets import Secret
from aviso_workers.jetstream.fields import Positive, Text

LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = ("localhost", LOOPBACK)

Port = Annotated[int, Meta(ge=0, le=65535)]
"""A port; 0 is any free port."""
Cipher = Literal["chacha", "aes"]
Compression = Literal["off", "accept", "s2_auto", "s2_fast", "s2_better", "s2_best"]


class Monitoring(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The monitoring port, which serves /varz, /jsz and /healthz over plain HTTP and without authentication."""

    host: Text = LOOPBACK
    """Address to listen on; 0.0.0.0 is all addresses."""
    port: Port = 8222
    """Port to listen on; 0 is any free port."""


class Encryption(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Encryption at rest, of everything below store_dir. Without its key, the streams are lost."""

    cipher: Cipher = "chacha"
    """Cipher of the encryption."""
    key: Secret | None = None
    """Key of the encryption. It is best set in the environment, or in key_file."""
    key_file: Text | None = None
    """File with the key, instead of key."""


class ServerLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of JetStream on this server, for all accounts. Default of each: the server's."""

    max_ack_pending: Positive | None = None
    """Maximum number of deliveries without acknowledgement, for each consumer."""
    max_ha_assets: Positive | None = None
    """Maximum number of replicated streams and consumers."""
    max_request_batch: Positive | None = None
    """Maximum number of messages that one pull request may ask for."""
    duplicate_window: Duration | None = None
    """Longest window of deduplication."""


class ServerJetStream(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """JetStream on this server: where and how streams are stored."""

    store_dir: Text | None = None
    """Directory of the streams. It is required in production."""
    max_memory_store: Size | None = None
    """Size that all streams in memory may have, such as 1Gi. It is required in production."""
    max_file_store: Size | None = None
    """Size that all streams on disk may have, such as 500Gi. It is required in production, and should be at most half
    of the disk."""
    domain: Text | None = None
    """JetStream domain of this server, if leaf nodes join several domains."""
    sync_interval: Duration | None = None
    """Interval at which files are flushed to disk. Default: what the profile chooses."""
    sync_always: bool = False
    """Flush files to disk before every acknowledgement. It excludes sync_interval."""
    unique_tag: Text | None = None
    """Start of a server tag, such as az: - no two replicas of a stream are on servers that share the tag."""
    max_outstanding_catchup: Size | None = None
    """Size of the messages in flight to a replica that catches up. Default: 64Mi."""
    limits: ServerLimits = ServerLimits()
    """Limits of JetStream on this server, for all accounts."""
    encryption: Encryption | None = None
    """Encryption at rest. Default: none."""


class AccountJetStream(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of JetStream for one account. Default of each: no limit."""

    enabled: bool = True
    """Let the account use JetStream."""
    max_memory: Size | None = None
    """Size that its streams in memory may have together."""
    max_storage: Size | None = None
    """Size that its streams on disk may have together."""
    max_streams: Positive | None = None
    """Maximum number of streams."""
    max_consumers: Positive | None = None
    """Maximum number of consumers of each stream."""
    max_ack_pending: Positive | None = None
    """Maximum number of deliveries without acknowledgement, for each consumer."""
    max_bytes_required: bool = False
    """Refuse streams without max_bytes."""
    memory_max_stream_bytes: Size | None = None
    """Size that one stream in memory may have."""
    disk_max_stream_bytes: Size | None = None
    """Size that one stream on disk may have."""


class Subjects(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Subjects, with wildcards. A subject that `deny` has is denied, even if `allow` has it too."""

    allow: tuple[Text, ...] = ()
    """Subjects that are allowed. All others are denied. Default: all are allowed."""
    deny: tuple[Text, ...] = ()
    """Subjects that are denied. Default: none."""


class Permissions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Permissions of a user to publish and to subscribe."""

    publish: Subjects = Subjects()
    """Subjects to which the user may publish, also requests."""
    subscribe: Subjects = Subjects()
    """Subjects to which the user may subscribe, also inboxes."""
    allow_responses: bool = False
    """Let the user answer requests, whatever the subject of the answer is."""


class User(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user, who authenticates by password or by NKey."""

    password: Secret | None = None
    """Password or its bcrypt hash. It is best set in the environment."""
    nkey: Text | None = None
    """Public NKey, which starts with U. Its seed stays with the user."""
    permissions: Permissions = Permissions()
    """What the user may do. Default: everything in the account."""


class Account(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An account, with subjects, streams and users of its own."""

    jetstream: AccountJetStream = AccountJetStream()
    """What the account may use of JetStream."""
    publishes: tuple[Text, ...] = ()
    """Event types that its users publish. Such an account has no streams, and reaches nothing else of the account that
    has them. Default: none."""
    publishes_to: Text | None = None
    """Account that has the streams of these event types. Default: the only one with JetStream."""
    delays: bool = False
    """Let its users delay notifications. They can then remove what others delayed for these event types."""
    users: dict[str, User] = {}
    """Users by name."""


class ServerTls(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS of one port. All files are PEM."""

    cert_file: Text
    """File with the server's certificate."""
    key_file: Text
    """File with the private key of that certificate."""
    ca_file: Text | None = None
    """File with the certificates to trust. Default: those of the system."""
    verify: bool = False
    """Require a certificate that ca_file trusts of everyone who connects."""


class Cluster(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cluster of servers that share streams."""

    name: Text = "aviso-workers"
    """Name of the cluster, the same on every server."""
    host: Text = LOOPBACK
    """Address to listen on for the other servers."""
    port: Port = 6222
    """Port to listen on for the other servers."""
    routes: tuple[Text, ...] = ()
    """host:port of all servers of the cluster. This server may be in the list."""
    user: Text | None = None
    """User as which the servers authenticate to each other, together with password."""
    password: Secret | None = None
    """Password of that user. It is best set in the environment."""
    compression: Compression | None = None
    """Compression between the servers. Default: accept."""
    tls: ServerTls | None = None
    """TLS between the servers. Default: none."""


class Remote(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server, or a cluster, that this server joins as a leaf node."""

    urls: tuple[Text, ...]
    """host:port of the port for leaf nodes, on each of its servers."""
    account: Text | None = None
    """Account of this server that is joined to it. Default: the global account."""
    user: Text | None = None
    """User to authenticate as there, together with password."""
    password: Secret | None = None
    """Password of that user. It is best set in the environment."""
    ca_file: Text | None = None
    """File with the certificates to trust. If it is given, TLS is used."""


class LeafNodes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The servers that join this one as leaf nodes, and those that it joins."""

    host: Text = LOOPBACK
    """Address to listen on for leaf nodes."""
    port: Port | None = None
    """Port to listen on for leaf nodes, such as 7422. Default: none can join."""
    compression: Compression | None = None
    """Compression on that port. Default: s2_auto."""
    tls: ServerTls | None = None
    """TLS of that port. Default: none."""
    remotes: dict[str, Remote] = {}
    """Servers that this one joins, by names of your choice."""


class Gateways(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The clusters that are joined to this one to a super-cluster, in which streams of one source those of another."""

    host: Text = LOOPBACK
    """Address to listen on for servers of other clusters."""
    port: Port = 7222
    """Port to listen on for servers of other clusters."""
    remotes: dict[str, tuple[Text, ...]]
    """By the name of each cluster, host:port of all its servers. This cluster may be among them."""
    user: Text | None = None
    """User as which the clusters authenticate to each other, together with password."""
    password: Secret | None = None
    """Password of that user. It is best set in the environment."""
    tls: ServerTls | None = None
    """TLS between the clusters. Default: none."""


class Server(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A nats-server of your own, for production or for development and tests."""

    server_name: Text = "aviso-workers"
    """Name of the server, which must be unique in its cluster."""
    server_tags: tuple[Text, ...] = ()
    """Tags of the server, such as az:1. The placement of streams can ask for them."""
    host: Text = LOOPBACK
    """Address to listen on; 0.0.0.0 is all addresses."""
    port: Port = 4222
    """Port for clients; 0 is any free port."""
    monitoring: Monitoring = Monitoring()
    """The monitoring port, for /varz, /jsz and /healthz."""
    max_connections: Positive | None = None
    """Maximum number of connected clients. Default: 65536."""
    max_subscriptions: Positive | None = None
    """Maximum number of subscriptions of one client. Default: no limit."""
    max_payload: Size | None = None
    """Maximum size of one message, at most 64Mi. Default: 1Mi."""
    lame_duck_grace_period: Duration | None = None
    """Time from the announcement that the server leaves until it begins to close connections. Default: 10s."""
    lame_duck_duration: Duration | None = None
    """Time within which the server leaves once it is told to; at least 30s. Default: 2m."""
    jetstream: ServerJetStream = ServerJetStream()
    """Where and how streams are stored."""
    accounts: dict[str, Account] = {}
    """Accounts by name. Default: one, open to everybody."""
    system_account: Text | None = None
    """Account of the server's own events. Default: $SYS."""
    tls: ServerTls | None = None
    """TLS for clients. Default: none."""
    cluster: Cluster | None = None
    """The cluster of servers that share streams. Default: this server is alone."""
    gateways: Gateways | None = None
    """Other clusters that are joined to this one. Default: none."""
    leafnodes: LeafNodes | None = None
    """Leaf nodes that join this server, and servers that it joins. Default: none."""
