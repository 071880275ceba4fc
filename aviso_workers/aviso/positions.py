"""Where a replay starts and ends: a sequence or a date, as an aviso-server reads `from_id` and `from_date`.

Pure. Both ends are inclusive.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from msgspec import Struct

from aviso_workers.aviso.literals import Duration
from aviso_workers.errors import InvalidPositionError

LARGEST_ID = 2**64 - 1
EARLIEST, LATEST = datetime(1678, 1, 1, tzinfo=UTC), datetime(2262, 1, 1, tzinfo=UTC)
"""Nothing is stored before or after: a server counts nanoseconds in 64 bits, and takes other times for quite others."""
SECONDS_DIGITS = 11
"""A number of at most so many digits is seconds since 1970, a longer one milliseconds."""


DAYS_AGO = {"today": 0, "yesterday": 1}
WITHOUT_SECONDS = re.compile(r"(\d{4}-\d{2}-\d{2})(?:[T ](\d{2}:\d{2})(Z|[+-]\d{2}:\d{2})?)?", re.ASCII | re.IGNORECASE)


class Position(Struct, frozen=True, kw_only=True):
    """A sequence, a time, or neither."""

    sequence: int | None = None
    time: datetime | None = None


def position(
    identifier: int | str | None,
    date: datetime | int | str | None,
    *,
    names: tuple[str, str] = ("from_id", "from_date"),
) -> Position:
    """Return the position that one of the two gives. `names` are what the caller calls them.

    Raises `InvalidPositionError` where both are given or one cannot be read.
    """
    sequence = None if identifier is None else parse_id(identifier, name=names[0])
    time = None if date is None else parse_date(date, name=names[1])
    if sequence is not None and time is not None:
        raise InvalidPositionError(f"cannot specify both {names[0]} and {names[1]}")
    return Position(sequence=sequence, time=time)


def parse_start(value: int | str | datetime) -> str:
    """Return where an agent starts, in one spelling: `all`, `new`, a sequence, or an ISO time in UTC.

    Digits are a sequence, not a time. Raises `InvalidPositionError`.
    """
    if isinstance(value, datetime):
        return parse_date(value, name="start").isoformat()
    text = str(value).strip()
    if text in ("all", "new"):
        return text
    if isinstance(value, int) or (text.isascii() and text.isdigit()):
        return str(parse_id(text, name="start"))
    return parse_date(text, name="start").isoformat()


def parse_id(value: int | str, *, name: str = "from_id") -> int:
    """Return a stream sequence; 0 is the beginning. Raises `InvalidPositionError`."""
    text = str(value)
    if not re.fullmatch(r"\+?[0-9]+", text, re.ASCII):
        raise InvalidPositionError(f"{name} must be a sequence number, found {text!r}")
    digits = text.lstrip("+0") or "0"
    if len(digits) > len(str(LARGEST_ID)) or int(digits) > LARGEST_ID:
        raise InvalidPositionError(f"{name} must be at most {LARGEST_ID}, found {text}")
    return int(digits)


def parse_date(value: datetime | int | str, *, name: str = "from_date") -> datetime:
    """Return a point in time, UTC: a datetime, seconds or milliseconds since 1970, or an ISO date with a time.

    A time without an offset is UTC. A date alone is refused, because it says no time. What a server cannot count is the
    earliest or the latest that it can. Raises `InvalidPositionError`.
    """
    return min(max(_date(value, name), EARLIEST), LATEST)


def parse_moment(text: str, *, name: str, now: datetime) -> datetime:
    """Return the time that a person means: a day, `today` or `yesterday`, each by its beginning in UTC; how long ago,
    such as `2h`; a time without seconds; or what `parse_date` reads. Raises `InvalidPositionError`.
    """
    said = text.strip().lower()
    if said in DAYS_AGO:
        return day_of(now) - timedelta(DAYS_AGO[said])
    with suppress(ValueError, OverflowError):
        return max(now - timedelta(seconds=Duration.parse(said)), EARLIEST)
    if found := WITHOUT_SECONDS.fullmatch(said):
        said = f"{found[1]}T{found[2] or '00:00'}:00{found[3] or 'Z'}"
    try:
        return parse_date(said, name=name)
    except InvalidPositionError as error:
        raise InvalidPositionError(
            f"{name} must be a day such as 2026-11-20, a time such as 2026-11-20T06:00Z, today, yesterday, or how long "
            f"ago, such as 2h, found {text!r}"
        ) from error


def day_of(moment: datetime) -> datetime:
    """Return the beginning of a day, in UTC."""
    return datetime(moment.year, moment.month, moment.day, tzinfo=UTC)


def parse_position(text: str, *, name: str, now: datetime) -> Position:
    """Return the position that a person means: a sequence, a time as `parse_moment` reads it, `all` from the first
    stored notification on, or `new`. Digits are a sequence and no time: mistaken for one, millions would be handled
    again.

    Raises `InvalidPositionError`.
    """
    if text in ("all", "new"):
        return Position(sequence=1) if text == "all" else Position()
    if text.isascii() and text.isdigit():
        return Position(sequence=parse_id(text, name=name))
    return Position(time=parse_moment(text, name=name, now=now))


def _date(value: datetime | int | str, name: str) -> datetime:
    if isinstance(value, datetime):
        try:
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).astimezone(UTC)
        except OverflowError:  # of the first or the last day that Python has
            return value.replace(tzinfo=UTC)
    if not isinstance(value, int | str) or isinstance(value, bool):
        raise InvalidPositionError(f"{name} must be a datetime, a text, or whole seconds since 1970, found {value!r}")
    text = str(value).strip()
    if re.fullmatch(r"-[0-9]+", text, re.ASCII):
        raise InvalidPositionError(f"{name}: negative unix timestamps are not supported, found {text!r}")
    try:
        if re.fullmatch(r"\+?[0-9]+", text, re.ASCII):
            digits = text.lstrip("+0") or "0"
            return datetime.fromtimestamp(int(digits) / (1 if len(digits) <= SECONDS_DIGITS else 1000), UTC)
        if re.fullmatch(r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}(\.\d+)?(Z|[+-]\d{2}:\d{2})?", text, re.ASCII | re.I):
            # Python keeps six digits of a fraction.
            time = datetime.fromisoformat(re.sub(r"\.(\d{6})\d+", r".\1", text.upper()))
            return (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidPositionError(f"{name}: no such time, {text!r}: {error}") from error
    raise InvalidPositionError(
        f"{name} must be a date with a time such as 2026-11-20T06:00:00Z, or seconds or milliseconds since 1970, "
        f"found {value!r}"
    )
