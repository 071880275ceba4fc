"""An open backend and everything of the engine that works on it, wired for one app."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
from msgspec import structs

from aviso_workers import resources, schema, topics
from aviso_workers.agents import Agent, Task
from aviso_workers.backends import Backend, ConsumerInfo, Opening, open_backend
from aviso_workers.codec import NotificationReader
from aviso_workers.config import Config, streams
from aviso_workers.engine import (
    consumer_records,
    dead_lettering,
    deferring,
    own_buckets,
    replicas,
    resourcing,
    sweeping,
)
from aviso_workers.engine.acknowledging import Settler
from aviso_workers.engine.batching import InBatches
from aviso_workers.engine.consumer_records import ConsumerRecorder
from aviso_workers.engine.dead_lettering import DeadLetterStore, Requeued, retry_subject
from aviso_workers.engine.deferring import Courier
from aviso_workers.engine.failing import Failures
from aviso_workers.engine.handling import Internal, Kit, OneByOne
from aviso_workers.engine.isolation import Isolation
from aviso_workers.engine.ordering import Line
from aviso_workers.engine.provisioning import Provisioner
from aviso_workers.engine.publishing import Publisher
from aviso_workers.engine.pulling import MOST_PREFETCH, AgentRun, Form
from aviso_workers.engine.redeliveries import Redeliveries
from aviso_workers.engine.repeats import Repeats
from aviso_workers.engine.replaying import Replayer
from aviso_workers.engine.returning import Outputs
from aviso_workers.engine.scheduling import run_timers
from aviso_workers.engine.shared_filters import SharedFilter
from aviso_workers.engine.shielding import Shield
from aviso_workers.engine.streaming import AsStream
from aviso_workers.engine.supervising import Feed, supervise_agent, supervise_task
from aviso_workers.engine.sweeping import Sweep
from aviso_workers.engine.tabling import Tables
from aviso_workers.engine.threads import Threads
from aviso_workers.engine.windowing import AsWindows
from aviso_workers.errors import BackendError, NotFoundError, RefusedError, UnknownEventTypeError
from aviso_workers.events import ConnectionChanged, ConnectionSlow, Events, PermissionDenied
from aviso_workers.jetstream import metadata
from aviso_workers.jetstream.fields import SECOND
from aviso_workers.jetstream.specs import GROUP, PINNED, PRIORITIZED, ConsumerSpec, StreamSpec
from aviso_workers.notifications import Batch, Notification, Stream
from aviso_workers.schema import EventType
from aviso_workers.tables import Counter, Table
from aviso_workers.timers import Timer
from aviso_workers.windows import Window

__all__ = ["Session", "open_session"]

MAX_ACK_PENDING = 100_000
"""Unsettled notifications of one agent over all its workers; those that wait for a retry count, so that an agent
handles nothing new while so many wait. More would not be better: a nats-server moves the whole queue of what is due
for each one that it delivers again. Where 100,000 were due at one moment, nats-server 2.15 delivered 15,000 a second
and the new ones beside them; of 300,000 it delivered 700 a second, and nothing new for minutes.
"""
LANES_PREFETCH = 1000
"""What may wait with an ordered agent: more than its concurrency, because what waits in a lane holds a place."""
STREAM_PREFETCH = 16
"""What may wait for each call of a function of a Stream, which can take many before the first of them is done."""
SINGLETON_BEAT_SECONDS = 3.0
"""A singleton that has lost what it handles is ended within a third of this."""
SWEEP = "dead-letter-sweep"
SWEEP_ACK_WAIT = 60.0
SWEEP_PREFETCH = 16
COURIER = "schedule-courier"
COURIER_DURABLE = f"aviso_workers__{COURIER}"
"""One for all apps, so that it does not matter whose workers run."""
COURIER_ACK_WAIT = 5.0
COURIER_CONCURRENCY = 16
COURIER_PREFETCH = 64
FORMS: dict[type, Callable[[Kit], Form]] = {Notification: OneByOne, Batch: InBatches, Stream: AsStream}


class Session:
    """What an app can do while it is connected."""

    def __init__(self, backend: Backend, *, app: str, config: Config, events: Events) -> None:
        self.backend = backend
        self.provisioner = Provisioner(
            backend, management=config.notification_backend.jetstream.stream_management, events=events
        )
        self.own_streams = Provisioner(backend, management="reconcile", events=events, removes_replicas=False)
        """Our own streams are ours to make and to change, whatever may be done to the others'. Apps share some of them,
        and another app's configuration may ask for more replicas."""
        self.publisher = Publisher(
            backend, config=config, provisioner=self.provisioner, own_streams=self.own_streams, events=events
        )
        self.runs: dict[str, AgentRun] = {}
        """The agents at work, by name."""
        self._isolation = Isolation(backend.clock)
        self._dead_letters = DeadLetterStore(backend, app=app, config=config, provisioner=self.own_streams)
        self._app = app
        self._config = config
        self._priority = config.workers.priority
        self._events = events

    async def replayer(self, event_type: str, where: Mapping[str, Any], *, waits: bool = False) -> Replayer:
        """A reader of stored notifications, which makes and changes no stream.

        Raises as `parse_where` does, `RefusedError` for a stream that cannot be used, and `NotFoundError` for one that
        does not exist, unless the reader `waits` for it.
        """
        declared = self._event_type(event_type)
        parsed = schema.parse_where(event_type, declared, where)
        spec = streams.event_stream(event_type, declared, self._config)
        try:
            await self.provisioner.require_usable(spec)
        except NotFoundError:
            if not waits:
                raise
        return Replayer(
            self.backend,
            name=event_type,
            event_type=declared,
            where=parsed,
            stream=spec.name,
            events=self._events,
        )

    async def cancel(self, event_type: str, message_id: str) -> bool:
        """Forget a notification that waits to be delivered. Raises `UnknownEventTypeError`, `BackendError`."""
        waiting = deferring.waiting(self._stream(event_type).name, message_id)
        try:
            return await self.backend.purge_stream(deferring.STREAM, subject=waiting) > 0
        except NotFoundError:
            return False  # nothing was ever to be delivered later

    def connect(self, tables: Mapping[str, Table[Any] | Counter]) -> Tables:
        """The app's tables, connected while they are entered."""
        return Tables(tables, self.backend, app=self._app, config=self._config, own_streams=self.own_streams)

    async def work(self, app: Any, stop: anyio.Event, *, agents: Sequence[Agent[Any, Any]]) -> None:
        """Run these agents, and the app's timers and tasks, until `stop`; then let them finish.

        Raises `BackendError` when the connection is lost for good, `RefusedError` where the server is too old for
        what is asked of it, `UnreadableStreamError` where it cannot read its streams, `ResourceError` where a resource
        cannot be opened.
        """
        if self._priority:
            self.backend.require_server(2, 12, to=f"read with workers.priority {self._priority}")
        for agent in agents:
            if agent.policy.singleton:
                self.backend.require_server(2, 11, to=f"run agent {agent.name!r} as a singleton")
            if agent.form is Window:
                self.backend.require_server(2, 11, to=f"keep the windows of agent {agent.name!r}")
        if agents:
            await consumer_records.create_bucket(self.backend)
        async with resourcing.opened(app.resources, app) as values:
            await self._work(
                app,
                stop,
                agents=[resources.bound(agent, values) for agent in agents],
                timers=[resources.bound(timer, values) for timer in app.timers],
            )

    async def _work(
        self, app: Any, stop: anyio.Event, *, agents: Sequence[Agent[Any, Any]], timers: Sequence[Timer[Any, Any]]
    ) -> None:
        failure: BackendError | None = None

        async def watch_backend(work: anyio.CancelScope) -> None:
            nonlocal failure
            try:
                await self.backend.failed()
            except BackendError as error:
                failure = error  # raised below, outside of the group, so that it arrives as itself
                work.cancel()

        async def run_task(task: Task) -> None:
            await supervise_task(task, app, clock=self.backend.clock, events=self._events, stop=stop)

        async def run_app_timers() -> None:
            await run_timers(
                timers,
                backend=self.backend,
                app=self._app,
                events=self._events,
                stop=stop,
                drain_timeout_seconds=self._config.workers.drain_timeout_seconds,
            )

        async def raise_replicas() -> None:
            buckets = own_buckets.of_app(self._app, agents=app.agents, timers=app.timers, tables=app.tables)
            wanted = replicas.configured(self._config, buckets)
            await replicas.raise_to(wanted, provisioner=self.own_streams, clock=self.backend.clock)

        async with anyio.create_task_group() as watching:
            async with anyio.create_task_group() as work:
                watching.start_soon(watch_backend, work.cancel_scope)
                watching.start_soon(raise_replicas)
                for agent in agents:
                    work.start_soon(self.run_agent, agent, stop)
                if agents:
                    work.start_soon(self.run_sweep, app.agents, stop)
                work.start_soon(self.run_courier, stop)
                if timers:
                    work.start_soon(run_app_timers)
                for task in app.tasks:
                    work.start_soon(run_task, task)
                await stop.wait()
            watching.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def run_agent(self, agent: Agent[Any, Any], stop: anyio.Event) -> None:
        """Run the agent until `stop`, then let it finish."""
        declared = self._event_type(agent.event_type)
        where = schema.parse_where(agent.event_type, declared, agent.where)
        stream = streams.event_stream(agent.event_type, declared, self._config)
        clock, policy = self.backend.clock, agent.policy
        line = Line(
            clock,
            key=topics.key_of(where.topic, policy.order_by) if policy.order_by else None,
            isolation=self._isolation,
        )
        shield = Shield(clock)
        failures = Failures(
            self.backend, app=self._app, agent=agent.name, stream=stream.name, shield=shield, events=self._events
        )
        durable = agent.durable_name(self._app)
        repeats = Repeats(self.backend, stream=stream.name, consumer=durable)
        settler = Settler(
            agent,
            stream=stream.name,
            line=line,
            repeats=repeats,
            failures=failures,
            dead_letters=self._dead_letters,
            shield=shield,
            clock=clock,
            events=self._events,
        )
        reader = NotificationReader(agent.event_type, declared, where=where, payload_type=agent.payload_type)
        outputs = Outputs(agent, app=self._app, stream=stream.name, publisher=self.publisher)
        threads = Threads(agent, line=line, clock=clock, events=self._events)
        kit = Kit(agent, line=line, reader=reader, outputs=outputs, settler=settler, threads=threads, clock=clock)
        windows = self._windows(kit, stream.name)
        form = windows or FORMS[agent.form](kit)
        run = AgentRun(
            form,
            line=line,
            clock=clock,
            workers=policy.concurrency,
            prefetch=_prefetch(agent),
            # A singleton holds one at a time, and asks for the next one whenever one begins.
            most_prefetch=1 if policy.singleton else MOST_PREFETCH,
            ack_wait_seconds=_reported_within(agent, policy.ack_wait),
            redeliveries=Redeliveries(
                backend=self.backend,
                agent=agent.name,
                stream=stream.name,
                line=line,
                failures=failures,
                settler=settler,
                isolation=self._isolation,
                shield=shield,
                attempts=policy.retry.attempts,
                clock=clock,
                events=self._events,
            ),
            threads=threads,
            shield=shield,
        )
        self.runs[agent.name] = run
        consumer = _served(
            _consumer(durable, topics.filter_subjects(where), policy.ack_wait, start=policy.start),
            singleton=policy.singleton,
            priority=self._priority,
        )
        shared = SharedFilter(
            consumer,
            agent=agent.name,
            stream=stream.name,
            backend=self.backend,
            recorder=self._recorder(agent, stream.name, self.provisioner),
            retries=self._recorder(agent, dead_lettering.RETRIES, self.own_streams),
            events=self._events,
            on_ack_wait=lambda seconds: run.keep_within(_reported_within(agent, seconds)),
        )
        retries = dead_lettering.retries_spec(self._config)
        retries_consumer = _served(
            _consumer(durable, (retry_subject(self._app, agent.name),), policy.ack_wait), singleton=policy.singleton
        )
        everything = topics.filter_subjects(schema.parse_where(agent.event_type, declared, {}))
        leaves = None if consumer.filter_subjects == everything else shared.leaves
        feeds = [
            Feed(
                stream=stream,
                consumer=consumer,
                ensure=shared.ensure,
                leaves=leaves,
                repeats=repeats,
                provisioner=self.provisioner,
                in_order=line.ordered,
                # Who is busy, or waits for something to come, goes on asking, or would not stay pinned.
                room=(lambda: 1) if policy.singleton else None,
                priority=self._priority,
            ),
            Feed(
                stream=retries,
                consumer=retries_consumer,
                ensure=lambda: shared.ensure_retries(retries_consumer),
                provisioner=self.own_streams,
                unwrap=Requeued,
                leaves=leaves,
                room=(lambda: int(run.pinned(stream.name))) if policy.singleton else None,
            ),
        ]
        async with anyio.create_task_group() as looking:
            looking.start_soon(shared.keep)
            async with anyio.create_task_group() as tasks:
                if windows is not None:
                    tasks.start_soon(windows.close, stop, self._config.workers.drain_timeout_seconds)
                await self._supervise(agent.name, run, feeds, stop)
            looking.cancel_scope.cancel()
        await shared.record_last()

    def _recorder(self, agent: Agent[Any, Any], stream: str, provisioner: Provisioner) -> ConsumerRecorder:
        return ConsumerRecorder(
            self.backend,
            provisioner,
            app=self._app,
            agent=agent.name,
            stream=stream,
            longest_seconds=consumer_records.longest_seconds(agent.policy),
            events=self._events,
        )

    def _windows(self, kit: Kit, stream: str) -> AsWindows | None:
        """Of an agent that has some."""
        if kit.agent.policy.window is None:
            return None
        return AsWindows(
            kit,
            kit.agent.policy.window,
            backend=self.backend,
            app=self._app,
            stream=stream,
            events=self._events,
            patience_seconds=self._config.notification_backend.jetstream.publish_deadline_seconds,
        )

    async def run_sweep(self, agents: Sequence[Agent[Any, Any]], stop: anyio.Event) -> None:
        """Store dead letters, until `stop`, of what the server has given up; `agents` are those that are known here."""
        clock = self.backend.clock
        line = Line(clock)
        sweep = Sweep(
            self.backend,
            app=self._app,
            event_types={agent.name: agent.event_type for agent in agents},
            dead_letters=self._dead_letters,
            events=self._events,
        )
        form = Internal(
            sweep.handle, line=line, stream=sweeping.STREAM, unreadable_reason="no advisory", events=self._events
        )
        run = AgentRun(
            form, line=line, clock=clock, workers=1, prefetch=SWEEP_PREFETCH, ack_wait_seconds=SWEEP_ACK_WAIT
        )
        feed = Feed(
            stream=sweeping.advisories_spec(self._config),
            consumer=_consumer(f"{self._app}__{SWEEP}", (sweeping.ADVISORIES,), SWEEP_ACK_WAIT),
            provisioner=self.own_streams,
        )
        await self._supervise(SWEEP, run, [feed], stop)

    async def run_courier(self, stop: anyio.Event) -> None:
        """Bring, until `stop`, what is due to the streams it was meant for, whichever app has published it."""
        try:
            deferring.require_server(self.backend)
        except RefusedError:
            return  # nothing waits there
        clock = self.backend.clock
        line = Line(clock)
        courier = Courier(
            self.backend,
            consumer=COURIER_DURABLE,
            event_types=self._config.notification_schema,
            events=self._events,
        )
        form = Internal(
            courier.handle,
            line=line,
            stream=deferring.STREAM,
            unreadable_reason="no notification that waited",
            events=self._events,
        )
        run = AgentRun(
            form,
            line=line,
            clock=clock,
            workers=COURIER_CONCURRENCY,
            prefetch=COURIER_PREFETCH,
            ack_wait_seconds=COURIER_ACK_WAIT,
        )
        feed = Feed(
            stream=deferring.stream_spec(self._config),
            consumer=_consumer(COURIER_DURABLE, (f"{deferring.DUE}.>",), COURIER_ACK_WAIT, max_ack_pending=-1),
            provisioner=self.own_streams,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(courier.keep_removing)
            await self._supervise(COURIER, run, [feed], stop)
            tasks.cancel_scope.cancel()

    async def _supervise(self, name: str, run: AgentRun, feeds: Sequence[Feed], stop: anyio.Event) -> None:
        await supervise_agent(
            name,
            run,
            feeds,
            backend=self.backend,
            events=self._events,
            stop=stop,
            drain_timeout_seconds=self._config.workers.drain_timeout_seconds,
        )

    async def consumer_info(self, agent: Agent[Any, Any]) -> ConsumerInfo:
        """The agent's durable consumer. Raises `NotFoundError` where it was never made."""
        return await self.backend.consumer_info(self._stream(agent.event_type).name, agent.durable_name(self._app))

    def _stream(self, event_type: str) -> StreamSpec:
        return streams.event_stream(event_type, self._event_type(event_type), self._config)

    def _event_type(self, name: str) -> EventType:
        event_types = self._config.notification_schema
        if name not in event_types:
            raise UnknownEventTypeError(name, event_types)
        return event_types[name]


@asynccontextmanager
async def open_session(
    *, app: str, config: Config, events: Events, opening: Opening = open_backend
) -> AsyncIterator[Session]:
    """Connect; leave to disconnect. Raises `BackendError`."""

    opened = False
    was: bool | None = None

    def on_connection(*, connected: bool, reason: str, denied: str = "") -> None:
        if denied:
            events.emit(PermissionDenied(denied=denied))
            return
        nonlocal opened, was
        if connected is not was:  # a client that gives up says a second time that it is disconnected
            events.emit(ConnectionChanged(connected=connected, reason=reason, opened=opened))
        opened, was = opened or connected, connected

    async with opening(config, on_connection=on_connection) as backend:
        if backend.slow_because:
            events.emit(ConnectionSlow(reason=backend.slow_because))
        yield Session(backend, app=app, config=config, events=events)


def _reported_within(agent: Agent[Any, Any], ack_wait_seconds: float) -> float:
    """Within how many seconds the agent's worker has to report what it holds."""
    return min(ack_wait_seconds, SINGLETON_BEAT_SECONDS) if agent.policy.singleton else ack_wait_seconds


def _prefetch(agent: Agent[Any, Any]) -> int:
    """As many as can begin at once, so that a worker that becomes free finds work."""
    policy = agent.policy
    if policy.order_by:
        return max(LANES_PREFETCH, policy.concurrency)
    return policy.concurrency * {Batch: policy.batch.size, Stream: STREAM_PREFETCH}.get(agent.form, 1)


def _consumer(
    durable: str,
    filters: tuple[str, ...],
    ack_wait: float,
    *,
    max_ack_pending: int = MAX_ACK_PENDING,
    start: str = "all",
) -> ConsumerSpec:
    return ConsumerSpec(
        durable_name=durable,
        filter_subjects=filters,
        ack_wait=int(ack_wait * SECOND),
        max_ack_pending=max_ack_pending,
        max_deliver=-1,  # only an agent gives up, when its dead letter is stored
        **metadata.starting(start),
    )


def _served(consumer: ConsumerSpec, *, singleton: bool, priority: int = 0) -> ConsumerSpec:
    """The consumer, with which of its readers are served first."""
    if singleton:
        # One at a time, for whoever is pinned: so what follows waits on the server until this one has come to its end,
        # also while it waits to be tried again, and while it is given to another worker.
        return structs.replace(
            consumer,
            max_ack_pending=1,
            priority_policy=PINNED,
            priority_groups=(GROUP,),
            priority_timeout=consumer.ack_wait,
        )
    if priority:
        return structs.replace(consumer, priority_policy=PRIORITIZED, priority_groups=(GROUP,))
    return consumer
