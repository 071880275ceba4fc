"""Control of agents from outside of their workers: pause, resume, reset and removal of their consumers on the server.

Called by the commands `agents pause|resume|reset|rename|rm`. An agent needs no code to be found: the name of its
durable consumer says whose it is.

A retirement of an app, or of one of its agents, removes its consumers, buckets and retries: it is planned from what
there is, and then carried out. The notifications themselves and the dead letters stay. Workers that still run would
recreate the consumers: while there are some, nothing is removed. The server does not know of a worker that is frozen or
cut off from it, whose pull requests have expired. So an app that was active lately counts as one whose workers run,
unless the operator says that they are stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from datetime import UTC, datetime, timedelta

import msgspec
from msgspec import Struct, structs

from aviso_workers.aviso.literals import quoted, time_text
from aviso_workers.aviso.positions import Position
from aviso_workers.backends import Admin, ConsumerInfo
from aviso_workers.config import Config
from aviso_workers.declare import agents
from aviso_workers.declare.agents import Router, agent_of
from aviso_workers.errors import (
    DeclarationError,
    DeniedError,
    InvalidPositionError,
    NotFoundError,
    RefusedError,
    UnavailableError,
)
from aviso_workers.jetstream.specs import BUCKET
from aviso_workers.ops import agent_inventory, aviso_admin, inventory
from aviso_workers.ops.inventory import Listing, T
from aviso_workers.state import (
    consumer_records,
    dead_letter_records,
    declarations,
    failure_counts,
    orders,
    own_buckets,
    own_streams,
    table_records,
    timer_requests,
    window_records,
)
from aviso_workers.state.audit_records import GIVEN_AGAIN, PASSED_OVER, Affected
from aviso_workers.state.consumer_records import ConsumerRecord
from aviso_workers.state.known_agents import KnownAgents
from aviso_workers.state.own_streams import COUNTERS, RETRIES, of_app
from aviso_workers.state.timer_requests import Pause

SKEW_SECONDS = 10.0
"""By how much the clocks of a cluster's servers may differ, the time of a request included, before a pause of some
length is said to be another one."""
UNTIL_RESUMED = datetime(2200, 1, 1, tzinfo=UTC)
"""The end of a pause without end: about as late as a server's nanoseconds allow."""
ACTIVE = timedelta(minutes=5)
"""An agent that was delivered something, or has settled something, within this time may have a worker. A version of an
agent counts as gone after as long (`engine.shared_filters`)."""


class Retirement(Struct, frozen=True, kw_only=True):
    """The plan of a retirement: what would be removed of an app, or of one of its agents."""

    app: str
    agent: str
    """The agent; empty for all of them, and what belongs to the app as a whole."""
    consumers: tuple[tuple[str, str], ...]
    """Stream and name of each."""
    records: tuple[tuple[str, str], ...]
    """Agent and stream of each record of how far a consumer had come."""
    streams: dict[str, int]
    """Streams of buckets, such as failure counts, leases, windows and tables, with their entries."""
    subjects: dict[tuple[str, str], int]
    """By stream and subject, messages in streams that others share."""
    dead_letters: int
    """Dead letters, which stay until they are dropped."""

    @property
    def nothing(self) -> bool:
        return not (self.consumers or self.records or self.streams or self.subjects)


