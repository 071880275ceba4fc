"""What begins next: a pure state machine. It does no I/O, starts no task and has no clock.

`flow` tells it what happened and when: deliveries have come, a handler is done, a limit lets some begin, the server may
have given what waits to others. It answers which delivery begins now (`begin`), and when to ask again (`again_at`).

A delivery that is held is in exactly one place: behind an earlier one of its ordering key, with whoever decides whether
it may begin, waiting until a time, waiting for a limit, ready, or running. Only `_move` changes the place. `_put` asks
the rules in turn and puts the delivery at the first that stops it; when that rule lets it go, it is put again. So no
rule has a list of its own, and none has to know another. What holds for all deliveries at once is no place, but asked
when one begins: redeliveries are being gathered, the worker drains, the server may have given them to others, a
notification of this process runs alone, what the agent depends on is away (`Pace`).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Any, Protocol

from aviso_workers.aviso.codec import lacks_body
from aviso_workers.backends import Delivery
from aviso_workers.engine.pace import Pace

GONE, BEHIND, ASKED, UNTIL, GATE, READY, AGAIN, AT_ONCE, ALONE, RUNNING = range(10)
"""The places of a delivery. `READY` and `AGAIN` begin in turn, `AGAIN` after an earlier attempt; `AT_ONCE`
begins before them, whatever is away, because a person asks for that, and `ALONE` before all others."""

WAITS_FOR = {BEHIND: "an earlier one of its key", UNTIL: "its next attempt", GATE: "a limit"}


class Limit(Protocol):
    """A limit of how many begin, or run, of each of its keys. It is asked when a delivery is about to begin."""

    def gate(self, delivery: Delivery) -> Hashable:
        """Return the key of a delivery."""
        ...

    def admits(self, delivery: Delivery, now: float) -> bool:
        """Return whether a delivery may begin now, and count it where it may."""
        ...

    def take_back(self, delivery: Delivery) -> None:
        """Note that a delivery that was just admitted does not begin, because another limit does not let it."""
        ...

    def release(self, delivery: Delivery) -> None:
        """Note that a delivery that was admitted does not run any more."""
        ...

    def wait(self, key: Any) -> None:
        """Note that a delivery of the key waits: `Dispatch.open` is to be called when some of it may begin."""
        ...


class _Line:
    """The deliveries of one ordering key: those that wait, by sequence, and the one whose call runs."""

    __slots__ = ("key", "running", "waiting")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.waiting: list[Delivery] = []
        self.running: Delivery | None = None


class Dispatch:
    """The deliveries that a worker holds for one agent. All times are those of the agent's clock.

    With `key`, which returns the ordering key of a subject, those of one key run one after another, by sequence. With
    `screens`, what was delivered before is put to whoever takes it from `asked`, and begins after `decided`.
    """

    def __init__(
        self,
        *,
        key: Callable[[str], Hashable] | None = None,
        limits: Sequence[Limit] = (),
        pace: Pace | None = None,
        screens: bool = False,
        pick: Callable[[], float] = random.random,
    ) -> None:
        self.held: dict[int, Delivery] = {}
        """All, by sequence, in order of arrival."""
        self.ready: deque[Delivery] = deque()
        """Those that begin in turn and were not tried before."""
        self.again: deque[Delivery] = deque()
        """Those that begin in turn and were tried before."""
        self.asked: deque[Delivery] = deque()
        """Those to decide on, and some that have left this place since."""
        self.begun = 0
        """How many have begun by now."""
        self.running = 0
        self.running_again = 0
        """How many of those that run were tried before."""
        self.waiting_bytes = 0
        """The size of the bodies of what is held and does not run."""
        self.trusted_until = math.inf
        """Nothing begins from this time on: the server may have given it to others."""
        self.gathering = 0
        """How many more redeliveries are gathered before anything begins; 0 while none are."""
        self.closed = self.only_alone = False
        self.special = True
        """Whether `begin` has more to ask than for the first of `ready`."""
        self._pace = pace or Pace(running=lambda: (0, 0), tell=lambda: None)  # which nobody tells of a failure
        self._limits = limits
        self._screens = screens
        self._pick = pick
        self._key = key
        self._lines: dict[Hashable, _Line] = {}
        self._gates: dict[tuple[Limit, Hashable], list[Delivery]] = {}
        """What waits for a limit, by sequence."""
        self._alone: deque[Delivery] = deque()
        self._at_once: deque[Delivery] = deque()
        self._queues = {READY: self.ready, AGAIN: self.again, AT_ONCE: self._at_once, ALONE: self._alone}
        """By place, those from which deliveries begin."""
        self._single: Delivery | None = None
        """The one that is to run alone, until it runs, wherever it waits."""
        self._timers: list[tuple[float, int, Delivery]] = []
        self._timed = 0
        self._turn = False
        """Whether the last one that began was not tried before."""
        self._ahead = 0.0
        """How many seconds more retries have taken than first tries lately."""

    # What happened

    def received(self, delivery: Delivery, now: float) -> bool:
        """Note that a delivery has come. Return False where it is held already: settling the one settles both."""
        message = delivery.message
        held = self.held.get(message.sequence)
        if held is not None:
            if held.message.timestamp_ns == message.timestamp_ns:
                return False
            self._forget(held, now)  # the stream was recreated; a call that runs keeps its key until it ends
        self.held[message.sequence] = delivery
        delivery.place, delivery.waiting_since = GONE, now
        delivery.waited = delivery.begin = delivery.record = delivery.line = None
        delivery.due, delivery.tried, delivery.at_once = 0.0, False, False
        delivery.screened = not self._screens or not (
            delivery.num_delivered > 1 or (not message.data and lacks_body(message))
        )
        self.waiting_bytes += len(message.data)
        if self.gathering:  # a server delivers new messages after all redeliveries that are due
            is_new = delivery.num_delivered == 1 and delivery.can_be_read_again
            self.gathering = 0 if is_new else self.gathering - 1
        self._enter(delivery, now)
        return True

    def received_all(self, deliveries: Iterable[Delivery], now: float) -> None:
        """Note that deliveries have come together, which are new objects."""
        held, ready, key_of, size = self.held, self.ready, self._key, 0
        for delivery in deliveries:
            message = delivery.message
            if not message.data or delivery.num_delivered > 1 or message.sequence in held or self.gathering:
                self.received(delivery, now)
                continue
            place = READY
            if key_of is not None:
                if (line := self._lines.get(key := key_of(message.subject))) is None:
                    line = self._lines[key] = _Line(key)
                elif line.waiting and line.waiting[-1].message.sequence > message.sequence:
                    self.received(delivery, now)
                    continue
                else:
                    place = BEHIND
                delivery.line = line
                line.waiting.append(delivery)
            held[message.sequence] = delivery
            delivery.place = place
            delivery.waiting_since = now
            size += len(message.data)
            if place == READY:
                ready.append(delivery)
        self.waiting_bytes += size

    def decided(
        self, delivery: Delivery, now: float, *, tried: bool, alone: bool = False, at_once: bool = False
    ) -> None:
        """Let a delivery begin that was put to `asked`: it waits for nothing but the other rules, and with `at_once`
        for nothing that is away."""
        if delivery.place == ASKED:
            delivery.screened, delivery.tried, delivery.at_once = True, tried, at_once
            if alone:
                self._single = delivery
            self._put(delivery, now)

    def start(self, delivery: Delivery) -> bool:
        """Take a delivery that was put to `asked`, to settle it without its handler; return whether it was there."""
        if delivery.place != ASKED:
            return False
        self._move(delivery, GONE)
        self._run(delivery, delivery.waiting_since)
        return True

    def put_off(self, delivery: Delivery, now: float, *, until: float) -> None:
        """Have a delivery that was put to `asked` decided on again at a time."""
        if delivery.place == ASKED:
            delivery.due = until
            self._put(delivery, now)

    def ended(self, delivery: Delivery, now: float) -> bool:
        """Note that a delivery was settled or given back, and return whether it was held."""
        held = self.held.get(delivery.message.sequence) is delivery
        if held and delivery.place == RUNNING and not self._limits:
            del self.held[delivery.message.sequence]
            delivery.place = GONE
            self.running -= 1
            self.running_again -= delivery.tried
            if self.again:
                self._share(delivery, now)
            if (line := delivery.line) is not None:
                line.running = None
                self._next_of(line, now)
            return True
        if held:
            self._forget(delivery, now)
        if delivery.place == RUNNING and (line := self._stop(delivery, now)) is not None:
            self._next_of(line, now)
        return held

    def wait(self, delivery: Delivery, now: float, *, until: float) -> None:
        """Note that the call of a delivery has failed, and keep it until it is tried again at a time."""
        if not self.holds(delivery):
            self.ended(delivery, now)
        elif delivery.place == RUNNING:
            line = self._stop(delivery, now)
            delivery.due = delivery.waiting_since = until
            delivery.waited = None
            if delivery.screened:  # else its message could not be read, and it is decided on still
                delivery.tried, delivery.screened = True, not self._screens or delivery.record is None
            delivery.at_once = False
            self.waiting_bytes += len(delivery.message.data)
            self._enter(delivery, now)
            if line is not None:
                self._next_of(line, now)  # an earlier one may have come while this one ran

    def open(self, limit: Limit, key: Hashable, count: int, now: float) -> int:
        """Let up to so many of a limit's key be asked again; return for how many. Those before them that have to be
        decided on first are not counted."""
        waiting = self._gates.get((limit, key), [])
        opened, left = list[Delivery](), count
        for delivery in waiting:
            if not left:
                break
            opened.append(delivery)
            left -= delivery.screened
        for delivery in reversed(opened):
            self._put(delivery, now, first=True)
        return count - left

    def withdraw(self, *, running: bool = False) -> list[Delivery]:
        """Forget what waits, with `running` also what runs, and return it by sequence."""
        wanted = [each for each in self.held.values() if running or each.place != RUNNING]
        for delivery in wanted:
            if delivery.place == RUNNING:
                del self.held[delivery.message.sequence]
            else:
                self._clear(delivery)
        for queue in (self.asked, *self._queues.values()):
            queue.clear()
        self._timers.clear()
        self._gates.clear()
        for key, line in list(self._lines.items()):
            line.waiting.clear()
            if line.running is None or running:
                del self._lines[key]
        return sorted(wanted, key=_sequence)

    def untried(self) -> list[Delivery]:
        """Forget what is ready and was never tried, and return it: what lies behind it in the stream may come."""
        waiting = list(self.ready)
        self.ready.clear()
        for delivery in waiting:
            self._clear(delivery)
        return waiting

    def retry_now(self, sequence: int, now: float) -> bool:
        """End the wait of a delivery that is to be tried again, and let it be decided on once more; return whether it
        did wait."""
        delivery = self.held.get(sequence)
        if delivery is None or not delivery.tried or delivery.at_once or delivery.place in (RUNNING, ASKED):
            return False
        if delivery is self._single:
            return False  # nobody else begins until it does
        delivery.due = 0.0
        if delivery.place != BEHIND:
            delivery.screened = not self._screens
            self._put(delivery, now)
        return True

    # What to do

    def close(self) -> None:
        """Let nothing begin any more: what comes is only held."""
        self.closed = self.special = True

    def gather(self, most: int) -> None:
        """Gather redeliveries and let nothing begin, until `most` have come, a new message has, or `release` is called.

        After a worker has died, the server redelivers its messages in the order in which their `ack_wait` ran out.
        """
        self.gathering, self.special = most, True

    def release(self) -> None:
        """Let begin what was gathered."""
        self.gathering = 0

    def isolate(self, alone: bool) -> None:
        """Let nothing begin but a notification that is to run alone, or everything again."""
        self.only_alone, self.special = alone, True

    def begin(self, now: float) -> Delivery | None:
        """Return a delivery that begins now; None where none may. It is to be asked until it returns None."""
        if self.special:
            return self._begin_special(now)
        if not self.ready or now >= self.trusted_until:
            return None
        delivery = self.ready.popleft()
        delivery.place = RUNNING
        delivery.waited = now - delivery.waiting_since
        self.waiting_bytes -= len(delivery.message.data)
        self.running += 1
        self.begun += 1
        if (line := delivery.line) is not None:
            del line.waiting[0]
            line.running = delivery
        return delivery

    def again_at(self, now: float) -> float:
        """Return when `begin` is to be asked again where nothing happens; infinity where never."""
        if self.closed or self.gathering or now >= self.trusted_until:
            return math.inf
        at = self._timers[0][0] if self._timers else math.inf
        if not self._pace.free:
            first, again = not self.only_alone and bool(self.ready), not self.only_alone and bool(self.again)
            if first or again or self._alone:
                at = min(at, self._pace.again_at(now, first=first, again=again or bool(self._alone)))
        return at

    def oldest(self) -> tuple[int, str] | None:
        """Return the sequence of the oldest that is held, and what it waits for, empty where it runs or begins in its
        turn; None where nothing is held."""
        if not self.held:
            return None
        sequence = min(self.held)
        return sequence, WAITS_FOR.get(self.held[sequence].place, "")

    def holds(self, delivery: Delivery) -> bool:
        """Return whether a delivery is held, and not another one of its sequence."""
        return self.held.get(delivery.message.sequence) is delivery

    def take_asked(self) -> Delivery | None:
        """Return the next delivery to decide on; None where there is none."""
        while self.asked and not self.gathering:
            delivery = self.asked.popleft()
            if delivery.place == ASKED:
                return delivery
        return None

    def may_begin(self) -> bool:
        """Return whether one is ready, whatever holds for all of them at once."""
        return bool(self.ready or self.again or self._at_once or self._alone)

    def waiting_at(self, limit: Limit, key: Hashable) -> int:
        """Return how many of a limit's key wait for it."""
        return len(self._gates.get((limit, key), ()))

    @property
    def at_gates(self) -> int:
        """How many wait for limits that have keys of their own, and stop nothing of other keys."""
        counts = [len(waiting) for (_, of), waiting in self._gates.items() if of]
        return sum(counts)

    def surplus(self, most: int) -> int:
        """Return how many wait behind others of their key, or with a head that cannot begin yet: all of such a key, and
        of any other key those beyond the first `most`."""
        count = 0
        for line in self._lines.values():
            stopped = line.waiting and line.running is None and line.waiting[0].place in (UNTIL, GATE)
            count += len(line.waiting) if stopped else max(0, len(line.waiting) - most)
        return count

    def behind(self, delivery: Delivery) -> list[Delivery]:
        """Return those that wait until a delivery, the first of its key, is done."""
        line = delivery.line
        if line is None or delivery is not (line.running or line.waiting[0]):
            return []
        return [*line.waiting][line.running is None :]

    # Places

    def _begin_special(self, now: float) -> Delivery | None:
        if self.closed or self.gathering or now >= self.trusted_until:
            return None
        while self._timers and self._timers[0][0] <= now:
            _, number, waited = heappop(self._timers)
            if waited.place == UNTIL and waited.timer == number:
                self._put(waited, now)
        while (delivery := self._next(now)) is not None:
            if not self._limits or self._admitted(delivery, now):
                if not self._pace.free:
                    self._pace.note_begin(now, self._pick(), again=delivery.tried)
                return self._run(delivery, now)
        waits = self._timers or self._limits or self.again or self.asked or self.only_alone
        waits = waits or self._at_once or self._alone
        again = self.running_again  # one of which may run alone: who waits for its end is told
        if not (waits or again) and self._pace.free:
            self.special = False
        return None

    def _next(self, now: float) -> Delivery | None:
        """Take the next one that is ready: the one that runs alone; else by turns of those that were tried before and
        those that were not, or as the pace says."""
        pace = self._pace
        if self._alone and (pace.free or pace.lets(now, first=False, again=True)[1]):
            return self._alone.popleft()
        if self.only_alone:
            return None
        if self._at_once:
            return self._at_once.popleft()
        first, again = bool(self.ready), bool(self.again)
        if not pace.free:
            first, again = pace.lets(now, first=first, again=again)
        if first and again:
            first = pace.prefers_first(self._pick()) if pace.is_shut else self._prefers_first()
        if not (first or again):
            return None
        self._turn = first
        queue = self.ready if first else self.again
        if pace.picks(again=not first) and (place := int(self._pick() * len(queue))):
            queue[0], queue[place] = queue[place], queue[0]
        return queue.popleft()

    def _prefers_first(self) -> bool:
        """Return whether a first try is to begin where a retry may, too: both get as much time."""
        return self._ahead > 0 or (self._ahead == 0 and not self._turn)

    def _share(self, delivery: Delivery, now: float) -> None:
        """Count the time that a call has taken, where retries may have to leave time for first tries."""
        if self.again and delivery.waited is not None:
            took = max(0.0, now - delivery.waiting_since - delivery.waited)
            self._ahead = max(-1.0, min(1.0, self._ahead + (took if delivery.tried else -took)))

    def _admitted(self, delivery: Delivery, now: float) -> bool:
        """Return whether all limits let a delivery begin, which has left its queue; else it waits for the first that
        does not."""
        for number, limit in enumerate(self._limits):
            if not limit.admits(delivery, now):
                for before in self._limits[:number]:
                    before.take_back(delivery)
                key = limit.gate(delivery)
                delivery.place, delivery.limit = GATE, limit
                if delivery is self._single:  # it is decided again when its limit lets it, and others have their turn
                    self._single, delivery.screened = None, not self._screens
                insort(self._gates.setdefault((limit, key), []), delivery, key=_sequence)
                limit.wait(key)
                return False
        return True

    def _run(self, delivery: Delivery, now: float) -> Delivery:
        """Let a delivery run that has left its queue."""
        delivery.place = RUNNING
        delivery.waited = now - delivery.waiting_since
        self.waiting_bytes -= len(delivery.message.data)
        self.running += 1
        self.begun += 1
        self.running_again += delivery.tried
        if delivery is self._single:
            self._single = None
        if (line := delivery.line) is not None:
            del line.waiting[0]
            line.running = delivery
        return delivery

    def _enter(self, delivery: Delivery, now: float) -> None:
        """Put one that waits from now on. It displaces the first of its key where it is an earlier one."""
        if self._key is not None:
            line = self._lines.get(key := self._key(delivery.message.subject))
            if line is None:
                line = self._lines[key] = _Line(key)
            delivery.line = line
            head = line.waiting[0] if line.waiting else None
            if head is None or delivery.message.sequence > line.waiting[-1].message.sequence:
                line.waiting.append(delivery)
            else:
                insort(line.waiting, delivery, key=_sequence)
                if line.waiting[0] is delivery and head.place != BEHIND:
                    head.screened = head.screened and head is not self._single  # it is decided again whether it is
                    self._move(head, BEHIND)  # wherever it is: also at a limit, or until it is tried again
        self._put(delivery, now)

    def _put(self, delivery: Delivery, now: float, *, first: bool = False) -> None:
        """Put a delivery where the rules say."""
        line = delivery.line
        if line is not None and (line.running is not None or line.waiting[0] is not delivery):
            self._move(delivery, BEHIND)
        elif delivery.due > now:
            self._move(delivery, UNTIL)
        elif not delivery.screened:
            self._move(delivery, ASKED)
        else:
            ready = AGAIN if delivery.tried else READY
            place = ALONE if delivery is self._single else AT_ONCE if delivery.at_once else ready
            self._move(delivery, place, first=first)

    def _move(self, delivery: Delivery, place: int, *, first: bool = False) -> None:
        """Change the place of a delivery. Nothing else does, but for one that begins or is given up."""
        was = delivery.place
        if was in self._queues:
            self._queues[was].remove(delivery)
        elif was == GATE:
            self._leave_gate(delivery)
        delivery.place = place
        # What is recorded before it begins is not taken at once; see `Flow.take_now`.
        self.special = self.special or place not in (GONE, BEHIND, READY) or delivery.begin is not None
        if (queue := self._queues.get(place)) is not None:
            if first:
                queue.appendleft(delivery)
            else:
                queue.append(delivery)
        elif place == ASKED:
            self.asked.append(delivery)
        elif place == UNTIL:
            self._timed += 1
            delivery.timer = self._timed
            heappush(self._timers, (delivery.due, self._timed, delivery))

    def _leave_gate(self, delivery: Delivery) -> None:
        gate = delivery.limit, delivery.limit.gate(delivery)
        waiting = self._gates[gate]
        del waiting[bisect_left(waiting, delivery.message.sequence, key=_sequence)]
        if not waiting:
            del self._gates[gate]
        delivery.limit = None

    def _stop(self, delivery: Delivery, now: float) -> _Line | None:
        """Note that a delivery runs no more, and return the line of its key."""
        delivery.place = GONE
        self._share(delivery, now)
        self.running -= 1
        self.running_again -= delivery.tried
        for limit in self._limits:
            limit.release(delivery)
        line: _Line | None = delivery.line
        if line is not None:
            line.running = None
        return line

    def _forget(self, delivery: Delivery, now: float) -> None:
        """Forget a delivery that is not ours any more. One that runs keeps its key until its call has ended."""
        if delivery.place == RUNNING:
            del self.held[delivery.message.sequence]
            return
        self._move(delivery, GONE)
        self._clear(delivery)
        if (line := delivery.line) is not None:
            line.waiting.remove(delivery)
            self._next_of(line, now)

    def _clear(self, delivery: Delivery) -> None:
        """Note that a delivery, which has left its queue and does not run, is not held any more."""
        delivery.place = GONE
        del self.held[delivery.message.sequence]
        self.waiting_bytes -= len(delivery.message.data)

    def _next_of(self, line: _Line, now: float) -> None:
        if line.running is not None:
            return
        if line.waiting:
            if line.waiting[0].place == BEHIND:
                self._put(line.waiting[0], now)
        elif self._lines.get(line.key) is line:
            del self._lines[line.key]


def _sequence(delivery: Delivery) -> int:
    return delivery.message.sequence
