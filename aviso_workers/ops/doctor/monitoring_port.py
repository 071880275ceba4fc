"""The monitoring port of a nats-server, read over plain HTTP, and other answers of servers about themselves.

What JetStream's API answers is in `jetstream.info`. Names and units (bytes, nanoseconds) are the server's; what it
leaves out has the value that this means. Nothing is sent back, so that what is not known here is not lost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Meta, Struct, field, structs

from aviso_workers import http_answers
from aviso_workers.aviso import codec
from aviso_workers.aviso.codec import UNREADABLE_JSON
from aviso_workers.backends import Admin
from aviso_workers.config import Config
from aviso_workers.config.nats_server import LOOPBACK_NAMES
from aviso_workers.errors import BackendError, ServerProcessError, UndecodableError
from aviso_workers.jetstream import error_codes
from aviso_workers.jetstream.info import Cluster
from aviso_workers.server import store

ANSWER_SECONDS = 5.0
"""How long a server may be silent."""
WHOLE_SECONDS = 30.0
MAX_BYTES = 256 << 20
"""Of one answer. A consumer has about a thousand bytes, and there may be a hundred thousand of them."""
NAME_SECONDS = 2.0
LOOPBACK = (*LOOPBACK_NAMES, "::1")
MAX_LOOKS, LOOK_AGAIN_SECONDS = 4, 1.0
OFF = "JetStream is off there"
"""The health of a server that is to have JetStream and has turned it off, as it does when its disk is full."""
EVERY_ADDRESS = ("0.0.0.0", "::")
UNREADABLE = (OSError, HTTPException, ValueError, RecursionError)
"""Errors of an answer that comes from somebody else than a nats-server, or not at all."""


class ConnectedServer(Struct, frozen=True, kw_only=True):
    """The server that we are connected to."""

    name: str
    ver: str
    id: str = ""
    """Empty where the server did not answer the request for it."""
    cluster: str = ""
    account: str = ""
    """Ours; empty where the server did not answer the request for it."""


class UserData(Struct, frozen=True, kw_only=True):
    account: str = ""


class UserInfo(Struct, frozen=True, kw_only=True):
    """The answer to a request for user info, which names the server and the account."""

    server: ConnectedServer
    data: UserData = UserData()


class Advisory(Struct, frozen=True, kw_only=True):
    """An advisory or a metric that a server publishes about a stream, a consumer or a request."""

    kind: str = ""
    """The subject after `$JS.EVENT.`, such as `ADVISORY.STREAM.QUORUM_LOST.MARS`."""
    response: str = ""
    """The answer to the request, as JSON, where the advisory is of one."""
    stream: str = ""
    consumer: str = ""
    subject: str = ""
    """The subject of the request, where the advisory is of one."""
    ack_time: int = 0
    """Nanoseconds from a delivery to its acknowledgement."""

    @property
    def error(self) -> ApiError | None:
        """The error with which the server answered the request; None where it had none, or the advisory is of none."""
        try:
            return msgspec.json.decode(self.response, type=ApiAnswer).error
        except UNREADABLE_JSON:
            return None  # a large answer is cut off, and is no error


class ApiError(Struct, frozen=True, kw_only=True):
    """The error in an answer of JetStream's API."""

    err_code: int = 0
    description: str = ""


class ApiAnswer(Struct, frozen=True, kw_only=True):
    """An answer of JetStream's API, as far as it says whether the request failed."""

    error: ApiError | None = None


class JetStreamConfig(Struct, frozen=True, kw_only=True):
    max_storage: int = 0
    store_dir: str = ""
    sync_interval: int = 0
    sync_always: bool = False
    unique_tag: str = ""
    strict: bool = False


class OwnState(Struct, frozen=True, kw_only=True):
    """The state of a server's own replica of a stream."""

    messages: int = 0
    first_seq: int = 0
    last_seq: int = 0


class OwnReplica(Struct, frozen=True, kw_only=True):
    """A server's own replica of a stream."""

    name: str
    """The stream's."""
    created: Annotated[datetime, Meta(tz=True)]
    cluster: Cluster = Cluster()
    """Only the leader knows which replicas are current."""
    state: OwnState = OwnState()

    def __str__(self) -> str:
        state = self.state
        return f"{state.messages} messages, from {state.first_seq} to {state.last_seq}"


class AccountDetail(Struct, frozen=True, kw_only=True):
    stream_detail: tuple[OwnReplica, ...] | None = None