async def plan_retirement(admin: Admin, owner: str, agent: str = "", *, workers_stopped: bool = False) -> Retirement:
    """Return the plan to retire the app named `owner`, or its agent `agent`.

    Raises `NotFoundError` where there is nothing, `RefusedError` where a worker of it asks for notifications or, unless
    all `workers_stopped`, may hold some or was active lately, `UnavailableError` where no server answers for something
    that may be the app's.
    """
    streams = _require_all(await inventory.streams(admin))
    listed = [_require_all(await inventory.consumers(admin, stream.name)) for stream in streams if stream.consumers]
    consumers = [consumer for found in listed for consumer in found if _is_of(consumer.name, owner, agent)]
    _require_no_workers(consumers, workers_stopped=workers_stopped)
    dead_letters = await agent_inventory.dead_letters(admin)
    found = Retirement(
        app=owner,
        agent=agent,
        consumers=tuple((consumer.stream, consumer.name) for consumer in consumers),
        records=tuple(
            (of, stream)
            for (by, of, stream) in await consumer_records.stored(admin)
            if by == owner and agent in ("", of)
        ),
        streams={
            stream.name: stream.messages
            for stream in streams
            if stream.name.startswith(BUCKET) and own_buckets.is_of(stream.name.removeprefix(BUCKET), owner, agent)
        },
        subjects=await _subjects(admin, owner, agent),
        dead_letters=sum(count for of, count in dead_letters.items() if of[0] == owner and agent in ("", of[1])),
    )
    if found.nothing:
        raise NotFoundError(f"there is nothing of {f'agent {agent} of ' if agent else ''}app {owner} on this server")
    return found


def _require_no_workers(consumers: Sequence[ConsumerInfo], *, workers_stopped: bool) -> None:
    if at_work := sorted({consumer.name for consumer in consumers if consumer.num_waiting}):
        raise RefusedError(f"workers ask for notifications of {', '.join(at_work)}: stop them first")
    if not workers_stopped and (why := [text for consumer in consumers if (text := why_active(consumer))]):
        raise RefusedError(
            f"{'; '.join(why)}: a worker that is frozen or cut off from the server may go on later. Make sure that all "
            "workers are stopped, and say --workers-stopped"
        )


def why_active(consumer: ConsumerInfo) -> str:
    """Return the reason why a worker may have the consumer open, although none asks for anything; empty: none has."""
    if consumer.num_ack_pending:
        return f"{consumer.name} of {consumer.stream} has {consumer.num_ack_pending} delivered and not settled"
    last = max(filter(None, (consumer.last_delivered, consumer.last_settled)), default=None)
    if last is None or consumer.time - last > ACTIVE:
        return ""
    return f"{consumer.name} of {consumer.stream} was active {(consumer.time - last).total_seconds():.0f} s ago"


def _require_all(listed: Listing[T]) -> list[T]:
    if listed.unavailable:
        raise UnavailableError(
            f"no server answers for {', '.join(listed.unavailable)}: start the server that has it first"
        )
    return listed.found


async def retire(admin: Admin, plan: Retirement) -> None:
    """Remove everything in the plan. What is gone already is passed over. Raises `BackendError`."""
    for stream, consumer in plan.consumers:
        with suppress(NotFoundError):
            await admin.delete_consumer(stream, consumer)
    for agent, stream in plan.records:
        await consumer_records.remove(admin, app=plan.app, agent=agent, stream=stream)
    await consumer_records.remove_notes(admin, app=plan.app, agent=plan.agent)
    if not plan.agent:
        await declarations.remove(admin, app=plan.app)
    for stream, subject in plan.subjects:
        with suppress(NotFoundError):
            await admin.purge_stream(stream, subject=subject)
    for stream in plan.streams:
        with suppress(NotFoundError):
            await admin.delete_stream(stream)


async def _subjects(admin: Admin, owner: str, agent: str) -> dict[tuple[str, str], int]:
    """Return the number of messages to purge by stream and subject: the retries, and the counters of the app or the
    failure counts and decisions of the agent.
    """
    wanted = [(own_streams.of_app(RETRIES, owner), dead_letter_records.retry_subject(owner, agent or "*"))]
    if not agent:
        wanted.append((own_streams.of_app(COUNTERS, owner), f"{table_records.COUNTERS_SUBJECT}.{owner}.>"))
    if agent:
        failures = failure_counts.bucket_of(owner)
        ordered = orders.bucket_of(owner)
        wanted += [(f"KV_{bucket}", f"$KV.{bucket}.{agent}.>") for bucket in (failures, ordered)]
        wanted.append((f"KV_{ordered}", f"$KV.{ordered}.{timer_requests.pause_key(owner, agent, of='agents')}"))
    found = {}
    for stream, subject in wanted:
        with suppress(NotFoundError):
            if count := sum((await admin.subject_counts(stream, subject=subject)).values()):
                found[stream, subject] = count
    return found


