"""A report as one HTML page with its plots inside, which needs nothing from anywhere else.

Pure: `completeness` calls `page` with the rows of its tables. Plots are SVG in the colours of the legend; each mark has
its numbers as a title, which browsers show under the pointer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from html import escape
from math import ceil, log10
from typing import Any

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

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 1000px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.6em; margin-bottom: 0 } h2 { font-size: 1.15em; margin-top: 2em }
.made, .none { color: #52606d }
svg { display: block; width: 100%; height: auto } svg text { font-size: 12px; fill: #1f2933 }
.facts { display: flex; flex-wrap: wrap; gap: .5em 2em; margin: 1em 0 } .facts b { display: block; font-size: 1.4em }
table { border-collapse: collapse; width: 100%; font-size: 13px }
td, th { text-align: right; padding: .2em .5em; white-space: nowrap }
td:first-child, th:first-child { text-align: left; white-space: normal; min-width: 13em }
tr { border-bottom: 1px solid #e4e7eb }
.scroll { overflow-x: auto } .key { display: inline-block; width: .8em; height: .8em }
.in-time { fill: #2f7d5b; background: #2f7d5b } .late { fill: #e2a03f; background: #e2a03f }
.missing { fill: #b8352f; background: #b8352f } .expected { fill: #dfe3e8; background: #dfe3e8 }
.range { stroke: #7b9cc4; stroke-width: 6 } .median { fill: #1d4f91 } .due { stroke: #b8352f; stroke-width: 2 }
.bar { fill: #4a77ae } .axis { stroke: #cbd2d9 }
"""


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
    title = f"Notifications of {content.event}"
    sections = [
        ("Cycles", _cycles(content.cycles)),
        ("Completeness", _completeness(content.cycles)),
        ("Latency", _latency(content.cycles)),
        ("Throughput by hour", _throughput(content.hours)),
        ("Missing", _missing(content.absent)),
    ]
    body = "\n".join(f"<section><h2>{name}</h2>\n{text}</section>" for name, text in sections)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(title)}</title><style>{STYLE}</style></head>
