"""Consume: a stream that is full already is handled and acked by one process, or by two, or from three servers."""

from __future__ import annotations

import sys

from _bench.ground import Cores, grounded
from _bench.rivals import Rivals
from _bench.rounds import Contestant, Figures, Say, Size, compete

COUNT = 200_000
NATSIO_SINCE = (3, 13)
"""The first Python that natsio is for."""
REPLICATED_COUNT = 50_000
REPLICATED_SERVERS = 3


def consume(cores: Cores, rivals: Rivals, size: Size, say: Say) -> Figures:
    count = size.count(COUNT)
    contestants = [
        *(
            [Contestant(name="two-processes", count=count, app="notifications", processes=2, acks=True)]
            if cores.has_room_for(2)
            else []
        ),
        *_on_one_core(count),
        *rivals.contestants(
            {
                "nats-fetch": size.count(50_000),
                "nats-callback": size.count(100_000),
                **({"natsio-consume": size.count(100_000)} if sys.version_info >= NATSIO_SINCE else {}),
                "faststream 1": size.count(10_000),
                "faststream 64": size.count(10_000),
                "faststream-pull": size.count(10_000),
                "faststream-batch": size.count(50_000),
            },
            acks=True,
        ),
    ]
    with grounded(cores) as ground:
        say(f"consume: storing {count:,} notifications")
        ground.fill(count)
        return compete(ground, "consume", contestants, size, say)


def consume_replicated(cores: Cores, rivals: Rivals, size: Size, say: Say) -> Figures:
    count = size.count(REPLICATED_COUNT)
    with grounded(cores, servers=REPLICATED_SERVERS) as ground:
        say(f"replicated: storing {count:,} notifications")
        ground.fill(count)
        return compete(ground, "replicated", _on_one_core(count), size, say)


def _on_one_core(count: int) -> list[Contestant]:
    return [
        Contestant(name="agent", count=count, app="notifications", acks=True),
        Contestant(name="batch", count=count, app="batches", acks=True),
        Contestant(name="bare-loop", count=count, command=(sys.executable, "-m", "_bench.bare_loop"), acks=True),
    ]
