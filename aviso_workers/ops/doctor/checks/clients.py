"""Checks of the settings on our side: how clients connect, how long they retry, and what agents leave behind."""

from __future__ import annotations

import base64
import json
import math
import re
import ssl
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aviso_workers.aviso.literals import SECOND, Duration
from aviso_workers.config.secrets import with_scheme
from aviso_workers.config.settings import JetStream
from aviso_workers.config.streams import event_streams
from aviso_workers.declare import outputs
from aviso_workers.declare.agents import Agent
from aviso_workers.jetstream import metadata
from aviso_workers.jetstream.fields import readable
from aviso_workers.jetstream.info import ConsumerInfo, StreamInfo
from aviso_workers.ops.doctor.checks.streams import APPLY, JETSTREAM
from aviso_workers.ops.doctor.facts import Facts
from aviso_workers.ops.doctor.judgements import Declaration, Finding, Found, State, each_consumer
from aviso_workers.ops.doctor.monitoring_port import LOOPBACK

ELECTION_SECONDS = 10
ENOUGH_TO_PUBLISH_SECONDS = 15
BACKUP_EVERY = timedelta(hours=24)
SHORTER = (
    "Or retry for a shorter time: publish_deadline_seconds, and an agent's retry=RetryPolicy(...). Or accept the "
    "finding (doctor.accepted), if a notification that is stored twice after a long outage does no harm."
)
READS_ENTRIES = (2, 15)
RENEW = timedelta(days=30)
JWT = re.compile(r"BEGIN NATS USER JWT-+\s+(\S+)")
UTC_TIME, GENERALIZED_TIME, VERSION = 0x17, 0x18, 0xA0
FORMATS = {UTC_TIME: "%y%m%d%H%M%SZ", GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}
BEFORE_VALIDITY = 3
"""In a certificate's fields after its version: serial number, signature, issuer."""


@Declaration("JS009", needs=("agents", "streams")).says(
    "Duplicate windows are longer than publishes are retried",
    why="The server stores a message twice if its publish is repeated after duplicate_window.",
    cure="Set a streams.{stream}.duplicate_window in the configuration that is as long as the retries, "
    f"{APPLY}. Each message id costs memory for that time. {SHORTER}",
)
def short_windows(facts: Facts) -> Iterator[Finding]:
    """The window is 2 minutes unless configured.

    Two parties repeat a publish: a publisher, for `publish_deadline_seconds`; and an agent that published and then
    failed, for as long as its `retry` continues. The default policy of six attempts waits for up to 71 seconds
    including jitter, which leaves 8 seconds for each call.

    The check reads only agents whose return annotation contains `Notify`. If the agent's function names the event types
    that it publishes, as in `Notify("derived", ...)`, only their streams are compared with its `retry`; otherwise all
    event streams are. The window must not be longer than `max_age`. An agent that is to outlast an outage of hours
    needs its long `retry`: [accept the finding](doctor.md#accepted-findings) there, if a notification that is stored
    twice does no harm.
    """
    deadline = facts.config.notification_backend.jetstream.publish_deadline_seconds
    by_stream = event_streams(facts.config.notification_schema)
    for stream in facts.event_streams.values():
        window = stream.config.duplicate_window / SECOND
        shown = readable("duplicate_window", stream.config.duplicate_window)
        longer = {f"publish_deadline_seconds {deadline:g}": deadline} if window < deadline else {}
        for agent in facts.scope.agents or ():
            named = outputs.named_event_types(agent.function) or set(by_stream.values())
            if outputs.publishes(agent) and by_stream[stream.name] in named and window < retry_seconds(agent):
                seconds = retry_seconds(agent)
                longer[f"and agent {agent.name} retries for up to {seconds:.0f} s"] = seconds
        cure = _longer_window(stream, max(longer.values(), default=0))
        yield from (Finding(stream=stream.name, found=f"duplicate_window {shown}, {why}", cure=cure) for why in longer)


