"""One worker of one agent and its server, in virtual time.

What begins, what is held and how fast is said by the engine itself (`flow`, `dispatch`, `pace`, `outages`). The worker
around it does in few lines what `acknowledging.Settler`, `handlers` and `redeliveries` do; the server is a model: what
is due again comes before what is new, and a nak has a delay. A call takes as long as the case says.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush

from msgspec import Struct

from aviso_workers.backends import Message, Noted
from aviso_workers.declare.dependencies import Dependency
from aviso_workers.declare.retry import RetryPolicy, RetryShare
from aviso_workers.engine.acknowledging import (
    AWAY,
    FAILURE_COSTS,
    FAILURE_SECONDS,
    SOON,
    UNTRIED,
    UNTRIED_LEAST_SECONDS,
)
from aviso_workers.engine.flow import MAX_PREFETCH, Flow, Isolation
from aviso_workers.engine.outages import Outage
from aviso_workers.events import Events
from aviso_workers.features.windows import CHECK_SECONDS
from aviso_workers.sessions.agent_subscriptions import ORDERED_PREFETCH

KEYS = 100
POLICY = RetryPolicy()
ERROR = ConnectionError("away")

Fails = Callable[[int, int, float], bool]
"""Says of a sequence, its key and a time whether a call fails then. A case says whether that is `away` or `wrong`."""


class Setting(Struct, frozen=True, kw_only=True):
    """An agent and what comes for it."""

    form: str = "plain"
    """`plain`, `order_by`, `batch`, `singleton`, or `window`."""
    concurrency: int = 8
    paced: bool = True
    count: int = 3000
    """How many notifications there are, or windows."""
    rate: float = math.inf
    """How many of them come in a second; infinity where all of them wait at the beginning."""
    call_seconds: float = 0.02
    batch_size: int = 10
    batch_seconds: float = 0.1
    fails_by_call: bool = False
    """Whether a batch fails where its first notification does, and not where any does."""
    until: float = 1500.0
    enough: float = math.inf
    """It ends when so many have succeeded."""
    seed: int = 1


class Result(Struct):
    """What happened, in seconds since the beginning."""

    successes: list[float]
    """When each notification was handled."""
    calls: list[float]
    """When each call began."""
    attempts: dict[int, int]
    """How many failed calls have used an attempt, by sequence."""
    dead: dict[int, float]
    """When each dead letter was stored, by sequence."""


class Clock:
    """A clock that jumps from one thing to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._cancelled: set[int] = set()

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        self._number += 1
        heappush(self._calls, (max(when, self.now), self._number, callback))
        return Timer(self, when, self._number)

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError("nothing waits here")

    def cancel(self, number: int) -> None:
        self._cancelled.add(number)

    def run_next(self, until: float) -> bool:
        """Do what is due next, and return whether there was something until that time."""
        while self._calls and self._calls[0][0] <= until:
            self.now, number, callback = heappop(self._calls)
            if number not in self._cancelled:
                callback()
                return True
            self._cancelled.discard(number)
        return False


class Timer:
    def __init__(self, clock: Clock, when: float, number: int) -> None:
        self._clock, self._when, self._number = clock, when, number

    def when(self) -> float:
        return self._when

    def cancel(self) -> None:
        self._clock.cancel(self._number)


class Known(Struct):
    """What is known of a notification that has failed."""

    failures: int = 0
    waits: int = 0
    succeeded: int = 0
    """How many had succeeded when it was tried last."""


class Held(Noted, kw_only=True, eq=False):
    message: Message
    num_delivered: int
    num_pending: int
    can_be_read_again: bool = True
    held: bool = True

    def ack(self) -> None: ...
    def nak(self, *, delay_seconds: float = 0.0) -> None: ...
    def redeliver(self) -> None: ...
    def term(self, reason: str) -> None: ...
    def in_progress(self) -> None: ...


class Handler(Struct, eq=False):
    """One of the concurrent calls of the agent: what it collects, or what runs."""

    taken: list[Held] = []
    runs: bool = False


