"""The threads in which the plain function of an agent runs. What runs on after its timeout is in `timeouts`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from aviso_workers.declare.agents import Agent
from aviso_workers.declare.verdicts import Failure

__all__ = ["in_thread"]


def in_thread(agent: Agent[Any, Any]) -> Callable[..., Awaitable[object]]:
    """Return an async function that runs the agent's plain function in a thread.

    The thread runs on when the call is cancelled.
    """
    limiter = anyio.CapacityLimiter(agent.policy.concurrency)

    async def call(argument: Any, **resources: Any) -> object:
        run = partial(_run, partial(agent.function, argument, **resources))
        returned = await anyio.to_thread.run_sync(run, limiter=limiter, abandon_on_cancel=True)
        if isinstance(returned, Failure):
            raise returned.error
        return returned

    return call


def _run(function: Callable[[], object]) -> object:
    try:
        return function()
    except GeneratorExit as error:  # raised in the coroutine that waits, asyncio would take it for that one's end
        return Failure(error)
