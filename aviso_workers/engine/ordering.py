"""The deliveries that a worker process holds for one agent, from arrival to settlement, and which is next.

`pulling` puts arrivals in, a call form takes them out, the settler says when one is done. Next is what came first; or,
with `order_by`, what came first of each key: a key's lane is strictly in order, and what follows waits until the head
is done, also while the head waits to be tried again. That wait is here and not on the server, which would hand out
what follows meanwhile. A server gives a delivery to somebody else when it hears nothing of it for `ack_wait`: `beat`
keeps it patient for all that is held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Hashable

import anyio
from anyio.lowlevel import checkpoint

from aviso_workers.backends import Delivery
from aviso_workers.clocks import Clock
from aviso_workers.engine.isolation import Isolation

__all__ = ["Line"]

TURN_SECONDS = 0.005
"""Handlers that never wait get so long before others of the loop have a turn."""


class _Place:
    """A delivery's place in the line."""

    __slots__ = ("begin", "delivery", "since", "waited")

    def __init__(self, delivery: Delivery, since: float) -> None:
        self.delivery = delivery
        self.since = since
        """Since when it waits."""
        self.waited: float | None = None
        """The seconds that it waited; None while it does."""
        self.begin: Callable[[], Awaitable[None]] | None = None
        """What is awaited before it is handed out."""


