"""Subscriptions of our own: of what exceeds its deliveries, and of what is to be delivered later."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from aviso_workers.backends import Delivery
from aviso_workers.clocks import Clock
from aviso_workers.declare.verdicts import Settlement, Term
from aviso_workers.engine import acknowledging
from aviso_workers.engine.buffer import Buffer
from aviso_workers.engine.feeds import Feed
from aviso_workers.engine.flow import Flow
from aviso_workers.engine.subscription import Run, Subscription
from aviso_workers.errors import UndecodableError
from aviso_workers.events import Events, Unreadable
from aviso_workers.jetstream import answers
from aviso_workers.jetstream.fields import SECOND

__all__ = ["subscription"]


def subscription(
    name: str,
    handle: Callable[[Delivery], Awaitable[Settlement]],
    feed: Feed,
    *,
    workers: int,
    prefetch: int,
    unreadable_reason: str,
    clock: Clock,
    events: Events,
    beside: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
) -> Subscription:
    """Return a subscription of our own, of which `handle` says how each delivery of the feed is settled.

    What it cannot decode is terminated with `unreadable_reason`, and stated. `beside` is run for as long as it runs.
    """
    flow = Flow(clock, workers=workers, least=prefetch)
    handler = _Internal(
        handle, buffer=flow.buffer, stream=feed.stream.name, unreadable_reason=unreadable_reason, events=events
    )
    run = Run(handler, flow=flow, clock=clock, ack_wait_seconds=feed.consumer.ack_wait / SECOND)
    return Subscription(name=name, feeds=[feed], run=run, beside=beside)


class _Internal:
    """Runs a handler of our own, which says how each delivery is settled; no author's."""

    def __init__(
        self,
        handle: Callable[[Delivery], Awaitable[Settlement]],
        *,
        buffer: Buffer,
        stream: str,
        unreadable_reason: str,
        events: Events,
    ) -> None:
        """`stream` is where what cannot be decoded came from."""
        self._handle = handle
        self._buffer = buffer
        self._stream = stream
        self._unreadable_reason = unreadable_reason
        self._events = events

    async def work(self) -> None:
        """Handle one delivery after the other from the buffer; see `subscription.Handler`."""
        while (delivery := await self._buffer.take()) is not None:
            acknowledging.settle(delivery, await self._settlement(delivery))
            self._buffer.done(delivery)

    async def _settlement(self, delivery: Delivery) -> Settlement:
        try:
            return await self._handle(delivery)
        except UndecodableError as error:
            message = delivery.message
            foreign = answers.is_stored_by_reply(message)
            self._events.emit(
                Unreadable(
                    stream=self._stream,
                    sequence=message.sequence,
                    error=UndecodableError(answers.why_foreign(message)) if foreign else error,
                    reason="foreign" if foreign else "content",
                )
            )
            return Term(self._unreadable_reason)
