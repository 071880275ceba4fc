"""An app as an AsyncAPI document, which the JSON Schema of AsyncAPI 3.0.0 accepts."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pydantic
import pytest
from msgspec import Struct, defstruct

from aviso_workers import App, Batch, GivenUp, Notification, Notify, Router, Window, Windowing, config
from aviso_workers.config import Config
from aviso_workers.config.settings import NotificationBackend
from aviso_workers.state import asyncapi

SCHEMA = json.loads((Path(__file__).parent / "data/asyncapi-3.0.0.json").read_text())
IN_MEMORY = Config(notification_backend=NotificationBackend(kind="in_memory"))


class Place(pydantic.BaseModel):
    """Where it is."""

    name: str


class Ship(pydantic.BaseModel):
    kind: Literal["ship"]
    place: Place


class Car(pydantic.BaseModel):
    kind: Literal["car"]


class Seen(pydantic.BaseModel):
    what: Ship | Car = pydantic.Field(discriminator="kind")


class Field(Struct):
    """A field that has arrived."""

    url: str
    size: tuple[int, str] = (0, "B")
    default: Literal["a", "b"] = "a"


class Near(Struct):
    place: Place
    prefixItems: list[str] = []  # noqa: N815  # a keyword of JSON Schema


@dataclass
class Total:
    bytes: int


def added(total: int, notification: Notification[Total]) -> int:
    return total + (notification.payload.bytes if notification.payload else 0)


FILE = """
notification_backend:
  kind: jetstream
  jetstream:
    nats_url: [tls://fred:pw@nats.example.org:4333, "nats://tok/en@other", "[::1]:4222"]
notification_schema:
  unused: {identifier: {n: {type: IntHandler, required: true}}}
  mars:
    topic: {base: MarsData, key_order: [class, step, "odd field"]}
    identifier:
      class: {type: EnumHandler, values: [OD, rd], required: true}
      step: {type: IntHandler, range: [0, 240], required: false, description: Hours ahead.}
      "odd field": {type: StringHandler, required: true}
      polygon: {type: PolygonHandler, required: false}
"""


def app_of(configuration: Config) -> App:
    """An app with an agent of each kind."""
    app = App("fields", config=configuration)
    router = Router("seen")
    app.event_type("done", key=["n"])
    app.event_type("failed", key=["n"])

    @app.agent("mars", where={"class": "od"})
    async def index(notification: Notification[Field]) -> list[Notify]:
        """Index a field."""
        return [Notify("done", {"n": "1"})]

    @index.on_dead_letter
    async def tell(given_up: GivenUp[Any, Any]) -> Notify:
        return Notify("failed", {"n": "1"})

    @app.agent("mars", name="again")
    def same(batch: Batch[Field]) -> None: ...

    @app.agent("mars")
    async def anything(notification: Notification) -> None: ...

    @app.agent("mars", decode=bytes.hex)
    async def decoded(notification: Notification[str]) -> None: ...

    @app.agent("done", window=Windowing(size="1h", initial=0, fold=added))
    async def sums(window: Window[int]) -> None: ...

    @router.agent("mars")
    async def seen(notification: Notification[list[Seen] | None]) -> None: ...

    @app.agent("mars")
    async def near(notification: Notification[Near]) -> None: ...

    @app.every("1h", singleton=True)
    async def tick() -> None:
        await app.notify("done", {"n": "2"})
        await app.notify("of another app", {"n": "2"})

    app.include(router)
    return app


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("app") / "aviso.yaml"
    file.write_text(FILE)
    app = app_of(config.load(file, environ={}))
    assert app.mistakes() == []
    return asyncapi.document(app.config, app, version="1.2.3")


def test_it_is_valid_and_every_reference_leads_somewhere(made: dict[str, Any]) -> None:
    jsonschema.validate(json.loads(json.dumps(made)), SCHEMA)
    for reference in re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(made)):
        found: Any = made
        for step in reference.split("/"):
            found = found[step]
    assert (made["info"], made["asyncapi"]) == ({"title": "fields", "version": "1.2.3"}, "3.0.0")


def test_servers_are_without_secrets(made: dict[str, Any]) -> None:
    assert made["servers"] == {
        "nats1": {"host": "nats.example.org:4333", "protocol": "tls"},
        "nats2": {"host": "***", "protocol": "nats"},
        "nats3": {"host": "[::1]:4222", "protocol": "nats"},
    }
    assert not re.search("fred|pw|tok/", json.dumps(made))


def test_each_event_type_in_use_is_a_channel(made: dict[str, Any]) -> None:
    assert list(made["channels"]) == ["done", "failed", "MarsData"]
    mars = made["channels"]["MarsData"]
    assert mars["address"] == "MarsData.{class}.{step}.{odd_field}"
    assert mars["parameters"] == {
        "class": {
            "description": "One of `values`, in upper or lower case, and stored in lower case.",
            "enum": ["od", "rd"],
        },
        "step": {"description": "Hours ahead. From 0 to 240."},
        "odd_field": {"description": "Any text, stored as it is."},
    }
    assert [*mars["messages"]] == [
        "MarsData",
        "MarsData.Field",
        "MarsData.Near",
        "MarsData.bytes",
        "MarsData.list_Seen_None",
    ]


def test_agents_receive_and_what_they_and_timers_publish_is_sent(made: dict[str, Any]) -> None:
    operations = made["operations"]
    received = {name for name, each in operations.items() if each["action"] == "receive"}
    assert received == {f"receive-{each}" for each in ("index", "again", "anything", "decoded", "sums", "seen", "near")}
    assert {*operations} - received == {"send-agent-index-done", "send-agent-index-failed", "send-timer-tick-done"}
    index = operations["receive-index"]
    assert index["description"] == "Index a field."
    assert index["messages"] == [{"$ref": "#/channels/MarsData/messages/MarsData.Field"}]
    assert index["bindings"]["nats"]["queue"] == "fields__index"
    assert (index["x-agent"]["where"], index["x-agent"]["takes"]) == ('{"class": "od"}', "Notification[Field]")
    assert operations["send-timer-tick-done"]["messages"] == [{"$ref": "#/channels/done/messages/done.Total"}]


def payload_errors(made: dict[str, Any], message: str, payload: object) -> list[str]:
    """What JSON Schema draft 7 says of a payload."""
    schema = {**made["components"]["messages"][message]["payload"], "components": made["components"]}
    return [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(payload)]


@pytest.mark.parametrize(
    ("message", "good", "bad"),
    [
        ("MarsData.Field", {"url": "u", "size": [1, "B"]}, {"url": "u", "size": ["B", 1]}),
        ("MarsData.Near", {"place": {"name": "Bonn"}, "prefixItems": []}, {"place": {"name": 1}}),
        ("MarsData.list_Seen_None", [{"what": {"kind": "car"}}], [{"what": {"kind": "ship"}}]),
        ("done.Total", {"bytes": 1}, {}),
    ],
)
def test_the_schema_of_a_payload_says_what_an_agent_reads(
    made: dict[str, Any], message: str, good: object, bad: object
) -> None:
    assert payload_errors(made, message, good) == []
    assert payload_errors(made, message, bad) != []


def test_headers_carry_the_message_id_and_the_place(made: dict[str, Any]) -> None:
    messages = made["components"]["messages"]
    assert [*messages["done.Total"]["headers"]["properties"]] == ["Nats-Msg-Id"]
    assert [*messages["MarsData"]["headers"]["properties"]] == ["Nats-Msg-Id", "spatial_bbox", "spatial_geometry"]
    assert messages["MarsData.bytes"]["contentType"] == "application/octet-stream"


def test_types_of_one_name_have_schemas_of_their_own() -> None:
    app = App("twins", config=IN_MEMORY)
    app.event_type("one", key=["n"])
    for field in ("a", "b"):
        kind = defstruct("Same", [(field, int)])

        async def read(notification: Any) -> None: ...

        read.__annotations__["notification"] = Notification[kind]  # type: ignore[valid-type]
        app.agent("one", name=f"read_{field}")(read)
    schemas = asyncapi.document(app.config, app, version="1")["components"]["schemas"]
    assert [[*each["definitions"]["Same"]["properties"]] for each in schemas.values()] == [["a"], ["b"]]
    assert [*schemas] == ["Same", "Same-2"]


def test_an_app_that_declares_an_event_type_and_reads_none() -> None:
    app = App("quiet", config=IN_MEMORY)
    app.event_type("one", key=["n"])
    made = asyncapi.document(app.config, app, version="1")
    jsonschema.validate(made, SCHEMA)
    assert made["servers"] == {}
    assert [*made["channels"]["one"]["messages"]] == ["one"]
