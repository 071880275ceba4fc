"""Handlers of our own: of what exceeds its deliveries, and of what is to be delivered later."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aviso_workers.backends import Delivery
from aviso_workers.engine import acknowledging
from aviso_workers.engine.ordering import Line
from aviso_workers.errors import UndecodableError
from aviso_workers.events import Events, Unreadable
from aviso_workers.verdicts import Settlement, Term

__all__ = ["Internal"]


class Internal:
    """Runs a handler of our own, which says how each delivery is settled; no author's."""

    def __init__(
        self,
        handle: Callable[[Delivery], Awaitable[Settlement]],
        *,
        line: Line,
        stream: str,
        unreadable_reason: str,
        events: Events,
    ) -> None:
        """What the handler cannot decode is terminated with the reason, and stated; `stream` is where it came from."""
        self._handle = handle
        self._line = line
        self._stream = stream
        self._unreadable_reason = unreadable_reason
        self._events = events

    async def work(self) -> None:
        """See `subscription.Handler`."""
        while (delivery := await self._line.take()) is not None:
            acknowledging.settle(delivery, await self._settlement(delivery))
            self._line.done(delivery)

    async def _settlement(self, delivery: Delivery) -> Settlement:
        try:
            return await self._handle(delivery)
        except UndecodableError as error:
            self._events.emit(Unreadable(stream=self._stream, sequence=delivery.message.sequence, error=error))
            return Term(self._unreadable_reason)
