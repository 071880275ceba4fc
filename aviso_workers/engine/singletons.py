"""Limits of a singleton's handler: it may do only what nobody else can do instead.

`handlers.one` makes its calls through here; `publisher`, tables and buckets ask before they write. A worker that was
paused or cut off, or whose consumer has another leader, has lost what it handled: another one may be at it. The call is
cancelled as soon as that is noticed, and what it publishes meanwhile is refused. The settlement is refused by the
backend. The same holds for calls of which all workers together make only so many at a time (`features.limits`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import anyio

from aviso_workers.backends import Delivery
from aviso_workers.declare.verdicts import Failure
from aviso_workers.engine import calls
from aviso_workers.engine.flow import Flow
from aviso_workers.errors import TakenOverError


class _Held(Protocol):
    @property
    def held(self) -> bool: ...


_NEEDED: ContextVar[tuple[_Held, ...]] = ContextVar("needed", default=())
"""What the call that runs may lose."""


class SingletonCalls:
    """Calls a singleton's function, one call at a time, and ends it when what it handles is lost."""

    def __init__(self) -> None:
        self._handled: Delivery | None = None
        self._scope = anyio.CancelScope()

    async def call(
        self, function: Callable[[Any], Awaitable[Failure | None]], flow: Flow, notification: Any
    ) -> Failure | None:
        """Return what the function returns. Raises `TakenOverError` where another worker may have the notification."""
        self._handled = flow.delivery_of(notification.sequence)
        with needing(self._handled):
            check()
            with anyio.CancelScope() as self._scope:
                return await calls.call(function, notification)
            raise TakenOverError

    def end(self, delivery: Delivery) -> None:
        """Cancel the call if it is what handles this delivery, which may have been given to another worker."""
        if delivery is self._handled:
            self._scope.cancel()


@contextmanager
def needing(held: _Held | None) -> Iterator[None]:
    """Let `check` raise in the block once this is not held any more; with None, there is nothing to lose."""
    token = _NEEDED.set((*_NEEDED.get(), held) if held is not None else _NEEDED.get())
    try:
        yield
    finally:
        _NEEDED.reset(token)


def check() -> None:
    """Raise `TakenOverError` in a handler whose notification, or place, may have been given to another worker."""
    for needed in _NEEDED.get():
        if not needed.held:
            raise TakenOverError
