"""The timeout of an agent's calls, and the calls that run on after it.

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

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import anyio

from aviso_workers.clocks import Clock, ScheduledCall
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.dependencies import OWN_TIMEOUT
from aviso_workers.engine import calls
from aviso_workers.events import CallOverdue, CallsAbandoned, CallsFreed, CallsStuck, Events

A = TypeVar("A")
R = TypeVar("R")

HUNG_SECONDS = 5.0
"""A call that runs on for so long after its timeout has hung. One that ends sooner is only slow, and is not logged."""


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
        call = self._call_cancelled if self._agent.can_be_cancelled else self._call
        return partial(call, function, timeout_seconds)

    async def _call_cancelled(self, function: Callable[[A], Awaitable[R]], timeout_seconds: float, argument: A) -> R:
        with anyio.CancelScope() as scope:
            timer = self._time(timeout_seconds, partial(self._cancel, scope, argument))
            returned: R | None
            try:
                returned = await calls.call(function, argument)
                if not scope.cancel_called:
                    return returned
            finally:
                returned = None  # it may be a failure: see `calls`
                timer.cancel()
                if self._late:
                    self._note_end(scope)
        raise _late(timeout_seconds)

    async def _call(self, function: Callable[[A], Awaitable[R]], timeout_seconds: float, argument: A) -> R:
        call, has_ended = object(), False
        timer = self._time(timeout_seconds, partial(self._note_late, call, argument))
        try:
            returned = await calls.call(function, argument)
            has_ended = True
        except Exception as error:
            has_ended = True
            if call in self._late:
                raise _late(timeout_seconds) from error
            raise
        finally:
            timer.cancel()
            in_time = not self._note_end(call, has_ended=has_ended)  # else it was cancelled, and its thread runs on
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
