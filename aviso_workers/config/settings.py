"""What can be configured: every key, its meaning, unit and default, where it is declared.

`loading` fills these Structs, `display` prints them, and everybody else reads them. The keys of `notification_backend`
and `notification_schema` are those of aviso-server, with its defaults (Aviso's JetStream backend, "Configuration
Reference"); what stands under "beyond the document" and under `workers` is ours. Structs that refuse unknown keys are
ours alone; the others ignore what they do not know, as aviso-server does, unless it is nearly the name of a field that
is `ours`: aviso-server cannot have meant that one.
"""

# Annotations are evaluated here: as text, msgspec would parse each of them whenever a worker starts.

from collections.abc import Mapping
from datetime import datetime
from importlib.util import find_spec
from ipaddress import ip_address
from typing import Annotated, Any, Literal, Self

from msgspec import Meta, Struct, field, structs

from aviso_workers.aviso.literals import Duration, Size
from aviso_workers.aviso.schema import EventType
from aviso_workers.config.conversion import about
from aviso_workers.config.nats_server import Port, Server
from aviso_workers.config.secrets import Secret, ServerUrls
from aviso_workers.errors import UnknownEventTypeError
from aviso_workers.jetstream.fields import Count, DeclaredStream, Positive, Text

DEFAULT_URL = "nats://localhost:4222"


class Application(Struct, frozen=True, kw_only=True):
    """The section of aviso-server, of which only one key is read."""

    base_url: Annotated[Text, about("Base URL in the `source` and `dataschema` of CloudEvents.")] = "http://localhost"