def _is_of(consumer: str, owner: str, agent: str) -> bool:
    of = agent_of(consumer)
    return of is not None and of[0] == owner and agent in ("", of[1])


class AgentConsumer(Struct, frozen=True, kw_only=True):
    """The durable consumer of an agent on the stream of its events."""

    app: str
    agent: str
    stream: str
    """The stream of its events."""
    beside: tuple[str, ...] = ()
    """Other streams on which the agent has a consumer too, as while two versions of it read different event types."""

    @property
    def name(self) -> str:
        return f"{self.app}/{self.agent}"

    @property
    def consumer(self) -> str:
        return agents.durable_name(self.app, self.agent)


class Reset(Struct, frozen=True, kw_only=True):
    """The plan of a reset: where the agent would go on, and what that means for its notifications."""

    agent: AgentConsumer
    filter_subjects: tuple[str, ...]
    has_consumer: bool
    """Where it has none, the position is recorded, and the worker that creates its consumer begins there."""
    sequence: int
    """Where the agent would go on."""
    settled: int
    """Up to where it has settled everything."""
    last: int
    """The last sequence of the stream."""
    again: int
    """Notifications that it has been given before and would be given again."""
    passed_over: int
    """Notifications that it would have been given and would not be any more."""
    unsettled: int
    """Notifications before `sequence` that may be in its hands now, or wait for their next attempt: at most so many,
    which would not be tried again."""

    @property
    def affected(self) -> tuple[Affected, ...]:
        """The notifications that are passed over, or given again, as a record has them."""
        is_back = self.sequence <= self.settled
        how, first, last = (
            (GIVEN_AGAIN, self.sequence, self.last) if is_back else (PASSED_OVER, self.settled + 1, self.sequence - 1)
        )
        ranges = ((first, last),) if first <= last else ()
        return (Affected(how=how, of=self.agent.name, stream=self.agent.stream, ranges=ranges),)


class Rename(Struct, frozen=True, kw_only=True):
    """The plan of a rename: from where the agent would go on under its new name."""

    app: str
    agent: str
    to_app: str
    to: str
    records: Mapping[str, ConsumerRecord]
    """By stream, up to where the agent has settled everything."""
    unsettled: int
    """Notifications that were delivered and not settled: they are handled from their first attempt again."""
    again: int
    """Notifications that were settled after an unsettled one: they are handled again."""
    to_is_new: bool
    """Whether nothing is known of the app that the agent would belong to, as where its name is misspelled."""


def declared(app: Router, config: Config, agent: str) -> AgentConsumer:
    """Return an agent of an app whose code is at hand. Raises `DeclarationError`, `UnknownEventTypeError`."""
    for known in app.agents:
        if known.name == agent:
            return AgentConsumer(app=app.name, agent=agent, stream=aviso_admin.stream_of(config, known.event_type))
    names = ", ".join(known.name for known in app.agents)
    raise DeclarationError(f"app {app.name!r} has no agent {agent!r}; it has: {names or 'none'}")


