"""Agents and tasks kept running: opened, watched, opened again after a wait, stopped in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import anyio

from aviso_workers.agents import Agent, Task
from aviso_workers.backends import Backend
from aviso_workers.engine import calling
from aviso_workers.engine.provisioning import Provisioner
from aviso_workers.engine.pulling import AgentRun
from aviso_workers.errors import BackendError, NotFoundError
from aviso_workers.events import AgentDisturbed, AgentStarted, AgentStopped, Events, TaskFailed
from aviso_workers.streams import ConsumerSpec, StreamSpec

__all__ = ["supervise_agent", "supervise_task"]

LONGEST_WAIT_SECONDS = 10.0
HEALTHY_SECONDS = 30.0
"""Who ran for so long before failing starts again without a wait that has grown."""
SETTLE_TIMEOUT_SECONDS = 5.0


async def supervise_agent(
    agent: Agent[Any, Any],
    run: AgentRun,
    *,
    backend: Backend,
    provisioner: Provisioner,
    stream: StreamSpec,
    consumer: ConsumerSpec,
    events: Events,
    stop: anyio.Event,
    drain_timeout_seconds: float,
) -> None:
    """Run the agent until `stop`, then let it finish. A lost consumer or stream is made anew."""
    drained = anyio.Event()

    async def read(delays: _Delays) -> None:
        await provisioner.ensure(stream)
        await backend.ensure_consumer(stream.name, consumer)
        async with backend.consume(stream.name, consumer.durable_name, deliver=run.deliver, room=run.room) as opened:
            run.attach(opened)
            events.emit(AgentStarted(agent=agent.name, stream=stream.name, consumer=consumer.durable_name))
            delays.started()
            try:
                await _until(stop, opened.lost)
                await opened.stop()
                await drained.wait()
                # What does not get through is delivered again: late, but not lost.
                with anyio.move_on_after(SETTLE_TIMEOUT_SECONDS), suppress(BackendError):
                    await opened.settled()
            finally:
                run.attach(None)

    async def keep_reading() -> None:
        delays = _Delays()
        while not stop.is_set():
            try:
                await read(delays)
            except BackendError as error:
                if isinstance(error, NotFoundError):
                    provisioner.forget(stream.name)
                delay = delays.next()
                events.emit(AgentDisturbed(agent=agent.name, error=error, again_in_seconds=delay))
                with anyio.move_on_after(delay):
                    await stop.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_reading)
        await run.work(stop=stop, drain_timeout_seconds=drain_timeout_seconds)
        drained.set()
    events.emit(AgentStopped(agent=agent.name, finished=run.finished, returned=run.returned))


async def supervise_task(task: Task, app: Any, *, events: Events, stop: anyio.Event) -> None:
    """Run the task until `stop`; when it raises, start it again after a wait. One that returns is done."""
    delays = _Delays()
    while not stop.is_set():
        delays.started()
        try:
            await _until(stop, lambda: calling.call(task.function, app))
        except Exception as error:
            delay = delays.next()
            events.emit(TaskFailed(task=task.name, error=error, again_in_seconds=delay))
            with anyio.move_on_after(delay):
                await stop.wait()
        else:
            return


async def _until(stop: anyio.Event, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run the function; `stop` cancels it."""
    error: Exception | None = None

    async def run(scope: anyio.CancelScope) -> None:
        nonlocal error
        try:
            await function()
        except Exception as raised:
            error = raised  # raised below, outside of the group, so that it arrives as itself
        scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, tasks.cancel_scope)
        await stop.wait()
        tasks.cancel_scope.cancel()
    if error is not None:
        raise error


class _Delays:
    """Waits that double, and begin anew after a healthy run."""

    def __init__(self) -> None:
        self._next = 0.1
        self._started = anyio.current_time()

    def started(self) -> None:
        self._started = anyio.current_time()

    def next(self) -> float:
        if anyio.current_time() - self._started > HEALTHY_SECONDS:
            self._next = 0.1
        self._started = math.inf
        delay, self._next = self._next, min(LONGEST_WAIT_SECONDS, self._next * 2)
        return delay
