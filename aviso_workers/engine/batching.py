"""Many notifications in one call: collected up to a size or a time, handled together, settled one by one."""

from __future__ import annotations

from typing import Any

from aviso_workers import clocks
from aviso_workers.agents import Agent
from aviso_workers.backends import Delivery
from aviso_workers.clocks import Clock
from aviso_workers.codec import NotificationReader
from aviso_workers.engine.handling import caller
from aviso_workers.engine.ordering import Line
from aviso_workers.engine.originating import Origin
from aviso_workers.engine.pacing import Pace
from aviso_workers.engine.returning import Outputs
from aviso_workers.engine.settling import Settler
from aviso_workers.errors import UndecodableError
from aviso_workers.notifications import Batch, Notification

__all__ = ["InBatches"]


class InBatches:
    """Runs `async def agent(batch: Batch[T])`."""

    def __init__(
        self,
        agent: Agent[Any, Any],
        *,
        line: Line,
        reader: NotificationReader,
        outputs: Outputs,
        settler: Settler,
        clock: Clock,
    ) -> None:
        self._batching = agent.policy.batch
        self._line = line
        self._reader = reader
        self._outputs = outputs
        self._settler = settler
        self._clock = clock
        self._call = caller(agent, clock, outputs=outputs)
        self._pace = Pace(clock, per_second=agent.policy.rate_limit)

    async def work(self) -> None:
        """See `pulling.Form`."""
        origin = self._outputs.origin()
        while first := await self._line.take():
            deliveries = [first]
            with clocks.move_on_after(self._clock, self._batching.within):
                while len(deliveries) < self._batching.size and (delivery := await self._line.take()):
                    deliveries.append(delivery)
            await self._pace.wait()
            await self._handle(deliveries, origin)

    async def _handle(self, deliveries: list[Delivery], origin: Origin) -> None:
        started = self._clock.monotonic()
        wanted: list[tuple[Delivery, Notification[Any]]] = []
        for delivery in deliveries:
            try:
                notification = self._reader.notification(delivery.message, num_delivered=delivery.num_delivered)
            except UndecodableError as error:
                await self._settler.settle(delivery, error, started=started)
                continue
            if notification is None:
                self._settler.pass_over(delivery)
            else:
                wanted.append((delivery, notification))
        if not wanted:
            return
        batch = Batch([notification for _, notification in wanted])
        rest: object = None
        try:
            origin.begin(*[delivery.message for delivery, _ in wanted])
            rest = await self._call(batch)
            await self._outputs.publish(rest)
        except Exception as raised:
            rest = raised
        for delivery, notification in wanted:
            await self._settler.settle(delivery, batch.outcomes.get(notification.sequence, rest), started=started)