class Line:
    """Deliveries that wait or run. With `key` of a subject, those of one key form a lane; without, each is its own."""

    def __init__(
        self, clock: Clock, *, key: Callable[[str], Hashable] | None = None, isolation: Isolation | None = None
    ) -> None:
        """With `isolation`, what was delivered before is given to `take_redelivered` first."""
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
        self._held: dict[int, _Place] = {}
        """All, by sequence, in order of arrival."""
        self._ready: deque[Delivery] = deque()
        self._lanes: dict[Hashable, deque[Delivery]] = {}
        """Per busy key, its head and what waits behind it."""
        self._blocked: dict[Hashable, Delivery | None] = {}
        """Keys of which nothing is handed out, and the head that would have been."""
        self._idle: deque[anyio.Event] = deque()
        self._waking = False
        """Whether somebody who was idle has been called and has not come yet."""
        self._taken_at = self._turn_ends = 0.0
        self._bytes = self._running_bytes = 0
        self.running = 0
        """Deliveries whose handling has begun."""
        self.finished = 0
        """Deliveries that came to their end here."""
        self.made_room: Callable[[], None] = _nobody
        """Called when one waits no more."""
        self.on_lost: Callable[[Delivery], None] = _nobody
        """Called with what may have been given to somebody else, at every beat."""

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
    def starved(self) -> bool:
        """Whether a worker is idle and nothing that is held may begin, as behind a head that waits for its retry."""
        return bool(self._idle) and not self._ready

    @property
    def oldest_age_seconds(self) -> float:
        """How long ago the oldest notification that is held was stored; 0 where none is held."""
        held = tuple(self._held.values())  # at once, because a scrape comes from a thread
        if not held:
            return 0.0
        oldest_ns = min(place.delivery.message.timestamp_ns for place in held)
        return max(0.0, (self._clock.time_ns() - oldest_ns) / 1e9)

    def waited_seconds(self, delivery: Delivery) -> float | None:
        """How long one that runs waited, for its turn in its lane and for a free worker; None for one not held."""
        place = self._place(delivery)
        return place.waited or 0.0 if place is not None else None

    def holds(self, delivery: Delivery) -> bool:
        """False for one whose stream was deleted and made anew: its sequence is that of another message now."""
        return self._place(delivery) is not None

    def delivery_of(self, sequence: int) -> Delivery | None:
        place = self._held.get(sequence)
        return place.delivery if place is not None else None

    def put(self, delivery: Delivery) -> None:
        message = delivery.message
        held = self._held.get(message.sequence)
        if held is not None:
            if held.delivery.message.timestamp_ns == message.timestamp_ns:
                return  # delivered again while it is held: settling the older delivery settles both
            self._waits(held)
            self._bytes -= len(held.delivery.message.data)
        self._bytes += len(message.data)
        self._held[message.sequence] = _Place(delivery, self._clock.monotonic())
        if self._key is not None:
            key = self._key(message.subject)
            if key in self._lanes:
                self._lanes[key].append(delivery)
                return
            self._lanes[key] = deque([delivery])
        self._offer(delivery)

    async def take(self) -> Delivery | None:
        """The next delivery; None when the line is closed."""
        if self._taken_at >= self._turn_ends:  # handlers that never wait must not stop the loop
            await checkpoint()
            self._turn_ends = self._clock.monotonic() + TURN_SECONDS
        while (place := self._next()) is None:
            if self.closed:
                await checkpoint()  # who asks again and again must not stop the loop
                return None
            await self._turn()
        if self._ready:
            self._wake()  # one calls the next, so that who never waits does not wake all of them in vain
        now = self._taken_at = self._clock.monotonic()
        place.waited = now - place.since
        self.running += 1
        self._running_bytes += len(place.delivery.message.data)
        self.made_room()
        if place.begin is not None:
            begin, place.begin = place.begin, None
            await begin()
        return place.delivery

    async def take_redelivered(self) -> Delivery | None:
        """The next that was delivered before, for whoever decides whether it may be taken; None when closed."""
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
        if begin is not None and (place := self._place(delivery)):
            place.begin = begin
        if first:
            self._ready.appendleft(delivery)
        else:
            self._ready.append(delivery)
        self._wake()

    def alone(self, delivery: Delivery) -> bool:
        """Whether it is to be handled by itself, and not together with others."""
        return delivery is self._isolation.alone

    def wake(self) -> None:
        """Handlers may begin again."""
        if self._ready:
            self._wake()

    def done(self, delivery: Delivery) -> None:
        """It is settled: it is held no more, and what waits behind it may go."""
        if place := self._place(delivery):
            self.finished += 1
            self._waits(place)
            del self._held[delivery.message.sequence]
            self._bytes -= len(delivery.message.data)
        if self._key is None:
            return
        key = self._key(delivery.message.subject)
        lane = self._lanes.get(key)
        if lane is None or lane[0] is not delivery:
            return  # it was given back meanwhile
        lane.popleft()
        if lane:
            self._offer(lane[0])
        else:
            del self._lanes[key]

    def again(self, delivery: Delivery, *, after_seconds: float) -> None:
        """It waits, at the head of its lane, and goes once more after the delay."""
        due = self._clock.monotonic() + after_seconds
        if place := self._place(delivery):
            self._waits(place)
            place.since = due
        self._clock.call_at(due, lambda: self._offer(delivery))

    def block(self, delivery: Delivery) -> None:
        """Hand out nothing of its key until `unblock`: something works on it that was given up and goes on."""
        if self._key is not None:
            self._blocked[self._key(delivery.message.subject)] = None

    def unblock(self, delivery: Delivery) -> None:
        """Hand out what is next of its key again."""
        if self._key is None:
            return
        head = self._blocked.pop(self._key(delivery.message.subject), None)
        if head is not None and self.holds(head):
            self._offer(head)

    def close(self) -> None:
        """Hand out nothing any more, and let the workers end. What arrives now is only held."""
        self.closed = True
        self._redelivery.set()
        if any(map(self.alone, self._ready)):
            self._isolation.note_end(self._ready[0])  # it has not begun, and will not
        self._ready.clear()
        while self._idle:
            self._idle.popleft().set()

    def give_back(self) -> int:
        """Give back what has not begun; returns how many those were."""
        return self._give_back([sequence for sequence, place in self._held.items() if place.waited is None])

    def abandon(self) -> int:
        """Give back everything, what runs as well; returns how many those were."""
        return self._give_back(list(self._held))

    def beat(self) -> None:
        """Tell the server that what is held is being worked on."""
        for place in tuple(self._held.values()):
            if place.delivery.held:
                place.delivery.in_progress()
            else:
                self.on_lost(place.delivery)

    def _place(self, delivery: Delivery) -> _Place | None:
        place = self._held.get(delivery.message.sequence)
        return place if place is not None and place.delivery is delivery else None

    def _waits(self, place: _Place) -> None:
        """It does not run, or not any more."""
        if place.waited is not None:
            self.running -= 1
            self._running_bytes -= len(place.delivery.message.data)
            place.waited = None
        if self._isolation.alone is not None:
            self._isolation.note_end(place.delivery)

    def _next(self) -> _Place | None:
        if self._isolation.closed and not (self._ready and self.alone(self._ready[0])):
            return None
        while self._ready:
            delivery = self._ready.popleft()
            if place := self._place(delivery):
                return place
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
                return
        if self._sorts_out and delivery.num_delivered > 1:
            self._redelivered.append(delivery)
            self._redelivery.set()
        else:
            self.admit(delivery)

    def _wake(self) -> None:
        if self._idle and not self._waking:
            self._waking = True
            self._idle.popleft().set()

    def _give_back(self, sequences: list[int]) -> int:
        for sequence in sorted(sequences):  # in order, so that they come back in order
            place = self._held.pop(sequence)
            self._waits(place)
            self._bytes -= len(place.delivery.message.data)
            place.delivery.nak()
        lanes = {key: deque(filter(self.holds, lane)) for key, lane in self._lanes.items()}
        self._lanes = {key: lane for key, lane in lanes.items() if lane}
        return len(sequences)


def _nobody(*_: object) -> None:
    pass
