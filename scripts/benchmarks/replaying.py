"""Replay: one process reads what a stream holds, without acks."""

from __future__ import annotations

import sys

from benchmarks.ground import Cores, grounded
from benchmarks.rivals import Rivals
from benchmarks.rounds import Contestant, Figures, Say, Size, compete

__all__ = ["replay"]

COUNT = 200_000


def replay(cores: Cores, rivals: Rivals, size: Size, say: Say) -> Figures:
    count = size.count(COUNT)
    contestants = [
        Contestant(name="replay", count=count, command=(sys.executable, "-m", "benchmarks.history_reader")),
        *rivals.contestants({"nats-history": size.count(50_000)}),
    ]
    with grounded(cores) as ground:
        say(f"replay: storing {count:,} notifications")
        ground.fill(count)
        return compete(ground, "replay", contestants, size, say)