class Simulation:
    def __init__(self, setting: Setting, fails: Fails, *, away: bool, counts: bool = True) -> None:
        """Where a call fails that is not `away`, it is wrong; and it is undecodable where it says nothing of what the
        agent depends on (`counts`)."""
        random.seed(setting.seed)
        self._setting, self._fails, self._away, self._counts = setting, fails, away, counts
        self._clock = Clock()
        self._outage = Outage(Dependency("target"), declared=False, clock=self._clock, events=Events())
        form, calls = setting.form, setting.concurrency
        self._ordered, self._stays = form == "order_by", form in ("order_by", "singleton")
        self._size = setting.batch_size if form == "batch" else 1
        self._flow = Flow(
            self._clock,
            workers=calls,
            least=max(ORDERED_PREFETCH, calls) if self._ordered else calls * self._size,
            most=1 if form == "singleton" else MAX_PREFETCH,
            key=_key_of if self._ordered else None,
            isolation=Isolation(self._clock),
            pace=self._outage.pace if setting.paced else None,
        )
        self._flow._turn_ends = math.inf  # nobody else has a turn
        self._outage.join("agent", self._flow, most=calls, on_open=self._call_back)
        self._arrived = setting.count if setting.rate == math.inf else 0
        self._delivered = [0] * setting.count
        self._new = 0
        self._due: deque[int] = deque()
        self._known: dict[int, Known] = {}
        self._untried: list[tuple[float, int, Timer]] = []
        self._share = RetryShare()
        self._failed_at = 0.0
        self._finished = self._successes = 0
        self._handlers = [Handler() for _ in range(calls)]
        self._alarm: Timer | None = None
        self.result = Result([], [], {}, {})

    def run(self) -> Result:
        setting, clock = self._setting, self._clock
        if setting.rate != math.inf:
            for number in range(setting.count):
                clock.call_at(number / setting.rate, self._arrive)
        self._work()
        while len(self.result.successes) < setting.enough and self._is_busy() and clock.run_next(setting.until):
            self._work()
        return self.result

    def _is_busy(self) -> bool:
        return len(self.result.successes) + len(self.result.dead) < self._setting.count

    # The server

    def _arrive(self) -> None:
        self._arrived += 1

    def _nak(self, sequence: int, delay: float) -> Timer:
        return self._clock.call_at(self._clock.now + delay, partial(self._due.append, sequence))

    def _deliver(self) -> bool:
        """Deliver as much as the worker asks for, and return whether something was."""
        wanted = self._flow.capacity() if self._due or self._new < self._arrived else 0
        sequences: list[int] = []
        while len(sequences) < wanted and (self._due or self._new < self._arrived):
            if self._due:
                sequence = self._due.popleft()
            else:
                sequence, self._new = self._new, self._new + 1
            self._delivered[sequence] += 1
            sequences.append(sequence)
        pending = self._arrived - self._new
        self._flow.put_all([self._delivery(sequence, pending) for sequence in sequences])
        return bool(sequences)

    def _delivery(self, sequence: int, pending: int) -> Held:
        message = Message(subject=str(_key(sequence)), data=b"{}", sequence=sequence)
        return Held(message=message, num_delivered=self._delivered[sequence], num_pending=pending)

    # The worker

    def _work(self) -> None:
        """Begin all that may begin now, and be woken when more may."""
        while True:
            came = self._deliver()
            self._decide()
            if not (self._take() or came):
                break
        all_run = all(handler.runs for handler in self._handlers)
        at = math.inf if all_run else self._flow.dispatch.again_at(self._clock.now)
        if self._alarm is not None and self._alarm.when() != at:
            self._alarm.cancel()
            self._alarm = None
        if self._alarm is None and at != math.inf:
            self._alarm = self._clock.call_at(at, self._ring)

    def _ring(self) -> None:
        self._alarm = None

    def _take(self) -> bool:
        """Give to idle handlers what may begin, and return whether anything may."""
        took = False
        for handler in self._handlers:
            while not handler.runs and (delivery := self._flow.take_now()) is not None:
                took = True
                if not handler.taken:
                    handler.taken = []
                    if self._size > 1:
                        deadline = self._clock.now + self._setting.batch_seconds
                        self._clock.call_at(deadline, partial(self._begin, handler, handler.taken))
                handler.taken.append(delivery)  # type: ignore[arg-type]
                if len(handler.taken) == self._size:
                    self._begin(handler, handler.taken)
        return took

    def _begin(self, handler: Handler, taken: list[Held]) -> None:
        if handler.runs or handler.taken is not taken:
            return
        handler.runs = True
        now = self._clock.now
        self.result.calls.append(now)
        self._clock.call_at(now + self._setting.call_seconds, partial(self._end, handler, now))

    def _end(self, handler: Handler, started: float) -> None:
        handler.runs, taken, handler.taken = False, handler.taken, []
        sequences = [each.message.sequence for each in (taken[:1] if self._setting.fails_by_call else taken)]
        failed = any(self._fails(each, _key(each), self._clock.now) for each in sequences)
        for number, delivery in enumerate(taken):
            if failed:
                self._settle_failed(delivery, started=started, told=number > 0)
            else:
                self._flow.finish(delivery)
                self._successes += 1
                self.result.successes.append(self._clock.now)
                if self._outage.strained:
                    self._outage.succeeded()

    def _settle_failed(self, delivery: Held, *, started: float, told: bool) -> None:
        """Do as `Settler.settle` does with a failure."""
        sequence, now = delivery.message.sequence, self._clock.now
        known = self._known.setdefault(sequence, Known())
        if self._counts and not told:
            self._outage.failed(ERROR, again=delivery.tried, away=self._away)
        if self._away:
            grows = not known.waits or self._successes > known.succeeded or not self._setting.paced
            known.waits += grows
            known.succeeded = self._successes
            self._give_back(delivery, AWAY.delay_seconds(known.waits))
        else:
            known.failures += 1
            self.result.attempts[sequence] = known.failures
            if not self._counts or POLICY.is_last(known.failures):
                self.result.dead[sequence] = now
                self._flow.finish(delivery)
            else:
                self._give_back(delivery, self._later(delivery, POLICY.delay_seconds(known.failures), now - started))
        if self._outage.pace.is_shut and not self._stays and self._setting.paced:
            for each in self._flow.dispatch.untried():
                delay = UNTRIED.delay_seconds(1)
                left = each.message.sequence
                self._untried.append((now + delay, left, self._nak(left, delay)))

    def _give_back(self, delivery: Held, delay: float) -> None:
        delivery.record = self._known[delivery.message.sequence]
        if self._ordered:
            self._flow.retry_later(delivery, after_seconds=delay)
        else:
            self._nak(delivery.message.sequence, delay)
            self._flow.finish(delivery)

    def _later(self, delivery: Held, after_seconds: float, took_seconds: float) -> float:
        """Do as `Settler._again_in_seconds` does."""
        now, finished = self._clock.now, self._flow.finished
        share = FAILURE_COSTS / (FAILURE_COSTS + finished - self._finished)
        most = max(took_seconds / self._setting.concurrency, FAILURE_SECONDS)
        takes = min((now - self._failed_at) * share, most)
        self._failed_at, self._finished = now, finished
        if delivery.num_delivered > 1:
            self._share.spend(now, takes)
        return self._share.delay_seconds(now, after_seconds, takes_seconds=takes, new_wait=delivery.num_pending > 0)

    def _decide(self) -> None:
        """Do as `redeliveries` and `Settler.postpone` do with what came again."""
        while (delivery := self._flow.dispatch.take_asked()) is not None:
            sequence, now = delivery.message.sequence, self._clock.now
            later, is_many = 0.0, False
            if not self._ordered and delivery.num_pending and sequence in self._known:
                later = self._share.later_seconds(now)
                if is_many := later <= 0 and self._flow.has_many_retries:
                    later = (UNTRIED if self._outage.pace.is_shut else SOON).delay_seconds(1)
            if later > 0:
                timer = self._nak(sequence, later)
                if is_many:
                    self._untried.append((now + later, sequence, timer))
                self._flow.finish(delivery)
            else:
                self._flow.admit(delivery, tried=sequence in self._known)

    def _call_back(self) -> None:
        """Do as `Settler.call_back` does."""
        for due, sequence, timer in self._untried:
            if due - self._clock.now > UNTRIED_LEAST_SECONDS:
                timer.cancel()
                self._nak(sequence, 0.0)
        self._untried.clear()


