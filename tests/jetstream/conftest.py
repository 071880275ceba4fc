from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from nats.aio.msg import Msg


class PlayedConnection:
    """A connection whose server is the test: it sees what is sent, and says what it likes."""

    def __init__(self) -> None:
        self.nc = self
        self.max_payload = 1024 * 1024
        self.on_reconnect: set[Callable[[], None]] = set()
        self.sent: list[tuple[str, bytes, str]] = []
        self.heard: Callable[[Msg], Awaitable[None]]

    def new_inbox(self) -> str:
        return "_INBOX.test"

    async def subscribe(self, subject: str, *, cb: Callable[[Msg], Awaitable[None]], **limits: Any) -> Any:
        self.heard = cb
        return SimpleNamespace(_id=1)

    async def publish(self, subject: str, body: bytes, reply: str = "") -> None:
        self.sent.append((subject, body, reply))

    async def post(self, subject: str, body: bytes, *, reply: str) -> None:
        self.sent.append((subject, body, reply))

    async def flush(self) -> None:
        pass

    async def say(self, subject: str = "_INBOX.test", **headers: str) -> None:
        await self.heard(Msg(_client=None, subject=subject, headers=headers or None))  # type: ignore[arg-type]


@pytest.fixture
def played() -> PlayedConnection:
    return PlayedConnection()
