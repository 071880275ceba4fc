"""What listens to the events of an app that runs: the log and, with a status port, the probes and the metrics.

A worker process uses it, and so does an app inside of another program (`App.running`), which has configured its own log
and usually opens no status port.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, nullcontext, suppress
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import anyio

from aviso_workers.aviso.literals import time_text
from aviso_workers.clocks import Clock
from aviso_workers.config.settings import Status
from aviso_workers.declare.agents import Agent
from aviso_workers.errors import BackendError, text_of
from aviso_workers.events import WORKER, Event, Hindrance
from aviso_workers.sessions import worker_recorder
from aviso_workers.sessions.session import Session
from aviso_workers.telemetry import logs, metrics
from aviso_workers.telemetry.logs import FailureLog, log
from aviso_workers.telemetry.metrics import Metrics, Missed, RunningApp
from aviso_workers.telemetry.status import Health, StatusServer

if TYPE_CHECKING:
    from aviso_workers.telemetry.lineage import LineageReporter


LAG_SECONDS = 2.0
"""How often the lag of each agent is asked for; less often where there are many agents."""
MAX_ASKED_PER_SECOND = 40
"""How many such requests are made in a second at most, for all agents together."""
MISSED_SECONDS = 60.0
"""How often a line on missed notifications is written at most, for each agent."""
BLOCKED_SECONDS = 2.0
"""A loop that is so late is told of. Nothing of ours takes so long, and another process may take the core for as long
as a second."""
LOOK_SECONDS = 0.5


class Listeners:
    """The listeners of one app: run `work` as long as the app runs, and `measure_lag` as long as it is connected."""

    def __init__(self, app: RunningApp, *, measured: bool) -> None:
        self.readiness = Readiness(app.agents)
        self.failures = FailureLog()
        health = self.readiness.health
        self.metrics = (
            Metrics(app, ready=lambda: not health.unready, loop_lag_seconds=health.late_seconds) if measured else None
        )
        self._lineage = _lineage(app)
        self.url = ""
        """The URL of the status port; empty where there is none."""
        self._app = app.name
        self._agents = tuple(app.agents)
        schema = app.config.notification_schema
        self._newest_is_enough = {
            agent.name for agent in app.agents if schema[agent.event_type].allow_duplicates is False
        }

    def tell_start(self, warnings: Iterable[str]) -> None:
        """Log the app's warnings, and then that it runs from now on."""
        for warning in warnings:  # before `worker.started`: who waits for that line may stop the worker right after it
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
        """Note that the event loop is not blocked, log where it is, and how many failures were only counted, until
        cancelled.
        """
        health = self.readiness.health
        with loop_watched(health, self._agents):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(health.keep_turning)
                tasks.start_soon(self.failures.keep_counting)

    def telling_lineage(self, session: Session) -> AbstractAsyncContextManager[None]:
        """Tell the runs of the worker and its agents while the block runs, where `workers.lineage` is configured."""
        return nullcontext() if self._lineage is None else self._lineage.told(session.backend)

    async def measure_lag(self, session: Session) -> None:
        """Ask for the lag of each agent, in turn and without end, and log what agents have missed; return at once where
        there are no metrics.
        """
        if self.metrics is not None:
            missed = MissedLog(self._newest_is_enough, session.backend.clock)
            await _measure_lag(self._agents, session, self.metrics, missed)


@contextmanager
def listening(app: RunningApp, *, status: Status | None) -> Iterator[Listeners]:
    """Let the log listen to the app while the block runs; with `status`, also open a status port with its metrics.

    Raises `ConfigError` where the port is taken, or the extra `lineage` is missing.
    """
    with ExitStack() as stack:
        listeners = Listeners(app, measured=status is not None)
        stack.enter_context(app.events.heard_by(logs.observe, *logs.OBSERVED))
        stack.enter_context(app.events.heard_by(listeners.failures.observe, *logs.COUNTED))
        if status is not None and listeners.metrics is not None:
            stack.enter_context(app.events.heard_by(listeners.metrics.observe, *metrics.OBSERVED))
            stack.enter_context(app.events.heard_by(listeners.readiness.observe, *worker_recorder.OBSERVED))
            port = StatusServer(
                host=status.host,
                port=status.port,
                health=listeners.readiness.health,
                metrics=listeners.metrics.answer,
                token=status.token,
            )
            listeners.url = stack.enter_context(port).url
        yield listeners


def _lineage(app: RunningApp) -> LineageReporter | None:
    """Return what tells runs, of which nothing is imported where none are configured. Raises `ConfigError`."""
    settings = app.config.workers.lineage
    if settings is None:
        return None
    from aviso_workers.telemetry.lineage import LineageReporter

    return LineageReporter(app, settings)


