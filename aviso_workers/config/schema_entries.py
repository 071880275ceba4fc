"""Event types that are declared in Python -> entries of `notification_schema`, beside those of the files.

`loading` lays them over what the files say, and then reads and checks them with all else. One that several places
declare is one event type as long as all of them mean the same by it, so that a file which an aviso-server has too may
go on naming what the code declares. Where they differ, neither is a safe choice: a key in another order is another
subject, and a shorter retention removes messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from msgspec import inspect, structs

from aviso_workers.aviso import schema
from aviso_workers.aviso.schema import EventType, PayloadRule, StoragePolicy
from aviso_workers.config.conversion import Reader
from aviso_workers.config.documents import IN_PYTHON, Node

__all__ = ["EventTypes", "clash", "differ", "entry_type", "laid_over"]

EventTypes = Sequence[tuple[str, Node]]
"""Event types that are declared in Python: each by its name, as an entry of `notification_schema`."""

SCHEMA = "notification_schema"


def laid_over(root: Node, event_types: EventTypes) -> tuple[Node, list[tuple[str, str]]]:
    """Return the root with these event types, and what they contradict as (key path, what is wrong)."""
    assert isinstance(root.value, dict)
    section = root.value.get(SCHEMA)
    written = {} if section is None or section.is_null else section.value
    if not event_types or not isinstance(written, dict):
        return root, []
    whole, clashes = dict(written), []
    for name, entry in event_types:
        before = whole.setdefault(name, entry)
        if before is entry:
            continue
        if differ(name, before, entry):
            clashes.append((f"{SCHEMA}.{name}", clash(entry)))
        elif before.place.rank < IN_PYTHON:
            whole[name] = entry  # its place says that it was taken over: see `loading.completed`
    place = section.place if section else next(iter(whole.values())).place
    return structs.replace(root, value={**root.value, SCHEMA: Node(value=whole, place=place)}), clashes


def differ(name: str, before: Node | EventType, entry: Node) -> bool:
    """Return whether two declarations of an event type mean different things, or one of them cannot be read."""
    meaning = _meaning(name, before)
    return meaning is None or meaning != _meaning(name, entry)


def clash(entry: Node) -> str:
    return f"is declared another way at {entry.place}: keep one of them, or let both say the same"


@cache
def entry_type() -> inspect.Type:
    """Return the type of an entry."""
    return inspect.type_info(EventType)


def _meaning(name: str, declared: Node | EventType) -> tuple[object, ...] | None:
    """Return what an event type means to us; None where it cannot be read.

    Descriptions are no part of it, nor what a field `required` demands of the watches of an aviso-server.
    """
    reader = Reader(unused="")
    known: EventType = reader.read(declared, entry_type(), name) if isinstance(declared, Node) else declared
    if reader.mistakes:
        return None
    rules = {field: structs.replace(rule, required=True, description=None) for field, rule in known.identifier.items()}
    payload = known.payload or PayloadRule(required=False)
    return schema.topic_of(name, known), rules, payload, known.storage_policy or StoragePolicy()
