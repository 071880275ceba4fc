"""An open backend and everything of the engine that works on it, wired for one app.

The modules of a feature are imported where an app uses it, so that a worker of plain agents loads none of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from contextvars import ContextVar
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from msgspec import structs

from aviso_workers import clocks
from aviso_workers.aviso import payloads, schema, topics
from aviso_workers.aviso.codec import NotificationReader
from aviso_workers.aviso.literals import Filter
from aviso_workers.aviso.notifications import Notification, Notify
from aviso_workers.backends import Admin, Backend, ConsumerInfo, Opening, open_backend
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.config import Config, streams
from aviso_workers.declare import dependencies, resources
from aviso_workers.declare.agents import Agent, Task
from aviso_workers.declare.resources import Resource
from aviso_workers.declare.tables import Counter, Table
from aviso_workers.declare.timers import Timer
from aviso_workers.declare.verdicts import Failure
from aviso_workers.declare.windows import Window
from aviso_workers.engine import calls, failure_recorder
from aviso_workers.engine.dead_letter_store import DeadLetterStore
from aviso_workers.engine.failure_recorder import LastFailures
from aviso_workers.engine.key_value import retried
from aviso_workers.engine.publisher import Publisher
from aviso_workers.engine.replay import Replayer
from aviso_workers.engine.subscription import Subscription, SubscriptionRun, keep_running, supervise_task
from aviso_workers.errors import (
    AvisoWorkersError,
    BackendError,
    ConfigError,
    DeclarationError,
    NotFoundError,
    ResourceError,
    UnavailableError,
    UndecodableError,
    describe,
)
from aviso_workers.events import (
    AgentDisturbed,
    AgentStarted,
    ConnectionChanged,
    ConnectionSlow,
    Events,
    ForeignAnswer,
    PermissionDenied,
    Ticked,
    Unreadable,
)
from aviso_workers.features import delayed_delivery
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.sessions.agent_subscriptions import AgentSubscriptions
from aviso_workers.sessions.worker_recorder import OBSERVED, Hindrances, WorkerRecorder
from aviso_workers.state import (
    consumer_records,
    declarations,
    delayed_messages,
    failure_records,
    own_buckets,
    own_streams,
    window_records,
)
from aviso_workers.state.known_agents import KnownAgents
from aviso_workers.state.own_buckets import OwnBuckets
from aviso_workers.state.own_streams import COUNTERS, DEAD_LETTERS
from aviso_workers.task_groups import task_group

if TYPE_CHECKING:
    from aviso_workers.features.traces import Spans


UPGRADED_SECONDS = 5.0
"""How often a worker looks whether a server that was too old to deliver later has been upgraded; nothing is sent."""
DOCUMENT_SECONDS = 2.0
"""After so long, a worker records the AsyncAPI document of its app: its start does not wait for that."""
LAST_RECORD_SECONDS = 2.0
"""How long a worker that stops takes at most to record its last failures."""
MAX_FOREIGN = 10_000
"""How many foreign messages are remembered, so that each is told once."""

_STOP: ContextVar[anyio.Event | None] = ContextVar("stop", default=None)
AGAIN_SECONDS = 10.0
"""When a server that did not answer is asked again."""


def is_stopping() -> bool:
    """Return whether the worker that runs this code was asked to stop; False where no worker runs it."""
    stop = _STOP.get()
    return stop is not None and stop.is_set()


class Session:
    """The connection of an app, and its work while it is connected."""

    def __init__(self, backend: Admin, *, app: str, config: Config, events: Events) -> None:
        self.backend: Backend = backend
        self.admin = backend
        """The same backend, for operators' tools that run beside agents. The session itself does not use it."""
        self.provisioner = Provisioner(
            backend, management=config.notification_backend.jetstream.stream_management, events=events
        )
        self.own_streams = Provisioner(backend, management="reconcile", events=events, removes_replicas=False)
        """Our own streams are ours to make and to change, whatever may be done to the others'. Apps share some of them,
        and another app's configuration may ask for more replicas."""
        self._traces = _traces(config)
        publisher = Publisher if self._traces is None else self._traces.publisher
        self.publisher = publisher(
            backend, config=config, provisioner=self.provisioner, own_streams=self.own_streams, events=events
        )
        self.runs: dict[str, SubscriptionRun] = {}
        """The agents at work, by name."""
        self._dead_letters = DeadLetterStore(backend, app=app, config=config, provisioner=self.own_streams)
        self._last_failures = LastFailures(backend, app=app)
        self._agents = AgentSubscriptions(
            backend,
            app=app,
            config=config,
            provisioner=self.provisioner,
            own_streams=self.own_streams,
            publisher=self.publisher,
            dead_letters=self._dead_letters,
            last_failures=self._last_failures,
            events=events,
            traces=self._traces,
        )
        self._app = app
        self._config = config
        self._priority = config.workers.priority
        self._events = events

    def traced(self) -> AbstractContextManager[None]:
        """Make spans of settlements while the block runs, where the configuration asks for them."""
        return nullcontext() if self._traces is None else self._traces.hearing(self._events)

    async def replayer(
        self,
        event_type: str,
        where: Filter,
        *,
        waits: bool = False,
        decode: Callable[[bytes], Any] | None = None,
    ) -> Replayer:
        """Return a reader of stored notifications, which makes and changes no stream.

        Raises as `parse_where` does, `RefusedError` for a stream that cannot be used, and `NotFoundError` for one that
        does not exist, unless the reader `waits` for it.
        """
        declared = self._config.event_type(event_type)
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
            stream=spec.name,
            filters=topics.filter_subjects(parsed),
            reader=NotificationReader(event_type, declared, where=parsed, decode=decode),
            events=self._events,
        )

    async def request(
        self, wanted: Notify, reply: str, where: Filter | None, *, timeout_seconds: float, reply_type: Any
    ) -> Notification[Any]:
        """See `App.request`."""
        from aviso_workers.engine.requests import request

        try:
            read = payloads.decoder(reply_type)
        except TypeError as error:
            raise DeclarationError(f"request: reply_type= cannot be read: {error}") from error
        if where is None:
            fields = schema.topic_of(reply, self._config.event_type(reply)).key_order
            where = {field: wanted.identifier[field] for field in fields if field in wanted.identifier}
        if reply == wanted.event_type or not where:
            raise DeclarationError(
                f"request: nothing says which {reply!r} is its reply: name an event type in reply= that is not that of "
                "the request, and in where= the fields that its reply has"
            )
        replies = await self.replayer(reply, where, waits=True, decode=bytes)
        found = await request(
            wanted,
            self.backend,
            self.publisher,
            replies,
            stream=self._stream(reply).name,
            timeout_seconds=timeout_seconds,
        )
        try:
            return structs.replace(found, payload=read(found.payload))
        except UndecodableError as error:
            raise UndecodableError(f"reply {found.id}: {error}") from error

    async def cancel(self, event_type: str, message_id: str) -> bool:
        """Forget a notification that waits to be delivered. Raises `UnknownEventTypeError`, `BackendError`."""
        stream = self._stream(event_type).name
        waiting = delayed_messages.waiting(stream, message_id)
        try:
            return await self.backend.purge_stream(delayed_messages.stream_of(stream), subject=waiting) > 0
        except NotFoundError:
            return False  # nothing was ever to be delivered later

    async def open_windows(self, agent: Agent[Any, Any], key: str) -> list[Window[Any]]:
        """See `App.open_windows`."""

        async def attempt() -> list[Window[Any]]:
            return await window_records.open_windows(agent, self.backend, app=self._app, key=key)

        patience = self._config.notification_backend.jetstream.publish_deadline_seconds
        return await retried(attempt, clock=self.backend.clock, patience_seconds=patience)

    def connect(self, tables: Mapping[str, Table[Any] | Counter]) -> AbstractAsyncContextManager[Any]:
        """Return the app's tables, connected while they are entered."""
        if not tables:
            return nullcontext()
        from aviso_workers.features.tables import Tables

        return Tables(tables, self.backend, app=self._app, config=self._config, own_streams=self.own_streams)

    async def work(
        self,
        app: Any,
        stop: anyio.Event,
        *,
        agents: Sequence[Agent[Any, Any]],
        given: Mapping[Any, Any] | None = None,
        begun: anyio.Event | None = None,
    ) -> None:
        """Run these agents, and the app's timers and tasks, until `stop`; then let them finish. `given` has values in
        place of the resources of these types. `begun` is set when each agent reads its stream, or has stated why it
        cannot yet.

        Raises `BackendError` when the connection is lost for good, `RefusedError` where the server is too old for
        what is asked of it, `UnreadableStreamError` where it cannot read its streams, `DeniedError` where it may not
        use the bucket of its records, `ResourceError` where a resource cannot be opened.
        """
        if self._priority:
            self.backend.connection.require_server(2, 12, to=f"read with workers.priority {self._priority}")
        for agent in agents:
            if agent.policy.singleton:
                self.backend.connection.require_server(2, 11, to=f"run agent {agent.name!r} as a singleton")
            if agent.policy.window:
                self.backend.connection.require_server(2, 11, to=f"keep the windows of agent {agent.name!r}")
        if agents:
            await consumer_records.create_bucket(self.backend, self._app)
            self.publisher.compare_key_orders()
        token, hindrances = _STOP.set(stop), Hindrances(agent.name for agent in agents)
        try:
            with (
                dependencies.at_work(app.dependencies.values(), self._agents.outages),
                self._events.heard_by(hindrances.observe, *OBSERVED),
            ):
                async with _opened_resources(app.resources, app, instead=given) as values:
                    await self._work(
                        app,
                        stop,
                        agents=[resources.bound(agent, values) for agent in agents],
                        timers=[resources.bound(timer, values) for timer in app._timers_at_work()],
                        tasks=[resources.bound(task, values) for task in app.tasks],
                        hindrances=hindrances,
                        begun=begun,
                    )
        finally:
            _STOP.reset(token)

    async def _work(
        self,
        app: Any,
        stop: anyio.Event,
        *,
        agents: Sequence[Agent[Any, Any]],
        timers: Sequence[Timer[Any, Any]],
        tasks: Sequence[Task],
        hindrances: Hindrances,
        begun: anyio.Event | None,
    ) -> None:
        known_agents = KnownAgents(self.backend, app=self._app, declared={agent.name for agent in app.agents})
        async with task_group() as watching:
            watching.start_soon(self.backend.connection.failed)
            async with anyio.create_task_group() as work:
                watching.start_soon(self._raise_replicas, app)
                watching.start_soon(self._record_failures)
                watching.start_soon(self._record_declared, app)
                if agents or timers or tasks:
                    of_streams = {agent.name: (agent, self._stream(agent.event_type).name) for agent in agents}
                    recorder = WorkerRecorder(
                        self.backend,
                        self._app,
                        agents=of_streams,
                        runs=self.runs,
                        hindrances=hindrances,
                        timers=tuple(timer.name for timer in timers),
                        code=declarations.code_version(app),
                    )
                    watching.start_soon(recorder.keep_recorded)
                if begun is not None:
                    watching.start_soon(self._tell_begun, agents, begun)  # first, so that it hears of all of them
                for agent in agents:
                    work.start_soon(self.run_agent, agent, stop, known_agents)
                work.start_soon(self.run_delayed_delivery, stop)
                if timers:
                    work.start_soon(self._run_timers, timers, stop)
                for task in tasks:
                    work.start_soon(
                        partial(supervise_task, task, clock=self.backend.clock, events=self._events, stop=stop)
                    )
                await stop.wait()
            watching.cancel_scope.cancel()

    async def _run_timers(self, timers: Sequence[Timer[Any, Any]], stop: anyio.Event) -> None:
        from aviso_workers.features.timers import run_timers

        await run_timers(
            timers,
            backend=self.backend,
            app=self._app,
            events=self._events,
            stop=stop,
            drain_timeout_seconds=self._config.workers.drain_timeout_seconds,
        )

    async def _raise_replicas(self, app: Any) -> None:
        """Add replicas to those streams that exist and have fewer, however long servers do not answer.

        A worker brings in line what it reads when it opens it (`provisioning`). This is for what it only writes, or
        opens when that is first needed, which may be never: dead letters, counters and all buckets. What does not exist
        yet is created with its replicas when it is needed. Replicas are only added: another worker's configuration may
        ask for more.
        """
        buckets = own_buckets.of_app(
            self._app, agents=app.agents, timers=app.timers, tasks=app.tasks, tables=app.tables
        )
        for stream, replicas in _configured_replicas(self._app, self._config, buckets).items():
            while True:
                try:
                    await self.own_streams.raise_replicas(stream, replicas)
                    break
                except UnavailableError:
                    await self.backend.clock.sleep(AGAIN_SECONDS)

    async def _record_declared(self, app: Any) -> None:
        schema = self._config.notification_schema
        timers, tasks = ([each.name for each in declared] for declared in (app.timers, app.tasks))
        while True:
            await declarations.record(self.backend, app=self._app, declared=app, schema=schema, agents=app.agents)
            with suppress(BackendError):
                await failure_records.remove_others(self.backend, app=self._app, timers=timers, tasks=tasks)
            await self.backend.clock.sleep(DOCUMENT_SECONDS)
            from aviso_workers.state import asyncapi

            await asyncapi.record(self.backend, self._config, app)
            await declarations.lost(self.backend, app=self._app)

    async def record_failures(self) -> None:
        """Record what has failed and is not recorded yet, which is done every few seconds anyhow."""
        await self._last_failures.write()

    async def _record_failures(self) -> None:
        with self._events.heard_by(self._last_failures.observe, *failure_recorder.OBSERVED):
            try:
                await self._last_failures.keep_writing()
            finally:
                with clocks.move_on_after(self.backend.clock, LAST_RECORD_SECONDS) as last:
                    last.shield = True
                    await self._last_failures.write()

    async def _tell_begun(self, agents: Sequence[Agent[Any, Any]], begun: anyio.Event) -> None:
        awaited = {(agent.name, self._stream(agent.event_type).name) for agent in agents}
        heard = anyio.Event()

        def hear(event: AgentStarted | AgentDisturbed) -> None:
            awaited.discard((event.agent, event.stream))
            if not awaited:
                heard.set()

        with self._events.heard_by(hear, AgentStarted, AgentDisturbed):
            if awaited:
                await heard.wait()
        begun.set()

    async def run_agent(
        self, agent: Agent[Any, Any], stop: anyio.Event, known_agents: KnownAgents | None = None
    ) -> None:
        """Run the agent until `stop`, then let it finish. Beside `known_agents`, one that may be a renamed one does not
        begin."""
        event_type = self._config.event_type(agent.event_type)
        subscription = self._agents.subscription(agent, event_type, known_agents)
        self.runs[agent.name] = subscription.run
        await self._keep_running(subscription, stop)

    async def run_timer(
        self,
        app: Any,
        timer: Timer[Any, Any],
        times: Sequence[datetime] = (),
        *,
        given: Mapping[Any, Any] | None = None,
        tell: Callable[[Ticked], None] = lambda ticked: None,
    ) -> list[Ticked]:
        """Run one of `App.timers_at_work` with the app's resources for the ticks that were due at these times, or once,
        now, until one fails; return what became of them, and `tell` each. `given` is as for `work`.

        Raises `ResourceError` where a resource cannot be opened.
        """
        from aviso_workers.features.timers import run_now

        ticked: list[Ticked] = []
        async with _opened_resources(app.resources, app, instead=given) as values:
            bound = resources.bound(timer, values)
            with self._events.heard_by(ticked.append, Ticked), self._events.heard_by(tell, Ticked):
                for time in times or (clocks.utc_now(self.backend.clock),):
                    await run_now(bound, time=time, clock=self.backend.clock, events=self._events)
                    if ticked[-1].error is not None:
                        break
        if ticked[-1].error is None:
            self._last_failures.observe(ticked[-1])  # of a failure, the command itself tells
            await self._last_failures.write()
        return ticked

    async def run_delayed_delivery(self, stop: anyio.Event) -> None:
        """Bring, until `stop`, what is due to the streams of all event types, whichever app has published it.

        Nothing waits on a server that is too old to keep it. It may be upgraded while we work.
        """
        while not delayed_messages.is_served(self.backend):
            with anyio.move_on_after(UPGRADED_SECONDS):
                await stop.wait()
                return
        async with task_group() as tasks:
            for event_type in self._config.notification_schema:
                subscription = delayed_delivery.subscription(
                    event_type, self.backend, config=self._config, own_streams=self.own_streams, events=self._events
                )
                tasks.start_soon(self._keep_running, subscription, stop)

    async def _keep_running(self, subscription: Subscription, stop: anyio.Event) -> None:
        await keep_running(
            subscription,
            backend=self.backend,
            events=self._events,
            stop=stop,
            drain_timeout_seconds=self._config.workers.drain_timeout_seconds,
        )

    async def consumer_info(self, agent: Agent[Any, Any]) -> ConsumerInfo:
        """Return the agent's durable consumer. Raises `NotFoundError` where it was never made."""
        return await self.backend.consumer_info(self._stream(agent.event_type).name, agent.durable_name(self._app))

    def _stream(self, event_type: str) -> StreamSpec:
        return streams.event_stream(event_type, self._config.event_type(event_type), self._config)


