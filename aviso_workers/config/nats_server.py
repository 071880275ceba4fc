"""What can be configured of a nats-server of our own: the section `server`.

The names are nats-server's where it has one for the thing (JetStream's as in its documentation, "JetStream
configuration"); `aviso_workers.server.nats_conf` writes nats-server.conf from these Structs. Nothing here says how
workers connect: that is `notification_backend.jetstream`. MQTT, WebSocket and gateways cannot be configured and stay
off.

Loading checks types only. What they cannot say, `aviso_workers.server.mistakes` does, for whoever renders or runs a
server: a worker that shares the file needs none of the server's passwords in its environment.
"""

# Annotations are evaluated here: as text, msgspec would parse each of them whenever a worker starts.

from typing import Annotated, Literal

from msgspec import Meta, Struct

from aviso_workers.aviso.literals import Duration, Size
from aviso_workers.config.conversion import about
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

    host: Annotated[Text, about("Address to listen on; 0.0.0.0 is all addresses.")] = LOOPBACK
    port: Annotated[Port, about("Port to listen on; 0 is any free port.")] = 8222


class Encryption(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Encryption at rest, of everything below store_dir. Without its key, the streams are lost."""

    cipher: Annotated[Cipher, about("Cipher of the encryption.")] = "chacha"
    key: Annotated[
        Secret | None, about("Key of the encryption. It is best set in the environment, or in key_file.")
    ] = None
    key_file: Annotated[Text | None, about("File with the key, instead of key.")] = None


class ServerLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of JetStream on this server, for all accounts. Default of each: the server's."""

    max_ack_pending: Annotated[
        Positive | None, about("Maximum number of deliveries without acknowledgement, for each consumer.")
    ] = None
    max_ha_assets: Annotated[Positive | None, about("Maximum number of replicated streams and consumers.")] = None
    max_request_batch: Annotated[
        Positive | None, about("Maximum number of messages that one pull request may ask for.")
    ] = None
    duplicate_window: Annotated[Duration | None, about("Longest window of deduplication.")] = None


class ServerJetStream(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """JetStream on this server: where and how streams are stored."""

    store_dir: Annotated[Text | None, about("Directory of the streams. It is required in production.")] = None
    max_memory_store: Annotated[
        Size | None, about("Size that all streams in memory may have, such as 1Gi. It is required in production.")
    ] = None
    max_file_store: Annotated[
        Size | None,
        about(
            "Size that all streams on disk may have, such as 500Gi. It is required in production, and should "
            "be at most half of the disk."
        ),
    ] = None
    domain: Annotated[Text | None, about("JetStream domain of this server, if leaf nodes join several domains.")] = None
    sync_interval: Annotated[
        Duration | None, about("Interval at which files are flushed to disk. Default: what the profile chooses.")
    ] = None
    sync_always: Annotated[
        bool, about("Flush files to disk before every acknowledgement. It excludes sync_interval.")
    ] = False
    unique_tag: Annotated[
        Text | None,
        about("Start of a server tag, such as az: - no two replicas of a stream are on servers that share the tag."),
    ] = None
    max_outstanding_catchup: Annotated[
        Size | None, about("Size of the messages in flight to a replica that catches up. Default: 64Mi.")
    ] = None
    limits: Annotated[ServerLimits, about("Limits of JetStream on this server, for all accounts.")] = ServerLimits()
    encryption: Annotated[Encryption | None, about("Encryption at rest. Default: none.")] = None


class AccountJetStream(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of JetStream for one account. Default of each: no limit."""

    enabled: Annotated[bool, about("Let the account use JetStream.")] = True
    max_memory: Annotated[Size | None, about("Size that its streams in memory may have together.")] = None
    max_storage: Annotated[Size | None, about("Size that its streams on disk may have together.")] = None
    max_streams: Annotated[Positive | None, about("Maximum number of streams.")] = None
    max_consumers: Annotated[Positive | None, about("Maximum number of consumers of each stream.")] = None
    max_ack_pending: Annotated[
        Positive | None, about("Maximum number of deliveries without acknowledgement, for each consumer.")
    ] = None
    max_bytes_required: Annotated[bool, about("Refuse streams without max_bytes.")] = False
    memory_max_stream_bytes: Annotated[Size | None, about("Size that one stream in memory may have.")] = None
    disk_max_stream_bytes: Annotated[Size | None, about("Size that one stream on disk may have.")] = None


class Subjects(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Subjects, with wildcards. A subject that `deny` has is denied, even if `allow` has it too."""

    allow: Annotated[
        tuple[Text, ...], about("Subjects that are allowed. All others are denied. Default: all are allowed.")
    ] = ()
    deny: Annotated[tuple[Text, ...], about("Subjects that are denied. Default: none.")] = ()


class Permissions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Permissions of a user to publish and to subscribe."""

    publish: Annotated[Subjects, about("Subjects to which the user may publish, also requests.")] = Subjects()
    subscribe: Annotated[Subjects, about("Subjects to which the user may subscribe, also inboxes.")] = Subjects()
    allow_responses: Annotated[bool, about("Let the user answer requests, whatever the subject of the answer is.")] = (
        False
    )


class User(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user, who authenticates by password or by NKey."""

    password: Annotated[Secret | None, about("Password or its bcrypt hash. It is best set in the environment.")] = None
    nkey: Annotated[Text | None, about("Public NKey, which starts with U. Its seed stays with the user.")] = None
    permissions: Annotated[Permissions, about("What the user may do. Default: everything in the account.")] = (
        Permissions()
    )


class Account(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An account, with subjects, streams and users of its own."""

    jetstream: Annotated[AccountJetStream, about("What the account may use of JetStream.")] = AccountJetStream()
    publishes: Annotated[
        tuple[Text, ...],
        about(
            "Event types that its users publish. Such an account has no streams, and reaches nothing else of the "
            "account that has them. Default: none."
        ),
    ] = ()
    publishes_to: Annotated[
        Text | None,
        about("Account that has the streams of these event types. Default: the only one with JetStream."),
    ] = None
    delays: Annotated[
        bool,
        about("Let its users delay notifications. They can then remove what others delayed for these event types."),
    ] = False
    users: Annotated[dict[str, User], about("Users by name.")] = {}


class ServerTls(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS of one port. All files are PEM."""

    cert_file: Annotated[Text, about("File with the server's certificate.")]
    key_file: Annotated[Text, about("File with the private key of that certificate.")]
    ca_file: Annotated[Text | None, about("File with the certificates to trust. Default: those of the system.")] = None
    verify: Annotated[bool, about("Require a certificate that ca_file trusts of everyone who connects.")] = False


class Cluster(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cluster of servers that share streams."""

    name: Annotated[Text, about("Name of the cluster, the same on every server.")] = "aviso-workers"
    host: Annotated[Text, about("Address to listen on for the other servers.")] = LOOPBACK
    port: Annotated[Port, about("Port to listen on for the other servers.")] = 6222
    routes: Annotated[
        tuple[Text, ...], about("host:port of all servers of the cluster. This server may be in the list.")
    ] = ()
    user: Annotated[
        Text | None, about("User as which the servers authenticate to each other, together with password.")
    ] = None
    password: Annotated[Secret | None, about("Password of that user. It is best set in the environment.")] = None
    compression: Annotated[Compression | None, about("Compression between the servers. Default: accept.")] = None
    tls: Annotated[ServerTls | None, about("TLS between the servers. Default: none.")] = None


class Remote(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server, or a cluster, that this server joins as a leaf node."""

    urls: Annotated[tuple[Text, ...], about("host:port of the port for leaf nodes, on each of its servers.")]
    account: Annotated[
        Text | None, about("Account of this server that is joined to it. Default: the global account.")
    ] = None
    user: Annotated[Text | None, about("User to authenticate as there, together with password.")] = None
    password: Annotated[Secret | None, about("Password of that user. It is best set in the environment.")] = None
    ca_file: Annotated[Text | None, about("File with the certificates to trust. If it is given, TLS is used.")] = None


class LeafNodes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The servers that join this one as leaf nodes, and those that it joins."""

    host: Annotated[Text, about("Address to listen on for leaf nodes.")] = LOOPBACK
    port: Annotated[Port | None, about("Port to listen on for leaf nodes, such as 7422. Default: none can join.")] = (
        None
    )
    compression: Annotated[Compression | None, about("Compression on that port. Default: s2_auto.")] = None
    tls: Annotated[ServerTls | None, about("TLS of that port. Default: none.")] = None
    remotes: Annotated[dict[str, Remote], about("Servers that this one joins, by names of your choice.")] = {}


class Gateways(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The clusters that are joined to this one to a super-cluster, in which streams of one source those of another."""

    host: Annotated[Text, about("Address to listen on for servers of other clusters.")] = LOOPBACK
    port: Annotated[Port, about("Port to listen on for servers of other clusters.")] = 7222
    remotes: Annotated[
        dict[str, tuple[Text, ...]],
        about("By the name of each cluster, host:port of all its servers. This cluster may be among them."),
    ]
    user: Annotated[
        Text | None, about("User as which the clusters authenticate to each other, together with password.")
    ] = None
    password: Annotated[Secret | None, about("Password of that user. It is best set in the environment.")] = None
    tls: Annotated[ServerTls | None, about("TLS between the clusters. Default: none.")] = None


class Server(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A nats-server of your own, for production or for development and tests."""

    server_name: Annotated[Text, about("Name of the server, which must be unique in its cluster.")] = "aviso-workers"
    server_tags: Annotated[
        tuple[Text, ...], about("Tags of the server, such as az:1. The placement of streams can ask for them.")
    ] = ()
    host: Annotated[Text, about("Address to listen on; 0.0.0.0 is all addresses.")] = LOOPBACK
    port: Annotated[Port, about("Port for clients; 0 is any free port.")] = 4222
    monitoring: Annotated[Monitoring, about("The monitoring port, for /varz, /jsz and /healthz.")] = Monitoring()
    max_connections: Annotated[Positive | None, about("Maximum number of connected clients. Default: 65536.")] = None
    max_subscriptions: Annotated[
        Positive | None, about("Maximum number of subscriptions of one client. Default: no limit.")
    ] = None
    max_payload: Annotated[Size | None, about("Maximum size of one message, at most 64Mi. Default: 1Mi.")] = None
    lame_duck_grace_period: Annotated[
        Duration | None,
        about("Time from the announcement that the server leaves until it begins to close connections. Default: 10s."),
    ] = None
    lame_duck_duration: Annotated[
        Duration | None, about("Time within which the server leaves once it is told to; at least 30s. Default: 2m.")
    ] = None
    jetstream: Annotated[ServerJetStream, about("Where and how streams are stored.")] = ServerJetStream()
    accounts: Annotated[dict[str, Account], about("Accounts by name. Default: one, open to everybody.")] = {}
    system_account: Annotated[Text | None, about("Account of the server's own events. Default: $SYS.")] = None
    tls: Annotated[ServerTls | None, about("TLS for clients. Default: none.")] = None
    cluster: Annotated[
        Cluster | None, about("The cluster of servers that share streams. Default: this server is alone.")
    ] = None
    gateways: Annotated[Gateways | None, about("Other clusters that are joined to this one. Default: none.")] = None
    leafnodes: Annotated[
        LeafNodes | None, about("Leaf nodes that join this server, and servers that it joins. Default: none.")
    ] = None