class MissedLog:
    """Writes to the log how many notifications each agent has missed, except those agents for which the newest
    notification of a subject is enough, as the configuration says.
    """

    def __init__(self, newest_is_enough: Collection[str], clock: Clock) -> None:
        self._newest_is_enough = newest_is_enough
        self._clock = clock
        self._untold: defaultdict[str, list[Missed]] = defaultdict(list)
        self._told_at: dict[str, float] = {}

    def observe(self, agent: str, missed: Missed | None) -> None:
        """Note what an agent has missed since the last call, and write what was not written yet, if it is time to."""
        untold, now = self._untold[agent], self._clock.monotonic()
        if missed is not None and agent not in self._newest_is_enough:
            untold.append(missed)
        if not untold or now - self._told_at.get(agent, -math.inf) < MISSED_SECONDS:
            return
        self._told_at[agent] = now
        log.warning(
            "notifications.missed",
            agent=agent,
            missed=sum(each.count for each in untold),
            among_sequences=f"{untold[0].first} to {untold[-1].last}",
            cure="they were not in the stream when it was their turn: a newer notification of their subject replaced "
            "them, they expired or were removed, or the server of the agent's consumer lacks them (`aviso-workers "
            "doctor`, JS072)",
        )
        untold.clear()


async def _measure_lag(
    agents: Sequence[Agent[Any, Any]], session: Session, metrics: Metrics, missed: MissedLog
) -> None:
    wait = max(LAG_SECONDS / max(1, len(agents)), 1 / MAX_ASKED_PER_SECOND)
    for agent in itertools.cycle(agents):
        found = None
        with suppress(BackendError):  # not made yet, or not reachable: the gauges keep what was last known
            found = metrics.lag(agent.name, await session.consumer_info(agent))
        missed.observe(agent.name, found)
        await session.backend.clock.sleep(wait)


@contextmanager
def loop_watched(health: Health, agents: Iterable[Agent[Any, Any]]) -> Iterator[None]:
    """Log a warning, once, each time that the event loop of this thread is blocked while the block runs.

    The warning says by which agent, and at which line of its function. A blocked loop cannot log anything itself, so a
    thread looks at it.
    """
    names = {code: agent.name for agent in agents if (code := getattr(agent.function, "__code__", None))}
    ended = threading.Event()
    watch = threading.Thread(
        target=_watch, args=(health, names, threading.get_ident(), ended), name="blocked-loop", daemon=True
    )
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()


def _watch(health: Health, names: Mapping[CodeType, str], thread: int, ended: threading.Event) -> None:
    told = False
    while not ended.wait(LOOK_SECONDS):
        seconds = health.blocked_seconds()
        if seconds < BLOCKED_SECONDS:
            told = False
        elif not told:
            told = True
            frame = sys._current_frames().get(thread)
            if frame is not None:
                log.warning("loop.blocked", seconds=round(seconds, 1), **_where(frame, names))


def _where(innermost: FrameType, names: Mapping[CodeType, str]) -> dict[str, str]:
    """Return the agent whose function is running, and the line at which it is; else the line that is run."""
    frame: FrameType | None = innermost
    while frame is not None and frame.f_code not in names:
        frame = frame.f_back
    found = innermost if frame is None else frame
    line = f"{found.f_code.co_filename}:{found.f_lineno}"
    cure = "await something that does not block, or declare the agent as a plain def, which runs in a thread"
    return {"line": line} if frame is None else {"agent": names[frame.f_code], "line": line, "cure": cure}


class Readiness:
    """Ready means that nothing hinders the worker (`worker_recorder.Hindrances`), and nobody stops it."""

    def __init__(self, agents: Iterable[Agent[Any, Any]]) -> None:
        self.health = Health()
        self._hindrances = worker_recorder.Hindrances(agent.name for agent in agents)
        self._stopping = False
        self._say()

    def observe(self, event: Event) -> None:
        """Note what hinders the worker, or does so no more; the observer of `worker_recorder.OBSERVED`."""
        self._hindrances.observe(event)
        self._say()

    def stop(self) -> None:
        self._stopping = True
        self._say()

    def _say(self) -> None:
        said = self._hindrances.found
        unready = [_text(each) for each in said if not each.is_ready]
        self.health.unready = ["stopping", *unready] if self._stopping else unready
        self.health.notes = [_text(each) for each in said if each.is_ready]


def _text(hindrance: Hindrance) -> str:
    since = f" (since {time_text(hindrance.since)})" if hindrance.since else ""
    text = f"{hindrance.text}{since}"
    return text if hindrance.agent == WORKER else f"agent {hindrance.agent}: {text}"
