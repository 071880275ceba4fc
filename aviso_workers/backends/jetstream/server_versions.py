"""Which nats-server is the oldest of a cluster: while it is upgraded, one after the other is replaced.

A stream that uses what a server does not know is not served by it. Where such a server holds a copy, the stream has
one copy less, and no leader where most servers are old: it takes no publishes until they are upgraded. So a stream is
created with what the oldest server knows. The server that a client is connected to says nothing of the others, and
JetStream's API answers for its leader alone; what all servers answer is a question for the account's connections.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import anyio
import msgspec
from msgspec import Struct

from aviso_workers._fast import Arrival
from aviso_workers.backends.jetstream import wire
from aviso_workers.backends.jetstream.connection import NatsConnection

PING = "$SYS.REQ.ACCOUNT.PING.CONNZ"
"""Each server of a cluster answers it to every user who may publish to it, whatever the account."""
ANSWER_SECONDS = 1.0
"""All answer within milliseconds. Where one does not, or we may not ask, it is done without."""


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


async def oldest(connection: NatsConnection) -> ServerVersion:
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
