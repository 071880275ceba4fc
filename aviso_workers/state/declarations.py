"""What the code of an app declares, recorded for commands that run where the code is not.

An event type that is declared in Python is in no configuration file, so an operator's commands would not know its
stream. A worker that starts records what its app declares in the bucket of `consumer_records`, under
`<app>/declared`. The newest start counts: where two versions of an app run side by side, neither writes again. What is
different from the record before is a deploy (`deploys`).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
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
from aviso_workers.state import consumer_records, deploys
from aviso_workers.state.deploys import Deploy
from aviso_workers.state.kept import Kept
from aviso_workers.version import __version__

__all__ = ["KEPT", "AppDeclarations", "event_types", "policy", "record", "remove", "stored"]

END = "declared"
MAX_CHANGES = 20
"""Changes of one deploy that are told."""
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
    code: dict[str, str] = {}
    """By module that the functions of agents, timers and tasks are in, the digest of its file; none in a record of a
    version that did not say it."""
    event_types: dict[str, Any]
    """The entries of `notification_schema` of the event types that its agents read."""


async def record(
    backend: Backend, *, app: str, declared: Any, schema: Mapping[str, EventType], agents: Collection[Any]
) -> None:
    """Record what the app `declared` has. Where that fails, the next start does it: nothing depends on it."""
    functions = [each.function for each in (*agents, *declared.timers, *declared.tasks)]
    found = AppDeclarations(
        time=clocks.utc_now(backend.clock),
        version=__version__,
        modules=tuple(sorted({str(getattr(agent.function, "__module__", "")) for agent in agents} - {""})),
        agents={agent.name: agent.event_type for agent in agents},
        timers={timer.name: timer.schedule.text for timer in declared.timers},
        tasks=tuple(task.name for task in declared.tasks),
        policies={agent.name: policy(schema, agent) for agent in agents},
        code=dict(_digests({str(getattr(function, "__module__", "")) for function in functions})),
        event_types={
            name: node_of(schema[name], KeyPlace(rank=IN_PYTHON, line=0, source="")).resolved
            for name in sorted({agent.event_type for agent in agents})
        },
    )
    with suppress(BackendError):
        known = _read(await consumer_records.entry(backend, _key(app)))
        if known is None or structs.replace(found, time=known.time) != known:
            # First, so that a worker that is killed in between leaves it to the next one.
            await deploys.note(backend, app, _deploy(known, found))
            await (await consumer_records.bucket(backend)).put(_key(app), msgspec.json.encode(found))


def _digests(modules: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the modules whose files can be read, in order, each with the digest of its file."""
    for name in sorted(modules):
        if file := getattr(sys.modules.get(name), "__file__", None):
            with suppress(OSError):  # as of a module in an archive
                yield name, _digest(Path(file).read_bytes())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _deploy(known: AppDeclarations | None, found: AppDeclarations) -> Deploy:
    changes = list(_changes(known, found)) if known else ["the first start that was recorded"]
    more = len(changes) - MAX_CHANGES
    return Deploy(
        time=found.time,
        version=found.version,
        fingerprint=_digest(msgspec.json.encode(structs.replace(found, time=datetime.min), order="sorted")),
        changed=tuple(changes) if more <= 0 else (*changes[:MAX_CHANGES], f"and {more} more"),
    )


def _changes(known: AppDeclarations, found: AppDeclarations) -> Iterator[str]:
    """Yield in words what is different from the record before."""
    if found.version != known.version:
        yield f"aviso-workers {known.version} -> {found.version}"
    for module, digest in found.code.items() if known.code else ():
        if known.code.get(module) != digest:
            yield f"code of {module} {'changed' if module in known.code else 'added'}"
    before, now = _settings(known), _settings(found)
    for name in [*before, *(each for each in now if each not in before)]:
        if name not in before or name not in now:
            yield f"{name} {'added' if name in now else 'removed'}"
        else:
            yield from (f"{name}: {change}" for change in _different(before[name], now[name]))
    for name in found.event_types:
        if name in known.event_types and known.event_types[name] != found.event_types[name]:
            yield f"event type {name} changed"


def _settings(declared: AppDeclarations) -> dict[str, Mapping[str, str]]:
    """Return the settings of agents, timers and tasks as text, by kind and name."""
    return {
        **{f"agent {name}": declared.policies.get(name, {}) for name in declared.agents},
        **{f"timer {name}": {"schedule": schedule} for name, schedule in declared.timers.items()},
        **{f"task {name}": {} for name in declared.tasks},
    }


def _different(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yield the settings that differ; none where the ones before are not known."""
    for setting in sorted(before.keys() | now.keys()) if before else ():
        was, is_ = before.get(setting, "none"), now.get(setting, "none")
        if was != is_:
            yield f"{setting}: {_apart(was, is_)}"


def _apart(was: str, is_: str) -> str:
    """Return both texts, without the parts between semicolons in which they are the same."""
    parts = [each for each in zip(was.split("; "), is_.split("; "), strict=False) if each[0] != each[1]]
    if was.count("; ") == is_.count("; "):
        was, is_ = ("; ".join(each) for each in zip(*parts, strict=True))
    return f"{was} -> {is_}"


async def stored(backend: Backend) -> dict[str, AppDeclarations]:
    """Return what apps declare, by app. Raises `BackendError`."""
    found = [(each.key.split("/"), _read(each)) for each in await consumer_records.entries(backend)]
    return {key[0]: declared for key, declared in found if declared and len(key) == 2 and key[1] == END}


async def remove(backend: Backend, *, app: str) -> None:
    """Forget what a retired app declares. Raises `BackendError`."""
    for key in (_key(app), deploys.key_of(app)):
        if await consumer_records.entry(backend, key) is not None:
            await (await consumer_records.bucket(backend)).delete(key)


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
