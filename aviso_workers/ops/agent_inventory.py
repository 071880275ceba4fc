"""The inventory of a server's agents, whether their workers run or not: those of all apps, as the server knows them.

Consumers are asked for by stream and some hundreds at a time, and counts are those of a stream's subjects: a handful of
requests, however many agents there are. An agent is known by its durable consumer, `<app>__<agent>`. A stream that does
not exist has no agents.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from functools import partial

from msgspec import Struct

from aviso_workers import clocks
from aviso_workers.backends import Admin, ConsumerInfo
from aviso_workers.declare import agents as agents_
from aviso_workers.errors import UndecodableError
from aviso_workers.ops import inventory
from aviso_workers.ops.inventory import Denials, asked
from aviso_workers.state import (
    consumer_records,
    dead_letter_records,
    declarations,
    delayed_messages,
    failure_counts,
    failure_records,
    own_streams,
    timer_requests,
    versions,
)
from aviso_workers.state.consumer_records import ConsumerRecord
from aviso_workers.state.declarations import AppDeclarations, Deploy
from aviso_workers.state.failure_records import LastFailure
from aviso_workers.state.own_streams import DEAD_LETTERS, RETRIES
from aviso_workers.state.timer_requests import Pause, Run
from aviso_workers.state.versions import Registered
from aviso_workers.task_groups import asked_of_each


class RunAlone(Struct, frozen=True, kw_only=True):
    """A notification that is run alone now, because a worker process ended while it was handled."""

    app: str
    agent: str
    stream: str
    sequence: int


class Recorded(Struct, frozen=True, kw_only=True):
    """What workers have recorded in the buckets of `consumer_records`, and what operators have ordered of timers."""

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
    agent_pauses: dict[tuple[str, str], Pause] = {}
    """Who has paused agents and why, by app and agent, as far as that is recorded."""
    runs: dict[tuple[str, str], Run]
    """The last runs of timers that somebody has asked for, by app and timer."""
    deploys: dict[str, tuple[Deploy, ...]] = {}
    """The last deploys, by app, the newest last."""
    apps: dict[str, AppDeclarations] = {}
    """What the apps have declared when a worker of them started last."""
    unreadable: list[str] = []
    """A sentence for each app whose record of that cannot be read."""
    versions: dict[tuple[str, str, str], tuple[Registered, ...]] = {}
    """The versions of agents whose workers live, or have lived a few minutes ago, by app, agent and stream."""


async def agents(admin: Admin, stream: str) -> dict[tuple[str, str], ConsumerInfo]:
    """Return the consumers of a stream that belong to agents, by app and agent. Raises `BackendError`."""
    consumers = await inventory.existing(admin.consumers(stream))
    return {found: consumer for consumer in consumers or () if (found := agents_.agent_of(consumer.name))}


async def retries(admin: Admin) -> dict[tuple[str, str], ConsumerInfo]:
    """Return the consumers of what is tried again, by app and agent. Raises `BackendError`."""
    streams = [own_streams.of_app(RETRIES, app) for app in await own_streams.apps_with(admin, RETRIES)]
    found = await asked_of_each(streams, partial(agents, admin))
    return {agent: consumer for of_stream in found.values() for agent, consumer in of_stream.items()}


async def recorded(admin: Admin, *, denied: Denials | None = None) -> Recorded:
    """Return what workers have recorded, and what operators have ordered of timers. Raises `BackendError`; with
    `denied`, what the server denies is noted there as `records`.
    """
    entries = await asked(denied, "records", consumer_records.entries(admin), [])
    ordered = await asked(denied, "records", consumer_records.entries(admin, kind="orders"), [])
    time = await asked(denied, "records", consumer_records.time_of_any(admin), clocks.utc_now(admin.clock))
    registered = versions.parsed(entries)
    apps, unreadable = declarations.parsed(entries)
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
        pauses=timer_requests.pauses(ordered, now=time),
        agent_pauses=timer_requests.pauses(ordered, now=time, of="agents"),
        runs=timer_requests.runs(ordered, entries),
        deploys=declarations.deploys(entries),
        apps=apps,
        unreadable=unreadable,
        versions=registered,
    )


async def due(admin: Admin, among: Collection[str]) -> dict[str, int]:
    """Return how many delayed notifications are due and not stored yet, by the stream that they are for.

    `among` are the streams that there are. Raises `BackendError`.
    """
    found: dict[str, int] = {}
    for stream in filter(None, map(delayed_messages.event_stream_of, among)):
        subject = delayed_messages.due_subject(stream)
        counts = await _subject_counts(admin, delayed_messages.stream_of(stream), subject)
        if subject in counts:
            found[stream] = counts[subject]
    return found


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


async def dead_letters(admin: Admin, *, without: Collection[str] = ()) -> dict[tuple[str, str], int]:
    """Return the number of dead letters that are kept, by app and agent, `without` those of some streams. Raises
    `BackendError`.
    """
    names = [own_streams.of_app(DEAD_LETTERS, app) for app in await own_streams.apps_with(admin, DEAD_LETTERS)]
    counts = await asked_of_each((name for name in names if name not in without), partial(_subject_counts, admin))
    return {
        (app, agent): count
        for name, of_stream in counts.items()
        for subject, count in of_stream.items()
        # else somebody else has stored it
        if subject
        == dead_letter_records.subject_of(
            app := own_streams.app_of(DEAD_LETTERS, name), agent := subject.rpartition(".")[2]
        )
    }


async def dead_letters_since(admin: Admin, app: str, agent: str, since: datetime) -> int:
    """Return how many dead letters of an agent were stored since then. Raises `BackendError`."""
    of_agent = (dead_letter_records.subject_of(app, agent),)
    stream = own_streams.of_app(DEAD_LETTERS, app)
    return await admin.count(stream, filter_subjects=of_agent, start_time=since)


async def _subject_counts(admin: Admin, stream: str, subject: str = ">") -> dict[str, int]:
    return await inventory.existing(admin.subject_counts(stream, subject=subject)) or {}
