"""Every state of a small world: three notifications of two ordering keys, and each order of events that budgets allow.

A `World` is the machine that says what begins next (`engine.dispatch`) with its `Pace`, the server as it sees the three
notifications, and what their worker does between the two: it begins all that may, decides on redeliveries, and gives
back. `explore` plays each event in each state, beginning with the fewest events, and checks the invariants, which have
names. A violation is reported with the shortest sequence of events that leads there.

All times are whole numbers and nothing is random but `chance`, so that the number of states is finite. A state is kept
as bytes of `pickle`, which copy all that the machine has; `World.key` says which states are the same.
"""

from __future__ import annotations

import gc
import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

from aviso_workers.backends import Message
from aviso_workers.engine import dispatch as places
from aviso_workers.engine import pace
from aviso_workers.engine.dispatch import Dispatch, _Line
from aviso_workers.engine.pace import Pace
from tests.deliveries import UnsettledDelivery

KEYS = {1: "a", 2: "b", 3: "a"}
"""The notifications by sequence, each with its subject, which is its ordering key."""
COLLECTED_EVERY = 20_000
MOST_STATES = 500_000
AT_SERVER, HELD, SETTLED, GIVEN_BACK = "at the server", "held", "settled", "given back"
FAULTS = (
    "fail",
    "outage",
    "retry after",
    "retry now",
    "trip",
    "distrust",
    "gather",
    "drain",
    "abandon",
    "again",
    "recreate",
    "lose",
    "start",
    "alone",
    "postpone",
)
"""What may go wrong; a world says how often. `again` is always possible then, as nothing changes with it."""
DISPATCH_STATE = """
held ready again asked begun running running_again waiting_bytes trusted_until gathering closed only_alone special
_at_once _single _ahead _pace _limits _screens _pick _key _lines _gates _alone _queues _timers _timed _turn
"""
PACE_STATE = "free away credit retries closed_until most _window _interval _next _running _tell"
"""The attributes of the machine that `World.key` knows of. What is added to the machine is to be added there, or states
that are not the same are taken for one."""
MESSAGES = {
    (sequence, stamp): Message(subject=subject, data=b"x" * sequence, sequence=sequence, timestamp_ns=stamp)
    for sequence, subject in KEYS.items()
    for stamp in (0, 1)
}


Name = tuple[int, int]
"""The sequence of a notification, and 1 where its stream was recreated."""


class Held(UnsettledDelivery):
    """A delivery of a notification."""

    def __init__(self, name: Name, num_delivered: int) -> None:
        self.sequence, self.num_delivered, self.name = name[0], num_delivered, name
        self.message = MESSAGES[self.name]
        self.begin = self.record = self.line = self.limit = None


def _twin(of: Any, **other: Any) -> Any:
    """Return a shallow copy with other values of these attributes."""
    twin = object.__new__(type(of))
    twin.__dict__.update(of.__dict__, **other)
    return twin


class FewPlaces:
    """A limit as those of `features.limits` are: it asks for places where something waits, and opens its gates then."""

    def __init__(self, world: World, *, by_key: bool, returned: bool) -> None:
        """With `returned` a place is free again after its call, as of a limit of calls at once; else it is used up."""
        self._world, self._by_key, self._returned = world, by_key, returned
        self.name = "a place" if returned else "a call"
        self.given: Counter[str] = Counter()
        """How many places this worker has, by key. It gets one at a time."""
        self.users: list[Held] = []
        self.asked: set[str] = set()

    def gate(self, delivery: Any) -> str:
        return KEYS[delivery.sequence] if self._by_key else "all"

    def free(self, key: str) -> int:
        return self.given[key] - (sum(self.gate(each) == key for each in self.users) if self._returned else 0)

    def admits(self, delivery: Any, now: float) -> bool:
        key = self.gate(delivery)
        if not self.free(key):
            return False
        self.users.append(delivery)
        self.given[key] -= not self._returned
        return True

    def release(self, delivery: Any) -> None:
        if delivery in self.users:
            self.users.remove(delivery)
            self.open(self.gate(delivery))

    def take_back(self, delivery: Any) -> None:
        self.given[self.gate(delivery)] += not self._returned
        self.release(delivery)

    def wait(self, key: str) -> None:
        self.asked.add(key)

    def served(self) -> list[str]:
        """Return the keys for which there is a place, or one can be had."""
        return sorted(key for key in self.asked if self.free(key) or self.given[key] < 1)

    def open(self, key: str) -> None:
        dispatch = self._world.dispatch
        dispatch.open(self, key, self.free(key), self._world.now)
        if not dispatch.waiting_at(self, key):
            self.asked.discard(key)


