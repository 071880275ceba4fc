"""What can be configured: every key, its meaning, unit and default, where it is declared.

`loading` fills these Structs, `display` prints them, and everybody else reads them. The keys of `notification_backend`
and `notification_schema` are those of aviso-server, with its defaults (Aviso's JetStream backend, "Configuration
Reference"); what stands under "beyond the document" and under `workers` is ours. Structs that refuse unknown keys are
ours alone; the others ignore what they do not know, as aviso-server does, unless it is nearly the name of a field that
is `ours`: aviso-server cannot have meant that one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field, structs

from aviso_workers.aviso.literals import Duration, Size
from aviso_workers.aviso.schema import EventType
from aviso_workers.config.fields import Count, Port, Positive, Seconds, Text, about
from aviso_workers.config.nats_server import Server
from aviso_workers.config.secrets import Secret, ServerUrls
from aviso_workers.jetstream.fields import DeclaredStream

__all__ = [
    "Application",
    "Config",
    "DeadLetters",
    "Document",
    "InMemory",
    "JetStream",
    "Logging",
    "NotificationBackend",
    "Status",
    "Tls",
    "Workers",
]

DEFAULT_URL = "nats://localhost:4222"


class Application(Struct, frozen=True, kw_only=True):
    """The only key of aviso-server's own section that we read."""

    base_url: Annotated[Text, about("Where CloudEvents say they come from (`source` and `dataschema`).")] = (
        "http://localhost"
    )