@Declaration("JS046", State.FAIL, needs=("backups", "streams")).says(
    "Every configured stream has a backup of the last 24 hours",
    why="A replica or a mirror is not a backup: a message that is deleted or damaged in the stream is missing there "
    "too.",
    cure="Run `aviso-workers backup create {stream} --to DIRECTORY` on a timer of the site. From time to time, check "
    "that the backup can be restored: `aviso-workers backup drill DIRECTORY/{stream}/TIME`.",
)
def no_backup(facts: Facts) -> Iterator[Finding]:
    """Each stream of an event type or of the section `streams` needs a backup below `--backups`, made by `aviso-workers
    backup create` or `nats stream backup`. The backup must not be older than 24 hours, and the running server must be
    able to restore it: a server before 2.15 cannot read the archive of a newer server. WARN where only workers have
    recorded the event type.

    No check can see whether a backup can be restored ([Backups](../backup.md)).
    """
    if facts.scope.backups is None:
        return
    recorded = facts.recorded_streams
    for name in facts.configured_streams:
        backup = facts.backups.get(name)
        state = State.WARN if name in recorded else None
        if backup is None:
            yield Finding(stream=name, found=f"no backup in {facts.scope.backups}", state=state)
        elif (age := facts.now - backup.made) > BACKUP_EVERY:
            yield Finding(stream=name, found=f"{backup.directory} is {age.days} days old", state=state)
        elif backup.of_entries and _version(facts.server.ver) < READS_ENTRIES:
            found = f"{backup.directory} was made by nats-server 2.15 or newer, which {facts.server.ver} cannot restore"
            yield Finding(
                stream=name,
                found=found,
                state=state,
                cure="Upgrade the server, or keep a server of 2.15 or newer to restore this backup.",
            )


@Declaration("JS047", needs=(), production=True).says(
    "Connections are encrypted and authenticated",
    why="Without TLS, passwords and notifications can be read on the network. Without a user, everybody who reaches "
    "the port may do everything.",
    cure="Use tls:// in nats_url (tls: of "
    + JETSTREAM
    + " has the certificates), and a user: user and password, nkey_seed_file or credentials_file. On the server, set "
    "server.tls and server.accounts.",
)
def open_connection(facts: Facts) -> Iterator[Finding]:
    """The check finds a URL to another machine without TLS, a URL without a user, token, NKey, credentials or
    certificate, and a user whose answers go to `_INBOX`, where other users of the account hear them
    ([Answers](../security.md#answers)).
    """
    settings = facts.config.notification_backend.jetstream
    for url, shown in zip(settings.servers, settings.masked_servers, strict=True):
        parts = urlsplit(with_scheme(url))
        far = parts.hostname not in LOOPBACK
        if far and parts.scheme != "tls" and settings.tls is None:
            yield Finding(place=f"{JETSTREAM}.nats_url", found=f"{shown} without TLS")
        if not has_user(settings, url):
            yield Finding(place=f"{JETSTREAM}.nats_url", found=f"{shown} without a user")
    if facts.shares_inbox:
        yield Finding(
            place=f"{JETSTREAM}.inbox_prefix",
            found="answers go to _INBOX, where other users of the account hear them",
            cure="Let the user subscribe to a prefix of its own, as `aviso-workers server render --role operator` "
            "prints it for an operator. Leave inbox_prefix out.",
        )


def has_user(settings: JetStream, url: str) -> bool:
    """Return whether clients authenticate at this URL."""
    certified = settings.tls and settings.tls.cert_file
    named = settings.user or settings.token or settings.nkey_seed_file or settings.credentials_file or certified
    return bool(named or urlsplit(with_scheme(url)).username)