class Spec(NamedTuple):
    """What there is in a world, and how often what goes wrong in it."""

    faults: dict[str, int]
    ordered: bool = True
    screens: bool = False
    paced: bool = False
    slot: bool = False
    """Whether one call runs at once, in all."""
    rate: bool = False
    """Whether the calls of each key have a rate."""
    notifications: int = 3
    handlers: int = 2
    redelivered: bool = False
    """Whether another worker had all of them before."""
    dispatch: type[Dispatch] = Dispatch
    pace: type[Pace] = Pace


class Event(NamedTuple):
    name: str
    of: Any = None
    """The sequence of a notification, the name of a delivery, or the key of a limit."""
    benign: bool = True
    """Whether it happens by itself sooner or later. Nothing has to go wrong for what waits to begin."""
    chance: float = 0.0

    def __str__(self) -> str:
        match self.of:
            case (int(sequence), 0):
                return f"{self.name} {sequence}"
            case (int(sequence), int()):
                return f"{self.name} the new {sequence}"
            case None:
                return self.name
        return f"{self.name} {self.of}"


class BrokenError(Exception):
    """An invariant does not hold."""


class World:
    def __init__(self, spec: Spec) -> None:
        self.ordered, self.screens, self.handlers = spec.ordered, spec.screens, spec.handlers
        self.sequences = list(KEYS)[: spec.notifications]
        self.server = dict.fromkeys(self.sequences, AT_SERVER)
        self.stamps = dict.fromkeys(self.sequences, 0)
        self.delivered = dict.fromkeys(self.sequences, int(spec.redelivered))
        """How often, at most twice."""
        self.tried = dict[int, bool | None](dict.fromkeys(self.sequences))
        """Whether it is known that one has failed."""
        self.faults = {fault: spec.faults.get(fault, 0) for fault in FAULTS}
        self.calls: list[Held] = []
        self.deciding: list[Held] = []
        """What was put to whoever decides on redeliveries."""
        self.alone: Held | None = None
        """What is to run alone, and is `admitted` when nothing else runs; `isolated` until it has for ten seconds."""
        self.suspected: Held | None = None
        """What is to run alone until it has begun, also where an earlier one of its key came between."""
        self.wanted: set[int] = set()
        """The sequences of those that a person wants to be tried now."""
        self.isolated = self.admitted = self.away = self.drains = self.stopped = self.ended = False
        self.granted = False
        """Whether a limit has just opened its gates."""
        self.now = self.chance = 0.0
        self.limits: list[FewPlaces] = []
        if spec.slot:
            self.limits.append(FewPlaces(self, by_key=False, returned=True))
        if spec.rate:
            self.limits.append(FewPlaces(self, by_key=True, returned=False))
        self.pace = spec.pace(running=self.running, tell=self.tell) if spec.paced else None
        if self.pace is not None:
            self.pace.most += spec.handlers
        self.dispatch: Any = spec.dispatch(
            key=key_of if spec.ordered else None,
            limits=tuple(self.limits),
            pace=self.pace,
            screens=spec.screens,
            pick=self.pick,
        )

    def copy(self) -> World:
        """Return a world in the same state that has nothing in common with this one."""
        old = self.dispatch
        world: World = _twin(self)
        world.limits = [
            _twin(limit, _world=world, given=limit.given.copy(), asked={*limit.asked}) for limit in self.limits
        ]
        twins: dict[Any, Any] = dict(zip(self.limits, world.limits, strict=True))

        def of(each: Any) -> Any:
            if each is None or (twin := twins.get(each)) is not None:
                return each and twins[each]
            if isinstance(each, _Line):
                twin = twins[each] = _Line(each.key)
                twin.waiting, twin.running = all_of(each.waiting), of(each.running)
            else:
                twin = twins[each] = _twin(each)
                twin.line, twin.limit = of(each.line), each.limit and twins[each.limit]
            return twin

        def all_of(some: Any) -> Any:
            return type(some)(map(of, some)) if some else type(some)()

        world.pace = self.pace and _twin(self.pace, _running=world.running, _tell=world.tell)
        world.dispatch = _twin(
            old,
            held={sequence: of(each) for sequence, each in old.held.items()},
            **{name: all_of(getattr(old, name)) for name in ("ready", "again", "asked", "_at_once", "_alone")},
            _lines={key: of(line) for key, line in old._lines.items()},
            _gates={(twins[limit], key): all_of(gate) for (limit, key), gate in old._gates.items()},
            _timers=[(due, number, of(each)) for due, number, each in old._timers],
            _single=of(old._single),
            _limits=tuple(world.limits),
            _pace=world.pace or old._pace,
            _pick=world.pick,
        )
        new = world.dispatch
        new._queues = dict(zip(old._queues, (new.ready, new.again, new._at_once, new._alone), strict=True))
        world.calls, world.deciding, world.alone = all_of(self.calls), all_of(self.deciding), of(self.alone)
        world.suspected = of(self.suspected)
        for limit, twin in zip(self.limits, world.limits, strict=True):
            twin.users = all_of(limit.users)
        world.server, world.stamps, world.delivered, world.tried, world.faults = (
            {**each} for each in (self.server, self.stamps, self.delivered, self.tried, self.faults)
        )
        world.wanted = {*self.wanted}
        return world

    def pick(self) -> float:
        return self.chance

    def running(self) -> tuple[int, int]:
        again = self.dispatch.running_again
        return self.dispatch.running - again, again

    def tell(self) -> None:
        self.dispatch.special = True

    def key(self) -> Hashable:
        """Return what tells this state from others; times are relative."""
        dispatch, now, pace = self.dispatch, self.now, self.pace

        def left(time: float) -> float:
            return max(0.0, time - now)

        def note(each: Any) -> tuple[Any, ...]:
            how = each.num_delivered > 1, each.tried, each.screened, each.begin, each.record, each.at_once
            return (*each.name, each.place, left(each.due), how, each.waited and min(1.0, now - each.waiting_since))

        def names(some: Iterable[Any]) -> Hashable:
            return tuple([each and each.name for each in some])

        timers = [
            (left(due), each.place == places.UNTIL and each.timer == number and each.name)
            for due, number, each in sorted(dispatch._timers)
        ]
        lines = [(key, names(line.waiting), names([line.running])) for key, line in sorted(dispatch._lines.items())]
        limits = [(tuple((+each.given).items()), names(each.users), tuple(sorted(each.asked))) for each in self.limits]
        return (
            tuple(sorted(map(note, dispatch.held.values()))),
            tuple(map(note, self.calls)),
            names([dispatch._single, self.alone, self.suspected]),
            *map(names, (self.deciding, dispatch.ready, dispatch.again, dispatch.asked)),
            *map(names, (dispatch._at_once, dispatch._alone)),
            tuple(sorted(self.wanted)),
            tuple(timers),
            tuple(lines),
            tuple([(key, names(gate)) for (_, key), gate in dispatch._gates.items()]),
            tuple(limits),
            (dispatch.running, dispatch.running_again, dispatch.waiting_bytes, left(dispatch.trusted_until)),
            (
                dispatch.gathering,
                dispatch.closed,
                dispatch.only_alone,
                dispatch.special,
                dispatch._turn,
                dispatch._ahead,
            ),
            pace and (pace.free, pace.away, pace.credit, pace.retries, pace._window, pace._interval, left(pace._next)),
            pace and (left(pace.closed_until), pace.closed_until == -math.inf),
            *(tuple(each.values()) for each in (self.server, self.stamps, self.delivered, self.tried, self.faults)),
            (self.isolated, self.admitted, self.away, self.drains, self.stopped, self.ended),
        )

    # Events

    def events(self) -> Iterator[Event]:
        """Yield what may happen now."""
        for name, benign, happens_to in self.possible():
            if benign or name not in self.faults or self.faults[name]:
                for of in happens_to:
                    yield Event(name, of, benign)

    def possible(self) -> Iterator[tuple[str, bool, Iterable[Any]]]:
        """Yield the names of events, whether they are benign, and what each may happen to now; None where to all."""
        dispatch, pace, calls = self.dispatch, self.pace, [each.name for each in self.calls]
        held = [sequence for sequence, where in self.server.items() if where == HELD and not self.stopped]
        to_decide = [each for each in self.deciding if each is not self.suspected]
        asked = [each.name for each in to_decide if each.place == places.ASKED]
        trusted = dispatch.trusted_until > self.now

        yield "receive", True, [each for each, where in self.server.items() if where == AT_SERVER and not self.stopped]
        yield "again", False, held
        yield "recreate", False, held
        yield "succeed", True, [] if self.away else calls
        yield "fail", False, calls
        yield "fail as away", False, calls if self.away else []
        yield "lose", False, [each.name for each in (self.limits[0].users if self.limits else ())]
        yield "admit", True, [each.name for each in to_decide]
        yield "start", False, asked
        yield "postpone", False, asked
        yield "alone", False, [] if self.suspected else asked
        yield "run alone", True, [each.name for each in self.deciding if each is self.suspected]
        yield "ten seconds alone", True, once(self.isolated)
        yield "retry now", False, [sequence for sequence, each in dispatch.held.items() if self.waits(each)]
        yield "grant", True, [(each.name, key) for each in self.limits for key in each.served()]
        yield "outage", False, once(not self.away)
        yield "end of outage", True, once(self.away)
        yield "retry after", False, once(pace is not None and self.calls)
        yield "trip", False, once(pace is not None)
        yield "distrust", False, once(trusted)
        yield "trust", True, once(not trusted)
        yield "gather", False, once(not self.drains)
        yield "release", True, once(dispatch.gathering)
        yield "drain", False, once(not self.drains)
        yield "stop reading", True, once(self.drains and not self.stopped)
        yield "abandon", False, once(self.stopped and not self.ended)
        yield "end", True, once(self.stopped and not self.ended and not self.calls)
        yield "tick", True, once(self.now < dispatch.again_at(self.now) < math.inf)

    def waits(self, delivery: Held) -> bool:
        """Return whether a person may have a delivery tried again now."""
        has_turn = delivery.at_once or delivery.place in (places.RUNNING, places.ASKED)
        return delivery.tried and not has_turn and delivery is not self.dispatch._single

    def play(self, event: Event) -> None:
        """Let something happen, then do what the worker does after each event, and check the invariants."""
        self.chance, self.granted = event.chance, event.name == "grant"
        if event.name in self.faults and event.name != "again":
            self.faults[event.name] -= 1
        getattr(self, "on_" + event.name.replace(" ", "_"))(*([] if event.of is None else [event.of]))
        self.begin_all()
        if self.alone is not None and self.alone.place == places.GATE:
            self.begin_all()
        while (asked := self.dispatch.take_asked()) is not None:
            self.deciding.append(asked)
        if self.suspected is not None and not self.dispatch.holds(self.suspected):
            self.suspected = None
        known = [each for each in dict.fromkeys(self.deciding) if each is not self.alone]
        self.deciding = sorted(filter(self.dispatch.holds, known), key=lambda each: each.name)

    def check(self) -> None:
        for name, holds in ALWAYS.items():
            if not holds(self):
                raise BrokenError(name)

    def begin_all(self) -> None:
        self.look_at_alone()
        dispatch = self.dispatch
        while len(self.calls) < self.handlers:
            is_plain, copy = not dispatch.special, None
            if is_plain:
                copy = self.begins_specially()
            pace = self.pace
            before = None if pace is None else (pace.is_shut, pace.retries, pace._next, pace.closed_until)
            delivery: Any = dispatch.begin(self.now)
            if is_plain and copy != nameof(delivery):
                raise BrokenError("what begins by the short way begins by the long way")
            if is_plain and delivery is not None and delivery.begin is not None:
                raise BrokenError("what is recorded before it begins does not begin by the short way")
            if delivery is None:
                if self.now >= dispatch.again_at(self.now):
                    raise BrokenError("the time to ask again is a later one, where nothing begins now")
                break
            for name, holds in AT_BEGIN.items():
                if not holds(self, delivery):
                    raise BrokenError(name)
            if before is not None and not begins_at_pace(delivery, self.now, *before):
                raise BrokenError("none begins faster than the pace says")
            self.note_call(delivery)

    def note_call(self, delivery: Held) -> None:
        if delivery is self.suspected:
            self.suspected = None
        self.calls = sorted([*self.calls, delivery], key=lambda each: each.name)  # there are fewer states then

    def begins_specially(self) -> Name | None:
        """Return what a copy begins that asks all that may have to be asked."""
        copy = self.copy()
        copy.dispatch.special = True
        return nameof(copy.dispatch.begin(self.now))

    def look_at_alone(self) -> None:
        """Do as `Isolation` does: let nothing else begin, and the one that runs alone when nothing else runs."""
        alone = self.alone
        if alone is None:
            return
        if alone.place == places.ASKED and not self.admitted:
            if self.isolated and self.dispatch.running:
                return
            alone.begin, self.admitted = BEGINS, True
            self.dispatch.decided(alone, self.now, tried=True, alone=True)
        elif alone.place in (places.BEHIND, places.GATE, places.UNTIL, places.GONE) or not self.dispatch.holds(alone):
            self.alone = None
            self.on_ten_seconds_alone()

    def settle(self, delivery: Held, where: str) -> None:
        """Settle or give back a delivery that is held."""
        gives_back = self.ordered and where in (AT_SERVER, GIVEN_BACK)
        if gives_back and any(is_earlier(each, delivery) for each in self.calls):
            raise BrokenError("nothing is given back while an earlier one of its key runs here")
        self.server[delivery.sequence] = GIVEN_BACK if self.stopped and where == AT_SERVER else where

    def on_receive(self, sequence: int) -> None:
        if self.screens:  # else it does not matter how often it is delivered
            self.delivered[sequence] = min(2, self.delivered[sequence] + 1)
        self.server[sequence] = HELD
        delivery: Any = Held((sequence, self.stamps[sequence]), self.delivered[sequence])
        self.dispatch.received_all([delivery], self.now)

    def on_again(self, sequence: int) -> None:
        held, again = dict(self.dispatch.held), Held((sequence, self.stamps[sequence]), 2)
        if self.dispatch.received(again, self.now) or held != self.dispatch.held:
            raise BrokenError("what is held already is not held twice")

    def on_recreate(self, sequence: int) -> None:
        self.stamps[sequence] = 1
        self.delivered[sequence], self.tried[sequence] = 0, None
        self.on_receive(sequence)

    def on_succeed(self, name: Name) -> None:
        delivery: Any = taken(self.calls, name)
        if self.dispatch.holds(delivery):
            self.settle(delivery, SETTLED)
        # A flow does not ask for the time where nothing is special.
        self.dispatch.ended(delivery, self.now if self.dispatch.special else 0.0)
        if self.pace is not None:
            self.pace.succeeded()
            if self.pace.is_shut:
                raise BrokenError("a success opens the pace")

    def on_fail(self, name: Name, *, away: bool = False) -> None:
        delivery: Any = taken(self.calls, name)
        if self.pace is not None:
            self.pace.failed(self.now, again=delivery.tried, away=away)
        held = self.dispatch.holds(delivery)
        if held:
            self.tried[delivery.sequence] = delivery.record = self.screens or None
        if self.ordered:
            self.dispatch.wait(delivery, self.now, until=self.now + 1)
            return
        if held:
            self.settle(delivery, AT_SERVER)
        self.dispatch.ended(delivery, self.now)
        if away and self.pace is not None and self.pace.is_shut:
            for each in self.dispatch.untried():
                self.settle(each, AT_SERVER)

    def on_fail_as_away(self, name: Name) -> None:
        self.on_fail(name, away=True)

    def on_lose(self, name: Name) -> None:
        """Lose the place of a call, which is cancelled."""
        limit = self.limits[0]
        delivery = taken(limit.users, name)
        limit.given[limit.gate(delivery)] -= 1
        self.on_fail(name)

    def on_admit(self, name: Name) -> None:
        delivery: Any = taken(self.deciding, name)
        tried = self.tried[delivery.sequence]
        if delivery.place == places.ASKED and delivery is not self.alone:
            delivery.record, delivery.begin = tried, None if tried else BEGINS
        self.dispatch.decided(delivery, self.now, tried=bool(tried), at_once=delivery.sequence in self.wanted)
        self.wanted.discard(delivery.sequence)

    def on_start(self, name: Name) -> None:
        delivery: Any = taken(self.deciding, name)
        if not self.dispatch.start(delivery):
            raise BrokenError("what is to be decided on can be settled without its handler")
        for rule in ("at most one of a key runs", "none begins before an earlier one of its key"):
            if not AT_BEGIN[rule](self, delivery):
                raise BrokenError(rule)
        self.note_call(delivery)

    def on_alone(self, name: Name) -> None:
        self.suspected = next(each for each in self.deciding if each.name == name)
        self.on_run_alone(name)

    def on_run_alone(self, name: Name) -> None:
        self.alone, self.isolated, self.admitted = taken(self.deciding, name), True, False
        self.dispatch.isolate(True)

    def on_ten_seconds_alone(self) -> None:
        self.isolated = False
        self.dispatch.isolate(False)

    def on_postpone(self, name: Name) -> None:
        delivery: Any = taken(self.deciding, name)
        self.settle(delivery, AT_SERVER)
        self.dispatch.ended(delivery, self.now)

    def on_retry_now(self, sequence: int) -> None:
        if not self.dispatch.retry_now(sequence, self.now):
            raise BrokenError("what waits to be tried again can be tried now")
        if self.screens:
            self.wanted.add(sequence)

    def on_grant(self, of: tuple[str, str]) -> None:
        limit, key = next(each for each in self.limits if each.name == of[0]), of[1]
        limit.given[key] += limit.given[key] < 1
        limit.open(key)

    def on_outage(self) -> None:
        self.away = True

    def on_end_of_outage(self) -> None:
        self.away = False

    def on_retry_after(self) -> None:
        assert self.pace is not None
        self.pace.close(self.now + 2)

    def on_trip(self) -> None:
        assert self.pace is not None
        self.pace.shut(self.now)

    def on_distrust(self) -> None:
        self.dispatch.trusted_until = self.now

    def on_trust(self) -> None:
        for each in self.dispatch.withdraw():
            self.server[each.message.sequence] = AT_SERVER  # which may have given it to others already
        self.dispatch.trusted_until = math.inf

    def on_gather(self) -> None:
        self.dispatch.gather(2)

    def on_release(self) -> None:
        self.dispatch.release()

    def on_drain(self) -> None:
        self.drains = True
        self.dispatch.close()

    def on_stop_reading(self) -> None:
        self.stopped = True
        if not self.ordered:
            self.give_back(running=False)

    def on_end(self) -> None:
        self.ended = True
        self.give_back(running=True)

    def on_abandon(self) -> None:
        """Give back what cannot be cancelled when the worker ends: its calls run on."""
        self.ended = True
        for each in self.dispatch.withdraw(running=True):
            self.server[each.message.sequence] = GIVEN_BACK

    def give_back(self, *, running: bool) -> None:
        for each in self.dispatch.withdraw(running=running):
            self.settle(each, GIVEN_BACK)

    def on_tick(self) -> None:
        self.now = self.dispatch.again_at(self.now)

    @property
    def is_idle(self) -> bool:
        """Whether everything has come to its end."""
        done = (SETTLED, GIVEN_BACK, AT_SERVER) if self.stopped else (SETTLED,)
        return not (self.dispatch.held or self.calls) and all(where in done for where in self.server.values())


