"""An agent as a subscription: its two consumers, its flow, its handler, and what ends its deliveries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs

from aviso_workers.aviso import schema, topics
from aviso_workers.aviso.codec import NotificationReader
from aviso_workers.aviso.notifications import Notification
from aviso_workers.aviso.schema import EventType, Topic, Where
from aviso_workers.backends import Backend, ConsumerInfo, Delivery
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.config import Config, streams
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.batches import Batch, Stream
from aviso_workers.declare.verdicts import Term
from aviso_workers.engine import acknowledging, consumer_recorder, key_orders
from aviso_workers.engine.acknowledging import OnDeadLetter, Settler
from aviso_workers.engine.attempts import Failures
from aviso_workers.engine.calls import Timeouts
from aviso_workers.engine.consumer_recorder import ConsumerRecorder
from aviso_workers.engine.dead_letter_store import DeadLetterStore, Requeued
from aviso_workers.engine.decisions import Decisions
from aviso_workers.engine.failure_recorder import LastFailures
from aviso_workers.engine.flow import MAX_PREFETCH, Flow, Isolation
from aviso_workers.engine.handlers import (
    BatchHandler,
    Guard,
    HandlerContext,
    NotificationHandler,
    Outputs,
    StreamHandler,
)
from aviso_workers.engine.outages import KeyGate, Outage
from aviso_workers.engine.publisher import Publisher
from aviso_workers.engine.redeliveries import Redeliveries
from aviso_workers.engine.repeats import Repeats
from aviso_workers.engine.shared_filters import SharedFilter
from aviso_workers.engine.shields import Shield
from aviso_workers.engine.singletons import SingletonCalls
from aviso_workers.engine.subscription import Feed, Handler, Subscription, SubscriptionRun, consumer_spec
from aviso_workers.errors import NotFoundError, UndecodableError
from aviso_workers.events import Events, Unreadable
from aviso_workers.jetstream import answers
from aviso_workers.jetstream.specs import GROUP, PINNED, PRIORITIZED, ConsumerSpec, StreamSpec
from aviso_workers.state import dead_letter_records, own_streams
from aviso_workers.state.dead_letter_records import retry_subject
from aviso_workers.state.known_agents import KnownAgents
from aviso_workers.state.own_streams import RETRIES
from aviso_workers.state.versions import Versions

if TYPE_CHECKING:
    from aviso_workers.features.limits import KeyLimit
    from aviso_workers.features.traces import Spans
    from aviso_workers.features.windows import WindowHandler

ORDERED_PREFETCH = 1000
"""Deliveries that may wait with an ordered agent: more than its concurrency, because what waits behind
another one of its key is held too."""
STREAM_PREFETCH = 16
"""Deliveries that may wait for each call of a function of a Stream, which can take many before the first is done."""
SINGLETON_HEARTBEAT_SECONDS = 3.0
"""A singleton that has lost what it handles is ended within a third of this."""
HANDLERS: dict[type, Callable[[HandlerContext], Handler]] = {
    Notification: NotificationHandler,
    Batch: BatchHandler,
    Stream: StreamHandler,
}


class AgentSubscriptions(Struct, eq=False, dict=True):
    """Makes the subscriptions of an app's agents; those of one process share an isolation."""

    backend: Backend
    app: str
    config: Config
    provisioner: Provisioner
    own_streams: Provisioner
    publisher: Publisher
    dead_letters: DeadLetterStore
    last_failures: LastFailures
    events: Events
    traces: Spans | None = None

    def __post_init__(self) -> None:
        self._isolation = Isolation(self.backend.clock)
        self.outages: dict[str, Outage] = {}
        """By name, how the dependencies of agents that are at work are here."""

    def subscription(
        self,
        agent: Agent[Any, Any],
        event_type: EventType,
        known_agents: KnownAgents | None = None,
    ) -> Subscription:
        """Return the agent's subscription. Raises as `parse_where` does."""
        where = schema.parse_where(agent.event_type, event_type, agent.where)
        stream = streams.event_stream(agent.event_type, event_type, self.config)
        clock, policy = self.backend.clock, agent.policy
        singleton_calls = SingletonCalls() if policy.singleton else None
        outage, gate = self._outage(agent, where.topic)
        limits, of_limits = self._limits(agent, where.topic)
        stops: list[KeyGate | KeyLimit] = [*limits, *([gate] if gate else [])]  # a gate has no try to give back
        flow = Flow(
            clock,
            workers=policy.concurrency,
            least=_prefetch(agent),
            # A singleton holds one at a time, and asks for the next one whenever one begins.
            most=1 if policy.singleton else MAX_PREFETCH,
            key=topics.key_of(where.topic, policy.order_by) if policy.order_by else None,
            isolation=self._isolation,
            limits=stops,
            pace=outage.pace if policy.window is None else None,
            **({"on_lost": singleton_calls.end} if singleton_calls and agent.can_be_cancelled else {}),
        )
        for each in stops:
            each.attach(flow)
        shield = Shield(clock)
        failures = Failures(
            self.backend, app=self.app, agent=agent.name, stream=stream.name, shield=shield, events=self.events
        )
        decisions = Decisions(self.backend, app=self.app, agent=agent.name, stream=stream.name, flow=flow)
        repeats = Repeats(self.backend, stream=stream.name, consumer=agent.durable_name(self.app))
        reader = NotificationReader(
            agent.event_type,
            event_type,
            where=where,
            payload_type=agent.payload_type,
            decode=agent.decode,
            key_type=agent.key_type,
        )
        settler = Settler(
            agent,
            stream=stream.name,
            flow=flow,
            repeats=repeats,
            failures=failures,
            decisions=decisions,
            dead_letters=self.dead_letters,
            last_failures=self.last_failures,
            shield=shield,
            outage=outage,
            gate=gate,
            clock=clock,
            events=self.events,
            on_dead_letter=self._on_dead_letter(agent, event_type, reader, stream.name, outage),
        )
        timeouts = Timeouts(agent, clock=clock, events=self.events)
        guard = of_limits if singleton_calls is None else singleton_calls.call
        context = HandlerContext(
            settler,
            reader=reader,
            outputs=Outputs(agent, app=self.app, stream=stream.name, publisher=self.publisher),
            timeouts=timeouts,
            guard=guard if self.traces is None else self.traces.guard(agent, guard),
        )
        windows = self._windows(context)
        run = SubscriptionRun(
            handler=windows or HANDLERS[agent.form](context),
            flow=flow,
            clock=clock,
            ack_wait_seconds=_reported_within(agent, policy.ack_wait),
            redeliveries=Redeliveries(backend=self.backend, settler=settler, isolation=self._isolation),
            timeouts=timeouts,
            outage=outage,
            keeps_reading=policy.singleton,
            shield=shield,
        )
        shared = self._shared_filter(agent, event_type, where, stream, run, known_agents)
        return Subscription(
            name=agent.name,
            feeds=self._feeds(agent, event_type, stream, shared, run, settler, repeats, windows),
            run=run,
            beside=[
                shared.keep_in_line,
                decisions.work,
                outage.work,
                *(limit.work for limit in limits),
            ],
            also=windows.close if windows is not None else None,
            at_end=shared.record_last,
        )

    def _outage(self, agent: Agent[Any, Any], topic: Topic) -> tuple[Outage, KeyGate | None]:
        """Return how what an agent depends on is here, and what stops its notifications of a key that is away."""
        dependency = agent.dependency
        outage = self.outages.get(dependency.name) if agent.policy.depends_on is dependency else None
        if outage is None:
            declared = agent.policy.depends_on is not None
            outage = Outage(dependency, declared=declared, clock=self.backend.clock, events=self.events)
            if declared:
                self.outages[dependency.name] = outage
        if not dependency.by:
            return outage, None
        return outage, outage.gate(topics.key_of(topic, dependency.by))

    def _on_dead_letter(
        self, agent: Agent[Any, Any], event_type: EventType, reader: NotificationReader, stream: str, outage: Outage
    ) -> OnDeadLetter | None:
        """Return what calls the agent's function of `on_dead_letter`, if it has one."""
        if not agent.dead_letter_functions:
            return None
        from aviso_workers.engine.dead_letter_calls import DeadLetterCalls

        running = agent.running(agent.dead_letter_functions[0])
        readers = reader, NotificationReader(agent.event_type, event_type, payload_type=bytes)
        outputs = Outputs(running, app=self.app, stream=stream, publisher=self.publisher)
        call = DeadLetterCalls(
            running, readers, outputs, outage=outage, clock=self.backend.clock, events=self.events
        ).call
        return call if self.traces is None else self.traces.dead_letters(agent, call)

    def _limits(self, agent: Agent[Any, Any], topic: Topic) -> tuple[list[KeyLimit], Guard | None]:
        """Return the agent's limits, in the order in which they are asked, and what makes its calls."""
        if not agent.policy.limits:
            return [], None
        from aviso_workers.features.limits import guard_of, limits_of

        limits = limits_of(agent, app=self.app, topic=topic, backend=self.backend, events=self.events)
        return limits, guard_of(limits)

    def _windows(self, context: HandlerContext) -> WindowHandler | None:
        """Return what closes the windows of an agent that has some."""
        if context.agent.policy.window is None:
            return None
        from aviso_workers.features.windows import WindowHandler

        return WindowHandler(
            context,
            context.agent.policy.window,
            backend=self.backend,
            app=self.app,
            config=self.config,
        )

    def _shared_filter(
        self,
        agent: Agent[Any, Any],
        event_type: EventType,
        where: Where,
        stream: StreamSpec,
        run: SubscriptionRun,
        known_agents: KnownAgents | None,
    ) -> SharedFilter:
        policy = agent.policy
        consumer = consumer_spec(
            agent.durable_name(self.app), topics.filter_subjects(where), policy.ack_wait, start=policy.start
        )
        everything = topics.filter_subjects(schema.parse_where(agent.event_type, event_type, {}))
        return SharedFilter(
            _served(consumer, singleton=policy.singleton, priority=self.config.workers.priority),
            everything=everything,
            registry=Versions(self.backend, app=self.app, agent=agent.name, stream=stream.name),
            recorder=self._recorder(agent, stream.name, self.provisioner),
            retries=self._recorder(agent, own_streams.of_app(RETRIES, self.app), self.own_streams),
            on_ack_wait=lambda seconds: run.report_within(_reported_within(agent, seconds)),
            function=_name_of(agent.function),
            known_agents=known_agents,
            states_start=policy.states_start,
        )

    def _feeds(
        self,
        agent: Agent[Any, Any],
        event_type: EventType,
        stream: StreamSpec,
        shared: SharedFilter,
        run: SubscriptionRun,
        settler: Settler,
        repeats: Repeats,
        windows: WindowHandler | None,
    ) -> Sequence[Feed]:
        """Return the stream of the event type, and what is tried again of the agent's dead letters."""
        policy = agent.policy
        consumer = consumer_spec(shared.consumer.durable_name, (retry_subject(self.app, agent.name),), policy.ack_wait)
        retries_consumer = _served(consumer, singleton=policy.singleton)
        leaves = None if shared.wants_everything else shared.leaves

        async def require_order() -> None:
            await settler.require_outputs()
            await key_orders.require_same(self.backend, stream.name, agent.event_type, event_type)

        async def ensure_retries() -> ConsumerInfo:
            with suppress(NotFoundError):  # there is no stream yet
                await require_order()
            return await shared.ensure_retries(retries_consumer)

        async def ensure() -> ConsumerInfo:
            await require_order()
            if windows is not None:
                await windows.require_same()
            return await shared.ensure()

        return [
            Feed(
                stream=stream,
                consumer=shared.consumer,
                ensure=ensure,
                interrupted=(
                    shared.until_limited,
                    settler.until_refused,
                    *([windows.until_refused] if windows is not None else []),
                ),
                leaves=leaves,
                repeats=repeats,
                provisioner=self.provisioner,
                in_order=run.flow.ordered,
                # Who is busy, or waits for something to come, goes on asking, or would not stay pinned.
                capacity=(lambda: 1) if policy.singleton else None,
                priority=self.config.workers.priority,
            ),
            Feed(
                stream=dead_letter_records.retries_spec(self.app, self.config),
                consumer=retries_consumer,
                ensure=ensure_retries,
                interrupted=(settler.until_refused,),
                provisioner=self.own_streams,
                unwrap=Requeued,
                refuses=self._refuses,
                leaves=leaves,
                capacity=(lambda: int(run.flow.pinned(stream.name))) if policy.singleton else None,
            ),
        ]

    def _refuses(self, delivery: Delivery) -> bool:
        """Terminate a retry that no operator has asked for, and return whether it is one."""
        message = delivery.message
        if why := answers.why_foreign(message):
            acknowledging.settle(delivery, Term("no retry of a dead letter"))
            error = UndecodableError(why)
            stream = own_streams.of_app(RETRIES, self.app)
            self.events.emit(Unreadable(stream=stream, sequence=message.sequence, error=error, reason="foreign"))
        return bool(why)

    def _recorder(self, agent: Agent[Any, Any], stream: str, provisioner: Provisioner) -> ConsumerRecorder:
        return ConsumerRecorder(
            self.backend,
            provisioner,
            app=self.app,
            agent=agent.name,
            stream=stream,
            longest_seconds=consumer_recorder.longest_seconds(agent.policy),
            attempt_seconds=consumer_recorder.attempt_seconds(agent.policy),
            events=self.events,
        )


def _name_of(function: Any) -> str:
    """Return the module and the qualified name of a function; empty for an object that has none."""
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__qualname__", "")
    return f"{function.__module__}:{name}" if name else ""


def _reported_within(agent: Agent[Any, Any], ack_wait_seconds: float) -> float:
    """Within how many seconds the agent's worker has to report what it holds."""
    return min(ack_wait_seconds, SINGLETON_HEARTBEAT_SECONDS) if agent.policy.singleton else ack_wait_seconds


def _prefetch(agent: Agent[Any, Any]) -> int:
    """Return how many to prefetch: as many as can begin at once, so that a task that becomes free finds work."""
    policy = agent.policy
    if policy.order_by:
        return max(ORDERED_PREFETCH, policy.concurrency)
    return at_once(agent)


def at_once(agent: Agent[Any, Any]) -> int:
    """Return how many notifications the calls of an agent can take at once, in one worker."""
    policy = agent.policy
    return policy.concurrency * {Batch: policy.batch.size, Stream: STREAM_PREFETCH}.get(agent.form, 1)


def _served(consumer: ConsumerSpec, *, singleton: bool, priority: int = 0) -> ConsumerSpec:
    """Return the consumer, with which of its readers are served first."""
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