@Declaration("JS048", needs=()).says(
    "Workers wait longer than an election takes",
    why="A cluster that lost a leader needs 5 to 7 seconds to elect the next. A client that gives up before that "
    "fails, although the cluster recovers.",
    cure=f"Set {JETSTREAM}.max_reconnect_attempts: 0 (no limit), enable_auto_reconnect: true and "
    "publish_deadline_seconds: 30.",
)
def impatient(facts: Facts) -> Iterator[Finding]:
    """The check warns when reconnecting is off or ends within 10 seconds, or when publishing gives up within 15
    seconds.
    """
    settings = facts.config.notification_backend.jetstream
    given = f"{JETSTREAM}.max_reconnect_attempts" in facts.config.origins  # a worker without this setting waits
    seconds = given * settings.max_reconnect_attempts * settings.reconnect_delay_ms / 1000
    if not settings.enable_auto_reconnect:
        yield Finding(place=f"{JETSTREAM}.enable_auto_reconnect", found="false")
    elif 0 < seconds < ELECTION_SECONDS:
        yield Finding(place=f"{JETSTREAM}.max_reconnect_attempts", found=f"workers give up after {seconds:g} s")
    if settings.publish_deadline_seconds < ENOUGH_TO_PUBLISH_SECONDS:
        found = f"{settings.publish_deadline_seconds:g} s"
        yield Finding(place=f"{JETSTREAM}.publish_deadline_seconds", found=found)


@Declaration("JS057", needs=("dead_letters",)).says(
    "No agent has dead letters",
    why="Each dead letter is a notification that an agent could not handle.",
    cure="`aviso-workers dead-letters ls --app {app} --agent {agent}` shows the errors. Fix the cause, then run "
    "`aviso-workers dead-letters retry --app {app} --agent {agent} --yes`, or `aviso-workers dead-letters "
    "drop --app {app} --agent {agent} --yes`.",
)
def dead_letters(facts: Facts) -> Iterator[Finding]:
    for (app, agent), count in facts.dead_letters.items():
        yield Finding(place=f"{app}, agent {agent}", found=f"{count} dead letters", consumer=f"{app}__{agent}")


@Declaration("JS059", each=each_consumer, needs=()).says(
    "Consumers of agents have no max_deliver",
    why="A server gives up a message that was delivered so often, and no agent handles it.",
    cure="Start a worker of the agent (`aviso-workers worker MODULE:APP`), or wait for half a minute while one runs: "
    "it creates the consumer again, which begins after the last position that was recorded without a max_deliver.",
)
def limited_agents(consumer: ConsumerInfo, _: Facts) -> Iterator[Found]:
    """The agent decides how often a notification is tried, and makes a dead letter of what it gives up."""
    if metadata.is_of_agent(consumer.config) and consumer.config.max_deliver > 0:
        yield f"max_deliver {consumer.config.max_deliver}"


@Declaration("JS060", needs=()).says(
    "Credentials are valid for at least 30 days",
    why="With expired credentials, no worker can connect again.",
    cure="Get new credentials from the operator of the account (`nsc generate creds`), and replace the file.",
)
def expiring(facts: Facts) -> Iterator[Finding]:
    """The result is WARN when the user JWT in `credentials_file` expires within 30 days, FAIL when it has expired."""
    file = facts.config.notification_backend.jetstream.credentials_file
    if file is not None:
        place, unreadable = f"{JETSTREAM}.credentials_file", f"{file} has no readable user JWT"
        expires = partial(_expires, Path(file))
        yield from _expiring(facts, expires, f"{file} expires", place=place, unreadable=unreadable)


@Declaration("JS067", needs=()).says(
    "Certificates are valid for at least 30 days",
    why="With an expired certificate of the server or of the client, no client can connect again.",
    cure="Get a new certificate and replace the old one ({place}). Then reload the server (`kill -HUP` its process), "
    "or restart the workers if it is their certificate.",
)
def expiring_certificates(facts: Facts) -> Iterator[Finding]:
    """The result is WARN when a certificate expires within 30 days, and FAIL when it has expired. The check reads two
    certificates: the certificate of the connected server, from the TLS handshake, and the client certificate
    (`tls.cert_file`). For a cluster, run the doctor with the `nats_url` of each server.
    """
    if (der := facts.server_certificate) is not None:
        place, expires = f"the certificate of {facts.server.name}", partial(validity_end, der)
        yield from _expiring(facts, expires, "expires", place=place, unreadable="no X.509 certificate")
    tls = facts.config.notification_backend.jetstream.tls
    if tls is not None and tls.cert_file is not None:
        place, unreadable = f"{JETSTREAM}.tls.cert_file", f"{tls.cert_file} has no readable certificate"
        expires = partial(_certificate_expires, Path(tls.cert_file))
        yield from _expiring(facts, expires, "expires", place=place, unreadable=unreadable)


