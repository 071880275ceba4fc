"""Answers of servers about themselves, as far as checks need them: advisories, and the answers of the monitoring port.

`facts` and `monitoring_port` read them; what JetStream's API answers is in `jetstream.info`. Names and units (bytes,
nanoseconds) are the server's; what it leaves out has the value that this means. Nothing is sent back, so that what is
not known here is not lost.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, field

from aviso_workers.aviso.codec import UNREADABLE_JSON
from aviso_workers.jetstream.info import Cluster


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
