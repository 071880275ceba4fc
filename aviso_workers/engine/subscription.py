"""A subscription at work: its consumers opened, watched and opened again after a wait, its workers drained in order.

`session` hands in a `Subscription`: an agent (`agent_subscriptions`), what exceeds its deliveries (`max_deliveries`),
or what is delivered later (`delayed_delivery`). Each delivery goes from the consumer into the line, from which a
handler takes it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import anyio
from anyio.abc import TaskGroup
from msgspec import UNSET, Struct

from aviso_workers import clocks
from aviso_workers.agents import Task
from aviso_workers.backends import Backend, Consumer, ConsumerInfo, Delivery
from aviso_workers.clocks import Clock
from aviso_workers.codec import Message
from aviso_workers.engine import acknowledging, calling, parts
from aviso_workers.engine.ordering import Line
from aviso_workers.engine.prefetch import Prefetch
from aviso_workers.engine.provisioning import Provisioner
from aviso_workers.engine.redeliveries import Redeliveries
from aviso_workers.engine.repeats import Repeats
from aviso_workers.engine.shielding import Shield
from aviso_workers.engine.threads import Threads
from aviso_workers.errors import BackendError, NotFoundError, UndecodableError
from aviso_workers.events import AgentDisturbed, AgentStarted, AgentStopped, Events, Passed, TaskFailed
from aviso_workers.jetstream import metadata
from aviso_workers.jetstream.fields import SECOND
from aviso_workers.jetstream.specs import ConsumerSpec, StreamSpec
from aviso_workers.retry import Backoff, Restarts
from aviso_workers.verdicts import Failure, Nak, Settlement

__all__ = ["Feed", "Handler", "Run", "Subscription", "consumer_spec", "keep_running", "supervise_task"]

MAX_ACK_PENDING = 100_000
"""Unsettled notifications of one agent over all its workers; those that wait for a retry count, so that an agent
handles nothing new while so many wait. More would not be better: a nats-server moves the whole queue of what is due
for each one that it delivers again. Where 100,000 were due at one moment, nats-server 2.15 delivered 15,000 a second
and the new ones beside them; of 300,000 it delivered 700 a second, and nothing new for minutes.
"""
BEATS = 3
"""How often what is held is reported in progress while one `ack_wait` passes."""
LONGEST_WAIT_SECONDS = 10.0
REOPENED = Backoff(first=0.1, factor=2.0, max=LONGEST_WAIT_SECONDS, jitter=0.0)
"""When a consumer that was lost is opened again, and a task that raised is started again."""
HEALTHY_SECONDS = 30.0
"""Who ran for so long before failing starts again without a wait that has grown."""
SETTLE_TIMEOUT_SECONDS = 5.0
SEQUENCE_HELD_SECONDS = 1.0
"""How much later a dead letter that was handed back is delivered again whose sequence another notification has."""
EXPIRY_SECONDS = 1.0
"""How much later than after `ack_wait` a server may notice that a delivery was not settled."""
QUIET_SECONDS = 1.0
"""When nothing has come for so long, a server has delivered all that was due."""


class Handler(Protocol):
    """What takes deliveries from a line and settles them: a call form of authors' functions, or `Internal`."""

    async def work(self) -> None:
        """Take from the line and settle, until the line is closed."""


