"""What the code of an app declares, recorded for commands that run where the code is not.

An event type that is declared in Python is in no configuration file, so an operator's commands would not know its
stream. A worker that starts records what its app declares in the bucket of `consumer_records`, under
`<app>/declared`. The newest start counts: where two versions of an app run side by side, neither writes again.

A start with something else than the record before is a deploy. The last ones are kept beside it, by compare-and-set: of
many workers that start at once, one adds an entry. Code that starts again after other code, as in a rolling deploy or
after a rollback, gets no second entry: its first one moves to the end.
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
from aviso_workers.aviso.literals import Duration, printable
from aviso_workers.aviso.schema import EventType, parse_where
from aviso_workers.backends import Admin, Backend
from aviso_workers.config.documents import IN_PYTHON, KeyPlace, YamlNode, node_of
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.batches import Batch
from aviso_workers.declare.retry import RetryPolicy
from aviso_workers.errors import BackendError, UndecodableError
from aviso_workers.jetstream import key_value
from aviso_workers.jetstream.fields import LONGEST_SAID, Time
from aviso_workers.jetstream.key_value import Entry, record_of
from aviso_workers.state import consumer_records
from aviso_workers.version import __version__

END, DEPLOYS = "declared", "deploys"
MAX_DEPLOYS, MAX_CHANGES = 10, 20
"""How many are kept, and how many changes of one are told."""
MAX_BYTES, MAX_EACH = 512 << 10, 2_000
"""Of a record: its size, and how many event types, agents and timers it may have. A larger one cannot be read, because
operators' tools work on the records of all apps whenever they look."""
MAX_VALUES, MAX_KEY, MAX_LEVELS = 10_000, 200, 8
"""Of a record's event types: the number of values in all entries, the characters of a key, and how deep they nest."""
LOOK_SECONDS = 300.0
"""How often a worker looks whether what its app declares is still recorded."""


class AppDeclarations(Struct, frozen=True, kw_only=True):
    """What an app declares."""

    time: Time
    """When the worker recorded it that started, by the server's clock: what is read has the time when it was stored."""
    version: str
    """Of aviso-workers."""
    modules: tuple[str, ...]
    """Those that the functions of its agents are in."""
    agents: dict[str, str]
    """Agents, and the event type that each reads."""
    timers: dict[str, str]
    """Timers, and the schedule of each as text."""
    tasks: tuple[str, ...]
    policies: dict[str, dict[str, str]]
    """By agent, its policy as `policy` returns it."""
    code: dict[str, str]
    """By module that the functions of agents, timers and tasks are in, the digest of its file."""
    event_types: dict[str, Any]
    """The entries of `notification_schema` of the event types that its agents read, or that its code declares."""


class Deploy(Struct, frozen=True, kw_only=True):
    """What workers of an app have started with. Times are by the server's clock."""

    time: Time
    """When the first of them started."""
    version: str
    """Of aviso-workers."""
    fingerprint: str
    """The digest of all that is declared, and of the code."""
    changed: tuple[str, ...]
    """What was different from the start before, in words."""
    again: Time | None = None
    """When one last started after one that had started with something else; None where none has."""


async def record(
    backend: Backend, *, app: str, declared: Any, schema: Mapping[str, EventType], agents: Collection[Any]
) -> None:
    """Record what the app `declared` has. Where that fails, the next start does it: nothing depends on it."""
    found = AppDeclarations(
        time=clocks.utc_now(backend.clock),
        version=__version__,
        modules=tuple(modules_of(*agents)),
        agents={agent.name: agent.event_type for agent in agents},
        timers={timer.name: timer.schedule.text for timer in declared.timers},
        tasks=tuple(task.name for task in declared.tasks),
        policies={agent.name: policy(schema, agent) for agent in agents},
        code=digests(modules_of(*agents, *declared.timers, *declared.tasks)),
        event_types={
            name: node_of(schema[name], KeyPlace(rank=IN_PYTHON, line=0, source="")).resolved
            for name in sorted({*(agent.event_type for agent in agents), *(name for name, _ in declared.event_types)})
            if name in schema
        },
    )
    with suppress(BackendError):
        known = record_of(await consumer_records.entry(backend, _key(app)), AppDeclarations)
        if known is None or structs.replace(found, time=known.time) != known:
            bucket = await consumer_records.bucket(backend, app)
            found = structs.replace(found, time=await bucket.time())
            # The deploy first, so that a worker that is killed in between leaves both to the next one.
            await key_value.compare_and_set(
                bucket, f"{app}/{DEPLOYS}", read=_read_deploys, change=lambda kept: _noted(kept, known, found)
            )
            await bucket.put(_key(app), msgspec.json.encode(found))


async def stored(admin: Admin) -> dict[str, AppDeclarations]:
    """Return what apps declare, by app. Raises `BackendError`."""
    return parsed(await consumer_records.entries(admin))[0]


