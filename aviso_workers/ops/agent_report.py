"""The report on agents: the facts on each of them, from snapshots of the server, how they are (`health`), and rows.

Called by the commands `agents ls`, `agents show` and `consumers ls`, by `top`, and by the console. Which agents there
are, the server's consumers say, the records of workers, and what apps have declared; `differing` compares an agent's
consumers with its code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct, structs

from aviso_workers.aviso import schema, topics
from aviso_workers.aviso.literals import SECOND, quoted
from aviso_workers.backends import Admin, ConsumerInfo
from aviso_workers.config import Config
from aviso_workers.declare import agents
from aviso_workers.declare.agents import Agent, agent_of
from aviso_workers.jetstream import subjects
from aviso_workers.jetstream.info import ConsumerConfig, StreamInfo
from aviso_workers.jetstream.specs import BUCKET, OURS
from aviso_workers.ops import agent_inventory, aviso_admin, health
from aviso_workers.ops.agent_inventory import Recorded
from aviso_workers.ops.health import AgentFacts, Judgement, Unknown, failing_text
from aviso_workers.ops.inventory import asked
from aviso_workers.ops.snapshots import ServerSnapshot
from aviso_workers.state import own_streams
from aviso_workers.state.consumer_records import ConsumerRecord
from aviso_workers.state.declarations import AppDeclarations
from aviso_workers.state.failure_records import LastFailure
from aviso_workers.state.own_streams import RETRIES
from aviso_workers.state.worker_records import WorkerRecord

Key = tuple[str, str, str]
"""App, agent and stream."""
TRACEBACK = "The workers' log has the traceback at `timer.failed`, `task.failed` or `window.failed`."
RUN_TIMER = TRACEBACK + " When the cause is gone, `aviso-workers timers run MODULE:APP {}` runs the timer again."
RUNS_AGAIN = f"{TRACEBACK} It runs again by itself."


class AgentRow(Judgement, frozen=True, kw_only=True):
    """The report on an agent on one event stream, or on a timer, a task or a worker in trouble, and how it is."""

    app: str
    agent: str
    stream: str
    pending: int | None = 0
    """None, as the other numbers, where it is not known."""
    ack_pending: int | None = 0
    redelivered: int | None = 0
    dead_letters: int | None = 0
    rate: float | None = 0.0
    """By how many notifications the lag grows in a second; negative where it shrinks."""


class AgentHealth(Struct, frozen=True, kw_only=True):
    """What is known of an agent, and how it is."""

    facts: AgentFacts
    judgement: Judgement
    seconds: float = 0.0
    """Between the two looks."""

    @property
    def lag_rate(self) -> float | None:
        """By how many notifications the lag grows in a second; None where that is not known."""
        before = self.facts.before
        if before is None or not self.seconds or not (self.facts.is_counted and before.is_counted):
            return None
        return (self.facts.lag - before.lag) / self.seconds

    @property
    def row(self) -> AgentRow:
        facts, known = self.facts, self.facts.is_counted
        return AgentRow(
            app=facts.app,
            agent=facts.agent,
            stream=facts.stream,
            pending=facts.pending if known else None,
            ack_pending=facts.ack_pending if known else None,
            redelivered=facts.redelivered if known else None,
            dead_letters=facts.dead_letters,
            rate=self.lag_rate,
            **structs.asdict(self.judgement),
        )


async def of_server(
    admin: Admin,
    config: Config,
    now: ServerSnapshot,
    before: ServerSnapshot | None,
    *,
    code: Collection[Key] = (),
) -> list[AgentHealth]:
    """Return how all agents are, of whatever app, from two snapshots; `code` are agents of which the code is at hand.
    What is denied is noted in the later snapshot. Raises `BackendError`.
    """
    counts = agent_inventory.dead_letters(admin, without=now.unavailable)
    dead = await asked(now.denied, "dead letters", counts, None)
    seconds = now.at - before.at if before is not None else 0.0
    found = [
        structs.replace(each, dead_letters=None if dead is None else dead.get((each.app, each.agent), 0))
        for each in _compared(now, before, declared=[*declared(config, now.recorded.apps), *code])
    ]
    return [AgentHealth(facts=each, judgement=health.judge(each), seconds=seconds) for each in found]


def by_consumer(
    now: ServerSnapshot, before: ServerSnapshot, *, declared: Iterable[Key] = ()
) -> dict[tuple[str, str], Judgement]:
    """Return how agents are, by stream and consumer; `declared` ones are among them even where they have none."""
    return {
        (each.stream, agents.durable_name(each.app, each.agent)): health.judge(each)
        for each in _compared(now, before, declared=declared)
    }


def _compared(now: ServerSnapshot, before: ServerSnapshot | None, *, declared: Iterable[Key]) -> Iterator[AgentFacts]:
    """Yield what `now` shows of each agent, beside what the earlier snapshot did; an agent that is new is compared
    with itself."""
    known = {(each.app, each.agent, each.stream): each for each in facts(before)} if before is not None else {}
    for each in facts(now, declared=declared):
        earlier = known.get((each.app, each.agent, each.stream), each) if before is not None else None
        yield structs.replace(each, before=earlier)


def facts(now: ServerSnapshot, *, declared: Iterable[Key] = ()) -> list[AgentFacts]:
    """Return what a snapshot shows of each agent, in the order of the streams, apps and agents. `declared` ones are
    among them even where they have never run."""
    streams = {name for name in now.streams if not name.startswith((OURS, BUCKET))}
    found = {(*of, stream) for stream, name in now.consumers if stream in streams and (of := agent_of(name))}
    declared = [*declared]
    reads = {key[:2]: key[2] for key in declared}
    for stream, name in now.recorded.consumers:
        of = agent_of(name)
        # One that reads another stream now has left its record of the former one.
        if of is not None and not own_streams.app_of(RETRIES, stream) and reads.get(of, stream) == stream:
            found.add((*of, stream))
    ran = {key[:2] for key in found}
    found |= {key for key in declared if key[:2] not in ran}
    workers = _workers(now)
    return [_facts_of(now, *key, workers=workers.get(key, ())) for key in sorted(found, key=lambda key: (key[2], key))]


def _facts_of(
    now: ServerSnapshot, app: str, agent: str, stream: str, *, workers: Collection[WorkerRecord]
) -> AgentFacts:
    name, recorded = agents.durable_name(app, agent), now.recorded
    events = _consumer(now, stream, name)
    record: ConsumerRecord | Unknown | None = recorded.consumers.get((stream, name))
    failure: LastFailure | Unknown | None = recorded.failures.get((app, "agents", agent))
    if denied := now.denied.reason("records"):
        record = failure = Unknown(denied)
    elif record is None and isinstance(events, ConsumerInfo):
        record = Unknown("its workers have not recorded how far it has come, or the records were purged")
        failure = record if failure is None else failure
    deploys = recorded.deploys.get(app, ())
    return AgentFacts(
        app=app,
        agent=agent,
        stream=stream,
        now=recorded.time,
        stream_info=(info := _stream(now, stream)),
        taken_by=_taken_by(now, record, info) if isinstance(record, ConsumerRecord) else "",
        events=events,
        retries=_consumer(now, own_streams.of_app(RETRIES, app), name),
        record=record,
        failure=failure,
        workers=_known_workers(now, app, workers, events),
        functions=recorded.functions.get((stream, name), ()),
        pause=recorded.agent_pauses.get((app, agent)),
        oldest_pending=now.oldest_pending.get((stream, name)),
        deployed=(deploys[-1].again or deploys[-1].time) if deploys else None,
    )


def _stream(now: ServerSnapshot, stream: str) -> StreamInfo | Unknown | None:
    if stream in now.unavailable:
        return Unknown(f"no server answers for {stream}")
    if stream not in now.streams and (denied := now.denied.reason("streams")):
        return Unknown(denied)
    return now.streams.get(stream)


def _consumer(now: ServerSnapshot, stream: str, name: str) -> ConsumerInfo | Unknown | None:
    if (found := now.consumers.get((stream, name))) is not None:
        return found
    if isinstance(of_stream := _stream(now, stream), Unknown):
        return of_stream
    if f"{stream} > {name}" in now.unavailable:
        return Unknown(f"no server answers for its consumer on {stream}")
    if any(subject.endswith(f".{stream}") for subject in now.denied.subjects("consumers")):
        return Unknown(now.denied.reason("consumers"))
    return None


def _workers(now: ServerSnapshot) -> Mapping[Key, list[WorkerRecord]]:
    """Return the workers that live, as far as they are known, by what they have."""
    found = defaultdict[Key, list[WorkerRecord]](list)
    for app, of_app in () if isinstance(now.workers, Unknown) else now.workers.items():
        for worker in () if isinstance(of_app, Unknown) else of_app.living:
            for agent, at_work in worker.agents.items():
                found[app, agent, at_work.stream].append(worker)
    return found


def _known_workers(
    now: ServerSnapshot, app: str, found: Collection[WorkerRecord], events: ConsumerInfo | Unknown | None
) -> tuple[WorkerRecord, ...] | Unknown:
    if isinstance(of_app := now.workers_of(app), Unknown):
        return of_app
    if not found and isinstance(events, ConsumerInfo) and events.num_waiting:
        return Unknown("workers ask for its notifications, and none of them has recorded itself")
    return tuple(found)


def _taken_by(now: ServerSnapshot, record: ConsumerRecord, of: StreamInfo | Unknown | None) -> str:
    """Return the stream that has the subjects of an agent, whose own stream `of` lacks them."""

    def has(info: StreamInfo) -> bool:
        return any(
            subjects.overlap(one, other) for one in record.filter_subjects for other in info.config.subjects or ()
        )

    if isinstance(of, Unknown) or (of is not None and (has(of) or of.config.mirror or of.config.sources)):
        return ""  # a copy gets its messages from where the subjects are
    return next((name for name, info in now.streams.items() if has(info)), "")


def declared(config: Config, apps: Mapping[str, AppDeclarations]) -> list[Key]:
    """Return the agents that apps have declared, as far as the configuration has the event types that they read."""
    return [
        (app, agent, aviso_admin.stream_of(config, event_type))
        for app, of_app in apps.items()
        for agent, event_type in of_app.agents.items()
        if event_type in config.notification_schema
    ]


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


def workers_in_trouble(now: ServerSnapshot, app: str | None = None) -> list[AgentRow]:
    """Return a row for each worker, and for the workers of each app together, of one app or of all, in trouble."""
    return [
        AgentRow(app=owner, agent=name, stream="-", **structs.asdict(judgement))
        for owner, name, judgement in health.worker_troubles(now.workers, now.consumers, now=now.recorded.time)
        if app in (None, owner)
    ]


def failing(recorded: Recorded, app: str | None = None) -> list[AgentRow]:
    """Return a row for each timer and each task that fails, of one app or of all."""
    return [
        AgentRow(
            app=owner,
            agent=f"{kind.removesuffix('s')} {name}",
            stream="-",
            state="failing",
            since=failure.since,
            why=failing_text(failure),
            needs=True,
            cure=RUN_TIMER.format(quoted(name)) if kind == "timers" else RUNS_AGAIN,
        )
        for (owner, kind, name), failure in sorted(recorded.failures.items())
        if kind != "agents" and app in (None, owner) and failure.until > recorded.time
    ]