class Windows(Simulation):
    """The function of windows that are due, as `features.windows` runs it: one after another, once a second all."""

    def run(self) -> Result:
        setting, clock, outage, result = self._setting, self._clock, self._outage, self.result
        again_at: dict[int, float] = {}
        open_ones = set(range(setting.count))
        while open_ones and clock.now < setting.until and len(result.successes) < setting.enough:
            due = [each for each in sorted(open_ones) if each <= clock.now * setting.rate or setting.rate == math.inf]
            if not outage.pace.free:
                random.shuffle(due)
            for window in due:
                if again_at.get(window, -math.inf) > clock.now:
                    continue
                if setting.paced and not outage.begins(again=window in again_at):
                    continue
                result.calls.append(clock.now)
                clock.now += setting.call_seconds
                if not self._fails(window, _key(window), clock.now):
                    open_ones.discard(window)
                    result.successes.append(clock.now)
                    outage.succeeded()
                elif (delay := self._fail_window(window, again=window in again_at)) is None:
                    open_ones.discard(window)
                else:
                    again_at[window] = clock.now + delay
            clock.now += CHECK_SECONDS
        return result

    def _fail_window(self, window: int, *, again: bool) -> float | None:
        """Return after how long the function is run for a window again; None where it became a dead letter."""
        self._outage.failed(ERROR, again=again, away=self._away)
        if self._away:
            return AWAY.delay_seconds(1)
        failures = self.result.attempts[window] = self.result.attempts.get(window, 0) + 1
        if POLICY.is_last(failures):
            self.result.dead[window] = self._clock.now
            return None
        return POLICY.delay_seconds(failures)


def simulate(setting: Setting, fails: Fails, *, away: bool, counts: bool = True) -> Result:
    """Return what becomes of the notifications of an agent."""
    kind = Windows if setting.form == "window" else Simulation
    return kind(setting, fails, away=away, counts=counts).run()


def _key(sequence: int) -> int:
    return sequence * 7919 % KEYS


def _key_of(subject: str) -> str:
    return subject