BEGINS: Any = "recorded before its handler begins"


def key_of(subject: str) -> Hashable:
    return subject


def taken(some: list[Held], name: Name) -> Held:
    """Return the delivery of this name, which is taken out."""
    return some.pop([each.name for each in some].index(name))


def nameof(delivery: Held | None) -> Name | None:
    return None if delivery is None else delivery.name


def once(is_possible: object) -> tuple[None, ...]:
    return (None,) if is_possible else ()


def is_earlier(one: Held, than: Held) -> bool:
    return KEYS[one.sequence] == KEYS[than.sequence] and one.sequence < than.sequence and one is not than


def begins_at_pace(
    delivery: Held, now: float, is_shut: bool, retries: int, next_at: float, closed_until: float
) -> bool:
    """Return whether a delivery may begin, by what the pace said before it began."""
    is_limited = retries == 0 if delivery.tried else is_shut
    return delivery.at_once or (now >= closed_until and (now >= next_at or not is_limited))


def where_each_is(world: World) -> list[tuple[Held, int]]:
    """Return each delivery of each container, with the place that the container is of."""
    dispatch: Any = world.dispatch
    found = [
        (each, place)
        for place, queue in (
            (places.READY, dispatch.ready),
            (places.AGAIN, dispatch.again),
            (places.AT_ONCE, dispatch._at_once),
            (places.ALONE, dispatch._alone),
        )
        for each in queue
    ]
    found += [(each, places.GATE) for gate in dispatch._gates.values() for each in gate]
    live = {each: each for _, number, each in dispatch._timers if each.timer == number and each.place == places.UNTIL}
    found += [(each, places.UNTIL) for each in live]
    found += [(each, places.RUNNING) for each in world.calls if dispatch.holds(each)]
    asked = {*world.deciding, *dispatch.asked, *([world.alone] if world.alone else [])}  # some are asked about again
    found += [(each, places.ASKED) for each in asked if each.place == places.ASKED]
    found += [
        (each, places.BEHIND)
        for line in dispatch._lines.values()
        for each in line.waiting
        if each.place == places.BEHIND
    ]
    return found


