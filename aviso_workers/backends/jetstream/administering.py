"""Everything a server can be asked for, as it answers: what operators' tools stand on.

`Backend.administration` gives one. It adds no meaning: whoever asks knows JetStream's API, and reads its JSON. A large
answer comes in pages, an advisory unasked; that is all that is done here. Snapshots are the business of `snapshots`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from aviso_workers.backends import Heard, Snapshot
from aviso_workers.backends.jetstream import faults, snapshots, tls, wire
from aviso_workers.backends.jetstream.connection import API_TIMEOUT_SECONDS, Connection
from aviso_workers.errors import UnavailableError

__all__ = ["Administration"]

MOST_LISTINGS = 5
"""How often a listing is begun again, because it changed while it was read."""


class Administration:
    """See `backends.Administration`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def server_version(self) -> str:
        found = self._connection.nc.connected_server_version
        return f"{found.major}.{found.minor}.{found.patch}"

    @property
    def server_certificate(self) -> bytes | None:
        return tls.certificate(self._connection.nc)

    @property
    def api_prefix(self) -> str:
        return self._connection.api_prefix

    async def api(
        self, subject: str, request: Any = None, *, prefix: str = "", timeout_seconds: float = API_TIMEOUT_SECONDS
    ) -> dict[str, Any]:
        return await self._connection.api(subject, request, prefix=prefix, timeout_seconds=timeout_seconds)

    async def pages(self, subject: str, found: str, *, prefix: str = "") -> list[Any]:
        return [each for page in await self._listing(subject, {}, prefix=prefix) for each in page[found] or ()]

    async def subject_counts(self, stream: str, subject: str) -> dict[str, int]:
        """See `backends.Backend.subject_counts`."""
        pages = await self._listing(f"STREAM.INFO.{stream}", {"subjects_filter": subject})
        counts: dict[str, int] = {}
        for page in pages:
            counts |= page["state"].get("subjects") or {}
        if len(counts) != pages[0]["total"]:
            raise UnavailableError(f"{stream}: {len(counts)} of its {pages[0]['total']} subjects were listed")
        return counts

    async def _listing(self, subject: str, request: Mapping[str, Any], *, prefix: str = "") -> list[dict[str, Any]]:
        """All pages of a listing, of one time: where the number of entries changes meanwhile, it is begun again."""
        for _ in range(MOST_LISTINGS):
            pages: list[dict[str, Any]] = []
            offset = 0  # not by how many came: a cluster leaves out those that do not answer
            while not pages or pages[-1]["total"] == pages[0]["total"]:
                pages.append(await self._connection.api(subject, {**request, "offset": offset}, prefix=prefix))
                offset += pages[-1]["limit"]
                if offset >= pages[-1]["total"] == pages[0]["total"]:
                    return pages
        raise UnavailableError(f"{subject}: entries come and go faster than they are listed")

    async def request(self, subject: str, data: bytes = b"", *, timeout_seconds: float = API_TIMEOUT_SECONDS) -> Heard:
        sent = anyio.current_time()
        try:
            with faults.translated(subject):
                answer = await self._connection.nc.request(subject, data, timeout=timeout_seconds)
        except UnavailableError:
            self._connection.check_allowed(subject, since=sent)
            raise
        return Heard(subject=answer.subject, data=answer.data, headers=answer.headers or {})

    def send(self, subject: str, data: bytes = b"", *, reply: str = "") -> None:
        self._connection.wire.send(subject.encode(), data, reply=reply.encode())

    def new_inbox(self) -> str:
        return self._connection.nc.new_inbox()

    @asynccontextmanager
    async def listen(self, subject: str) -> AsyncIterator[MemoryObjectReceiveStream[Heard]]:
        heard, hearing = anyio.create_memory_object_stream[Heard](math.inf)

        def listener(arrivals: Sequence[wire.Arrival]) -> None:
            for subject, reply, block, data in arrivals:
                code, description = wire.status(block) if block else ("", "")
                heard.send_nowait(
                    Heard(
                        subject=subject.decode(),
                        reply=reply.decode(),
                        data=data,
                        headers=wire.Headers(block),
                        status=code,
                        description=description,
                    )
                )

        interest = await self._connection.listen(subject, listener)
        try:
            await self._connection.flush()  # the server knows of it before anything is asked for
            yield hearing
        finally:
            with anyio.CancelScope(shield=True):
                await self._connection.leave(interest)
            heard.close()
            hearing.close()

    def snapshot(self, stream: str) -> AbstractAsyncContextManager[Snapshot]:
        return snapshots.snapshot(self, self._connection, stream)

    async def restore(
        self,
        config: Mapping[str, Any],
        state: Mapping[str, Any],
        *,
        read: Callable[[int], Awaitable[bytes]],
        stays_unfinished: bool = False,
    ) -> dict[str, Any]:
        return await snapshots.restore(self, self._connection, config, state, read, stays_unfinished=stays_unfinished)
