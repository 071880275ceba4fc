"""Running an author's code: what it returns, or the failure that it ends in, and its timeout.

Whatever an author's code raises is a failure of what it was called for, also what ends a program elsewhere
(`SystemExit`, `KeyboardInterrupt`). Signals do not arrive here as exceptions: `worker.ending` hears them. Nor does an
exit in a task that the code has started: it ends the event loop (`worker.process`).

Only we can cancel the code, at its timeout or when the worker stops. A cancellation that begins inside, such as that of
a task which the code awaits, would pass for one of ours and end the worker's tasks one by one, without a word: it is a
failure. One of ours that the code catches and does not raise again is raised here: the call was not finished, and
nothing that it returned counts.

What the code sets of context variables, such as a tenant or what structlog binds, holds for its call and not for the
next one of the same task. A task for each call would do that, and costs ten times as much as an `in_context`.

A child that the code has forked, and that comes back from the code, is a copy of the worker. It would go on as the
worker does, on the same connection and with the same event loop, whose list of sockets it shares with its parent: the
parent would hear of no message any more. So it ends here, where the author's code has ended in it, or waits for
something on the event loop.

An async function is cancelled at its timeout. But Python cannot end a thread, so a plain function runs on; and some
awaits cannot be cancelled: `anyio.to_thread`, a shielded scope, a loop that catches the cancellation and goes on. Such
a call keeps what it has until it has ended: its slot of `concurrency`, its notification, which goes on being reported
in progress, and with `order_by` its key. Then it fails with `TimeoutError`, whatever the function returned. If the
notification were given back before that, it would be handled a second time while the first call still runs. Only a
worker that stops abandons such calls, when its drain timeout is over.

When all calls of an agent have run on for `HUNG_SECONDS`, the agent is stuck: `subscription` gives back the
notifications that wait, and asks for no more until one of the calls ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import Context, copy_context
from functools import partial
from types import TracebackType, coroutine
from typing import Any, NoReturn, TypeVar, cast

import anyio
import anyio.to_thread
from anyio.lowlevel import checkpoint_if_cancelled

from aviso_workers import event_loops
from aviso_workers.clocks import Clock, ScheduledCall
from aviso_workers.declare import outputs
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.around import Around
from aviso_workers.declare.dependencies import OWN_TIMEOUT
from aviso_workers.declare.resources import Needing, Resource
from aviso_workers.declare.verdicts import Failure, FinalError, OtherVersionError, ReadOtherwiseError
from aviso_workers.events import CallOverdue, CallsAbandoned, CallsFreed, CallsStuck, Events

A = TypeVar("A")
R = TypeVar("R")

AWAITS = (
    "a forked child of this worker cannot await: the event loop is its parent's. Run the child's code by "
    "multiprocessing or subprocess, or end it by os._exit before it awaits"
)
forked = 0
"""How many forks lie between the first process and this one. Code in which it changes has forked, and is the child."""
HUNG_SECONDS = 5.0
"""A call that runs on for so long after its timeout has hung. One that ends sooner is only slow, and is not logged."""


def end_child(error: BaseException | None = None) -> NoReturn:
    """End this process as Python ends one whose program has ended, or has ended in this error; close nothing."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        code = 1
        traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed, or there is none
            code = code or 1
    os._exit(code & 0xFF)


def _count_fork() -> None:
    global forked
    forked += 1


os.register_at_fork(after_in_child=_count_fork)


async def call(function: Callable[[A], Awaitable[R]], argument: A) -> R:
    """Return what the function returns, unless it was cancelled meanwhile; then be cancelled."""
    returned: R | None
    generation = forked
    try:
        returned = await function(argument)
        if forked != generation:
            end_child()
        if (task := asyncio.current_task()) and task.cancelling():
            await _raise_cancellation()
        return returned
    except BaseException as error:
        if forked != generation:
            end_child(error)
        raise
    finally:
        returned = None  # it may be a failure: the frames of its traceback lead to this one, and would be kept with it


