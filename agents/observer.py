"""How every agent of a deployment is, also of those whose workers are down, for Prometheus.

It says of each agent what `agents ls` and the console say (`ops.health`), from one snapshot of the server after the
other. One worker with it per deployment is enough. Where the server does not answer at all, everything stays as it was,
and `aviso_observer_last_poll_timestamp_seconds` tells how old that is. What is not known of an agent has no series.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Annotated

import anyio
import structlog
from msgspec import Meta, Struct

from aviso_workers import App, Router
from aviso_workers.errors import BackendError
from aviso_workers.jetstream.info import ConsumerInfo
from aviso_workers.ops import agent_report, snapshots
from aviso_workers.ops.agent_report import AgentHealth
from aviso_workers.ops.health import Unknown
from aviso_workers.ops.snapshots import ServerSnapshot

AGENT = ("app", "agent")
CONSUMER = (*AGENT, "stream")

log = structlog.get_logger(__name__)


class Observer(Struct, frozen=True, kw_only=True):
    """Settings, in the configuration under `workers.agents.observer`."""

    poll_seconds: Annotated[float, Meta(gt=0)] = 15.0
    """How long after a look the next one begins."""


router = Router("observer", settings=Observer)


@router.task
async def observe(app: App) -> None:
    """Look at all agents again and again, until cancelled. Raises `ConfigError`."""
    before: ServerSnapshot | None = None
    problem = ""
    while True:
        was, problem = problem, ""
        try:
            now = await snapshots.take(app.session.admin)
            if before is not None:
                _show_agents(app, await agent_report.of_server(app.session.admin, app.config, now, before), now)
            _show_streams(app, now)
            before, problem = now, now.denied.text()
        except BackendError as error:
            problem = str(error)
        if problem and not was:
            log.warning("observer.no_answer", problem=problem)
        await anyio.sleep(app.settings(router).poll_seconds)


def _show_streams(app: App, now: ServerSnapshot) -> None:
    _show(
        app,
        "stream_used_ratio",
        "Used part of the nearest limit of a stream, from 0 to 1; only for streams that refuse new messages when they "
        "are full.",
        labels=("stream",),
        values={
            (name,): info.part_used
            for name, info in now.streams.items()
            if info.config.discard == "new" and info.part_used is not None
        },
    )


def _show_agents(app: App, agents: list[AgentHealth], now: ServerSnapshot) -> None:
    def show(name: str, help: str, read: Callable[[AgentHealth], float | None]) -> None:
        values: dict[tuple[str, ...], float] = {
            (each.facts.app, each.facts.agent, each.facts.stream): value
            for each in agents
            if (value := read(each)) is not None
        }
        _show(app, name, help, labels=CONSUMER, values=values)

    show("pending", "Notifications not delivered yet.", lambda each: each.row.pending)
    show("ack_pending", "Notifications delivered and not settled yet.", lambda each: each.row.ack_pending)
    show(
        "redelivered", "Notifications delivered more than once and not settled yet.", lambda each: each.row.redelivered
    )
    show(
        "ack_floor_sequence",
        "Stream sequence up to which every notification is settled (the ack floor).",
        _of_consumer(lambda events: events.ack_floor),
    )
    show(
        "last_delivery_timestamp_seconds",
        "Time when a notification was last delivered, in seconds since 1970; 0 if never, or not since the start of the "
        "server.",
        _of_consumer(lambda events: _timestamp(events.last_delivered)),
    )
    show(
        "last_ack_timestamp_seconds",
        "Time when a notification was last settled, in seconds since 1970; 0 if never, or not since the start of the "
        "server.",
        _of_consumer(lambda events: _timestamp(events.last_settled)),
    )
    _show(
        app,
        "agent_needs_somebody",
        "1 while somebody should look at an agent, or at a worker in trouble (agent `worker NAME`, stream `-`), whose "
        "state the label says; else 0. Each has one state.",
        labels=(*CONSUMER, "state"),
        values={
            (row.app, row.agent, row.stream, row.state): float(row.needs)
            for row in [*(each.row for each in agents), *agent_report.workers_in_trouble(now)]
        },
    )
    show(
        "agent_state_since_timestamp_seconds",
        "Time since which an agent is in trouble, in seconds since 1970; 0 where it is not, or that is not known.",
        lambda each: _timestamp(each.judgement.since) if each.judgement.is_trouble else 0.0,
    )
    dead = {(each.facts.app, each.facts.agent): each.facts.dead_letters for each in agents}
    _show(
        app,
        "dead_letters",
        "Dead letters that are stored now.",
        labels=AGENT,
        values={agent: count for agent, count in dead.items() if count is not None},
    )
    _show(
        app,
        "last_poll_timestamp_seconds",
        "Time when the server last answered the observer, in seconds since 1970.",
        labels=(),
        values={(): time.time()},
    )


def _show(app: App, name: str, help: str, *, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]) -> None:
    app.measure(f"aviso_observer_{name}", help, labels=labels, values=values)


def _of_consumer(read: Callable[[ConsumerInfo], float]) -> Callable[[AgentHealth], float | None]:
    """Return what reads a value of the consumer of an agent's events: None where that is not known, 0 without one."""

    def of(agent: AgentHealth) -> float | None:
        if isinstance(agent.facts.events, Unknown):
            return None
        return read(agent.facts.events) if agent.facts.events else 0.0

    return of


def _timestamp(moment: datetime | None) -> float:
    return moment.timestamp() if moment else 0.0
