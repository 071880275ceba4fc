"""What the code of an app declares, recorded for commands that run where the code is not.

An event type that is declared in Python is in no configuration file, so an operator's commands would not know its
stream. A worker that starts records what its app declares in the bucket of `consumer_records`, under
`<app>/declared`. The newest start counts: where two versions of an app run side by side, neither writes again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct, structs

from aviso_workers import clocks
from aviso_workers.aviso import topics
from aviso_workers.aviso.codec import read_json
from aviso_workers.aviso.literals import Duration
from aviso_workers.aviso.schema import EventType, parse_where
from aviso_workers.backends import Backend
from aviso_workers.config.documents import IN_PYTHON, KeyPlace, YamlNode, node_of
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.batches import Batch
from aviso_workers.declare.retry import Backoff
from aviso_workers.errors import BackendError, UndecodableError
from aviso_workers.jetstream.key_value import Entry
from aviso_workers.state import consumer_records
from aviso_workers.state.kept import Kept
from aviso_workers.version import __version__

__all__ = ["KEPT", "AppDeclarations", "event_types", "policy", "record", "remove", "stored"]

END = "declared"
KEPT = (
    Kept(
        bucket=consumer_records.BUCKET,
        key=f"<app>/{END}",
        holds="what the code of the app declares (`AppDeclarations`)",
        until="until `agents rm` of the app",
    ),
)


class AppDeclarations(Struct, frozen=True, kw_only=True):
    """What an app declares."""

    time: datetime
    """When the worker started that recorded it, by its own clock."""
    version: str
    """Of aviso-workers."""
    modules: tuple[str, ...]
    """Those that the functions of its agents are in."""
    agents: dict[str, str]
    """Agents, and the event type that each reads."""
    timers: dict[str, str]
    """Timers, and the schedule of each as text."""
    tasks: tuple[str, ...]
    policies: dict[str, dict[str, str]] = {}
    """By agent, its policy as `policy` returns it; none in a record of a version that did not say it."""
    event_types: dict[str, Any]
    """The entries of `notification_schema` of the event types that its agents read."""


async def record(
    backend: Backend, *, app: str, declared: Any, schema: Mapping[str, EventType], agents: Collection[Any]
) -> None:
    """Record what the app `declared` has. Where that fails, the next start does it: nothing depends on it."""
    found = AppDeclarations(
        time=clocks.utc_now(backend.clock),
        version=__version__,
        modules=tuple(sorted({str(getattr(agent.function, "__module__", "")) for agent in agents} - {""})),
        agents={agent.name: agent.event_type for agent in agents},
        timers={timer.name: timer.schedule.text for timer in declared.timers},
        tasks=tuple(task.name for task in declared.tasks),
        policies={agent.name: policy(schema, agent) for agent in agents},
        event_types={
            name: node_of(schema[name], KeyPlace(rank=IN_PYTHON, line=0, source="")).resolved
            for name in sorted({agent.event_type for agent in agents})
        },
    )
    with suppress(BackendError):
        known = _read(await consumer_records.entry(backend, _key(app)))
        if known is None or structs.replace(found, time=known.time) != known:
            await (await consumer_records.bucket(backend)).put(_key(app), msgspec.json.encode(found))


async def stored(backend: Backend) -> dict[str, AppDeclarations]:
    """Return what apps declare, by app. Raises `BackendError`."""
    found = [(each.key.split("/"), _read(each)) for each in await consumer_records.entries(backend)]
    return {key[0]: declared for key, declared in found if declared and len(key) == 2 and key[1] == END}


async def remove(backend: Backend, *, app: str) -> None:
    """Forget what a retired app declares. Raises `BackendError`."""
    if await consumer_records.entry(backend, _key(app)) is not None:
        await (await consumer_records.bucket(backend)).delete(_key(app))


def event_types(
    found: Mapping[str, AppDeclarations], *, known: Collection[str]
) -> dict[str, tuple[YamlNode, tuple[str, ...]]]:
    """Return the event types that are not `known`, by name: the entry that a file would have, and the apps that declare
    another one of that name. The newest record counts.
    """
    entries: dict[str, tuple[YamlNode, tuple[str, ...]]] = {}
    for app, declared in sorted(found.items(), key=lambda item: item[1].time, reverse=True):
        source = (
            f"app {app} ({', '.join(declared.modules)}; aviso-workers {declared.version}), recorded at "
            f"{declared.time.isoformat(timespec='seconds')}"
        )
        for name, entry in declared.event_types.items():
            if name in known:
                continue
            node = node_of(entry, KeyPlace(rank=IN_PYTHON, line=0, source=source))
            taken, others = entries.setdefault(name, (node, ()))
            if taken.resolved != node.resolved:
                entries[name] = (taken, (*others, app))
    return entries


def policy(schema: Mapping[str, EventType], agent: Agent[Any, Any]) -> dict[str, str]:
    """Return the policy that the code declares for an agent, by name, as text. Raises what `App.mistakes` lists."""
    where = parse_where(agent.event_type, schema[agent.event_type], agent.where)
    chosen = agent.policy
    rows = {
        "event type": agent.event_type,
        "where": json.dumps(agent.where) if agent.where else "everything",
        "filters": ", ".join(topics.filter_subjects(where)),
        "takes": f"{agent.form.__name__}[{_name(agent.argument_type)}]" + (", in a thread" if agent.in_thread else ""),
        "concurrency": str(chosen.concurrency),
        "retry": _retry(chosen.retry),
        "ack wait": f"{chosen.ack_wait:g} s",
        "timeout": f"{chosen.timeout:g} s" if chosen.timeout else "none",
        "order by": ", ".join(chosen.order_by) or "none",
        "rate limit": f"{chosen.rate_limit:g} a second" if chosen.rate_limit else "none",
    }
    rows |= {"limit" if limit.concurrent else "rate limit": limit.text for limit in chosen.limits}
    if chosen.singleton:
        rows["singleton"] = "one worker handles one at a time, in order"
    if agent.form is Batch:
        rows["batch"] = f"{chosen.batch.size}, or what came within {chosen.batch.within:g} s"
    if window := chosen.window:
        size, every, lateness = map(Duration, (window.size_seconds, window.every_seconds, window.lateness_seconds))
        rows["window"] = f"{size} every {every}, {lateness} late at most"
    return rows


def _retry(backoff: Backoff) -> str:
    return (
        f"{backoff.attempts:g} attempts; waits from {backoff.first:g} s, times {backoff.factor:g}, "
        f"to {backoff.max:g} s, +-{backoff.jitter:.0%}"
    )


def _name(payload_type: Any) -> str:
    return payload_type.__name__ if isinstance(payload_type, type) else str(payload_type).replace("typing.", "")


def _key(app: str) -> str:
    return f"{app}/{END}"


def _read(entry: Entry | None) -> AppDeclarations | None:
    try:
        return read_json(entry.value, AppDeclarations) if entry is not None else None
    except UndecodableError:
        return None  # of a version that writes another one, or not ours
