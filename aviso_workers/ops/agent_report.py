"""The report on agents: how far they have come.

Called by the commands `agents ls` and `agents show`. It is what the server knows of an agent's two consumers, that of
its events and that of what is tried again; `differing` compares them with the code.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct, field

from aviso_workers.aviso import schema, topics
from aviso_workers.aviso.literals import time_text
from aviso_workers.backends import Admin, ConsumerInfo
from aviso_workers.config import Config
from aviso_workers.declare import agents
from aviso_workers.declare.agents import Agent, Router
from aviso_workers.errors import UnavailableError
from aviso_workers.jetstream.fields import SECOND
from aviso_workers.jetstream.info import ConsumerConfig
from aviso_workers.ops import agent_control, agent_inventory, aviso_admin, retried, stuck
from aviso_workers.ops.agent_inventory import Recorded
from aviso_workers.ops.denials import Denials, asked, noted
from aviso_workers.state.consumer_records import ConsumerRecord
from aviso_workers.state.failure_records import LastFailure, Retrying
from aviso_workers.state.own_streams import DEAD_LETTERS, RETRIES
from aviso_workers.task_groups import task_group

__all__ = [
    "AgentProgress",
    "AgentRow",
    "away_text",
    "differing",
    "failing",
    "failing_text",
    "of_app",
    "of_deployment",
    "rows",
]


class AgentProgress(Struct, frozen=True, kw_only=True):
    """How far an agent has come on one event stream: what is pending, delivered and dead-lettered."""

    app: str
    agent: str
    stream: str
    events: ConsumerInfo | None
    """The consumer of its events; None where it has none."""
    retries: ConsumerInfo | None
    record: ConsumerRecord | None = None
    """The record of the consumer of this stream; None where no worker has run."""
    behind: int | None = None
    """Notifications after the recorded ack floor, where the consumer is gone and no operator has removed it; else
    None."""
    dead_letters: int | None = 0
    """Dead letters of this agent, of all streams; None where our user may not ask for them."""
    functions: tuple[str, ...] = ()
    """The functions that its workers run, where these are several."""
    failure: LastFailure | None = None
    """Its last failure; None where none is recorded."""
    unanswered: bool = False
    """Whether no server tells of its stream or its consumer: then nothing but its record is known."""
    recorded_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    """When the records were read, by the server's clock."""
    denied: str = ""
    """What the server denies our user of what its state is made of, in a sentence; empty where that is nothing."""

    @property
    def lag(self) -> int:
        """The number of notifications that are not settled yet."""
        return self.pending + self.ack_pending

    @property
    def pending(self) -> int:
        """The number of notifications that were never delivered yet."""
        return _sum(self, "num_pending") + (self.behind or 0)

    @property
    def trouble(self) -> str:
        """The reason why the agent handles nothing or not everything; empty where it does, as far as one snapshot
        shows.
        """
        return self.trouble_since(None)

    def trouble_since(self, before: AgentProgress | None) -> str:
        """Return the reason, as `trouble`, judged by an earlier snapshot as well."""
        if self.unanswered:
            return (
                self.denied
                or f"no server answers for {self.stream} or its consumer, so nothing is known of how it is now"
            )
        if self.events is None:
            return "" if self.behind is None else "its consumer is gone"
        if self.retries is not None and self.retries.paused != self.events.paused:
            paused = "its notifications" if self.events.paused else "its retries"
            return f"partly paused: only {paused}; pause or resume it again"
        if self.waiting:
            return self.waiting
        if self.functions:
            return f"two programs share it: {', '.join(self.functions)}"
        of_events = [each for each in self.blocked if not each.handed_back]
        return stuck.why_stuck(self.events, before.events if before else None, self.record, of_events)

    @property
    def waiting(self) -> str:
        """Since when what it depends on is away, and the error; empty where that is there, or no worker of it runs."""
        return away_text(self.failure, now=self.time) if self.failure is not None else ""

    @property
    def failing(self) -> str:
        """Since when and how it fails; empty where it does not, or does no more."""
        failure = self.failure
        if failure is None or failure.until <= self.time:
            return ""
        return failing_text(failure, doing="retrying" if self.retrying else "failing")

    @property
    def retrying(self) -> list[Retrying]:
        """The notifications that are retried, as far as they are recorded; see `retried.listed`."""
        found = retried.listed(self.failure, self.events, self.retries, now=self.time)
        return [each for each in found if each.stream == self.stream]

    @property
    def blocked(self) -> list[Retrying]:
        """Those of them at which the agent is blocked."""
        return [each for each in self.retrying if each.blocked]

    @property
    def time(self) -> datetime:
        """The time of this snapshot, by the server's clock."""
        return self.events.time if self.events else self.recorded_at

    def state_since(self, before: AgentProgress | None) -> str:
        """Return what the agent does or what is wrong with it, judged by an earlier snapshot as well."""
        paused = f"paused until {self.paused_until}" if self.paused_until else ""
        trouble = self.trouble_since(before)
        if trouble and trouble == self.waiting:  # which says the error already
            return f"{paused}; {trouble}" if paused else trouble
        blocked = retried.blocked_text(self.blocked)
        if blocked:
            blocked = f"{blocked}; {retried.commands_text(self.app, self.agent)}"
        said = (trouble or paused, blocked or (trouble and self.failing))
        return "; ".join(filter(None, said)) or self.failing or self.denied or ("ok" if self.lag else "idle")

    @property
    def why_none(self) -> str:
        """The reason why the agent has no consumer, where that is as it should be; empty where it has one, or has lost
        it.
        """
        if self.events is not None or self.behind is not None or self.unanswered:
            return ""
        return agent_inventory.why_none(self.record)

    @property
    def ack_pending(self) -> int:
        """The number of notifications that are delivered and not settled."""
        return _sum(self, "num_ack_pending")

    @property
    def redelivered(self) -> int:
        """The number of notifications, of those not settled, that were delivered more than once."""
        return _sum(self, "num_redelivered")

    @property
    def pinned_since(self) -> str:
        """The time since which one worker of a singleton is pinned, and handles all notifications."""
        since = self.events.pinned_since if self.events else None
        return time_text(since) if since else "no worker is pinned before the first notification"

    @property
    def paused_until(self) -> str:
        """The end of the agent's pause as text; empty where it is not paused."""
        until = self.events.paused_until if self.events else None
        return agent_control.end_text(until) if until else ""


