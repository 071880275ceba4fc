"""Lag and standstill of every agent of a deployment, also of those whose workers are down, for Prometheus.

Everything comes from the server, stream by stream, spread over `poll_seconds`: a request for 256 consumers, one for the
stream, one for the dead letters, and some for what workers recorded of their consumers. One
worker with it per deployment is enough. An agent whose consumer is gone shows as such until a worker makes it anew.
What the server does not answer stays as it was, and `aviso_observer_last_poll_timestamp_seconds` tells how old that is.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from functools import partial
from typing import Annotated

import anyio
import structlog
from msgspec import Meta, Struct

from aviso_workers import App, Router
from aviso_workers.errors import BackendError
from aviso_workers.ops import agent_inventory, retried, stuck
from aviso_workers.ops.agent_inventory import ConsumerInfo, ConsumerRecord, Recorded
from aviso_workers.state.own_streams import DEAD_LETTERS

__all__ = ["Observer", "observe", "router"]

AGENT = ("app", "agent")
CONSUMER = (*AGENT, "stream")

log = structlog.get_logger(__name__)


class Observer(Struct, frozen=True, kw_only=True):
    """Settings, in the configuration under `workers.agents.observer`."""

    poll_seconds: Annotated[float, Meta(gt=0)] = 15.0
    """The time in which everything is asked for once."""


class Seen(Struct, frozen=True):
    """An agent's consumer, why it is stuck (empty where it is not), and at how many notifications it is blocked."""

    consumer: ConsumerInfo
    why_stuck: str = ""
    blocked: int = 0


router = Router("observer", settings=Observer)


@router.task
async def observe(app: App) -> None:
    """Look at all agents again and again, until cancelled. Raises `ConfigError`."""
    await _Rounds(app, app.settings(router)).go()


