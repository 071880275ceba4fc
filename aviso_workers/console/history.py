"""The rates of the last hour, from Prometheus; without one, those that the console has seen itself."""

from __future__ import annotations

import base64
import math
from collections import defaultdict, deque
from collections.abc import Mapping
from itertools import pairwise
from urllib.parse import SplitResult, unquote, urlencode, urlsplit

import anyio
import h11
import msgspec
from anyio.abc import ByteStream
from msgspec import Struct

from aviso_workers.errors import describe

QUERY = 'sum by (app, agent) (rate(aviso_worker_notifications_total{outcome="acked"}[2m]))'
SPAN_SECONDS = 3600
POINTS = 60
STEP_SECONDS = 15
"""Between two points of what the console has seen itself."""
ANSWER_SECONDS = 3.0
"""For the whole answer, however it comes."""
MAX_BYTES = 8 * 2**20
RECEIVED_BYTES = 65536
WIDTH, HEIGHT = 88, 18

Agent = tuple[str, str]


class Rates(Struct, frozen=True, kw_only=True):
    """Notifications handled in a second over the last time, by app and agent."""

    by_agent: Mapping[Agent, list[float]] = {}
    """Values at equal distances; NaN where none is known."""
    error: str = ""
    """Why those of Prometheus are not known."""
    span: str = ""
    """The time that they cover, as `15 min`."""

    @property
    def total(self) -> list[float]:
        """The values of all agents together."""
        columns = [[value for value in column if math.isfinite(value)] for column in zip(*self.by_agent.values(), strict=True)]
        return [sum(column) if column else math.nan for column in columns]


class Recent:
    """The rates of the last quarter of an hour, as the console has seen them while somebody looked."""

    def __init__(self) -> None:
        self._seen = deque[tuple[float, Mapping[Agent, int]]](maxlen=POINTS + 1)
        """When it has looked, by a monotonic clock, and the deliveries of each agent until then."""

    def add(self, at: float, deliveries: Mapping[Agent, int]) -> None:
        """Take note of the deliveries of each agent until now."""
        if not self._seen or at - self._seen[-1][0] >= STEP_SECONDS:
            self._seen.append((at, deliveries))

    def rates(self, now: float) -> Rates:
        """Return them as they are at this time."""
        found = defaultdict[Agent, list[float]](lambda: [math.nan] * POINTS)
        for (before, former), (after, later) in pairwise(self._seen):
            place = POINTS - 1 - int((now - after) / STEP_SECONDS)
            if place < 0 or after - before > 2 * STEP_SECONDS:
                continue  # nobody looked meanwhile
            for agent, count in later.items():
                found[agent][place] = max(0, count - former.get(agent, count)) / (after - before)
        return Rates(by_agent=found, span=f"{POINTS * STEP_SECONDS / 60:.0f} min")


class _Series(Struct):
    metric: dict[str, str]
    values: list[tuple[float, str]]


class _RangeData(Struct):
    result: list[_Series]


class _RangeAnswer(Struct):
    status: str
    data: _RangeData


async def rates(url: str) -> Rates:
    """Return the rates that the Prometheus at this URL has. What goes wrong is said in the answer: whoever answers may
    be another program.
    """
    step = SPAN_SECONDS / POINTS
    query = f"({QUERY})[{SPAN_SECONDS}s:{step:.0f}s]"  # until now, by the clock of Prometheus
    try:
        with anyio.fail_after(ANSWER_SECONDS):
            body = await _asked(url, query)
        found = msgspec.json.decode(body, type=_RangeAnswer).data.result
        begin = max((series.values[-1][0] for series in found if series.values), default=0.0) - SPAN_SECONDS
        return Rates(
            by_agent={
                (series.metric.get("app", ""), series.metric.get("agent", "")): _filled(series, begin, step)
                for series in found
            },
            span="1 h",
        )
    except TimeoutError:
        return Rates(error=f"Prometheus has not answered: not within {ANSWER_SECONDS:g} s")
    except Exception as error:
        return Rates(error=f"Prometheus has not answered: {describe(error)}")


async def _asked(url: str, query: str) -> bytes:
    """Return the body of the answer to a query. Raises what a network and a foreign program cause, and `ValueError`."""
    to = urlsplit(url if "://" in url else f"http://{url}")
    target = f"{to.path.rstrip('/')}/api/v1/query?{urlencode({'query': query})}" + (f"&{to.query}" if to.query else "")
    request = h11.Request(method="GET", target=target, headers=_headers(to))
    connection, body = h11.Connection(h11.CLIENT), bytearray()
    async with await _connected(to) as stream:
        await stream.send((connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b""))
        while True:
            event = connection.next_event()
            match event:
                case h11.NEED_DATA:
                    try:
                        connection.receive_data(await stream.receive(RECEIVED_BYTES))
                    except anyio.EndOfStream:
                        connection.receive_data(b"")
                case h11.Response() if event.status_code != 200:
                    raise ValueError(f"status {event.status_code}")
                case h11.Data():
                    body += event.data
                    if len(body) > MAX_BYTES:
                        raise ValueError(f"more than {MAX_BYTES:,} bytes")
                case h11.EndOfMessage():
                    return bytes(body)
                case h11.ConnectionClosed() | h11.PAUSED:
                    raise ValueError("no answer")


async def _connected(to: SplitResult) -> ByteStream:
    host = to.hostname or ""
    if to.scheme == "https":
        return await anyio.connect_tcp(host, to.port or 443, tls=True)
    return await anyio.connect_tcp(host, to.port or 80)


def _headers(to: SplitResult) -> list[tuple[str, str]]:
    headers = [("Host", to.netloc.rpartition("@")[2]), ("Connection", "close"), ("Accept", "application/json")]
    if to.username is not None:
        user = f"{unquote(to.username)}:{unquote(to.password or '')}".encode()
        headers.append(("Authorization", f"Basic {base64.b64encode(user).decode()}"))
    return headers


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
