"""The call forms: notifications are read, handled one by one, in batches or in a loop, and settled.

All take their deliveries from the flow of the agent, take the steps of a `HandlerContext`, and hand what came of them
to the settler: None for success, or the `Failure` of the one step that failed. Windows count through the plainest of
them, `NotificationHandler`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from contextvars import Context, copy_context
from functools import partial
from typing import Any

from anyio.lowlevel import checkpoint_if_cancelled
from msgspec import structs

from aviso_workers import clocks
from aviso_workers.aviso.codec import NotificationReader
from aviso_workers.aviso.notifications import Notification, Notify
from aviso_workers.backends import Delivery
from aviso_workers.declare import outputs, verdicts
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.batches import Batch, Stream
from aviso_workers.declare.verdicts import Failure, FinalError
from aviso_workers.engine import calls
from aviso_workers.engine.acknowledging import Settler
from aviso_workers.engine.calls import Timeouts
from aviso_workers.engine.flow import Flow
from aviso_workers.engine.publisher import IdempotencyKeys, Publisher
from aviso_workers.errors import InvalidNotificationError, UndecodableError

Call = Callable[[Any], Awaitable[object]]
Step = Callable[[Any], Awaitable[Failure | None]]
"""Handles the argument of an author's function. Returns None for success."""
Guard = Callable[[Step, Flow, Any], Awaitable[Failure | None]]
"""Makes a step for an argument that came from a flow."""
TIMEOUTS_OF_ALL = 2
"""A call has as many times the agent's `timeout`, with all that is around the function: when the function's own time is
over, what is around it is left as much again to roll back."""


class Outputs:
    """The outputs that an agent's function returns or yields, published before that from which it comes is settled.

    A publish that fails is a failure of the handling, as if the function had raised it. A notification that is not
    valid was certainly made by the handler, so that trying again cannot help. The same holds for a returned value that
    is no notification (`declare.outputs`). Either all that is returned is published, or nothing.
    """

    def __init__(self, agent: Agent[Any, Any], *, app: str, stream: str, publisher: Publisher) -> None:
        self._agent = agent
        self._app = app
        self._stream = stream
        self._publisher = publisher

    def keys(self) -> IdempotencyKeys:
        """Return the idempotency keys of what one task of the agent publishes."""
        return IdempotencyKeys(app=self._app, agent=self._agent.name, stream=self._stream)

    async def publish(self, output: object) -> None:
        """Publish one output. Raises `FinalError` for an invalid notification and for what is none, what a lazy output
        raises, else as `Publisher.notify` does."""
        several = () if isinstance(output, Notify) else tuple(outputs.notifications(output))
        try:
            if isinstance(output, Notify):
                await self._publisher.notify(output)
            elif several:
                await self._publisher.notify_many(several)
        except InvalidNotificationError as error:
            raise FinalError(error, reason="invalid_notification") from error

    async def run(self, argument: Any, **given: Any) -> None:
        """Run the agent's async generator: what it yields is stored when it goes on. Raises as `publish` does, and an
        exception that it yields."""
        async with aclosing(self._agent.function(argument, **given)) as yielded:
            async for output in yielded:
                if failure := verdicts.failure_returned(output):
                    raise failure.error
                await self.publish(output)


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
        self._generation = calls.forked
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
        if calls.forked != self._generation:
            calls.end_child()  # before it publishes
        return await self.publish(returned)

    async def _call_in_scope(self, argument: Any) -> Failure | None:
        """Call the function inside of what is around the agent's calls, and publish what it returns. A failure is
        raised there as an exception.
        """
        agent = self.agent
        failure: Failure | None = None
        try:
            async with calls.around(agent, {agent.form: argument}) as given:
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
        return calls.in_thread(agent)
    function: Callable[..., Awaitable[object]] = agent.function
    return function


class BatchHandler:
    """Runs `async def agent(batch: Batch[T])`: many notifications in one call, collected up to a size or a time, and
    settled one by one."""

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

    In the scope of a call (`calls.around`) an ack counts only where all of the call succeeded: a resource of the call
    may have taken back what was done for the notification.
    """
    if notification.sequence not in batch.outcomes:
        return rest
    failure = verdicts.failure_returned(batch.outcomes[notification.sequence])
    return rest if failure is None and in_scope else failure


class StreamHandler:
    """Runs `async def agent(stream: Stream[T])`, which loops over its notifications as a Faust agent does.

    A notification is settled when the loop asks for the next one. An exception concerns those that were handed out and
    not settled; they are judged like any other failure, and the function is started again with the next notification.
    """

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
