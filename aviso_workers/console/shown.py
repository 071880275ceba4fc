"""How values are shown: times, durations, numbers and sizes as text. The templates use these functions as filters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime

from markupsafe import Markup, escape
from rich.filesize import decimal

from aviso_workers.aviso.literals import body_text, time_text
from aviso_workers.console.history import sparkline, spoken

__all__ = ["FILTERS", "body"]

MINUTE, HOUR, DAY = 60, 3600, 86400
BACKTICKS = re.compile(r"`([^`\n]+)`")
SLOWEST = 0.05
"""Below this rate, nothing is said to change."""


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
    """Return a text whose `backticks` enclose commands and names as HTML."""
    return Markup(BACKTICKS.sub(r"<code>\1</code>", str(escape(text))))


def pairs(value: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {each}" for name, each in value.items())


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
    "sparkline": sparkline,
    "spoken": spoken,
}
