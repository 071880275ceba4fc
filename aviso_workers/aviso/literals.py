"""Durations, sizes and numbers, as text and back; and text for people: safe to show or to copy, or a near name.

`config` and `schema` read `retention_time: 7d` and `max_size: 2Gi` through `decode_hook`; `schema` and
`spatial` read and write coordinates and float identifiers, which must be spelled one way only because
their text becomes part of a NATS subject. The grammars are those of aviso-server's configuration. What a
value is used for, and whether zero makes sense there, is decided by the caller.
"""

from __future__ import annotations

import codecs
import difflib
import json
import math
import re
import reprlib
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal, localcontext
from numbers import Real
from typing import Self

SECOND = 1_000_000_000
"""A second in nanoseconds, the unit of JetStream's durations."""
MAX_SHOWN = 256 * 1024
"""The most bytes of a body that are shown to people, and characters of its JSON with indents."""
_JSON_BLANKS = re.compile(r'("(?:[^"\\]|\\.)*")|[ \t\r\n]+')
"""What stands between the tokens of JSON, and (the group) strings, which may hold the same."""
_FLOAT = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_LARGEST_U64 = 2**64 - 1
_LARGEST_I64 = 2**63 - 1
_ALL_DIGITS = 800
"""Enough for the exact value of any float."""

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_BYTES = {
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


class Duration(int):
    """A span of time in whole seconds, written as a number and one unit: `30s`, `10m`, `1h`, `7d`, `2w`."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a literal; the unit may be of either case, and zero is allowed.

        Raises ValueError for every other text, and for more than `9223372036s`: JetStream counts
        nanoseconds in 64 signed bits.
        """
        number, unit = _split(text, _SECONDS, "duration")
        seconds = number * _factor(unit.lower(), _SECONDS, "duration")
        if seconds * SECOND > _LARGEST_I64:
            raise ValueError(f"duration overflow: {text!r} is longer than {_LARGEST_I64 // SECOND}s")
        return cls(seconds)

    def literal(self) -> str:
        """Return the shortest text that `parse` reads back as this duration, such as `7d`."""
        return _shortest(self, _SECONDS)

    __str__ = literal


AnyDuration = float | str | timedelta
"""A duration as an author may give it: a number of seconds, a text such as `30s`, or a timedelta. See `seconds_of`."""
Scalar = str | float
Filter = Mapping[str, Scalar | Collection[Scalar] | Sequence[Sequence[float]] | Mapping[str, Scalar | Sequence[Scalar]]]
"""What a field has to be, by name: a value, one of several values, a polygon, or one operator with its operand."""


def seconds_of(duration: object) -> float:
    """Return the seconds of a duration: of a number, of a text such as `30s`, `10m`, `1h` or `7d`, or of a timedelta.

    Whole seconds are an int. Raises ValueError for anything else, also for a truth value and what is not finite.
    """
    if isinstance(duration, str):
        return int(Duration.parse(duration))
    number = math.nan
    if isinstance(duration, timedelta):
        number = duration.total_seconds()
    elif isinstance(duration, Real) and not isinstance(duration, bool):
        with suppress(OverflowError):
            number = float(duration)
    if not math.isfinite(number):
        raise ValueError(
            f'a duration is a number of seconds, a text such as "30s", or a timedelta; found {duration!r:.100}'
        )
    return int(number) if number.is_integer() else number


class Size(int):
    """A number of bytes, written as a number and one unit: `100K`, `2Gi`; `Ki` is 1024, `K` is 1000."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a literal; case counts. Raises ValueError for zero, plain bytes, and 2^63 bytes or more."""
        number, unit = _split(text, _BYTES, "size")
        if number == 0:
            raise ValueError(f"size value must be greater than zero, not {text!r}")
        size = number * _factor(unit, _BYTES, "size")
        if size > _LARGEST_I64:
            raise ValueError(f"size overflow: {text!r} is more than {_LARGEST_I64} bytes")
        return cls(size)

    def literal(self) -> str:
        """Return the shortest text that `parse` reads back as this size, such as `2Gi`.

        A size that is not a multiple of 1000 or 1024 has no literal and is given as plain digits.
        """
        return _shortest(self, _BYTES)

    __str__ = literal


class SizeLimit(Size):
    """A size, or `unlimited`, which is -1 as JetStream has it."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the size that a text says. Raises ValueError as `Size.parse` does."""
        return cls(-1) if text.strip() == "unlimited" else super().parse(text)

    def literal(self) -> str:
        return "unlimited" if self == -1 else super().literal()

    __str__ = literal


def decode_hook(wanted: type, value: object) -> object:
    """Turn literals into `Duration` and `Size` fields: `msgspec.convert(..., dec_hook=decode_hook)`.

    Raises ValueError or TypeError, to both of which msgspec adds the path of the field.
    """
    if not issubclass(wanted, (Duration, Size)):
        raise NotImplementedError(f"{wanted.__name__} is not a literal")
    if isinstance(value, wanted):
        return value
    if not isinstance(value, str):
        example = "7d" if wanted is Duration else "2Gi"
        raise TypeError(f"must be text with a unit, such as {example}, not {value!r}")
    return wanted.parse(value)


def parse_float(text: str) -> float:
    """Read a finite float in Rust's syntax: `1`, `1.`, `.5`, `+2.5`, `1e3`; no blanks, no `_`.

    Raises ValueError.
    """
    if not _FLOAT.fullmatch(text) or not math.isfinite(number := float(text)):
        raise ValueError(f"{reprlib.repr(text)} is not a finite number")
    return number


def float_text(number: float) -> str:
    """Return the shortest digits that give `number` back, without exponent and without a trailing `.0`.

    Where two spellings are as short and as near, it is the one farther from nought, as Rust writes it.
    """
    shortest = Decimal(repr(number))
    if (digit := _half_a_digit(number, shortest)) and float(shortest + digit) == number:
        shortest += digit
    return format(shortest, "f").removesuffix(".0")


def _half_a_digit(number: float, shortest: Decimal) -> Decimal:
    """Return one of the last digit of the spelling where the number is exactly half of it farther from zero, else 0."""
    with localcontext(prec=_ALL_DIGITS):
        exponent = shortest.as_tuple().exponent
        digit = Decimal((0 if number > 0 else 1, (1,), int(exponent)))
        return digit if 2 * (Decimal(number) - shortest) == digit else Decimal()


def _split(text: str, units: Mapping[str, int], kind: str) -> tuple[int, str]:
    """Return the number and the unit of a literal.

    Raises ValueError for the first mistake. The mistakes are looked for in the order of an aviso-server, so that both
    name the same one.
    """
    stripped = text.strip()
    if not stripped:
        raise ValueError(f"{kind} must not be empty")
    unit = stripped.lstrip("0123456789")
    digits = stripped.removesuffix(unit)
    if digits and not unit:
        raise ValueError(f"{kind} must include a unit suffix ({', '.join(units)}), unlike {text!r}")
    significant = digits.lstrip("0") or digits[-1:]
    if not significant or len(significant) > 20 or int(significant) > _LARGEST_U64:
        raise ValueError(f"{kind} value must be an integer followed by a unit, not {text!r}")
    return int(significant), unit


def _factor(unit: str, units: Mapping[str, int], kind: str) -> int:
    if unit not in units:
        raise ValueError(f"{kind} unit must be one of: {', '.join(units)}; not {unit!r}")
    return units[unit]


def _shortest(value: int, units: Mapping[str, int]) -> str:
    whole = [f"{value // factor}{unit}" for unit, factor in units.items() if value % factor == 0]
    return min(whole, key=len, default=int.__repr__(value))


def printable(text: str) -> str:
    """Return the text with what could steer a terminal spelled out: it may be anybody's."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def printable_lines(text: str) -> str:
    """Return a text of several lines with each of them made `printable`."""
    return "\n".join(map(printable, text.split("\n")))


def quoted(name: str) -> str:
    """Return a name as a word for a printed command, so that bash, zsh and fish run nothing of it: it may be anybody's.

    fish reads a backslash also between single quotes, so each one stands outside them.
    """
    return shlex.quote(name).replace("\\", "'\\\\'")


def body_text(data: bytes) -> str | None:
    """Return a body as text for people, as `printable_lines`: JSON with indents where they alone differ, other text as
    it is; None where it is no text. Of a body of more than `MAX_SHOWN` bytes the beginning is returned, and how much
    more there is; JSON whose indented text is longer than that is returned as it is.
    """
    more = len(data) - MAX_SHOWN
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data[:MAX_SHOWN], final=more <= 0)
    except UnicodeDecodeError:
        return None
    if more > 0:
        return f"{printable_lines(text)}\n… and {more:,} bytes more"
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        compact = _JSON_BLANKS.sub(lambda each: each[1] or "", text)
        if json.dumps(found, separators=(",", ":"), ensure_ascii=False) == compact:  # no 1e999, no key twice
            text = _indented(found) or text
    return printable_lines(text)


def _indented(found: object) -> str:
    """Return a value as JSON with indents; nothing where that is too long: nested deeply, blanks are most of it."""
    parts: list[str] = []
    length = 0
    for part in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(found):
        length += len(part)
        if length > MAX_SHOWN:
            return ""
        parts.append(part)
    return "".join(parts)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, such as `1 attempt` or `2,000 attempts`."""
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def time_text(time: datetime) -> str:
    """Return a time to the second, with its zone, which is `Z` for UTC."""
    return time.isoformat(timespec="seconds").replace("+00:00", "Z")


def rfc3339(timestamp_ns: int) -> str:
    """Return nanoseconds since 1970 as a server writes them: RFC 3339 in UTC, without zeros at the end."""
    seconds, fraction = divmod(timestamp_ns, SECOND)
    text = f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}"
    return f"{text}.{fraction:09d}".rstrip("0").rstrip(".") + "Z"


def suggestion(name: str, known: Sequence[str], *, all_of_them: str = "there are", none: str = "none") -> str:
    """Return what to say of a name that is not known: the nearest one that is, or all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"{all_of_them}: {', '.join(known) or none}"
