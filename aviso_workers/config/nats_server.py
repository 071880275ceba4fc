"""What can be configured of a nats-server of our own: the section `server`.

The names are nats-server's where it has one for the thing (JetStream's as in its documentation, "JetStream
configuration"); `aviso_workers.server.nats_conf` writes nats-server.conf from these Structs. Nothing here says how
workers connect: that is `notification_backend.jetstream`. MQTT, WebSocket and gateways cannot be configured and stay
off.

Loading checks types only. What they cannot say, `aviso_workers.server.mistakes` does, for whoever renders or runs a
server: a worker that shares the file needs none of the server's passwords in its environment.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from aviso_workers.aviso.literals import Duration, Size
from aviso_workers.config.fields import Port, Positive, Text, about
from aviso_workers.config.secrets import Secret

__all__ = [
    "Account",
    "AccountJetStream",
    "Cluster",
    "Encryption",
    "LeafNodes",
    "Monitoring",
    "Permissions",
    "Remote",
    "Server",
    "ServerJetStream",
    "ServerLimits",
    "ServerTls",
    "Subjects",
    "User",
]

LOOPBACK = "127.0.0.1"

Cipher = Literal["chacha", "aes"]
Compression = Literal["off", "accept", "s2_auto", "s2_fast", "s2_better", "s2_best"]


class Monitoring(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The port that answers /varz, /jsz and /healthz over plain HTTP, and asks nobody who they are."""

    host: Annotated[Text, about("Address to listen on.")] = LOOPBACK
    port: Annotated[Port, about("Port to listen on; 0 is any free one.")] = 8222


