"""The connection that an in-memory backend plays: there is none to lose, so that a test can take it away."""

from __future__ import annotations

from collections.abc import Callable

import anyio
from anyio.lowlevel import checkpoint

from aviso_workers.backends import ConnectionListener
from aviso_workers.backends.in_memory.account import MAX_PAYLOAD
from aviso_workers.errors import UnavailableError


class InMemoryConnection:
    """The connection to a server that lives in this process; see `backends.InMemoryConnection`."""

    def __init__(self, listener: ConnectionListener | None) -> None:
        self.watchers: set[Callable[[], None]] = set()
        """Called after every change."""
        self.ready = False
        self.losses = 0
        self._reason = "it is not open"
        self._listener = listener

    @property
    def slow_because(self) -> str:
        return ""

    @property
    def max_payload(self) -> int:
        return MAX_PAYLOAD

    def require_server(self, major: int, minor: int, *, to: str) -> None:
        """Do nothing: this backend has every feature, whatever the version of a server that would be needed."""

    async def failed(self) -> None:
        await anyio.sleep_forever()  # there is no server to lose

    async def reach(self) -> None:
        """Take a turn on the loop, as a request over a wire would. Raises `UnavailableError` while down."""
        await checkpoint()
        if not self.ready:
            raise UnavailableError(f"in_memory: not connected: {self._reason}")

    def open(self) -> None:
        self._change(ready=True, reason="")
        self._tell()

    def lose(self, reason: str) -> None:
        self.losses += 1
        self._change(ready=False, reason=reason)
        self._tell()

    def close(self) -> None:
        """Close the connection. The listener is not called, because this is not a loss."""
        self._change(ready=False, reason="it is closed")

    def _change(self, *, ready: bool, reason: str) -> None:
        self.ready, self._reason = ready, reason
        for watch in tuple(self.watchers):
            watch()

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener(connected=self.ready, reason=self._reason)