@asynccontextmanager
async def open_session(
    *, app: str, config: Config, events: Events, opening: Opening = open_backend
) -> AsyncIterator[Session]:
    """Connect; leave to disconnect. Raises `BackendError`."""

    opened = False
    was: tuple[bool, str] | None = None

    def on_connection(*, connected: bool, reason: str, denied: str = "", foreign: str = "", times: int = 0) -> None:
        if foreign:
            events.emit(ForeignAnswer(answer=foreign, times=times))
            return
        if denied:
            events.emit(PermissionDenied(denied=denied))
            return
        nonlocal opened, was
        # What has not changed is not stated again, unless it is why there is no first connection yet.
        if (connected, reason) != was or not (opened or connected):
            events.emit(ConnectionChanged(connected=connected, reason=reason, opened=opened))
        opened, was = opened or connected, (connected, reason)

    foreign: set[tuple[str, int]] = set()

    def on_foreign(*, stream: str, sequence: int, problem: str) -> None:
        if (stream, sequence) in foreign:
            return
        if len(foreign) == MAX_FOREIGN:
            foreign.clear()
        foreign.add((stream, sequence))
        error = UndecodableError(problem)
        events.emit(Unreadable(stream=stream, sequence=sequence, error=error, reason="foreign"))

    async with opening(config, on_connection=on_connection, on_foreign=on_foreign, owner=app) as backend:
        if backend.connection.slow_because:
            events.emit(ConnectionSlow(reason=backend.connection.slow_because))
        session = Session(backend, app=app, config=config, events=events)
        with session.traced():
            yield session