class Encryption(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Encryption at rest, of everything below store_dir. Whoever loses the key loses the streams."""

    cipher: Annotated[Cipher, about("How it is encrypted.")] = "chacha"
    key: Annotated[Secret | None, about("The key; best set in the environment, or in key_file.")] = None
    key_file: Annotated[Text | None, about("File that holds the key.")] = None


class ServerLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What JetStream refuses on this server, whatever the account."""

    max_ack_pending: Annotated[Positive | None, about("Deliveries without acknowledgement, per consumer.")] = None
    max_ha_assets: Annotated[Positive | None, about("Replicated streams and consumers.")] = None
    max_request_batch: Annotated[Positive | None, about("Messages that one pull request may ask for.")] = None
    duplicate_window: Annotated[Duration | None, about("The longest window of deduplication.")] = None


class ServerJetStream(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and how streams are stored."""

    store_dir: Annotated[Text | None, about("Directory of the streams. Needed in production.")] = None
    max_memory_store: Annotated[Size | None, about("Bytes of all streams in memory. Needed in production.")] = None
    max_file_store: Annotated[
        Size | None, about("Bytes of all streams on disk; a half of the disk at most. Needed in production.")
    ] = None
    domain: Annotated[Text | None, about("JetStream domain, where several meet through leaf nodes.")] = None
    sync_interval: Annotated[
        Duration | None, about("How often files are flushed to disk. Default: what the profile chooses.")
    ] = None
    sync_always: Annotated[bool, about("Flush before every acknowledgement; then there is no sync_interval.")] = False
    unique_tag: Annotated[
        Text | None, about("Start of a server tag, such as az: - no two copies of a stream share the tag.")
    ] = None
    max_outstanding_catchup: Annotated[
        Size | None, about("Bytes under way to a replica that catches up. Default: 64Mi.")
    ] = None
    limits: Annotated[ServerLimits, about("What JetStream refuses, whatever the account.")] = ServerLimits()
    encryption: Annotated[Encryption | None, about("Encryption at rest. Default: none.")] = None


class AccountJetStream(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an account may use of JetStream. Default of every limit: none."""

    enabled: Annotated[bool, about("Whether the account has JetStream at all.")] = True
    max_memory: Annotated[Size | None, about("Bytes of its streams in memory.")] = None
    max_storage: Annotated[Size | None, about("Bytes of its streams on disk.")] = None
    max_streams: Annotated[Positive | None, about("Streams.")] = None
    max_consumers: Annotated[Positive | None, about("Consumers.")] = None
    max_ack_pending: Annotated[Positive | None, about("Deliveries without acknowledgement, per consumer.")] = None
    max_bytes_required: Annotated[bool, about("Refuse streams without max_bytes.")] = False
    memory_max_stream_bytes: Annotated[Size | None, about("Bytes of one stream in memory.")] = None
    disk_max_stream_bytes: Annotated[Size | None, about("Bytes of one stream on disk.")] = None


class Subjects(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Subjects, with wildcards. What is in `deny` is denied, also where `allow` has it."""

    allow: Annotated[tuple[Text, ...], about("Nothing else is allowed. Default: everything.")] = ()
    deny: Annotated[tuple[Text, ...], about("Default: nothing.")] = ()


class Permissions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user may do."""

    publish: Annotated[Subjects, about("Where to publish, requests included.")] = Subjects()
    subscribe: Annotated[Subjects, about("What to subscribe to, inboxes included.")] = Subjects()
    allow_responses: Annotated[bool, about("Answer to requests, wherever the answer goes.")] = False


class User(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who connects: by password or by NKey."""

    password: Annotated[Secret | None, about("The password or its bcrypt hash; best set in the environment.")] = None
    nkey: Annotated[Text | None, about("Public NKey, which starts with U; its seed stays with the user.")] = None
    permissions: Annotated[Permissions, about("What the user may do. Default: everything in the account.")] = (
        Permissions()
    )


class Account(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Subjects, streams and users of its own."""

    jetstream: Annotated[AccountJetStream, about("What the account may use of JetStream.")] = AccountJetStream()
    users: Annotated[dict[str, User], about("Users by name.")] = {}


class ServerTls(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS of one port. The files are PEM."""

    cert_file: Annotated[Text, about("The server's certificate.")]
    key_file: Annotated[Text, about("Its private key.")]
    ca_file: Annotated[Text | None, about("Certificates to trust. Default: the system's.")] = None
    verify: Annotated[bool, about("Ask whoever connects for a certificate of ca_file's.")] = False


class Cluster(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The servers that share streams."""

    name: Annotated[Text, about("The same on every server.")] = "aviso-workers"
    host: Annotated[Text, about("Address to listen on for the others.")] = LOOPBACK
    port: Annotated[Port, about("Port to listen on for the others.")] = 6222
    routes: Annotated[tuple[Text, ...], about("host:port of all servers; it may be in its own list.")] = ()
    user: Annotated[Text | None, about("User that the servers name to each other, with password.")] = None
    password: Annotated[Secret | None, about("Its password; best set in the environment.")] = None
    compression: Annotated[Compression | None, about("Between servers. Default: accept.")] = None
    tls: Annotated[ServerTls | None, about("TLS between the servers. Default: none.")] = None


class Remote(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server, or a cluster, of which this one is a leaf."""

    urls: Annotated[tuple[Text, ...], about("host:port of its leaf-node listener, on each of its servers.")]
    account: Annotated[Text | None, about("Account here that is joined to it. Default: the global one.")] = None
    user: Annotated[Text | None, about("User there, with password.")] = None
    password: Annotated[Secret | None, about("The user's password; best set in the environment.")] = None
    ca_file: Annotated[Text | None, about("Certificates to trust; with it, TLS is used.")] = None


class LeafNodes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Servers that join this one, and those that it joins."""

    host: Annotated[Text, about("Address to listen on for leaf nodes.")] = LOOPBACK
    port: Annotated[Port | None, about("Port to listen on, such as 7422. Default: nobody can join.")] = None
    compression: Annotated[Compression | None, about("On that port. Default: s2_auto.")] = None
    tls: Annotated[ServerTls | None, about("TLS of that port. Default: none.")] = None
    remotes: Annotated[dict[str, Remote], about("What this server joins, by a name of your choice.")] = {}


class Gateways(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The clusters that are joined to this one: a super-cluster, in which streams of one cluster source another's."""

    host: Annotated[Text, about("Address to listen on for servers of other clusters.")] = LOOPBACK
    port: Annotated[Port, about("Port to listen on for servers of other clusters.")] = 7222
    remotes: Annotated[
        dict[str, tuple[Text, ...]],
        about("By the name of each cluster, host:port of all its servers; this one's may be among them."),
    ]
    user: Annotated[Text | None, about("User that the clusters name to each other, with password.")] = None
    password: Annotated[Secret | None, about("Its password; best set in the environment.")] = None
    tls: Annotated[ServerTls | None, about("TLS between the clusters. Default: none.")] = None


class Server(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A nats-server of our own: rendered for production, or run for development and tests."""

    server_name: Annotated[Text, about("Unique in the cluster.")] = "aviso-workers"
    server_tags: Annotated[tuple[Text, ...], about("What the placement of streams can ask for, such as az:1.")] = ()
    host: Annotated[Text, about("Address to listen on; 0.0.0.0 is every one.")] = LOOPBACK
    port: Annotated[Port, about("Port for clients; 0 is any free one.")] = 4222
    monitoring: Annotated[Monitoring, about("The port for /varz, /jsz and /healthz.")] = Monitoring()
    max_connections: Annotated[Positive | None, about("Clients. Default: 65536.")] = None
    max_subscriptions: Annotated[Positive | None, about("Subscriptions per client. Default: no limit.")] = None
    max_payload: Annotated[Size | None, about("Bytes of one message, 64Mi at most. Default: 1Mi.")] = None
    lame_duck_grace_period: Annotated[
        Duration | None, about("From the announcement to leave until clients are let go. Default: 10s.")
    ] = None
    lame_duck_duration: Annotated[
        Duration | None, about("Within which the server leaves once told to; at least 30s. Default: 2m.")
    ] = None
    jetstream: Annotated[ServerJetStream, about("Where and how streams are stored.")] = ServerJetStream()
    accounts: Annotated[dict[str, Account], about("Accounts by name. Default: one, open to everybody.")] = {}
    system_account: Annotated[Text | None, about("The account of the server's own events. Default: $SYS.")] = None
    tls: Annotated[ServerTls | None, about("TLS for clients. Default: none.")] = None
    cluster: Annotated[Cluster | None, about("The servers that share streams. Default: this one is alone.")] = None
    gateways: Annotated[Gateways | None, about("Other clusters. Default: none.")] = None
    leafnodes: Annotated[LeafNodes | None, about("Leaf nodes. Default: none.")] = None
