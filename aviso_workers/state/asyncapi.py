"""An app as an AsyncAPI document: its servers, event types, payloads, and what its agents and timers read and publish.

Plain data, made from the declarations and the configuration, without a connection. AsyncAPI 3.0.0:
https://www.asyncapi.com/docs/reference/specification/v3.0.0. Its schemas are of JSON Schema draft 7. A worker that has
started records it beside what `declarations` records, for those who do not have the code.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from aviso_workers.aviso import codec, payloads, topics
from aviso_workers.aviso.codec import read_json
from aviso_workers.aviso.schema import EnumHandler, EventType, PointCloudHandler, PolygonHandler, Rule, Topic, topic_of
from aviso_workers.backends import Backend
from aviso_workers.config import Config
from aviso_workers.config.secrets import with_scheme
from aviso_workers.declare import outputs, resources
from aviso_workers.declare.agents import Agent, Router
from aviso_workers.errors import BackendError, UndecodableError, describe
from aviso_workers.state import consumer_records, declarations

MAX_BYTES = 128 * 1024
"""A larger document is left out: whoever looks at agents reads the whole bucket."""
LEFT_OUT = "x-left-out"
"""The only key of what is recorded where there is no document: why."""

VERSION = "3.0.0"
BINDING_VERSION = "0.1.0"
UNTYPED = (Any, bytes)
"""Types of payloads of which no schema says more."""
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]+")
DOTTED = re.compile(r"[\w.]+")
VALUES = ("default", "examples", "const", "enum")
"""Keywords of JSON Schema whose values are data, and no schemas."""
BY_NAME = {"properties": "properties", "patternProperties": "patternProperties", "$defs": "definitions"}
"""Keywords of JSON Schema with schemas by name, and their names in draft 7."""
Document = dict[str, Any]


def document(config: Config, app: Router[Any], *, version: str) -> Document:
    """Return the AsyncAPI document of an app without mistakes; `version` is the app's own.

    Its channels are the event types that agents read, that the app declares in Python, and that its functions name
    where they publish. An event type that is known when a function runs only is not among these. Servers are without
    users and passwords.
    """
    sent = list(_sent(config, app))
    named = {agent.event_type for agent in app.agents} | {name for name, _ in app.event_types}
    topics_of = {
        name: topic_of(name, config.notification_schema[name])
        for name in sorted(named.union(*(names for *_, names in sent)))
    }
    bases = {name: topic.base for name, topic in topics_of.items()}
    types = _Types(app.agents, bases)
    messages = {name: types.messages(name, config.notification_schema[name]) for name in bases}
    operations = {f"receive-{agent.name}": _receiving(config, app, agent, types) for agent in app.agents}
    for kind, name, function, names in sent:
        for event_type in sorted(names):
            operations[f"send-{kind}-{name}-{bases[event_type]}"] = {
                **_operation("send", bases[event_type], messages[event_type]),
                **_described(f"{kind} {name}", function),
            }
    return {
        "asyncapi": VERSION,
        "info": {"title": app.name, "version": version},
        "defaultContentType": "application/json",
        "servers": _servers(config),
        "channels": {
            topic.base: _channel(name, config.notification_schema[name], topic, messages[name])
            for name, topic in topics_of.items()
        },
        "operations": operations,
        "components": {
            "messages": {key: message for of_one in messages.values() for key, message in of_one.items()},
            "schemas": types.schemas,
        },
    }


async def record(backend: Backend, config: Config, app: Router[Any]) -> None:
    """Record the document of an app. Where that fails, the next start does it: nothing depends on it."""
    made = _encoded(config, app)  # not in a thread: a clock of tests would go on meanwhile
    key = declarations.document_key(app.name)
    with suppress(BackendError):
        known = await consumer_records.entry(backend, key)
        if known is None or known.value != made:
            await (await consumer_records.bucket(backend, app.name)).put(key, made)


async def stored(backend: Backend, app: str) -> Document | None:
    """Return the document that a worker has recorded, or a dict with `LEFT_OUT`, also where what is recorded cannot be
    read; None where there is nothing. Raises `BackendError`.
    """
    if (entry := await consumer_records.entry(backend, declarations.document_key(app))) is None:
        return None
    try:
        found = read_json(entry.value, Document)
        if why := found.get(LEFT_OUT):
            return {LEFT_OUT: str(why)}
        _look_at_all(found)
    except (UndecodableError, LookupError, TypeError, AttributeError) as error:
        return {LEFT_OUT: f"what is recorded cannot be read by this version: {describe(error):.300}"}
    return found


def _look_at_all(found: Document) -> None:
    """Raise an error of Python where a document that somebody else may have written lacks what is read of it."""
    components, channels = found["components"], found["channels"]
    components["schemas"].items()
    for channel in channels.values():
        channel["title"].split()
    for each in found["operations"].values():
        channels[each["channel"]["$ref"].rpartition("/")[2]], each["action"], each["title"]
        for message in each["messages"]:
            components["messages"][message["$ref"].rpartition("/")[2]].items()


def send_operations(found: Mapping[str, Any], agent: str) -> list[Document]:
    """Return the operations in a document by which an agent publishes."""
    every = found.get("operations", {}).values()
    return [each for each in every if (each["action"], each["title"]) == ("send", f"agent {agent}")]


def _encoded(config: Config, app: Router[Any]) -> bytes:
    try:
        made = msgspec.json.encode(document(config, app, version="0.0.0"))
    except Exception as error:  # of any kind: a type of the author's may raise where its schema is made
        return msgspec.json.encode({LEFT_OUT: f"it cannot be made: {describe(error):.500}"})
    if len(made) > MAX_BYTES:
        return msgspec.json.encode({LEFT_OUT: f"it has {len(made):,} bytes, and at most {MAX_BYTES:,} are recorded"})
    return made


def _sent(config: Config, app: Router[Any]) -> Iterator[tuple[str, str, Callable[..., Any], set[str]]]:
    """Yield what publishes, and the event types that its code names."""
    for kind, declared in (("agent", app.agents), ("timer", app.timers), ("task", app.tasks)):
        for each in declared:
            functions = [each.function, *getattr(each, "dead_letter_functions", ())]
            named = set[str]().union(*(outputs.named_event_types(one, methods=outputs.PUBLISHING) for one in functions))
            yield kind, each.name, each.function, named & config.notification_schema.keys()


def _servers(config: Config) -> Document:
    backend = config.notification_backend
    urls = backend.jetstream.masked_servers if backend.kind == "jetstream" else ()
    return {f"nats{number}": _server(url) for number, url in enumerate(urls, start=1)}


def _server(masked: str) -> Document:
    scheme, _, rest = with_scheme(masked).partition("://")
    return {"host": rest.rpartition("@")[2].partition("/")[0], "protocol": scheme}


def _channel(name: str, event_type: EventType, topic: Topic, messages: Iterable[str]) -> Document:
    return {
        "address": ".".join((topic.base, *(f"{{{_key(field)}}}" for field in topic.key_order))),
        "title": name,
        "description": f"Stored in the stream {topics.stream_name(topic.base)}.",
        "parameters": {_key(field): _parameter(event_type.identifier[field]) for field in topic.key_order},
        "messages": {key: {"$ref": f"#/components/messages/{key}"} for key in messages},
    }


def _parameter(rule: Rule) -> Document:
    text = rule.description or (inspect.getdoc(type(rule)) or "").partition("\n")[0]
    if allowed := getattr(rule, "range", None):
        text = f"{text} From {allowed[0]} to {allowed[1]}."
    if isinstance(rule, EnumHandler):
        return {"description": text, "enum": list(dict.fromkeys(value.lower() for value in rule.values))}
    return {"description": text}


def _receiving(config: Config, app: Router[Any], agent: Agent[Any, Any], types: _Types) -> Document:
    return {
        **_operation("receive", types.bases[agent.event_type], [types.message(agent)]),
        **_described(f"agent {agent.name}", agent.function),
        "bindings": {"nats": {"queue": agent.durable_name(app.name), "bindingVersion": BINDING_VERSION}},
        "x-agent": declarations.policy(config.notification_schema, agent),
    }


def _operation(action: str, base: str, messages: Iterable[str]) -> Document:
    channel = f"#/channels/{base}"
    return {
        "action": action,
        "channel": {"$ref": channel},
        "messages": [{"$ref": f"{channel}/messages/{key}"} for key in messages],
    }


def _described(title: str, function: Callable[..., Any]) -> Document:
    text = inspect.getdoc(function) if inspect.isroutine(function) else None
    return {"title": title, **({"description": text} if text else {})}


class _Types:
    """The payload types of an app's agents, each with a name of its own."""

    def __init__(self, agents: Sequence[Agent[Any, Any]], bases: Mapping[str, str]) -> None:
        self.bases = bases
        """By event type."""
        self.schemas: Document = {}
        self._agents = agents
        self._names: list[tuple[Any, str]] = []  # types are not all hashable
        for agent in agents:
            kind = agent.payload_type
            if agent.decode is None and kind not in UNTYPED and not any(kind == known for known, _ in self._names):
                self._add(kind)

    def _add(self, kind: Any) -> None:
        plain = wanted = _key(DOTTED.sub(lambda found: found[0].rpartition(".")[2], resources.spelled(kind))).strip("_")
        number = 1
        while wanted in self.schemas:
            number += 1
            wanted = f"{plain}-{number}"
        self._names.append((kind, wanted))
        schema = payloads.json_schema(kind, f"#/components/schemas/{wanted}/definitions/{{name}}")
        self.schemas[wanted] = _draft_7(schema or {"description": f"Read as {resources.spelled(kind)}."})

    def message(self, agent: Agent[Any, Any]) -> str:
        """Return the name of the message that an agent reads: of its event type and its payload type."""
        base = self.bases[agent.event_type]
        if agent.decode is not None or agent.payload_type is bytes:
            return f"{base}.bytes"
        named = [name for kind, name in self._names if kind == agent.payload_type]
        return f"{base}.{named[0]}" if named else base

    def messages(self, name: str, event_type: EventType) -> Document:
        """Return the messages of an event type: one for each payload type by which it is read."""
        base = self.bases[name]
        found: Document = {}
        for key in sorted({self.message(agent) for agent in self._agents if agent.event_type == name} or {base}):
            kind = key.removeprefix(base).removeprefix(".")
            found[key] = {"name": name, "headers": _headers(event_type)}
            if kind == "bytes":
                found[key]["contentType"] = "application/octet-stream"
            elif kind:
                found[key]["payload"] = {"$ref": f"#/components/schemas/{kind}"}
        return found


