"""The deliveries that a worker process holds for one agent, from arrival to settlement, and which is next.

`subscription` puts arrivals in, a handler takes them out, and the settler says when one is done. Next is the oldest
delivery; with `order_by`, the oldest of each ordering key. The deliveries of a key are handled strictly in order of
sequence: the later ones wait until the first is done, also while the first waits to be tried again. It waits here and
not on the server, which would deliver the later ones meanwhile. A server delivers a message to another worker when
`ack_wait` passes without an ack or a report of progress, so `heartbeat` reports every buffered delivery as in progress.
A process that was paused, or cut off, has reported nothing: what it holds may have been handled elsewhere. So nothing
begins after the time up to which it is trusted (`trust_until`), and what waits then is left to whoever is given it.

A server delivers in the order of the stream, so a key that fails or is slow brings more and more deliveries that have
to wait here before anything of other keys comes. All of them stay here: `surplus` says how many belong to such keys,
and `prefetch` asks for more in their place. Only their bodies are dropped where they are too large together;
`redeliveries` reads them again when their turn comes.

After a worker has died, the server redelivers its messages in the order in which their `ack_wait` ran out, and not by
sequence. So an ordered agent that starts gathers redeliveries, until the server delivers a new message or no more
redeliveries come, and then hands them out in order of sequence.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import deque
from collections.abc import Awaitable, Callable, Hashable

import anyio
from anyio.lowlevel import checkpoint
from msgspec import structs

from aviso_workers.aviso.codec import lacks_body
from aviso_workers.backends import Delivery, Message
from aviso_workers.clocks import Clock
from aviso_workers.declare.verdicts import Record
from aviso_workers.engine.isolation import Isolation

__all__ = ["MOST_WAITING_BYTES", "Buffer"]

TURN_SECONDS = 0.005
"""Handlers that never wait get so long before others of the loop have a turn."""
HEARTBEATS_AT_ONCE = 1000
"""Deliveries that are reported in progress before others of the loop have a turn."""
KEY_PREFETCH = 64
"""How many deliveries of an ordering key count as prefetched. Where its head waits for a retry, none do."""
MOST_WAITING_BYTES = 16 * 1024 * 1024
"""The most that the waiting deliveries of an agent may have in one process. A larger message is pulled by itself."""
MOST_SURPLUS_BYTES = MOST_WAITING_BYTES // 2
"""Above this, deliveries that cannot begin yet are kept without their bodies, so that other keys have space."""


def _ignore(*_: object) -> None:
    """Do nothing: the callback of a buffer whose owner gives none."""


class _Entry:
    """A delivery that the buffer holds."""

    __slots__ = ("begin", "bodiless", "delivery", "record", "waited", "waiting_since")

    def __init__(self, delivery: Delivery, waiting_since: float) -> None:
        self.delivery = delivery
        self.bodiless = False
        """Whether the body of its message was dropped, or left out by the server (`headers_only`)."""
        self.waiting_since = waiting_since
        """When it arrived, or when its retry is due, on the agent's clock."""
        self.waited: float | None = None
        """How long it waited before its handling began; None until it does."""
        self.begin: Callable[[], Awaitable[None]] | None = None
        """Awaited before `take` returns the delivery, to record that its handler begins."""
        self.record: Record | None = None
        """What is known of earlier deliveries and attempts; None where nothing was read, and none has failed here."""


class _KeyQueue(deque[Delivery]):
    """The deliveries of one key that are held, in order of sequence. Only the head is handed out."""

    stopped = False
    """Whether the head cannot begin, because it waits for its retry."""
    surplus = 0
    """How many of them count as surplus."""


