"""Streams are created with what every server of the cluster knows, and with nothing else.

A stream that uses what a server does not know is not served by it. While a cluster is upgraded, one server after the
other is replaced. Where an old one holds a copy, the stream has one copy less, and no leader where most servers are
old: it takes no publishes until they are upgraded. The server that a client is connected to says nothing of the others,
and JetStream's API answers for its leader alone; what all servers answer is a question for the account's connections.

`unreadable` says how no stream is erased by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import anyio
import msgspec
from msgspec import Struct

from aviso_workers._fast import Arrival
from aviso_workers.backends.jetstream import wire
from aviso_workers.backends.jetstream.connection import NatsConnection
from aviso_workers.backends.jetstream.management import JetStreamManagement
from aviso_workers.errors import DeniedError, RefusedError, UnavailableError
from aviso_workers.jetstream import fields, specs
from aviso_workers.jetstream.info import StreamInfo
from aviso_workers.jetstream.specs import StreamSpec

BATCHES = ("allow_atomic", "allow_batched")
PING = "$SYS.REQ.ACCOUNT.PING.CONNZ"
"""Each server of a cluster answers it to every user who may publish to it, whatever the account."""
ANSWER_SECONDS = 1.0
"""All answer within milliseconds. Where one does not, or we may not ask, it is done without."""


async def create(connection: NatsConnection, spec: StreamSpec) -> StreamInfo:
    """Create the stream, and return its configuration and state.

    Raises `UnreadableStreamError` where the server cannot read a stream that it has, this one or another one;
    `RefusedError` where the server is too old for what is stated, and `UnavailableError` where another one of its
    cluster is; `DeniedError` where our user may create none.
    """
    try:
        return await _create(connection, spec)
    except DeniedError as error:
        raise DeniedError(
            f"stream {spec.name} is missing, and our user may not create it: {error}; an operator creates it, and what "
            "else the role needs, by `aviso-workers streams apply --role`"
        ) from error


async def _create(connection: NatsConnection, spec: StreamSpec) -> StreamInfo:
    oldest = await oldest_server(connection)
    config = specs.stated(spec)
    if spec.takes_batches:  # ours to say as long as nobody else has made the stream
        config = {each: True for each in BATCHES if fields.STREAM[each].since <= oldest} | config
    _require_known(config, oldest=oldest, connected=ServerVersion(*connection.server_version))
    return await JetStreamManagement(connection).add_stream(config)


def _require_known(config: Mapping[str, Any], *, oldest: ServerVersion, connected: ServerVersion) -> None:
    used = (fields.STREAM[each] for each in config if each in fields.STREAM and fields.something(config[each]))
    unknown = [field for field in used if field.since > oldest and config[field.name] != field.zero]
    if not unknown:
        return
    newest = max(unknown, key=lambda field: field.since)
    since = ServerVersion(*newest.since)
    wanted = f"to create stream {config['name']} with {newest.name}, nats-server {since} or newer is needed"
    if since > connected:
        raise RefusedError(f"{wanted}; this one is {connected}")
    raise UnavailableError(f"{wanted}, and one of this cluster is {oldest}: upgrade it first")


class ServerVersion(NamedTuple):
    """The version of a nats-server."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


class _PingedServer(Struct, frozen=True):
    id: str
    ver: str


class _PingAnswer(Struct, frozen=True):
    server: _PingedServer


_decode = msgspec.json.Decoder(_PingAnswer).decode


async def oldest_server(connection: NatsConnection) -> ServerVersion:
    """Return the lowest version among the servers that answer; where there is one server only, its own."""
    own = ServerVersion(*connection.server_version)
    others = wire.cluster_size(connection.nc)
    if not others:
        return own
    return min([own, *await _ask(connection, others)])


async def _ask(connection: NatsConnection, expected: int) -> list[ServerVersion]:
    found: dict[str, ServerVersion] = {}
    all_answered = anyio.Event()

    def listener(arrivals: Sequence[Arrival]) -> None:
        for _, _, _, data in arrivals:
            try:
                server = _decode(data).server
                major, minor = server.ver.split(".")[:2]
                found[server.id] = ServerVersion(int(major), int(minor))
            except (msgspec.MsgspecError, ValueError):
                continue  # no answer of a server: nobody listens, or we are denied
        if len(found) >= expected:
            all_answered.set()

    inbox = connection.new_inbox()
    interest = await connection.listen(inbox, listener)
    try:
        connection.wire.send(PING.encode(), b'{"limit":1}', reply=inbox.encode())
        with anyio.move_on_after(ANSWER_SECONDS):
            await all_answered.wait()
    finally:
        with anyio.CancelScope(shield=True):
            await connection.leave(interest)
    return list(found.values())