def _headers(event_type: EventType) -> Document:
    """Return the schema of a message's headers, in which the identifier of a place travels."""
    names = ["Nats-Msg-Id"]
    for field, rule in event_type.identifier.items():
        if isinstance(rule, PolygonHandler | PointCloudHandler):
            names += [codec.BBOX_HEADER, codec.SPATIAL_HEADERS[field]]
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}}


def _key(name: str) -> str:
    """Return a name as a document may have it for a key or a parameter."""
    return NOT_IN_NAMES.sub("_", name)


def _draft_7(schema: Any) -> Any:
    """Return a JSON Schema of draft 2020-12 as AsyncAPI reads it."""
    if isinstance(schema, list):
        return [_draft_7(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made: Document = {}
    for keyword, value in schema.items():
        if keyword in BY_NAME:
            made[BY_NAME[keyword]] = {name: _draft_7(each) for name, each in value.items()}
        elif keyword in VALUES:
            made[keyword] = value
        elif keyword == "discriminator":  # OpenAPI's; AsyncAPI has the name of the property alone
            made[keyword] = value["propertyName"]
        elif keyword == "items" and "prefixItems" in schema:
            made["additionalItems"] = _draft_7(value)
        else:
            made["items" if keyword == "prefixItems" else keyword] = _draft_7(value)
    return made