async def find(admin: Admin, config: Config, owner: str, agent: str, *, several: bool = False) -> AgentConsumer:
    """Return the consumer of an agent of the app named `owner`, as it is, or was when a worker recorded it, on one of
    the configured event streams, or on a stream that workers have recorded.

    Raises `NotFoundError`, and `DeclarationError` where there are several, unless `several` may be.
    """
    event_streams = await aviso_admin.event_streams(admin, config)
    consumer = agents.durable_name(owner, agent)
    records = await consumer_records.stored(admin)
    retries = of_app(RETRIES, owner)
    recorded = [stream for app, name, stream in records if (app, name) == (owner, agent) and stream != retries]
    streams = dict.fromkeys([*event_streams, *recorded])
    found = [stream for stream in streams if await inventory.existing(admin.consumer_info(stream, consumer))]
    if not found:  # it was deleted, or removed
        found = [stream for stream in event_streams if stream in recorded]
    if not found:
        present = [found for stream in event_streams for found in await agent_inventory.agents(admin, stream)]
        others = {name for name_of_app, name in present if name_of_app == owner}
        known = f"; that app has: {', '.join(sorted(others))}" if others else ""
        apps = f"; there are apps: {', '.join(sorted({found for found, _ in present}))}" if present else ""
        raise NotFoundError(f"no agent {agent} of app {owner} reads one of the configured streams{known or apps}")
    if len(found) > 1 and not several:
        raise DeclarationError(
            f"agent {agent} of app {owner} has a consumer on each of {', '.join(found)}: "
            f"name the one in use as MODULE:APP/{agent}, and delete the other"
        )
    return AgentConsumer(app=owner, agent=agent, stream=found[0], beside=tuple(found[1:]))


def end_text(until: datetime) -> str:
    """Return the end of a pause as text, after the word `until`."""
    return "it is resumed" if until == UNTIL_RESUMED else time_text(until)


async def pause(
    admin: Admin, agent: AgentConsumer, *, seconds: float | None = None, by: str = "", note: str = ""
) -> datetime:
    """Pause the agent for so long, by the server's clock, or until it is resumed: it is delivered nothing, neither
    events nor retries. Who does it is recorded with the `note` where it is said. Return until when.

    Raises `RefusedError` where the server says that it is paused for another time, `BackendError`.
    """
    until = await _pause(admin, agent.stream, agent.consumer, seconds)
    for stream in agent.beside:
        await _pause(admin, stream, agent.consumer, seconds)
    with suppress(NotFoundError):  # made when its first worker starts
        await _pause(admin, of_app(RETRIES, agent.app), agent.consumer, seconds)
    try:
        if by:
            bucket = await orders.bucket(admin, agent.app)
            made = Pause(since=await bucket.time(), until=until, by=by, note=note)
            await bucket.put(timer_requests.pause_key(agent.app, agent.agent, of="agents"), msgspec.json.encode(made))
    except DeniedError:  # it is paused, and only nobody is told by whom
        if note:
            raise
    return until


async def resume(admin: Admin, agent: AgentConsumer) -> None:
    """Resume the agent. Raises `BackendError`."""
    for stream in (agent.stream, *agent.beside):
        await admin.pause_consumer(stream, agent.consumer, until=None)
    with suppress(NotFoundError):
        await admin.pause_consumer(of_app(RETRIES, agent.app), agent.consumer, until=None)
    with suppress(DeniedError):  # of another pause, it is not told
        await timer_requests.withdraw(admin, agent.app, timer_requests.pause_key(agent.app, agent.agent, of="agents"))


async def plan_reset(admin: Admin, agent: AgentConsumer, to: Position) -> Reset:
    """Return what `reset` would do: to a sequence, to the first notification of a time or later, or, for a position of
    neither, behind the last notification.

    Where the consumer is gone, that is judged by the record of workers. Raises `InvalidPositionError` beyond the end of
    the stream, `NotFoundError` where there is no record either, `BackendError`.
    """
    stream = agent.stream
    last = (await admin.stream_info(stream)).last_sequence
    info, settled = None, 0
    try:
        info = await admin.consumer_info(stream, agent.consumer)
    except NotFoundError:
        record = (await consumer_records.stored(admin)).get((agent.app, agent.agent, stream))
        if record is None:
            raise
        filters, settled = record.filter_subjects, record.ack_floor
        pending = await admin.count(stream, filter_subjects=filters, start_sequence=record.ack_floor + 1)
    else:
        filters, pending, settled = tuple(info.config.filters), info.num_pending, info.settled
    sequence = last + 1 if to == Position() else max(1, to.sequence or 0)
    if to.time is not None:
        reading = admin.read(stream, filter_subjects=filters, start_time=to.time, last_sequence=last)
        async with aclosing(reading):
            first = await anext(reading, None)
        sequence = first.sequence if first else last + 1
    if sequence > last + 1:
        raise InvalidPositionError(f"{stream} ends at {last}: an agent cannot go on at {sequence}")
    ahead = await admin.count(stream, filter_subjects=filters, start_sequence=sequence)
    return Reset(
        agent=agent,
        filter_subjects=filters,
        has_consumer=info is not None,
        sequence=sequence,
        settled=settled,
        last=last,
        again=max(0, ahead - pending),
        passed_over=max(0, pending - ahead),
        unsettled=info.num_ack_pending if info and sequence > info.ack_floor + 1 else 0,
    )


