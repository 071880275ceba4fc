"""Servers that an attacker could run: one without TLS, and one between us and the real one that hides its TLS."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

INFO = {
    "server_id": "PLAIN",
    "server_name": "plain",
    "version": "2.15.0",
    "proto": 1,
    "headers": True,
    "max_payload": 1_048_576,
    "auth_required": True,
    "nonce": "nonce",
}


class Seen:
    """What came from clients in plain text after the server's greeting, and how many of them connected."""

    def __init__(self) -> None:
        self.connections = 0
        self.plain = b""


@asynccontextmanager
async def plain_server(*, port: int = 0, **info: Any) -> AsyncGenerator[tuple[int, Seen], None]:
    """A server that greets without TLS and writes down what it is told: its port, and what it has seen."""
    seen = Seen()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.connections += 1
        writer.write(b"INFO " + json.dumps(INFO | info).encode() + b"\r\n")
        with suppress(OSError):
            while came := await reader.read(65_536):
                seen.plain += came
                if b"PING\r\n" in came:
                    writer.write(b"PONG\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    async with server:
        yield server.sockets[0].getsockname()[1], seen


class Between:
    """A proxy in front of a server with TLS; when `strips` is true, it takes TLS out of the server's greeting, in which
    it makes `changes`; None takes a field out. The next clients get one of the greetings `instead`."""

    def __init__(self, server_port: int) -> None:
        self.port = 0
        self.strips = False
        self.changes: dict[str, Any] = {}
        self.instead: list[bytes] = []
        self.seen = Seen()
        self._server_port = server_port
        self._writers: list[asyncio.StreamWriter] = []

    def cut(self) -> None:
        """Drop all connections."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.seen.connections += 1
        stripped = self.strips
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._server_port)
        self._writers += [writer, to_server]
        greeting = await from_server.readline()
        info = json.loads(greeting.removeprefix(b"INFO ")) | self.changes
        info = {key: value for key, value in info.items() if value is not None}
        if stripped:
            info["tls_required"] = info["tls_available"] = False
        writer.write((self.instead.pop() if self.instead else b"INFO " + json.dumps(info).encode()) + b"\r\n")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pass_on(reader, to_server, listens=stripped))
            tasks.create_task(self._pass_on(from_server, writer, listens=False))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, listens: bool) -> None:
        with suppress(OSError):
            while came := await reader.read(65_536):
                if listens:
                    self.seen.plain += came
                writer.write(came)
        writer.close()


@asynccontextmanager
async def between(server_port: int) -> AsyncGenerator[Between, None]:
    proxy = Between(server_port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    async with server:
        yield proxy
        proxy.cut()
