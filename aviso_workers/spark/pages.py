"""A report as one HTML page with its plots inside, which needs nothing from anywhere else.

Pure: `completeness` calls `page` with the rows of its tables; `templates/report.html` has the page. Plots are SVG in
the colours of the legend; each mark has its numbers as a title, which browsers show under the pointer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from math import ceil, log10
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from msgspec import Struct

WIDTH = 1000
LABELS = 220
"""Pixels at the left, for the names of cycles."""
ROW = 22
HOURS_HEIGHT = 180
WIDEST_HOUR = 60.0
MAX_HOURS = 24 * 31
"""The last ones of a longer time."""
CHARACTERS = 32
"""The most characters of a cycle's name beside a plot; `LAST_CHARACTERS` of them are its end, with its date."""
LAST_CHARACTERS = 16
LEAST = 2.0
"""Pixels of a bar that should be seen, however little it stands for."""
HOUR = timedelta(hours=1)
STATES = {
    (True, True): "complete, late",
    (True, False): "complete",
    (False, True): "late",
    (False, False): "not due yet",
}
"""By whether a cycle is complete, and whether it is late."""
SHARES = ("p50", "p95", "p99")
TIME_STEPS = (1, 5, 15, 60, 300, 900, 3600, 3 * 3600, 6 * 3600, 12 * 3600, 86400, 7 * 86400, 30 * 86400)


class Content(Struct, frozen=True, kw_only=True):
    """The content of a report's page. Times without a zone are of this process's zone, as Spark gives them."""

    event: str
    made: datetime
    cycles: Sequence[Mapping[str, Any]]
    hours: Sequence[Mapping[str, Any]]
    absent: Sequence[Mapping[str, Any]]
    latency: Sequence[float]
    """p50, p95 and p99 of all, in seconds; empty where nothing came."""


def page(content: Content) -> str:
    """Return the page as HTML."""
    page = Environment(
        loader=PackageLoader("aviso_workers.spark"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    page.filters |= {"moment": _moment, "span": span, "shortened": _shortened}
    page.filters |= {"pixels": "{:.1f}".format, "grouped": "{:,}".format}
    return page.get_template("report.html").render(
        content=content,
        facts=_facts(content),
        cycles=map(_cycle, content.cycles),
        latency=_latency(content.cycles),
        hours=_throughput(content.hours),
        absent=_absent(content.absent),
        width=WIDTH,
        labels=LABELS,
        row=ROW,
        least=LEAST,
        height=HOURS_HEIGHT,
    )


def _facts(content: Content) -> list[tuple[str, str]]:
    arrived, expected, complete, late = (
        sum(cycle[name] for cycle in content.cycles) for name in ("arrived", "expected", "cycle_complete", "cycle_late")
    )
    return [
        (str(len(content.cycles)), "cycles"),
        (str(complete), "complete"),
        (str(late), "late"),
        (f"{arrived:,} of {expected:,}", "arrived of expected"),
        *((span(seconds), f"latency {name}") for name, seconds in zip(SHARES, content.latency, strict=False)),
    ]


def _cycle(cycle: Mapping[str, Any]) -> list[str]:
    """Return the row of a cycle in the table of all."""
    numbers = [f"{cycle[name]:,}" for name in ("expected", "arrived", "in_time")]
    latency = [span(seconds) for seconds in cycle["latency_seconds"] or ()] or ["–"] * 3
    state = STATES[bool(cycle["cycle_complete"]), bool(cycle["cycle_late"])]
    return [cycle["cycle"], state, _moment(cycle["due"]), _moment(cycle["last_arrival"]), *numbers, *latency]


def _latency(cycles: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the round times of the axis, and the times of each cycle (its shares, and when it is due), with their
    positions; None where nothing came yet.
    """
    times = {
        cycle["cycle"]: (*cycle["latency_seconds"], (cycle["due"] - cycle["start"]).total_seconds())
        for cycle in cycles
        if cycle["latency_seconds"]
    }
    if not times:
        return None
    low: float = min(0.0, *(seconds[0] for seconds in times.values()))
    high: float = max(low + 1, *(max(seconds[2:]) for seconds in times.values()))

    def x(seconds: float) -> float:
        return LABELS + (seconds - low) * (WIDTH - LABELS - 40) / (high - low)

    return {
        "ticks": [(tick, x(tick)) for tick in _ticks(low, high, steps=TIME_STEPS)],
        "cycles": [(name, seconds, [*map(x, seconds)]) for name, seconds in times.items()],
    }


def _throughput(hours: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the bars of all hours from the first to the last, each with its label; None where nothing came."""
    if not hours:
        return None
    counts = {_utc(row["hour"]): row["notifications"] for row in hours}
    last, highest = max(counts), max(counts.values())
    first = max(min(counts), last - (MAX_HOURS - 1) * HOUR)
    number = round((last - first) / HOUR) + 1
    labelled = max(1, ceil(number / 10))
    bars = []
    for index in range(number):
        hour = first + index * HOUR
        text = f"{hour:%H:%M}" if index and hour.hour >= labelled else f"{hour:%d %b %H:%M}"
        bars.append((hour, counts.get(hour, 0), text if index % labelled == 0 else ""))
    power = 10 ** max(0, int(log10(highest)) - 1)
    ticks = _ticks(0, highest, steps=[power * step for step in (1, 2, 5, 10, 20)])
    return {"ticks": ticks, "highest": highest, "width": min(WIDEST_HOUR, (WIDTH - 70) / number), "bars": bars}


def _absent(absent: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]] | None:
    """Return the columns and the rows of the table of what is missing; None where nothing is."""
    if not absent:
        return None
    columns = [name for name in absent[0] if name not in ("start", "arrival", "latency_seconds")]
    return columns, [[_moment(row[name]) if name == "due" else str(row[name]) for name in columns] for row in absent]


def _shortened(name: str) -> str:
    """Return the name of a cycle with its beginning and its end, as fits beside a plot."""
    begin, end = name[: CHARACTERS - LAST_CHARACTERS - 1], name[-LAST_CHARACTERS:]
    return name if len(name) <= CHARACTERS else f"{begin}…{end}"


def _ticks(low: float, high: float, *, steps: Sequence[float]) -> list[float]:
    """Return at most eight round values between two values."""
    step = next((step for step in steps if (high - low) / step <= 7), (high - low) / 7)
    first = ceil(low / step)
    return [number * step for number in range(first, int(high // step) + 1)]


def span(seconds: float) -> str:
    """Return a duration in seconds as text of two units at most: `2 h 05 min`."""
    sign, left = ("−" if seconds < 0 else ""), abs(seconds)
    if left < 60:
        text = f"{left:.1f}".removesuffix(".0")
        return f"{sign}{text} s"
    minutes, rest = divmod(round(left), 60)
    if minutes < 60:
        return f"{sign}{minutes} min {rest:02} s" if rest else f"{sign}{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{sign}{hours} h {minutes:02} min" if minutes else f"{sign}{hours} h"
    days, hours = divmod(hours, 24)
    return f"{sign}{days} d {hours} h" if hours else f"{sign}{days} d"


def _moment(moment: datetime | None) -> str:
    return "–" if moment is None else f"{_utc(moment):%Y-%m-%d %H:%M}"


def _utc(moment: datetime) -> datetime:
    return moment.astimezone(UTC)
