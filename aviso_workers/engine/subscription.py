"""A subscription at work: its consumers opened, watched and opened again after a wait, its workers drained in order.

`session` hands in a `Subscription`: an agent (`agent_subscriptions`), or what is delivered later (`delayed_delivery`).
A delivery goes from its consumer into the flow, from which a handler takes it. What never gets there is what another
version of the agent wants (`shared_filters`), what was settled before and comes again, and a dead letter that is tried
again whose sequence is taken.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import anyio
from anyio.abc import TaskGroup
from msgspec import UNSET, Struct, field

from aviso_workers import clocks
from aviso_workers.aviso.codec import Message, lacks_body
from aviso_workers.aviso.literals import SECOND
from aviso_workers.backends import Backend, Consumer, ConsumerInfo, Delivery
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.clocks import Clock
from aviso_workers.declare import outputs
from aviso_workers.declare.agents import Task
from aviso_workers.declare.retry import Backoff, Restarts
from aviso_workers.declare.verdicts import Failure, Nak
from aviso_workers.engine import acknowledging, calls
from aviso_workers.engine.calls import Timeouts
from aviso_workers.engine.flow import Flow
from aviso_workers.engine.outages import Outage
from aviso_workers.engine.redeliveries import Redeliveries
from aviso_workers.engine.repeats import Repeats
from aviso_workers.engine.shields import Shield
from aviso_workers.errors import BackendError, NotFoundError, UnavailableError
from aviso_workers.events import AgentDisturbed, AgentStarted, AgentStopped, Events, Passed, TaskFailed
from aviso_workers.jetstream import identities, metadata, specs
from aviso_workers.jetstream.specs import ConsumerSpec, StreamSpec
from aviso_workers.task_groups import task_group

UNREAD_SECONDS = 10.0
"""When a dead letter is delivered again whose body could not be read."""
SEQUENCE_HELD_SECONDS = 1.0
"""How much later a dead letter that was handed back is delivered again whose sequence another notification has."""
Deliver = Callable[[Sequence[Delivery]], None]
MAX_ACK_PENDING = 100_000
"""Unsettled notifications of one consumer of an agent over all its workers; those that wait for a retry count, so that
an agent handles nothing new while so many wait. More would not be better: a nats-server moves the whole queue of what
is due for each one that it delivers again. Where 100,000 were due at one moment, nats-server 2.15 delivered 15,000 a
second and the new ones beside them; of 300,000 it delivered 700 a second, and nothing new for minutes.
"""
HEARTBEATS = 3
"""How often what is held is reported in progress while one `ack_wait` passes."""
LONGEST_WAIT_SECONDS = 10.0
REOPENED = Backoff(first=0.1, factor=2.0, max=LONGEST_WAIT_SECONDS, jitter=0.0)
"""When a consumer that was lost is opened again, and a task that raised is started again."""
HEALTHY_SECONDS = 30.0
"""Who ran for so long before failing starts again without a wait that has grown."""
SETTLE_TIMEOUT_SECONDS = 5.0
RECORDS_SECONDS = 1.0
"""How long it may take to remove the records of handlers that were cancelled."""
EXPIRY_SECONDS = 1.0
"""How much later than after `ack_wait` a server may notice that a delivery was not settled."""
QUIET_SECONDS = 1.0
"""When nothing has come for so long, a server has delivered all that was due."""


class Feed(Struct, frozen=True, kw_only=True):
    """A durable consumer that an agent reads, and its stream."""

    stream: StreamSpec
    consumer: ConsumerSpec
    provisioner: Provisioner
    unwrap: Callable[[Delivery, Message], Delivery] | None = None
    """Returns the delivery that the agent is given, made of one that came and of its whole message."""
    refuses: Callable[[Delivery], bool] | None = None
    """Takes a delivery that is not to be unwrapped, and returns whether it did. None: there is none."""
    in_order: bool = False
    """Deliveries must come in order: what a dead worker held is waited for before anything new is asked for."""
    capacity: Callable[[], int] | None = None
    """How many deliveries could be taken now; None where that is the agent's to say."""
    priority: int = 0
    """See `Backend.consume`."""
    ensure: Callable[[], Awaitable[ConsumerInfo]] | None = None
    """Creates the consumer or brings it in line; None where `consumer` says all that is wanted of it."""
    leaves: Callable[[Delivery], bool] | None = None
    """Takes a delivery that the agent is not to have, and returns whether it did. None: the agent has all."""
    interrupted: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()
    """Each returns when reading has to stop until `ensure` lets it begin again."""
    repeats: Repeats | None = None
    """The notifications of the stream that were settled lately; None where what comes again is always handled again."""


