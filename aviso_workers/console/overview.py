"""What all pages show of the server: taken again and again while somebody looks, and once for all who do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta

import anyio
import structlog
from msgspec import Struct, structs

from aviso_workers.aviso.literals import time_text
from aviso_workers.backends import Admin
from aviso_workers.config import Config
from aviso_workers.console.history import Rates, rates
from aviso_workers.errors import BackendError, RefusedError, UnavailableError, describe
from aviso_workers.ops import agent_inventory, agent_report, aviso_admin, reports, retried
from aviso_workers.ops.agent_inventory import Recorded
from aviso_workers.ops.agent_report import AgentProgress, AgentRow
from aviso_workers.ops.denials import Denials, asked, noted
from aviso_workers.ops.reports import ServerSnapshot, StreamRow
from aviso_workers.state import worker_records
from aviso_workers.state.own_streams import DEAD_LETTERS, RETRIES
from aviso_workers.state.worker_records import AtWork, WorkerRecord

__all__ = ["AgentView", "Overview", "Watcher", "is_trouble", "stale_text", "state_of"]

EVERY_SECONDS = 2.0
RATES_SECONDS = 30.0
"""How often Prometheus is asked."""
STALE_SECONDS = 10.0
"""After so long, a snapshot is no picture of now: longer than one takes of a cluster that has lost a stream."""
TAKES_SECONDS = 20.0
"""How long a snapshot may take: longer than three servers of which one has just ended take to answer."""
PATIENCE_SECONDS = 8.0
"""How long a page waits for its first two snapshots: one alone does not show whether anything moves."""
LOOKED_SECONDS = 120.0
"""For how long after the last look snapshots go on."""
CATCHES_UP = 100
"""From this lag on, an agent that handles something is said to catch up and not to work."""

TROUBLES = (
    "unknown",
    "consumer missing",
    "no consumer",
    "away",
    "stuck",
    "blocked",
    "keys blocked",
    "failing",
    "retrying",
    "paused",
)
"""States that somebody should know of, the worst first. A pause was somebody's decision."""
CALM = ("paused", "no worker", "catching up", "working", "idle", "never started")
UNASKED_SECONDS = 60.0
"""After so long without a worker, an agent without a lag needs somebody: longer than a server needs for an election."""


COUNTED_SECONDS, COUNTED_AT_ONCE = 60.0, 10
"""How often, and of how many agents in one snapshot, the dead letters of the last 24 hours are counted."""

log = structlog.get_logger("aviso_workers.console")


class AgentView(Struct, frozen=True, kw_only=True):
    """An agent on one event stream."""

    progress: AgentProgress
    state: str
    """One of `TROUBLES` or `CALM`."""
    why: str
    """What is to be said of the state; may be empty."""
    handled_rate: float
    """Notifications delivered in a second."""
    lag_rate: float
    """By how many notifications the lag grows in a second."""
    unasked_seconds: float
    """For how long nobody has asked for its notifications, as far as was looked; 0 where somebody does."""
    still_seconds: float
    """For how long nothing was delivered or settled, as far as was looked."""
    dead_letters_of_a_day: int | None
    """Of its dead letters, those of the last 24 hours; None where they are not counted yet."""
    workers: list[tuple[WorkerRecord, AtWork]]
    """Those that live, as far as they have recorded themselves, and what each handles of it."""

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
        return min(sum(said), self.progress.ack_pending) if self.workers else self.progress.ack_pending

    @property
    def retrying(self) -> int:
        """How many wait to be tried again: the server knows those that it has delivered again, and workers record the
        next ones.
        """
        return max(self.progress.redelivered, len(self.progress.retrying))

    @property
    def catches_up_seconds(self) -> float | None:
        """After how long the lag is gone at the present rate; None where it does not shrink."""
        lag = self.progress.lag
        return lag / -self.lag_rate if lag and self.lag_rate < 0 else None

    @property
    def unfinished_since(self) -> datetime | None:
        """Since when the oldest delivered notification is not finished, as far as workers have recorded it."""
        record = self.progress.record
        return record.unfinished_since if record and self.progress.lag else None


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
    streams: list[StreamRow]
    workers: dict[str, list[WorkerRecord]]
    """Those that live, by app, as far as they have recorded themselves."""
    differing: list[str]
    """In which event types the apps differ."""
    new_dead_letters: int | None
    """Those of the last 24 hours; None where our user may not ask for them."""
    rates: Rates
    """Those of the last hour, where the configuration names a Prometheus."""
    snapshot: ServerSnapshot