async def attempt(step: Callable[[A], Awaitable[R]], argument: A) -> R | Failure:
    """Return what the step returns, or the failure that it ended in."""
    return await runner(step)(argument)


async def attempt_apart(step: Callable[[A], Awaitable[R]], argument: A) -> R | Failure:
    """Return what `attempt` returns. The step runs in a context of its own: what it sets of context variables ends with
    it.
    """
    return await in_context(copy_context(), partial(attempt, step), argument)


@coroutine
def in_context(context: Context, function: Callable[[A], Awaitable[R]], argument: A) -> Generator[Any, Any, R]:
    """Return what the function returns, which runs in this context and in the present task."""
    run, generation = context.run, forked
    called = function(argument)  # kept in a variable: `worker.ending` reads in it where the code waits
    steps = called.__await__()
    try:
        awaited = run(next, steps)
        while True:
            if forked != generation:
                end_child(RuntimeError(AWAITS))
            try:
                answer = yield awaited
            except BaseException as error:
                awaited = run(steps.throw, error)
            else:
                awaited = run(steps.send, answer)
    except StopIteration as returned:
        return cast("R", returned.value)  # kept in no variable: of a failure, the frames of the traceback lead to here
    finally:
        awaited = None  # the future of a thread has a failure too


def runner(step: Callable[[A], Awaitable[R]]) -> Callable[[A], Awaitable[R | Failure]]:
    """Return a function that does what `attempt` does with this step. It is for many calls, from this task only."""
    task = asyncio.current_task()
    assert task is not None
    return partial(_attempt, step, task, forked)


async def _attempt(
    step: Callable[[A], Awaitable[R]], task: asyncio.Task[Any], generation: int, argument: A
) -> R | Failure:
    returned: R | None
    try:
        returned = await step(argument)
        if forked != generation:
            end_child()
        if task.cancelling():
            await _raise_cancellation()
        return returned
    except FinalError as found:
        return Failure(found.error, final=found.reason)
    except OtherVersionError as found:
        return Failure(found.error, other_version=True)
    except asyncio.CancelledError as error:
        await _raise_cancellation()
        return Failure(event_loops.cancelled_from_within(error))
    except BaseException as error:
        if forked != generation:
            end_child(error)
        if task.cancelling():
            await _raise_cancellation()
        return _failed(error)
    finally:
        returned = None  # of a failure, the frames of the traceback lead to this one, and would be kept with it


def _failed(error: BaseException) -> Failure:
    """Return the failure of a call; where an output is refused, also inside a task group, it is of another version."""
    inside = [error]
    while inside:  # a group may be nested too deeply for its own methods
        found = inside.pop()
        if issubclass(type(found), ReadOtherwiseError):
            return Failure(found, other_version=True)
        if issubclass(type(found), BaseExceptionGroup):
            inside.extend(BaseExceptionGroup.exceptions.__get__(found))
    return Failure(error)


async def _raise_cancellation() -> None:
    """Be cancelled where we have been cancelled, whatever the code has made of it."""
    await checkpoint_if_cancelled()
    task = asyncio.current_task()
    if task is None or not task.cancelling():
        return
    # The code has cancelled its own task, which is ours: that must not reach what we await next.
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
    while task.cancelling():
        task.uncancel()


def in_thread(agent: Agent[Any, Any]) -> Callable[..., Awaitable[object]]:
    """Return an async function that runs the agent's plain function in a thread.

    The thread runs on when the call is cancelled (`Timeouts`).
    """
    limiter = anyio.CapacityLimiter(agent.policy.concurrency)

    async def call(argument: Any, **resources: Any) -> object:
        run = partial(_run_in_thread, partial(agent.function, argument, **resources))
        returned = await anyio.to_thread.run_sync(run, limiter=limiter, abandon_on_cancel=True)
        if not isinstance(returned, Failure):
            return returned
        try:
            raise returned.error
        finally:
            del returned  # else the error, whose traceback has this frame, would be kept until the next collection

    return call