class Run:
    """A subscription's workers, which outlive a lost consumer: what runs goes on while the consumer is opened anew."""

    def __init__(
        self,
        handler: Handler,
        *,
        line: Line,
        prefetch: Prefetch,
        clock: Clock,
        ack_wait_seconds: float,
        redeliveries: Redeliveries | None = None,
        threads: Threads | None = None,
        shield: Shield | None = None,
    ) -> None:
        """`line` was made with `prefetch`: it tells it what begins."""
        self.line = line
        self.returned = 0
        """Deliveries that were given back because the worker stops."""
        self._handler = handler
        self._prefetch = prefetch
        self._redeliveries = redeliveries
        self._threads = threads
        self._shield = shield or Shield(clock)
        self._clock = clock
        self._beat_seconds = ack_wait_seconds / BEATS
        self._beat_again = anyio.Event()
        self._stopping = False

    def room(self) -> int:
        """How many deliveries could be taken now."""
        if self._stopping or self._is_stuck:
            return 0
        return self._prefetch.capacity(self.line)

    def pinned(self, stream: str) -> bool:
        """Whether this worker is the one that is given everything of the stream; see `Consumer.pinned`."""
        return self._prefetch.pinned(stream)

    def keep_within(self, ack_wait_seconds: float) -> None:
        """Let no such time pass from now on without a report that what is held here is in progress."""
        self._beat_seconds = ack_wait_seconds / BEATS
        self._beat_again.set()

    def attach(self, stream: str, consumer: Consumer) -> None:
        """A consumer that is read now; it is told when there is room."""
        self._prefetch.attach(stream, consumer)

    def detach(self, stream: str) -> None:
        """A consumer that is not read any more. When none is because the agent is stuck, others get what waits."""
        self._prefetch.detach(stream)
        if self._is_stuck and not self._prefetch.consumers and not self._stopping:
            acknowledging.give_back(self.line.withdraw())

    async def until_stuck(self) -> None:
        """Wait until nothing can be handled, however long."""
        if self._threads is None:
            await anyio.sleep_forever()
        else:
            await self._threads.until_stuck()

    async def until_not_stuck(self) -> None:
        if self._threads is not None:
            await self._threads.until_not_stuck()

    async def work(self, *, stop: anyio.Event, drain_timeout_seconds: float) -> None:
        """Handle what arrives until `stop`; then give back what has not begun, and finish what has.

        What still runs after the drain timeout is cancelled and given back too.
        """
        async with anyio.create_task_group() as beating:
            beating.start_soon(self._beat)
            beating.start_soon(self._shield.watch)
            try:
                with anyio.CancelScope() as draining:
                    async with anyio.create_task_group() as workers:
                        if self._redeliveries is not None:
                            workers.start_soon(self._redeliveries.work)
                        for _ in range(self._prefetch.workers):
                            workers.start_soon(self._handler.work)
                        await stop.wait()
                        drained_by = self._clock.monotonic() + drain_timeout_seconds
                        timer = self._clock.call_at(drained_by, partial(self._end_draining, draining))
                        self._stopping = True
                        self.line.close()
                        if self._threads is not None:
                            self._threads.close()
                        await self._stop_reading()
                        if not self.line.ordered:  # else all of it at the end, or a lane would overtake its head
                            self.returned += acknowledging.give_back(self.line.withdraw())
                    timer.cancel()
            finally:  # also where all of this is cancelled
                try:
                    await self._end_redeliveries()
                finally:
                    self.returned += acknowledging.give_back(self.line.withdraw_all())
            beating.cancel_scope.cancel()

    def _end_draining(self, draining: anyio.CancelScope) -> None:
        draining.cancel()
        self._shield.limit()

    @property
    def _is_stuck(self) -> bool:
        return self._threads is not None and self._threads.stuck

    async def _end_redeliveries(self) -> None:
        """Before what was cancelled is given back, or it would look like what ended its worker."""
        if self._redeliveries is not None:
            async with self._shield.hold():
                await self._redeliveries.end()

    async def _beat(self) -> None:
        while True:
            with clocks.move_on_after(self._clock, self._beat_seconds):
                await self._beat_again.wait()
            self._beat_again = anyio.Event()
            await self.line.beat()

    async def _stop_reading(self) -> None:
        """Before anything is given back: it would come here again."""
        for consumer in self._prefetch.consumers:
            await consumer.stop()


class Feed(Struct, frozen=True, kw_only=True):
    """A durable consumer that an agent reads, and its stream."""

    stream: StreamSpec
    consumer: ConsumerSpec
    provisioner: Provisioner
    unwrap: Callable[[Delivery, Message], Delivery] | None = None
    """Makes of what comes, and its whole message, what the agent is to see."""
    in_order: bool = False
    """Deliveries must come in order: what a dead worker held is waited for before anything new is asked for."""
    room: Callable[[], int] | None = None
    """How many deliveries could be taken now; None where that is the agent's to say."""
    priority: int = 0
    """See `Backend.consume`."""
    ensure: Callable[[], Awaitable[ConsumerInfo]] | None = None
    """Creates the consumer or brings it in line; None where `consumer` says all that is wanted of it."""
    leaves: Callable[[Delivery], Settlement | None] | None = None
    """Says how a delivery is settled that the agent is not to have. None: it has all."""
    repeats: Repeats | None = None
    """What was settled lately of the stream; None where what comes again is always handled again."""


