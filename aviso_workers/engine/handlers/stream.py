"""A function that loops over its notifications, as a Faust agent does.

A notification is settled when the loop asks for the next one. An exception concerns those that were handed out and
not settled; they are judged like any other failure, and the function is started again with the next notification.
"""

from __future__ import annotations

from typing import Any

from anyio.lowlevel import checkpoint_if_cancelled
from msgspec import structs

from aviso_workers import clocks
from aviso_workers.aviso.notifications import Notification
from aviso_workers.backends import Delivery
from aviso_workers.declare.batches import Stream
from aviso_workers.declare.verdicts import Failure
from aviso_workers.engine import calls
from aviso_workers.engine.handlers.one import HandlerContext
from aviso_workers.engine.idempotency import IdempotencyKeys


class StreamHandler:
    """Runs `async def agent(stream: Stream[T])`."""

    def __init__(self, context: HandlerContext) -> None:
        self._context = context

    async def work(self) -> None:
        """See `subscription.Handler`. The function is run again and again, each time when there is something for it."""
        context = self._context
        with context.outputs.keys() as keys:
            delivery = await context.flow.take()
            while delivery is not None:
                source = _BufferSource(delivery, context=context, keys=keys)
                failure = await calls.attempt_apart(context.step, Stream(source))
                delivery = await source.end(failure)
                del failure  # else it would be kept until the next notification comes
                delivery = delivery or await context.flow.take()


class _BufferSource:
    """The deliveries of one run of the function: one that was taken already, then those in the flow."""

    def __init__(self, first: Delivery, *, context: HandlerContext, keys: IdempotencyKeys) -> None:
        self._next_up: Delivery | None = first
        """Taken from the flow, and not handed out yet."""
        self._context = context
        self._keys = keys
        self._handed_out: list[tuple[Delivery, float]] = []
        self._lapses = context.flow.lapses
        """How often the process had been away when the next one was taken."""

    async def next(self, *, within_seconds: float | None = None) -> Notification[Any] | None:
        """Return the next notification; None when the flow is closed, or nothing came in time.

        The time counts from when the first was handed out of those that are not settled.
        """
        if within_seconds is None:
            return await self._next()
        now = self._context.clock.monotonic()
        begun = self._handed_out[0][1] if self._handed_out else now
        with clocks.move_on_after(self._context.clock, max(0.0, begun + within_seconds - now)):
            return await self._next()
        return None

    async def settle(self) -> None:
        """Settle what was handed out, unless the function was cancelled and asks for more all the same."""
        await checkpoint_if_cancelled()
        await self._settle(None)

    async def end(self, failure: Failure | None) -> Delivery | None:
        """Settle what the function was given when it ended, or the first notification if it took nothing.

        Returns what was taken from the flow to be handled by itself, and was not handed out.
        """
        gave = bool(self._handed_out)
        await self._settle(failure)
        if gave and self._next_up is not None:
            return self._next_up
        if self._next_up is not None:
            nothing_taken = failure or Failure(RuntimeError("the function returned and has asked for no notification"))
            await self._context.settler.settle(self._next_up, nothing_taken, started=self._context.clock.monotonic())
        return None

    async def _settle(self, failure: Failure | None) -> None:
        handed_out, self._handed_out = self._handed_out, []
        self._keys.begin()
        for delivery, started in handed_out:
            await self._context.settler.settle(delivery, failure, started=started)
            if failure is not None and failure.is_evidence:
                failure = structs.replace(failure, told=True)

    async def _next(self) -> Notification[Any] | None:
        flow = self._context.flow
        if any(flow.alone(delivery) for delivery, _ in self._handed_out):
            return None
        while (delivery := self._next_up or await flow.take()) is not None:
            if self._next_up is None:
                self._next_up, self._lapses = delivery, flow.lapses
            if self._handed_out and flow.alone(delivery):
                return None  # what was handed out comes first
            notification = self._context.read(delivery)
            if not isinstance(notification, Notification):
                self._next_up = None
                await self._context.settle_unread(delivery, notification)
                continue
            self._next_up = None
            if not flow.may_still_begin(delivery, lapses=self._lapses):
                continue
            self._handed_out.append((delivery, self._context.clock.monotonic()))
            self._keys.also(delivery.message)
            return notification
        return None