def parsed(entries: Iterable[Entry]) -> tuple[dict[str, AppDeclarations], list[str]]:
    """Return what apps declare, among the entries of the bucket, by app; and a sentence for each record that cannot be
    read."""
    found: dict[str, AppDeclarations] = {}
    unreadable = []
    for entry in entries:
        app, _, end = entry.key.partition("/")
        if end != END:
            continue
        try:
            found[app] = structs.replace(_declarations(entry), time=entry.time)
        except UndecodableError as error:
            unreadable.append(f"what app {app} declares is left out, because its record cannot be read: {error!s:.200}")
    return found, unreadable


def _declarations(entry: Entry) -> AppDeclarations:
    """Return what an app declares. Raises `UndecodableError`, also where it is more than an app can mean."""
    if (size := len(entry.value)) > MAX_BYTES:
        raise UndecodableError(f"it has {size:,} bytes, and at most {MAX_BYTES:,} are read")
    found = read_json(entry.value, AppDeclarations)
    for what in ("event_types", "agents", "timers"):
        if (number := len(getattr(found, what))) > MAX_EACH:
            raise UndecodableError(f"it has {number:,} {what.replace('_', ' ')}, and at most {MAX_EACH:,} are read")
    if sum(1 for _ in _values(found.event_types)) > MAX_VALUES:
        raise UndecodableError(f"its event types have more than {MAX_VALUES:,} values")
    return found


def _values(value: object, level: int = 0) -> Iterator[object]:
    """Yield the values inside of one, at all levels. Raises `UndecodableError` for a long key or too many levels."""
    if level > MAX_LEVELS:
        raise UndecodableError(f"its event types are nested deeper than {MAX_LEVELS} levels")
    if isinstance(value, dict) and any(len(key) > MAX_KEY for key in value):
        raise UndecodableError(f"its event types have a key of more than {MAX_KEY} characters")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield item
        yield from _values(item, level + 1)


async def lost(backend: Backend, *, app: str) -> None:
    """Return when the record of an app is gone, as where somebody has deleted the bucket."""
    while True:
        await backend.clock.sleep(LOOK_SECONDS)
        with suppress(BackendError):
            if await consumer_records.entry(backend, _key(app)) is None:
                return


async def remove(backend: Backend, *, app: str) -> None:
    """Forget what a retired app declares. Raises `BackendError`."""
    for key in (_key(app), f"{app}/{DEPLOYS}", document_key(app)):
        if await consumer_records.entry(backend, key) is not None:
            await (await consumer_records.bucket(backend, app)).delete(key)


def deploys(entries: Iterable[Entry]) -> dict[str, tuple[Deploy, ...]]:
    """Return the last deploys among the entries of the bucket, by app, the newest last."""
    found = [(each.key.split("/"), each) for each in entries]
    return {key[0]: _read_deploys(each) for key, each in found if len(key) == 2 and key[1] == DEPLOYS}


def _noted(kept: tuple[Deploy, ...], known: AppDeclarations | None, found: AppDeclarations) -> tuple[Deploy, ...]:
    """Return the deploys with the one that is `found` at the end."""
    fingerprint = digest_of(msgspec.json.encode(structs.replace(found, time=datetime.min), order="sorted"))
    same = [each for each in kept if each.fingerprint == fingerprint]
    if same and kept[-1] in same:
        return kept
    changed = list(_changes(known, found)) if known else ["the first start that was recorded"]
    if (more := len(changed) - MAX_CHANGES) > 0:
        changed[MAX_CHANGES:] = [f"and {more} more"]
    new = Deploy(time=found.time, version=found.version, fingerprint=fingerprint, changed=tuple(changed))
    newest = structs.replace(same[0], again=found.time) if same else new
    return (*(each for each in kept if each not in same), newest)[-MAX_DEPLOYS:]


def _changes(known: AppDeclarations, found: AppDeclarations) -> Iterator[str]:
    """Yield in words what is different from the record before."""
    before, now = _settings(known), _settings(found)
    for name in [*before, *(each for each in now if each not in before)]:
        if name not in before or name not in now:
            yield f"{name} {_word(name, before, now)}"
        for setting in sorted(before[name].keys() | now[name].keys()) if name in before and name in now else ():
            was, is_ = before[name].get(setting, "none"), now[name].get(setting, "none")
            if was != is_ and name in ("code", "event types"):  # of which the values tell nobody anything
                yield f"{setting} {_word(setting, before[name], now[name])}"
            elif was != is_:
                yield f"{name}: {setting}: {_apart(was, is_)}"


def _word(name: str, before: Collection[str], now: Collection[str]) -> str:
    return "added" if name not in before else "changed" if name in now else "removed"


def _settings(declared: AppDeclarations) -> dict[str, dict[str, str]]:
    """Return what changes are looked for in, as text: by kind and name, and by setting."""
    entries = {name: msgspec.json.encode(entry, order="sorted") for name, entry in declared.event_types.items()}
    return {
        "aviso-workers": {"version": declared.version},
        "code": {f"code of {module}": digest for module, digest in declared.code.items()},
        **{f"agent {name}": declared.policies.get(name, {}) for name in declared.agents},
        **{f"timer {name}": {"schedule": schedule} for name, schedule in declared.timers.items()},
        **{f"task {name}": {} for name in declared.tasks},
        "event types": {f"event type {name}": entry.decode() for name, entry in entries.items()},
    }


