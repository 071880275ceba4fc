"""What chaos does, and when: a plan that follows from its seed."""

from __future__ import annotations

import random
from enum import Enum

from msgspec import Struct

PAUSE_BETWEEN_SECONDS = (0.2, 2.5)


class Kind(Enum):
    KILL = "worker killed"
    TERMINATE = "worker told to stop"
    PAUSE = "worker paused"
    RESTART = "server restarted"
    CRASH = "server killed"
    DELETE = "consumer deleted"


WEIGHTS = {Kind.KILL: 6, Kind.TERMINATE: 5, Kind.PAUSE: 5, Kind.RESTART: 2, Kind.CRASH: 1, Kind.DELETE: 1}
LONGEST_SECONDS = {Kind.KILL: 3.0, Kind.TERMINATE: 3.0, Kind.PAUSE: 8.0, Kind.RESTART: 6.0, Kind.CRASH: 6.0}


class Stroke(Struct, frozen=True, kw_only=True):
    """One deed of chaos."""

    at: float
    """Seconds from the start."""
    kind: Kind
    target: int
    """Which one is struck of those that there are, counted round and round."""
    seconds: float
    """How long what is struck stays away."""


def plan(seed: int, *, duration_seconds: float) -> list[Stroke]:
    """Return the strokes of a run. One may be due while another one lasts."""
    dice, strokes, at = random.Random(seed), list[Stroke](), 1.0
    while at < duration_seconds:
        (kind,) = dice.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))
        seconds = dice.uniform(0.0, LONGEST_SECONDS.get(kind, 0.0))
        strokes.append(Stroke(at=at, kind=kind, target=dice.randrange(1000), seconds=seconds))
        at += dice.uniform(*PAUSE_BETWEEN_SECONDS)
    return strokes