def _run_in_thread(function: Callable[[], object]) -> object:
    """Return what the function returns, or its failure: an exception that a future hands on is kept by it, and the
    future by a frame of the exception's traceback. A `GeneratorExit` would be taken for the end of who waits.
    """
    generation = forked
    try:
        returned = function()
        # A lazy output, such as a `map`, still has to run the author's code: in this thread as well.
        returned = list(outputs.each_of(returned)) if isinstance(returned, Iterator) else returned
        if forked != generation:
            end_child()
        return returned
    except BaseException as error:
        if forked != generation:
            end_child(error)
        return Failure(error)


@asynccontextmanager
async def around(needing: Needing, called_with: Mapping[type, Any]) -> AsyncIterator[dict[str, Any]]:
    """Open what is around a call of an agent or timer, and yield the values of its function's further arguments: the
    functions of `@app.around`, and the resources of scope `call`.

    An exception that ends the call is raised at the `yield` of each, from the innermost to the outermost. A function of
    `@app.around` may catch it and end; then the call has succeeded for all that is outside of it. A resource may not
    decide that: the exception goes on also where a resource catches it, because the notification would be acked, and so
    lost, when a resource rolls back and forgets to raise the exception again.

    `called_with` has the function's first argument by its form, such as `Notification`; it is empty for a timer.
    """
    values: dict[Any, Any] = dict(called_with)
    async with AsyncExitStack() as stack:
        for each in needing.around:
            given = {name: values[wanted] for name, wanted in each.needs.items()}
            values[each.gives] = await stack.enter_async_context(Opened(each, given))
        yield {name: values[wanted] for name, wanted in needing.needs.items()}


class Opened:
    """A context manager that runs one of these generators up to its `yield`, and after the block to its end.

    Raises RuntimeError where it does not yield exactly once.
    """

    def __init__(self, resource: Resource, given: Mapping[str, Any]) -> None:
        self._resource = resource
        self._generator: Any = resource.function(**given)

    async def __aenter__(self) -> Any:
        try:
            return await anext(self._generator)
        except StopAsyncIteration:
            raise self._not_once("it did not yield") from None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        try:
            await (anext(self._generator) if error is None else self._generator.athrow(error))
        except StopAsyncIteration:
            return error is not None and isinstance(self._resource, Around)
        except BaseException as raised:
            # A StopAsyncIteration that leaves a generator is turned into a RuntimeError with it as the cause.
            if raised is error or (isinstance(error, StopAsyncIteration) and raised.__cause__ is error):
                error.__traceback__ = traceback
                return False
            raise
        await self._generator.aclose()
        raise self._not_once("it yielded twice")

    def _not_once(self, found: str) -> RuntimeError:
        return RuntimeError(f"{self._resource.label} has to yield once: {found}")


