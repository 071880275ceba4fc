"""What begins next (`engine.dispatch`): all that can happen in small worlds, and the bugs that this has to find.

`scripts/explore` has larger worlds.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from aviso_workers.backends import Delivery
from aviso_workers.engine import pace
from aviso_workers.engine.dispatch import BEHIND, GATE, READY, RUNNING, Dispatch, _Line
from aviso_workers.engine.pace import Pace
from tests.engine.small_worlds import SMALL_NUMBERS, Spec, World, explore

WORLDS = {
    "failures, a lapse, a drain": Spec({"fail": 1, "distrust": 1, "drain": 1, "again": 1}),
    "a person retries": Spec({"fail": 2, "retry now": 1, "drain": 1}),
    "a person retries in an outage": Spec({"outage": 1, "retry now": 1}, screens=True, paced=True, notifications=2),
    "an outage": Spec({"outage": 1}, paced=True),
    "an outage and a failure": Spec({"outage": 1, "fail": 1}, paced=True, notifications=2),
    "closed for a time": Spec({"outage": 1, "retry after": 1}, paced=True, notifications=2),
    "shut by a person": Spec({"trip": 1}, paced=True, notifications=1),
    "one runs alone": Spec({"alone": 1, "fail": 1, "distrust": 1}, screens=True, notifications=2),
    "one with a place runs alone": Spec(
        {"alone": 1, "fail": 1, "lose": 1, "retry now": 1}, screens=True, slot=True, notifications=2
    ),
    "one of three runs alone": Spec({"alone": 1, "fail": 1}, screens=True, slot=True, redelivered=True),
    "one of three runs alone, without places": Spec(
        {"alone": 1, "trip": 1}, screens=True, paced=True, redelivered=True
    ),
    "redeliveries are gathered": Spec({"start": 1, "fail": 1, "gather": 1}, screens=True),
    "places": Spec({"fail": 1, "lose": 1}, slot=True),
    "places and a rate": Spec({"fail": 1, "distrust": 1}, slot=True, rate=True),
    "a stream is recreated": Spec({"recreate": 1, "fail": 1, "abandon": 1}),
    "without an order": Spec({"outage": 1}, ordered=False, paced=True),
    "places without an order": Spec(
        {"outage": 1, "distrust": 1}, ordered=False, slot=True, paced=True, notifications=2
    ),
    "a drain without an order": Spec({"fail": 1, "drain": 1}, ordered=False),
    "redeliveries without an order": Spec(
        {"fail": 1, "alone": 1, "postpone": 1, "retry after": 1}, ordered=False, screens=True, paced=True
    ),
    "redeliveries to one handler": Spec(
        {"fail": 2}, ordered=False, screens=True, paced=True, handlers=1, redelivered=True
    ),
}


@pytest.fixture(autouse=True)
def _few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the pace small whole numbers, so that it has few states."""
    for name, value in SMALL_NUMBERS.items():
        monkeypatch.setattr(pace, name, value)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_all_invariants_hold_in_every_state(name: str) -> None:
    found = explore(WORLDS[name])
    print(f"{name}: {found}")
    assert not found.broken, found


# Bugs that the exploration has to find


class RetryStaysTimed(Dispatch):
    """What a person has retried is put again when its wait would have been over, wherever it is by then."""

    def _begin_special(self, now: float) -> Delivery | None:
        for due, _, delivery in list(self._timers):
            if due <= now and self.holds(delivery):
                self._put(delivery, now)
        return super()._begin_special(now)


class DisplacedStaysReady(Dispatch):
    """The first of a key that an earlier one displaces can begin all the same."""

    def _move(self, delivery: Delivery, place: int, *, first: bool = False) -> None:
        if place == BEHIND and delivery.place == READY:
            delivery.place = BEHIND
        else:
            super()._move(delivery, place, first=first)


class DisplacedStaysAtLimit(Dispatch):
    """The first of a key is not displaced while it waits for a limit."""

    def _move(self, delivery: Delivery, place: int, *, first: bool = False) -> None:
        if place != BEHIND or delivery.place != GATE:
            super()._move(delivery, place, first=first)


class EarlierIsForgotten(Dispatch):
    """What came while a later one of its key ran is not put anywhere when that one fails."""

    def wait(self, delivery: Delivery, now: float, *, until: float) -> None:
        next_of, self._next_of = self._next_of, lambda *_: None  # type: ignore[method-assign]
        super().wait(delivery, now, until=until)
        self._next_of = next_of  # type: ignore[method-assign]
        del self._next_of


class LapseLeavesLine(Dispatch):
    """What is left to others stays in the line of its key."""

    def withdraw(self, *, running: bool = False) -> list[Delivery]:
        lines = {key: [*line.waiting] for key, line in self._lines.items()}
        withdrawn = super().withdraw(running=running)
        for key, waiting in lines.items():
            self._lines.setdefault(key, _Line(key)).waiting.extend(waiting)
        return withdrawn


class LapseDropsLine(Dispatch):
    """The line of a key is dropped in a lapse also where one of it runs."""

    def withdraw(self, *, running: bool = False) -> list[Delivery]:
        withdrawn = super().withdraw(running=running)
        self._lines.clear()
        return withdrawn


class OrphanFreesKey(Dispatch):
    """A call whose delivery is gone frees its key before it ends."""

    def _forget(self, delivery: Delivery, now: float) -> None:
        runs = delivery.place == RUNNING
        super()._forget(delivery, now)
        if runs and delivery.line is not None:
            delivery.line.running = None