class Watcher:
    """Takes snapshots of a server while somebody looks."""

    def __init__(self, admin: Admin, config: Config) -> None:
        self._admin = admin
        self._config = config
        self._newest: Overview | None = None
        self._looked_at = self._rates_at = -math.inf
        self._rates = Rates()
        self._unasked: dict[tuple[str, str, str], float] = {}
        """Since when nobody asks for the notifications of an agent, by app, agent and stream."""
        self._of_a_day: dict[tuple[str, str], tuple[int, float, int]] = {}
        """By app and agent: all of its dead letters, when those of the last 24 hours were counted, and how many."""
        self._moved: dict[tuple[str, str, str], tuple[tuple[int, ...], float]] = {}
        """What moves where an agent does something, and since when it is the same."""
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
                self._unasked.clear()
                self._moved.clear()
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
        snapshot = await reports.take(self._admin)
        recorded, denied = snapshot.recorded, snapshot.denied
        config, differing = aviso_admin.with_declared(self._config, recorded.apps)
        progress = await agent_report.of_deployment(
            self._admin, config, recorded=recorded, unavailable=snapshot.unavailable, denied=denied
        )
        progress += _without_consumer(config, recorded, progress, denied)
        workers = await self._workers(denied)
        seconds = snapshot.at - before.snapshot.at if before else 0.0
        return Overview(
            time=recorded.time,
            seconds=seconds,
            config=config,
            agents=self._views(
                progress,
                [view.progress for view in before.agents] if before else [],
                seconds,
                snapshot,
                workers,
                await self._dead_letters_of_a_day(snapshot, progress),
            ),
            failing=agent_report.failing(recorded),
            streams=reports.streams(snapshot, before.snapshot if before else snapshot),
            workers=workers,
            differing=differing,
            new_dead_letters=await self._new_dead_letters(snapshot),
            rates=await self._newest_rates(),
            snapshot=snapshot,
        )

    async def _workers(self, denied: Denials) -> dict[str, list[WorkerRecord]]:
        with noted(denied, "workers"), suppress(UnavailableError):  # the other things are worth more
            return await worker_records.stored(self._admin)
        return {}

    async def _newest_rates(self) -> Rates:
        url = self._config.workers.console.prometheus
        if url is not None and anyio.current_time() - self._rates_at > RATES_SECONDS:
            self._rates, self._rates_at = await rates(url), anyio.current_time()
        return self._rates

    def _views(
        self,
        now: Iterable[AgentProgress],
        before: Iterable[AgentProgress],
        seconds: float,
        snapshot: ServerSnapshot,
        workers: Mapping[str, list[WorkerRecord]],
        of_a_day: Mapping[tuple[str, str], int],
    ) -> list[AgentView]:
        known = {_key(each): each for each in before}
        time = anyio.current_time()
        self._unasked = {
            _key(each): self._unasked.get(_key(each), time)
            for each in now
            if each.events is not None and not each.events.num_waiting
        }
        moved = {_key(each): (_moves(each), time) for each in now}
        self._moved = {
            key: known_one if (known_one := self._moved.get(key, now_one))[0] == now_one[0] else now_one
            for key, now_one in moved.items()
        }
        return [
            _view(
                each,
                known.get(_key(each)),
                seconds,
                unasked_seconds=time - self._unasked.get(_key(each), time),
                still_seconds=time - self._moved[_key(each)][1],
                has_stream=each.stream in snapshot.streams or bool(snapshot.denied.subjects("streams")),
                workers=workers.get(each.app, []),
                of_a_day=0 if each.dead_letters == 0 else of_a_day.get((each.app, each.agent)),
            )
            for each in now
        ]

    async def _new_dead_letters(self, snapshot: ServerSnapshot) -> int | None:
        if DEAD_LETTERS not in snapshot.streams:
            return None if snapshot.denied.subjects("streams") else 0
        if not (found := snapshot.streams[DEAD_LETTERS]).messages:
            return 0
        count = self._admin.count(DEAD_LETTERS, filter_subjects=(), start_time=found.time - timedelta(days=1))
        return await asked(snapshot.denied, "dead letters", count, None)

    async def _dead_letters_of_a_day(
        self, snapshot: ServerSnapshot, progress: Iterable[AgentProgress]
    ) -> dict[tuple[str, str], int]:
        """Return the dead letters of the last 24 hours, by app and agent. A few agents at a time are counted anew."""
        if DEAD_LETTERS not in snapshot.streams:
            return {}
        time = anyio.current_time()
        totals = {(each.app, each.agent): each.dead_letters for each in progress if each.dead_letters}
        known = {key: self._of_a_day.get(key, (0, -math.inf, 0)) for key in totals}
        due = [key for key, total in totals.items() if known[key][0] != total or time - known[key][1] > COUNTED_SECONDS]
        since = snapshot.streams[DEAD_LETTERS].time - timedelta(days=1)
        with noted(snapshot.denied, "dead letters"):
            for key in sorted(due, key=lambda key: known[key][1])[:COUNTED_AT_ONCE]:
                known[key] = (totals[key], time, await agent_inventory.dead_letters_since(self._admin, *key, since))
        self._of_a_day = known
        return {key: count for key, (total, _, count) in known.items() if total}


