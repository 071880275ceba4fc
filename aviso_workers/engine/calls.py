"""Running an author's code: what it returns, or the failure that it ends in.

Whatever an author's code raises is a failure of what it was called for, also what ends a program elsewhere
(`SystemExit`, `KeyboardInterrupt`). Signals do not arrive here as exceptions: `serve` listens to them. Nor does an exit
in a task that the code has started: it ends the event loop (`worker.loops`).

Only we can cancel the code, at its timeout or when the worker stops. A cancellation that begins inside, such as that of
a task which the code awaits, would pass for one of ours and end the worker's tasks one by one, without a word: it is a
failure. One of ours that the code catches and does not raise again is raised here: the call was not finished, and
nothing that it returned counts.

What the code sets of context variables, such as a tenant or what structlog binds, holds for its call and not for the
next one of the same task. A task for each call would do that, and costs ten times as much as an `in_context`.

A child that the code has forked ends here (`forks`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from types import coroutine
from typing import Any, TypeVar, cast

from anyio.lowlevel import checkpoint_if_cancelled

from aviso_workers.declare.verdicts import Failure, FinalError, OtherVersionError
from aviso_workers.engine import forks

A = TypeVar("A")
R = TypeVar("R")

AWAITS = (
    "a forked child of this worker cannot await: the event loop is its parent's. Run the child's code by "
    "multiprocessing or subprocess, or end it by os._exit before it awaits"
)


async def call(function: Callable[[A], Awaitable[R]], argument: A) -> R:
    """Return what the function returns, unless it was cancelled meanwhile; then be cancelled."""
    returned: R | None
    generation = forks.generation
    try:
        returned = await function(argument)
        if forks.generation != generation:
            forks.end_child()
        if (task := asyncio.current_task()) and task.cancelling():
            await _raise_cancellation()
        return returned
    except BaseException as error:
        if forks.generation != generation:
            forks.end_child(error)
        raise
    finally:
        returned = None  # it may be a failure: the frames of its traceback lead to this one, and would be kept with it


async def attempt(step: Callable[[A], Awaitable[R]], argument: A) -> R | Failure:
    """Return what the step returns, or the failure that it ended in."""
    return await runner(step)(argument)


async def attempt_apart(step: Callable[[A], Awaitable[R]], argument: A) -> R | Failure:
    """Do the same in a context of its own: what the step sets of context variables is not seen after it."""
    return await in_context(copy_context(), partial(attempt, step), argument)


@coroutine
def in_context(context: Context, function: Callable[[A], Awaitable[R]], argument: A) -> Generator[Any, Any, R]:
    """Return what the function returns, which runs in this context and in the present task."""
    run, generation = context.run, forks.generation
    called = function(argument)  # kept in a variable: `worker.ending` reads in it where the code waits
    steps = called.__await__()
    try:
        awaited = run(next, steps)
        while True:
            if forks.generation != generation:
                forks.end_child(RuntimeError(AWAITS))
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
    """Return what does `attempt` with this step, for many calls from this task and no other."""
    task = asyncio.current_task()
    assert task is not None
    return partial(_attempt, step, task, forks.generation)


async def _attempt(
    step: Callable[[A], Awaitable[R]], task: asyncio.Task[Any], generation: int, argument: A
) -> R | Failure:
    returned: R | None
    try:
        returned = await step(argument)
        if forks.generation != generation:
            forks.end_child()
        if task.cancelling():
            await _raise_cancellation()
        return returned
    except FinalError as found:
        return Failure(found.error, final=found.reason)
    except OtherVersionError as found:
        return Failure(found.error, other_version=True)
    except asyncio.CancelledError as error:
        await _raise_cancellation()
        return Failure(_cancelled_from_within(error))
    except BaseException as error:
        if forks.generation != generation:
            forks.end_child(error)
        if task.cancelling():
            await _raise_cancellation()
        return Failure(error)
    finally:
        returned = None  # of a failure, the frames of the traceback lead to this one, and would be kept with it


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


def _cancelled_from_within(error: BaseException) -> Exception:
    failure = RuntimeError("cancelled from within: something that it awaited was cancelled")
    failure.__cause__ = error
    return failure.with_traceback(error.__traceback__)
