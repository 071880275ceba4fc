"""Shields of work that a cancellation does not cut off at once: settlements that have begun.

A worker is cancelled when its drain timeout is over, or by a second signal. A dead letter that is being stored is
stored to its end, and a failure is counted; but a server or a bucket that does not answer must not keep the process
from ending. So all that an agent has begun has a few seconds together. What is not settled by then is delivered again.
"""

from __future__ import annotations

from types import TracebackType

import anyio
from anyio.lowlevel import checkpoint

from aviso_workers.clocks import Clock, ScheduledCall

SHIELDED_SECONDS = 3.0


class Shield:
    """Protects the settlements of one agent from its cancellation, for some seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.scopes: set[anyio.CancelScope] = set()
        """Those of the blocks that are held now."""
        self._timer: ScheduledCall | None = None
        self.ended = anyio.Event()
        """Set when the time is over."""

    def hold(self) -> _Hold:
        """Finish the block although we are cancelled; be cancelled in it when the time is over."""
        return _Hold(self)

    async def watch(self) -> None:
        """Run beside what is shielded; when all of it is cancelled, its time begins."""
        try:
            await anyio.sleep_forever()
        finally:
            self.limit()

    def limit(self) -> None:
        """Let the time begin, if it has not begun."""
        if self._timer is None:
            self._timer = self._clock.call_at(self._clock.monotonic() + SHIELDED_SECONDS, self._end)

    def _end(self) -> None:
        self.ended.set()
        for scope in self.scopes:
            scope.cancel()


class _Hold:
    """The block of `Shield.hold`. Every failure enters one, and a generator would cost twice as much."""

    __slots__ = ("_scope", "_shield")

    def __init__(self, shield: Shield) -> None:
        self._shield = shield

    async def __aenter__(self) -> None:
        self._scope = scope = anyio.CancelScope(shield=True)  # it keeps our cancellation out until the time is over
        if self._shield.ended.is_set():
            scope.cancel()
        self._shield.scopes.add(scope)
        scope.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._shield.scopes.discard(self._scope)
        suppressed = self._scope.__exit__(kind, error, traceback)
        if self._scope.cancelled_caught:
            await checkpoint()  # raises our own cancellation, which the scope has kept from us
        return bool(suppressed)