async def reset(admin: Admin, plan: Reset) -> int:
    """Reset the agent as planned, and return how many notifications it has to settle now.

    Raises `RefusedError` where a worker has created its consumer meanwhile, `BackendError`.
    """
    agent, info = plan.agent, None
    if plan.has_consumer:
        info = await admin.reset_consumer(agent.stream, agent.consumer, sequence=plan.sequence)
    await consumer_records.move(
        admin,
        app=agent.app,
        agent=agent.agent,
        stream=agent.stream,
        ack_floor=plan.sequence - 1,
        filter_subjects=plan.filter_subjects,
    )
    if info is not None:
        return info.lag  # a worker that waits is given some at once
    if await inventory.existing(admin.consumer_info(agent.stream, agent.consumer)):
        raise RefusedError(f"a worker has created consumer {agent.consumer} meanwhile: repeat the command")
    return await admin.count(agent.stream, filter_subjects=plan.filter_subjects, start_sequence=plan.sequence)


async def plan_rename(
    admin: Admin, owner: str, agent: str, to: str, *, to_app: str = "", workers_stopped: bool = False
) -> Rename:
    """Return the plan to let the agent `to` of an app, by default of the one named `owner`, go on where `agent` is.

    Raises `NotFoundError` where `agent` is not known, `DeclarationError` for a name that no agent may have,
    `RefusedError` where `to` has run, `agent` is paused, has retries or windows that would stay behind, or where it may
    have a worker.
    """
    to_app = agents.check_name("app", to_app or owner)
    agents.check_name("agent", to)
    if agent_of(agents.durable_name(to_app, to)) != (to_app, to):
        raise DeclarationError(f"no app has the name {to_app!r}, which part of a consumer's name could be")
    if (to_app, to) == (owner, agent):
        raise DeclarationError(f"agent {agent} has that name already: give the name that the code gives it now")
    records = await _records_to_rename(admin, owner, agent, to_app, to)
    unsettled = again = 0
    for stream in (*records, of_app(RETRIES, owner)):
        with suppress(NotFoundError):
            info = await admin.consumer_info(stream, agents.durable_name(owner, agent))
            consumer = AgentConsumer(app=owner, agent=agent, stream=stream)
            _require_renamable(info, consumer, to, workers_stopped=workers_stopped)
            if stream in records:
                records[stream] = structs.replace(records[stream], ack_floor=info.settled)
                ahead = await admin.count(stream, filter_subjects=info.config.filters, start_sequence=info.settled + 1)
                unsettled += info.num_ack_pending
                again += max(0, ahead - info.num_pending - info.num_ack_pending)
    return Rename(
        app=owner,
        agent=agent,
        to_app=to_app,
        to=to,
        records=records,
        unsettled=unsettled,
        again=again,
        to_is_new=not await consumer_records.entries_of(admin, to_app),
    )