<body><h1>{escape(title)}</h1><p class="made">{_moment(content.made)}. All times are UTC.</p>
{_facts(content)}
{body}
</body></html>
"""


def _facts(content: Content) -> str:
    cycles = content.cycles
    arrived, expected = (sum(cycle[name] for cycle in cycles) for name in ("arrived", "expected"))
    facts = {
        "cycles": str(len(cycles)),
        "complete": str(sum(cycle["cycle_complete"] for cycle in cycles)),
        "late": str(sum(cycle["cycle_late"] for cycle in cycles)),
        "arrived of expected": f"{arrived:,} of {expected:,}",
    }
    for name, seconds in zip(("p50", "p95", "p99"), content.latency, strict=False):
        facts[f"latency {name}"] = span(seconds)
    return f'<div class="facts">{"".join(f"<div><b>{value}</b>{name}</div>" for name, value in facts.items())}</div>'


def _cycles(cycles: Sequence[Mapping[str, Any]]) -> str:
    columns = ("cycle", "state", "due", "last arrival", "expected", "arrived", "in time", "p50", "p95", "p99")
    rows = []
    for cycle in cycles:
        numbers = [f"{cycle[name]:,}" for name in ("expected", "arrived", "in_time")]
        latency = [span(seconds) for seconds in cycle["latency_seconds"] or ()] or ["–"] * 3
        times = [_moment(cycle["due"]), _moment(cycle["last_arrival"])]
        rows.append([cycle["cycle"], _state(cycle), *times, *numbers, *latency])
    return _table(columns, rows)


def _state(cycle: Mapping[str, Any]) -> str:
    match cycle["cycle_complete"], cycle["cycle_late"]:
        case True, True:
            return "complete, late"
        case True, _:
            return "complete"
        case _, True:
            return "late"
        case _:
            return "not due yet"


def _completeness(cycles: Sequence[Mapping[str, Any]]) -> str:
    """Return a chart with a bar for each cycle: notifications in time, late and missing."""
    space = WIDTH - LABELS - 70
    rows = []
    for number, cycle in enumerate(cycles):
        top, left = number * ROW, float(LABELS)
        whole = cycle["expected"]
        late = cycle["arrived"] - cycle["in_time"]
        open_yet = whole - cycle["arrived"] - cycle["missing"]
        parts = {"in-time": cycle["in_time"], "late": late, "missing": cycle["missing"], "expected": open_yet}
        rows.append(_label(cycle["cycle"], top))
        for kind, count in parts.items():
            if count:
                width = max(LEAST, space * count / whole)
                title = f"{cycle['cycle']}: {count:,} of {whole:,} {NAMES[kind]}"
                rows.append(_rectangle(kind, (left, top + 3, width, ROW - 6), title))
                left += width
        share = f"{100 * cycle['arrived'] // whole} %"
        rows.append(f'<text x="{WIDTH - 60}" y="{top + 15}">{share}</text>')
    legend = " &nbsp; ".join(f'<span class="key {kind}"></span> {name}' for kind, name in NAMES.items())
    return f"<p>{legend}</p>{_svg(len(cycles) * ROW, rows)}"


NAMES = {"in-time": "in time", "late": "late", "missing": "missing", "expected": "not due yet"}


def _latency(cycles: Sequence[Mapping[str, Any]]) -> str:
    """Return a chart with a line from p50 to p99 for each cycle, a dot at p50 and at p95, and a mark where its last
    notification is due.
    """
    measured = [cycle for cycle in cycles if cycle["latency_seconds"]]
    if not measured:
        return '<p class="none">Nothing came yet.</p>'
    due = [(cycle["due"] - cycle["start"]).total_seconds() for cycle in measured]
    low = min(0.0, *(cycle["latency_seconds"][0] for cycle in measured))
    high = max(*due, *(cycle["latency_seconds"][-1] for cycle in measured), low + 1)
    scale = (WIDTH - LABELS - 40) / (high - low)
    bottom = len(measured) * ROW
    rows = []
    for tick in _ticks(low, high, steps=TIME_STEPS):
        x = LABELS + (tick - low) * scale
        rows.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}"/>')
        rows.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{span(tick)}</text>')
    for number, (cycle, limit) in enumerate(zip(measured, due, strict=True)):
        middle = number * ROW + ROW // 2
        p50, p95, p99 = (LABELS + (seconds - low) * scale for seconds in cycle["latency_seconds"])
        texts = [f"{name} {span(value)}" for name, value in zip(SHARES, cycle["latency_seconds"], strict=True)]
        at_due = LABELS + (limit - low) * scale
        rows.append(_label(cycle["cycle"], number * ROW))
        title = f"<title>{escape(cycle['cycle'])}: {', '.join(texts)}; due {span(limit)}</title>"
        line = f'<line class="range" x1="{p50:.1f}" x2="{p99:.1f}" y1="{middle}" y2="{middle}"/>'
        dots = "".join(f'<circle class="median" cx="{x:.1f}" cy="{middle}" r="{r}"/>' for x, r in ((p50, 5), (p95, 3)))
        mark = f'<line class="due" x1="{at_due:.1f}" x2="{at_due:.1f}" y1="{middle - 8}" y2="{middle + 8}"/>'
        rows.append(f"<g>{title}{line}{dots}{mark}</g>")
    note = "From the start of the cycle: p50 (large dot), p95 (small dot), p99 (end of the line); due (red)."
    return f"<p>{note}</p>{_svg(bottom + 24, rows)}"


SHARES = ("p50", "p95", "p99")
TIME_STEPS = (1, 5, 15, 60, 300, 900, 3600, 3 * 3600, 6 * 3600, 12 * 3600, 86400, 7 * 86400, 30 * 86400)


def _throughput(hours: Sequence[Mapping[str, Any]]) -> str:
    """Return a chart with a bar for each hour from the first to the last, also where no notification came."""
    if not hours:
        return '<p class="none">Nothing came.</p>'
    counts = {_utc(row["hour"]): row["notifications"] for row in hours}
    last = max(counts)
    first = max(min(counts), last - (MAX_HOURS - 1) * HOUR)
    number = round((last - first) / HOUR) + 1
    highest = max(counts.values())
    width = min(WIDEST_HOUR, (WIDTH - 70) / number)
    rows = []
    for tick in _ticks(0, highest, steps=_count_steps(highest)):
        y = 10 + HOURS_HEIGHT * (1 - tick / highest)
        rows.append(f'<line class="axis" x1="60" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        rows.append(f'<text x="52" y="{y + 4:.1f}" text-anchor="end">{tick:,.0f}</text>')
    labelled = max(1, ceil(number / 10))
    for index in range(number):
        hour = first + index * HOUR
        count = counts.get(hour, 0)
        height = HOURS_HEIGHT * count / highest
        x = 60 + index * width
        if count:
            box = (x + width * 0.1, 10 + HOURS_HEIGHT - height, width * 0.8, height)
            rows.append(_rectangle("bar", box, f"{_moment(hour)}: {count:,}"))
        if index % labelled == 0:
            text = f"{hour:%H:%M}" if index and hour.hour >= labelled else f"{hour:%d %b %H:%M}"
            rows.append(f'<text x="{x:.1f}" y="{HOURS_HEIGHT + 28}">{text}</text>')
    return _svg(HOURS_HEIGHT + 36, rows)


def _missing(absent: Sequence[Mapping[str, Any]]) -> str:
    if not absent:
        return '<p class="none">Nothing that is due is missing.</p>'
    columns = [name for name in absent[0] if name not in ("start", "arrival", "latency_seconds")]
    rows = [[_moment(row[name]) if name == "due" else str(row[name]) for name in columns] for row in absent]
    return _table(columns, rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _svg(height: float, elements: Iterable[str]) -> str:
    inside = "\n".join(elements)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">\n{inside}\n</svg>'


def _label(name: str, top: float) -> str:
    begin, end = name[: CHARACTERS - LAST_CHARACTERS - 1], name[-LAST_CHARACTERS:]
    short = name if len(name) <= CHARACTERS else f"{begin}…{end}"
    return f'<text x="0" y="{top + 15}"><title>{escape(name)}</title>{escape(short)}</text>'


def _rectangle(kind: str, box: tuple[float, float, float, float], title: str) -> str:
    x, y, width, height = box
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{kind}" {place}><title>{escape(title)}</title></rect>'


def _ticks(low: float, high: float, *, steps: Sequence[float]) -> list[float]:
    """Return at most eight round values between two values."""
    step = next((step for step in steps if (high - low) / step <= 7), (high - low) / 7)
    first = ceil(low / step)
    return [number * step for number in range(first, int(high // step) + 1)]


def _count_steps(highest: int) -> list[float]:
    power = 10 ** max(0, int(log10(highest)) - 1)
    return [power, 2 * power, 5 * power, 10 * power, 20 * power]


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