class AgentRow(Struct, frozen=True, kw_only=True):
    """The report on an agent on one event stream, from two snapshots."""

    app: str
    agent: str
    stream: str
    pending: int = 0
    ack_pending: int = 0
    redelivered: int = 0
    dead_letters: int | None = 0
    rate: float = 0.0
    """By how many notifications the lag grows in a second; negative where it shrinks."""
    paused_until: str = ""
    trouble: str = ""
    why_none: str = ""
    failing: str = ""
    blocked: int = 0
    """The number of notifications at which it is blocked."""
    state: str
    """The state of the agent: `trouble` and `failing`, `paused until`, `blocked at`, `ok`, or `idle` without a lag."""


class _Snapshot(Struct, kw_only=True):
    """A snapshot of the agents on some event streams."""

    admin: Admin
    recorded: Recorded
    away: set[str]
    """Streams, and consumers such as `MARS > app__agent`, for which no server answers."""
    denied: Denials | None
    """Where it is noted what the server denies; it is raised where this is None."""
    consumers: dict[tuple[str, str, str], ConsumerInfo] = {}
    """By app, agent and stream."""
    retries: dict[tuple[str, str], ConsumerInfo] = {}
    """The consumers of retries, by app and agent."""
    behind: dict[tuple[str, str, str], int] = {}
    """Notifications after the recorded ack floor, where the consumer is gone, by app, agent and stream."""
    dead_letters: dict[tuple[str, ...], int] | None = None
    """By app and agent; None where our user may not ask for them."""
    unanswered: set[tuple[str, str, str]] = set()
    """Those that have run, and of which no server tells everything, by app, agent and stream."""

    async def take(self, streams: Collection[str]) -> None:
        """Look at these streams, the retries and the dead letters. What is away is waited for side by side."""
        silent: set[str] = set()
        async with task_group() as looks:
            for stream in {*streams} - self.away:
                looks.start_soon(self._look_at, stream, silent)
            if RETRIES not in self.away:
                self.retries = await asked(self.denied, "retries", agent_inventory.agents(self.admin, RETRIES), {})
            self.dead_letters = {}
            if DEAD_LETTERS not in self.away:
                count = agent_inventory.dead_letters(self.admin)
                self.dead_letters = await asked(self.denied, "dead letters", count, None)
        if silent:
            with noted(self.denied, "streams"):
                await self.admin.stream_names()  # raises where it is not these streams alone that are away
        self.away |= silent
        for (stream, consumer), record in self.recorded.consumers.items():
            of = agent_inventory.agent_of(consumer)
            if of is None or record.removed or stream not in streams:
                continue
            if self.away & {stream, f"{stream} > {consumer}"} or self._denied(f"agents of {stream}"):
                self.unanswered.add((*of, stream))

    async def _look_at(self, stream: str, silent: set[str]) -> None:
        try:
            with noted(self.denied, f"agents of {stream}"):
                async with task_group() as both:
                    both.start_soon(self._list_consumers, stream)
                    lost = await agent_inventory.missing(self.admin, stream, self.recorded.consumers)
                for (app, agent), record in lost.items():
                    self.behind[app, agent, stream] = await _behind(self.admin, stream, record)
        except UnavailableError:
            silent.add(stream)

    async def _list_consumers(self, stream: str) -> None:
        for (app, agent), events in (await agent_inventory.agents(self.admin, stream)).items():
            self.consumers[app, agent, stream] = events

    def _denied(self, *parts: str) -> str:
        return self.denied.text(*parts) if self.denied is not None else ""

    def progress(self, app: str, agent: str, stream: str) -> AgentProgress:
        events, retries = self.consumers.get((app, agent, stream)), self.retries.get((app, agent))
        of_retries = ("retries",) if events else (f"agents of {stream}",)
        name = agents.durable_name(app, agent)
        denied, behind = self._denied("records", *of_retries), self.behind.get((app, agent, stream))
        return AgentProgress(
            app=app,
            agent=agent,
            stream=stream,
            events=events,
            retries=retries,
            record=self.recorded.consumers.get((stream, name)),
            behind=behind,
            dead_letters=None if self.dead_letters is None else self.dead_letters.get((app, agent), 0),
            denied=denied,
            functions=self.recorded.functions.get((stream, name), ()),
            failure=self.recorded.failures.get((app, "agents", agent)),
            unanswered=not events and behind is None and (bool(denied) or (app, agent, stream) in self.unanswered),
            recorded_at=self.recorded.time,
        )


