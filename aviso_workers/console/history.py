"""The rates of the last hour, from Prometheus: the console keeps no history of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import anyio
import anyio.to_thread
import msgspec
from msgspec import Struct

__all__ = ["Rates", "rates", "sparkline", "spoken"]

QUERY = 'sum by (app, agent) (rate(aviso_worker_notifications_total{outcome="acked"}[2m]))'
SPAN_SECONDS = 3600
POINTS = 60
ANSWER_SECONDS = 3.0
MAX_BYTES = 32 * 2**20
WIDTH, HEIGHT = 120, 22

Agent = tuple[str, str]


class Rates(Struct, frozen=True, kw_only=True):
    """Notifications acked in a second over the last hour, by app and agent."""

    by_agent: Mapping[Agent, list[float]] = {}
    """A value for each minute; NaN where Prometheus has none."""
    error: str = ""
    """Why there are none."""


class _Series(Struct):
    metric: dict[str, str]
    values: list[tuple[float, str]]


class _RangeData(Struct):
    result: list[_Series]


class _RangeAnswer(Struct):
    status: str
    data: _RangeData


async def rates(url: str) -> Rates:
    """Return the rates that the Prometheus at this URL has. What goes wrong is said in the answer."""
    step = SPAN_SECONDS / POINTS
    asked = urlencode({"query": f"({QUERY})[{SPAN_SECONDS}s:{step:.0f}s]"})  # until now, by the clock of Prometheus
    try:
        body = await anyio.to_thread.run_sync(_get, f"{url.rstrip('/')}/api/v1/query?{asked}")
        found = msgspec.json.decode(body, type=_RangeAnswer)
    except (URLError, OSError, ValueError, msgspec.DecodeError) as error:
        return Rates(error=f"Prometheus has not answered: {error}")
    begin = max((series.values[-1][0] for series in found.data.result), default=0.0) - SPAN_SECONDS
    by_agent = {
        (series.metric.get("app", ""), series.metric.get("agent", "")): _filled(series, begin, step)
        for series in found.data.result
    }
    return Rates(by_agent=by_agent)


def _get(url: str) -> bytes:
    with urlopen(url, timeout=ANSWER_SECONDS) as answer:
        return bytes(answer.read(MAX_BYTES))


def _filled(series: _Series, begin: float, step: float) -> list[float]:
    values = [math.nan] * (POINTS + 1)
    for time, value in series.values:
        values[max(0, min(POINTS, round((time - begin) / step)))] = float(value)
    return values


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
