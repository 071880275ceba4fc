"""Schedules of the notifications that are expected, and until when: in YAML, or as a table in CSV.

`completeness` compares them with what came. In YAML, a cycle is what is made at one time of a day, such as a forecast
run, with all the fields that belong to it::

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

import csv
import datetime
import io
from collections.abc import Collection, Iterator, Mapping
from itertools import product
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from aviso_workers.aviso.literals import Duration
from aviso_workers.aviso.schema import DateHandler, EventType, Rule, TimeHandler
from aviso_workers.errors import PipelineError

COLUMNS = ("cycle", "start", "due")
"""The columns of a table that are not identifier fields; `start` may be left out, and is then `due`."""

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


class CycleSchedule(Struct, frozen=True, forbid_unknown_fields=True):
    cycles: Annotated[list[Cycle], Meta(min_length=1)]


class Expected(Struct, frozen=True, kw_only=True):
    """An expected notification."""

    cycle: str
    start: datetime.datetime
    due: datetime.datetime
    identifier: Mapping[str, str]
    """Canonical; dates are in ISO format."""


def parse(text: str) -> CycleSchedule:
    """Parse a schedule in YAML. Raises `PipelineError`."""
    try:
        return msgspec.yaml.decode(text, type=CycleSchedule)
    except (msgspec.DecodeError, ValueError) as error:  # a ValueError is of a date without quotes that is none
        hint = "; times are text, in quotes" if "].times[" in str(error) else ""
        raise PipelineError(f"the schedule cannot be read: {error}{hint}") from error


def fields(schedule: CycleSchedule, event_type: EventType) -> list[str]:
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
    schedule: CycleSchedule, event_type: EventType, *, first: datetime.date, last: datetime.date
) -> Iterator[Expected]:
    """Yield the notifications that are expected on the days from `first` to `last`. Raises `PipelineError`."""
    date_field, time_field, *_ = fields(schedule, event_type)
    days = [first + datetime.timedelta(number) for number in range((last - first).days + 1)]
    for cycle in schedule.cycles:
        choices = [_values(cycle, field, event_type.identifier[field]) for field in cycle.identifier]
        for day, given in product(days, cycle.times):
            time = _canonical(_place(cycle), time_field, event_type.identifier[time_field], given)
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


def fields_of_table(columns: Collection[str], known: Collection[str]) -> list[str]:
    """Return the identifier fields among the columns of a table. Raises `PipelineError` where it lacks a column, or has
    one that is not of the fields `known`.
    """
    found = [name for name in columns if name not in COLUMNS]
    if absent := {"cycle", "due"} - set(columns):
        raise PipelineError(f"the schedule has no column {min(absent)!r}")
    if unknown := [name for name in found if name not in known]:
        raise PipelineError(
            f"the schedule has the column {unknown[0]!r}, which is not an identifier field; "
            f"those are: {', '.join(known)}"
        )
    if not found:
        raise PipelineError(f"the schedule has no column with an identifier field; those are: {', '.join(known)}")
    return found


def parse_table(text: str, event_type: EventType) -> Iterator[Expected]:
    """Yield the notifications that a table in CSV expects. Raises `PipelineError` with the line and the column."""
    table = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        named = fields_of_table(table.fieldnames or (), event_type.identifier)
        for row in table:
            line = f"line {table.line_num}"
            if None in row or None in row.values():
                raise PipelineError(f"{line} has another number of values than there are columns")
            due = _moment(line, "due", row["due"])
            yield Expected(
                cycle=row["cycle"],
                start=_moment(line, "start", row["start"]) if "start" in row else due,
                due=due,
                identifier={
                    field: _canonical(line, field, event_type.identifier[field], row[field]) for field in named
                },
            )
    except csv.Error as error:
        raise PipelineError(f"line {table.reader.line_num}: {error}") from error


def _moment(line: str, column: str, text: str) -> datetime.datetime:
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise PipelineError(
            f"{line}: {column} must be a date with a time, such as 2026-11-20T12:00:00Z, not {text!r}"
        ) from error
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)


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
    return [_canonical(_place(cycle), field, rule, value) for value in (given if isinstance(given, list) else [given])]


def _place(cycle: Cycle) -> str:
    return f"cycle {cycle.name!r} of the schedule"


def _canonical(place: str, field: str, rule: Any, value: Value) -> str:
    try:
        canonical = str(rule.canonical(str(value)))
    except ValueError as error:
        raise PipelineError(f"{place}: {field} {error}") from error
    if isinstance(rule, DateHandler):
        return datetime.datetime.strptime(canonical, rule.canonical_format).date().isoformat()
    return canonical


def _due(cycle: Cycle, start: datetime.datetime) -> datetime.datetime:
    try:
        return start + datetime.timedelta(seconds=Duration.parse(cycle.due))
    except (ValueError, OverflowError) as error:
        raise PipelineError(f"{_place(cycle)}: due: {error}") from error