def delivering(feed: Feed, flow: Flow, *, backend: Backend, joining: TaskGroup) -> Deliver:
    """Return the function that a backend calls with deliveries of the feed. It puts those for the agent into the flow.

    What cannot be done at once is done by a task of `joining`.
    """
    put = flow.put_all if feed.repeats is None else _unrepeated(feed.repeats, flow, joining)
    leaves = feed.leaves
    take = put if leaves is None else lambda deliveries: put([each for each in deliveries if not leaves(each)])
    if feed.unwrap is None:
        return take
    return _Unwrapping(feed, feed.unwrap, flow, backend, joining, put, take).deliver


class _Unwrapping(Struct):
    """Puts what comes of a feed into the flow as what the agent is to see."""

    feed: Feed
    unwrap: Callable[[Delivery, Message], Delivery]
    flow: Flow
    backend: Backend
    joining: TaskGroup
    put: Deliver
    take: Deliver

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            if self.feed.refuses is not None and self.feed.refuses(delivery):
                continue
            if lacks_body(delivery.message):
                self.joining.start_soon(self._deliver_whole, delivery)
            else:
                self._take_unwrapped(self.unwrap(delivery, delivery.message))

    async def _deliver_whole(self, delivery: Delivery) -> None:
        try:
            message = await self.backend.message(self.feed.stream.name, delivery.message.sequence)
        except BackendError:
            acknowledging.settle(delivery, Nak(UNREAD_SECONDS))
        else:
            self._take_unwrapped(self.unwrap(delivery, message or delivery.message))

    def _take_unwrapped(self, delivery: Delivery) -> None:
        """Take an unwrapped delivery, unless the flow holds the agent's own message of the same sequence.

        A flow holds one delivery of each sequence, and settling one of the two does not settle the other.
        """
        held = self.flow.delivery_of(delivery.message.sequence)
        if held is None or held.message == delivery.message:
            self.take([delivery])
        else:
            acknowledging.settle(delivery, Nak(SEQUENCE_HELD_SECONDS))


def _unrepeated(repeats: Repeats, flow: Flow, joining: TaskGroup) -> Deliver:
    """Return what puts deliveries into the flow and leaves out what was settled here before; see `repeats`."""

    async def settle() -> None:
        found, settlement = await repeats.judge()
        for delivery in found:
            if settlement is None:
                flow.put(delivery)
            else:
                acknowledging.settle(delivery, settlement)

    def put_new(deliveries: Sequence[Delivery]) -> None:
        if not repeats.may_include(deliveries):
            flow.put_all(deliveries)
            return
        for delivery in deliveries:
            if not repeats.includes(delivery):
                flow.put(delivery)
            elif repeats.add(delivery):
                joining.start_soon(settle)

    return put_new


class Handler(Protocol):
    """Takes deliveries from a flow and settles them: a call form of authors' functions, or a feature's."""

    async def work(self) -> None:
        """Take from the flow and settle, until the flow is closed."""