def has_one_place(world: World) -> bool:
    found = where_each_is(world)
    held = list(world.dispatch.held.values())
    return (
        len(found) == len(held)
        and {id(each) for each, _ in found} == {id(each) for each in held}
        and all(each.place == place for each, place in found)
    )


def lines_are_what_is_held(world: World) -> bool:
    if not world.ordered:
        return not world.dispatch._lines
    lines: Any = world.dispatch._lines
    waiting = {
        key: sorted(
            sequence
            for sequence, each in world.dispatch.held.items()
            if each.place != places.RUNNING and each.message.subject == key
        )
        for key in KEYS.values()
    }
    return all(
        [each.sequence for each in line.waiting] == waiting[key] and all(map(world.dispatch.holds, line.waiting))
        for key, line in lines.items()
    ) and all(key in lines for key, found in waiting.items() if found)


def counters_are_true(world: World) -> bool:
    dispatch = world.dispatch
    waiting = [each for each in dispatch.held.values() if each.place != places.RUNNING]
    counted = len(world.calls), sum(each.tried for each in world.calls), sum(len(each.message.data) for each in waiting)
    return counted == (dispatch.running, dispatch.running_again, dispatch.waiting_bytes)


def no_gate_is_open(world: World) -> bool:
    """Once a limit has opened its gates: what these let through holds no place until it begins."""
    dispatch = world.dispatch
    return not world.granted or dispatch.may_begin() or not any(limit.free(key) > 0 for (limit, key) in dispatch._gates)


