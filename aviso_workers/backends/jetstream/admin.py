"""Requests that only a server answers: its version, what its account uses, advisories, and any request.

The verbs for streams and consumers are in `management`, the exchange of a snapshot's chunks in `snapshots`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from aviso_workers._fast import Arrival
from aviso_workers.backends import Received
from aviso_workers.backends.jetstream import faults, tls, unreadable, wire
from aviso_workers.backends.jetstream.connection import API_TIMEOUT_SECONDS, require_subject
from aviso_workers.backends.jetstream.readers import JetStreamReaders
from aviso_workers.jetstream import info
from aviso_workers.jetstream.info import AccountInfo

MESSAGE_BYTES = 1024
"""What a message takes in memory beside its content."""


class JetStreamAdministration(JetStreamReaders):
    """The requests of operators to a nats-server, through its JetStream API; see `backends.Administration`."""

    @property
    def server_version(self) -> str:
        found = self._connection.nc.connected_server_version
        return f"{found.major}.{found.minor}.{found.patch}"

    @property
    def server_certificate(self) -> bytes | None:
        return tls.certificate(self._connection.nc)

    @property
    def shares_inbox(self) -> bool:
        return self._connection.shares_inbox

    async def account(self) -> AccountInfo:
        return info.account(await self.api("INFO"))

    async def request(
        self, subject: str, data: bytes = b"", *, timeout_seconds: float = API_TIMEOUT_SECONDS
    ) -> Received:
        answer = await self._connection.request(subject, data, timeout_seconds=timeout_seconds)
        return _received(answer)

    def send(self, subject: str, data: bytes = b"", *, reply: str = "") -> None:
        require_subject(subject)
        self._connection.wire.send(subject.encode(), data, reply=reply.encode())

    def new_inbox(self) -> str:
        return self._connection.new_inbox()

    @asynccontextmanager
    async def listen(
        self, subject: str, *, max_bytes: float = math.inf
    ) -> AsyncIterator[MemoryObjectReceiveStream[Received]]:
        sender, receiver = anyio.create_memory_object_stream[Received](math.inf)
        left = max_bytes

        def listener(arrivals: Sequence[Arrival]) -> None:
            nonlocal left
            for arrival in arrivals:
                left -= MESSAGE_BYTES + len(arrival[2] or b"") + len(arrival[3])
                if left >= 0:
                    sender.send_nowait(_received(arrival))

        interest = await self._connection.listen(subject, listener)
        try:
            # The server knows of it before anything is asked for. Where it is away, this would wait for it without end.
            with faults.translated(f"listen to {subject}"), anyio.fail_after(API_TIMEOUT_SECONDS):
                await self._connection.flush()
            yield receiver
        finally:
            with anyio.CancelScope(shield=True):
                await self._connection.leave(interest)
            sender.close()
            receiver.close()

    async def require_readable(self, stream: str) -> None:
        await unreadable.require_no_mark(self, stream)


def _received(arrival: Arrival) -> Received:
    subject, reply, block, data = arrival
    code, description = wire.status(block) if block else ("", "")
    return Received(
        subject=subject.decode(),
        reply=reply.decode(),
        data=data,
        headers=wire.Headers(block),
        status=code,
        description=description,
    )
