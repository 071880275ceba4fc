"""Limits that all workers of an app keep together: how many calls begin in a time, and how many run at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta

from aviso_workers.aviso.literals import AnyDuration, Duration
from aviso_workers.declare import durations
from aviso_workers.errors import DeclarationError

LEAST_PER_SECONDS, LONGEST_PER_SECONDS = 0.001, 86400.0
MOST_CALLS = 10**9
MOST_SLOTS = 100
"""Each is a lease of its own."""


class Rate:
    """So many calls of an agent begin in a time, at most. All workers of the app on all machines keep it together.

    `Rate(100, per="1m")` lets a hundred calls begin in a minute, evenly spaced. `per` is a number of seconds, a text
    such as `1m`, or a timedelta, from 1 ms to a day, and is kept as a timedelta. With `by`, identifier fields that are
    part of the topic, there is a rate for each of their values.

    Workers lease the calls in a bucket of the app. One that cannot reach it begins nothing. Raises `DeclarationError`
    for anything else.
    """

    def __init__(self, count: int, per: AnyDuration, *, by: Sequence[str] = ()) -> None:
        self.count = _count("Rate", count, most=MOST_CALLS)
        seconds = durations.seconds("Rate: per", per)
        if not LEAST_PER_SECONDS <= seconds <= LONGEST_PER_SECONDS:
            raise DeclarationError(f'Rate: per must be from 1 ms to a day, as in per="1m", found {per!r:.100}')
        self.per = timedelta(seconds=seconds)
        self.by = identifier_fields("Rate: by", by)

    @property
    def interval_seconds(self) -> float:
        """The time from one call to the next."""
        return self.per.total_seconds() / self.count

    def __str__(self) -> str:
        seconds = self.per.total_seconds()
        per = str(Duration(seconds)) if seconds.is_integer() else f"{seconds:g}s"
        return f"{self.count} in {per}{_for_each(self.by)}, across the fleet"

    def __repr__(self) -> str:
        return f"<Rate {self}>"


class Slots:
    """So many calls of an agent run at the same time, at most. All workers of the app on all machines keep it together.

    `Slots(1)` lets one call run at a time; at most 100 can be given. With `by`, identifier fields that are part of the
    topic, there are as many slots for each of their values: `Slots(1, by=["class"])` is a mutex for each class.

    Workers lease the slots in a bucket of the app. One that cannot reach it begins nothing. Raises `DeclarationError`
    for anything else.
    """

    def __init__(self, count: int, *, by: Sequence[str] = ()) -> None:
        self.count = _count("Slots", count, most=MOST_SLOTS)
        self.by = identifier_fields("Slots: by", by)

    def __str__(self) -> str:
        return f"{self.count} at once{_for_each(self.by)}, across the fleet"

    def __repr__(self) -> str:
        return f"<Slots {self}>"


def limits_in_order(limits: object) -> tuple[Rate | Slots, ...]:
    """Return the limits of a decorator in the order in which they are asked, the slots first: what a rate grants is
    spent by asking, and a slot can be given back. Raises `DeclarationError`.
    """
    given = [limit for limit in limits if isinstance(limit, Rate | Slots)] if isinstance(limits, Collection) else []
    if not isinstance(limits, Collection) or len(given) < len(limits):
        raise DeclarationError(
            f'agent: limits= takes a list, as in limits=[Rate(100, per="1m"), Slots(1)], found {limits!r:.100}'
        )
    if len({(type(limit), frozenset(limit.by)) for limit in given}) < len(given):
        raise DeclarationError(
            f"agent: limits= has two of a kind by the same fields, of which the lower one alone counts: {limits!r:.200}"
        )
    return tuple(sorted(given, key=lambda limit: isinstance(limit, Rate)))


def identifier_fields(what: str, given: object) -> tuple[str, ...]:
    """Return the identifier fields that are given for `what`. Raises `DeclarationError`, which begins with it."""
    fields = given if isinstance(given, Collection) and not isinstance(given, str) else (None,)
    if not all(isinstance(field, str) for field in fields):
        raise DeclarationError(f'{what} must be a list of identifier fields, as in ["class"], found {given!r:.100}')
    return tuple(fields)


def _count(kind: str, count: object, *, most: int) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or not 0 < count <= most:
        raise DeclarationError(f"{kind}: the count must be a whole number from 1 to {most}, found {count!r:.100}")
    return count


def _for_each(fields: tuple[str, ...]) -> str:
    return f" for each {', '.join(fields)}" if fields else ""
