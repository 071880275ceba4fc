"""An open backend and everything of the engine that works on it, wired for one app."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio

from aviso_workers import schema, streams, topics
from aviso_workers.agents import Agent
from aviso_workers.backends import Backend, ConsumerInfo, open_backend
from aviso_workers.codec import NotificationReader
from aviso_workers.config import Config
from aviso_workers.engine.dead_lettering import DeadLetters
from aviso_workers.engine.handling import Handler
from aviso_workers.engine.provisioning import Provisioner
from aviso_workers.engine.publishing import Publisher
from aviso_workers.engine.pulling import AgentRun
from aviso_workers.engine.replaying import Replayer
from aviso_workers.engine.supervising import supervise_agent
from aviso_workers.errors import UnknownEventTypeError
from aviso_workers.events import ConnectionChanged, Events
from aviso_workers.schema import EventType
from aviso_workers.streams import ConsumerSpec

__all__ = ["Session", "open_session"]

MAX_ACK_PENDING = 10_000
"""Unsettled notifications of one agent over all its workers; those that wait for a retry count."""
SECOND = 1_000_000_000


class Session:
    """What an app can do while it is connected."""

    def __init__(self, backend: Backend, *, app: str, config: Config, events: Events) -> None:
        self.backend = backend
        self.provisioner = Provisioner(
            backend, management=config.notification_backend.jetstream.stream_management, events=events
        )
        self.publisher = Publisher(backend, config=config, provisioner=self.provisioner, events=events)
        self.runs: dict[str, AgentRun] = {}
        """The agents at work, by name."""
        self._dead_letters = DeadLetters(backend, app=app, config=config, provisioner=self.provisioner)
        self._app = app
        self._config = config
        self._events = events

    async def replayer(self, event_type: str, where: Mapping[str, Any]) -> Replayer:
        """A reader of stored notifications; its stream is made if it is missing. Raises as `parse_where` does."""
        declared = self._event_type(event_type)
        parsed = schema.parse_where(event_type, declared, where)
        spec = streams.event_stream(event_type, declared, self._config)
        await self.provisioner.ensure(spec)
        return Replayer(
            self.backend,
            name=event_type,
            event_type=declared,
            where=parsed,
            stream=spec.name,
            events=self._events,
        )

    async def run_agent(self, agent: Agent[Any, Any], stop: anyio.Event) -> None:
        """Run the agent until `stop`, then let it finish."""
        declared = self._event_type(agent.event_type)
        where = schema.parse_where(agent.event_type, declared, agent.where)
        stream = streams.event_stream(agent.event_type, declared, self._config)
        reader = NotificationReader(agent.event_type, declared, where=where, payload_type=agent.payload_type)
        handler = Handler(
            agent, stream=stream.name, reader=reader, dead_letters=self._dead_letters, events=self._events
        )
        run = AgentRun(handler, concurrency=agent.concurrency, ack_wait_seconds=agent.ack_wait_seconds)
        self.runs[agent.name] = run
        await supervise_agent(
            agent,
            run,
            backend=self.backend,
            provisioner=self.provisioner,
            stream=stream,
            consumer=ConsumerSpec(
                durable_name=agent.durable_name(self._app),
                filter_subjects=topics.filter_subjects(where),
                ack_wait=int(agent.ack_wait_seconds * SECOND),
                max_ack_pending=MAX_ACK_PENDING,
            ),
            events=self._events,
            stop=stop,
            drain_timeout_seconds=self._config.workers.drain_timeout_seconds,
        )

    async def consumer_info(self, agent: Agent[Any, Any]) -> ConsumerInfo:
        """The agent's durable consumer. Raises `NotFoundError` where it was never made."""
        declared = self._event_type(agent.event_type)
        stream = streams.event_stream(agent.event_type, declared, self._config)
        return await self.backend.consumer_info(stream.name, agent.durable_name(self._app))

    def _event_type(self, name: str) -> EventType:
        event_types = self._config.notification_schema
        if name not in event_types:
            raise UnknownEventTypeError(name, event_types)
        return event_types[name]


@asynccontextmanager
async def open_session(*, app: str, config: Config, events: Events) -> AsyncIterator[Session]:
    """Connect; leave to disconnect. Raises `BackendError`."""

    def on_connection(*, connected: bool, reason: str) -> None:
        events.emit(ConnectionChanged(connected=connected, reason=reason))

    async with open_backend(config, on_connection=on_connection) as backend:
        yield Session(backend, app=app, config=config, events=events)
