"""The connection that an in-memory backend plays: there is none to lose, so that a test can take it away."""

from __future__ import annotations

from collections.abc import Callable

from anyio.lowlevel import checkpoint

from aviso_workers.backends import ConnectionListener
from aviso_workers.errors import UnavailableError

__all__ = ["Connection"]


class Connection:
    def __init__(self, listener: ConnectionListener | None) -> None:
        self.watchers: set[Callable[[], None]] = set()
        """Called after every change."""
        self.up = False
        self.losses = 0
        self._reason = "it is not open"
        self._listener = listener

    async def reach(self) -> None:
        """Take a turn on the loop, as a request over a wire would. Raises `UnavailableError` while down."""
        await checkpoint()
        if not self.up:
            raise UnavailableError(f"in_memory: not connected: {self._reason}")

    def open(self) -> None:
        self._change(up=True, reason="")
        self._tell()

    def lose(self, reason: str) -> None:
        self.losses += 1
        self._change(up=False, reason=reason)
        self._tell()

    def close(self) -> None:
        """As we wish it: nobody is told."""
        self._change(up=False, reason="it is closed")

    def _change(self, *, up: bool, reason: str) -> None:
        self.up, self._reason = up, reason
        for watch in tuple(self.watchers):
            watch()

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener(connected=self.up, reason=self._reason)
