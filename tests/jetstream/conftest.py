from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from aviso_workers.backends.jetstream.connection import NatsConnection
from aviso_workers.backends.jetstream.inboxes import Inbox
from aviso_workers.backends.jetstream.wire import Interest, Listener, Wire


class PlayedConnection:
    """A connection whose server is the test: it sees what is sent, and says what it likes."""

    def __init__(self) -> None:
        self.nc = self
        self.owner = ""
        self.wire = self
        self.ready = True
        self.settled_below = b"$JS.ACK."
        self.acks = 0
        self.api_prefix = "$JS.API"
        self.max_payload = 1024 * 1024
        self.on_reconnect: set[Callable[[], None]] = set()
        self.sent: list[tuple[str, bytes, str]] = []
        self.heard: Listener

    @property
    def connection(self) -> NatsConnection:
        """The same, as what is asked for where a connection is used."""
        return cast(NatsConnection, self)

    async def open_inbox(self, inbox: Inbox) -> Inbox:
        await inbox.open(cast(Wire, self), "_INBOX")
        return inbox

    async def listen(self, subject: str, listener: Listener) -> Interest:
        self.heard = listener
        return cast(Interest, None)

    def ack(self, reply: bytes) -> None:
        self.acks += 1
        self.send(reply, b"+ACK")

    def send(self, subject: bytes, body: bytes, *, reply: bytes = b"") -> None:
        self.sent.append((subject.decode(), body, reply.decode()))

    def post(self, subject: str, body: bytes, *, reply: str) -> None:
        self.sent.append((subject, body, reply))

    async def flush(self) -> None:
        pass

    def check_allowed(self, subject: str, *, since: float) -> None:
        pass

    def say(self, subject: str = "_INBOX.test", status: str = "", **headers: str) -> None:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        block = f"NATS/1.0 {status}\r\n{lines}\r\n".encode() if status or headers else b""
        self.heard([(subject.encode(), b"", block, b"")])


@pytest.fixture
def played() -> PlayedConnection:
    return PlayedConnection()
