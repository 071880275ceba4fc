"""The deliveries in flight of one agent in one worker: what its consumers are asked for, and what they have delivered.

It is the shell around `dispatch`, which says what begins next. `subscription` puts arrivals in, a handler takes them
out, and the settler says when one is done. Here is what a pure machine cannot do: handlers that wait for something to
begin, reports to the server, and the backpressure towards it.

A server delivers a message to another worker when `ack_wait` passes without an ack or a report of progress, so
`heartbeat` reports every delivery that is held as in progress. A process that was paused, or cut off, has reported
nothing: what it holds may have been handled elsewhere. So nothing begins after the time up to which it is trusted
(`trust_until`), and what waits then is left to whoever is given it.

A consumer asks for the `capacity`. Besides what runs, that is what is begun within a tenth of a second, so that what
one process hoards is soon done: at least `least` and at most `most`. Where notifications are large, it is as many as
fit into a budget of bytes, if they are as large as those that wait. While a worker is idle and nothing that is held may
begin, the budget is `MAX_STARVED_BYTES`. With `order_by`, or a limit for each key, much of what is held may wait for a
few keys: where fewer are ready to begin than there are workers, notifications of other keys are asked for in their
place, until the server delivers no more because too many are not acknowledged. While the pace is not free, more are
held, because the next one is picked among them at random.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager

import anyio
from anyio.lowlevel import checkpoint
from msgspec import structs

from aviso_workers.backends import Consumer, Delivery, Message
from aviso_workers.clocks import Clock, ScheduledCall
from aviso_workers.engine.dispatch import ALONE, ASKED, RUNNING, Dispatch, Limit
from aviso_workers.engine.pace import LONGEST_SECONDS, Pace

TURN_SECONDS = 0.005
"""Handlers that never wait get so long before others of the loop have a turn."""
HEARTBEATS_AT_ONCE = 1000
"""Deliveries that are reported in progress before others of the loop have a turn."""
MAX_WAITING_BYTES = 16 * 1024 * 1024
"""The most that the waiting deliveries of an agent may have in one process. A larger message is pulled by itself."""
MAX_STARVED_BYTES = 4 * MAX_WAITING_BYTES
"""The same while nothing of it may begin and a handler is idle."""
PREFETCH_SECONDS = 0.1
CHECKS = 8
"""How often the capacity is looked at while as many begin as are asked for at a time."""
MAX_PREFETCH = 1000
"""More at a time makes nothing faster. Also the most that wait for a limit and do not count as prefetched."""
KEY_PREFETCH = 64
"""How many deliveries of an ordering key count as prefetched. Where its head waits for a retry, none do."""
PUT_OFF_SECONDS = 10.0
"""How long one that is to run alone is put off at most: somebody may say before that nothing is away any more."""
PACED_PREFETCH = 250
"""How many are held while the pace is not free: with 64, what lies behind 500 bad ones came twenty times later."""
ALONE_SECONDS = 10.0
"""After this time other handlers begin again, also while the notification still waits for others to end, or runs: one
that takes an hour must not stop its whole process. It is still the only one that runs under suspicion."""


class Flow:
    """What one worker holds for one agent, and what it asks for."""

    def __init__(
        self,
        clock: Clock,
        *,
        workers: int,
        least: int,
        most: int = MAX_PREFETCH,
        key: Callable[[str], Hashable] | None = None,
        isolation: Isolation | None = None,
        limits: Sequence[Limit] = (),
        pace: Pace | None = None,
        on_lost: Callable[[Delivery], None] = lambda _: None,
    ) -> None:
        """With `isolation`, redeliveries are returned by `take_redelivered`, and by `take` only after `admit`.

        `on_lost` is called at each heartbeat with every delivery that the server may have given to another worker.
        """
        self.workers = workers
        self.dispatch = Dispatch(key=key, limits=limits, pace=pace, screens=isolation is not None)
        self.lapsed = anyio.Event()
        """Set when what waited was left to others, because the server may have given it to them."""
        self.lapses = 0
        """How often waiting deliveries were left to others."""
        self.finished = 0
        """Deliveries that were settled here."""
        self._clock = clock
        self._key = key
        self._pace = pace
        self._isolation = isolation or Isolation(clock)
        self._isolation.join(self)
        self._redelivery = anyio.Event()
        self._idle: deque[anyio.Event] = deque()
        self._waking = False
        """Whether a task that waits in `take` was woken and has not run yet."""
        self._unrecorded: Delivery | None = None
        """The delivery that `take` returns next, once it has recorded that its handling begins; None where there is
        none."""
        self._taken_at = self._turn_ends = 0.0
        self._alarm: ScheduledCall | None = None
        self._alarm_at = math.inf
        self._on_lost = on_lost
        self._least = self._prefetch = least
        self._most = most
        self._asks_at = 0.0
        """The number of begun deliveries at which the consumers ask for more."""
        self._fills_budget = False
        """Whether the sizes of messages, and not their number, limited the capacity the last time."""
        self._measured_from = 0
        """How many had begun when the rate was measured the last time."""
        self._measured_at = clock.monotonic()
        self._consumers: dict[str, Consumer] = {}
        """By stream."""

    def __len__(self) -> int:
        return len(self.dispatch.held)

    # What is known of it

    @property
    def ordered(self) -> bool:
        """Whether deliveries have ordering keys."""
        return self._key is not None

    @property
    def running(self) -> int:
        """Deliveries whose handling has begun."""
        return self.dispatch.running

    @property
    def waiting(self) -> int:
        """Deliveries whose handling has not begun, or has failed and will begin again."""
        return max(0, len(self.dispatch.held) - self.dispatch.running)

    @property
    def closed(self) -> bool:
        """Whether no delivery is handed out any more."""
        return self.dispatch.closed

    @property
    def oldest_age_seconds(self) -> float:
        """How long ago the oldest notification that is held was stored; 0 where none is held."""
        held = tuple(self.dispatch.held.values())  # at once, because a scrape comes from a thread
        if not held:
            return 0.0
        oldest_ns = min(delivery.message.timestamp_ns for delivery in held)
        return max(0.0, (self._clock.time_ns() - oldest_ns) / 1e9)

    def waited_seconds(self, delivery: Delivery) -> float | None:
        """Return how long a delivery has waited for its turn and a free handler; None where it is not held."""
        return delivery.waited or 0.0 if self.dispatch.holds(delivery) else None

    def taken(self) -> list[Delivery]:
        """Return the deliveries that handlers have taken and that are not settled yet."""
        return [delivery for delivery in self.dispatch.held.values() if delivery.waited is not None]

    def holds(self, delivery: Delivery) -> bool:
        """Return whether this delivery is held, and not another one of its sequence: the stream may have been deleted
        and recreated."""
        return self.dispatch.holds(delivery)

    def key_of(self, subject: str) -> str:
        """Return the ordering key of a subject as text; empty without an order."""
        key = self._key(subject) if self._key is not None else ""
        return ".".join(map(str, key)) if isinstance(key, tuple) else str(key)

    @property
    def has_many_retries(self) -> bool:
        """Whether retries that may begin are half of all that is held while the pace is not free."""
        return len(self.dispatch.again) >= max(1, min(PACED_PREFETCH, self._most) // 2)

    def behind(self, sequence: int) -> list[int]:
        """Return the sequences of those that wait until the one of this sequence, the first of its key, is done."""
        delivery = self.dispatch.held.get(sequence)
        return [] if delivery is None else [each.message.sequence for each in self.dispatch.behind(delivery)]

    def delivery_of(self, sequence: int) -> Delivery | None:
        return self.dispatch.held.get(sequence)

    def alone(self, delivery: Delivery) -> bool:
        """Return whether it is to be handled by itself, and not together with others."""
        return delivery is self._isolation.alone

    # What comes

    def release(self) -> None:
        """Hand out what was gathered."""
        self.dispatch.release()
        self._look()

    def put(self, delivery: Delivery) -> None:
        """Take a delivery that has come."""
        self.dispatch.received(delivery, self._clock.monotonic())
        self._look()

    def put_all(self, deliveries: Sequence[Delivery]) -> None:
        """Take deliveries that have come together, which are new objects."""
        self.dispatch.received_all(deliveries, self._clock.monotonic())
        if self.dispatch.special:
            self._look()
        elif self._idle and not self._waking:
            self._wake()

    # What begins

    def take_now(self) -> Delivery | None:
        """Return the next delivery; None where `take` has to wait for something first."""
        if self._taken_at >= self._turn_ends:
            return None
        dispatch = self.dispatch
        if dispatch.special:
            delivery = self._begin()
        else:
            now = self._taken_at = self._clock.monotonic()
            delivery = dispatch.begin(now)
            if dispatch.begun >= self._asks_at:
                self._measure(now)
            if self._idle and not self._waking and dispatch.ready:
                self._wake()
        if delivery is not None and delivery.begin is not None:
            self._unrecorded = delivery
            return None
        return delivery

    async def take(self) -> Delivery | None:
        """Return the next delivery; None when nothing is handed out any more."""
        if self._taken_at >= self._turn_ends and self._unrecorded is None:
            await checkpoint()  # handlers that never wait must not stop the loop
            self._turn_ends = self._clock.monotonic() + TURN_SECONDS
        while True:
            delivery, self._unrecorded = self._unrecorded, None
            if delivery is None and (delivery := self._begin()) is None:
                if self.dispatch.closed:
                    await checkpoint()  # who asks again and again must not stop the loop
                    return None
                if self.dispatch.may_begin() and not self.trusted:
                    self.lapse()
                await self._turn()
            elif delivery.begin is None or await self._recorded(delivery):
                return delivery

    async def _recorded(self, delivery: Delivery) -> bool:
        """Record that the handling of a delivery begins, and return whether it still may."""
        begin, delivery.begin = delivery.begin, None
        lapses = self.lapses
        assert begin is not None
        await begin()
        return self.may_still_begin(delivery, lapses=lapses)

    def may_still_begin(self, *deliveries: Delivery, lapses: int) -> bool:
        """Return whether the handling may begin of deliveries that were taken when `lapses` were so many. Where the
        process was away since, others may have been given them: they are left to those.
        """
        if lapses == self.lapses and self.trusted:
            return True
        for delivery in deliveries:
            self.finish(delivery)
        return False

    def _begin(self) -> Delivery | None:
        """Let a handler take the next delivery, let the next handler begin, and ask for more."""
        dispatch, now = self.dispatch, self._clock.monotonic()
        delivery = dispatch.begin(now)
        if dispatch.special and dispatch.asked:
            self._redelivery.set()
        if delivery is None:
            self._isolation.look()
            return None
        if self._idle and not self._waking and dispatch.may_begin():
            self._wake()  # each wakes the next one: to wake all is in vain where one of them takes everything
        self._taken_at = now
        if dispatch.begun >= self._asks_at:
            self._measure(now)
        return delivery

    async def take_redelivered(self) -> Delivery | None:
        """Return the next redelivery, to be decided whether it may begin; None when nothing begins any more."""
        while not self.dispatch.closed:
            if (delivery := self.dispatch.take_asked()) is not None:
                return delivery
            self._redelivery = anyio.Event()
            await self._redelivery.wait()
        return None

    def admit(self, delivery: Delivery, *, tried: bool = False, alone: bool = False, at_once: bool = False) -> None:
        """Let `take` return a redelivery that was decided on. Its `begin` is awaited first, where it has one."""
        self.dispatch.decided(delivery, self._clock.monotonic(), tried=tried, alone=alone, at_once=at_once)
        self._look()

    def put_off(self, delivery: Delivery) -> bool:
        """Have a redelivery decided on again later where nothing may begin for long, and return whether that is so."""
        now = self._clock.monotonic()
        if self._pace is None or self._pace.closed_until <= now + LONGEST_SECONDS:
            return False
        self.dispatch.put_off(delivery, now, until=min(self._pace.closed_until, now + PUT_OFF_SECONDS))
        self._look()
        return True

    def replace(self, delivery: Delivery, message: Message) -> None:
        """Put in place of a message without its body, which waits, the whole one."""
        delivery.message = structs.replace(delivery.message, data=message.data, headers=message.headers)
        self.dispatch.waiting_bytes += len(message.data)

    def open(self, limit: Limit, key: Hashable, count: int) -> int:
        """Let up to so many of a limit's key be asked again, and return for how many; see `Dispatch.open`."""
        opened = self.dispatch.open(limit, key, count, self._clock.monotonic())
        self._look()
        return opened

    async def _turn(self) -> None:
        """Wait until there may be something to take."""
        self._plan()
        turn = anyio.Event()
        self._idle.append(turn)
        if self.waiting:
            self._ask()  # for others, as none of these may begin
        try:
            await turn.wait()
        except anyio.get_cancelled_exc_class():
            if turn.is_set():  # our turn came: pass it on
                self._waking = False
                self._wake()
            else:
                self._idle.remove(turn)
            raise
        self._waking = False

    def _plan(self) -> None:
        """Be woken when something may begin where nothing happens until then."""
        at = self.dispatch.again_at(self._clock.monotonic())
        if at < self._alarm_at or (at != self._alarm_at and self._alarm is None):
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm_at, self._alarm = at, self._clock.call_at(at, self._ring)

    def _ring(self) -> None:
        self._alarm, self._alarm_at = None, math.inf
        self.wake()

    def _look(self) -> None:
        """Note that something has changed that may let one begin, or be decided on."""
        if self.dispatch.asked:
            self._redelivery.set()
        self._isolation.look()
        self.wake()

    def wake(self) -> None:
        """Wake a handler that waits."""
        if self._idle and not self._waking:
            self._wake()

    def _wake(self) -> None:
        if self._idle:
            self._waking = True
            self._idle.popleft().set()

    # How it ends

    def finish(self, delivery: Delivery) -> float | None:
        """Remove a delivery that is settled, let the next one of its key begin, and return how long it has waited for
        its turn and a free handler; None where it was not held.
        """
        dispatch, waited = self.dispatch, delivery.waited
        if not dispatch.ended(delivery, self._clock.monotonic() if dispatch.special else 0.0):
            return None
        self.finished += 1
        if waited is None:
            self._ask()  # no handler begins for it, which would ask for more
            self._look()
        elif dispatch.special:
            self._look()
        elif self._idle and dispatch.ready and not self._waking:
            self._wake()  # for the next one of its key
        return waited or 0.0

    def retry_later(self, delivery: Delivery, *, after_seconds: float) -> None:
        """Keep a delivery whose handling has failed at its place in the order, and try it again after the delay."""
        now = self._clock.monotonic()
        self.dispatch.wait(delivery, now, until=now + after_seconds)
        self._ask()
        self._look()

    def retry_now(self, sequence: int) -> bool:
        """End the wait of a delivery that is held and waits to be tried again; return whether it did."""
        ended = self.dispatch.retry_now(sequence, self._clock.monotonic())
        self._look()
        return ended

    def close(self) -> None:
        """Hand out no delivery any more, and let the handlers end. What arrives from now on is only held."""
        self.dispatch.close()
        self._redelivery.set()
        if (alone := self._isolation.alone) is not None and self.holds(alone) and alone.waited is None:
            self._isolation.give_up()
        while self._idle:
            self._idle.popleft().set()

    def withdraw(self, *, running: bool = False) -> list[Delivery]:
        """Remove the deliveries whose handling has not begun, with `running` also the others, and return them, to be
        given back in this order."""
        withdrawn = self.dispatch.withdraw(running=running)
        self._isolation.look()
        return withdrawn

    # Trust

    @property
    def trusted(self) -> bool:
        """Whether no other worker can have been given what waits here, as far as this worker knows."""
        return self._clock.monotonic() < self.dispatch.trusted_until

    def trust_until(self, time: float) -> None:
        """Hand out deliveries up to this time of the agent's clock."""
        if self.lapsed.is_set():
            self.withdraw()
            self.lapsed = anyio.Event()
        self.dispatch.trusted_until = time
        self.wake()

    def lapse(self) -> None:
        """Remove what waits without settling it: the server may have given it to others."""
        self.withdraw()
        self.lapses += 1
        self.lapsed.set()

    async def heartbeat(self) -> None:
        """Report every delivery that is held as in progress to the server."""
        for number, delivery in enumerate(tuple(self.dispatch.held.values()), start=1):
            if not self.holds(delivery):
                continue  # it was settled while others had a turn
            if delivery.held:
                delivery.in_progress()
            else:
                self._on_lost(delivery)
            if number % HEARTBEATS_AT_ONCE == 0:
                await checkpoint()

    # What is asked for

    @property
    def consumers(self) -> tuple[Consumer, ...]:
        """Those that are read now."""
        return tuple(self._consumers.values())

    def attach(self, stream: str, consumer: Consumer) -> None:
        """Add a consumer that is read from now on; it is called when there is capacity."""
        self._consumers[stream] = consumer

    def detach(self, stream: str) -> None:
        """Remove the consumer of a stream that is not read any more."""
        del self._consumers[stream]

    def pinned(self, stream: str) -> bool:
        """Return whether this worker is the one that is given everything of the stream; see `Consumer.pinned`."""
        consumer = self._consumers.get(stream)
        return consumer is not None and consumer.pinned

    def capacity(self) -> int:
        """Return how many deliveries could be taken now."""
        dispatch, waiting = self.dispatch, self.waiting
        if dispatch.gathering:
            return min(dispatch.gathering, self._prefetch)
        capacity = self._prefetch - waiting
        if dispatch.special or self.ordered:
            if self._pace is not None and not self._pace.free:
                paced = PACED_PREFETCH - waiting
                if self._most == 1:  # it holds one at a time, and besides that retries, which may wait for long
                    paced = min(paced, 1 - len(dispatch.ready))
                capacity = max(capacity, paced)
            if waiting and len(dispatch.ready) + len(dispatch.again) < self.workers:
                capacity += self._surplus(waiting)
        if not dispatch.waiting_bytes:
            return capacity
        starved = bool(self._idle) and not dispatch.may_begin()
        budget = MAX_STARVED_BYTES if starved else MAX_WAITING_BYTES
        fitting = int((budget - dispatch.waiting_bytes) / (dispatch.waiting_bytes / max(1, waiting)))
        self._fills_budget = fitting < capacity
        if not self._fills_budget:
            return capacity
        self._asks_at = 0.0
        return fitting

    def _surplus(self, waiting: int) -> int:
        """Return how many of those that wait do not count as prefetched."""
        if self.ordered:
            return min(self.dispatch.surplus(KEY_PREFETCH), waiting)
        return min(self.dispatch.at_gates, waiting, MAX_PREFETCH)

    def _measure(self, now: float) -> None:
        """Ask for more, and measure at which rate deliveries begin."""
        seconds = now - self._measured_at
        if seconds >= PREFETCH_SECONDS:
            pace = int((self.dispatch.begun - self._measured_from) * PREFETCH_SECONDS / seconds)
            self._prefetch = max(self._least, min(pace, self._most))
            self._measured_from, self._measured_at = self.dispatch.begun, self._measured_at + seconds
        self._ask()
        self._asks_at = self.dispatch.begun + (1 if self._fills_budget else max(1, self._prefetch // CHECKS))

    def _ask(self) -> None:
        """Have the consumers ask for as much as there is capacity for."""
        for consumer in self._consumers.values():
            consumer.refill()


class Isolation:
    """At most one notification of a worker process at a time runs alone: while it does, no other handler begins.

    `redeliveries` asks for it where a notification may end its process, so that nobody else's notification is taken
    along, and so that it is known which one did it. All flows of a process share it, and obey it.
    """

    def __init__(self, clock: Clock) -> None:
        self.alone: Delivery | None = None
        """The notification that waits for the others to end, or runs."""
        self._clock = clock
        self._flows: list[Flow] = []
        self._turn = anyio.Lock()
        self._free = anyio.Event()
        self._ended = anyio.Event()

    def join(self, flow: Flow) -> None:
        """Count what runs in this flow, and let nothing begin there while a notification runs alone."""
        self._flows.append(flow)

    @asynccontextmanager
    async def of(self, delivery: Delivery) -> AsyncIterator[None]:
        """Wait for the others to end; in the block, `delivery` runs alone."""
        async with self._turn:
            self.alone = delivery
            self._free, self._ended = anyio.Event(), anyio.Event()
            for flow in self._flows:
                flow.dispatch.isolate(True)
            reopening = self._clock.call_at(self._clock.monotonic() + ALONE_SECONDS, self._reopen)
            try:
                if self._busy():
                    await self._free.wait()
                yield
            finally:
                self.alone = None
                reopening.cancel()
                self._reopen()

    async def ended(self) -> None:
        """Wait until the notification that runs alone has come to its end, or was given back."""
        await self._ended.wait()

    def give_up(self) -> None:
        """Note that the notification which is to run alone has not begun, and will not."""
        self._ended.set()

    def look(self) -> None:
        """Note what has changed in a flow: whether others run still, and whether the notification that is to run alone
        was settled or waits. Behind an earlier one of its key, or for a limit, it gives way to others, and is decided
        on again."""
        if self.alone is None:
            return
        if self.alone.place not in (ASKED, ALONE, RUNNING):
            self._ended.set()
        if not self._busy():
            self._free.set()

    def _busy(self) -> bool:
        return any(flow.dispatch.running for flow in self._flows)

    def _reopen(self) -> None:
        self._free.set()
        for flow in self._flows:
            flow.dispatch.isolate(False)
            flow.wake()