class Jsz(Struct, frozen=True, kw_only=True):
    """The answer to /jsz, as far as checks need it: the configuration of JetStream, and the server's own replicas where
    it was asked for streams.
    """

    disabled: bool = False
    """Whether the server runs without JetStream."""
    config: JetStreamConfig = JetStreamConfig()
    account_details: tuple[AccountDetail, ...] | None = None


class VarzJetStreamStats(Struct, frozen=True, kw_only=True):
    storage: int = 0
    accounts: int = 0


class VarzJetStream(Struct, frozen=True, kw_only=True):
    config: JetStreamConfig = JetStreamConfig()
    stats: VarzJetStreamStats = VarzJetStreamStats()
    meta: Cluster | None = None


class VarzGroup(Struct, frozen=True, kw_only=True):
    """The cluster that a server is in, or the name by which other clusters know it."""

    name: str = ""


class Varz(Struct, frozen=True, kw_only=True):
    server_id: str
    server_name: str
    version: str
    now: Annotated[datetime, Meta(tz=True)]
    connections: int = 0
    max_connections: int = 0
    tags: tuple[str, ...] = ()
    cluster: VarzGroup = VarzGroup()
    gateway: VarzGroup = VarzGroup()
    jetstream: VarzJetStream = field(default_factory=VarzJetStream)


class Closed(Struct, frozen=True, kw_only=True):
    """A connection that has ended."""

    reason: str = ""
    stop: datetime | None = None
    name: str = ""
    ip: str = ""


class Connections(Struct, frozen=True):
    """The answer to /connz: the connections that have ended."""

    connections: tuple[Closed, ...] | None


class HealthError(Struct, frozen=True):
    error: str = "no reason given"


class Healthz(Struct, frozen=True):
    """The answer to /healthz."""

    status: str = "no reason given"
    error: str = ""
    errors: tuple[HealthError, ...] | None = None

    def __str__(self) -> str:
        if self.status == "ok":
            return "ok"
        return "; ".join(each.error for each in self.errors or ()) or self.error or self.status


class Route(Struct, frozen=True):
    remote_name: str


class Routez(Struct, frozen=True):
    """The answer to /routez: the servers of its cluster that a server is connected to."""

    routes: tuple[Route, ...] | None


# Servers are inspected side by side, in threads. msgspec crashes where two threads are the first to decode a type.
JSZ = msgspec.json.Decoder(Jsz)
VARZ = msgspec.json.Decoder(Varz)
CONNECTIONS = msgspec.json.Decoder(Connections)
HEALTH = msgspec.json.Decoder(Healthz)
ROUTES = msgspec.json.Decoder(Routez)


class Monitored(Struct, frozen=True, kw_only=True):
    """The answers of one server on its monitoring port."""

    url: str
    varz: Varz
    health: str
    """`ok`, or what is wrong."""
    routes: frozenset[str]
    """The names of the servers of its cluster that it is connected to."""
    ahead_seconds: float
    """How far its clock is ahead of this machine's; negative where it is behind."""
    uncertain_seconds: float
    """How far `ahead_seconds` may be off to either side, because the answer took time."""

    without_jetstream: bool = False
    unserved: str = ""
    """The streams in its store that are not served, where its store is on this machine and can be read."""
    cut_off: tuple[Closed, ...] = ()
    """Clients that it has disconnected because they were too slow, of those that it remembers, the last one first."""

    @property
    def name(self) -> str:
        return self.varz.server_name

    def is_of(self, server: ConnectedServer) -> bool:
        """Return whether this is the given server, or one of its cluster."""
        return self.varz.server_id == server.id or bool(server.cluster and self.varz.cluster.name == server.cluster)

    @property
    def cannot_write(self) -> bool:
        """Whether the server does not write to some of its streams any more, or has turned JetStream off, such as for a
        full disk, until it is restarted.
        """
        return "write error" in self.health or self.health == OFF

    @property
    def machine(self) -> str:
        """The host name or address in the URL of the monitoring port."""
        return urlsplit(self.url).hostname or ""

    @property
    def disk(self) -> Path | None:
        """The server's store_dir, where that is on this machine and can be read; else None."""
        directory = self.varz.jetstream.config.store_dir
        is_here = directory and self.machine in LOOPBACK and os.access(directory, os.R_OK)
        return Path(directory) if is_here else None


