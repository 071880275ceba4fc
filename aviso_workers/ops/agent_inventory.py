"""The inventory of a server's agents, whether their workers run or not: those of all apps, as the server knows them.

Consumers are asked for by stream and some hundreds at a time, and counts are those of a stream's subjects: a handful of
requests, however many agents there are. An agent is known by its durable consumer, `<app>__<agent>`. A stream that does
not exist has no agents.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import datetime

from msgspec import Struct

from aviso_workers import clocks
from aviso_workers.backends import Admin, ConsumerInfo
from aviso_workers.config import Config, streams
from aviso_workers.declare import agents as agents_
from aviso_workers.errors import NotFoundError, UndecodableError
from aviso_workers.ops import inventory
from aviso_workers.ops.denials import Denials, asked
from aviso_workers.state import (
    consumer_records,
    dead_letter_records,
    declarations,
    delayed_messages,
    failure_counts,
    failure_records,
    timer_requests,
    versions,
)
from aviso_workers.state.consumer_records import ConsumerRecord
from aviso_workers.state.declarations import AppDeclarations, Deploy
from aviso_workers.state.failure_records import LastFailure
from aviso_workers.state.own_streams import DEAD_LETTERS, DELAYED, RETRIES
from aviso_workers.state.timer_requests import Pause, Run
from aviso_workers.state.versions import Registered

__all__ = [
    "ConsumerInfo",
    "ConsumerRecord",
    "Recorded",
    "RunAlone",
    "agent_of",
    "agents",
    "dead_letters",
    "dead_letters_since",
    "due",
    "elsewhere",
    "missing",
    "part_used",
    "recorded",
    "run_alone",
    "streams_of",
    "why_none",
]


class RunAlone(Struct, frozen=True, kw_only=True):
    """A notification that is run alone now, because a worker process ended while it was handled."""

    app: str
    agent: str
    stream: str
    sequence: int


class Recorded(Struct, frozen=True, kw_only=True):
    """What workers have recorded in the bucket of `consumer_records`."""

    time: datetime
    """When it was read, by the server's clock."""
    consumers: dict[tuple[str, str], ConsumerRecord]
    """Of agents' consumers, by stream and consumer."""
    functions: dict[tuple[str, str], tuple[str, ...]]
    """The functions of agents whose workers run several, by stream and consumer: module and qualified name of each."""
    failures: dict[tuple[str, str, str], LastFailure]
    """The last failures of agents, timers and tasks, by app, kind and name."""
    pauses: dict[tuple[str, str], Pause]
    """The pauses of timers that last, by app and timer."""
    runs: dict[tuple[str, str], Run]
    """The last runs of timers that somebody has asked for, by app and timer."""
    deploys: dict[str, tuple[Deploy, ...]] = {}
    """The last deploys, by app, the newest last."""
    apps: dict[str, AppDeclarations] = {}
    """What the apps have declared when a worker of them started last."""
    versions: dict[tuple[str, str, str], tuple[Registered, ...]] = {}
    """The versions of agents whose workers live, or have lived a few minutes ago, by app, agent and stream."""


KEY_VALUE = "KV_"
"""How names of the streams of buckets begin, which no agent reads."""
SUBJECT_TOKENS = dead_letter_records.SUBJECT.count(".") + 3
"""The number of tokens in the subject of a dead letter."""


def streams_of(config: Config) -> list[str]:
    """Return the streams that agents need: those of the configured event types, and our own."""
    event_types = config.notification_schema.items()
    of_events = [streams.event_stream(name, event_type, config).name for name, event_type in event_types]
    return [*of_events, RETRIES, DELAYED]


async def agents(admin: Admin, stream: str) -> dict[tuple[str, str], ConsumerInfo]:
    """Return the consumers of a stream that belong to agents, by app and agent. Raises `BackendError`."""
    consumers = await inventory.existing(admin.consumers(stream))
    return {found: consumer for consumer in consumers or () if (found := agent_of(consumer.name))}


async def recorded(admin: Admin, *, denied: Denials | None = None) -> Recorded:
    """Return what workers have recorded. Raises `BackendError`; with `denied`, what the server denies is noted there as
    `records`.
    """
    entries = await asked(denied, "records", consumer_records.entries(admin), [])
    time = await asked(denied, "records", consumer_records.time(admin), clocks.utc_now(admin.clock))
    registered = versions.parsed(entries)
    functions = {
        (stream, agents_.durable_name(owner, agent)): tuple(sorted({each.version.function for each in found} - {""}))
        for (owner, agent, stream), found in registered.items()
    }
    return Recorded(
        time=time,
        consumers={
            (stream, agents_.durable_name(owner, agent)): record
            for (owner, agent, stream), record in consumer_records.parsed(entries).items()
        },
        functions={key: names for key, names in functions.items() if len(names) > 1},
        failures=failure_records.parsed(entries),
        pauses=timer_requests.pauses(entries, now=time),
        runs=timer_requests.runs(entries),
        deploys=declarations.deploys(entries),
        apps=declarations.parsed(entries),
        versions=registered,
    )