async def of_app(
    admin: Admin,
    config: Config,
    app: Router,
    *,
    recorded: Recorded | None = None,
    unavailable: Collection[str] = (),
    denied: Denials | None = None,
) -> list[AgentProgress]:
    """Return the progress of the app's own agents; the options are those of `of_deployment`. Raises `BackendError`."""
    streams = {agent.name: aviso_admin.stream_of(config, agent.event_type) for agent in app.agents}
    recorded = recorded or await agent_inventory.recorded(admin, denied=denied)
    snapshot = await _snapshot(admin, {*streams.values()}, recorded, {*unavailable}, denied)
    return [snapshot.progress(app.name, agent, stream) for agent, stream in streams.items()]


async def of_deployment(
    admin: Admin,
    config: Config,
    *,
    recorded: Recorded | None = None,
    unavailable: Collection[str] = (),
    denied: Denials | None = None,
) -> list[AgentProgress]:
    """Return the progress of all agents, of whatever app, that have ever read one of the configured event streams.

    `recorded` is what workers have recorded, if it was just read; `unavailable` are streams, and consumers such as
    `MARS > app__agent`, that no server answers for. Raises `BackendError` where more is away than event streams. With
    `denied`, what the server denies is noted there and left out: then an agent tells that it is not known.
    """
    streams = {aviso_admin.stream_of(config, name) for name in config.notification_schema}
    recorded = recorded or await agent_inventory.recorded(admin, denied=denied)
    snapshot = await _snapshot(admin, sorted(streams), recorded, {*unavailable}, denied)
    known = {*snapshot.consumers, *snapshot.behind, *snapshot.unanswered}
    return [snapshot.progress(*key) for key in sorted(known, key=lambda key: (key[2], key))]


