"""What all pages show of the server: taken again and again while somebody looks, and once for all who do.

The rates are of the last quarter of an hour. Prometheus keeps those of longer times.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import pairwise

import anyio
import structlog
from msgspec import Struct, structs

from aviso_workers.aviso.literals import time_text
from aviso_workers.backends import Admin
from aviso_workers.config import Config
from aviso_workers.errors import BackendError, RefusedError, UnavailableError, describe
from aviso_workers.ops import agent_inventory, agent_report, aviso_admin, health, reports, snapshots
from aviso_workers.ops.agent_report import AgentHealth, AgentRow
from aviso_workers.ops.health import AgentFacts, Judgement, Unknown
from aviso_workers.ops.inventory import asked, noted
from aviso_workers.ops.reports import StreamRow
from aviso_workers.ops.snapshots import ServerSnapshot
from aviso_workers.state import own_streams
from aviso_workers.state.consumer_records import ConsumerRecord
from aviso_workers.state.own_streams import DEAD_LETTERS
from aviso_workers.state.worker_records import AppWorkers, AtWork, WorkerRecord
from aviso_workers.task_groups import asked_of_each

EVERY_SECONDS = 2.0
TAKES_SECONDS = 20.0
"""How long a snapshot may take: longer than three servers of which one has just ended take to answer."""
STALE_SECONDS = TAKES_SECONDS + EVERY_SECONDS
"""After so long, a snapshot is no picture of now: then another one would be there, also of a cluster that has lost a
stream."""
PATIENCE_SECONDS = 8.0
"""How long a page waits for its first two snapshots: one alone does not show whether anything moves."""
LOOKED_SECONDS = 120.0
"""For how long after the last look snapshots go on."""
COUNTED_SECONDS, COUNTED_AT_ONCE = 60.0, 10
"""How often, and of how many agents in one snapshot, the dead letters of the last 24 hours are counted."""
POINTS = 60
STEP_SECONDS = 15
WIDTH, HEIGHT = 88, 18
"""Of a sparkline."""

Agent = tuple[str, str]

log = structlog.get_logger("aviso_workers.console")


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


class AgentView(AgentHealth, frozen=True, kw_only=True):
    """An agent on one event stream, and how it is."""

    dead_letters_of_a_day: int | None
    """Of its dead letters, those of the last 24 hours; None where they are not counted yet."""

    @property
    def state(self) -> str:
        return self.judgement.state

    @property
    def why(self) -> str:
        """What is to be said of the state, and what else is so; may be empty."""
        return "; ".join(filter(None, (self.judgement.why, *self.judgement.also)))

    @property
    def handled_rate(self) -> float:
        """Notifications delivered in a second."""
        before = self.facts.before
        if before is None or not self.seconds:
            return 0.0
        return max(0.0, (self.facts.deliveries - before.deliveries) / self.seconds)

    @property
    def workers(self) -> list[tuple[WorkerRecord, AtWork]]:
        """Those that live, as far as they have recorded themselves, and what each handles of it."""
        return [(structs.replace(worker, agents={}), at_work) for worker, at_work in self.facts.at_work]

    @property
    def at_once(self) -> int:
        """How many notifications its workers can handle at once; 0 where none is recorded."""
        return sum(at_work.at_once for _, at_work in self.workers)

    @property
    def in_flight(self) -> int:
        """How many they handle, as they said within the last half minute, and as are not settled since; where none is
        recorded, how many are delivered and not settled.
        """
        said = (at_work.in_flight for _, at_work in self.workers)
        return min(sum(said), self.facts.ack_pending) if self.workers else self.facts.ack_pending

    @property
    def retrying(self) -> int:
        """How many wait to be tried again: the server knows those that it has delivered again, and workers record the
        next ones.
        """
        return max(self.facts.redelivered, len(self.facts.retrying))

    @property
    def catches_up_seconds(self) -> float | None:
        """After how long the lag is gone at the present rate; None where it does not shrink."""
        lag, rate = self.facts.lag, self.lag_rate or 0.0
        return lag / -rate if lag and rate < 0 else None

    @property
    def unfinished_since(self) -> datetime | None:
        """Since when the oldest delivered notification is not finished, as far as workers have recorded it."""
        record = self.facts.record
        return record.unfinished_since if isinstance(record, ConsumerRecord) and self.facts.lag else None


class Overview(Struct, frozen=True, kw_only=True):
    """Two snapshots of a server, of which the rates are made."""

    time: datetime
    """When the later one was taken, by the server's clock, as all times that are kept there."""
    seconds: float
    """Between the two; 0 where there is one only."""
    config: Config
    """With the event types that workers have recorded."""
    agents: list[AgentView]
    failing: list[AgentRow]
    """Timers and tasks that fail."""
    workers_in_trouble: list[AgentRow]
    streams: list[StreamRow]
    differing: list[str]
    """In which event types the apps differ."""
    new_dead_letters: int | None
    """Those of the last 24 hours; None where our user may not ask for them."""
    rates: Rates
    """As far as somebody has looked meanwhile."""
    snapshot: ServerSnapshot

    def workers_of(self, app: str) -> AppWorkers:
        """Return the workers of an app, as far as they have recorded themselves."""
        found = self.snapshot.workers_of(app)
        return AppWorkers() if isinstance(found, Unknown) else found

    @property
    def workers_known(self) -> int:
        """How many workers live, as far as they have recorded themselves."""
        apps = () if isinstance(self.snapshot.workers, Unknown) else self.snapshot.workers.values()
        return sum(len(each.living) for each in apps if not isinstance(each, Unknown))

    def health_of(self, app: str) -> Judgement:
        """Return how an app is."""
        return health.judge_app(self.snapshot.workers_of(app), now=self.time)


