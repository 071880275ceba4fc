"""What would become of a notification if it was published: tried in memory, with what workers have recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import referencing
from msgspec import Struct

from aviso_workers.aviso.codec import Message, NotificationReader, read_json
from aviso_workers.aviso.notifications import Notify, parse_pairs
from aviso_workers.aviso.schema import parse_where, topic_of
from aviso_workers.backends import Admin
from aviso_workers.console.overview import Overview
from aviso_workers.engine.publisher import encode
from aviso_workers.errors import AvisoWorkersError, InvalidIdentifierError
from aviso_workers.jetstream.subjects import matcher
from aviso_workers.ops.denials import Denials, asked
from aviso_workers.state import asyncapi

__all__ = ["Trial", "trial"]


class Trial(Struct, frozen=True, kw_only=True):
    """What would become of a notification."""

    refused: str = ""
    """The error that its publisher would get; empty where it would be stored."""
    message: Message | None = None
    agents: list[tuple[str, str, str, str]] = []
    """Those that read event types with the same topic base: app and name, why each would not get it (empty where it
    would), and whether the payload fits."""


async def trial(admin: Admin, overview: Overview, form: Mapping[str, str]) -> Trial:
    """Return what would become of the notification of a form. Nothing is published. Raises `BackendError`."""
    name, payload = form.get("event_type", "").strip(), form.get("payload", "").strip()
    try:
        pairs = parse_pairs(filter(None, map(str.strip, form.get("identifier", "").splitlines())))
        message = encode(overview.config, Notify(name, pairs, read_json(payload.encode() or b"null", Any)))
    except AvisoWorkersError as error:
        return Trial(refused=str(error))
    bases = {each: topic_of(each, found).base for each, found in overview.config.notification_schema.items()}
    agents, denied = [], Denials()
    for app, declared in sorted(overview.snapshot.recorded.apps.items()):
        readers = [agent for agent, read in declared.agents.items() if bases.get(read) == bases[name]]
        document = await asked(denied, app, asyncapi.stored(admin, app), None) if readers else None
        for agent in readers:
            why_not = "; ".join(_why_not(overview, app, agent, message))
            agents.append((app, agent, why_not, denied.text(app) or _fit(document or {}, agent, message.data)))
    return Trial(message=message, agents=agents)


def _why_not(overview: Overview, app: str, agent: str, message: Message) -> Iterator[str]:
    declared = overview.snapshot.recorded.apps[app]
    name, text = declared.agents[agent], declared.policies.get(agent, {}).get("where", "everything")
    event_type = overview.config.notification_schema[name]
    try:
        for field, wanted in ({} if text == "everything" else json.loads(text)).items():
            reader = NotificationReader(name, event_type, where=parse_where(name, event_type, {field: wanted}))
            if not reader.matches(message):
                yield f"where: {field} must be {json.dumps(wanted)}"
    except InvalidIdentifierError as error:  # the app has another event type of this name
        yield f"its filter cannot be read here: {error}"
    for view in overview.agents:
        if (view.progress.app, view.progress.agent) == (app, agent) and view.progress.events:
            filters = view.progress.events.config.filters
            if filters and not matcher(filters)(message.subject):
                yield f"its consumer reads {', '.join(filters)}"


def _fit(document: Mapping[str, Any], agent: str, data: bytes) -> str:
    """Return whether a body fits the JSON Schema of an agent's payload, as far as that says it."""
    keys = [
        each["$ref"].rpartition("/")[2]
        for found in asyncapi.operations(document, "receive", agent)
        for each in found["messages"]
    ]
    schemas = [each["payload"] for key in keys if "payload" in (each := document["components"]["messages"][key])]
    if not schemas:
        return "no schema is recorded"
    try:
        schema = _without_patterns({"allOf": schemas, "components": document["components"]})
        errors = jsonschema.Draft7Validator(schema, registry=referencing.Registry()).iter_errors(
            read_json(data or b"null", Any)
        )
        misfit = jsonschema.exceptions.best_match(errors)
    except RecursionError:
        return "nested too deeply to be held against a schema"
    except Exception as error:  # of any kind: a schema may be anything, and names documents that are not fetched
        return f"its JSON Schema cannot be used: {error!s:.300}"
    return f"does not fit: {misfit.json_path}: {misfit.message:.300}" if misfit else "fits its JSON Schema"


def _without_patterns(schema: Any) -> Any:
    """Return a schema without its regular expressions: one can take longer than anybody waits, and holds up all."""
    match schema:
        case dict():
            left_out = {key for key in ("pattern", "format") if isinstance(schema.get(key), str)}  # else a property
            if "patternProperties" in schema:
                left_out |= {"patternProperties", "additionalProperties"}
            return {key: _without_patterns(each) for key, each in schema.items() if key not in left_out}
        case list():
            return [_without_patterns(each) for each in schema]
    return schema