async def elsewhere(admin: Admin, config: Config, recorded: Recorded) -> list[str]:
    """Return which streams agents read that are none of the configured event streams: each with its agents, as text, by
    what workers have recorded and by the consumers that there are: a worker may have no right to record anything.

    Raises `BackendError`.
    """
    known = streams.event_streams(config.notification_schema)
    consumers = {key for key, record in recorded.consumers.items() if not record.removed}
    for stream in await admin.stream_names():
        if stream not in known and not stream.startswith((streams.OURS, KEY_VALUE)):
            with suppress(NotFoundError):  # deleted meanwhile
                consumers |= {(stream, name) for name in await admin.consumer_names(stream)}
    found: dict[str, list[str]] = {}
    for stream, consumer in sorted(consumers):
        agent = agent_of(consumer)
        if agent and stream not in known and not stream.startswith(streams.OURS):
            found.setdefault(stream, []).append("/".join(agent))
    return [f"{stream} by {', '.join(of_stream)}" for stream, of_stream in found.items()]


async def due(admin: Admin) -> dict[str, int]:
    """Return how many delayed notifications are due and not stored yet, by the stream that they are for. Raises
    `BackendError`.
    """
    counts = await _subject_counts(admin, DELAYED, f"{delayed_messages.DUE}.>")
    return {subject.removeprefix(f"{delayed_messages.DUE}."): count for subject, count in counts.items()}


async def missing(
    admin: Admin, stream: str, records: Mapping[tuple[str, str], ConsumerRecord]
) -> dict[tuple[str, str], ConsumerRecord]:
    """Return the records of consumers that are lost, by app and agent: the stream is the same one, and no operator
    removed the consumer.

    Raises `BackendError`.
    """
    recorded = {key: record for key, record in records.items() if key[0] == stream}
    if not recorded:
        return {}
    try:
        created = (await admin.stream_info(stream)).created
        # The names are those that the cluster has: the list has only consumers whose server answers.
        there = set(await admin.consumer_names(stream))
    except NotFoundError:
        return {}
    return {
        agent: record
        for (_, consumer), record in recorded.items()
        if record.holds_for(created) and consumer not in there and (agent := agent_of(consumer))
    }


def why_none(record: ConsumerRecord | None) -> str:
    """Return the reason why an agent has no consumer, where that is as it should be: it is none of `missing`."""
    if record is None:
        return "no worker has ever created its consumer"
    time, settled = record.time.isoformat(timespec="seconds"), f"sequence {record.ack_floor}"
    if record.removed:
        return f"its consumer was removed by an operator at {time}, when all messages up to {settled} were settled"
    return f"its stream was recreated after {time}, when the former stream was settled up to {settled}"


async def run_alone(admin: Admin, among: Collection[str]) -> list[RunAlone]:
    """Return the notifications that are run alone, because a worker process ended while they were handled.

    `among` are the streams that there are; those of the failure counts are read. Raises `BackendError`.
    """
    found: list[RunAlone] = []
    for stream in sorted(among):
        if owner := failure_counts.app_of(stream):
            for subject in await _subject_counts(admin, stream, failure_counts.BEGAN_SUBJECT):
                began = await admin.message(stream, last_by_subject=subject)
                if began is not None and began.data == failure_counts.ALONE:
                    try:
                        agent, of_stream, sequence = failure_counts.parse_began(subject)
                    except UndecodableError:
                        continue  # no worker has written it
                    found.append(RunAlone(app=owner, agent=agent, stream=of_stream, sequence=sequence))
    return found


async def part_used(admin: Admin, stream: str) -> float | None:
    """Return the part of its nearest limit that a stream uses, where it refuses new messages when it is full.

    None where it has no limit, discards old messages, or does not exist. Raises `BackendError`.
    """
    info = await inventory.existing(admin.stream_info(stream))
    return info.part_used if info and info.config.discard == "new" else None


async def dead_letters(admin: Admin) -> dict[tuple[str, ...], int]:
    """Return the number of dead letters that are kept, by app and agent. Raises `BackendError`."""
    counts = await _subject_counts(admin, DEAD_LETTERS)
    return {
        (words[-2], words[-1]): count
        for subject, count in counts.items()
        if len(words := subject.split(".")) == SUBJECT_TOKENS  # else somebody else has stored it
    }


async def dead_letters_since(admin: Admin, app: str, agent: str, since: datetime) -> int:
    """Return how many dead letters of an agent were stored since then. Raises `BackendError`."""
    of_agent = (dead_letter_records.subject_of(app, agent),)
    return await admin.count(DEAD_LETTERS, filter_subjects=of_agent, start_time=since)


async def _subject_counts(admin: Admin, stream: str, subject: str = ">") -> dict[str, int]:
    return await inventory.existing(admin.subject_counts(stream, subject=subject)) or {}


def agent_of(consumer: str) -> tuple[str, str] | None:
    """Return the app and the agent of a durable consumer; None where the name is not that of an agent."""
    app, between, agent = consumer.partition("__")
    return (app, agent) if app and between and agent else None
