"""What untrusted text costs: four times the text takes about four times the time, whatever the text is."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import aviso_agents
import aviso_workers
from aviso_workers.aviso import payloads, spatial
from aviso_workers.aviso.spatial import Box
from aviso_workers.config.conversion import Reader
from aviso_workers.config.documents import KeyPlace
from aviso_workers.errors import UndecodableError
from aviso_workers.jetstream import subjects

PACKAGES = (aviso_workers, aviso_agents)
LENGTH = 500
TIMES_LONGER = 4
MAX_GROWTH = 9.0
"""Linear is 4, quadratic is 16."""
SHORT_SECONDS = 0.005
"""What takes less is not judged: so little says nothing about growth. A quadratic pattern takes longer."""
UNITS = (
    "0",
    "1",
    "a",
    "A",
    " ",
    "\n",
    ".",
    ",",
    "-",
    "_",
    "=",
    "/",
    "%",
    "1.",
    ".1",
    "0a",
    "a.",
    " a",
    "1 ",
    "\\",
    "1_",
)
NO_END = "\x00!"
"""Text that no pattern takes at its end, so that it tries all other ways."""


METHODS = {"fullmatch", "match", "search", "findall", "finditer", "sub", "split"}


def sources() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        folder = Path(package.__path__[0])
        for source in sorted(folder.rglob("*.py")):
            yield f"{source.relative_to(folder)}", source.read_text()


SOURCES = dict(sources())
WITH_PATTERNS = [source for source, text in SOURCES.items() if "import re\n" in text]
"""Only these are parsed, because every process of pytest that collects tests does it."""


def methods_of(name: str) -> set[str]:
    """How the pattern of this name is used, wherever that is. One that has no name is used by one method."""
    if name in METHODS or name == "compile":
        return {name}
    used = re.compile(rf"\b{name}\.(\w+)")
    return METHODS.intersection(chain.from_iterable(used.findall(text) for text in SOURCES.values() if name in text))


def written_patterns() -> Iterator[tuple[str, re.Pattern[Any], str]]:
    """The regular expressions that are written in our sources, with their places and names, or the method of each."""
    for source in WITH_PATTERNS:
        nodes = list(ast.walk(ast.parse(SOURCES[source])))
        names = {id(node.value): node.targets[0] for node in nodes if isinstance(node, ast.Assign)}
        for node in nodes:
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="re"), attr=method),
                    args=[ast.Constant(value=str() | bytes() as written), *_],
                ):
                    target = names.get(id(node))
                    name = target.id if method == "compile" and isinstance(target, ast.Name) else method
                    yield f"{source}:{node.lineno}", re.compile(written), name


WRITTEN = {place: (pattern, name) for place, pattern, name in written_patterns()} | {
    "subjects, >": (subjects.pattern((">",)), "fullmatch"),
    "subjects, wildcards": (subjects.pattern(("mars.*.*.*.od", "mars.*.>", "*.*.1")), "fullmatch"),
}


def beginning(pattern: re.Pattern[Any]) -> str:
    """The plain characters that every text begins with that the pattern takes."""
    literal = pattern.pattern.decode() if isinstance(pattern.pattern, bytes) else pattern.pattern
    plain = re.match(r"(?:[\w -]|\\\.)*", literal.lstrip("(^"))
    return (plain[0] if plain else "").replace("\\.", ".")


def seconds(deed: Callable[[], object]) -> float:
    """The shortest of three runs."""

    def once() -> float:
        began = time.process_time()
        deed()
        return time.process_time() - began

    return min(once() for _ in range(3))


def growth(deed: Callable[[int], object]) -> float:
    """How many times longer the deed takes with `TIMES_LONGER` as much; 1 where it is short all the same."""
    longer = seconds(lambda: deed(LENGTH * TIMES_LONGER))
    return 1.0 if longer < SHORT_SECONDS else longer / max(seconds(lambda: deed(LENGTH)), 1e-9)


@pytest.mark.parametrize("place", WRITTEN)
def test_no_pattern_takes_longer_than_its_text(place: str) -> None:
    pattern, name = WRITTEN[place]
    methods = methods_of(name)
    begin = beginning(pattern)

    def tried(text: str) -> None:
        subject = text.encode() if isinstance(pattern.pattern, bytes) else text
        if "fullmatch" in methods:
            pattern.fullmatch(subject)
        if "match" in methods:
            pattern.match(subject)
        if methods - {"fullmatch", "match"}:
            pattern.findall(subject)

    def repeated(unit: str, length: int) -> None:
        tried(begin + unit * length + NO_END)

    deeds: dict[str, Callable[[int], object]] = {f"{begin!r}, then {unit!r}": partial(repeated, unit) for unit in UNITS}
    if begin:
        deeds[f"{begin!r} again and again"] = lambda length: tried(begin * length)

    slow = {what: round(grown, 1) for what, deed in deeds.items() if (grown := growth(deed)) > MAX_GROWTH}

    assert methods, f"{place}: nobody uses {pattern.pattern!r}"
    assert not slow, f"{place}: {pattern.pattern!r} takes so many times longer for {TIMES_LONGER} times the text"


@pytest.mark.parametrize("header", ["1" * 64_000 + "x", "1," * 32_000, "(" * 64_000, "0." + "1" * 64_000, " " * 64_000])
def test_a_header_that_is_no_bounding_box_is_refused_within_no_time(header: str) -> None:
    def parse() -> None:
        with pytest.raises(ValueError, match="bounding box"):
            Box.parse(header)

    assert seconds(parse) < 0.02


@pytest.mark.parametrize(
    "geometry",
    ["1," * 500_000, "1" * 1_000_000, "(" + "1e-310,2e-310," * 70_000 + "1e-310,2e-310)", "[" * 1_000_000],
    ids=["many numbers", "a long number", "many points", "deep"],
)
def test_a_polygon_of_more_points_than_a_cloud_has_is_refused_within_no_time(geometry: str) -> None:
    def parse() -> None:
        with pytest.raises(ValueError, match=r"points|array|number"):
            spatial.parse_polygon(geometry)

    assert seconds(parse) < 0.1


@pytest.mark.parametrize("number", ["1e308", "1.7976931348623157e308", "5e-324", "1e0308"])
def test_a_payload_of_numbers_that_are_slow_to_read_is_refused_within_no_time(number: str) -> None:
    decode = payloads.decoder(Any)

    def read(times: int) -> object:
        return decode(f'{{"a": [{", ".join([number] * times)}]}}'.encode())

    def refuse() -> None:
        with pytest.raises(UndecodableError, match="more than 2000 numbers"):
            read(1_000_000 // (len(number) + 2))

    assert seconds(refuse) < 0.2
    assert seconds(lambda: read(2000)) < 0.2


def test_a_polygon_whose_points_are_next_to_nothing_apart_is_compared_at_once() -> None:
    ring = [(0.0 if each % 2 else 1e-310 * (each + 1), 1e-310 * (each + 3)) for each in range(spatial.MAX_POINTS - 1)]
    polygon = spatial.parse_polygon([*map(list, ring), list(ring[0])])

    assert seconds(lambda: polygon.contains((1e-310, 1e-309))) < 0.3


def test_a_mistake_takes_no_longer_to_find_among_many() -> None:
    """Whoever writes what an app declares may make thousands of them."""

    def read(times: int) -> None:
        reader = Reader(unused="")
        reader.places[""] = KeyPlace(rank=0, line=0, source="app b")
        for number in range(times):
            reader.refuse(f"notification_schema.z{number}.identifier", "is missing")
            assert reader.is_wrong(f"notification_schema.z{number}")
            assert not reader.is_wrong("notification_schema.z")

    assert growth(read) < MAX_GROWTH