class _Rounds:
    """Asks one thing after the other, and shows what is known after each answer."""

    def __init__(self, app: App, settings: Observer) -> None:
        self._app = app
        self._settings = settings
        self._agents: dict[str, dict[tuple[str, str], Seen]] = {}
        """By stream; then by app and agent."""
        self._recorded: Recorded | None = None
        self._missing: dict[str, dict[tuple[str, str], ConsumerRecord]] = {}
        """By stream, the agents whose consumer is gone."""
        self._used: dict[str, float] = {}
        """By stream, of those that refuse what is new when they are full."""
        self._polled_at: dict[tuple[str, ...], float] = {}
        self._problems: dict[str, str] = {}

    async def go(self) -> None:
        questions: dict[str, Callable[[], Awaitable[None]]] = {"records": self._ask_for_records}
        questions |= {
            stream: partial(self._ask_for_agents, stream) for stream in agent_inventory.streams_of(self._app.config)
        }
        questions |= {"dead letters": self._ask_for_dead_letters}
        while True:
            for about, ask in questions.items():
                await self._ask(about, ask)
                await anyio.sleep(self._settings.poll_seconds / len(questions))

    async def _ask(self, about: str, ask: Callable[[], Awaitable[None]]) -> None:
        problem = ""
        try:
            await ask()
        except BackendError as error:
            problem = str(error)
        if problem and not self._problems.get(about):
            log.warning("observer.no_answer", about=about, problem=problem)
        self._problems[about] = problem

    async def _ask_for_agents(self, stream: str) -> None:
        found = await agent_inventory.agents(self._app.session.admin, stream)
        records = self._recorded.consumers if self._recorded else {}
        self._missing[stream] = await agent_inventory.missing(self._app.session.admin, stream, records)
        before = self._agents.get(stream, {})
        self._agents[stream] = {agent: self._seen(stream, each, before.get(agent)) for agent, each in found.items()}
        self._polled_at[stream,] = time.time()
        self._show_agents()
        self._show(
            "last_poll_timestamp_seconds",
            "Time when the server last answered the observer about the agents on a stream, in seconds since 1970.",
            labels=("stream",),
            values=self._polled_at,
        )
        await self._ask_for_use(stream)

    async def _ask_for_use(self, stream: str) -> None:
        used = await agent_inventory.part_used(self._app.session.admin, stream)
        self._used.pop(stream, None)
        if used is not None:
            self._used[stream] = used
        self._show(
            "stream_used_ratio",
            "Used part of the nearest limit of a stream, from 0 to 1; only for streams that refuse new messages when "
            "they are full.",
            labels=("stream",),
            values={(name,): ratio for name, ratio in self._used.items()},
        )

    def _seen(self, stream: str, consumer: ConsumerInfo, before: Seen | None) -> Seen:
        known = self._recorded
        record = known.consumers.get((stream, consumer.name)) if known else None
        blocked = retried.blocked(known.failures, stream, consumer) if known else []
        why = stuck.why_stuck(consumer, before.consumer if before else None, record, blocked)
        if known and (agent := agent_inventory.agent_of(consumer.name)):
            failure = known.failures.get((agent[0], "agents", agent[1]))
            why = "" if failure and failure.is_away(known.time) else why  # it goes on when that is back
        return Seen(consumer, why, len(blocked))

    async def _ask_for_records(self) -> None:
        self._recorded = await agent_inventory.recorded(self._app.session.admin)

    async def _ask_for_dead_letters(self) -> None:
        counts = await agent_inventory.dead_letters(self._app.session.admin)
        none: dict[tuple[str, ...], float] = {agent: 0.0 for agents in self._agents.values() for agent in agents}
        self._show("dead_letters", "Dead letters that are stored now.", labels=AGENT, values={**none, **counts})
        await self._ask_for_use(DEAD_LETTERS)

    def _show_agents(self) -> None:
        seen = {(*agent, stream): each for stream, agents in self._agents.items() for agent, each in agents.items()}

        def show(name: str, help: str, read: Callable[[Seen], float]) -> None:
            self._show(name, help, labels=CONSUMER, values={key: read(each) for key, each in seen.items()})

        show("pending", "Notifications not delivered yet.", lambda seen: seen.consumer.num_pending)
        show("ack_pending", "Notifications delivered and not settled yet.", lambda seen: seen.consumer.num_ack_pending)
        show(
            "redelivered",
            "Notifications delivered more than once and not settled yet.",
            lambda seen: seen.consumer.num_redelivered,
        )
        show(
            "ack_floor_sequence",
            "Stream sequence up to which every notification is settled (the ack floor).",
            lambda seen: seen.consumer.ack_floor,
        )
        show(
            "last_delivery_timestamp_seconds",
            "Time when a notification was last delivered, in seconds since 1970; 0 if never, or not since the start "
            "of the server.",
            lambda seen: _timestamp(seen.consumer.last_delivered),
        )
        show(
            "last_ack_timestamp_seconds",
            "Time when a notification was last settled, in seconds since 1970; 0 if never, or not since the start of "
            "the server.",
            lambda seen: _timestamp(seen.consumer.last_settled),
        )
        show("paused", "1 while the agent is paused on the server, else 0.", lambda seen: seen.consumer.paused)
        show(
            "stuck",
            "1 while no worker pulls the pending notifications, or a notification is unfinished for longer than its "
            "agent's policy allows; else 0.",
            lambda seen: bool(seen.why_stuck),
        )
        show(
            "blocked",
            "Notifications that have failed as often as is usual, and that the agent tries again without end.",
            lambda seen: seen.blocked,
        )
        missing = [(*agent, stream) for stream, agents in self._missing.items() for agent in agents]
        self._show(
            "consumer_missing",
            "1 while the agent's consumer is missing, so the agent receives nothing and no lag counts its "
            "notifications; else 0.",
            labels=CONSUMER,
            values={**dict.fromkeys(seen, 0.0), **dict.fromkeys(missing, 1.0)},
        )

    def _show(self, name: str, help: str, *, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]) -> None:
        self._app.measure(f"aviso_observer_{name}", help, labels=labels, values=values)


def _timestamp(moment: datetime | None) -> float:
    return moment.timestamp() if moment else 0.0