class SubscriptionRun(Struct, eq=False, kw_only=True):
    """A subscription's workers, which outlive a lost consumer: what runs goes on while the consumer is opened again."""

    handler: Handler
    flow: Flow
    clock: Clock
    ack_wait_seconds: float
    """No such time passes without a report that what is held here is in progress."""
    shield: Shield
    redeliveries: Redeliveries | None = None
    timeouts: Timeouts | None = None
    outage: Outage | None = None
    """How what the agent depends on is; None of what is no agent."""
    keeps_reading: bool = False
    """Whether it reads on while all of its calls hang, because nobody else could take anything."""
    returned: int = 0
    """Deliveries that were given back because the worker stops."""
    abandoned: list[Delivery] = []
    """Deliveries that were given back although their calls still run, because these cannot be cancelled."""
    beat_again: anyio.Event = field(default_factory=anyio.Event)
    stopping: bool = False

    def capacity(self) -> int:
        """Return how many deliveries could be taken now."""
        if self.stopping or self._is_stuck:
            return 0
        return self.flow.capacity()

    def report_within(self, ack_wait_seconds: float) -> None:
        """Let no such time pass from now on without a report that what is held here is in progress."""
        self.ack_wait_seconds = ack_wait_seconds
        self.beat_again.set()

    def begin_reading(self) -> int:
        """Trust what a consumer delivers that is opened now, and return how often what was held was left to others: its
        deliveries count only as long as that is so.
        """
        if not self.flow.consumers and not self.keeps_reading:
            self.flow.trust_until(self.clock.monotonic() + self.ack_wait_seconds)
        return self.flow.lapses

    def detach(self, stream: str) -> None:
        """Remove a consumer that is not read any more. A stuck agent gives back what waits with its last one."""
        self.flow.detach(stream)
        if self._is_stuck and not self.flow.consumers and not self.stopping:
            acknowledging.give_back(self.flow.withdraw())

    async def until_stuck(self) -> None:
        """Wait until nothing can be handled, however long."""
        if self.timeouts is None or self.keeps_reading:
            await anyio.sleep_forever()
        else:
            await self.timeouts.until_stuck()

    async def until_not_stuck(self) -> None:
        if self.timeouts is not None and not self.keeps_reading:
            await self.timeouts.until_not_stuck()

    async def work(self, *, stop: anyio.Event, drain_timeout_seconds: float) -> None:
        """Handle what arrives until `stop`; then give back what has not begun, and finish what has.

        What still runs after the drain timeout is cancelled and given back too. What cannot be cancelled is given back
        as well, but waited for.
        """
        abandoning = anyio.CancelScope(shield=True)
        async with anyio.create_task_group() as beating:
            beating.start_soon(self._heartbeat)
            beating.start_soon(self.shield.watch)
            beating.start_soon(self._abandon, abandoning)
            try:
                with anyio.CancelScope() as draining:
                    async with anyio.create_task_group() as workers:
                        if self.redeliveries is not None:
                            workers.start_soon(self.redeliveries.work)
                        for _ in range(self.flow.workers):
                            workers.start_soon(self.handler.work)
                        await stop.wait()
                        drained_by = self.clock.monotonic() + drain_timeout_seconds
                        timer = self.clock.call_at(drained_by, partial(self._end_draining, draining))
                        self.stopping = True
                        self.flow.close()
                        for consumer in self.flow.consumers:
                            await consumer.stop()  # before anything is given back: it would come here again
                        if not self.flow.ordered:  # else all of it at the end, or a key would overtake its head
                            self.returned += acknowledging.give_back(self.flow.withdraw())
                    timer.cancel()
            finally:  # also where all of this is cancelled
                abandoning.cancel()
                try:
                    if self.redeliveries is not None:
                        async with self.shield.hold():
                            # Before what was cancelled is given back, or it would look like what ended its worker.
                            await self.redeliveries.end()
                finally:
                    self.returned += acknowledging.give_back(self.flow.withdraw(running=True))
            beating.cancel_scope.cancel()

    async def _abandon(self, scope: anyio.CancelScope) -> None:
        """Give back what cannot be cancelled, when settlements that have begun have had their time."""
        with scope:
            await self.shield.ended.wait()
            if self.redeliveries is not None:
                with clocks.move_on_after(self.clock, RECORDS_SECONDS):
                    await self.redeliveries.end()
            self.abandoned = self.flow.withdraw(running=True)
            self.returned += acknowledging.give_back(self.abandoned)
            if self.abandoned and self.timeouts is not None:
                self.timeouts.tell_abandoned([delivery.message.sequence for delivery in self.abandoned])

    def _end_draining(self, draining: anyio.CancelScope) -> None:
        draining.cancel()
        self.shield.limit()

    @property
    def overdue(self) -> int:
        """How many calls run on after their timeout."""
        return 0 if self.timeouts is None else self.timeouts.overdue

    @property
    def _is_stuck(self) -> bool:
        return self.timeouts is not None and self.timeouts.stuck and not self.keeps_reading

    async def _heartbeat(self) -> None:
        while True:
            with clocks.move_on_after(self.clock, self.ack_wait_seconds / HEARTBEATS):
                await self.beat_again.wait()
            self.beat_again = anyio.Event()
            if not self.flow.trusted:
                self.flow.lapse()
            sent_at = self.clock.monotonic()
            await self.flow.heartbeat()
            if not self.keeps_reading and await self._reached() and self.flow.trusted:
                self.flow.trust_until(sent_at + self.ack_wait_seconds)

    async def _reached(self) -> bool:
        """Return whether the server has the reports that were sent, where there was something to report."""
        with clocks.move_on_after(self.clock, self.ack_wait_seconds), suppress(BackendError):
            for consumer in self.flow.consumers[:1] if len(self.flow) else ():
                await consumer.reached()
            return bool(self.flow.consumers)
        return False