def heads_wait_for_something(world: World) -> bool:
    lines: Any = world.dispatch._lines.values()
    return all(line.running or not line.waiting or line.waiting[0].place != places.BEHIND for line in lines)


AT_BEGIN: dict[str, Callable[[World, Held], bool]] = {
    "what begins is held, and does not run already": lambda world, begun: (
        world.server[begun.sequence] == HELD and world.dispatch.holds(begun) and begun not in world.calls
    ),
    "at most one of a key runs": lambda world, begun: (
        not world.ordered or all(KEYS[each.sequence] != KEYS[begun.sequence] for each in world.calls)
    ),
    "none begins before an earlier one of its key": lambda world, begun: (
        not world.ordered or not any(is_earlier(each, begun) for each in world.dispatch.held.values())
    ),
    "none begins before its time": lambda world, begun: begun.due <= world.now,
    "none begins before it is decided on": lambda world, begun: begun.screened,
    "none begins without its limits": lambda world, begun: all(begun in limit.users for limit in world.limits),
    "none begins while redeliveries are gathered": lambda world, begun: not world.dispatch.gathering,
    "none begins in a worker that drains": lambda world, begun: not world.drains,
    "none begins that others may have been given": lambda world, begun: world.now < world.dispatch.trusted_until,
    "none begins beside one that runs alone": lambda world, begun: (
        not world.isolated or (begun is world.alone and not world.calls)
    ),
    "what is to run alone does": lambda world, begun: begun is not world.suspected or begun is world.alone,
}

