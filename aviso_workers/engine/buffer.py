"""The deliveries that a worker process holds for one agent, from arrival to settlement, and which is next.

`feeds` puts arrivals in, a handler takes them out, and the settler says when one is done. Next is the oldest delivery;
with `order_by`, the oldest of each ordering key (`ordering_keys`). A server delivers a message to another worker when
`ack_wait` passes without an ack or a report of progress, so `heartbeat` reports every buffered delivery as in progress.
A process that was paused, or cut off, has reported nothing: what it holds may have been handled elsewhere. So nothing
begins after the time up to which it is trusted (`trust_until`), and what waits then is left to whoever is given it.

Where bodies are too large together, those are dropped that belong to deliveries which cannot begin yet; `redeliveries`
reads them again when their turn comes.

After a worker has died, the server redelivers its messages in the order in which their `ack_wait` ran out, and not by
sequence. So an ordered agent that starts gathers redeliveries, until the server delivers a new message or no more
redeliveries come, and then hands them out in order of sequence.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from functools import partial

import anyio
from anyio.lowlevel import checkpoint
from msgspec import Struct, field, structs

from aviso_workers.aviso.codec import lacks_body
from aviso_workers.backends import Delivery, Message
from aviso_workers.clocks import Clock
from aviso_workers.declare.verdicts import PriorRecord
from aviso_workers.engine.isolation import Isolation
from aviso_workers.engine.ordering_keys import OrderingKeys, sequence_of

__all__ = ["MAX_WAITING_BYTES", "Buffer"]

TURN_SECONDS = 0.005
"""Handlers that never wait get so long before others of the loop have a turn."""
HEARTBEATS_AT_ONCE = 1000
"""Deliveries that are reported in progress before others of the loop have a turn."""
MAX_WAITING_BYTES = 16 * 1024 * 1024
"""The most that the waiting deliveries of an agent may have in one process. A larger message is pulled by itself."""
MAX_SURPLUS_BYTES = MAX_WAITING_BYTES // 2
"""Above this, deliveries that cannot begin yet are kept without their bodies, so that other keys have space."""


def _ignore(*_: object) -> None:
    """Do nothing: the callback of a buffer whose owner gives none."""


def _never() -> float:
    """Be asked no more: the `on_begin` of a buffer whose owner gives none."""
    return math.inf


class _HeldBack(Struct):
    """What waits while one after the other is tried. It is an object of its own, because CPython reads an object with
    more than 30 attributes more slowly.
    """

    waiting: deque[Delivery] = field(default_factory=deque)
    decided: set[Delivery] = field(default_factory=set)
    """Those of them on which `redeliveries` has decided, or that need no decision."""
    let: int = 0
    """How many of those may begin, and of those that come."""
    tries: set[Delivery] = field(default_factory=set)
    """Deliveries that were let begin, and that have not come to their end."""


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
        on_begin: Callable[[], float] = _never,
        on_surplus: Callable[[], None] = _ignore,
        on_lost: Callable[[Delivery], None] | None = None,
    ) -> None:
        """With `isolation`, redeliveries are returned by `take_redelivered`, and by `take` only after `admit`.

        `on_begin` is called when a handler takes a delivery, and returns how many have to be taken until it is called
        again, unless there is a surplus; `on_surplus` when one arrives that cannot begin yet, so that more may be
        pulled; and `on_lost` at each heartbeat, with every delivery that the server may have given to another worker.
        """
        self.lapsed = anyio.Event()
        """Set when what waited was left to others, because the server may have given it to them."""
        self.lapses = 0
        """How often that was."""
        self._trusted_until = math.inf
        self.closed = False
        """Whether no delivery is handed out any more."""
        self._clock = clock
        self._keys = OrderingKeys(key) if key is not None else None
        self._screens = isolation is not None
        self._isolation = isolation or Isolation(clock)
        self._isolation.join(self)
        self._redelivered: deque[Delivery] = deque()
        self._redelivery = anyio.Event()
        self._undecided: set[Delivery] = set()
        """Redeliveries that were offered to `take_redelivered` and on which nobody has decided yet."""
        self._held: dict[int, Delivery] = {}
        """All, by sequence, in order of arrival."""
        self._ready: deque[Delivery] = deque()
        self._gathered: list[Delivery] | None = None
        """The redeliveries that were gathered so far; None while none are gathered."""
        self._most_gathered = 0
        self._held_back: _HeldBack | None = None
        """What may not begin yet; None while everything may."""
        self._idle: deque[anyio.Event] = deque()
        self._waking = False
        """Whether a task that waits in `take` was woken and has not run yet."""
        self.taken_at = 0.0
        """When a delivery was taken the last time, on the agent's clock."""
        self._turn_ends = 0.0
        self.waiting_bytes = 0
        """The size of what `waiting` counts."""
        self._bodiless = 0
        self.running = 0
        """Deliveries whose handling has begun."""
        self.begun = 0
        """How many were taken by now."""
        self._asks_at: float = 0
        """`on_begin` is called when so many have been taken."""
        self.finished = 0
        """Deliveries that were settled here."""
        self._on_begin = on_begin
        self._on_surplus = on_surplus
        self._on_lost = on_lost or _ignore

    def __len__(self) -> int:
        return len(self._held)

    @property
    def ordered(self) -> bool:
        """Whether deliveries have ordering keys."""
        return self._keys is not None

    @property
    def surplus(self) -> int:
        """How many waiting deliveries do not count as prefetched; see `ordering_keys`."""
        return self._keys.surplus if self._keys is not None else 0

    @property
    def waiting(self) -> int:
        """Deliveries whose handling has not begun, or has failed and will begin again."""
        return len(self._held) - self.running

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
        oldest_ns = min(delivery.message.timestamp_ns for delivery in held)
        return max(0.0, (self._clock.time_ns() - oldest_ns) / 1e9)

    def waited_seconds(self, delivery: Delivery) -> float | None:
        """Return how long a delivery has waited for its turn and a free handler; None where it is not in the buffer."""
        return delivery.waited or 0.0 if self.holds(delivery) else None

    def taken(self) -> list[Delivery]:
        """Return the deliveries that handlers have taken and that are not settled yet."""
        return [delivery for delivery in self._held.values() if delivery.waited is not None]

    def holds(self, delivery: Delivery) -> bool:
        """Return whether this delivery is in the buffer, and not another one of its sequence: the stream may have been
        deleted and recreated."""
        return self._held.get(delivery.message.sequence) is delivery

    def record_of(self, delivery: Delivery) -> PriorRecord | None:
        """Return what is known of earlier deliveries and attempts; None where nothing is, as of nearly all."""
        return delivery.record if self.holds(delivery) else None

    def note_record(self, delivery: Delivery, record: PriorRecord) -> None:
        """Keep what is known of earlier deliveries and attempts for as long as the delivery is held."""
        delivery.record = record

    def key_of(self, subject: str) -> str:
        """Return the ordering key of a subject as text; empty without an order."""
        return self._keys.text_of(subject) if self._keys is not None else ""

    def behind(self, subject: str, sequence: int) -> int:
        """Return how many deliveries wait until the one of this subject and sequence, the first of its key, is done."""
        return self._keys.behind(subject, sequence) if self._keys is not None else 0

    def delivery_of(self, sequence: int) -> Delivery | None:
        return self._held.get(sequence)

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
        for delivery in sorted(gathered, key=sequence_of):
            if self.holds(delivery):
                self._enter(delivery)

    def put(self, delivery: Delivery) -> None:
        message = delivery.message
        held = self._held.get(message.sequence)
        if held is not None:
            if held.message.timestamp_ns == message.timestamp_ns:
                return  # delivered again while it is held: settling the older delivery settles both
            self._note_not_running(held)
            self._subtract_bytes(held)
        self._held[message.sequence] = delivery
        delivery.waiting_since = self._clock.monotonic()
        delivery.waited = delivery.begin = delivery.record = None
        delivery.bodiless = not message.data and self._screens and delivery.can_be_read_again and lacks_body(message)
        self._bodiless += delivery.bodiless
        self.waiting_bytes += len(message.data)
        if self._gathered is not None:
            self._gather(delivery)
        elif self._keys is not None:
            self._enter(delivery)
        else:
            self._offer(delivery)

    def put_all(self, deliveries: Sequence[Delivery]) -> None:
        """Put deliveries that have come together and were put nowhere before."""
        held, ready, now, size = self._held, self._ready, self._clock.monotonic(), 0
        each_by_itself = (
            self._keys is not None or self._gathered is not None or self.closed or self._held_back is not None
        )
        for delivery in deliveries:
            message = delivery.message
            if each_by_itself or not message.data or delivery.num_delivered > 1 or message.sequence in held:
                self.put(delivery)
                continue
            held[message.sequence] = delivery
            delivery.waiting_since = now
            size += len(message.data)
            ready.append(delivery)
        self.waiting_bytes += size
        self.wake()

    def take_now(self) -> Delivery | None:
        """Return the next delivery; None where `take` has to wait for something first."""
        if not self._ready or self.taken_at >= self._turn_ends or self._isolation.closed:
            return None
        delivery, now = self._ready[0], self._clock.monotonic()
        held = self._held.get(delivery.message.sequence) is delivery
        if now >= self._trusted_until or delivery.begin is not None or not held:
            return None
        self._ready.popleft()
        self._note_begin(delivery, now)
        return delivery

    async def take(self) -> Delivery | None:
        """Return the next delivery; None when the buffer is closed."""
        if self.taken_at >= self._turn_ends:  # handlers that never wait must not stop the loop
            await checkpoint()
            self._turn_ends = self._clock.monotonic() + TURN_SECONDS
        while (delivery := self._next()) is None:
            if self.closed:
                await checkpoint()  # who asks again and again must not stop the loop
                return None
            await self._turn()
        now = self._clock.monotonic()
        if now >= self._trusted_until:
            self.taken_at = now
            self.lapse()
            return await self.take()
        self._note_begin(delivery, now)
        if delivery.begin is not None:
            begin, delivery.begin = delivery.begin, None
            await begin()
        return delivery

    def tell_next_begin(self) -> None:
        """Let `on_begin` be called for the next delivery that is taken."""
        self._asks_at = 0

    def _note_begin(self, delivery: Delivery, now: float) -> None:
        """Note that a handler takes a delivery, and let the next handler begin."""
        if self._idle and self._ready and not self._waking:
            self._wake()  # each wakes the next one: to wake all is in vain where one of them takes everything
        self.taken_at = now
        delivery.waited = now - delivery.waiting_since
        self.waiting_bytes -= len(delivery.message.data)
        self.running += 1
        self.begun += 1
        if self.begun >= self._asks_at or (self._keys is not None and self._keys.surplus):
            self._asks_at = self.begun + self._on_begin()

    def note_waited(self, delivery: Delivery) -> None:
        """Count as waiting what a delivery that was taken has waited for its `rate_limit`."""
        if self.holds(delivery) and delivery.waited is not None:
            delivery.waited = self._clock.monotonic() - delivery.waiting_since

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
        return self._keys is None or self._keys.is_next(delivery)

    def note_decided(self, delivery: Delivery) -> None:
        """Note that a redelivery was admitted, settled, or is to be offered again when it is the next of its key."""
        self._undecided.discard(delivery)

    def admit(
        self, delivery: Delivery, *, first: bool = False, begin: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Let `take` return a redelivery, before all others or after them. `begin` is awaited first."""
        if self.closed:
            return
        if (back := self._held_back) is not None:
            if delivery not in back.tries:
                delivery.begin = begin
                back.decided.add(delivery)
                back.waiting.append(delivery)
                return
            begin = partial(self._begin_try, delivery, begin)
        if begin is not None:
            delivery.begin = begin
        if first:
            self._ready.appendleft(delivery)
        else:
            self._ready.append(delivery)
        if not self._waking:
            self._wake()

    @property
    def may_come(self) -> int | None:
        """How many more are wanted while others are held back: those that may begin, or one to be tried next; None
        while all may begin.
        """
        back = self._held_back
        return None if back is None else back.let or int(not self.can_try)

    @property
    def can_try(self) -> bool:
        """Whether one is held back that `let` would let begin."""
        return self._held_back is not None and any(map(self.holds, self._held_back.waiting))

    def hold_back(self) -> None:
        """Let nothing begin but what is `let`, until `let_all`."""
        back = self._held_back = self._held_back or _HeldBack()
        back.let = 0
        back.waiting.extendleft(reversed(self._ready))
        back.tries.difference_update(self._ready)
        back.decided.update(self._ready)
        self._ready.clear()

    def let(self, count: int) -> None:
        """Let so many more begin, of those that are held back or come."""
        assert self._held_back is not None, "only after `hold_back`"
        back = self._held_back
        back.let += count
        while back.let and back.waiting:
            if self.holds(delivery := back.waiting.popleft()):
                self._let_begin(delivery, back)
        if back.let:
            self._on_surplus()

    def let_none(self) -> None:
        """Let none begin any more that was not let begin and has come, and have one come to be tried next."""
        if self._held_back is not None:
            self._held_back.let = 0
        self._on_surplus()

    def let_all(self) -> None:
        """Let everything begin again."""
        back, self._held_back = self._held_back or _HeldBack(), None
        for delivery in back.waiting:
            if self.holds(delivery):
                self._let_begin(delivery, back)
        self._on_surplus()

    def _let_begin(self, delivery: Delivery, back: _HeldBack) -> None:
        if delivery not in back.decided:
            self._offer(delivery, screened=delivery.record is not None)
            return
        back.decided.discard(delivery)
        if self._held_back is not None:
            back.let -= 1
            back.tries.add(delivery)
        self.admit(delivery, first=self.alone(delivery), begin=delivery.begin)

    def is_trying(self) -> bool:
        """Return whether one that was let begin is still held, and has not come to its end."""
        return self._held_back is not None and any(map(self.holds, self._held_back.tries))

    def end_try(self, delivery: Delivery) -> bool:
        """Note that a delivery has come to its end, and return whether it was let begin while others are held back."""
        if self._held_back is None or delivery not in self._held_back.tries:
            return False
        self._held_back.tries.discard(delivery)
        return True

    async def _begin_try(self, delivery: Delivery, begin: Callable[[], Awaitable[None]] | None) -> None:
        if delivery.record is None:
            delivery.record = PriorRecord()  # so that its end is not taken for that of any other
        if begin is not None:
            await begin()

    def alone(self, delivery: Delivery) -> bool:
        """Return whether it is to be handled by itself, and not together with others."""
        return delivery is self._isolation.alone

    def wake(self) -> None:
        """Wake a handler that waits, because the isolation has ended."""
        if self._ready and not self._waking:
            self._wake()

    def finish(self, delivery: Delivery) -> float | None:
        """Remove a delivery that is settled, offer the next one of its key, and return how long it has waited for its
        turn and a free handler; None where it was not in the buffer.
        """
        held = self._held.get(delivery.message.sequence) is delivery
        if held:
            self.finished += 1
            waited = delivery.waited
            del self._held[delivery.message.sequence]
            if waited is not None and self._isolation.alone is None:
                self.running -= 1  # and its size is counted no more
                self._bodiless -= delivery.bodiless
            else:
                self._note_not_running(delivery)
                self._subtract_bytes(delivery)
                if waited is None:
                    self._on_surplus()  # no handler begins for it, which would ask for more
        if self._keys is not None and (following := self._keys.leave(delivery)):
            self._offer(following)
        return (waited or 0.0) if held else None

    def retry_later(self, delivery: Delivery, *, after_seconds: float) -> None:
        """Keep a delivery at the head of its key, and offer it again after the delay."""
        due = self._clock.monotonic() + after_seconds
        if self.holds(delivery):
            self._note_not_running(delivery)
            delivery.waiting_since = due
            if self._keys is not None:
                self._keys.stop(delivery, stopped=True)
            self._leave_out_body(delivery)
        self._clock.call_at(due, lambda: self._resume(delivery))

    def close(self) -> None:
        """Hand out no delivery any more, and let the handlers end. What arrives from now on is only held."""
        self.closed = True
        self._redelivery.set()
        back = self._held_back or _HeldBack()
        for delivery in (*self._ready, *back.waiting):
            if self.alone(delivery):
                self._isolation.note_end(delivery)  # it has not begun, and will not
        self._ready.clear()
        back.waiting.clear()
        back.decided.clear()
        while self._idle:
            self._idle.popleft().set()

    def withdraw(self) -> list[Delivery]:
        """Remove the deliveries whose handling has not begun, and return them, to be given back in this order."""
        return self._withdraw([sequence for sequence, delivery in self._held.items() if delivery.waited is None])

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
        self.lapses += 1
        self.lapsed.set()

    async def heartbeat(self) -> None:
        """Report every buffered delivery as in progress to the server."""
        for number, delivery in enumerate(tuple(self._held.values()), start=1):
            if not self.holds(delivery):
                continue  # it was settled while others had a turn
            if delivery.held:
                delivery.in_progress()
            else:
                self._on_lost(delivery)
            if number % HEARTBEATS_AT_ONCE == 0:
                await checkpoint()

    def is_bodiless(self, delivery: Delivery) -> bool:
        """Return whether the body of its message was dropped, to be read again when its turn has come."""
        return delivery.bodiless and self.holds(delivery)

    def restore_body(self, delivery: Delivery, message: Message) -> None:
        """Put back the body of a delivery, whose message was read again."""
        if self.is_bodiless(delivery):
            delivery.message = structs.replace(delivery.message, data=message.data, headers=message.headers)
            delivery.bodiless = False
            self._bodiless -= 1
            self.waiting_bytes += len(message.data)

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
        """Offer a delivery, unless others of its ordering key come first."""
        place = self._keys.enter(delivery, recall=self._recall) if self._keys is not None else "next"
        if place == "next":
            self._offer(delivery)
        elif place == "surplus":
            self._leave_out_body(delivery)
            self._on_surplus()

    def _recall(self, delivery: Delivery) -> bool:
        """Return whether a delivery could be kept from beginning: no handler has it, and it does not run alone."""
        if not self.holds(delivery) or delivery.waited is not None or self.alone(delivery):
            return False
        if delivery in self._ready:
            self._ready.remove(delivery)
        return True

    def _note_not_running(self, delivery: Delivery) -> None:
        """Note that a delivery does not run, or not any more."""
        if delivery.waited is not None:
            self.running -= 1
            self.waiting_bytes += len(delivery.message.data)
            delivery.waited = None
        if self._isolation.alone is not None:
            self._isolation.note_end(delivery)

    def _next(self) -> Delivery | None:
        if self._isolation.closed and not (self._ready and self.alone(self._ready[0])):
            return None
        while self._ready:
            delivery = self._ready.popleft()
            if self.holds(delivery):
                return delivery
            self.finish(delivery)
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

    def _offer(self, delivery: Delivery, *, screened: bool = False) -> None:
        """Let a delivery begin in its turn, or be decided on where it is not the first of its notification."""
        if (back := self._held_back) is not None and delivery not in back.tries:
            if not back.let:
                back.waiting.append(delivery)
                self._leave_out_body(delivery)
                return
            back.let -= 1
            back.tries.add(delivery)
        if self._screens and (
            screened or delivery.num_delivered > 1 or (self._bodiless and self.is_bodiless(delivery))
        ):
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
        if self._keys is not None and self.holds(delivery):
            self._keys.stop(delivery, stopped=False)
        self._offer(delivery, screened=delivery.record is not None)

    def _leave_out_body(self, delivery: Delivery) -> None:
        """Drop the body of a delivery that cannot begin yet, where the bodies are too large together."""
        size = len(delivery.message.data)
        if not size or self.waiting_bytes <= MAX_SURPLUS_BYTES or not delivery.can_be_read_again:
            return
        delivery.bodiless = True
        self._bodiless += 1
        self.waiting_bytes -= size
        delivery.message = structs.replace(delivery.message, data=b"", headers=None)

    def _wake(self) -> None:
        if self._idle:
            self._waking = True
            self._idle.popleft().set()

    def _withdraw(self, sequences: list[int]) -> list[Delivery]:
        withdrawn = []
        for sequence in sorted(sequences):  # in order, so that they come back in order
            delivery = self._held.pop(sequence)
            self._note_not_running(delivery)
            self._subtract_bytes(delivery)
            withdrawn.append(delivery)
        if self._keys is not None:
            self._keys.drop_unheld(self.holds)
        return withdrawn

    def _subtract_bytes(self, delivery: Delivery) -> None:
        """Note that a delivery, which does not run, is not held any more."""
        self.waiting_bytes -= len(delivery.message.data)
        self._bodiless -= delivery.bodiless
