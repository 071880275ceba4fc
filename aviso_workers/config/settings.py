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
from aviso_workers.config.conversion import OURS_ALONE, about
from aviso_workers.config.nats_server import Port, Server
from aviso_workers.config.secrets import Secret, ServerUrls
from aviso_workers.errors import UnknownEventTypeError
from aviso_workers.jetstream.fields import Count, DeclaredStream, Positive, Text

DEFAULT_URL = "nats://localhost:4222"


class Application(Struct, frozen=True, kw_only=True):
    """The section of aviso-server, of which only one key is read."""

    base_url: Text = "http://localhost"
    """Base URL in the `source` and `dataschema` of CloudEvents."""


class Tls(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS of the connection: the certificates to trust, and the client's own. All files are PEM."""

    ca_file: str | None = None
    """File with the certificates to trust. Default: those of the system."""
    cert_file: str | None = None
    """File with the client's certificate, if the server asks for one."""
    key_file: str | None = None
    """File with the private key of that certificate. Default: cert_file, which then holds both."""
    server_hostname: str | None = None
    """Host name that the server's certificate must have. Default: the one in the URL."""


class JetStream(Struct, frozen=True, kw_only=True):
    """The connection to NATS, and the defaults of all streams that are created."""

    nats_url: ServerUrls = field(default_factory=lambda: ServerUrls(DEFAULT_URL))
    """URLs of the servers: a list, or text with commas between them. Default: nats://localhost:4222."""
    token: Secret | None = None
    """Token to authenticate with. Default: NATS_TOKEN of the environment, if no other way to authenticate is given."""
    timeout_seconds: Positive = 30
    """Seconds for one attempt to connect."""
    retry_attempts: Positive = 3
    """Number of attempts to connect at startup. A worker for which it is not set tries without end."""

    enable_auto_reconnect: bool = True
    """Reconnect when a connection is lost after startup."""
    max_reconnect_attempts: Count = 0
    """Number of attempts to reconnect before giving up for good; 0 means no limit."""
    reconnect_delay_ms: Positive = 2000
    """Milliseconds between two attempts to connect, at startup and later."""

    publish_retry_attempts: Positive = 5
    """Minimum number of attempts to publish a notification, even if they take longer than publish_deadline_seconds."""
    publish_retry_base_delay_ms: Positive = 150
    """Milliseconds before the second attempt to publish. Each further delay is twice as long, up to a second."""

    max_messages: int | None = None
    """Number of messages that a stream keeps; 0 and below mean no limit. Default: no limit."""
    max_bytes: int | None = None
    """Bytes that a stream keeps, as a plain number; 0 and below mean no limit. Default: no limit."""
    retention_time: Duration | None = None
    """Age up to which a stream keeps a message: a number and s, m, h, d or w, such as 30d. Default: no limit."""
    storage_type: Literal["file", "memory"] = "file"
    """Storage of streams: on disk (file), or in memory."""
    replicas: Count | None = None
    """Number of replicas of a stream in the cluster. Default: the server's, which is 1."""
    retention_policy: Annotated[
        Literal["limits", "interest"],
        about(
            workqueue=(
                "'workqueue' cannot be used: replay and watch need consumers without acknowledgement, "
                "which JetStream refuses on such a stream; use 'limits'"
            )
        ),
    ] = "limits"
    """When a stream removes a message. limits: at the limits above; interest: also once every consumer has acknowledged
    it, and at once if there is none."""
    discard_policy: Literal["old", "new"] = "old"
    """What a full stream does with a new message. old: remove old messages for it; new: refuse it."""

    # Beyond the document.
    user: Annotated[Text | None, OURS_ALONE] = None
    """User to authenticate as, together with password."""
    password: Annotated[Secret | None, OURS_ALONE] = None
    """Password of the user. It is best set in the environment."""
    nkey_seed_file: Annotated[str | None, OURS_ALONE] = None
    """File with the NKey seed to authenticate with."""
    credentials_file: Annotated[str | None, OURS_ALONE] = None
    """File with the user JWT and its seed (.creds) to authenticate with."""
    tls: Annotated[Tls | None, OURS_ALONE] = None
    """TLS options. A URL that starts with tls:// needs none of them."""
    domain: Annotated[Text | None, OURS_ALONE] = None
    """JetStream domain to use. Default: the account's own."""
    api_prefix: Annotated[Text | None, OURS_ALONE] = None
    """Prefix of JetStream's API, if the account imports it from another one. It excludes domain. Default: $JS.API."""
    inbox_prefix: Annotated[Text | None, OURS_ALONE] = None
    """Start of the subjects to which servers send their answers. Default: _INBOX_ and the user, such as _INBOX_mars, or
    _INBOX where there is no user or where the server denies the other one."""
    stream_management: Annotated[Literal["reconcile", "create", "observe"], OURS_ALONE] = "reconcile"
    """How streams are managed. reconcile: create them, and update those that differ from the configuration, as far as
    that removes no stored messages; create: only create those that are missing; observe: change nothing."""
    publish_deadline_seconds: Annotated[Annotated[float, Meta(gt=0)], OURS_ALONE] = 30.0
    """Seconds within which a notification must be published, all attempts together. publish_retry_attempts are made in
    any case."""

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

    max_history_per_topic: Positive = 1
    """Number of notifications that are kept of each topic."""
    max_topics: Positive = 10_000
    """Number of topics that are kept. A new topic replaces the one whose last notification is the oldest."""
    enable_metrics: bool = False
    """It is read by aviso-server only. A worker always has metrics."""


class NotificationBackend(Struct, frozen=True, kw_only=True):
    """The backend that stores notifications.

    The section of the backend that is not used may stay: only the types of its values are checked.
    """

    kind: Annotated[Literal["jetstream", "in_memory"], about(otherwise="Unknown notification_backend kind: {found}")]
    """Backend to use: a NATS server with JetStream, or the memory of the process."""
    jetstream: JetStream = field(default_factory=JetStream)
    """Settings of the backend jetstream."""
    in_memory: InMemory = InMemory()
    """Settings of the backend in_memory."""


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

    host: Text = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is all addresses."""
    port: Port = 9464
    """Port to listen on; 0 is any free port."""
    token: Secret | None = None
    """Bearer token that /metrics requires; /livez and /readyz require none. Default: everybody may read the metrics."""


class Logging(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The log that a worker writes to stderr."""

    format: Literal["console", "json"] = "console"
    """Format of the log. console: text for people; json: one JSON object a line."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is written."""


class Traces(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Spans of OpenTelemetry, and their context in the headers of notifications."""

    enabled: bool = False
    """Make spans of what is published and handled, and write their context into the headers of notifications. It needs
    aviso-workers[otel]."""
    process: Literal["child", "root"] = "child"
    """Place of the span in which an agent handles one notification. child: in the trace of the notification; root: in a
    trace of its own. Either has a link to the span that published it."""
    settle: bool = False
    """Make a span of each ack, nak and term as well."""

    @property
    def lacking(self) -> str:
        """What is missing to make spans; empty where nothing is."""
        if not self.enabled or find_spec("opentelemetry") is not None:
            return ""
        return "traces need the package opentelemetry-api: pip install 'aviso-workers[otel]'"


class Lineage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenLineage run events of workers, by NATS or by HTTP. They need the extra `lineage`."""

    subject: Text | None = None
    """Subject to publish run events to, which the stream must take."""
    stream: Text = "LINEAGE"
    """Stream that stores what is published to the subject."""
    url: Text | None = None
    """URL of an OpenLineage server, without api/v1/lineage, to post run events to by HTTP."""
    api_key: Secret | None = None
    """Bearer token for the URL. Default: none."""
    namespace: Text = "aviso-workers"
    """Namespace of the jobs."""


class DeadLetters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The stream of notifications that could not be handled."""

    replicas: Positive | None = None
    """Number of replicas in the cluster. Default: that of notification_backend.jetstream."""
    max_bytes: Size | None = None
    """Size that the stream may have: a number and K, M, G, T, Ki, Mi, Gi or Ti, such as 1Gi. Default: no limit."""


class Accepted(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finding of the doctor that is known, and that nobody means to cure before a time."""

    code: Annotated[str, Meta(pattern=r"^JS\d{3}$")]
    """Code of the check, such as JS003."""
    where: str
    """Place of the finding as the doctor shows it, such as `MARS > field__index`. `*` stands for any text; an empty
    text is for findings that name no place."""
    reason: Text
    """Reason why the finding is accepted; it is shown with the finding."""
    until: datetime
    """Time from which the finding counts again, such as 2027-01-31T00:00:00Z."""


class Doctor(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The command `doctor`. Workers do not read this section."""

    accepted: tuple[Accepted, ...] = ()
    """Findings that are shown as accepted, and are no failures."""


Right = Literal["read", "payload", "pause", "run", "reset", "retry", "drop", "apply"]
"""What a user of the console may do."""


class ConsoleUser(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user of the console."""

    token: Secret
    """Password of the user in a browser, or bearer token. It is best set in the environment."""
    rights: tuple[Right, ...] = ("read",)
    """Rights of the user. read: all pages, without payloads; payload: also payloads; pause: pause and resume agents and
    timers; run: have a worker run a timer at once; reset: move an agent to another position; retry: have dead letters
    and retried notifications tried again; drop: erase dead letters and skip retried notifications; apply: bring streams
    in line with the configuration."""


class ConsoleProxy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A proxy before the console that has asked users who they are."""

    header: Text
    """Header in which the proxy names the user. It must remove one that comes from outside."""
    addresses: tuple[Text, ...]
    """Addresses of the proxy. From others, the header counts for nothing."""
    rights: dict[str, tuple[Right, ...]] = {}
    """Rights by user; those of `*` are for every user who is not named."""


class Console(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pages that `aviso-workers console` serves, or a fleet on its status port."""

    host: Text = "127.0.0.1"
    """Address to listen on. Beyond the loopback, users or a proxy must be configured."""
    port: Port = 9480
    """Port to listen on; 0 is any free port."""
    names: tuple[Text, ...] = ()
    """Host names by which browsers reach the console, beside its address and localhost. Others are refused."""
    path: Annotated[str, Meta(pattern=r"^(/[A-Za-z0-9._~-]+)*$")] = ""
    """Path under which a proxy serves the console, such as /aviso. Default: none, all of its address."""
    users: dict[str, ConsoleUser] = {}
    """Users by name. Without users and proxy, everybody on this machine has all rights."""
    proxy: ConsoleProxy | None = None
    """The proxy that names users, if there is one."""
    on_status_port: bool = False
    """Let a fleet (`worker --processes N`) serve the console on its status port, not on host and port above."""

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

    status: Status = Status()
    """The status port, for probes and metrics."""
    logging: Logging = Logging()
    """The log of a worker."""
    traces: Traces = Traces()
    """Traces of notifications."""
    drain_timeout_seconds: Annotated[float, Meta(ge=0)] = 30.0
    """Seconds that a worker which is told to stop gives its agents to finish what they are handling."""
    priority: Annotated[
        Annotated[int, Meta(ge=0, le=9)],
        about(bounds="it says which workers JetStream serves first, those of 0 before others; notifications have none"),
    ] = 0
    """Priority of this worker, from 0, which JetStream serves first, to 9. From 1 on, it gets only what no worker of a
    lower number asks for, and nats-server 2.12 is needed. The order of notifications stays the same."""
    dead_letters: DeadLetters = DeadLetters()
    """The stream of notifications that could not be handled."""
    console: Console = Console()
    """The pages of `aviso-workers console`, and of a fleet."""
    lineage: Lineage | None = None
    """OpenLineage run events of workers, agents and windows. Default: none are sent."""
    agents: dict[str, dict[str, Any]] = {}
    """Settings of apps and routers, your own and installed ones, by the name of the app or router."""


class Document(Struct, frozen=True, kw_only=True):
    """The keys of a configuration file. Other sections of aviso-server are ignored."""

    notification_backend: NotificationBackend
    """Where notifications are stored."""
    notification_schema: dict[str, EventType] = {}
    """Event types by name."""
    notification_schema_strict: bool | None = None
    """Refuse unknown event types. Default: true if any event type is known."""
    application: Application = Application()
    """The section of aviso-server, of which only base_url is read."""
    workers: Annotated[Workers, OURS_ALONE] = Workers()
    """The worker processes."""
    streams: Annotated[dict[str, DeclaredStream], OURS_ALONE] = {}
    """Streams by name: streams beside those of event types, or further settings of these."""
    doctor: Annotated[Doctor, OURS_ALONE] = Doctor()
    """The command `doctor`: findings that are accepted. Workers do not read this section."""
    server: Annotated[Server, OURS_ALONE] = Server()
    """A nats-server of your own, for the commands `server render` and `server start`. Workers do not read this
    section."""


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
