"""One worker process, wired: configuration, logs, status port, connection, agents and tasks, signals.

The order is the design. The status port answers before the connection is tried, so that a worker that waits is seen;
the connection closes after the last agent has settled what it held.
"""

from __future__ import annotations

import importlib.util
import itertools
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import anyio
import structlog
from anyio.abc import TaskStatus

from aviso_workers.app import App
from aviso_workers.declare.agents import Agent
from aviso_workers.engine.session import Session
from aviso_workers.errors import BackendError, ConfigError, ResourceError
from aviso_workers.events import (
    AgentDisturbed,
    AgentStarted,
    ConnectionChanged,
    DeadLettersRefused,
    DeadLettersStored,
    Event,
    LeadershipHindered,
    LeadershipUnhindered,
    NotReadAgain,
    ReadAgain,
    Settled,
    ThreadsFreed,
    ThreadsStuck,
)
from aviso_workers.worker import logs
from aviso_workers.worker.failure_logs import FailureLog
from aviso_workers.worker.fleet_process import Member
from aviso_workers.worker.metrics import Metrics
from aviso_workers.worker.status import Health, StatusServer

__all__ = ["run", "serve"]

log = structlog.get_logger("aviso_workers")

LAG_SECONDS = 2.0
"""How often it is asked what an agent has left to do, unless there are many."""
MOST_ASKED_PER_SECOND = 40
"""Of all agents together."""
DEAD_LETTERS = "dead letters"
THREADS = "threads"
BODIES = "bodies"
"""What an agent lacks beside a stream that it reads; no stream has such a name."""


def run(app: App, *, status_port: int | None = None, member: Member | None = None) -> None:
    """Run `serve` on an event loop of its own: uvloop's, where that is installed."""
    anyio.run(
        lambda: serve(app, status_port=status_port, member=member),
        backend_options={"use_uvloop": importlib.util.find_spec("uvloop") is not None},
    )


async def serve(app: App, *, status_port: int | None = None, member: Member | None = None) -> None:
    """Run the app's agents and tasks until SIGTERM or SIGINT; a second one cancels what still runs.

    The first one is enough while nothing runs because the connection is still being made. A `member` of a fleet also
    stops when it is recycled, tells its supervisor where its status port is, and has its name on every line of the log.

    Raises `ConfigError` with every mistake before anything connects, `BackendError` when the connection cannot be
    made or is lost for good, `ResourceError` when a resource cannot be opened.
    """
    if mistakes := app.mistakes():
        raise ConfigError(mistakes)
    # Aviso's defaults are meant for a process that somebody watches: a worker waits for its servers without end.
    app.configure(app.config.with_defaults(retry_attempts=sys.maxsize, max_reconnect_attempts=0))
    settings = app.config.workers
    logs.configure(settings.logging)
    if member is not None:
        structlog.contextvars.bind_contextvars(process=member.name)
        app.events.listen(member.observe, Settled)
    readiness = _Readiness(app)
    health = readiness.health
    metrics = Metrics(app, ready=lambda: not health.unready, loop_lag_seconds=health.late_seconds)
    failures = FailureLog()
    app.events.listen(logs.observe, *logs.OBSERVED)
    app.events.listen(failures.observe, Settled)
    app.events.listen(metrics.observe)
    app.events.listen(
        readiness.observe,
        ConnectionChanged,
        AgentStarted,
        AgentDisturbed,
        DeadLettersRefused,
        DeadLettersStored,
        ThreadsStuck,
        ThreadsFreed,
        NotReadAgain,
        ReadAgain,
        LeadershipHindered,
        LeadershipUnhindered,
    )
    port = settings.status.port if status_port is None else status_port
    host, port = (settings.status.host, port) if member is None else ("127.0.0.1", 0)  # the fleet's supervisor asks
    token = settings.status.token
    with StatusServer(host=host, port=port, health=health, metrics=metrics.render, token=token) as status:
        if member is not None:
            member.announce(status.url)
        await _work(app, readiness, metrics, failures, status_url=status.url, member=member)
    log.info("worker.stopped", app=app.name)


