"""What a singleton's handler may still do: only what nobody else can do instead.

`handling` makes its calls through here, `publishing` and `tabling` ask before they write. A worker that was paused or
cut off, or whose consumer has another leader, has lost what it handled: another one may be at it. The call is
cancelled as soon as that is noticed, and what it publishes meanwhile is refused. The settlement is refused by the
backend.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import anyio

from aviso_workers.backends import Delivery
from aviso_workers.engine import calling
from aviso_workers.engine.ordering import Line
from aviso_workers.errors import TakenOverError
from aviso_workers.verdicts import Failure

__all__ = ["WhileHeld", "check"]

_HANDLED: ContextVar[Delivery | None] = ContextVar("handled", default=None)


class WhileHeld:
    """Calls a singleton's function, one call at a time, and ends it when what it handles is lost."""

    def __init__(self, call: Callable[[Any], Awaitable[Failure | None]], line: Line) -> None:
        self._call = call
        self._line = line
        self._handled: Delivery | None = None
        self._scope = anyio.CancelScope()
        line.on_lost = self._end

    async def __call__(self, notification: Any) -> Failure | None:
        self._handled = self._line.delivery_of(notification.sequence)
        _HANDLED.set(self._handled)
        check()
        with anyio.CancelScope() as self._scope:
            return await calling.call(self._call, notification)
        raise TakenOverError

    def _end(self, delivery: Delivery) -> None:
        if delivery is self._handled:
            self._scope.cancel()


def check() -> None:
    """Raises `TakenOverError` in a handler whose notification may have been given to another worker."""
    handled = _HANDLED.get()
    if handled is not None and not handled.held:
        raise TakenOverError