class Tls(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS of the connection: the certificates to trust, and the client's own. All files are PEM."""

    ca_file: Annotated[str | None, about("File with the certificates to trust. Default: those of the system.")] = None
    cert_file: Annotated[str | None, about("File with the client's certificate, if the server asks for one.")] = None
    key_file: Annotated[
        str | None, about("File with the private key of that certificate. Default: cert_file, which then holds both.")
    ] = None
    server_hostname: Annotated[
        str | None, about("Host name that the server's certificate must have. Default: the one in the URL.")
    ] = None


class JetStream(Struct, frozen=True, kw_only=True):
    """The connection to NATS, and the defaults of all streams that are created."""

    nats_url: Annotated[
        ServerUrls,
        about(f"URLs of the servers: a list, or text with commas between them. Default: {DEFAULT_URL}."),
    ] = field(default_factory=lambda: ServerUrls(DEFAULT_URL))
    token: Annotated[
        Secret | None,
        about(
            "Token to authenticate with. Default: NATS_TOKEN of the environment, if no other way to "
            "authenticate is given."
        ),
    ] = None
    timeout_seconds: Annotated[Positive, about("Seconds for one attempt to connect.")] = 30
    retry_attempts: Annotated[
        Positive,
        about("Number of attempts to connect at startup. A worker for which it is not set tries without end."),
    ] = 3

    enable_auto_reconnect: Annotated[bool, about("Reconnect when a connection is lost after startup.")] = True
    max_reconnect_attempts: Annotated[
        Count,
        about("Number of attempts to reconnect before giving up for good; 0 means no limit."),
    ] = 0
    reconnect_delay_ms: Annotated[
        Positive, about("Milliseconds between two attempts to connect, at startup and later.")
    ] = 2000

    publish_retry_attempts: Annotated[
        Positive,
        about(
            "Minimum number of attempts to publish a notification, even if they take longer than "
            "publish_deadline_seconds."
        ),
    ] = 5
    publish_retry_base_delay_ms: Annotated[
        Positive,
        about(
            "Milliseconds before the second attempt to publish. Each further delay is twice as long, up to a second."
        ),
    ] = 150

    max_messages: Annotated[
        int | None, about("Number of messages that a stream keeps; 0 and below mean no limit. Default: no limit.")
    ] = None
    max_bytes: Annotated[
        int | None, about("Bytes that a stream keeps, as a plain number; 0 and below mean no limit. Default: no limit.")
    ] = None
    retention_time: Annotated[
        Duration | None,
        about(
            "Age up to which a stream keeps a message: a number and s, m, h, d or w, such as 30d. Default: no limit."
        ),
    ] = None
    storage_type: Annotated[Literal["file", "memory"], about("Storage of streams: on disk (file), or in memory.")] = (
        "file"
    )
    replicas: Annotated[
        Count | None, about("Number of replicas of a stream in the cluster. Default: the server's, which is 1.")
    ] = None
    retention_policy: Annotated[
        Literal["limits", "interest"],
        about(
            "When a stream removes a message. limits: at the limits above; interest: also once every consumer "
            "has acknowledged it, and at once if there is none.",
            workqueue=(
                "'workqueue' cannot be used: replay and watch need consumers without acknowledgement, "
                "which JetStream refuses on such a stream; use 'limits'"
            ),
        ),
    ] = "limits"
    discard_policy: Annotated[
        Literal["old", "new"],
        about("What a full stream does with a new message. old: remove old messages for it; new: refuse it."),
    ] = "old"

    # Beyond the document.
    user: Annotated[Text | None, about("User to authenticate as, together with password.", ours=True)] = None
    password: Annotated[Secret | None, about("Password of the user. It is best set in the environment.", ours=True)] = (
        None
    )
    nkey_seed_file: Annotated[str | None, about("File with the NKey seed to authenticate with.", ours=True)] = None
    credentials_file: Annotated[
        str | None, about("File with the user JWT and its seed (.creds) to authenticate with.", ours=True)
    ] = None
    tls: Annotated[Tls | None, about("TLS options. A URL that starts with tls:// needs none of them.", ours=True)] = (
        None
    )
    domain: Annotated[Text | None, about("JetStream domain to use. Default: the account's own.", ours=True)] = None
    api_prefix: Annotated[
        Text | None,
        about(
            "Prefix of JetStream's API, if the account imports it from another one. It excludes domain. "
            "Default: $JS.API.",
            ours=True,
        ),
    ] = None
    inbox_prefix: Annotated[
        Text | None,
        about(
            "Start of the subjects to which servers send their answers. Default: _INBOX_ and the user, such as "
            "_INBOX_mars, or _INBOX where there is no user or where the server denies the other one.",
            ours=True,
        ),
    ] = None
    stream_management: Annotated[
        Literal["reconcile", "create", "observe"],
        about(
            "How streams are managed. reconcile: create them, and update those that differ from the "
            "configuration, as far as that removes no stored messages; create: only create those that are "
            "missing; observe: change nothing.",
            ours=True,
        ),
    ] = "reconcile"
    publish_deadline_seconds: Annotated[
        Annotated[float, Meta(gt=0)],
        about(
            "Seconds within which a notification must be published, all attempts together. "
            "publish_retry_attempts are made in any case.",
            ours=True,
        ),
    ] = 30.0

    @property
    def api(self) -> str:
        """The start of the subjects of JetStream's API."""
        return self.api_prefix or (f"$JS.{self.domain}.API" if self.domain else "$JS.API")

    @property
    def servers(self) -> tuple[str, ...]:
        """The URLs of the servers with their passwords, for a client."""
        return self.nats_url.reveal()

    @property
    def masked_servers(self) -> tuple[str, ...]:
        """The URLs of the servers with masked passwords, for people."""
        return self.nats_url.masked()


class InMemory(Struct, frozen=True, kw_only=True):
    """The backend without a server. Everything is gone when the process ends."""

    max_history_per_topic: Annotated[Positive, about("Number of notifications that are kept of each topic.")] = 1
    max_topics: Annotated[
        Positive,
        about("Number of topics that are kept. A new topic replaces the one whose last notification is the oldest."),
    ] = 10_000
    enable_metrics: Annotated[bool, about("It is read by aviso-server only. A worker always has metrics.")] = False


class NotificationBackend(Struct, frozen=True, kw_only=True):
    """The backend that stores notifications.

    The section of the backend that is not used may stay: only the types of its values are checked.
    """

    kind: Annotated[
        Literal["jetstream", "in_memory"],
        about(
            "Backend to use: a NATS server with JetStream, or the memory of the process.",
            otherwise="Unknown notification_backend kind: {found}",
        ),
    ]
    jetstream: Annotated[JetStream, about("Settings of the backend jetstream.")] = field(default_factory=JetStream)
    in_memory: Annotated[InMemory, about("Settings of the backend in_memory.")] = InMemory()


SHORTEST_TOKEN = 16
"""Characters of a token by which others than this machine may be let in."""
DOCUMENTED_TOKEN = "set-it-in-the-environment"


def weakness(tokens: Mapping[str, Secret], host: str) -> list[str]:
    """Return which of the tokens, named by their keys, can be guessed where others than this machine reach the host."""
    texts = {key: token.reveal() for key, token in tokens.items()}
    weak = [key for key, text in texts.items() if text == DOCUMENTED_TOKEN or len(text) < SHORTEST_TOKEN]
    if not weak or is_loopback(host):
        return []
    return [
        f"{weak[0]}: {host} can be reached by others, and the token is one of the documentation or has fewer than "
        f"{SHORTEST_TOKEN} characters; set a long random one in the environment, such as the output of "
        "`openssl rand -hex 32`"
    ]


class Status(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The status port, which serves /metrics, /livez and /readyz."""

    host: Annotated[Text, about("Address to listen on; 0.0.0.0 is all addresses.")] = "127.0.0.1"
    port: Annotated[Port, about("Port to listen on; 0 is any free port.")] = 9464
    token: Annotated[
        Secret | None,
        about(
            "Bearer token that /metrics requires; /livez and /readyz require none. Default: everybody may "
            "read the metrics."
        ),
    ] = None


class Logging(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The log that a worker writes to stderr."""

    format: Annotated[
        Literal["console", "json"], about("Format of the log. console: text for people; json: one JSON object a line.")
    ] = "console"
    level: Annotated[Literal["debug", "info", "warning", "error"], about("Lowest level that is written.")] = "info"


class Traces(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Spans of OpenTelemetry, and their context in the headers of notifications."""

    enabled: Annotated[
        bool,
        about(
            "Make spans of what is published and handled, and write their context into the headers of notifications. "
            "It needs aviso-workers[otel]."
        ),
    ] = False
    process: Annotated[
        Literal["child", "root"],
        about(
            "Place of the span in which an agent handles one notification. child: in the trace of the notification; "
            "root: in a trace of its own. Either has a link to the span that published it."
        ),
    ] = "child"
    settle: Annotated[bool, about("Make a span of each ack, nak and term as well.")] = False

    @property
    def lacking(self) -> str:
        """What is missing to make spans; empty where nothing is."""
        if not self.enabled or find_spec("opentelemetry") is not None:
            return ""
        return "traces need the package opentelemetry-api: pip install 'aviso-workers[otel]'"


class Lineage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenLineage run events of workers, by NATS or by HTTP. They need the extra `lineage`."""

    subject: Annotated[Text | None, about("Subject to publish run events to, which the stream must take.")] = None
    stream: Annotated[Text, about("Stream that stores what is published to the subject.")] = "LINEAGE"
    url: Annotated[
        Text | None, about("URL of an OpenLineage server, without api/v1/lineage, to post run events to by HTTP.")
    ] = None
    api_key: Annotated[Secret | None, about("Bearer token for the URL. Default: none.")] = None
    namespace: Annotated[Text, about("Namespace of the jobs.")] = "aviso-workers"


class DeadLetters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The stream of notifications that could not be handled."""

    replicas: Annotated[
        Positive | None, about("Number of replicas in the cluster. Default: that of notification_backend.jetstream.")
    ] = None
    max_bytes: Annotated[
        Size | None,
        about(
            "Size that the stream may have: a number and K, M, G, T, Ki, Mi, Gi or Ti, such as 1Gi. Default: no limit."
        ),
    ] = None


class Accepted(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finding of the doctor that is known, and that nobody means to cure before a time."""

    code: Annotated[Annotated[str, Meta(pattern=r"^JS\d{3}$")], about("Code of the check, such as JS003.")]
    where: Annotated[
        str,
        about(
            "Place of the finding as the doctor shows it, such as `MARS > field__index`. `*` stands for any text; an "
            "empty text is for findings that name no place."
        ),
    ]
    reason: Annotated[Text, about("Reason why the finding is accepted; it is shown with the finding.")]
    until: Annotated[datetime, about("Time from which the finding counts again, such as 2027-01-31T00:00:00Z.")]


class Doctor(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The command `doctor`. Workers do not read this section."""

    accepted: Annotated[tuple[Accepted, ...], about("Findings that are shown as accepted, and are no failures.")] = ()


Right = Literal["read", "payload", "pause", "run", "reset", "retry", "drop", "apply"]
"""What a user of the console may do."""


class ConsoleUser(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user of the console."""

    token: Annotated[
        Secret, about("Password of the user in a browser, or bearer token. It is best set in the environment.")
    ]
    rights: Annotated[
        tuple[Right, ...],
        about(
            "Rights of the user. read: all pages, without payloads; payload: also payloads; pause: pause and resume "
            "agents and timers; run: have a worker run a timer at once; reset: move an agent to another position; "
            "retry: have dead letters and retried notifications tried again; drop: erase dead letters and skip retried "
            "notifications; apply: bring streams in line with the configuration."
        ),
    ] = ("read",)


class ConsoleProxy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A proxy before the console that has asked users who they are."""

    header: Annotated[
        Text, about("Header in which the proxy names the user. It must remove one that comes from outside.")
    ]
    addresses: Annotated[tuple[Text, ...], about("Addresses of the proxy. From others, the header counts for nothing.")]
    rights: Annotated[
        dict[str, tuple[Right, ...]], about("Rights by user; those of `*` are for every user who is not named.")
    ] = {}


class Console(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pages that `aviso-workers console` serves, or a fleet on its status port."""

    host: Annotated[Text, about("Address to listen on. Beyond the loopback, users or a proxy must be configured.")] = (
        "127.0.0.1"
    )
    port: Annotated[Port, about("Port to listen on; 0 is any free port.")] = 9480
    names: Annotated[
        tuple[Text, ...],
        about("Host names by which browsers reach the console, beside its address and localhost. Others are refused."),
    ] = ()
    path: Annotated[
        Annotated[str, Meta(pattern=r"^(/[A-Za-z0-9._~-]+)*$")],
        about("Path under which a proxy serves the console, such as /aviso. Default: none, all of its address."),
    ] = ""
    users: Annotated[
        dict[str, ConsoleUser],
        about("Users by name. Without users and proxy, everybody on this machine has all rights."),
    ] = {}
    proxy: Annotated[ConsoleProxy | None, about("The proxy that names users, if there is one.")] = None
    on_status_port: Annotated[
        bool,
        about("Let a fleet (`worker --processes N`) serve the console on its status port, not on host and port above."),
    ] = False

    def refusals(self, host: str, *, key: str = "workers.console.host") -> list[str]:
        """Return why a console must not be served at the address that `key` has; empty where it may be."""
        tokens, found = {f"workers.console.users.{name}.token": user.token for name, user in self.users.items()}, []
        if missing := [name for name in ("starlette", "uvicorn", "jinja2") if find_spec(name) is None]:
            found.append(f"the console needs {missing[0]}, which is missing: pip install 'aviso-workers[console]'")
        if len({*tokens.values()}) < len(tokens):
            found.append("workers.console.users: two users have the same token; a bearer token names its user")
        found += weakness(tokens, host)
        if not self.users and self.proxy is None and not is_loopback(host):
            found.append(
                f"{key}: {host} can be reached by others, and everybody would have all rights; configure users or a "
                "proxy in workers.console, or listen on 127.0.0.1"
            )
        return found


def is_loopback(host: str) -> bool:
    """Return whether it is an address that only this machine reaches."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class Workers(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The worker processes. Unlike the sections of aviso-server, this one refuses keys that it does not know."""

    status: Annotated[Status, about("The status port, for probes and metrics.")] = Status()
    logging: Annotated[Logging, about("The log of a worker.")] = Logging()
    traces: Annotated[Traces, about("Traces of notifications.")] = Traces()
    drain_timeout_seconds: Annotated[
        Annotated[float, Meta(ge=0)],
        about("Seconds that a worker which is told to stop gives its agents to finish what they are handling."),
    ] = 30.0
    priority: Annotated[
        Annotated[int, Meta(ge=0, le=9)],
        about(
            "Priority of this worker, from 0, which JetStream serves first, to 9. From 1 on, it gets only "
            "what no worker of a lower number asks for, and nats-server 2.12 is needed. The order of "
            "notifications stays the same.",
            bounds="it says which workers JetStream serves first, those of 0 before others; notifications have none",
        ),
    ] = 0
    dead_letters: Annotated[DeadLetters, about("The stream of notifications that could not be handled.")] = (
        DeadLetters()
    )
    console: Annotated[Console, about("The pages of `aviso-workers console`, and of a fleet.")] = Console()
    lineage: Annotated[
        Lineage | None, about("OpenLineage run events of workers, agents and windows. Default: none are sent.")
    ] = None
    agents: Annotated[
        dict[str, dict[str, Any]],
        about("Settings of apps and routers, your own and installed ones, by the name of the app or router."),
    ] = {}


class Document(Struct, frozen=True, kw_only=True):
    """The keys of a configuration file. Other sections of aviso-server are ignored."""

    notification_backend: Annotated[NotificationBackend, about("Where notifications are stored.")]
    notification_schema: Annotated[dict[str, EventType], about("Event types by name.")] = {}
    notification_schema_strict: Annotated[
        bool | None, about("Refuse unknown event types. Default: true if any event type is known.")
    ] = None
    application: Annotated[Application, about("The section of aviso-server, of which only base_url is read.")] = (
        Application()
    )
    workers: Annotated[Workers, about("The worker processes.", ours=True)] = Workers()
    streams: Annotated[
        dict[str, DeclaredStream],
        about("Streams by name: streams beside those of event types, or further settings of these.", ours=True),
    ] = {}
    doctor: Annotated[
        Doctor, about("The command `doctor`: findings that are accepted. Workers do not read this section.", ours=True)
    ] = Doctor()
    server: Annotated[
        Server,
        about(
            "A nats-server of your own, for the commands `server render` and `server start`. Workers do not "
            "read this section.",
            ours=True,
        ),
    ] = Server()


class Config(Document, frozen=True, kw_only=True):
    """A configuration, with its sources and warnings."""

    sources: tuple[str, ...] = ()
    """The files and environment variables that it was read from, in this order."""
    warnings: tuple[str, ...] = ()
    """A sentence for each thing that looks like a mistake and is none."""
    origins: dict[str, str] = {}
    """The file and line, or the environment variable, of each key path that was set. All others have their defaults."""
    recorded: frozenset[str] = frozenset()
    """The event types that are only here because workers of some app have recorded them."""

    def event_type(self, name: str) -> EventType:
        """Return the event type of this name. Raises `UnknownEventTypeError`."""
        if name not in self.notification_schema:
            raise UnknownEventTypeError(name, self.notification_schema)
        return self.notification_schema[name]

    def with_defaults(self, **jetstream: Any) -> Self:
        """Return the configuration with other defaults of `notification_backend.jetstream`.

        Where a file or the environment says something else, that stays.
        """
        unset = {key: v for key, v in jetstream.items() if f"notification_backend.jetstream.{key}" not in self.origins}
        backend = self.notification_backend
        changed = structs.replace(backend, jetstream=structs.replace(backend.jetstream, **unset))
        return structs.replace(self, notification_backend=changed)
