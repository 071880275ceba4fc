"""Everything that listens while an app runs: the log, and with a status port the probes and the metrics.

One way for a worker process and for an app inside of another program (`App.running`), which has a log of its own and
as a rule no status port.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Protocol

import anyio

from aviso_workers.config.settings import Status
from aviso_workers.declare.agents import Agent
from aviso_workers.engine.session import Session
from aviso_workers.errors import BackendError, text_of
from aviso_workers.events import Events, Settled
from aviso_workers.telemetry import logs, readiness
from aviso_workers.telemetry.failure_logs import FailureLog
from aviso_workers.telemetry.logs import log
from aviso_workers.telemetry.metrics import Measurable, Metrics
from aviso_workers.telemetry.readiness import Readiness
from aviso_workers.telemetry.status import StatusServer

__all__ = ["Listeners", "listening"]

LAG_SECONDS = 2.0
"""How often it is asked what an agent has left to do, unless there are many."""
MOST_ASKED_PER_SECOND = 40
"""Of all agents together."""


class Observable(Measurable, Protocol):
    """An app that runs."""

    events: Events


class Listeners:
    """What listens to an app. `work` runs beside it, and `measure_lag` while it is connected."""

    def __init__(self, app: Observable, *, measured: bool) -> None:
        self.readiness = Readiness(app.agents)
        self.failures = FailureLog()
        health = self.readiness.health
        self.metrics = (
            Metrics(app, ready=lambda: not health.unready, loop_lag_seconds=health.late_seconds) if measured else None
        )
        self.url = ""
        """Of the status port; empty where there is none."""
        self._app = app.name
        self._agents = tuple(app.agents)

    def tell_start(self, warnings: Iterable[str]) -> None:
        """Log that the app runs from now on, after what it warns of."""
        for warning in warnings:  # whoever reads the first line of the log may tell the worker to stop
            log.warning("config.warning", text=warning)
        status = {"status": self.url} if self.url else {}
        log.info("worker.started", app=self._app, agents=[agent.name for agent in self._agents], **status)

    def stopping(self) -> None:
        """Let `/readyz` say that the app stops."""
        self.readiness.stop()

    def tell_end(self) -> None:
        """Log that the app does not run any more."""
        log.info("worker.stopped", app=self._app)

    def tell_failure(self, error: Exception) -> None:
        """Log why the app does not run any more."""
        log.error("worker.failed", app=self._app, error=text_of(error))

    async def work(self) -> None:
        """Say that the event loop turns, and write how many failures were only counted; cancel this to end it."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.readiness.health.keep_turning)
            tasks.start_soon(self.failures.keep_counting)

    async def measure_lag(self, session: Session) -> None:
        """Ask what each agent has left to do, in turn and without end, where that is shown."""
        if self.metrics is not None:
            await _measure_lag(self._agents, session, self.metrics)


@contextmanager
def listening(app: Observable, *, status: Status | None) -> Iterator[Listeners]:
    """Let them listen while the block runs, with a status port where `status` says, or with none.

    Raises `ConfigError` where the port is taken.
    """
    with ExitStack() as stack:
        listeners = Listeners(app, measured=status is not None)
        stack.enter_context(app.events.heard_by(logs.observe, *logs.OBSERVED))
        stack.enter_context(app.events.heard_by(listeners.failures.observe, Settled))
        if status is not None and listeners.metrics is not None:
            stack.enter_context(app.events.heard_by(listeners.metrics.observe))
            stack.enter_context(app.events.heard_by(listeners.readiness.observe, *readiness.OBSERVED))
            port = StatusServer(
                host=status.host,
                port=status.port,
                health=listeners.readiness.health,
                metrics=listeners.metrics.render,
                token=status.token,
            )
            listeners.url = stack.enter_context(port).url
        yield listeners


async def _measure_lag(agents: Sequence[Agent[Any, Any]], session: Session, metrics: Metrics) -> None:
    wait = max(LAG_SECONDS / max(1, len(agents)), 1 / MOST_ASKED_PER_SECOND)
    for agent in itertools.cycle(agents):
        with suppress(BackendError):  # not made yet, or not reachable: the gauges keep what was last known
            metrics.lag(agent.name, await session.consumer_info(agent))
        await session.backend.clock.sleep(wait)
