"""The deliveries that a worker process holds for one agent, from arrival to settlement, and which is next.

`pulling` puts arrivals in, a call form takes them out, the settler says when one is done. Next is what came first; or,
with `order_by`, what came first of each key: a key's lane is strictly in order, and what follows waits until the head
is done, also while the head waits to be tried again. That wait is here and not on the server, which would hand out
what follows meanwhile. A server gives a delivery to somebody else when it hears nothing of it for `ack_wait`: `beat`
keeps it patient for all that is held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

import anyio
from anyio.lowlevel import checkpoint

from aviso_workers.backends import Delivery
from aviso_workers.clocks import Clock

__all__ = ["Line"]


class Line:
    """Deliveries that wait or run. With `key` of a subject, those of one key form a lane; without, each is its own."""

    def __init__(self, clock: Clock, *, key: Callable[[str], Hashable] | None = None) -> None:
        self.ordered = key is not None
        self._clock = clock
        self._key = key
        self._held: dict[int, Delivery] = {}
        """All, by sequence, in order of arrival."""
        self._since: dict[int, float] = {}
        """By sequence, since when it waits."""
        self._running: dict[int, float] = {}
        """By sequence, the seconds that it waited."""
        self._ready: deque[Delivery] = deque()
        self._lanes: dict[Hashable, deque[Delivery]] = {}
        """Per busy key, what waits behind its head."""
        self._idle: deque[anyio.Event] = deque()
        self._closed = False
        self.finished = 0
        """Deliveries that came to their end here."""
        self.made_room: Callable[[], None] = _nobody
        """Called when one waits no more."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def running(self) -> int:
        """Deliveries whose handling has begun."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Deliveries whose handling has not begun, or has failed and will begin again."""
        return len(self._held) - len(self._running)

    @property
    def oldest_age_seconds(self) -> float:
        """How long ago the oldest notification that is held was stored; 0 where none is held."""
        held = tuple(self._held.values())  # at once, because a scrape comes from a thread
        if not held:
            return 0.0
        oldest_ns = min(delivery.message.timestamp_ns for delivery in held)
        return max(0.0, (self._clock.time_ns() - oldest_ns) / 1e9)

    def waited_seconds(self, delivery: Delivery) -> float:
        """How long one that runs waited, for its turn in its lane and for a free worker."""
        return self._running.get(delivery.message.sequence, 0.0)

    def holds(self, delivery: Delivery) -> bool:
        """False for one whose stream was deleted and made anew: its sequence is that of another message now."""
        return self._held.get(delivery.message.sequence) is delivery

    def put(self, delivery: Delivery) -> None:
        held = self._held.get(delivery.message.sequence)
        if held is not None and held.message.timestamp_ns == delivery.message.timestamp_ns:
            return  # delivered again while it is held: settling the older delivery settles both
        self._held[delivery.message.sequence] = delivery
        self._running.pop(delivery.message.sequence, None)
        self._since[delivery.message.sequence] = self._clock.monotonic()
        if self._key is not None:
            key = self._key(delivery.message.subject)
            if key in self._lanes:
                self._lanes[key].append(delivery)
                return
            self._lanes[key] = deque()
        self._offer(delivery)

    async def take(self) -> Delivery | None:
        """The next delivery; None when the line is closed."""
        while not (delivery := self._next()):
            if self._closed:
                await checkpoint()  # who asks again and again must not stop the loop
                return None
            turn = anyio.Event()
            self._idle.append(turn)
            try:
                await turn.wait()
            except anyio.get_cancelled_exc_class():
                if turn.is_set():
                    self._wake()  # it was our turn: pass it on
                else:
                    self._idle.remove(turn)
                raise
        sequence = delivery.message.sequence
        self._running[sequence] = self._clock.monotonic() - self._since[sequence]
        self.made_room()
        return delivery

    def done(self, delivery: Delivery) -> None:
        """It is settled: it is held no more, and what waits behind it may go."""
        if self.holds(delivery):
            self.finished += 1
            for of_sequence in (self._held, self._since, self._running):
                of_sequence.pop(delivery.message.sequence)
        if self._key is None:
            return
        key = self._key(delivery.message.subject)
        if waiting := self._lanes.get(key):
            self._offer(waiting.popleft())
        else:
            self._lanes.pop(key, None)

    def again(self, delivery: Delivery, *, after_seconds: float) -> None:
        """It waits, at the head of its lane, and goes once more after the delay."""
        due = self._clock.monotonic() + after_seconds
        self._running.pop(delivery.message.sequence, None)
        self._since[delivery.message.sequence] = due
        self._clock.call_at(due, lambda: self._offer(delivery))

    def close(self) -> None:
        """Hand out nothing any more, and let the workers end. What arrives now is only held."""
        self._closed = True
        self._ready.clear()
        self._lanes.clear()
        while self._idle:
            self._wake()

    def give_back(self) -> int:
        """Give back what has not begun; returns how many those were."""
        return self._give_back([sequence for sequence in self._held if sequence not in self._running])

    def abandon(self) -> int:
        """Give back everything, what runs as well; returns how many those were."""
        return self._give_back(list(self._held))

    async def beat(self, every_seconds: float) -> None:
        """Tell the server, again and again, that what is held is being worked on."""
        while True:
            await self._clock.sleep(every_seconds)
            for delivery in tuple(self._held.values()):
                delivery.in_progress()

    def _next(self) -> Delivery | None:
        while self._ready:
            delivery = self._ready.popleft()
            if self.holds(delivery):
                return delivery
            self.done(delivery)
        return None

    def _offer(self, delivery: Delivery) -> None:
        if not self._closed:
            self._ready.append(delivery)
            self._wake()

    def _wake(self) -> None:
        if self._idle:
            self._idle.popleft().set()

    def _give_back(self, sequences: list[int]) -> int:
        for sequence in sorted(sequences):  # in order, so that they come back in order
            self._held.pop(sequence).nak()
        return len(sequences)


def _nobody() -> None:
    pass
