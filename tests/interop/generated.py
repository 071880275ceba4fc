"""Notifications and filters made by a seeded generator, for tests that put them to both sides.

The seed is fixed, so that a run can be repeated; INTEROP_SEED sets another, and every test that uses
one prints it where it fails.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SEED = int(os.environ.get("INTEROP_SEED", "20261123"))

_ALWAYS_WRONG: tuple[Any, ...] = (None, [], ["x"], {}, {"eq": 1}, "", "*")
_TEXTS = (
    *("a", "A", "0001", "a.b", "a*b", ">", "a>b", "%", "%2E", "a%2Eb", "a%zz", "100%", "..", "a..b", "."),
    *("é", "É", "straße", "日本", "😀", "x" * 300, "é" * 200, "/a/b", "$SYS", "a,b", "(1,2)", '"', "\\", "a+b", "~"),
    *("a b", " a", "a ", "a\tb", "a\nb", "a\r\nb", "\x00", "\x7f", "\u00a0", "\u2028", "\ufeff"),
    *(True, False, 0, 1, -7, 1.5, 1.0, 1e3, 1e16, 1e-7, 123456789012345678),
)
_SHORT_TEXTS = ("abcde", "abcdef", "éé", "ééé", "日", "日本", "a.b.c", "%%%%%", "*****", "a", 12345, 123456)
_KINDS = (
    "air",
    "AIR",
    "Air",
    "sea",
    "SEA",
    "Straße",
    "STRASSE",
    "straße",
    "STRAßE",
    "land",
    " air",
    "air ",
    "ſea",
    1,
    True,
)
_WHOLE = (
    *(
        "0",
        "00",
        "-0",
        "+0",
        "7",
        "007",
        "+7",
        "-7",
        "-007",
        "50",
        "51",
        "-50",
        "-51",
        "0050",
        0,
        7,
        -7,
        50,
        51,
        5.0,
        5.5,
    ),
    *(
        "5.0",
        "1e1",
        " 7",
        "7 ",
        "7_0",
        "٣",
        "--7",
        "+-7",
        "+",
        "-",
        "0x7",
        "9223372036854775807",
        "9223372036854775808",
    ),
    *("-9223372036854775808", "-9223372036854775809", "0" * 30 + "7", 9223372036854775807, True, "Infinity", "seven"),
)
_FRACTIONS = (
    *(
        "0",
        "-0",
        "+0",
        "0.0",
        "-0.0",
        "1",
        "1.",
        ".5",
        "-.5",
        "+.5",
        "1.50",
        "01.5",
        "1e2",
        "1E2",
        "1e+2",
        "1e-7",
        "1e-300",
    ),
    *(
        "1000.5",
        "1000.50000000000001",
        "1000.6",
        "-1000.5",
        "-1000.6",
        "0.1",
        "0.30000000000000004",
        "5e-324",
        "2e-324",
    ),
    *(
        "nan",
        "NaN",
        "inf",
        "-inf",
        "Infinity",
        "1e400",
        "1e",
        "e1",
        ".",
        "+",
        "",
        " 1",
        "1 ",
        "1,5",
        "1_0",
        "0x1p3",
        "٣",
    ),
    *(0, 1, -1, 0.1, 1.5, -0.0, 1e2, 1e-7, 2.5e-5, 123.456, 1000.5, 1001, True, 999.9999999999999, 100.0, 3.0e2),
)
_DAYS = (
    *("2026-11-20", "20261120", "2026-324", "2024-366", "2025-366", "2025-000", "2025-001", "2025-365", "2024-02-29"),
    *(
        "2025-02-29",
        "2025-02-30",
        "2025-13-01",
        "2025-00-10",
        "2025-1-1",
        "2025-1-01",
        "2025-01-1",
        "2025/12/25",
        "2025",
    ),
    *(
        "2025-12-25T00:00:00",
        "2025-12-25 ",
        " 2025-12-25",
        "25-12-2025",
        "251225",
        "0001-01-01",
        "0000-01-01",
        "9999-12-31",
    ),
    *("10000-01-01", "+2025-01-01", "-2025-01-01", "2025-W01-1", "2025-1", "2025-01", "2025-99", "202511", "00010101"),
    *("00000101", "99991231", "20250230", "2025-12-2５", "today", 20261120, 20260230, 2026, 20261120.0),
)
_TIMES = (
    *(
        "0",
        "9",
        "09",
        "23",
        "24",
        "9:15",
        "09:15",
        "0915",
        "915",
        "930",
        "24:00",
        "2400",
        "23:59",
        "2359",
        "2360",
        "12:60",
    ),
    *("12:5", "1:05", "12:05:00", "120500", "12:", ":30", " 12", "12 ", "-1", "+9", "1٣", "12h", "T12", "00:00", "000"),
    *(0, 9, 12, 24, 915, 1200, 1260, 9.0, 12.5, True),
)
_VERSIONS = (
    *("", "1", "01", "0001", "00001", "42", "12345", "4294967295", "4294967296", "+7", "-7", "prod", "PROD", "Prod-1"),
    *(
        "a.b",
        "1.5",
        "*",
        "é",
        "É",
        "١",
        "0x1",
        "+",
        "1 ",
        " 1",
        "İ",
        "ΑΣ",
        1,
        42,
        -1,
        1.0,
        True,
        "00000000004294967295",
    ),
)
_POOLS: Mapping[str, tuple[Any, ...]] = {
    "kind": _KINDS,
    "count": _WHOLE,
    "level": _FRACTIONS,
    "day": _DAYS,
    "iso_day": _DAYS,
    "time": _TIMES,
    "expver": _VERSIONS,
    "version": _VERSIONS,
    "text": _TEXTS,
    "short": _SHORT_TEXTS,
}
_PAYLOADS: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 1e16, 1e-7, "", "text", "é\u2028\x00", [], [1, [2, None]], {}),
    *({"z": 1, "a": {"y": [1.0, -0.0], "é": None}, "A": 2}, {"n": 9007199254740993}, {"n": 18446744073709551615}),
)
PLAIN: Mapping[str, Any] = {
    "kind": "air",
    "count": "7",
    "level": "1.5",
    "day": "20261120",
    "iso_day": "2026-11-20",
    "time": "1200",
    "expver": "1",
    "version": "2",
    "text": "a",
    "short": "b",
}


def single_changes() -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield an identifier for each value that a generator knows, with all other fields plain, and a payload."""
    for field, pool in _POOLS.items():
        for value in (*pool, *_ALWAYS_WRONG):
            yield {**PLAIN, field: value}, None
        yield {name: value for name, value in PLAIN.items() if name != field}, None
    for extra in ("unknown", "Kind", "point", "polygon", ""):
        yield {**PLAIN, extra: "1"}, None
    for payload in _PAYLOADS:
        yield dict(PLAIN), payload