async def _work(
    app: App,
    readiness: _Readiness,
    metrics: Metrics,
    failures: FailureLog,
    *,
    status_url: str,
    member: Member | None,
) -> None:
    connected, stop = anyio.Event(), anyio.Event()
    failure: BackendError | ResourceError | None = None
    async with anyio.create_task_group() as watching:
        await watching.start(_obey_signals, connected, stop, readiness, watching.cancel_scope)
        watching.start_soon(readiness.health.keep_turning)
        watching.start_soon(failures.keep_counting)
        for warning in app.warnings():  # whoever reads the first line of the log may tell the worker to stop
            log.warning("config.warning", text=warning)
        log.info("worker.started", app=app.name, agents=[agent.name for agent in app.agents], status=status_url)
        try:
            async with app:
                connected.set()
                watching.start_soon(_measure_lag, app.agents, app.session, metrics)
                if member is not None:
                    watching.start_soon(_leave_when_recycled, member, stop, readiness)
                await app.work(stop)
        except (BackendError, ResourceError) as error:
            failure = error  # raised below, outside of the group, so that it arrives as itself
        watching.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _obey_signals(
    connected: anyio.Event,
    stop: anyio.Event,
    readiness: _Readiness,
    everything: anyio.CancelScope,
    *,
    task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        told = False
        async for number in signals:
            if told or not connected.is_set():
                log.warning("worker.cancelled", signal=number.name)
                everything.cancel()
                return
            log.info("worker.stopping", signal=number.name)
            told = True
            readiness.stop()
            stop.set()


async def _leave_when_recycled(member: Member, stop: anyio.Event, readiness: _Readiness) -> None:
    reason = await member.until_recycled()
    log.info("worker.stopping", reason=reason)
    readiness.stop()
    stop.set()


async def _measure_lag(agents: Sequence[Agent[Any, Any]], session: Session, metrics: Metrics) -> None:
    wait = max(LAG_SECONDS / max(1, len(agents)), 1 / MOST_ASKED_PER_SECOND)
    for agent in itertools.cycle(agents):
        with suppress(BackendError):  # not made yet, or not reachable: the gauges keep what was last known
            metrics.lag(agent.name, await session.consumer_info(agent))
        await session.backend.clock.sleep(wait)


class _Readiness:
    """Ready means: connected, every agent reads, also again, has a thread and can store dead letters, this worker could
    lead, and nobody stops it.
    """

    def __init__(self, app: App) -> None:
        self.health = Health()
        self._agents = {(agent.name, ""): "has not started" for agent in app.agents}
        self._hindered: dict[str, str] = {}
        """By bucket, why this worker cannot lead."""
        self._connection = "not connected yet"
        self._stopping = False
        self._say()

    def observe(self, event: Event) -> None:
        match event:
            case ConnectionChanged(connected=True):
                self._connection = ""
            case ConnectionChanged(reason=reason):
                self._connection = f"not connected: {reason}"
            case AgentStarted(agent=agent, stream=stream):
                self._agents.pop((agent, ""), None)
                self._agents.pop((agent, stream), None)
            case AgentDisturbed(agent=agent, stream=stream, error=error):
                self._agents[agent, stream] = str(error)
            case DeadLettersRefused(agent=agent, error=error):
                self._agents[agent, DEAD_LETTERS] = f"dead letters cannot be stored: {error}"
            case DeadLettersStored(agent=agent):
                self._agents.pop((agent, DEAD_LETTERS), None)
            case ThreadsStuck(agent=agent, threads=threads):
                self._agents[agent, THREADS] = f"{threads} threads are stuck" if threads > 1 else "its thread is stuck"
            case ThreadsFreed(agent=agent):
                self._agents.pop((agent, THREADS), None)
            case NotReadAgain(agent=agent, sequence=sequence, error=error):
                self._agents[agent, BODIES] = f"sequence {sequence}, which waits, cannot be read again: {error}"
            case ReadAgain(agent=agent):
                self._agents.pop((agent, BODIES), None)
            case LeadershipHindered(bucket=bucket, error=error):
                self._hindered[bucket] = f"cannot lead, for lack of bucket {bucket}: {error}"
            case LeadershipUnhindered(bucket=bucket):
                self._hindered.pop(bucket, None)
        self._say()

    def stop(self) -> None:
        self._stopping = True
        self._say()

    def _say(self) -> None:
        agents = (f"agent {name}: {problem}" for (name, _), problem in self._agents.items())
        said = ("stopping" if self._stopping else "", self._connection, *self._hindered.values(), *agents)
        self.health.unready = [problem for problem in said if problem]
