"""Three hours of `mars` notifications, made from a seed, with steps left out on purpose.

Pure. A cycle is one run of a forecast in one stream: its schedule says which steps it should have, and what is left
out of some cycles is known here, so that a report on missing steps can be checked. The notifications come in the order
in which a site would produce them: cycles overlap, each goes through its steps at a pace of its own. Every one has a
subject of its own, since a stream keeps one notification per subject.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

SEED = 20261120
MINUTES = 180
DATE = "20261120"
STARTS = (("20261119", "0000"), ("20261119", "1200"), ("20261120", "0000"), ("20261120", "1200"))

DETERMINISTIC = (*range(91), *range(93, 145, 3), *range(150, 241, 6))
ENSEMBLE = (*range(0, 145, 3), *range(150, 361, 6))
STREAMS: Mapping[str, tuple[int, ...]] = {
    "oper": DETERMINISTIC,
    "wave": DETERMINISTIC,
    "enfo": ENSEMBLE,
    "waef": ENSEMBLE,
}
"""The steps of each stream, in hours."""

OPERATIONAL = ("0001", "0079")
INCOMPLETE_CYCLES = 9
MAX_LEFT_OUT = 6
STUMBLE_ONE_IN = 1500


class Cycle(Struct, frozen=True, kw_only=True, rename={"class_": "class"}):
    """A run of a forecast in one stream."""

    class_: str
    expver: str
    domain: str
    date: str
    time: str
    stream: str
    steps: tuple[int, ...]

    @property
    def key(self) -> tuple[str, ...]:
        """What tells it from other cycles."""
        return (self.class_, self.expver, self.domain, self.date, self.time, self.stream)


class Slice(Struct, frozen=True, kw_only=True):
    """What is published, and what should have been."""

    schedule: tuple[Cycle, ...]
    """Every cycle with all the steps that are expected of it."""
    left_out: Mapping[tuple[str, ...], tuple[int, ...]]
    """The steps that are not published, by the key of their cycle."""
    lines: tuple[dict[str, Any], ...]
    """The notifications, as `aviso-workers notify --file` reads them."""

    @property
    def stumbling(self) -> int:
        """How many of the notifications fail on purpose when they are handled for the first time."""
        return sum(stumbles(line["identifier"]) for line in self.lines)


def make_slice(seed: int = SEED, *, experiments: int = 12) -> Slice:
    """Return the slice of this seed: two operational runs, and four of each research experiment, in all streams."""
    chance = random.Random(seed)
    schedule = tuple(_schedule(chance, experiments))
    left_out = {cycle.key: _leave_out(chance, cycle.steps) for cycle in chance.sample(schedule, INCOMPLETE_CYCLES)}
    timed = [
        (minute, line) for cycle in schedule for minute, line in _produce(chance, cycle, left_out.get(cycle.key, ()))
    ]
    timed.sort(key=lambda pair: pair[0])
    return Slice(schedule=schedule, left_out=left_out, lines=tuple(line for _, line in timed))


def stumbles(identifier: Mapping[str, Any]) -> bool:
    """Return whether the sample agent fails on purpose when it handles this one for the first time. Few do."""
    return zlib.crc32(_path(identifier).encode()) % STUMBLE_ONE_IN == 0


def _schedule(chance: random.Random, experiments: int) -> Iterator[Cycle]:
    runs = [("od", expver, DATE, "0000") for expver in OPERATIONAL]
    for number in range(experiments):
        expver = f"i{number:02x}{chance.choice('abcdefgh')}"
        runs += [("rd", expver, date, time) for date, time in STARTS]
    for class_, expver, date, time in runs:
        for stream, steps in STREAMS.items():
            yield Cycle(class_=class_, expver=expver, domain="g", date=date, time=time, stream=stream, steps=steps)


def _leave_out(chance: random.Random, steps: tuple[int, ...]) -> tuple[int, ...]:
    """Either the last steps, as of a run that ended early, or some from anywhere."""
    count = chance.randint(1, MAX_LEFT_OUT)
    return steps[-count:] if chance.random() < 0.3 else tuple(sorted(chance.sample(steps, count)))


def _produce(chance: random.Random, cycle: Cycle, left_out: tuple[int, ...]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield the notifications of a cycle with the minutes at which they come."""
    lasts = chance.uniform(40, 100)
    begins = chance.uniform(0, MINUTES - lasts)
    for position, step in enumerate(cycle.steps):
        if step not in left_out:
            yield begins + lasts * position / len(cycle.steps), _line(chance, cycle, step)


def _line(chance: random.Random, cycle: Cycle, step: int) -> dict[str, Any]:
    identifier = {
        "class": cycle.class_,
        "expver": cycle.expver,
        "domain": cycle.domain,
        "date": cycle.date,
        "time": cycle.time,
        "stream": cycle.stream,
        "step": step,
    }
    path = _path(identifier)
    return {
        "event": "mars",
        "identifier": identifier,
        "payload": {"location": f"s3://forecasts/{path}.grib2", "size": chance.randint(200_000, 9_000_000)},
        "id": f"mars:{path}",
    }


def _path(identifier: Mapping[str, Any]) -> str:
    fields = ("class", "expver", "domain", "date", "time", "stream", "step")
    return "/".join(str(identifier[field]) for field in fields)
