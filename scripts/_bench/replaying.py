"""Replay: one process reads what a stream holds, without acks."""

from __future__ import annotations

import sys

from _bench.ground import Cores, grounded
from _bench.rivals import Rivals
from _bench.rounds import Contestant, Figures, Say, Size, compete

COUNT = 200_000


def replay(cores: Cores, rivals: Rivals, size: Size, say: Say) -> Figures:
    count = size.count(COUNT)
    contestants = [
        Contestant(name="replay", count=count, command=(sys.executable, "-m", "_bench.history_reader")),
        *rivals.contestants({"nats-history": size.count(50_000)}),
    ]
    with grounded(cores) as ground:
        say(f"replay: storing {count:,} notifications")
        ground.fill(count)
        return compete(ground, "replay", contestants, size, say)
