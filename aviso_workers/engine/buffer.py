"""The deliveries that a worker process holds for one agent, from arrival to settlement, and which is next.

`subscription` puts arrivals in, a handler takes them out, and the settler says when one is done. Next is the oldest
delivery; with `order_by`, the oldest of each ordering key. The deliveries of a key are handled strictly in order of
sequence: the later ones wait until the first is done, also while the first waits to be tried again. It waits here and
not on the server, which would deliver the later ones meanwhile. A server delivers a message to another worker when it
hears nothing of it for `ack_wait`, so `heartbeat` reports every delivery that is held as in progress.

A server delivers in the order of the stream, so a key that fails or is slow brings more and more deliveries that have
to wait here before anything of other keys comes. All of them stay here: `surplus` says how many of those that wait
belong to such keys, and `prefetch` asks for more in their place. Only their bodies are left out where they are too
large together; `redeliveries` reads them again when their turn comes.

The deliveries of a dead worker come in the order in which their `ack_wait` ran out. So a worker that begins gathers
them, and hands out nothing before all of them are here.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Awaitable, Callable, Hashable

import anyio
from anyio.lowlevel import checkpoint
from msgspec import structs

from aviso_workers.backends import Delivery, Message
from aviso_workers.clocks import Clock
from aviso_workers.engine.isolation import Isolation

__all__ = ["MOST_WAITING_BYTES", "Buffer"]

TURN_SECONDS = 0.005
"""Handlers that never wait get so long before others of the loop have a turn."""
HEARTBEATS_AT_ONCE = 1000
"""Deliveries that are reported in progress before others of the loop have a turn."""
KEY_PREFETCH = 64
"""Of a key that is being handled, so many deliveries count as prefetched; of one that waits for a retry, none."""
MOST_WAITING_BYTES = 16 * 1024 * 1024
"""What may wait of an agent in one process, besides what runs. A message that is larger is asked for by itself."""
MOST_SURPLUS_BYTES = MOST_WAITING_BYTES // 2
"""Once so much waits, the surplus is kept without its bodies, so that there is room for other keys."""


def _ignore(*_: object) -> None:
    """Do nothing: the callback of a buffer whose owner gives none."""


class _Entry:
    """A delivery that the buffer holds."""

    __slots__ = ("begin", "bodiless", "delivery", "since", "waited")

    def __init__(self, delivery: Delivery, since: float) -> None:
        self.delivery = delivery
        self.bodiless = False
        """Whether the body of its message was left out."""
        self.since = since
        """Since when it waits."""
        self.waited: float | None = None
        """The seconds that it waited; None while it does."""
        self.begin: Callable[[], Awaitable[None]] | None = None
        """What is awaited before it is handed out."""


class _KeyQueue(deque[Delivery]):
    """The deliveries of one key that are held, in order of sequence. Only the head is handed out."""

    stopped = False
    """Whether the head waits to be tried again, or for an abandoned call that still runs."""
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
        """With `isolation`, what was delivered before is given to `take_redelivered` first.

        `on_begin` is called when one waits no more, `on_surplus` when what came is surplus, so that more may be asked
        for in its place, and `on_lost`, at every heartbeat, with what may have been given to somebody else.
        """
        self.ordered = key is not None
        self.closed = False
        """Whether nothing is handed out any more."""
        self._clock = clock
        self._key = key
        self._sorts_out = isolation is not None
        self._isolation = isolation or Isolation(clock)
        self._isolation.join(self)
        self._redelivered: deque[Delivery] = deque()
        self._redelivery = anyio.Event()
        self._held: dict[int, _Entry] = {}
        """All, by sequence, in order of arrival."""
        self._ready: deque[Delivery] = deque()
        self._queues: dict[Hashable, _KeyQueue] = {}
        """Per busy key, its head and what waits behind it."""
        self._blocked: dict[Hashable, Delivery | None] = {}
        """Keys of which nothing is handed out, and the head that would have been."""
        self._gathered: list[Delivery] | None = None
        """What was gathered so far; None where nothing is gathered."""
        self._most_gathered = 0
        self._idle: deque[anyio.Event] = deque()
        self._waking = False
        """Whether somebody who was idle has been called and has not come yet."""
        self._taken_at = self._turn_ends = 0.0
        self._bytes = self._running_bytes = 0
        self._bodiless = 0
        self.surplus = 0
        """Of those that wait, how many belong to keys that have enough here, or of which none can begin."""
        self.running = 0
        """Deliveries whose handling has begun."""
        self.finished = 0
        """Deliveries that came to their end here."""
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
        """Deliveries that begin as soon as a worker is free."""
        return len(self._ready)

    @property
    def starved(self) -> bool:
        """Whether a worker is idle and nothing that is held may begin, as behind a head that waits for its retry."""
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
        """Return the seconds that a delivery has waited for its turn in its key and a free worker; None: not held."""
        entry = self._entry(delivery)
        return entry.waited or 0.0 if entry is not None else None

    def holds(self, delivery: Delivery) -> bool:
        """False for one whose stream was deleted and made anew: its sequence is that of another message now."""
        return self._entry(delivery) is not None

    def delivery_of(self, sequence: int) -> Delivery | None:
        entry = self._held.get(sequence)
        return entry.delivery if entry is not None else None

    @property
    def gathers(self) -> int:
        """How many more are gathered before the first of them is handed out, at most."""
        return 0 if self._gathered is None else self._most_gathered - len(self._gathered)

    def gather(self, most: int) -> None:
        """Hand out nothing before so many have come, or one that was never delivered before, or `release` is called."""
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
        self._held[message.sequence] = _Entry(delivery, self._clock.monotonic())
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
        if self._ready and not self._waking:
            self._wake()  # one calls the next, so that who never waits does not wake all of them in vain
        now = self._taken_at = self._clock.monotonic()
        entry.waited = now - entry.since
        self.running += 1
        self._running_bytes += len(entry.delivery.message.data)
        self._on_begin(self)
        if entry.begin is not None:
            begin, entry.begin = entry.begin, None
            await begin()
        return entry.delivery

    async def take_redelivered(self) -> Delivery | None:
        """Return the next that was delivered before, for whoever decides whether it may be taken; None when closed."""
        while not self.closed:
            if self._redelivered:
                return self._redelivered.popleft()
            self._redelivery = anyio.Event()
            await self._redelivery.wait()
        return None

    def admit(
        self, delivery: Delivery, *, first: bool = False, begin: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Let it be taken, before all others or after them. `begin` is awaited before it is handed out."""
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
        """Handlers may begin again."""
        if self._ready and not self._waking:
            self._wake()

    def done(self, delivery: Delivery) -> None:
        """Remove a delivery that is settled; what waits behind it may begin."""
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

    def again(self, delivery: Delivery, *, after_seconds: float) -> None:
        """Let a delivery wait at the head of its key, and begin again after the delay."""
        due = self._clock.monotonic() + after_seconds
        if entry := self._entry(delivery):
            self._note_waiting(entry)
            entry.since = due
            self._stop(delivery, stopped=True)
            self._leave_out_body(delivery)
        self._clock.call_at(due, lambda: self._resume(delivery))

    def block(self, delivery: Delivery) -> None:
        """Hand out nothing of its key until `unblock`: a call for it that was abandoned still runs."""
        if self._key is not None:
            self._blocked[self._key(delivery.message.subject)] = None

    def unblock(self, delivery: Delivery) -> None:
        """Hand out what is next of its key again."""
        if self._key is None:
            return
        head = self._blocked.pop(self._key(delivery.message.subject), None)
        if head is not None and self.holds(head):
            self._resume(head)

    def close(self) -> None:
        """Hand out nothing any more, and let the workers end. What arrives now is only held."""
        self.closed = True
        self._redelivery.set()
        if any(map(self.alone, self._ready)):
            self._isolation.note_end(self._ready[0])  # it has not begun, and will not
        self._ready.clear()
        while self._idle:
            self._idle.popleft().set()

    def withdraw(self) -> list[Delivery]:
        """Hold no more what has not begun, and return it, to be given back in this order."""
        return self._withdraw([sequence for sequence, entry in self._held.items() if entry.waited is None])

    def withdraw_all(self) -> list[Delivery]:
        """Hold nothing any more, and return all of it, also what runs, to be given back in this order."""
        return self._withdraw(list(self._held))

    async def heartbeat(self) -> None:
        """Tell the server that what is held is being worked on."""
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
        """Return whether the body of its message was left out, to be read again when its turn has come."""
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
        if delivery.num_delivered == 1 and delivery.can_be_read_again:  # what was due has come by now
            self.release()
            self._enter(delivery)
            return
        self._gathered.append(delivery)
        self._leave_out_body(delivery)
        if self.gathers:
            self._on_surplus()
        else:
            self.release()

    def _enter(self, delivery: Delivery) -> None:
        """Hand it out when it is next, of all or of its key."""
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
        """Insert one that comes late where its sequence belongs; whether it has become the head of its key."""
        sequence, head = delivery.message.sequence, queue[0]
        if sequence > head.message.sequence or not self._recall(head):
            queue.insert(bisect(queue, sequence, lo=1, key=_sequence), delivery)
            return False
        queue.appendleft(delivery)
        self._count_surplus(queue)
        self._offer(delivery)
        return True

    def _recall(self, head: Delivery) -> bool:
        """Return whether it could be kept from being handed out: it waits for a worker and for nothing else."""
        if head not in self._ready or self.alone(head):
            return False
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
            if turn.is_set():  # it was our turn: pass it on
                self._waking = False
                self._wake()
            else:
                self._idle.remove(turn)
            raise
        self._waking = False

    def _offer(self, delivery: Delivery) -> None:
        if self._blocked and self._key is not None:
            key = self._key(delivery.message.subject)
            if key in self._blocked:
                self._blocked[key] = delivery
                self._stop(delivery, stopped=True)
                return
        if self._sorts_out and (delivery.num_delivered > 1 or (self._bodiless and self.is_bodiless(delivery))):
            self._redelivered.append(delivery)
            self._redelivery.set()
        else:
            self.admit(delivery)

    def _resume(self, delivery: Delivery) -> None:
        """Let the head of a key begin that was stopped."""
        if self.holds(delivery):
            self._stop(delivery, stopped=False)
        self._offer(delivery)

    def _stop(self, delivery: Delivery, *, stopped: bool) -> None:
        """Note whether the head of a key cannot begin."""
        if self._key is None:
            return
        queue = self._queues.get(self._key(delivery.message.subject))
        if queue is not None and queue.stopped is not stopped:
            queue.stopped = stopped
            self._count_surplus(queue)

    def _count_surplus(self, queue: _KeyQueue) -> None:
        surplus = len(queue) if queue.stopped else max(0, len(queue) - KEY_PREFETCH)
        self.surplus += surplus - queue.surplus
        queue.surplus = surplus

    def _leave_out_body(self, delivery: Delivery) -> None:
        """Keep it without its body where too much waits: it has come and cannot begin."""
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
