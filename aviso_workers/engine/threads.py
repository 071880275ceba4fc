"""The threads in which the plain function of an agent runs. What runs on after its timeout is in `timeouts`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from aviso_workers.declare import outputs
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.verdicts import Failure
from aviso_workers.engine import forks


def in_thread(agent: Agent[Any, Any]) -> Callable[..., Awaitable[object]]:
    """Return an async function that runs the agent's plain function in a thread.

    The thread runs on when the call is cancelled.
    """
    limiter = anyio.CapacityLimiter(agent.policy.concurrency)

    async def call(argument: Any, **resources: Any) -> object:
        run = partial(_run, partial(agent.function, argument, **resources))
        returned = await anyio.to_thread.run_sync(run, limiter=limiter, abandon_on_cancel=True)
        if not isinstance(returned, Failure):
            return returned
        try:
            raise returned.error
        finally:
            del returned  # else the error, whose traceback has this frame, would be kept until the next collection

    return call


def _run(function: Callable[[], object]) -> object:
    """Return what the function returns, or its failure: an exception that a future hands on is kept by it, and the
    future by a frame of the exception's traceback. A `GeneratorExit` would be taken for the end of who waits.
    """
    generation = forks.generation
    try:
        returned = function()
        # A lazy output, such as a `map`, still has to run the author's code: in this thread as well.
        returned = list(outputs.each_of(returned)) if isinstance(returned, Iterator) else returned
        if forks.generation != generation:
            forks.end_child()
        return returned
    except BaseException as error:
        if forks.generation != generation:
            forks.end_child(error)
        return Failure(error)
