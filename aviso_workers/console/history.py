"""The rates of the last quarter of an hour, as the console has seen them while somebody looked, and how they are drawn.
Prometheus keeps those of longer times.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from itertools import pairwise

from msgspec import Struct

POINTS = 60
STEP_SECONDS = 15
WIDTH, HEIGHT = 88, 18

Agent = tuple[str, str]


class Rates(Struct, frozen=True, kw_only=True):
    """Notifications handled in a second, by app and agent."""

    by_agent: Mapping[Agent, list[float]] = {}
    """Values at equal distances; NaN where none is known."""
    span: str = f"{POINTS * STEP_SECONDS // 60} min"
    """The time that they cover."""

    @property
    def total(self) -> list[float]:
        """The values of all agents together."""
        columns = [
            [value for value in column if math.isfinite(value)] for column in zip(*self.by_agent.values(), strict=True)
        ]
        return [sum(column) if column else math.nan for column in columns]


class Recent:
    """The rates of the last quarter of an hour, as the console has seen them while somebody looked."""

    def __init__(self) -> None:
        self._seen = deque[tuple[float, Mapping[Agent, int]]](maxlen=POINTS + 1)
        """When it has looked, by a monotonic clock, and the deliveries of each agent until then."""
        self.rates = Rates()
        """As they were at the last point."""

    def add(self, at: float, deliveries: Mapping[Agent, int]) -> None:
        """Take note of the deliveries of each agent until now."""
        if not self._seen or at - self._seen[-1][0] >= STEP_SECONDS:
            self._seen.append((at, deliveries))
            self.rates = self._rates_at(at)

    def _rates_at(self, now: float) -> Rates:
        found = defaultdict[Agent, list[float]](lambda: [math.nan] * POINTS)
        for (before, former), (after, later) in pairwise(self._seen):
            place = POINTS - 1 - int((now - after) / STEP_SECONDS)
            if place < 0 or after - before > 2 * STEP_SECONDS:
                continue  # nobody looked meanwhile
            for agent, count in later.items():
                found[agent][place] = max(0, count - former.get(agent, count)) / (after - before)
        return Rates(by_agent=dict(found))


def sparkline(values: list[float]) -> str:
    """Return the values as the data of an SVG path, with gaps where there is none; empty where there is none at all."""
    top = max((value for value in values if math.isfinite(value)), default=0.0)
    data, drawn = "", False
    for place, value in enumerate(values):
        if math.isfinite(value):
            height = HEIGHT - 1 - (HEIGHT - 2) * (value / top if top else 0)
            data += f"{'L' if drawn else 'M'}{WIDTH * place / POINTS:.0f},{height:.1f}{'' if drawn else 'h0'}"
        drawn = math.isfinite(value)
    return data


def spoken(values: list[float]) -> str:
    """Return in words what a sparkline shows."""
    found = [value for value in values if math.isfinite(value)]
    if not found:
        return "not known"
    return f"now {found[-1]:,.1f}, at most {max(found):,.1f}, at least {min(found):,.1f}"