class Watcher:
    """Takes snapshots of a server while somebody looks."""

    def __init__(self, admin: Admin, config: Config) -> None:
        self._admin = admin
        self._config = config
        self._newest: Overview | None = None
        self._looked_at = -math.inf
        self._recent = Recent()
        self._of_a_day: dict[tuple[str, str], tuple[int, float, int]] = {}
        """By app and agent: all of its dead letters, when those of the last 24 hours were counted, and how many."""
        self._asked = anyio.Event()
        self._taken = anyio.Event()
        self.error = ""
        """Why the last snapshot failed; empty where it did not."""
        self.failing_since: float | None = None
        """By a monotonic clock."""
        self.closed = False
        """Whether nobody is to wait any more, because the console ends."""

    def close(self) -> None:
        """Have everybody who waits for a snapshot wait no more."""
        self.closed = True
        self._taken.set()

    async def run(self) -> None:
        """Take snapshots; never returns."""
        while True:
            if anyio.current_time() - self._looked_at > LOOKED_SECONDS:
                self._newest = None  # nobody looks: its rates would be of a long time
                self.error, self.failing_since = "", None
                await self._asked.wait()
            self._asked = anyio.Event()
            await self._take_one()
            await anyio.sleep(EVERY_SECONDS)

    async def newest(self) -> Overview:
        """Return the newest overview.

        Raises `UnavailableError` where there is none, because the server does not answer.
        """
        self._looked_at = anyio.current_time()
        self._asked.set()
        with anyio.move_on_after(PATIENCE_SECONDS):
            while (self._newest is None or not self._newest.seconds) and not self.error:
                await self._taken.wait()
        if self._newest is None or not self._newest.seconds:
            raise UnavailableError(self.error or f"The server has not answered within {PATIENCE_SECONDS:g} s")
        return self._newest

    async def changed(self) -> None:
        """Wait for the next snapshot, whether it succeeds or not."""
        self._looked_at = anyio.current_time()
        self._asked.set()
        await self._taken.wait()

    async def _take_one(self) -> None:
        try:
            with anyio.fail_after(TAKES_SECONDS):
                self._newest = await self._take()
        except Exception as error:  # of any kind: the console goes on, and says it on each page
            self.error = _why_unknown(error)
            self.failing_since = self.failing_since or anyio.current_time()
            if not isinstance(error, BackendError | TimeoutError):
                log.exception("console.snapshot_failed")
        else:
            self.error, self.failing_since = "", None
        self._taken.set()
        self._taken = anyio.Event()

    async def _take(self) -> Overview:
        before = self._newest
        snapshot = await snapshots.take(self._admin)
        recorded = snapshot.recorded
        config, differing = aviso_admin.with_declared(self._config, recorded.apps)
        found = await agent_report.of_server(self._admin, config, snapshot, before.snapshot if before else None)
        of_a_day = await self._dead_letters_of_a_day(snapshot, [each.facts for each in found])
        self._recent.add(snapshot.at, _deliveries(each.facts for each in found))
        return Overview(
            time=recorded.time,
            seconds=snapshot.at - before.snapshot.at if before else 0.0,
            config=config,
            agents=[
                AgentView(**structs.asdict(each), dead_letters_of_a_day=count)
                for each, count in zip(found, of_a_day, strict=True)
            ],
            failing=agent_report.failing(recorded),
            workers_in_trouble=agent_report.workers_in_trouble(snapshot),
            streams=reports.streams(snapshot, before.snapshot if before else snapshot),
            differing=differing + recorded.unreadable,
            new_dead_letters=await self._new_dead_letters(snapshot),
            rates=self._recent.rates,
            snapshot=snapshot,
        )

    async def _new_dead_letters(self, snapshot: ServerSnapshot) -> int | None:
        found = {name: each for name, each in snapshot.streams.items() if own_streams.app_of(DEAD_LETTERS, name)}
        if not found:
            return None if snapshot.denied.subjects("streams") else 0

        async def count(name: str) -> int:
            since = found[name].time - timedelta(days=1)
            return await self._admin.count(name, filter_subjects=(), start_time=since)

        counts = asked_of_each((name for name, each in found.items() if each.messages), count)
        of_day = await asked(snapshot.denied, "dead letters", counts, None)
        return None if of_day is None else sum(of_day.values())

    async def _dead_letters_of_a_day(self, snapshot: ServerSnapshot, agents: Sequence[AgentFacts]) -> list[int | None]:
        """Return the dead letters of each agent of the last 24 hours. A few agents at a time are counted anew."""
        time = anyio.current_time()
        totals = {(each.app, each.agent): each.dead_letters for each in agents if each.dead_letters}
        known = {key: self._of_a_day.get(key, (0, -math.inf, 0)) for key in totals}
        due = [key for key, total in totals.items() if known[key][0] != total or time - known[key][1] > COUNTED_SECONDS]
        with noted(snapshot.denied, "dead letters"):
            for key in sorted(due, key=lambda key: known[key][1])[:COUNTED_AT_ONCE]:
                if (found := snapshot.streams.get(own_streams.of_app(DEAD_LETTERS, key[0]))) is None:
                    continue
                since = found.time - timedelta(days=1)
                known[key] = (totals[key], time, await agent_inventory.dead_letters_since(self._admin, *key, since))
        self._of_a_day = known
        counted = {key: count for key, (total, _, count) in known.items() if total}
        return [each.dead_letters and counted.get((each.app, each.agent)) for each in agents]


def _deliveries(facts: Iterable[AgentFacts]) -> dict[tuple[str, str], int]:
    found = Counter[tuple[str, str]]()
    for each in facts:
        found[each.app, each.agent] += each.deliveries
    return dict(found)


def _why_unknown(error: Exception) -> str:
    """Return in a sentence, without its full stop, why a snapshot failed."""
    match error:
        case TimeoutError():  # which says nothing by itself
            return "The server does not answer"
        case RefusedError():
            return f"The server refuses what the console asks for, whose user needs the role operator: {error}"
        case UnavailableError():
            return f"The server does not answer: {describe(error)}"
    return f"The console cannot read what the server has: {describe(error)}"


def stale_text(overview: Overview, watcher: Watcher) -> str:
    """Return that the server does not answer, where that is so; else nothing."""
    shown = f"What is shown is of {time_text(overview.time)}."
    if watcher.error and watcher.failing_since is not None:
        since = overview.time + timedelta(seconds=watcher.failing_since - overview.snapshot.at)
        return f"{watcher.error}. This is so since {time_text(since)}. {shown}"
    seconds = anyio.current_time() - overview.snapshot.at
    return f"The server has not answered for {seconds:.0f} s. {shown}" if seconds > STALE_SECONDS else ""