def _apart(was: str, is_: str) -> str:
    """Return both texts, without the parts between semicolons in which they are the same."""
    if was.count("; ") == is_.count("; "):
        parts = [each for each in zip(was.split("; "), is_.split("; "), strict=True) if each[0] != each[1]]
        was, is_ = ("; ".join(each) for each in zip(*parts, strict=True))
    return f"{was} -> {is_}"


def event_types(
    found: Mapping[str, AppDeclarations], *, known: Collection[str]
) -> dict[str, tuple[YamlNode, tuple[str, ...]]]:
    """Return the event types that are not `known`, by name: the entry that a file would have, and the apps that declare
    another one of that name.

    Of several, that of an app whose agents read it goes before others, then the record that was stored first: an app
    cannot put its own in the place of another app's. One with another base is there too, as `NAME (app APP)`, so that
    the agents on its stream are found.
    """
    ordered = []
    for app, declared in found.items():
        read = set(declared.agents.values())
        ordered += [(name not in read, declared.time, app, name) for name in declared.event_types if name not in known]
    places = {app: KeyPlace(rank=IN_PYTHON, line=0, source=_source(app, each)) for app, each in found.items()}
    entries: dict[str, tuple[YamlNode, tuple[str, ...]]] = {}
    for _, _, app, name in sorted(ordered):
        node = node_of(found[app].event_types[name], places[app])
        taken, others = entries.setdefault(name, (node, ()))
        if taken.resolved == node.resolved:
            continue
        entries[name] = (taken, (*others, app))
        if _base(name, taken) != _base(name, node):
            entries[f"{name} (app {app})"] = (node, ())
    return entries


def _source(app: str, declared: AppDeclarations) -> str:
    modules = f"{', '.join(declared.modules):.200}"
    recorded = declared.time.isoformat(timespec="seconds")
    return f"app {app} ({modules}; aviso-workers {declared.version:.40}), recorded at {recorded}"


def _base(name: str, entry: YamlNode) -> object:
    """Return the base of an event type's entry that may have any form."""
    topic = entry.value.get("topic") if isinstance(entry.value, dict) else None
    base = topic.value.get("base") if topic and isinstance(topic.value, dict) else None
    return base.value if base else name


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
        "limits": "; ".join(map(str, chosen.limits)) or "none",
    }
    if chosen.depends_on:
        rows["depends on"] = chosen.depends_on.name
    if chosen.singleton:
        rows["singleton"] = "one worker handles one at a time, in order"
    if agent.form is Batch:
        rows["batch"] = f"{chosen.batch.size}, or what came within {chosen.batch.within:g} s"
    if window := chosen.window:
        size, every, lateness = map(Duration, (window.size_seconds, window.every_seconds, window.lateness_seconds))
        rows["window"] = f"{size} every {every}, {lateness} late at most"
    return rows


def _retry(backoff: RetryPolicy) -> str:
    return (
        f"{backoff.attempts or 'any number of'} attempts; waits from {backoff.first:g} s, times {backoff.factor:g}, "
        f"to {backoff.max:g} s, +-{backoff.jitter:.0%}"
    )


def _name(payload_type: Any) -> str:
    return payload_type.__name__ if isinstance(payload_type, type) else str(payload_type).replace("typing.", "")


def document_key(app: str) -> str:
    """Return the key under which `asyncapi` records the document of an app."""
    return f"{app}/asyncapi"


def _key(app: str) -> str:
    return f"{app}/{END}"


def _read_deploys(entry: Entry | None) -> tuple[Deploy, ...]:
    return record_of(entry, tuple[Deploy, ...]) or ()


def code_version(app: Any) -> str:
    """Return which code of an app this is: the version that it gives itself, else that of each distribution that its
    functions are of, else a digest of their modules; empty where these cannot be read.

    A distribution is found where its name is that of the package.
    """
    return printable(app.version or _version_of_modules(modules_of(*app.agents, *app.timers, *app.tasks)))[
        :LONGEST_SAID
    ]


def _version_of_modules(names: Iterable[str]) -> str:
    from importlib import metadata  # which takes some milliseconds, and commands need it not

    packages = sorted({name.partition(".")[0] for name in names})
    with suppress(metadata.PackageNotFoundError):
        return ", ".join(f"{package} {metadata.version(package)}" for package in packages)
    found = digests(names)
    return digest_of(repr(found).encode()) if found else ""


def modules_of(*declarations: Any) -> list[str]:
    """Return the modules that the functions of agents, timers and tasks are in."""
    return sorted({str(getattr(each.function, "__module__", "")) for each in declarations} - {""})


def digests(names: Iterable[str]) -> dict[str, str]:
    """Return the digests of the files of these modules, but for those that cannot be read, as in an archive."""
    found = {}
    for name in names:
        with suppress(OSError):
            found[name] = digest_of(Path(getattr(sys.modules.get(name), "__file__", None) or "").read_bytes())
    return found


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