async def _records_to_rename(admin: Admin, owner: str, agent: str, to_app: str, to: str) -> dict[str, ConsumerRecord]:
    """Return by stream the records of an agent. Raises as `plan_rename` does."""
    stored = await consumer_records.stored(admin)
    records = {
        stream: record
        for (by, of, stream), record in stored.items()
        if (by, of) == (owner, agent) and stream != of_app(RETRIES, owner) and not record.removed
    }
    if not records:
        raise NotFoundError(f"no worker of app {owner} has recorded an agent {agent}")
    if await inventory.existing(admin.stream_info(f"KV_{window_records.bucket_of(owner, agent)}")):
        raise RefusedError(
            f"agent {agent} keeps windows under its name: let them close, then run `aviso-workers agents rm "
            f"{quoted(f'{owner}/{agent}')}`, and declare {to} with start='new'"
        )
    for stream in records:  # of its retries, an agent has a consumer before it may begin
        if await inventory.existing(admin.consumer_info(stream, agents.durable_name(to_app, to))):
            raise RefusedError(f"agent {to} of app {to_app} has run: it has a consumer on stream {stream}")
    for stream, record in records.items():
        known = stored.get((to_app, to, stream))
        if known is None or known.removed:
            continue
        if known.time != record.time:
            raise RefusedError(
                f"agent {to} of app {to_app} has run: it has settled stream {stream} up to sequence {known.ack_floor}; "
                f"to forget that, run `aviso-workers agents rm {quoted(f'{to_app}/{to}')}`"
            )
        records[stream] = known  # by a rename that was broken off, which knew the consumer
    return records


def _require_renamable(info: ConsumerInfo, of: AgentConsumer, to: str, *, workers_stopped: bool) -> None:
    if info.paused:
        raise RefusedError(
            f"agent {of.agent} is paused, and {to} would not be: stop its workers, and run `aviso-workers agents "
            f"resume {quoted(f'{of.app}/{of.agent}')}` first"
        )
    if info.num_waiting:
        raise RefusedError(f"workers ask for its notifications: stop the workers of {of.agent} first")
    if not workers_stopped and (why := why_active(info)):
        raise RefusedError(f"{why}: stop the workers of {of.agent} first, and say --workers-stopped")
    if of.stream == of_app(RETRIES, of.app) and info.lag:
        raise RefusedError(f"agent {of.agent} has dead letters that are tried again: let its workers finish them")


async def rename(admin: Admin, plan: Rename) -> None:
    """Rename the agent as planned: its position is recorded for the new name, and its consumers are removed. Raises
    `BackendError`; it can be repeated then.
    """
    # First, so that the code's agent is not taken for a new one where `to` is not its name.
    await KnownAgents(admin, app=plan.app, declared=()).rename(plan.agent, plan.to, app=plan.to_app)
    for stream, record in plan.records.items():
        await consumer_records.rename(admin, record, app=plan.to_app, agent=plan.to, stream=stream)
    for stream in (*plan.records, of_app(RETRIES, plan.app)):
        with suppress(NotFoundError):
            await admin.delete_consumer(stream, agents.durable_name(plan.app, plan.agent))
    for stream in (*plan.records, of_app(RETRIES, plan.app)):
        await consumer_records.remove(admin, app=plan.app, agent=plan.agent, stream=stream)
    await consumer_records.remove_notes(admin, app=plan.app, agent=plan.agent)


async def _pause(admin: Admin, stream: str, consumer: str, seconds: float | None) -> datetime:
    now = (await admin.consumer_info(stream, consumer)).time
    until = UNTIL_RESUMED if seconds is None else now + timedelta(seconds=seconds)
    wanted_seconds = (until - now).total_seconds()
    paused_seconds = await admin.pause_consumer(stream, consumer, until=until)
    if not paused_seconds or abs(paused_seconds - wanted_seconds) > SKEW_SECONDS:
        raise RefusedError(
            f"consumer {consumer} of stream {stream} is paused for {paused_seconds:.0f} s, and not for "
            f"{wanted_seconds:.0f} s: the clocks of the servers differ; synchronise them and repeat the command"
        )
    return until