ALWAYS: dict[str, Callable[[World], bool]] = {
    "what is held is in exactly one place": has_one_place,
    "the line of a key has what waits of it, by sequence": lines_are_what_is_held,
    "no line is empty": lambda world: all(line.waiting or line.running for line in world.dispatch._lines.values()),
    "the first of a key waits for something": heads_wait_for_something,
    "the counters are what is recounted": counters_are_true,
    "places in use are at most those given": lambda world: all(
        limit.free(key) >= 0 for limit in world.limits for key in limit.given
    ),
    "places are used by what runs": lambda world: all(
        each in world.calls for limit in world.limits for each in limit.users
    ),
    "who waits for a limit has told it": lambda world: all(key in limit.asked for limit, key in world.dispatch._gates),
    "nobody waits at an open gate": no_gate_is_open,
}
STANDS_STILL = "there is a way to idle from each state by benign events"


class Explored(NamedTuple):
    states: int
    transitions: int
    broken: str = ""
    """The name of an invariant that does not hold; empty where all do."""
    path: tuple[Event, ...] = ()

    def __str__(self) -> str:
        if not self.broken:
            return f"{self.states:,} states, {self.transitions:,} transitions"
        return f"{self.broken!r} is broken after {len(self.path)} events: {', '.join(map(str, self.path))}"