async def connected_server(admin: Admin) -> ConnectedServer:
    """Return the server that we are connected to; where it may not be asked for its name, only its version is known."""
    administration = admin.administration()
    try:
        answer = await administration.request("$SYS.REQ.USER.INFO", timeout_seconds=NAME_SECONDS)
        found = codec.read_json(answer.data, UserInfo)
    except (BackendError, UndecodableError):
        return ConnectedServer(name="nats-server", ver=administration.server_version)
    return structs.replace(found.server, account=found.data.account)


async def is_strict(admin: Admin) -> bool | None:
    """Return whether JetStream's API refuses a request with a field that it does not know; None if it does not answer.

    In a cluster, the leader of the meta group answers.
    """
    try:
        await admin.administration().api("STREAM.NAMES", {"offset": 0, "unknown": True}, timeout_seconds=NAME_SECONDS)
    except BackendError as error:
        return True if error.code == error_codes.INVALID_JSON else None
    return False


def urls(config: Config, named: Sequence[str]) -> Sequence[str]:
    """Return the monitoring ports to ask: those that were named, else that of the section `server`."""
    if named:
        return named
    monitor = config.server.monitoring
    host = "127.0.0.1" if monitor.host in EVERY_ADDRESS else monitor.host
    return [f"http://{host}:{monitor.port}"] if monitor.port else []


def inspect(url: str) -> Monitored:
    """Return the answers of a server to /varz, /jsz, /healthz, /routez and /connz, and what is in its store and not
    served, where the store is on this machine. Blocks.

    Raises `ServerProcessError` where there is no such answer.
    """
    try:
        asked = datetime.now(UTC)
        varz = VARZ.decode(_ask(url, "/varz"))
        half = (datetime.now(UTC) - asked) / 2
        jsz = JSZ.decode(_ask(url, "/jsz"))
        varz = _with_meta_group(varz, url)
        # A server that was asked for /varz before JetStream had started never has its configuration there.
        varz = structs.replace(varz, jetstream=structs.replace(varz.jetstream, config=jsz.config))
        health, routes = HEALTH.decode(_ask(url, "/healthz?details=true")), ROUTES.decode(_ask(url, "/routez"))
        closed = CONNECTIONS.decode(_ask(url, "/connz?state=closed&sort=stop")).connections or ()
        remotes = frozenset(route.remote_name for route in routes.routes or ())
        found = Monitored(
            url=url,
            varz=varz,
            health=OFF if jsz.disabled and health.status != "ok" else str(health),
            routes=remotes,
            ahead_seconds=(varz.now - asked - half).total_seconds(),
            uncertain_seconds=half.total_seconds(),
            without_jetstream=jsz.disabled,
            cut_off=tuple(each for each in closed if each.reason.startswith("Slow Consumer")),
        )
        unserved = store.unserved(lambda: _ask(url, store.SERVED)) if found.disk else ""
    except UNREADABLE as error:
        raise ServerProcessError(f"no answer of a nats-server from {url}: {error}") from error
    return structs.replace(found, unserved=unserved)


def own_replicas(url: str, account: str) -> Mapping[str, OwnReplica]:
    """Return a server's own replicas of the streams of an account, by the stream's name. Blocks.

    Raises `ServerProcessError` where there is no such answer.
    """
    try:
        found = JSZ.decode(_ask(url, f"/jsz?streams=true&acc={quote(account)}")).account_details or ()
    except UNREADABLE as error:
        raise ServerProcessError(f"no answer of a nats-server from {url}: {error}") from error
    return {each.name: each for one in found for each in one.stream_detail or ()}


def _with_meta_group(varz: Varz, url: str) -> Varz:
    """Return the answer to /varz with a meta group that was looked at until its followers were current, or some times:
    a follower is behind its leader for moments.
    """
    for _ in range(MAX_LOOKS):
        if not _seems_behind(varz):
            break
        time.sleep(LOOK_AGAIN_SECONDS)
        meta = VARZ.decode(_ask(url, "/varz")).jetstream.meta
        varz = structs.replace(varz, jetstream=structs.replace(varz.jetstream, meta=meta))
    return varz


def _seems_behind(varz: Varz) -> bool:
    followers = varz.jetstream.meta.followers if varz.jetstream.meta else ()
    return any(not each.current for each in followers) and not any(each.offline for each in followers)


def _ask(url: str, path: str) -> bytes:
    return http_answers.read(
        url.rstrip("/") + path,
        seconds=WHOLE_SECONDS,
        silent_seconds=ANSWER_SECONDS,
        max_bytes=MAX_BYTES,
        near=True,
        failures=True,  # /healthz says what is wrong with a 503
    )
