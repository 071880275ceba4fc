"""The threads in which the plain function of an agent runs, and those that run on after their timeout.

Python cannot end a thread. So a call whose time is over keeps what it has until its thread has ended: its slot of
`concurrency`, its notification, which goes on being reported in progress, and with `order_by` its key. When the thread
ends, the call fails with `TimeoutError`, whatever the function returned. If the notification were given back before
that, it would be handled a second time while the thread still runs. Only a worker that stops abandons threads, when its
drain timeout is over.

When all threads of an agent have run on for `HUNG_SECONDS`, the agent is stuck: `subscription` gives back the
notifications that wait, and asks for no more until one of the threads ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from aviso_workers.clocks import Clock, Timer
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.verdicts import Failure
from aviso_workers.declare.windows import Window
from aviso_workers.engine import calls
from aviso_workers.events import Events, ThreadOverdue, ThreadsFreed, ThreadsStuck

__all__ = ["Threads", "in_thread"]

HUNG_SECONDS = 5.0
"""A call that runs on for so long after its timeout has hung. One that ends sooner is only slow, and is not logged."""


class Threads:
    """Calls the plain function of one agent, and knows which of its threads run on after their timeout."""

    def __init__(self, agent: Agent[Any, Any], *, clock: Clock, events: Events) -> None:
        self.overdue = 0
        """How many threads run on after their timeout."""
        self._hung = 0
        """How many of these have run on for `HUNG_SECONDS`."""
        self._agent = agent.name
        self._most = 1 if agent.form is Window else agent.policy.concurrency
        """How many calls run at a time at most; a worker runs the function for one window after another."""
        self._clock = clock
        self._events = events
        self._changed = anyio.Event()

    @property
    def stuck(self) -> bool:
        """Whether all threads have hung, so that the agent can handle nothing."""
        return self._hung >= self._most

    async def until_stuck(self) -> None:
        """Wait until the agent is stuck."""
        while not self.stuck:
            await self._changed.wait()

    async def until_not_stuck(self) -> None:
        """Wait until the agent is not stuck."""
        while self.stuck:
            await self._changed.wait()

    async def call(
        self, function: Callable[[Any], Awaitable[object]], timeout_seconds: float, argument: object
    ) -> object:
        """Call a function that cannot be cancelled, and return what it returns.

        Raises TimeoutError where the function ended after its timeout; it is raised when the function has ended.
        """
        call = _Call(timeout_seconds)
        call.timer = self._clock.call_at(self._clock.monotonic() + timeout_seconds, partial(self._note_overdue, call))
        try:
            returned = await calls.call(function, argument)
        except Exception as error:
            if call.overdue:
                raise call.late() from error
            raise
        finally:
            call.timer.cancel()
            if call.overdue:
                self._note_end(call)
        if call.overdue:
            raise call.late()
        return returned

    def _note_overdue(self, call: _Call) -> None:
        call.overdue = True
        self.overdue += 1
        call.timer = self._clock.call_at(self._clock.monotonic() + HUNG_SECONDS, partial(self._note_hung, call))

    def _note_hung(self, call: _Call) -> None:
        call.hung = True
        self._hung += 1
        self._change()
        if self.stuck:
            self._events.emit(ThreadsStuck(agent=self._agent, threads=self._hung))
        else:
            self._events.emit(ThreadOverdue(agent=self._agent, timeout_seconds=call.timeout_seconds))

    def _note_end(self, call: _Call) -> None:
        was_stuck = self.stuck
        self.overdue -= 1
        self._hung -= call.hung
        self._change()
        if was_stuck and not self.stuck:
            self._events.emit(ThreadsFreed(agent=self._agent))

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class _Call:
    """One call: whether it is over its timeout, and whether it has hung."""

    timer: Timer
    """Notes at the timeout that the call is overdue, and `HUNG_SECONDS` later that it has hung."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.overdue = self.hung = False

    def late(self) -> TimeoutError:
        return TimeoutError(f"not done within {self.timeout_seconds:g} s")


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
        returned = function()
        # A lazy output, such as a `map`, still has to run the author's code: in this thread as well.
        return list(returned) if isinstance(returned, Iterator) else returned
    except GeneratorExit as error:  # raised in the coroutine that waits, asyncio would take it for that one's end
        return Failure(error)
