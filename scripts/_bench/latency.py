"""Latency: from the moment at which a notification is due to be published until its handler runs.

An open loop: what is due is published whether or not what came before is stored, and the time counts from the schedule,
so that waiting is not left out.
"""

from __future__ import annotations

import statistics
import time

import anyio
import anyio.lowlevel
import msgspec

from _bench.filling import make_notifications
from _bench.ground import Cores, Ground, grounded
from _bench.rivals import Rivals
from _bench.rounds import RUN_SECONDS, Figures, Say, Size

PER_SECOND = 1000
COUNT = 20_000
WARM_UP = 1000
"""The first second: connecting, the first calls of everything."""


def delay(cores: Cores, rivals: Rivals, size: Size, say: Say) -> Figures:
    count = WARM_UP + size.count(COUNT)
    figures: Figures = {"latency.agent.p50_ms": [], "latency.agent.p99_ms": [], "latency.agent.max_ms": []}
    with grounded(cores) as ground:
        ground.fill(1)
        for repetition in range(size.repetitions):
            say(f"latency: {repetition + 1} of {size.repetitions}")
            found = sorted(_latencies_ms(ground, count))
            for name, value in zip(figures, (statistics.median(found), _percentile(found, 99), found[-1]), strict=True):
                figures[name].append(value)
    return figures


def _latencies_ms(ground: Ground, count: int) -> list[float]:
    with ground.worker("latency", "schedule", counts=[count]) as (child, _):
        anyio.run(_publish, ground, count)
        ground.marks(child, 1, within_seconds=RUN_SECONDS)
        (line,) = (line for line in child.log_file.read_text().splitlines() if line.startswith("["))
    return msgspec.json.decode(line, type=list[float])[WARM_UP:]


async def _publish(ground: Ground, count: int) -> None:
    async with ground.app("publisher") as app, anyio.create_task_group() as publishing:
        began = time.monotonic_ns()
        for number, wanted in enumerate(make_notifications(count)):
            due = began + number * 1_000_000_000 // PER_SECOND
            while time.monotonic_ns() < due:
                await anyio.lowlevel.checkpoint()  # a timer of the loop's would be up to a millisecond late
            payload = {**wanted.payload, "due_ns": due}
            publishing.start_soon(app.notify, wanted.event_type, wanted.identifier, payload)


def _percentile(rising: list[float], percent: int) -> float:
    return rising[min(len(rising) - 1, len(rising) * percent // 100)]
