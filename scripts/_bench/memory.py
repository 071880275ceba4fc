"""Memory: what a worker takes once it is ready, and how much more while it handles notifications."""

from __future__ import annotations

from _bench.ground import Cores, grounded
from _bench.rivals import Rivals
from _bench.rounds import RUN_SECONDS, Figures, Say, Size
from _bench.tally import memory_mib

EARLY, LATE = 200_000, 2_000_000


def remember(cores: Cores, rivals: Rivals, size: Size, say: Say) -> Figures:
    """Return a worker's memory before and after; no figures where the system does not tell it."""
    early, late = size.count(EARLY), size.count(LATE)
    with grounded(cores) as ground:
        with ground.worker("idle", "notifications", counts=[late]) as (child, _):
            ready = memory_mib(child.process.pid)
        if not ready:
            return {}
        say(f"memory: storing {late:,} notifications")
        ground.fill(late)
        say(f"memory: handling {late:,} notifications")
        with ground.worker("worker", "notifications", counts=[early, late]) as (child, _):
            before, after = ground.marks(child, 2, within_seconds=RUN_SECONDS)
    return {
        "memory.worker.ready_mib": [ready["resident_mib"]],
        "memory.worker.growth_mib": [(after.resident_mib or 0) - (before.resident_mib or 0)],
        "memory.worker.peak_mib": [after.peak_mib or 0],
    }
