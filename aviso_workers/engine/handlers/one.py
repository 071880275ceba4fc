"""One notification at a time per worker: read, handled within its time, settled.

The plainest of the call forms; `batch` and `stream` are the others, and windows count through this one. All take their
deliveries from the flow of the agent, take the steps of a `HandlerContext`, and hand what came of them to the settler:
None for success, or the `Failure` of the one step that failed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from functools import partial
from typing import Any

from anyio.lowlevel import checkpoint_if_cancelled

from aviso_workers.aviso.codec import NotificationReader
from aviso_workers.aviso.notifications import Notification
from aviso_workers.backends import Delivery
from aviso_workers.declare import verdicts
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.verdicts import Failure
from aviso_workers.engine import call_scope, calls, forks
from aviso_workers.engine.acknowledging import Settler
from aviso_workers.engine.flow import Flow
from aviso_workers.engine.handlers.outputs import Outputs
from aviso_workers.engine.idempotency import IdempotencyKeys
from aviso_workers.engine.threads import in_thread
from aviso_workers.engine.timeouts import Timeouts
from aviso_workers.errors import UndecodableError

Call = Callable[[Any], Awaitable[object]]
Step = Callable[[Any], Awaitable[Failure | None]]
"""Handles the argument of an author's function. Returns None for success."""
Guard = Callable[[Step, Flow, Any], Awaitable[Failure | None]]
"""Makes a step for an argument that came from a flow."""
TIMEOUTS_OF_ALL = 2
"""A call has as many times the agent's `timeout`, with all that is around the function: when the function's own time is
over, what is around it is left as much again to roll back."""


class HandlerContext:
    """The parts that a call form works with: where deliveries come from, how they are read, handled and settled."""

    def __init__(
        self,
        settler: Settler,
        *,
        reader: NotificationReader,
        outputs: Outputs,
        timeouts: Timeouts,
        guard: Guard | None = None,
    ) -> None:
        """`guard` makes the calls of an agent that may lose what it needs for them, such as a singleton's."""
        agent = self.agent = settler.agent
        self.flow = settler.flow
        self.clock = settler.clock
        self.settler = settler
        self.reader = reader
        self.outputs = outputs
        self._timeouts = timeouts
        self._generation = forks.generation
        self.function = awaitable(agent, outputs=outputs)
        """The author's function."""
        timeout = agent.policy.timeout
        self.plain = timeout is None and not agent.around and guard is None
        """Whether nothing stands between the author's function and its caller, so that `function` may be called in
        place of `step`, and what it returns be published afterwards."""
        self.step: Step = partial(self._call_and_publish, timeouts.limit(self.function, timeout))
        """Calls the author's function and publishes what it returns. None when both succeeded."""
        if agent.around:
            of_all = timeout * TIMEOUTS_OF_ALL if timeout and agent.can_be_cancelled else None
            self.step = timeouts.limit(self._call_in_scope, of_all)
        if guard is not None:
            self.step = partial(guard, self.step, self.flow)

    def read(self, delivery: Delivery) -> Notification[Any] | Failure | None:
        """Return the notification, or why it cannot be read; None where the agent did not ask for it."""
        message, record = delivery.message, delivery.record
        num_delivered, attempt = delivery.num_delivered, 1
        if record is not None:
            num_delivered, attempt = record.handed_over(num_delivered), record.failures + 1
        try:
            return self.reader.notification(message, num_delivered=num_delivered, attempt=attempt)
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

    async def _call_and_publish(self, call: Call, argument: Any) -> Failure | None:
        returned = await call(argument)
        if returned is None:
            return None
        if forks.generation != self._generation:
            forks.end_child()  # before it publishes
        return await self.publish(returned)

    async def _call_in_scope(self, argument: Any) -> Failure | None:
        """Do the same inside of what is around the agent's calls, which is told of a failure as an exception."""
        agent = self.agent
        failure: Failure | None = None
        try:
            async with call_scope.opened(agent, {agent.form: argument}) as given:
                call = self._timeouts.limit(partial(self.function, **given), agent.policy.timeout)
                failure = await calls.attempt(partial(self._call_and_publish, call), argument)
                if failure is not None:
                    raise failure.error
        except BaseException as error:
            if failure is not None and error is failure.error:
                return failure  # with all that is known of it
            raise
        finally:
            del failure  # else the error, whose traceback has this frame, would be kept until the next collection
        return None

    async def publish(self, returned: object) -> Failure | None:
        """Publish what the author's function has returned. Return the failure that it has returned in place of that."""
        if failure := verdicts.failure_returned(returned):
            return failure
        await checkpoint_if_cancelled()  # what a cancelled call returns is not published
        await self.outputs.publish(returned)
        return None


class NotificationHandler:
    """Runs `async def agent(notification: Notification[T])`, or something else for each."""

    def __init__(self, context: HandlerContext, *, step: Step | None = None) -> None:
        self._context = context
        self._run: Callable[[Any], Awaitable[Any]] = step or (context.function if context.plain else context.step)

    async def work(self) -> None:
        """Handle one notification after the other from the flow; see `subscription.Handler`.

        Each call has the context variables with which this began. The first calls run in the context of this task: most
        agents change none, and what runs in another context costs more whenever it waits.
        """
        with self._context.outputs.keys() as keys:
            unchanged = copy_context()
            changed = await self._work_unchanged(unchanged, keys)
            while changed:
                work = partial(self._work_unchanged, unchanged)
                changed = await calls.in_context(unchanged.copy(), work, keys)

    async def _work_unchanged(self, unchanged: Context, keys: IdempotencyKeys) -> bool:
        """Handle notifications, and return True once a call has changed the context, in which the next is not to be."""
        context, run = self._context, calls.runner(self._run)
        take_now, take, succeeded = context.flow.take_now, context.flow.take, context.settler.succeeded
        while (delivery := take_now() or await take()) is not None:
            started = context.clock.monotonic()
            notification = context.read(delivery)
            if isinstance(notification, Notification):
                keys.begin(delivery.message)
                failure = await run(notification)
                if failure is not None and not isinstance(failure, Failure):  # but what a plain function has returned
                    failure = await calls.attempt(context.publish, failure)
                if failure is not None or not succeeded(delivery, started=started):
                    await context.settler.settle(delivery, failure, started=started)
                del failure  # the frames of its traceback lead to this one, and would keep it until the next collection
            else:
                await context.settle_unread(delivery, notification)
            del delivery, notification  # they may be large, and the next ones may come late
            try:
                if copy_context() != unchanged:
                    return True
            except Exception:  # values that cannot be compared are not the same
                return True
        return False


def awaitable(agent: Agent[Any, Any], *, outputs: Outputs) -> Callable[..., Awaitable[object]]:
    """Return the author's function, made awaitable: a plain one runs in a thread, and one that yields includes what
    becomes of its outputs."""
    if agent.yields:
        return outputs.run
    if agent.in_thread:
        return in_thread(agent)
    function: Callable[..., Awaitable[object]] = agent.function
    return function