def explore(spec: Spec, world: type[World] = World) -> Explored:
    """Play each event in each state of a world, and return how many there are; end at the first violation."""
    gc.disable()  # it would take a third of the time
    try:
        return _explore(world(spec))
    finally:
        gc.enable()


def _explore(first: World) -> Explored:
    assert vars(first.dispatch).keys() == {*DISPATCH_STATE.split()}
    assert first.pace is None or vars(first.pace).keys() == {*PACE_STATE.split()}
    numbers = {first.key(): 0}
    queue = deque([(first, 0)])
    came_from: list[tuple[int, Event] | None] = [None]
    benign_from: list[list[int]] = [[]]
    idle: list[int] = []
    transitions = 0

    def path(number: int) -> tuple[Event, ...]:
        events = []
        while (step := came_from[number]) is not None:
            number, event = step
            events.append(event)
        return tuple(reversed(events))

    while queue:
        assert len(numbers) < MOST_STATES, "there is no end of states: is something counted up in them?"
        world, number = queue.popleft()
        if world.is_idle:
            idle.append(number)
        chances = (0.0, 0.9) if world.pace is not None and not world.pace.is_full else (0.0,)
        for event in [each._replace(chance=chance) for each in world.events() for chance in chances]:
            after = world.copy()
            transitions += 1
            if transitions % COLLECTED_EVERY == 0:
                gc.collect()
            try:
                after.play(event)
                other = numbers.setdefault(after.key(), len(numbers))
                if other == len(came_from):
                    after.check()
            except BrokenError as error:
                return Explored(len(numbers), transitions, str(error), (*path(number), event))
            except (AssertionError, LookupError, ValueError, AttributeError, TypeError) as error:
                broken = f"the machine raises nothing ({type(error).__name__}: {error})"
                return Explored(len(numbers), transitions, broken, (*path(number), event))
            if other == len(came_from):
                came_from.append((number, event))
                benign_from.append([])
                queue.append((after, other))
            if event.benign:
                benign_from[other].append(number)
    if (stuck := first_stuck(idle, benign_from)) is not None:
        return Explored(len(numbers), transitions, STANDS_STILL, path(stuck))
    return Explored(len(numbers), transitions)