class Subscription(Struct, frozen=True, kw_only=True):
    """What reads durable consumers and handles what comes: an agent, or one of our own."""

    name: str
    feeds: Sequence[Feed]
    run: Run
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
    return ConsumerSpec(
        durable_name=durable,
        filter_subjects=filters,
        ack_wait=int(ack_wait * SECOND),
        max_ack_pending=max_ack_pending,
        max_deliver=-1,  # only an agent gives up, when its dead letter is stored
        **metadata.starting(start),
    )


async def keep_running(
    subscription: Subscription, *, backend: Backend, events: Events, stop: anyio.Event, drain_timeout_seconds: float
) -> None:
    """Run a subscription until `stop`, then let it finish. A lost consumer or stream is made anew."""
    run = subscription.run
    drained = anyio.Event()
    async with anyio.create_task_group() as beside:
        for each in subscription.beside:
            beside.start_soon(each)
        async with anyio.create_task_group() as tasks:
            if subscription.also is not None:
                tasks.start_soon(subscription.also, stop)
            for feed in subscription.feeds:
                tasks.start_soon(_keep_reading, subscription.name, run, feed, backend, events, stop, drained)
            await run.work(stop=stop, drain_timeout_seconds=drain_timeout_seconds)
            drained.set()
        events.emit(AgentStopped(agent=subscription.name, finished=run.line.finished, returned=run.returned))
        beside.cancel_scope.cancel()
    if subscription.at_end is not None:
        await subscription.at_end()


async def _keep_reading(
    name: str,
    run: Run,
    feed: Feed,
    backend: Backend,
    events: Events,
    stop: anyio.Event,
    drained: anyio.Event,
) -> None:
    restarts = Restarts(REOPENED, healthy_seconds=HEALTHY_SECONDS)
    async with anyio.create_task_group() as joining:
        while not stop.is_set():
            try:
                await _read(name, run, feed, backend, events, stop, drained, restarts, joining)
                await _until(stop, run.until_not_stuck)
            except BackendError as error:
                if isinstance(error, NotFoundError):
                    feed.provisioner.forget(feed.stream.name)
                delay = restarts.next_wait(backend.clock.monotonic())
                events.emit(AgentDisturbed(agent=name, stream=feed.stream.name, error=error, again_in_seconds=delay))
                await clocks.sleep_until(backend.clock, delay, stop)
        joining.cancel_scope.cancel()


async def _read(
    name: str,
    run: Run,
    feed: Feed,
    backend: Backend,
    events: Events,
    stop: anyio.Event,
    drained: anyio.Event,
    restarts: Restarts,
    joining: TaskGroup,
) -> None:
    stream, consumer = feed.stream.name, feed.consumer.durable_name
    await feed.provisioner.ensure(feed.stream)
    info = await (feed.ensure() if feed.ensure else feed.provisioner.ensure_consumer(stream, feed.consumer))
    passed = await _passed(backend, feed.stream, info)
    gathers = feed.in_order and info.num_ack_pending > 0 and not len(run.line)
    if gathers:
        await clocks.sleep_until(backend.clock, info.config.ack_wait / SECOND + EXPIRY_SECONDS, stop)
        run.line.gather(info.num_ack_pending)

    if feed.repeats is not None:
        feed.repeats.opened(info)
    room = feed.room or run.room
    deliver = _delivering(feed, run.line, backend, joining)
    async with backend.consume(stream, consumer, deliver=deliver, room=room, priority=feed.priority) as opened:
        run.attach(stream, opened)
        events.emit(AgentStarted(agent=name, stream=stream, consumer=consumer, passed=passed))
        restarts.note_start(backend.clock.monotonic())
        if gathers:
            joining.start_soon(_release_when_quiet, run.line, backend.clock)
        try:
            await _until(stop, opened.lost, run.until_stuck)
            await opened.stop()
            if stop.is_set():
                await drained.wait()
            # What does not get through is delivered again: late, but not lost.
            with clocks.move_on_after(backend.clock, SETTLE_TIMEOUT_SECONDS), suppress(BackendError):
                await opened.settled()
        finally:
            run.detach(stream)