class Subscription(Struct, frozen=True, kw_only=True):
    """The reader of durable consumers and the handler of their deliveries: an agent, or one of our own."""

    name: str
    feeds: Sequence[Feed]
    run: SubscriptionRun
    beside: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()
    """Run beside it, for as long as it runs."""
    also: Callable[[anyio.Event], Coroutine[Any, Any, None]] | None = None
    """Works beside the handlers until it is told to stop, and ends by itself."""
    at_end: Callable[[], Awaitable[None]] | None = None
    """Run when all of it has ended."""


def consumer_spec(
    durable: str,
    filters: tuple[str, ...],
    ack_wait: float,
    *,
    max_ack_pending: int = MAX_ACK_PENDING,
    start: str = "all",
) -> ConsumerSpec:
    """Return the durable consumer of a subscription; `ack_wait` is in seconds."""
    fields = metadata.starting(start)
    fields["metadata"] |= specs.monitoring_of(max_ack_pending)
    return ConsumerSpec(
        durable_name=durable,
        filter_subjects=filters,
        ack_wait=int(ack_wait * SECOND),
        max_ack_pending=max_ack_pending,
        max_deliver=-1,  # only the agent ends the attempts, when its dead letter is stored
        **fields,
    )


async def keep_running(
    subscription: Subscription, *, backend: Backend, events: Events, stop: anyio.Event, drain_timeout_seconds: float
) -> None:
    """Run a subscription until `stop`, then let it finish. A lost consumer or stream is recreated."""
    run = subscription.run
    drained = anyio.Event()
    async with anyio.create_task_group() as beside:
        for each in subscription.beside:
            beside.start_soon(each)
        async with anyio.create_task_group() as tasks:
            if subscription.also is not None:
                tasks.start_soon(subscription.also, stop)
            async with anyio.create_task_group() as reading:
                for feed in subscription.feeds:
                    reader = _FeedReader(subscription, feed, backend=backend, events=events, stop=stop, drained=drained)
                    reading.start_soon(reader.keep_reading)
                await run.work(stop=stop, drain_timeout_seconds=drain_timeout_seconds)
                drained.set()
            events.emit(AgentStopped(agent=subscription.name, finished=run.flow.finished, returned=run.returned))
        beside.cancel_scope.cancel()
    if subscription.at_end is not None:
        await subscription.at_end()


class _FeedReader(Struct, eq=False):
    """Keeps one feed of a subscription open. It ends after `stop`, when all that was delivered is settled, which
    `drained` says."""

    subscription: Subscription
    feed: Feed
    backend: Backend
    events: Events
    stop: anyio.Event
    drained: anyio.Event
    restarts: Restarts = field(default_factory=lambda: Restarts(REOPENED, healthy_seconds=HEALTHY_SECONDS))
    gave_back: bool = False
    """Whether what waited was given back, because the agent was stuck."""
    lapses: int = 0
    """How often what was held had been left to others when this began to read."""

    @property
    def stream(self) -> str:
        return self.feed.stream.name

    async def keep_reading(self) -> None:
        """Read until it is to stop; what is lost is opened again after a wait."""
        async with anyio.create_task_group() as joining:
            while not self.stop.is_set():
                try:
                    await self._read(joining)
                    self.gave_back = True
                    await _run_until(self.stop, self.subscription.run.until_not_stuck)
                except BackendError as error:
                    if isinstance(error, NotFoundError):
                        self.feed.provisioner.forget(self.stream)
                    delay = self.restarts.next_wait(self.backend.clock.monotonic())
                    self.events.emit(
                        AgentDisturbed(
                            agent=self.subscription.name, stream=self.stream, error=error, again_in_seconds=delay
                        )
                    )
                    await clocks.sleep_until(self.backend.clock, delay, self.stop)
            joining.cancel_scope.cancel()

    async def _read(self, joining: TaskGroup) -> None:
        """Open the consumer and read it until it is lost, the agent is stuck, or it is to stop."""
        feed, run, consumer = self.feed, self.subscription.run, self.feed.consumer.durable_name
        if (made := await self._ensured()) is None:
            return
        info, passed = made
        left = self.gave_back or run.flow.lapses != self.lapses or not len(run.flow)
        gathers = feed.in_order and info.num_ack_pending > 0 and left
        self.gave_back = False
        if gathers:
            await clocks.sleep_until(self.backend.clock, info.config.ack_wait / SECOND + EXPIRY_SECONDS, self.stop)
            run.flow.dispatch.gather(info.num_ack_pending)

        if feed.repeats is not None:
            feed.repeats.opened(info)
        lapses = self.lapses = run.begin_reading()
        put = delivering(feed, run.flow, backend=self.backend, joining=joining)

        def deliver(deliveries: Sequence[Delivery]) -> None:
            if run.flow.lapses == lapses:  # else they may have come before this process was away
                put(deliveries)

        async with self.backend.consume(
            self.stream, consumer, deliver=deliver, capacity=feed.capacity or run.capacity, priority=feed.priority
        ) as opened:
            run.flow.attach(self.stream, opened)
            self.events.emit(
                AgentStarted(agent=self.subscription.name, stream=self.stream, consumer=consumer, passed=passed)
            )
            self.restarts.note_start(self.backend.clock.monotonic())
            if gathers:
                joining.start_soon(_release_when_quiet, run.flow, self.backend.clock)
            try:
                await self._read_on(opened)
            finally:
                run.detach(self.stream)

    async def _ensured(self) -> tuple[ConsumerInfo, Passed | None] | None:
        """Create the consumer if it is missing; return it and the position it had reached.

        Return None if the worker stops first: it does not wait for a server that does not answer.
        """
        feed, made = self.feed, None

        async def make() -> None:
            nonlocal made
            await feed.provisioner.ensure(feed.stream)
            ensured = feed.ensure() if feed.ensure else feed.provisioner.ensure_consumer(self.stream, feed.consumer)
            info = await ensured
            # Where the agent does not want everything, the consumer lets through more while its versions differ.
            made = info, None if feed.leaves else await _passed(self.backend, feed.stream, info)

        await _run_until(self.stop, make)
        return made

    async def _read_on(self, opened: Consumer) -> None:
        lapsed = self.subscription.run.flow.lapsed
        await _run_until(self.stop, opened.lost, self.subscription.run.until_stuck, lapsed.wait, *self.feed.interrupted)
        await opened.stop()
        if self.stop.is_set():
            await self.drained.wait()
        # What does not get through is delivered again: late, but not lost.
        with clocks.move_on_after(self.backend.clock, SETTLE_TIMEOUT_SECONDS), suppress(BackendError):
            await opened.settled()
        if lapsed.is_set() and not self.stop.is_set():
            self.gave_back = True
            raise UnavailableError(
                "this worker was away for longer than ack_wait: what it held and had not begun is left to others"
            )