class Buffer:
    """Deliveries that wait or run. With `key`, which returns the ordering key of a subject, those of one key are handed
    out one after another; without, each by itself.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        key: Callable[[str], Hashable] | None = None,
        isolation: Isolation | None = None,
        on_begin: Callable[[Buffer], None] = _ignore,
        on_surplus: Callable[[], None] = _ignore,
        on_lost: Callable[[Delivery], None] | None = None,
    ) -> None:
        """With `isolation`, redeliveries are returned by `take_redelivered`, and by `take` only after `admit`.

        `on_begin` is called when a handler takes a delivery; `on_surplus` when one arrives that cannot begin yet, so
        that more may be pulled; and `on_lost` at each heartbeat, with every delivery that the server may have given to
        another worker.
        """
        self.lapsed = anyio.Event()
        """Set when what waited was left to others, because the server may have given it to them."""
        self._trusted_until = math.inf
        self.ordered = key is not None
        self.closed = False
        """Whether no delivery is handed out any more."""
        self._clock = clock
        self._key = key
        self._screens = isolation is not None
        self._isolation = isolation or Isolation(clock)
        self._isolation.join(self)
        self._redelivered: deque[Delivery] = deque()
        self._redelivery = anyio.Event()
        self._undecided: set[Delivery] = set()
        """Redeliveries that were offered to `take_redelivered` and on which nobody has decided yet."""
        self._held: dict[int, _Entry] = {}
        """All, by sequence, in order of arrival."""
        self._ready: deque[Delivery] = deque()
        self._queues: dict[Hashable, _KeyQueue] = {}
        """Per busy key, its head and what waits behind it."""
        """The keys that are blocked, each with the delivery to hand out when it is not any more; None: none yet."""
        self._gathered: list[Delivery] | None = None
        """The redeliveries that were gathered so far; None while none are gathered."""
        self._most_gathered = 0
        self._idle: deque[anyio.Event] = deque()
        self._waking = False
        """Whether a task that waits in `take` was woken and has not run yet."""
        self._taken_at = self._turn_ends = 0.0
        self._bytes = self._running_bytes = 0
        self._bodiless = 0
        self.surplus = 0
        """How many waiting deliveries do not count as prefetched: all of a key whose head cannot begin, and of any
        other key those beyond the first `KEY_PREFETCH`."""
        self.running = 0
        """Deliveries whose handling has begun."""
        self.finished = 0
        """Deliveries that were settled here."""
        self._on_begin = on_begin
        self._on_surplus = on_surplus
        self._on_lost = on_lost or _ignore

    def __len__(self) -> int:
        return len(self._held)

    @property
    def waiting(self) -> int:
        """Deliveries whose handling has not begun, or has failed and will begin again."""
        return len(self._held) - self.running

    @property
    def waiting_bytes(self) -> int:
        """The size of what `waiting` counts."""
        return self._bytes - self._running_bytes

    @property
    def mean_bytes(self) -> float:
        """The mean size of those that wait and have a body; 0 where there are none."""
        return self.waiting_bytes / max(1, self.waiting - self._bodiless)

    @property
    def ready(self) -> int:
        """Deliveries that begin as soon as a handler is free."""
        return len(self._ready)

    @property
    def starved(self) -> bool:
        """Whether a handler is idle and no buffered delivery may begin, as behind a head that waits for its retry."""
        return bool(self._idle) and not self._ready

    @property
    def oldest_age_seconds(self) -> float:
        """How long ago the oldest notification that is held was stored; 0 where none is held."""
        held = tuple(self._held.values())  # at once, because a scrape comes from a thread
        if not held:
            return 0.0
        oldest_ns = min(entry.delivery.message.timestamp_ns for entry in held)
        return max(0.0, (self._clock.time_ns() - oldest_ns) / 1e9)

    def waited_seconds(self, delivery: Delivery) -> float | None:
        """Return how long a delivery has waited for its turn and a free handler; None where it is not in the buffer."""
        entry = self._entry(delivery)
        return entry.waited or 0.0 if entry is not None else None

    def taken(self) -> list[Delivery]:
        """Return the deliveries that handlers have taken and that are not settled yet."""
        return [entry.delivery for entry in self._held.values() if entry.waited is not None]

    def holds(self, delivery: Delivery) -> bool:
        """Return whether this delivery is in the buffer, and not another one of its sequence: the stream may have been
        deleted and recreated."""
        return self._entry(delivery) is not None

    def record_of(self, delivery: Delivery) -> Record | None:
        """Return what is known of earlier deliveries and attempts; None where nothing is, as of nearly all."""
        entry = self._entry(delivery)
        return entry.record if entry is not None else None

    def note_record(self, delivery: Delivery, record: Record) -> None:
        """Keep what is known of earlier deliveries and attempts for as long as the delivery is held."""
        if entry := self._entry(delivery):
            entry.record = record

    def key_of(self, subject: str) -> str:
        """Return the ordering key of a subject as text; empty without an order."""
        key = self._key(subject) if self._key is not None else ()
        return ".".join(map(str, key)) if isinstance(key, tuple) else str(key)

    def behind(self, subject: str, sequence: int) -> int:
        """Return how many deliveries wait until the one of this subject and sequence, the first of its key, is done."""
        queue = self._queues.get(self._key(subject)) if self._key is not None else None
        return len(queue) - 1 if queue and queue[0].message.sequence == sequence else 0

    def delivery_of(self, sequence: int) -> Delivery | None:
        entry = self._held.get(sequence)
        return entry.delivery if entry is not None else None

    @property
    def gather_left(self) -> int:
        """How many more redeliveries may be gathered; 0 while none are."""
        return 0 if self._gathered is None else self._most_gathered - len(self._gathered)

    def gather(self, most: int) -> None:
        """Gather redeliveries and hand out none, until `most` have come, a new message has, or `release` is called."""
        self._gathered, self._most_gathered = [], most

    def release(self) -> None:
        """Hand out what was gathered, in order of sequence."""
        gathered, self._gathered = self._gathered or [], None
        for delivery in sorted(gathered, key=_sequence):
            if self.holds(delivery):
                self._enter(delivery)

    def put(self, delivery: Delivery) -> None:
        message = delivery.message
        held = self._held.get(message.sequence)
        if held is not None:
            if held.delivery.message.timestamp_ns == message.timestamp_ns:
                return  # delivered again while it is held: settling the older delivery settles both
            self._note_waiting(held)
            self._let_go(held)
        self._bytes += len(message.data)
        self._held[message.sequence] = entry = _Entry(delivery, self._clock.monotonic())
        if not message.data and self._screens and delivery.can_be_read_again and lacks_body(message):
            entry.bodiless = True
            self._bodiless += 1
        if self._gathered is not None:
            self._gather(delivery)
        elif self.ordered:
            self._enter(delivery)
        else:
            self._offer(delivery)

    async def take(self) -> Delivery | None:
        """Return the next delivery; None when the buffer is closed."""
        if self._taken_at >= self._turn_ends:  # handlers that never wait must not stop the loop
            await checkpoint()
            self._turn_ends = self._clock.monotonic() + TURN_SECONDS
        while (entry := self._next()) is None:
            if self.closed:
                await checkpoint()  # who asks again and again must not stop the loop
                return None
            await self._turn()
        now = self._taken_at = self._clock.monotonic()
        if now >= self._trusted_until:
            self.lapse()
            return await self.take()
        if self._ready and not self._waking:
            self._wake()  # each wakes the next one: to wake all is in vain where one of them takes everything
        entry.waited = now - entry.waiting_since
        self.running += 1
        self._running_bytes += len(entry.delivery.message.data)
        self._on_begin(self)
        if entry.begin is not None:
            begin, entry.begin = entry.begin, None
            await begin()
        return entry.delivery

    async def take_redelivered(self) -> Delivery | None:
        """Return the next redelivery, to be decided whether it may begin; None when the buffer is closed."""
        while not self.closed:
            while self._redelivered:
                delivery = self._redelivered.popleft()
                if self.is_next(delivery):
                    return delivery
                self.note_decided(delivery)
            self._redelivery = anyio.Event()
            await self._redelivery.wait()
        return None

    def is_next(self, delivery: Delivery) -> bool:
        """Return whether nothing of its ordering key comes before a delivery, as nothing does without an order."""
        if self._key is None:
            return True
        queue = self._queues.get(self._key(delivery.message.subject))
        return queue is not None and queue[0] is delivery

    def note_decided(self, delivery: Delivery) -> None:
        """Note that a redelivery was admitted, settled, or is to be offered again when it is the next of its key."""
        self._undecided.discard(delivery)

    def admit(
        self, delivery: Delivery, *, first: bool = False, begin: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Let `take` return a redelivery, before all others or after them. `begin` is awaited first."""
        if self.closed:
            return
        if begin is not None and (entry := self._entry(delivery)):
            entry.begin = begin
        if first:
            self._ready.appendleft(delivery)
        else:
            self._ready.append(delivery)
        if not self._waking:
            self._wake()

    def alone(self, delivery: Delivery) -> bool:
        """Return whether it is to be handled by itself, and not together with others."""
        return delivery is self._isolation.alone

    def wake(self) -> None:
        """Wake a handler that waits, because the isolation has ended."""
        if self._ready and not self._waking:
            self._wake()

    def done(self, delivery: Delivery) -> None:
        """Remove a delivery that is settled, and offer the next one of its key."""
        if entry := self._entry(delivery):
            self.finished += 1
            self._note_waiting(entry)
            del self._held[delivery.message.sequence]
            self._let_go(entry)
        if self._key is None:
            return
        key = self._key(delivery.message.subject)
        queue = self._queues.get(key)
        if queue is None or queue[0] is not delivery:
            return  # it was given back meanwhile
        queue.popleft()
        if queue.surplus:
            queue.stopped = False
            self._count_surplus(queue)
        if queue:
            self._offer(queue[0])
        else:
            del self._queues[key]

    def retry_later(self, delivery: Delivery, *, after_seconds: float) -> None:
        """Keep a delivery at the head of its key, and offer it again after the delay."""
        due = self._clock.monotonic() + after_seconds
        if entry := self._entry(delivery):
            self._note_waiting(entry)
            entry.waiting_since = due
            self._stop(delivery, stopped=True)
            self._leave_out_body(delivery)
        self._clock.call_at(due, lambda: self._resume(delivery))

    def close(self) -> None:
        """Hand out no delivery any more, and let the handlers end. What arrives from now on is only held."""
        self.closed = True
        self._redelivery.set()
        if any(map(self.alone, self._ready)):
            self._isolation.note_end(self._ready[0])  # it has not begun, and will not
        self._ready.clear()
        while self._idle:
            self._idle.popleft().set()

    def withdraw(self) -> list[Delivery]:
        """Remove the deliveries whose handling has not begun, and return them, to be given back in this order."""
        return self._withdraw([sequence for sequence, entry in self._held.items() if entry.waited is None])

    def withdraw_all(self) -> list[Delivery]:
        """Remove all deliveries, also those whose handlers run, and return them, to be given back in this order."""
        return self._withdraw(list(self._held))

    @property
    def trusted(self) -> bool:
        """Whether nobody else can have been given what waits here, as far as this side knows."""
        return self._clock.monotonic() < self._trusted_until

    def trust_until(self, time: float) -> None:
        """Hand out deliveries up to this time of the agent's clock."""
        if self.lapsed.is_set():
            self.withdraw()
            self.lapsed = anyio.Event()
        self._trusted_until = time

    def lapse(self) -> None:
        """Remove what waits without settling it: the server may have given it to others."""
        self.withdraw()
        self.lapsed.set()

    async def heartbeat(self) -> None:
        """Report every buffered delivery as in progress to the server."""
        for number, entry in enumerate(tuple(self._held.values()), start=1):
            if self._entry(entry.delivery) is None:
                continue  # it was settled while others had a turn
            if entry.delivery.held:
                entry.delivery.in_progress()
            else:
                self._on_lost(entry.delivery)
            if number % HEARTBEATS_AT_ONCE == 0:
                await checkpoint()

    def is_bodiless(self, delivery: Delivery) -> bool:
        """Return whether the body of its message was dropped, to be read again when its turn has come."""
        entry = self._entry(delivery)
        return entry is not None and entry.bodiless

    def restore_body(self, delivery: Delivery, message: Message) -> None:
        """Put back the body of a delivery, whose message was read again."""
        entry = self._entry(delivery)
        if entry is not None and entry.bodiless:
            delivery.message = structs.replace(delivery.message, data=message.data, headers=message.headers)
            entry.bodiless = False
            self._bodiless -= 1
            self._bytes += len(message.data)

    def _gather(self, delivery: Delivery) -> None:
        assert self._gathered is not None
        # A server delivers new messages after all redeliveries that are due.
        if delivery.num_delivered == 1 and delivery.can_be_read_again:
            self.release()
            self._enter(delivery)
            return
        self._gathered.append(delivery)
        self._leave_out_body(delivery)
        if self.gather_left:
            self._on_surplus()
        else:
            self.release()

    def _enter(self, delivery: Delivery) -> None:
        """Queue a delivery: behind those of its key where that is busy, else as ready."""
        if self._key is not None:
            key = self._key(delivery.message.subject)
            queue = self._queues.get(key)
            if queue is not None:
                self._join(queue, delivery)
                return
            self._queues[key] = _KeyQueue((delivery,))
        self._offer(delivery)

    def _join(self, queue: _KeyQueue, delivery: Delivery) -> None:
        if delivery.message.sequence > queue[-1].message.sequence:
            queue.append(delivery)
        elif self._overtakes(queue, delivery):
            return
        if queue.stopped or len(queue) > KEY_PREFETCH:
            self._count_surplus(queue)
            self._leave_out_body(delivery)
            self._on_surplus()

    def _overtakes(self, queue: _KeyQueue, delivery: Delivery) -> bool:
        """Insert a late delivery by its sequence, and return whether it is the head of its key now."""
        sequence, head = delivery.message.sequence, queue[0]
        if sequence > head.message.sequence or queue.stopped or not self._recall(head):
            queue.insert(bisect(queue, sequence, lo=1, key=_sequence), delivery)
            return False
        queue.appendleft(delivery)
        self._count_surplus(queue)
        self._offer(delivery)
        return True

    def _recall(self, head: Delivery) -> bool:
        """Return whether a delivery could be kept from beginning: no handler has it, and it does not run alone."""
        entry = self._entry(head)
        if entry is None or entry.waited is not None or self.alone(head):
            return False
        if head in self._ready:
            self._ready.remove(head)
        return True

    def _entry(self, delivery: Delivery) -> _Entry | None:
        entry = self._held.get(delivery.message.sequence)
        return entry if entry is not None and entry.delivery is delivery else None

    def _note_waiting(self, entry: _Entry) -> None:
        """Note that a delivery does not run, or not any more."""
        if entry.waited is not None:
            self.running -= 1
            self._running_bytes -= len(entry.delivery.message.data)
            entry.waited = None
        if self._isolation.alone is not None:
            self._isolation.note_end(entry.delivery)

    def _next(self) -> _Entry | None:
        if self._isolation.closed and not (self._ready and self.alone(self._ready[0])):
            return None
        while self._ready:
            delivery = self._ready.popleft()
            if entry := self._entry(delivery):
                return entry
            self.done(delivery)
        return None

    async def _turn(self) -> None:
        """Wait until there may be something to take."""
        turn = anyio.Event()
        self._idle.append(turn)
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

    def _offer(self, delivery: Delivery) -> None:
        if self._screens and (delivery.num_delivered > 1 or (self._bodiless and self.is_bodiless(delivery))):
            if delivery not in self._undecided:
                self._undecided.add(delivery)
                self._redelivered.append(delivery)
                self._redelivery.set()
        else:
            self.admit(delivery)

    def _resume(self, delivery: Delivery) -> None:
        """Offer the head of a key again, whose retry is due."""
        if not self.is_next(delivery):
            return
        if self.holds(delivery):
            self._stop(delivery, stopped=False)
        self._offer(delivery)

    def _stop(self, delivery: Delivery, *, stopped: bool) -> None:
        """Note whether the head of a key cannot begin."""
        if self._key is None:
            return
        queue = self._queues.get(self._key(delivery.message.subject))
        if queue is not None and queue[0] is delivery and queue.stopped is not stopped:
            queue.stopped = stopped
            self._count_surplus(queue)

    def _count_surplus(self, queue: _KeyQueue) -> None:
        surplus = len(queue) if queue.stopped else max(0, len(queue) - KEY_PREFETCH)
        self.surplus += surplus - queue.surplus
        queue.surplus = surplus

    def _leave_out_body(self, delivery: Delivery) -> None:
        """Drop the body of a delivery that cannot begin yet, where the bodies are too large together."""
        size = len(delivery.message.data)
        if not size or self.waiting_bytes <= MOST_SURPLUS_BYTES or not delivery.can_be_read_again:
            return
        self._held[delivery.message.sequence].bodiless = True
        self._bodiless += 1
        self._bytes -= size
        delivery.message = structs.replace(delivery.message, data=b"", headers=None)

    def _wake(self) -> None:
        if self._idle:
            self._waking = True
            self._idle.popleft().set()

    def _withdraw(self, sequences: list[int]) -> list[Delivery]:
        withdrawn = []
        for sequence in sorted(sequences):  # in order, so that they come back in order
            entry = self._held.pop(sequence)
            self._note_waiting(entry)
            self._let_go(entry)
            withdrawn.append(entry.delivery)
        for key, queue in tuple(self._queues.items()):
            kept = [delivery for delivery in queue if self.holds(delivery)]
            queue.clear()
            queue.extend(kept)
            self._count_surplus(queue)
            if not queue:
                del self._queues[key]
        return withdrawn

    def _let_go(self, entry: _Entry) -> None:
        self._bytes -= len(entry.delivery.message.data)
        self._bodiless -= entry.bodiless


def _sequence(delivery: Delivery) -> int:
    return delivery.message.sequence
