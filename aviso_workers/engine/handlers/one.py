"""One notification at a time per worker: read, handled within its time, settled.

The plainest of the call forms; `batch`, `stream` and `windowed` are the others. All take their deliveries from
the agent's buffer, take the steps of a `HandlerContext`, and hand what came of them to the settler: None for success,
or the `Failure` of the one step that failed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from anyio.lowlevel import checkpoint_if_cancelled

from aviso_workers import clocks
from aviso_workers.aviso.codec import NotificationReader
from aviso_workers.aviso.notifications import Notification
from aviso_workers.backends import Delivery
from aviso_workers.clocks import Clock
from aviso_workers.declare import verdicts
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.verdicts import Failure
from aviso_workers.engine import calls
from aviso_workers.engine.acknowledging import Settler
from aviso_workers.engine.buffer import Buffer
from aviso_workers.engine.handlers.outputs import Outputs
from aviso_workers.engine.idempotency import IdempotencyKeys
from aviso_workers.engine.rate_limit import Pace
from aviso_workers.engine.singletons import WhileHeld
from aviso_workers.engine.threads import Threads, in_thread
from aviso_workers.errors import UndecodableError

__all__ = ["HandlerContext", "OneByOne"]

Step = Callable[[Any], Awaitable[Failure | None]]
"""What is done with what an author's function takes: None for success."""


class HandlerContext:
    """What a call form works with: where deliveries come from, how they are read, handled and settled."""

    def __init__(
        self,
        agent: Agent[Any, Any],
        *,
        buffer: Buffer,
        reader: NotificationReader,
        outputs: Outputs,
        settler: Settler,
        threads: Threads,
        clock: Clock,
        while_held: WhileHeld | None = None,
    ) -> None:
        """`while_held` is a singleton's."""
        self.agent = agent
        self.buffer = buffer
        self.reader = reader
        self.outputs = outputs
        self.settler = settler
        self.threads = threads
        self.clock = clock
        self.pace = Pace(clock, per_second=agent.policy.rate_limit)
        self._call = _caller(agent, clock, outputs=outputs, threads=threads)
        self.step: Step = self._call_and_publish
        """Calls the author's function and publishes what it returns. None when both succeeded."""
        if while_held is not None:
            self.step = partial(while_held.call, self._call_and_publish, buffer)

    def read(self, delivery: Delivery) -> Notification[Any] | Failure | None:
        """Return the notification, or why it cannot be read; None where the agent did not ask for it."""
        try:
            return self.reader.notification(delivery.message, num_delivered=delivery.num_delivered)
        except UndecodableError as error:
            return Failure(error, final="undecodable")
        except BaseException as error:  # the author's payload type has code as well
            return Failure(error)

    async def settle_unread(self, delivery: Delivery, failure: Failure | None) -> None:
        """End a delivery of which `read` returned no notification."""
        if failure is None:
            await self.settler.ack_unmatched(delivery)
        else:
            await self.settler.settle(delivery, failure, started=self.clock.monotonic())

    async def _call_and_publish(self, argument: Any) -> Failure | None:
        returned = await self._call(argument)
        if returned is None:
            return None
        if failure := verdicts.failure_returned(returned):
            return failure
        await checkpoint_if_cancelled()  # what a cancelled call returns is not published
        await self.outputs.publish(returned)
        return None


class OneByOne:
    """Runs `async def agent(notification: Notification[T])`, or something else for each."""

    def __init__(self, context: HandlerContext, *, step: Step | None = None) -> None:
        self._context = context
        self._step = step or context.step

    async def work(self) -> None:
        """Handle one notification after the other from the buffer; see `subscription.Handler`."""
        context = self._context
        run = calls.runner(self._step)
        with context.outputs.keys() as keys:
            while (delivery := await context.buffer.take()) is not None:
                if context.pace.limited:
                    await context.pace.wait()
                await self._handle(delivery, keys, run)
                if context.threads.left_behind:
                    await context.threads.wait_for_turn()

    async def _handle(self, delivery: Delivery, keys: IdempotencyKeys, run: Step) -> None:
        started = self._context.clock.monotonic()
        notification = self._context.read(delivery)
        if not isinstance(notification, Notification):
            await self._context.settle_unread(delivery, notification)
            return
        keys.begin(delivery.message)
        failure = await run(notification)
        await self._context.settler.settle(delivery, failure, started=started)


def _caller(
    agent: Agent[Any, Any], clock: Clock, *, outputs: Outputs, threads: Threads
) -> Callable[[Any], Awaitable[object]]:
    """Return the author's function, made awaitable and given its time; one that yields includes what becomes of its
    outputs.

    A plain function runs in a thread; when its time is over, the thread runs on and the call has failed. Raises
    TimeoutError, also where the function catches its cancellation and returns: it was not left the time to say that it
    is done.
    """
    function: Callable[[Any], Awaitable[object]] = agent.function
    if agent.yields:
        function = outputs.run
    elif agent.in_thread:
        function = in_thread(agent, threads=threads)
    timeout = agent.policy.timeout

    if timeout is None:
        return function

    async def call_in_time(argument: Any) -> object:
        with clocks.fail_after(clock, timeout):
            return await calls.call(function, argument)

    return call_in_time
