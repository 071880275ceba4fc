"""The threads in which the plain function of an agent runs, and those that run on after their call was abandoned.

Python cannot end a thread. When a call is abandoned, at its `timeout` or because a singleton's notification was lost,
its thread runs on for as long as it likes. So it goes on counting: an agent has at most `concurrency` threads, and
the workers of a call form wait for their turn before they take the next notification. With `order_by`, the key that
such a thread works on is blocked in the buffer until it ends.

When all threads of an agent have run on for a while, the agent is stuck: `subscription` gives back what waits, and
reads nothing until one of them ends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from aviso_workers.aviso.notifications import Notification
from aviso_workers.backends import Delivery
from aviso_workers.clocks import Clock, Timer
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.batches import Batch
from aviso_workers.declare.verdicts import Failure
from aviso_workers.engine.buffer import Buffer
from aviso_workers.events import Events, ThreadsFreed, ThreadsStuck

__all__ = ["Threads", "in_thread"]

STUCK_SECONDS = 5.0
"""A call that ends soon after its timeout is only slow: its agent waits for it, and keeps what it holds."""


class Threads:
    """The threads of one agent that run on after their call was abandoned."""

    def __init__(self, agent: Agent[Any, Any], *, buffer: Buffer, clock: Clock, events: Events) -> None:
        self.left_behind = 0
        """How many run on."""
        self.stuck = False
        """Whether all of them have run on for a while, so that nothing can be handled."""
        self._agent = agent.name
        self._most = agent.policy.concurrency
        self._buffer = buffer
        self._clock = clock
        self._events = events
        self._waiting = 0
        """Workers that wait until a thread ends."""
        self._changed = anyio.Event()
        self._timer: Timer | None = None
        self._closed = False

    async def wait_for_turn(self) -> None:
        """Wait until a worker may take the next notification: one worker waits for each thread that runs on."""
        while self._waiting < self.left_behind and not self._closed:
            self._waiting += 1
            try:
                await self._changed.wait()
            finally:
                self._waiting -= 1

    async def wait_for_thread(self) -> None:
        """Wait until fewer than `concurrency` run on. Only who is no worker, as for windows, finds them all busy."""
        while self.left_behind >= self._most:
            await self._changed.wait()

    async def until_stuck(self) -> None:
        """Wait until nothing can be handled."""
        while not self.stuck:
            await self._changed.wait()

    async def until_not_stuck(self) -> None:
        """Wait until something can be handled."""
        while self.stuck:
            await self._changed.wait()

    def close(self) -> None:
        """Stop, and let the tasks end that wait here."""
        self._closed = True
        self._cancel_timer()
        self._change()

    def abandon(self, call: _Call, argument: object) -> None:
        """Leave a cancelled call behind; when it runs on in its thread, count that thread until it has ended."""
        deliveries = [
            delivery
            for sequence in _sequences(argument)
            if (delivery := self._buffer.delivery_of(sequence)) is not None
        ]
        if not call.abandon(when_ended=partial(self._note_end, deliveries)):
            return
        for delivery in deliveries:
            self._buffer.block_key(delivery)
        self.left_behind += 1
        if self.left_behind >= self._most and not self._closed and self._timer is None:
            self._timer = self._clock.call_at(self._clock.monotonic() + STUCK_SECONDS, self._note_stuck)

    def _note_stuck(self) -> None:
        self.stuck = True
        self._change()
        self._events.emit(ThreadsStuck(agent=self._agent, threads=self.left_behind))

    def _note_end(self, deliveries: Sequence[Delivery]) -> None:
        self.left_behind -= 1
        for delivery in deliveries:
            self._buffer.unblock_key(delivery)
        self._cancel_timer()
        was_stuck, self.stuck = self.stuck, False
        self._change()
        if was_stuck:
            self._events.emit(ThreadsFreed(agent=self._agent))

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class _Call:
    """One call of a plain function. It is begun in a thread, and may be abandoned by the event loop meanwhile."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._runs = False
        self._abandoned = False
        self._when_ended: Callable[[], object] | None = None

    def run(self) -> object:
        """Call the function, in the thread; nothing comes of a call that was abandoned before."""
        with self._lock:
            if self._abandoned:
                return None
            self._runs = True
        try:
            return self._function()
        except GeneratorExit as error:  # asyncio would close the coroutine that waits, instead of raising it there
            return Failure(error)
        finally:
            with self._lock:
                self._runs = False
            if self._when_ended is not None:
                self._when_ended()

    def abandon(self, *, when_ended: Callable[[], None]) -> bool:
        """Return whether the function runs on; then `when_ended` is called on this event loop when it has ended."""
        loop = asyncio.get_running_loop()

        def tell() -> None:
            with suppress(RuntimeError):  # the loop has ended before the thread
                loop.call_soon_threadsafe(when_ended)

        with self._lock:
            self._abandoned = True
            if self._runs:
                self._when_ended = tell
            return self._runs


def in_thread(agent: Agent[Any, Any], *, threads: Threads | None = None) -> Callable[[Any], Awaitable[object]]:
    """Return the agent's plain function, to be run in a thread; `threads` counts those that run on when abandoned."""
    limiter = anyio.CapacityLimiter(agent.policy.concurrency)

    async def call(argument: Any, **resources: Any) -> object:
        if threads is not None:
            await threads.wait_for_thread()
        call = _Call(partial(agent.function, argument, **resources))
        try:
            returned = await anyio.to_thread.run_sync(call.run, limiter=limiter, abandon_on_cancel=True)
        except anyio.get_cancelled_exc_class():
            if threads is not None:
                threads.abandon(call, argument)
            raise
        if isinstance(returned, Failure):
            raise returned.error
        return returned

    return call


def _sequences(argument: object) -> list[int]:
    """Return the sequences of the notifications that a call works on; of a window, none."""
    match argument:
        case Notification(sequence=sequence):
            return [sequence]
        case Batch():
            return [notification.sequence for notification in argument]
    return []
