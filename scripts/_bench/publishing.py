"""Publish: many notifications are stored by one process, which waits for all acknowledgements."""

from __future__ import annotations

import sys

from _bench.ground import Cores, grounded
from _bench.rivals import Rivals
from _bench.rounds import Contestant, Figures, Say, Size, compete

COUNT = 100_000


def publish(cores: Cores, rivals: Rivals, size: Size, say: Say) -> Figures:
    count = size.count(COUNT)
    contestants = [
        Contestant(name="notify-many", count=count, command=(sys.executable, "-m", "_bench.bulk_publisher")),
        *rivals.contestants({"nats-publish-async": count}),
    ]
    with grounded(cores) as ground:
        ground.fill(1)
        return compete(ground, "publish", contestants, size, say)
