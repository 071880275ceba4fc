"""Schedules in YAML of the notifications that are expected, and until when, as rows.

`completeness` compares them with what came. A cycle is what is made at one time of a day, such as a forecast run, with
all the fields that belong to it::

    cycles:
      - name: oper
        times: ["0000", "1200"]
        identifier:
          class: od
          stream: [oper, wave]
          step: {from: 0, to: 240, by: 6}
        due: 6h

Each value of a field is combined with each of the others; `due` is counted from the date and time of the cycle, which
are the fields of the event type with the rules DateHandler and TimeHandler. Dates are not in the file: one schedule
serves every day.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from aviso_workers.aviso.literals import Duration
from aviso_workers.aviso.schema import DateHandler, EventType, Rule, TimeHandler
from aviso_workers.errors import PipelineError

__all__ = ["Expected", "expand", "fields", "parse"]

Value = str | int | float


class Steps(Struct, frozen=True, forbid_unknown_fields=True, rename={"first": "from", "last": "to"}):
    """A range of whole numbers with a step, both ends included."""

    first: int
    last: int
    by: Annotated[int, Meta(gt=0)] = 1


class Cycle(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^\S+$")]
    times: Annotated[list[str], Meta(min_length=1)]
    due: str
    identifier: dict[str, Value | list[Value] | Steps] = {}


class Schedule(Struct, frozen=True, forbid_unknown_fields=True):
    cycles: Annotated[list[Cycle], Meta(min_length=1)]


class Expected(Struct, frozen=True, kw_only=True):
    """An expected notification."""

    cycle: str
    start: datetime.datetime
    due: datetime.datetime
    identifier: Mapping[str, str]
    """Canonical; dates are in ISO format."""


def parse(text: str) -> Schedule:
    """Parse a schedule in YAML. Raises `PipelineError`."""
    try:
        return msgspec.yaml.decode(text, type=Schedule)
    except (msgspec.DecodeError, ValueError) as error:  # a ValueError is of a date without quotes that is none
        hint = "; times are text, in quotes" if "].times[" in str(error) else ""
        raise PipelineError(f"the schedule cannot be read: {error}{hint}") from error


def fields(schedule: Schedule, event_type: EventType) -> list[str]:
    """Return the identifier fields that a schedule names.

    Raises `PipelineError` where they are not of the event type.
    """
    named = {field for cycle in schedule.cycles for field in cycle.identifier}
    wanted = [_field(event_type, DateHandler), _field(event_type, TimeHandler), *sorted(named)]
    for cycle in schedule.cycles:
        if missing := named - set(cycle.identifier):
            raise PipelineError(f"cycle {cycle.name!r} of the schedule says nothing of {min(missing)!r}, another does")
    if unknown := named - set(event_type.identifier):
        raise PipelineError(f"the schedule speaks of {min(unknown)!r}; there are: {', '.join(event_type.identifier)}")
    return wanted


def expand(
    schedule: Schedule, event_type: EventType, *, first: datetime.date, last: datetime.date
) -> Iterator[Expected]:
    """Yield the notifications that are expected on the days from `first` to `last`. Raises `PipelineError`."""
    date_field, time_field, *_ = fields(schedule, event_type)
    days = [first + datetime.timedelta(number) for number in range((last - first).days + 1)]
    for cycle in schedule.cycles:
        choices = [_values(cycle, field, event_type.identifier[field]) for field in cycle.identifier]
        for day, given in product(days, cycle.times):
            time = _canonical(cycle, time_field, event_type.identifier[time_field], given)
            start = datetime.datetime.combine(day, datetime.time(int(time[:2]), int(time[2:])), datetime.UTC)
            until = _due(cycle, start)
            for values in product(*choices):
                identifier = dict(zip(cycle.identifier, values, strict=True))
                yield Expected(
                    cycle=f"{cycle.name}/{day.isoformat()}/{time}",
                    start=start,
                    due=until,
                    identifier={date_field: day.isoformat(), time_field: time, **identifier},
                )


def _field(event_type: EventType, kind: type[Rule]) -> str:
    for field, rule in event_type.identifier.items():
        if isinstance(rule, kind):
            return field
    raise PipelineError(
        f"a schedule in YAML needs an event type with a {kind.__name__}: give the schedule as a table instead"
    )


def _values(cycle: Cycle, field: str, rule: Rule) -> list[str]:
    given = cycle.identifier[field]
    if isinstance(given, Steps):
        given = list(range(given.first, given.last + 1, given.by))
    return [_canonical(cycle, field, rule, value) for value in (given if isinstance(given, list) else [given])]


def _canonical(cycle: Cycle, field: str, rule: Any, value: Value) -> str:
    try:
        canonical = str(rule.canonical(str(value)))
    except ValueError as error:
        raise PipelineError(f"cycle {cycle.name!r} of the schedule: {field} {error}") from error
    if isinstance(rule, DateHandler):
        return datetime.datetime.strptime(canonical, rule.canonical_format).date().isoformat()
    return canonical


def _due(cycle: Cycle, start: datetime.datetime) -> datetime.datetime:
    try:
        return start + datetime.timedelta(seconds=Duration.parse(cycle.due))
    except (ValueError, OverflowError) as error:
        raise PipelineError(f"cycle {cycle.name!r} of the schedule: due: {error}") from error