class Timeouts:
    """Makes the calls of one agent end at their timeout, and knows which of them run on."""

    def __init__(self, agent: Agent[Any, Any], *, clock: Clock, events: Events) -> None:
        self._agent = agent
        self._most = 1 if agent.policy.window else agent.policy.concurrency
        """How many calls run at a time at most; a worker runs the function for one window after another."""
        self._clock = clock
        self._events = events
        self._late: dict[object, _Late] = {}
        """The calls that run on after their timeout."""
        self._changed = anyio.Event()

    @property
    def overdue(self) -> int:
        """How many calls run on after their timeout."""
        return len({late.argument for late in tuple(self._late.values())})

    @property
    def stuck(self) -> bool:
        """Whether all calls have hung, so that the agent can handle nothing."""
        return self._hung >= self._most

    @property
    def _hung(self) -> int:
        """How many calls have hung. A function and what is around it are one call."""
        return len({late.argument for late in self._late.values() if late.hung})

    async def until_stuck(self) -> None:
        """Wait until the agent is stuck."""
        while not self.stuck:
            await self._changed.wait()

    async def until_not_stuck(self) -> None:
        """Wait until the agent is not stuck."""
        while self.stuck:
            await self._changed.wait()

    def tell_abandoned(self, sequences: Sequence[int]) -> None:
        """State that these notifications were given back although their calls still run."""
        self._events.emit(CallsAbandoned(agent=self._agent.name, sequences=sequences))

    def limit(
        self, function: Callable[[A], Awaitable[R]], timeout_seconds: float | None
    ) -> Callable[[A], Awaitable[R]]:
        """Return the function, which is cancelled at its timeout if it can be cancelled.

        Raises TimeoutError when it has ended after its timeout, also where it catches its cancellation and returns: it
        was not left the time to say that it is done.
        """
        if timeout_seconds is None:
            return function
        limited = self._call_cancelled if self._agent.can_be_cancelled else self._call
        return partial(limited, function, timeout_seconds)

    async def _call_cancelled(self, function: Callable[[A], Awaitable[R]], timeout_seconds: float, argument: A) -> R:
        with anyio.CancelScope() as scope:
            timer = self._time(timeout_seconds, partial(self._cancel, scope, argument))
            returned: R | None
            try:
                returned = await call(function, argument)
                if not scope.cancel_called:
                    return returned
            finally:
                returned = None  # it may be a failure: see above
                timer.cancel()
                if self._late:
                    self._note_end(scope)
        raise _late(timeout_seconds)

    async def _call(self, function: Callable[[A], Awaitable[R]], timeout_seconds: float, argument: A) -> R:
        running, has_ended = object(), False
        timer = self._time(timeout_seconds, partial(self._note_late, running, argument))
        try:
            returned = await call(function, argument)
            has_ended = True
        except Exception as error:
            has_ended = True
            if running in self._late:
                raise _late(timeout_seconds) from error
            raise
        finally:
            timer.cancel()
            in_time = not self._note_end(running, has_ended=has_ended)  # else it was cancelled, and its thread runs on
        if in_time:
            return returned
        raise _late(timeout_seconds)

    def _time(self, seconds: float, then: Callable[[], None]) -> ScheduledCall:
        return self._clock.call_at(self._clock.monotonic() + seconds, then)

    def _cancel(self, scope: anyio.CancelScope, argument: object) -> None:
        scope.cancel()
        self._note_late(scope, argument)

    def _note_late(self, call: object, argument: object) -> None:
        self._late[call] = late = _Late(argument)
        late.timer = self._time(HUNG_SECONDS, partial(self._note_hung, late))

    def _note_hung(self, late: _Late) -> None:
        before = self._hung
        late.hung = True
        if self._hung == before:
            return
        self._change()
        agent, in_thread = self._agent.name, self._agent.in_thread
        if self.stuck:
            self._events.emit(CallsStuck(agent=agent, calls=self._hung, in_thread=in_thread))
        else:
            timeout_seconds = self._agent.policy.timeout or 0.0
            self._events.emit(CallOverdue(agent=agent, timeout_seconds=timeout_seconds, in_thread=in_thread))

    def _note_end(self, call: object, *, has_ended: bool = True) -> bool:
        """Note that a call has ended or is waited for no longer, and return whether it was late."""
        if call not in self._late:
            return False
        was_stuck = self.stuck
        self._late.pop(call).timer.cancel()
        self._change()
        goes_on = has_ended or self._agent.policy.singleton  # whose call is cancelled also when it is taken over
        if goes_on and was_stuck and not self.stuck:
            self._events.emit(CallsFreed(agent=self._agent.name, in_thread=self._agent.in_thread))
        return True

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class _Late:
    """A call that runs on after its timeout."""

    timer: ScheduledCall
    """Notes that the call has hung."""

    def __init__(self, argument: object) -> None:
        self.argument = id(argument)
        """Is the same for the function and for what is around it."""
        self.hung = False


def _late(timeout_seconds: float) -> TimeoutError:
    error = TimeoutError(f"not done within {timeout_seconds:g} s")
    setattr(error, OWN_TIMEOUT, True)
    return error