async def _release_when_quiet(flow: Flow, clock: Clock) -> None:
    """Let the flow hand out what it gathers once nothing more comes: the rest is held by workers that live."""
    missing = 0
    while flow.dispatch.gathering and flow.dispatch.gathering != missing:
        missing = flow.dispatch.gathering
        await clock.sleep(QUIET_SECONDS)
    if flow.dispatch.gathering:
        flow.release()


async def _passed(backend: Backend, stream: StreamSpec, info: ConsumerInfo) -> Passed | None:
    """Return what the consumer had passed when the agent started, for `AgentStarted.passed`."""
    if stream.subjects is UNSET or not info.config.reads_all(stream.subjects):
        return None
    found = await backend.stream_info(stream.name)
    if not info.config.reads_all(found.config.subjects):  # others have added subjects, which the agent does not read
        return None
    # What left the stream before there was the agent, the agent has not missed.
    sequence = info.position if info.deliveries else found.last_sequence
    return Passed(identities.of(info), sequence, frozenset(info.config.filters))


async def supervise_task(task: Task, *, clock: Clock, events: Events, stop: anyio.Event) -> None:
    """Run the task, which was given its resources, until `stop`; when it raises, start it again after a wait. One that
    returns is done."""
    restarts = Restarts(REOPENED, healthy_seconds=HEALTHY_SECONDS)
    ended: object

    async def finish(_: None) -> None:
        outputs.refuse_unpublished(f"task {task.name!r}", await task.function())

    async def run() -> None:
        nonlocal ended
        ended = await calls.attempt(finish, None)

    while not stop.is_set():
        restarts.note_start(clock.monotonic())
        ended = None
        await _run_until(stop, run)
        if not isinstance(ended, Failure):
            return
        delay = restarts.next_wait(clock.monotonic())
        events.emit(TaskFailed(task=task.name, error=ended.error, again_in_seconds=delay))
        ended = None  # it would be kept during the wait
        await clocks.sleep_until(clock, delay, stop)


async def _run_until(stop: anyio.Event, *functions: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run the functions until one of them ends; `stop` cancels them."""

    async def run(function: Callable[[], Coroutine[Any, Any, None]], scope: anyio.CancelScope) -> None:
        await function()
        scope.cancel()

    async with task_group() as tasks:
        for function in functions:
            tasks.start_soon(run, function, tasks.cancel_scope)
        await stop.wait()
        tasks.cancel_scope.cancel()