def _key(progress: AgentProgress) -> tuple[str, str, str]:
    return progress.app, progress.agent, progress.stream


def _moves(progress: AgentProgress) -> tuple[int, ...]:
    """Return the numbers of which one changes where something is delivered or settled."""
    infos = [each for each in (progress.events, progress.retries) if each]
    return tuple(number for each in infos for number in (each.deliveries, each.ack_floor, each.num_ack_pending))


def _without_consumer(
    config: Config, recorded: Recorded, known: Iterable[AgentProgress], denied: Denials
) -> list[AgentProgress]:
    """Return the agents that have no consumer: those that have run, because their stream is gone or was made again, and
    those that are declared and have never run.

    One that reads another stream now is none of them, as far as its app has recorded that.
    """
    listed, found, apps = {_key(each) for each in known}, [], recorded.apps
    ran = {key[:2] for key in listed} | {agent_inventory.agent_of(each) for _, each in recorded.consumers}
    for app, declared_ones in apps.items():
        for agent, event_type in declared_ones.agents.items():
            if (app, agent) not in ran and event_type in config.notification_schema:
                stream = aviso_admin.stream_of(config, event_type)
                said = denied.text(f"agents of {stream}")
                each = AgentProgress(app=app, agent=agent, stream=stream, events=None, retries=None, denied=said)
                found.append(structs.replace(each, unanswered=bool(said)))
    for (stream, consumer), record in recorded.consumers.items():
        of = agent_inventory.agent_of(consumer)
        if of is None or record.removed or stream == RETRIES or (*of, stream) in listed:
            continue
        declared = apps[of[0]].agents.get(of[1], "") if of[0] in apps else None
        reads = aviso_admin.stream_of(config, declared) if declared in config.notification_schema else ""
        if declared is None or reads == stream:
            found.append(AgentProgress(app=of[0], agent=of[1], stream=stream, events=None, retries=None, record=record))
    return found