def first_stuck(idle: list[int], benign_from: list[list[int]]) -> int | None:
    """Return the first state from which there is no way to an idle one, by those from which each can be reached."""
    good = set(idle)
    while idle:
        for before in benign_from[idle.pop()]:
            if before not in good:
                good.add(before)
                idle.append(before)
    return next((number for number in range(len(benign_from)) if number not in good), None)


LARGER = {
    "failures, a lapse, a drain": Spec({"fail": 2, "distrust": 1, "drain": 1, "again": 1, "retry now": 1}),
    "an outage": Spec({"outage": 1, "fail": 1, "drain": 1}, paced=True),
    "one runs alone": Spec({"alone": 1, "fail": 1, "distrust": 1, "gather": 1}, screens=True),
    "one with a place runs alone": Spec({"alone": 1, "fail": 1, "lose": 1, "retry now": 1}, screens=True, slot=True),
    "places": Spec({"fail": 1, "lose": 1, "distrust": 1, "drain": 1, "recreate": 1}, slot=True),
    "redeliveries, with places and a pace": Spec(
        {"outage": 1, "alone": 1, "distrust": 1}, screens=True, slot=True, paced=True
    ),
}
"""Worlds that take minutes each."""
SMALL_NUMBERS = {"FULL": 2, "GAIN": 1, "FIFO": 1, "JITTER": 0.0, "GROWTH": 1.0}
"""What the constants of `pace` are in a world, so that the pace has few states."""


def main() -> None:
    """Explore the larger worlds, or those that are named, and print how many states they have. Fails where an invariant
    does not hold.
    """
    vars(pace).update(SMALL_NUMBERS)
    broken = False
    for name in sys.argv[1:] or LARGER:
        found = explore(LARGER[name])
        print(f"{name}: {found}", flush=True)
        broken = broken or bool(found.broken)
    sys.exit(broken)


if __name__ == "__main__":
    main()