def notifications(source: random.Random, count: int) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield identifiers of which up to three fields are unusual, and payloads."""
    for _ in range(count):
        identifier = dict(PLAIN)
        for field in source.sample(sorted(_POOLS), source.randint(0, 3)):
            identifier[field] = source.choice(_POOLS[field])
        for field in sorted(_POOLS):
            if source.random() < 0.01:
                del identifier[field]
        yield identifier, source.choice(_PAYLOADS)


def _corner(source: random.Random) -> tuple[float, float]:
    """A corner on a coarse grid, so that corners and edges often meet, and now and then anywhere."""
    match source.randrange(8):
        case 0:
            return round(source.uniform(-10, 10), 6), round(source.uniform(-10, 10), 6)
        case 1:  # tenths are no exact numbers: what lies on an edge on paper is beside it by a rounding
            return source.randrange(-60, 61) / 10, source.randrange(-60, 61) / 10
        case _:
            return float(source.randrange(-6, 7)), float(source.randrange(-6, 7))


def _ring(source: random.Random) -> list[tuple[float, float]]:
    south, west = _corner(source)
    height, width = source.choice((0.5, 1, 2, 5)), source.choice((0.5, 1, 2, 5))
    match source.randrange(10):
        case 0:  # at the antimeridian, or across it as the planar arithmetic has it: around the world
            west = source.choice((179.0, -180.0, -179.5, 175.0))
            east = source.choice((180.0, 179.5, -180.0, -175.0))
            return [(south, west), (south + height, west), (south + height, east), (south, east)]
        case 1:  # at a pole
            south = source.choice((-90.0, 85.0, 89.5))
            return [(south, west), (min(90.0, south + height), west), (min(90.0, south + height), west + width)]
        case 2:  # without area: a line there and back
            return [(south, west), (south + height, west + width), (south + 2 * height, west + 2 * width)]
        case 3:  # a point, spelled four times
            return [(south, west)] * 3
        case 4 | 5:  # any corners: edges may cross each other
            return [_corner(source) for _ in range(source.randint(3, 7))]
        case _:
            ring = [(south, west), (south + height, west), (south + height, west + width), (south, west + width)]
            return ring if source.random() < 0.5 else ring[::-1]


def _spelled(source: random.Random, ring: list[tuple[float, float]]) -> str:
    closed = [*ring, ring[0]]
    separator = source.choice((",", ", "))
    text = separator.join(str(number) for corner in closed for number in corner)
    return source.choice((f"({text})", text))


def places(source: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Yield identifiers of the event type `area`, each with its own number."""
    for number in range(count):
        yield {
            "number": number,
            "kind": source.choice(("air", "SEA", "Land")),
            "count": source.randint(-50, 50),
            "level": source.choice((0, -0.0, 1.5, -1.5, source.randrange(-100, 101) / 10, source.randint(-1000, 1000))),
            "polygon": _spelled(source, _ring(source)),
        }


def _comparison(source: random.Random, operands: Sequence[float]) -> dict[str, Any]:
    operator = source.choice(("eq", "in", "gt", "gte", "lt", "lte", "between"))
    match operator:
        case "in":
            return {operator: [source.choice(operands) for _ in range(source.randint(1, 5))]}
        case "between":
            return {operator: sorted(source.choice(operands) for _ in range(2))}
        case _:
            return {operator: source.choice(operands)}


def filters(source: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Yield filters of the event type `area`: of one to three fields, or by place, or both."""
    for _ in range(count):
        wanted: dict[str, Any] = {}
        if source.random() < 0.5:
            wanted["kind"] = source.choice(("AIR", "sea", {"eq": "Air"}, {"in": ["sea", "LAND"]}))
        if source.random() < 0.5:
            wanted["count"] = source.choice((_comparison(source, range(-50, 51)), source.randint(-50, 50)))
        if source.random() < 0.5:
            wanted["level"] = source.choice(
                (
                    _comparison(source, [number / 10 for number in range(-100, 101)]),
                    0,
                    -0.0,
                    1.5,
                    {"eq": 0},
                    {"lte": -0.0},
                )
            )
        match source.randrange(4):
            case 0:
                latitude, longitude = _corner(source)
                wanted["point"] = f"{latitude},{longitude}"
            case 1 | 2:
                wanted["polygon"] = _spelled(source, _ring(source))
        yield wanted


def clouds(source: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Yield identifiers of an event type of point clouds, each with its own number."""
    for number in range(count):
        yield {"number": number, "point_cloud": [list(_corner(source)) for _ in range(source.randint(1, 6))]}


def areas(source: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Yield filters by polygon."""
    for _ in range(count):
        yield {"polygon": _spelled(source, _ring(source))}
