"""How values are shown: times, durations, numbers and sizes as text. The templates use these functions as filters."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any

from jinja2 import pass_context
from jinja2.runtime import Context
from markupsafe import Markup, escape
from msgspec import Struct
from rich.filesize import decimal

from aviso_workers.aviso.literals import body_text, printable, time_text
from aviso_workers.ops.health import Judgement

MINUTE, HOUR, DAY = 60, 3600, 86400
BACKTICKS = re.compile(r"`([^`\n]+)`")
NOTIFICATION = re.compile(r"\b([A-Z][A-Z0-9_]*)@([1-9][0-9]*)\b")
TIME = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
COMMAND = re.compile(r"aviso-workers (\S+ \S+)(?: ([-\w]+/[-\w]+)\b)?")
DONE_ON = {
    **dict.fromkeys(("streams apply", "streams plan"), "/streams"),
    **dict.fromkeys(("dead-letters ls", "dead-letters retry", "dead-letters drop"), "/dead-letters"),
    **dict.fromkeys(("timers run", "timers pause", "timers resume"), "/timers"),
    **{f"agents {verb}": "/agents/{}" for verb in ("show", "retrying", "retry", "skip", "pause", "resume", "reset")},
}
"""The page that does what a command does; `{}` is for the app and the agent."""
MOVES = ("working", "catching up", "ready", "runs", "deploying")
"""The calm states in which something moves."""
SLOWEST = 0.05
"""Below this rate, nothing is said to change."""
PAGE_ROWS = 100
"""Of a list that is shown in parts."""
MOST_ROWS = 1000
"""Of each app, in one table or list: a page of some megabytes holds up the browser and the other pages."""


def time(value: datetime | None) -> str:
    with suppress(OverflowError):  # in UTC, it may be of a year that is none
        value = value and value.astimezone(UTC)
    return time_text(value) if value is not None else "–"


def ago(value: datetime | None, now: datetime) -> str:
    """Return how long ago it was, as `3 min`; a dash where that is not known. `now` is by the same clock."""
    return duration(max(0.0, (now - value).total_seconds())) if value is not None else "–"


@pass_context
def when(context: Context, value: datetime | None, now: datetime | None = None) -> Markup:
    """Return a moment as HTML, with the whole time in its title: `3 min ago`, or the time itself where the reader wants
    exact times, or `now` is not given.
    """
    is_exact = now is None or context.get("exact")
    return _moment(value, time(value) if is_exact or now is None else f"{ago(value, now)} ago")


@pass_context
def lasting(context: Context, since: datetime | None, now: datetime) -> Markup:
    """Return since when something is so, as `for 3 min`, or with the time itself where the reader wants exact times."""
    return _moment(since, f"since {time(since)}" if context.get("exact") else f"for {ago(since, now)}")


@pass_context
def clock(context: Context, value: datetime, now: datetime) -> Markup:
    """Return a moment in UTC as a clock shows it, `22:56:58`, with the day where that is another one, or where the
    reader wants exact times.
    """
    value, today = value.astimezone(UTC), now.astimezone(UTC).date()
    if context.get("exact") or value.year != today.year:
        return _moment(value, f"{value:%Y-%m-%d %H:%M:%S}")
    day = f"{value:%d %b}, " if value.date() != today else ""
    return _moment(value, f"{day}{value:%H:%M:%S}")


def _moment(value: datetime | None, text: str) -> Markup:
    if value is None:
        return Markup("–")
    with suppress(OverflowError):
        value = value.astimezone(UTC)
    return Markup('<time datetime="{}" title="{} UTC">{}</time>').format(
        value.isoformat(), f"{value:%a %d %b %Y, %H:%M:%S}", text
    )


def tone(judgement: Judgement) -> str:
    """Return who must act, as the class of a style: `bad` where somebody is needed, `warn` where it may pass, `good`
    where it moves; empty where there is nothing to say.
    """
    if judgement.needs:
        return "bad"
    return "warn" if judgement.is_trouble else "good" if judgement.state in MOVES else ""


def duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < MINUTE:
        return f"{seconds:.0f} s"
    if seconds < HOUR:
        return f"{seconds / MINUTE:.0f} min"
    return f"{seconds / HOUR:.1f} h" if seconds < 2 * DAY else f"{seconds / DAY:.0f} d"


size = decimal


def number(value: int | None) -> str:
    return f"{value:,}" if value is not None else "–"


def rate(value: float) -> str:
    return f"{value:,.1f}" if value >= SLOWEST else "0"


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

    return Markup(BACKTICKS.sub(shown, str(escape(printable(text)))))


def capital(text: str) -> str:
    """Return a text as the begin of a sentence."""
    return text[:1].upper() + text[1:]


@pass_context
def told(context: Context, text: str, now: datetime) -> Markup:
    """Return a sentence as HTML in which the names of notifications, such as `MARS@4711`, lead to these, and times are
    as `clock` shows them.
    """

    def moment(found: re.Match[str]) -> str:
        with suppress(ValueError):  # an error may have what only looks like a time
            return clock(context, datetime.fromisoformat(found[0]), now)
        return found[0]

    linked = NOTIFICATION.sub(r'<a href="/notification?name=\1%40\2">\g<0></a>', str(escape(printable(text))))
    return Markup(TIME.sub(moment, linked))


def did(action: str) -> str:
    """Return the name of an action, such as `pause-agent`, in words. To drop dead letters is said to erase them."""
    return action.replace("drop-", "erase-").replace("-", " ").capitalize()


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


class Part(Struct, frozen=True):
    """A part of a long list."""

    rows: Sequence[Any]
    page: int
    pages: int
    total: int
    first: int
    """The place of its first row, from 1."""

    @property
    def last(self) -> int:
        return self.first + len(self.rows) - 1


def part_of(rows: Sequence[Any], page: str, size: int = PAGE_ROWS) -> Part:
    """Return a part of a list, by its number from 1; the first one for what is no number, the last one beyond it."""
    pages = max(1, -(-len(rows) // size))
    number = min(pages, max(1, int(page) if page.isdecimal() and len(page) < 9 else 1))
    begin = (number - 1) * size
    return Part(rows[begin : begin + size], number, pages, len(rows), begin + 1)
