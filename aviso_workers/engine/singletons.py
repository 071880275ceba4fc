"""Limits of a singleton's handler: it may do only what nobody else can do instead.

`handlers.one` makes its calls through here; `publisher`, tables and buckets ask before they write. A worker that was
paused or cut off, or whose consumer has another leader, has lost what it handled: another one may be at it. The call is
cancelled as soon as that is noticed, and what it publishes meanwhile is refused. The settlement is refused by the
backend.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import anyio

from aviso_workers.backends import Delivery
from aviso_workers.declare.verdicts import Failure
from aviso_workers.engine import calls
from aviso_workers.engine.buffer import Buffer
from aviso_workers.errors import TakenOverError

__all__ = ["SingletonCalls", "check"]

_HANDLED: ContextVar[Delivery | None] = ContextVar("handled", default=None)


class SingletonCalls:
    """Calls a singleton's function, one call at a time, and ends it when what it handles is lost."""

    def __init__(self) -> None:
        self._handled: Delivery | None = None
        self._scope = anyio.CancelScope()

    async def call(
        self, function: Callable[[Any], Awaitable[Failure | None]], buffer: Buffer, notification: Any
    ) -> Failure | None:
        """Return what the function returns. Raises `TakenOverError` where another worker may have the notification."""
        self._handled = buffer.delivery_of(notification.sequence)
        token = _HANDLED.set(self._handled)
        try:
            check()
            with anyio.CancelScope() as self._scope:
                return await calls.call(function, notification)
            raise TakenOverError
        finally:
            _HANDLED.reset(token)

    def end(self, delivery: Delivery) -> None:
        """Cancel the call if it is what handles this delivery, which may have been given to another worker."""
        if delivery is self._handled:
            self._scope.cancel()


def check() -> None:
    """Raise `TakenOverError` in a handler whose notification may have been given to another worker."""
    handled = _HANDLED.get()
    if handled is not None and not handled.held:
        raise TakenOverError
