"""Event types that are declared in Python, added to the `notification_schema` of the configuration's files.

`loading` adds them, and then reads and checks them with the rest of the configuration. An event type may be declared in
several places as long as all declarations mean the same, so that it may be in the code and in a file which an
aviso-server reads too. Where they differ, neither is a safe choice: a key in another order is another subject, and a
shorter retention removes messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from aviso_workers.aviso import schema
from aviso_workers.aviso.schema import EventType, PayloadRule, StoragePolicy
from aviso_workers.config.conversion import Reader, described
from aviso_workers.config.documents import IN_PYTHON, YamlNode

EventTypes = Sequence[tuple[str, YamlNode]]
"""Event types that are declared in Python: each by its name, as an entry of `notification_schema`."""

SCHEMA = "notification_schema"


def laid_over(root: YamlNode, event_types: EventTypes) -> tuple[YamlNode, list[tuple[str, str]]]:
    """Return the root with these event types added, and as (key path, mistake) where one contradicts another place."""
    section = root.keys.get(SCHEMA)
    written = {} if section is None or section.is_null else section.value
    if not event_types or not isinstance(written, dict):
        return root, []
    whole, clashes = dict(written), []
    for name, entry in event_types:
        before = whole.setdefault(name, entry)
        if before is entry:
            continue
        if problem := clash(name, before, entry):
            clashes.append((f"{SCHEMA}.{name}", problem))
        elif before.place.rank < IN_PYTHON:
            whole[name] = entry  # by its place `loading.completed` knows that it was loaded
    place = section.place if section else next(iter(whole.values())).place
    return root.having(SCHEMA, YamlNode(value=whole, place=place)), clashes


def clash(name: str, before: YamlNode | EventType, entry: YamlNode) -> str:
    """Return what is wrong with an event type that this entry declares another way; empty where both mean the same.

    What cannot be read means nothing else.
    """
    here, there = _meaning(name, before), _meaning(name, entry)
    if here is not None and here == there:
        return ""
    said = f"is declared another way at {entry.place}: keep one of them, or let both say the same"
    if here is None or there is None or here[:-1] != there[:-1]:
        return said
    policies = {"this one": here[-1], "that in Python": there[-1]}
    each = [
        place for place, policy in policies.items() if isinstance(policy, StoragePolicy) and policy.allow_duplicates
    ]
    if len(each) != 1:
        return f"{said}; only their storage policies differ"
    return (
        f"{said}. Of the two, only {each[0]} keeps every notification: say `allow_duplicates: true` in the file, or "
        "latest_only=True in Python"
    )


def _meaning(name: str, declared: YamlNode | EventType) -> tuple[object, ...] | None:
    """Return the parts of an event type in which two declarations of it must agree; None where it cannot be read.

    They need not agree in descriptions, nor in `required` of a field, which only concerns watches of an aviso-server.
    """
    reader = Reader(unused="")
    known: EventType = reader.read(declared, described(EventType), name) if isinstance(declared, YamlNode) else declared
    if reader.mistakes:
        return None
    rules = {field: structs.replace(rule, required=True, description=None) for field, rule in known.identifier.items()}
    payload = known.payload or PayloadRule(required=False)
    policy = known.storage_policy or StoragePolicy()
    policy = structs.replace(policy, allow_duplicates=bool(policy.allow_duplicates))
    return schema.topic_of(name, known), rules, payload, policy