async def _release_when_quiet(line: Line, clock: Clock) -> None:
    """Let the line hand out what it gathers once nothing more comes: the rest is held by workers that live."""
    missing = 0
    while line.gathers and line.gathers != missing:
        missing = line.gathers
        await clock.sleep(QUIET_SECONDS)
    if line.gathers:
        line.release()


async def _passed(backend: Backend, stream: StreamSpec, info: ConsumerInfo) -> Passed | None:
    """See `AgentStarted.passed`."""
    if stream.subjects is UNSET or not info.config.reads_all(stream.subjects):
        return None
    if info.deliveries or not info.num_pending:
        return Passed(info.deliveries, info.position)
    # What left the stream before there was the agent, the agent has not missed.
    return Passed(0, (await backend.stream_info(stream.name)).last_sequence)


def _delivering(feed: Feed, line: Line, backend: Backend, joining: TaskGroup) -> Callable[[Delivery], None]:
    """What a delivery goes through before the agent holds it."""
    unwrap, leaves = feed.unwrap, feed.leaves
    put = line.put if feed.repeats is None else _passing_over(feed.repeats, line.put, joining)

    def take(delivery: Delivery) -> None:
        if leaves is None or (settlement := leaves(delivery)) is None:
            put(delivery)
        else:
            acknowledging.settle(delivery, settlement)

    def take_unwrapped(delivery: Delivery) -> None:
        """The line holds one of each sequence. Another one of this sequence is of the agent's own stream, and settling
        one of them does not settle the other.
        """
        held = line.delivery_of(delivery.message.sequence)
        if held is None or held.message == delivery.message:
            take(delivery)
        else:
            acknowledging.settle(delivery, Nak(SEQUENCE_HELD_SECONDS))

    if unwrap is None:
        return put if leaves is None else take

    def deliver(delivery: Delivery) -> None:
        if parts.first_part_of(delivery.message):
            joining.start_soon(deliver_whole, delivery)
        else:
            take_unwrapped(unwrap(delivery, delivery.message))

    async def deliver_whole(delivery: Delivery) -> None:
        try:
            message = await parts.whole(backend, feed.stream.name, delivery.message)
        except UndecodableError:
            put(delivery)  # as it is, it becomes a dead letter
        except BackendError:
            acknowledging.settle(delivery, Nak(LONGEST_WAIT_SECONDS))
        else:
            take_unwrapped(unwrap(delivery, message))

    return deliver


def _passing_over(repeats: Repeats, put: Callable[[Delivery], None], joining: TaskGroup) -> Callable[[Delivery], None]:
    """`put` for what was not settled here before; see `repeats`."""
    includes = repeats.includes

    async def settle() -> None:
        await acknowledging.settle_again(repeats, handle=put)

    def put_new(delivery: Delivery) -> None:
        if not includes(delivery):
            put(delivery)
        elif repeats.add(delivery):
            joining.start_soon(settle)

    return put_new


async def supervise_task(task: Task, app: Any, *, clock: Clock, events: Events, stop: anyio.Event) -> None:
    """Run the task until `stop`; when it raises, start it again after a wait. One that returns is done."""
    restarts = Restarts(REOPENED, healthy_seconds=HEALTHY_SECONDS)
    ended: object

    async def run() -> None:
        nonlocal ended
        ended = await calling.attempt(task.function, app)

    while not stop.is_set():
        restarts.note_start(clock.monotonic())
        ended = None
        await _until(stop, run)
        if not isinstance(ended, Failure):
            return
        delay = restarts.next_wait(clock.monotonic())
        events.emit(TaskFailed(task=task.name, error=ended.error, again_in_seconds=delay))
        await clocks.sleep_until(clock, delay, stop)


async def _until(stop: anyio.Event, *functions: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run the functions until one of them ends; `stop` cancels them."""
    error: Exception | None = None

    async def run(function: Callable[[], Coroutine[Any, Any, None]], scope: anyio.CancelScope) -> None:
        nonlocal error
        try:
            await function()
        except Exception as raised:
            error = raised  # raised below, outside of the group, so that it arrives as itself
        scope.cancel()

    async with anyio.create_task_group() as tasks:
        for function in functions:
            tasks.start_soon(run, function, tasks.cancel_scope)
        await stop.wait()
        tasks.cancel_scope.cancel()
    if error is not None:
        raise error