def _expiring(
    facts: Facts, expires: Callable[[], datetime | None], says: str, *, place: str, unreadable: str
) -> Iterator[Finding]:
    """Yield that something `says` when it expires, where that is soon, or that it cannot be read."""
    try:
        end = expires()
    except (OSError, ValueError, KeyError, TypeError):
        yield Finding(place=place, found=unreadable, state=State.SKIP)
        return
    if end and end - facts.now < RENEW:
        state = State.FAIL if end < facts.now else State.WARN
        yield Finding(place=place, found=f"{says} on {end.date()}", state=state)


def _certificate_expires(pem: Path) -> datetime:
    """Return when the first certificate of a PEM file expires; a key and others may be beside it. Raises
    `ValueError`.
    """
    text = pem.read_text()
    begin, end = text.find(ssl.PEM_HEADER), text.find(ssl.PEM_FOOTER)
    return validity_end(ssl.PEM_cert_to_DER_cert(text[begin : end + len(ssl.PEM_FOOTER)]))


def validity_end(der: bytes) -> datetime:
    """Return the time after which an X.509 certificate (RFC 5280) is not valid, from its DER form. Raises `ValueError`
    where it is not a certificate.
    """
    try:
        (_, certificate), *_ = _elements(der)
        (_, signed), *_ = _elements(certificate)
        fields = [(kind, content) for kind, content in _elements(signed) if kind != VERSION]
        kind, content = _elements(fields[BEFORE_VALIDITY][1])[1]
        return datetime.strptime(content.decode(), FORMATS[kind]).replace(tzinfo=UTC)
    except (IndexError, KeyError, ValueError) as error:
        raise ValueError("no X.509 certificate") from error


def _elements(data: bytes) -> list[tuple[int, bytes]]:
    """Return the DER elements that follow one another, each as its tag and its content."""
    found = []
    position = 0
    while position < len(data):
        kind, length = data[position], data[position + 1]
        position += 2
        if length & 0x80:
            size = length & 0x7F
            length = int.from_bytes(data[position : position + size], "big")
            position += size
        found.append((kind, data[position : position + length]))
        position += length
    return found


def _longer_window(stream: StreamInfo, seconds: float) -> str:
    """Return the cure with a window of at least so many seconds."""
    step = 600 if seconds <= 3600 else 3600
    needed = Duration(step * math.ceil(seconds / step))
    if 0 < stream.config.max_age < needed * SECOND:
        return f"A window of {needed} cannot be set, because {{stream}} has a shorter max_age. {SHORTER}"
    return (
        f"Set streams.{{stream}}.duplicate_window: {needed} in the configuration, {APPLY}. Each message id costs "
        f"memory for that time. {SHORTER}"
    )


def retry_seconds(agent: Agent[Any, Any]) -> float:
    """Return for how many seconds an agent retries a notification at most: the delays, and handling where it is
    bounded.
    """
    retry, attempts = agent.policy.retry, min(agent.policy.retry.attempts or 10_000, 10_000)
    delays = sum(min(retry.max, retry.first * retry.factor ** min(n, 64)) for n in range(attempts - 1))
    return delays * (1 + retry.jitter) + attempts * (agent.policy.timeout or 0)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def _expires(credentials: Path) -> datetime | None:
    """Return when the user JWT of a .creds file expires, None where it does not. The signature is not checked. Raises
    `ValueError`.
    """
    if (found := JWT.search(credentials.read_text())) is None:
        raise ValueError("no JWT")
    claims = found[1].split(".")[1]
    expires = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4))).get("exp")
    return datetime.fromtimestamp(int(expires), UTC) if expires else None
