"""How values are shown: times, durations, numbers and sizes as text. The templates use these functions as filters."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any

from markupsafe import Markup, escape
from rich.filesize import decimal

from aviso_workers.aviso.literals import body_text, time_text
from aviso_workers.console.history import sparkline, spoken

MINUTE, HOUR, DAY = 60, 3600, 86400
BACKTICKS = re.compile(r"`([^`\n]+)`")
COMMAND = re.compile(r"aviso-workers (\S+ \S+)(?: ([-\w]+/[-\w]+)\b)?")
DONE_ON = {
    **dict.fromkeys(("streams apply", "streams plan"), "/streams"),
    **dict.fromkeys(("dead-letters ls", "dead-letters retry", "dead-letters drop"), "/dead-letters"),
    **dict.fromkeys(("timers run", "timers pause", "timers resume"), "/timers"),
    **{f"agents {verb}": "/agents/{}" for verb in ("show", "retrying", "retry", "skip", "pause", "resume", "reset")},
}
"""The page that does what a command does; `{}` is for the app and the agent."""
SLOWEST = 0.05
"""Below this rate, nothing is said to change."""
MOST_ROWS = 1000
"""Of each app, in one table or list: a page of some megabytes holds up the browser and the other pages."""


def time(value: datetime | None) -> str:
    with suppress(OverflowError):  # in UTC, it may be of a year that is none
        value = value and value.astimezone(UTC)
    return time_text(value) if value is not None else "–"


def ago(value: datetime | None, now: datetime) -> str:
    """Return how long ago it was, as `3 min`; a dash where that is not known. `now` is by the same clock."""
    return duration(max(0.0, (now - value).total_seconds())) if value is not None else "–"


def duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < MINUTE:
        return f"{seconds:.0f} s"
    if seconds < HOUR:
        return f"{seconds / MINUTE:.0f} min"
    return f"{seconds / HOUR:.1f} h" if seconds < 2 * DAY else f"{seconds / DAY:.0f} d"


def number(value: int | None) -> str:
    return f"{value:,}" if value is not None else "–"


def rate(value: float) -> str:
    return f"{value:,.1f}" if value >= SLOWEST else "0"


def size(value: int) -> str:
    return decimal(value)


def part(value: float | None) -> str:
    return f"{value:.0%}" if value is not None else "–"


def body(data: bytes) -> str:
    """Return a body as text: JSON with indents, other text as it is, other bytes by their number."""
    text = body_text(data)
    return text if text is not None else f"{len(data)} bytes that are no text"


def commands(text: str) -> Markup:
    """Return a text whose `backticks` enclose commands and names as HTML. A command links the page that does it."""

    def shown(found: re.Match[str]) -> str:
        code, command = f"<code>{found[1]}</code>", COMMAND.match(found[1])
        page = DONE_ON.get(command[1], "") if command else ""
        if not command or not page or ("{}" in page and not command[2]):
            return code
        return f'<a href="{page.format(command[2])}">{code}</a>'

    return Markup(BACKTICKS.sub(shown, str(escape(text))))


def pairs(value: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {each}" for name, each in value.items())


def first_of_each(rows: Iterable[Any], app: str = "") -> tuple[list[Any], dict[str, int]]:
    """Return the first rows of each app, in their order, and how many more there are, by app. `app` is the attribute of
    a row that names its app; empty where all are of one.
    """
    counts: Counter[str] = Counter()
    shown = []
    for row in rows:
        of = attrgetter(app)(row) if app else ""
        counts[of] += 1
        if counts[of] <= MOST_ROWS:
            shown.append(row)
    return shown, {of: count - MOST_ROWS for of, count in counts.items() if count > MOST_ROWS}


FILTERS = {
    "time": time,
    "ago": ago,
    "duration": duration,
    "number": number,
    "rate": rate,
    "size": size,
    "part": part,
    "body": body,
    "commands": commands,
    "pairs": pairs,
    "first_of_each": first_of_each,
    "sparkline": sparkline,
    "spoken": spoken,
}
