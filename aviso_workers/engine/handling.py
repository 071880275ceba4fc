"""One notification at a time per worker: decoded, handled within its time, settled.

The plainest of the call forms; `batching`, `streaming` and `windowing` are the others. All take their deliveries from
the agent's line and hand them to the settler.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from aviso_workers import clocks
from aviso_workers.agents import Agent
from aviso_workers.backends import Delivery
from aviso_workers.clocks import Clock
from aviso_workers.codec import NotificationReader
from aviso_workers.engine import calling
from aviso_workers.engine.holding import WhileHeld
from aviso_workers.engine.ordering import Line
from aviso_workers.engine.originating import Origin
from aviso_workers.engine.pacing import Pace
from aviso_workers.engine.returning import Outputs
from aviso_workers.engine.settling import Settler
from aviso_workers.errors import UndecodableError
from aviso_workers.notifications import Notification

__all__ = ["Kit", "OneByOne", "in_thread"]


class Kit:
    """What a call form works with: where deliveries come from, how they are read, handled and settled."""

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
        self.agent = agent
        self.line = line
        self.reader = reader
        self.outputs = outputs
        self.settler = settler
        self.clock = clock
        self.call = _caller(agent, clock, outputs=outputs)
        if agent.policy.singleton:
            self.call = WhileHeld(_publishing(self.call, outputs), line)
        self.pace = Pace(clock, per_second=agent.policy.rate_limit)

    async def read(self, delivery: Delivery, *, started: float) -> Notification[Any] | None:
        """The notification; None where it is settled already, because it cannot be read or was not asked for."""
        try:
            notification = self.reader.notification(delivery.message, num_delivered=delivery.num_delivered)
        except UndecodableError as error:
            await self.settler.settle(delivery, error, started=started)
            return None
        if notification is None:
            self.settler.pass_over(delivery)
        return notification


class OneByOne:
    """Runs `async def agent(notification: Notification[T])`, or something else for each."""

    def __init__(self, kit: Kit, *, call: Callable[[Any], Awaitable[object]] | None = None) -> None:
        self._line = kit.line
        self._reader = kit.reader
        self._outputs = kit.outputs
        self._settler = kit.settler
        self._clock = kit.clock
        self._call = call or kit.call
        self._pace = kit.pace

    async def work(self) -> None:
        """See `pulling.Form`."""
        origin = self._outputs.origin()
        while (delivery := await self._line.take()) is not None:
            if self._pace.limited:
                await self._pace.wait()
            await self._handle(delivery, origin)

    async def _handle(self, delivery: Delivery, origin: Origin) -> None:
        started = self._clock.monotonic()
        outcome: object
        try:
            notification = self._reader.notification(delivery.message, num_delivered=delivery.num_delivered)
            if notification is None:
                self._settler.pass_over(delivery)
                return
            origin.begin(delivery.message)
            outcome = await self._call(notification)
            if outcome is not None:
                await self._outputs.publish(outcome)
        except Exception as raised:
            outcome = raised
        await self._settler.settle(delivery, outcome, started=started)


def _caller(agent: Agent[Any, Any], clock: Clock, *, outputs: Outputs) -> Callable[[Any], Awaitable[object]]:
    """The author's function, made awaitable and given its time; one that yields includes what becomes of its outputs.

    A plain function runs in a thread, at most `concurrency` of them at a time; when its time is over it is left
    behind, and nobody waits for it.
    """
    function: Callable[[Any], Awaitable[object]] = agent.function
    if agent.yields:
        function = outputs.run
    elif agent.in_thread:
        function = in_thread(agent)
    timeout = agent.policy.timeout

    if timeout is None:
        return partial(calling.call, function)

    async def call_in_time(argument: Any) -> object:
        with clocks.fail_after(clock, timeout):
            return await calling.call(function, argument)

    return call_in_time


def _publishing(call: Callable[[Any], Awaitable[object]], outputs: Outputs) -> Callable[[Any], Awaitable[object]]:
    """The call, and with it what becomes of what it returns."""

    async def call_and_publish(argument: Any) -> object:
        outcome = await call(argument)
        await outputs.publish(outcome)
        return outcome if isinstance(outcome, Exception) else None

    return call_and_publish


def in_thread(agent: Agent[Any, Any]) -> Callable[[Any], Awaitable[object]]:
    """The author's plain function, run in a thread."""
    limiter = anyio.CapacityLimiter(agent.policy.concurrency)

    async def call(argument: Any, **resources: Any) -> object:
        function = partial(agent.function, argument, **resources)
        return await anyio.to_thread.run_sync(function, limiter=limiter, abandon_on_cancel=True)

    return call
