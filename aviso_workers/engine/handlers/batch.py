"""Many notifications in one call: collected up to a size or a time, handled together, settled one by one."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from aviso_workers import clocks
from aviso_workers.aviso.notifications import Notification
from aviso_workers.backends import Delivery
from aviso_workers.declare import verdicts
from aviso_workers.declare.batches import Batch
from aviso_workers.declare.verdicts import Failure
from aviso_workers.engine import calls
from aviso_workers.engine.handlers.one import HandlerContext
from aviso_workers.engine.idempotency import IdempotencyKeys


class BatchHandler:
    """Runs `async def agent(batch: Batch[T])`."""

    def __init__(self, context: HandlerContext) -> None:
        self._context = context

    async def work(self) -> None:
        """Handle batches from the flow until the agent stops; see `subscription.Handler`."""
        context, flow, batching = self._context, self._context.flow, self._context.agent.policy.batch
        with context.outputs.keys() as keys:
            while first := await flow.take():
                lapses, deliveries = flow.lapses, [first]
                apart: Delivery | None = None
                if not flow.alone(first):
                    with clocks.move_on_after(context.clock, batching.within):
                        while len(deliveries) < batching.size and (delivery := flow.take_now() or await flow.take()):
                            if flow.alone(delivery):
                                apart = delivery
                                break
                            deliveries.append(delivery)
                taken = (*deliveries, *([apart] if apart else []))
                if not flow.may_still_begin(*taken, lapses=lapses):
                    continue
                await self._handle(deliveries, keys)
                if apart is not None:
                    await self._handle([apart], keys)

    async def _handle(self, deliveries: list[Delivery], keys: IdempotencyKeys) -> None:
        context = self._context
        started = context.clock.monotonic()
        wanted: list[tuple[Delivery, Notification[Any]]] = []
        for delivery in deliveries:
            notification = context.read(delivery)
            if isinstance(notification, Notification):
                wanted.append((delivery, notification))
            else:
                await context.settle_unread(delivery, notification)
        if not wanted:
            return
        batch = Batch([notification for _, notification in wanted])
        keys.begin(*[delivery.message for delivery, _ in wanted])
        rest, told = await calls.attempt_apart(context.step, batch), False
        for delivery, notification in wanted:
            failure = _failure_of(notification, batch, rest, in_scope=bool(context.agent.around))
            if failure is not None and failure.is_evidence:
                failure, told = structs.replace(failure, told=told), True
            if failure is not None or not context.settler.succeeded(delivery, started=started):
                await context.settler.settle(delivery, failure, started=started)
        del rest, failure  # the frames of the traceback lead to this one, and would be kept until the next collection


def _failure_of(
    notification: Notification[Any], batch: Batch[Any], rest: Failure | None, *, in_scope: bool
) -> Failure | None:
    """Return what was said of this notification; where nothing was, what came of the call.

    In the scope of a call (`call_scope`) an ack counts only where all of the call succeeded: a resource of the call may
    have taken back what was done for the notification.
    """
    if notification.sequence not in batch.outcomes:
        return rest
    failure = verdicts.failure_returned(batch.outcomes[notification.sequence])
    return rest if failure is None and in_scope else failure