def _traces(config: Config) -> Spans | None:
    """Return the traces of an app whose configuration asks for them. Raises `ConfigError` where they cannot be had."""
    if not config.workers.traces.enabled:
        return None
    if lacking := config.workers.traces.lacking:
        raise ConfigError([f"workers.traces.enabled: {lacking}"])
    from aviso_workers.features.traces import Spans

    return Spans(config)


@asynccontextmanager
async def _opened_resources(
    declared: Sequence[Resource], app: Any, *, instead: Mapping[Any, Any] | None = None
) -> AsyncIterator[Mapping[Any, Any]]:
    """Open a worker's resources in the order in which they need each other, and close them in the opposite one.

    Return what they give, by type; the app is there too. `instead` has values of types that are not opened then. Raises
    `ResourceError` where one cannot be opened.
    """
    values: dict[Any, Any] = dict.fromkeys(type(app).__mro__, app) | dict(instead or {})
    async with AsyncExitStack() as stack:
        for resource in resources.in_order([each for each in declared if each.scope == "worker"]):
            if resource.gives in values:
                continue
            given = {name: values[wanted] for name, wanted in resource.needs.items()}
            opening = asynccontextmanager(resource.function)(**given)
            value = await calls.attempt(stack.enter_async_context, opening)
            if isinstance(value, Failure):
                raise _cannot_be_opened(resource, value.error) from value.error
            values[resource.gives] = value
        yield values


def _cannot_be_opened(resource: Resource, error: BaseException) -> AvisoWorkersError:
    if isinstance(error, AvisoWorkersError):
        return error
    return ResourceError(f"resource {resource.name!r} cannot be opened: {describe(error)}")


def _configured_replicas(app: str, config: Config, buckets: OwnBuckets) -> dict[str, int]:
    """Return how many replicas the streams of an app's own state are to have, by stream; empty where nobody says."""
    of_all = config.notification_backend.jetstream.replicas
    of_streams = config.workers.dead_letters.replicas or of_all
    wanted = {own_streams.of_app(kind, app): of_streams for kind in (DEAD_LETTERS, COUNTERS)}
    wanted |= {f"KV_{bucket}": of_all for bucket in (*buckets.by_key, *buckets.listed, *buckets.written)}
    return {stream: replicas for stream, replicas in wanted.items() if replicas}