class PlaceIsLost(Dispatch):
    """A place is kept for what the next limit does not let begin."""

    def _admitted(self, delivery: Delivery, now: float) -> bool:
        limits, self._limits = self._limits, tuple([_NeverTakenBack(each) for each in self._limits])
        admitted = super()._admitted(delivery, now)
        self._limits = limits
        if not admitted:
            (waits, key), delivery.limit = (delivery.limit.limit, delivery.limit.gate(delivery)), delivery.limit.limit
            gate = next(gate for gate in self._gates if isinstance(gate[0], _NeverTakenBack))
            self._gates.setdefault((waits, key), []).extend(self._gates.pop(gate))
        return admitted


class _NeverTakenBack:
    def __init__(self, limit: Any) -> None:
        self.limit = limit
        self.gate, self.admits, self.wait = limit.gate, limit.admits, limit.wait

    def take_back(self, delivery: Delivery) -> None:
        pass

    release = take_back


class GateIsEmptied(Dispatch):
    """Those that a limit does not let begin yet are forgotten when it lets one begin."""

    def open(self, limit: Any, key: Any, count: int, now: float) -> int:
        opened = super().open(limit, key, count, now)
        self._gates.pop((limit, key), None)
        return opened


class AloneAsksNoLimit(Dispatch):
    """What runs alone begins without a place."""

    def _admitted(self, delivery: Delivery, now: float) -> bool:
        return delivery is self._single or super()._admitted(delivery, now)


class AloneIsForgotten(Dispatch):
    """What is to run alone does not, where an earlier one of its key came before it began."""

    def _move(self, delivery: Delivery, place: int, *, first: bool = False) -> None:
        if place == BEHIND and delivery is self._single:
            delivery.screened, self._single = True, None
        super()._move(delivery, place, first=first)


class ShutForEver(Pace):
    """A success while the pace is shut does not open it."""

    def succeeded(self) -> None:
        was_shut = self.is_shut
        super().succeeded()
        if was_shut:
            self._window = 0


class FirstTriesAreNotPaced(Pace):
    """While the pace is shut, first tries begin at once."""

    def lets(self, now: float, *, first: bool, again: bool) -> tuple[bool, bool]:
        return first, super().lets(now, first=first, again=again)[1]


class NobodyIsTold(Dispatch):
    """While the pace is shut, nobody is told when the next one may begin."""

    def again_at(self, now: float) -> float:
        return self._timers[0][0] if self._timers else math.inf


class ToldATimeThatIsPast(Dispatch):
    """The time to ask again is that of a retry also while nothing may begin, and may be past."""

    def again_at(self, now: float) -> float:
        return min(super().again_at(now), self._timers[0][0] if self._timers else math.inf)


class PlainTooSoon(Dispatch):
    """Nothing more is asked although one waits that was tried before."""

    def _begin_special(self, now: float) -> Delivery | None:
        delivery = super()._begin_special(now)
        self.special = self.special and not self._turn
        return delivery


class RetryRunsOn(Dispatch):
    """A retry that has ended is counted on among those that run."""

    def _stop(self, delivery: Delivery, now: float) -> _Line | None:
        self.running_again += delivery.tried
        return super()._stop(delivery, now)


class UntriedIsCounted(Dispatch):
    """The size of what was given back untried is counted on."""

    def untried(self) -> list[Delivery]:
        untried = super().untried()
        self.waiting_bytes += sum(len(each.message.data) for each in untried)
        return untried


class TrustIsNotAsked(Dispatch):
    """What the server may have given to others begins where nothing is special."""

    def begin(self, now: float) -> Delivery | None:
        trusted_until, self.trusted_until = self.trusted_until, math.inf
        delivery = super().begin(now)
        self.trusted_until = trusted_until
        return delivery


class BeginsWhileItDrains(Dispatch):
    """What comes while a worker drains lets others begin."""

    def received(self, delivery: Delivery, now: float) -> bool:
        self.closed = False
        return super().received(delivery, now)


class DrainOvertakes(World):
    """A worker that drains gives back what waits behind one that runs."""

    def on_stop_reading(self) -> None:
        super().on_stop_reading()
        self.give_back(running=False)


PLANTED = [
    (RetryStaysTimed, "a person retries"),
    (DisplacedStaysReady, "failures, a lapse, a drain"),
    (EarlierIsForgotten, "failures, a lapse, a drain"),
    (LapseLeavesLine, "failures, a lapse, a drain"),
    (LapseDropsLine, "failures, a lapse, a drain"),
    (TrustIsNotAsked, "failures, a lapse, a drain"),
    (BeginsWhileItDrains, "failures, a lapse, a drain"),
    (DrainOvertakes, "failures, a lapse, a drain"),
    (RetryRunsOn, "a person retries"),
    (ToldATimeThatIsPast, "failures, a lapse, a drain"),
    (PlainTooSoon, "failures, a lapse, a drain"),
    (DisplacedStaysAtLimit, "places"),
    (GateIsEmptied, "places"),
    (PlaceIsLost, "places and a rate"),
    (OrphanFreesKey, "a stream is recreated"),
    (AloneAsksNoLimit, "one with a place runs alone"),
    (AloneIsForgotten, "one of three runs alone, without places"),
    (UntriedIsCounted, "without an order"),
    (ShutForEver, "shut by a person"),
    (FirstTriesAreNotPaced, "shut by a person"),
    (NobodyIsTold, "shut by a person"),
]


@pytest.mark.parametrize(("bug", "name"), PLANTED, ids=lambda value: getattr(value, "__name__", ""))
def test_the_exploration_finds(bug: type[Any], name: str) -> None:
    spec = WORLDS[name]._replace(
        dispatch=bug if issubclass(bug, Dispatch) else Dispatch, pace=bug if issubclass(bug, Pace) else Pace
    )
    found = explore(spec, bug if issubclass(bug, World) else World)
    print(f"{bug.__name__}: {found}")
    assert found.broken