def rows(now: Sequence[AgentProgress], before: Sequence[AgentProgress], *, seconds: float) -> list[AgentRow]:
    """Return a row for each agent, from two reports that were made `seconds` apart, in the order of the later one."""
    known = {(each.app, each.agent, each.stream): each for each in before}
    return [_row(each, known.get((each.app, each.agent, each.stream)), seconds) for each in now]


def _row(now: AgentProgress, before: AgentProgress | None, seconds: float) -> AgentRow:
    return AgentRow(
        app=now.app,
        agent=now.agent,
        stream=now.stream,
        pending=now.pending,
        ack_pending=now.ack_pending,
        redelivered=now.redelivered,
        dead_letters=now.dead_letters,
        rate=(now.lag - before.lag) / seconds if before and seconds else 0.0,
        paused_until=now.paused_until,
        trouble=now.trouble_since(before),
        why_none=now.why_none,
        failing=now.failing,
        blocked=len(now.blocked),
        state=now.why_none or now.state_since(before),
    )


async def _snapshot(
    admin: Admin, streams: Collection[str], recorded: Recorded, away: set[str], denied: Denials | None
) -> _Snapshot:
    snapshot = _Snapshot(admin=admin, recorded=recorded, away=away, denied=denied)
    await snapshot.take(streams)
    return snapshot


async def _behind(admin: Admin, stream: str, record: ConsumerRecord) -> int:
    return await admin.count(stream, filter_subjects=record.filter_subjects, start_sequence=record.ack_floor + 1)


def differing(config: Config, agent: Agent[Any, Any], consumer: ConsumerConfig) -> str:
    """Return how the consumer's configuration differs from the agent's code; empty where it does not.

    `consumer` is the configuration of the agent's consumer. Workers of several versions share one, and a worker brings
    it in line when it starts.
    """
    found = []
    if consumer.ack_wait != int(agent.policy.ack_wait * SECOND):
        found.append(f"ack wait {consumer.ack_wait / SECOND:g} s, the code says {agent.policy.ack_wait:g} s")
    if consumer.max_deliver > 0:
        found.append(f"max_deliver {consumer.max_deliver}, which agents do not have")
    event_type = config.notification_schema[agent.event_type]
    wanted, everything = (
        topics.filter_subjects(schema.parse_where(agent.event_type, event_type, where)) for where in (agent.where, {})
    )
    filters = consumer.filters
    if set(filters) not in ({*wanted}, {*everything}):
        found.append(f"filters {', '.join(filters) or 'none'}, the code says {', '.join(wanted) or 'none'}")
    return "; ".join(found)


def failing(recorded: Recorded, app: str | None = None) -> list[AgentRow]:
    """Return a row for each timer and each task that fails, of one app or of all."""
    return [
        AgentRow(app=owner, agent=f"{kind.removesuffix('s')} {name}", stream="-", failing=text, state=text)
        for (owner, kind, name), failure in sorted(recorded.failures.items())
        if kind != "agents"
        and app in (None, owner)
        and failure.until > recorded.time
        and (text := failing_text(failure))
    ]


def failing_text(failure: LastFailure, *, doing: str = "failing") -> str:
    """Return since when, how often and how something fails."""
    times = "once" if failure.times == 1 else f"{failure.times} times"
    return f"{doing} since {time_text(failure.since)}, {times}: {failure.described}"


def away_text(failure: LastFailure, *, now: datetime) -> str:
    """Return since when what an agent depends on is away, and the error; empty where no worker of it says so."""
    if not failure.is_away(now) or failure.away_since is None:
        return ""
    return f"outage since {time_text(failure.away_since)}: {failure.away}"


def _sum(progress: AgentProgress, number: str) -> int:
    return sum(int(getattr(info, number)) for info in (progress.events, progress.retries) if info)