def _view(
    now: AgentProgress,
    before: AgentProgress | None,
    seconds: float,
    *,
    unasked_seconds: float,
    still_seconds: float,
    has_stream: bool,
    workers: Iterable[WorkerRecord],
    of_a_day: int | None,
) -> AgentView:
    at_work = [
        (structs.replace(worker, agents={}), of_agent)
        for worker in workers
        if (of_agent := worker.agents.get(now.agent)) and of_agent.stream == now.stream
    ]
    lag_rate = (now.lag - before.lag) / seconds if before and seconds else 0.0
    delivered = _deliveries(now) - _deliveries(before) if before else 0
    state, why = state_of(now, before)
    gone = not now.ack_pending or (not at_work and min(unasked_seconds, still_seconds) > UNASKED_SECONDS)
    if state == "idle" and delivered > 0:  # it was quick
        state = "working"
    nobody = f"nobody has asked for its notifications for {unasked_seconds:.0f} s" if unasked_seconds else ""
    if state == "no consumer" and not has_stream:
        why = f"its stream is gone, which it had settled up to sequence {now.record.ack_floor if now.record else 0}"
    elif state == "idle" and nobody:
        state, why = "no worker", nobody
    elif state == "working" and nobody and still_seconds and gone:
        state, why = "no worker", f"{now.lag} wait, and {nobody}"
    elif state == "working":
        catches_up = now.lag >= CATCHES_UP and (delivered > 0 or lag_rate < 0)
        still = f"nothing was delivered or settled for {still_seconds:.0f} s" if still_seconds > STALE_SECONDS else ""
        state, why = "catching up" if catches_up else state, "; ".join(filter(None, (why, still, still and nobody)))
    elif state == "blocked" and nobody:
        why = f"{why}; {nobody}"
    if now.denied and state in CALM and state not in ("paused", "no worker"):
        state, why = "unknown", f"it seems {state}; more is {now.denied}"
    return AgentView(
        progress=now,
        state=state,
        why=why,
        handled_rate=max(0.0, delivered / seconds) if seconds else 0.0,
        lag_rate=lag_rate,
        unasked_seconds=unasked_seconds,
        still_seconds=still_seconds,
        dead_letters_of_a_day=of_a_day,
        workers=at_work,
    )


def _deliveries(progress: AgentProgress) -> int:
    return sum(each.deliveries for each in (progress.events, progress.retries) if each)


def state_of(now: AgentProgress, before: AgentProgress | None = None) -> tuple[str, str]:
    """Return the state of an agent in a word or two, and what is to be said of it."""
    trouble = now.trouble_since(before)
    if now.unanswered:
        return "unknown", trouble
    if now.events is None:
        if trouble:
            return "consumer missing", trouble
        return ("no consumer" if now.record is not None and not now.record.removed else "never started"), now.why_none
    if now.waiting:
        return "away", now.waiting
    if trouble:
        return "stuck", trouble
    if now.blocked:
        return "blocked", retried.blocked_text(now.blocked)
    if now.paused_until:
        return "paused", f"until {now.paused_until}"
    if now.failing and not _has_recovered(now):
        return _failing(now)
    return ("working" if now.lag else "idle"), _recovered_text(now)


def _recovered_text(now: AgentProgress) -> str:
    if not now.failing or now.failure is None:
        return ""
    return f"it failed last at {time_text(now.failure.last)}, and has finished what failed"


def _has_recovered(now: AgentProgress) -> bool:
    """Return whether what has failed lately succeeded since: nothing is tried again, and nothing is a dead letter."""
    return not (now.retrying or now.redelivered or now.dead_letters != 0 or (now.failure and now.failure.of_window))


def _failing(now: AgentProgress) -> tuple[str, str]:
    blocked = Counter(each.key for each in now.retrying if each.key and each.behind)
    if blocked:
        behind = sum(each.behind for each in now.retrying)
        return "keys blocked", f"{len(blocked)} keys, {behind} notifications wait behind them; {now.failing}"
    return ("retrying" if now.retrying else "failing"), now.failing


def is_trouble(view: AgentView) -> bool:
    """Return whether somebody should look at the agent."""
    if view.state == "never started":  # and a worker of its app has started, or nothing would be known of it
        return view.progress.record is None and view.still_seconds > UNASKED_SECONDS
    if view.state in ("no worker", "working", "catching up"):  # a worker that is busy for long has what it asked for
        return min(view.unasked_seconds, view.still_seconds) > UNASKED_SECONDS
    return view.state in TROUBLES and view.state != "paused"


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