class Tls(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to trust the server, and how to be known to it. The files are PEM."""

    ca_file: Annotated[str | None, about("Certificates to trust. Default: the system's.")] = None
    cert_file: Annotated[str | None, about("Our certificate, where the server asks for one.")] = None
    key_file: Annotated[str | None, about("Its private key. Default: it is in cert_file.")] = None
    server_hostname: Annotated[str | None, about("Name in the server's certificate. Default: the URL's.")] = None


class JetStream(Struct, frozen=True, kw_only=True):
    """The connection to NATS, and the defaults of every stream that is created."""

    nats_url: Annotated[
        ServerUrls,
        about(f"Server URLs: a list, or text with commas between them. Default: {DEFAULT_URL}."),
    ] = field(default_factory=lambda: ServerUrls(DEFAULT_URL))
    token: Annotated[Secret | None, about("Token to authenticate with. Default: NATS_TOKEN of the environment.")] = None
    timeout_seconds: Annotated[Positive, about("Seconds for one attempt to connect.")] = 30
    retry_attempts: Annotated[
        Positive,
        about("Attempts to connect at startup before giving up. A worker for which it is not set tries without end."),
    ] = 3

    enable_auto_reconnect: Annotated[bool, about("Connect again when a connection is lost after startup.")] = True
    max_reconnect_attempts: Annotated[
        Count,
        about(
            "Attempts to reconnect before giving up for good; 0 is without end. A worker for which it is not set tries "
            "without end."
        ),
    ] = 5
    reconnect_delay_ms: Annotated[Positive, about("Milliseconds between two attempts, at startup as later.")] = 2000

    publish_retry_attempts: Annotated[
        Positive, about("Attempts in all to publish a notification while the connection's channel is closed.")
    ] = 5
    publish_retry_base_delay_ms: Annotated[
        Positive, about("Milliseconds before the second attempt; each further delay is twice the last.")
    ] = 150

    max_messages: Annotated[int | None, about("Messages a stream keeps; 0 and below: no limit.")] = None
    max_bytes: Annotated[int | None, about("Bytes a stream keeps, a plain number; 0 and below: no limit.")] = None
    retention_time: Annotated[
        Duration | None,
        about("How long a stream keeps a message: a number and s, m, h, d or w, such as 30d."),
    ] = None
    storage_type: Annotated[Literal["file", "memory"], about("Where streams are stored.")] = "file"
    replicas: Annotated[Count | None, about("Copies of a stream in the cluster. Default: the server's.")] = None
    retention_policy: Annotated[
        Literal["limits", "interest"],
        about(
            "What lets a message go: the limits above, or that every consumer has it.",
            workqueue=(
                "'workqueue' cannot be used: replay and watch need consumers without acknowledgement, "
                "which JetStream refuses on such a stream; use 'limits'"
            ),
        ),
    ] = "limits"
    discard_policy: Annotated[Literal["old", "new"], about("What gives way when a stream is full.")] = "old"

    # Beyond the document.
    user: Annotated[Text | None, about("User to authenticate as, with password.", ours=True)] = None
    password: Annotated[Secret | None, about("The user's password; best set in the environment.", ours=True)] = None
    nkey_seed_file: Annotated[str | None, about("File with an NKey seed to authenticate with.", ours=True)] = None
    credentials_file: Annotated[str | None, about("File with a user JWT and its seed (.creds).", ours=True)] = None
    tls: Annotated[Tls | None, about("TLS options; a URL that starts with tls:// needs none.", ours=True)] = None
    domain: Annotated[Text | None, about("JetStream domain. Default: the account's own.", ours=True)] = None
    api_prefix: Annotated[
        Text | None,
        about("Where JetStream's API is in the account, if it was imported there. Default: $JS.API.", ours=True),
    ] = None
    inbox_prefix: Annotated[
        Text, about("What the subjects begin with to which servers send us their answers.", ours=True)
    ] = "_INBOX"
    stream_management: Annotated[
        Literal["reconcile", "create", "observe"],
        about(
            "reconcile: create streams, and update those that differ from the configuration, "
            "as far as that removes no stored messages; "
            "create: create what is missing; observe: change nothing.",
            ours=True,
        ),
    ] = "reconcile"
    publish_deadline_seconds: Annotated[
        Seconds, about("Seconds within which a notification must be published, all attempts together.", ours=True)
    ] = 30.0

    @property
    def api(self) -> str:
        """What the subjects of JetStream's API begin with."""
        return self.api_prefix or (f"$JS.{self.domain}.API" if self.domain else "$JS.API")

    @property
    def servers(self) -> tuple[str, ...]:
        """The URLs as they are, for a client; passwords included."""
        return self.nats_url.reveal()

    @property
    def masked_servers(self) -> tuple[str, ...]:
        """The URLs for people to read."""
        return self.nats_url.masked()


class InMemory(Struct, frozen=True, kw_only=True):
    """The backend without a server: everything is gone when the process ends."""

    max_history_per_topic: Annotated[Positive, about("Notifications kept per topic.")] = 1
    max_topics: Annotated[Positive, about("Topics kept; the one that was quiet for longest gives way.")] = 10_000
    enable_metrics: Annotated[bool, about("Read by aviso-server only; our metrics are always there.")] = False


class NotificationBackend(Struct, frozen=True, kw_only=True):
    """Where notifications are stored. The section of the backend that is not used is checked for its types only."""

    kind: Annotated[
        Literal["jetstream", "in_memory"],
        about("The backend to use.", otherwise="Unknown notification_backend kind: {found}"),
    ]
    jetstream: Annotated[JetStream, about("Settings of the backend 'jetstream'.")] = field(default_factory=JetStream)
    in_memory: Annotated[InMemory, about("Settings of the backend 'in_memory'.")] = InMemory()


class Status(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The port that answers /metrics, /livez and /readyz."""

    host: Annotated[Text, about("Address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1"
    port: Annotated[Port, about("Port to listen on; 0 is any free one.")] = 9464
    token: Annotated[
        Secret | None,
        about("Bearer token that /metrics asks for; probes need none. Default: everybody may read."),
    ] = None


class Logging(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker writes to stderr."""

    format: Annotated[Literal["console", "json"], about("For people, or one JSON object per line.")] = "console"
    level: Annotated[Literal["debug", "info", "warning", "error"], about("The least that is written.")] = "info"


class DeadLetters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The stream of notifications that could not be handled."""

    replicas: Annotated[Positive | None, about("Copies in the cluster. Default: those of the backend.")] = None
    max_bytes: Annotated[
        Size | None,
        about("What it may hold: a number and K, M, G, T, Ki, Mi, Gi or Ti, such as 1Gi. Default: all."),
    ] = None


class Workers(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The worker processes. Unlike aviso-server's sections, this one refuses keys that it does not know."""

    status: Annotated[Status, about("The port for probes and metrics.")] = Status()
    logging: Annotated[Logging, about("How a worker logs.")] = Logging()
    drain_timeout_seconds: Annotated[
        Annotated[float, Meta(ge=0)],
        about("Seconds that running agents get to finish when a worker is told to stop."),
    ] = 30.0
    priority: Annotated[
        Annotated[int, Meta(ge=0, le=9)],
        about(
            "Which workers JetStream serves first, those of the lowest number: from 1 on this worker gets what none of "
            "a lower number asks for. No notification goes before another by it.",
            bounds="it says which workers JetStream serves first, those of 0 before others; notifications have none",
        ),
    ] = 0
    dead_letters: Annotated[DeadLetters, about("Where notifications go that could not be handled.")] = DeadLetters()
    agents: Annotated[
        dict[str, dict[str, Any]],
        about("Settings of agents that come with the package or with others', by the name of their router."),
    ] = {}


class Document(Struct, frozen=True, kw_only=True):
    """The keys that a configuration file can hold; aviso-server's other sections are left alone."""

    notification_backend: Annotated[NotificationBackend, about("Where notifications are stored.")]
    notification_schema: Annotated[dict[str, EventType], about("The event types by name.")] = {}
    notification_schema_strict: Annotated[
        bool | None, about("Refuse unknown event types. Default: where there is a known one.")
    ] = None
    application: Annotated[Application, about("aviso-server's section; only base_url is read.")] = Application()
    workers: Annotated[Workers, about("The worker processes.", ours=True)] = Workers()
    streams: Annotated[
        dict[str, DeclaredStream],
        about("Streams by name, beyond those of event types, or more of those' settings.", ours=True),
    ] = {}
    server: Annotated[Server, about("A nats-server of our own. Workers do not read it.", ours=True)] = Server()


class Config(Document, frozen=True, kw_only=True):
    """A configuration, and what loading it found."""

    sources: tuple[str, ...] = ()
    """The files and environment variables that it came from, in the order in which they were read."""
    warnings: tuple[str, ...] = ()
    """What is no mistake but looks like one, a sentence each."""
    origins: dict[str, str] = {}
    """Per key path that was set: the file and line, or the environment variable. All else is a default."""

    def with_defaults(self, **jetstream: Any) -> Config:
        """Return the configuration with other defaults of `notification_backend.jetstream`.

        Where a file or the environment says something else, that stays.
        """
        unset = {key: v for key, v in jetstream.items() if f"notification_backend.jetstream.{key}" not in self.origins}
        backend = self.notification_backend
        changed = structs.replace(backend, jetstream=structs.replace(backend.jetstream, **unset))
        return structs.replace(self, notification_backend=changed)
