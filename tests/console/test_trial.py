"""The page of one app: what its code declares, and what would become of a notification that is tried."""

from __future__ import annotations

import re
from typing import Any

import anyio
import msgspec
import pytest
from msgspec import Struct

from aviso_workers import App, Notification, Notify
from aviso_workers.config import Config
from aviso_workers.console import notification_trail, trial
from aviso_workers.server import NatsServer
from aviso_workers.state import asyncapi, consumer_records, declarations
from aviso_workers.testing import Harness, harness
from tests.console.conftest import READER, Served, publish, shown, text_of
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

PAGE = "/apps/catalogue"
FIELD = {"path": "/data/1", "size": 3}


class Field(Struct):
    path: str
    size: int


@pytest.fixture
def catalogue(config: Config) -> App:
    app = App("catalogue", config=config)
    app.event_type("indexed", key=["expver", "step"])

    @app.agent("mars", where={"class": "od", "step": ["1", "2"]})
    async def index(notification: Notification[Field]) -> Notify:
        """Index a field."""
        return Notify("indexed", {name: notification.identifier[name] for name in ("expver", "step")})

    @app.agent("mars")
    async def count(notification: Notification[Any]) -> None: ...

    @app.agent("indexed")
    async def tell(notification: Notification[Any]) -> None: ...

    return app


def tried(payload: Any = FIELD, event_type: str = "mars", **identifier: Any) -> dict[str, str]:
    lines = "\r\n".join(f"{key} = {value}".replace(" = ", "=") for key, value in mars(**identifier).items())
    return {"event_type": event_type, "identifier": lines, "payload": msgspec.json.encode(payload).decode()}


async def test_it_shows_what_the_code_declares(console: Served, catalogue: App, nats_server: NatsServer) -> None:
    async with harness(catalogue, server=nats_server.url), console.client(READER) as client:
        page = await shown(client, PAGE, "AsyncAPI document as a worker recorded it")
        found = await client.get(f"{PAGE}?as=asyncapi")
        missing = await client.get("/apps/other")
    assert "agent index publishes to indexed" in page
    assert "catalogue/index mars Notification[Field]" in page
    assert "expver (StringHandler), step (StringHandler)" in page
    assert '"title": "Field"' in page
    assert found.json() == asyncapi.document(catalogue.config, catalogue, version="0.0.0")
    assert (missing.status_code, "no worker has recorded" in text_of(missing.text)) == (404, True)


async def test_what_is_tried_is_not_published(console: Served, catalogue: App, nats_server: NatsServer) -> None:
    async with harness(catalogue, server=nats_server.url), console.client(READER) as client:
        await shown(client, PAGE, "AsyncAPI document as a worker")
        page = text_of((await client.post(PAGE, data=tried(step=1))).text)
        other = text_of((await client.post(PAGE, data=tried({"path": 7, "size": 3}, step=3))).text)
        messages = (await console.admin.stream_info("MARS")).messages
    assert "It would be stored. Nothing was published." in page
    assert "subject mars.od." in page
    assert "body {&#34;path&#34;:&#34;/data/1&#34;,&#34;size&#34;:3}" in page
    assert "catalogue/index get it – fits its JSON Schema" in page
    assert "catalogue/count get it – no schema is recorded" in page
    assert "catalogue/tell" not in page.partition("It would be stored.")[2], "it reads another event type"
    assert "not get it where: step must be [&#34;1&#34;, &#34;2&#34;]; its consumer reads mars.od." in other
    assert "does not fit: $.path: 7 is not of type &#39;string&#39;" in other
    assert messages == 0


@pytest.mark.parametrize(
    ("form", "complaint"),
    [
        (tried(step=1) | {"identifier": "step=1"}, "is missing; a notification has every field"),
        (tried(step=1) | {"identifier": "step"}, "'step' is not key=value"),
        (tried(step=1) | {"payload": "{"}, "JSON"),
        (tried(step=1, event_type="other"), "other"),
        (tried(step=1) | {"payload": "[" * 20_000}, "JSON"),
    ],
)
async def test_what_a_publisher_would_be_refused_says_why(
    console: Served, catalogue: App, nats_server: NatsServer, form: dict[str, str], complaint: str
) -> None:
    async with harness(catalogue, server=nats_server.url), console.client() as client:
        await shown(client, PAGE, "Try it")
        answer = await client.post(PAGE, data=form)
    said = text_of(answer.text).replace("&#39;", "'")
    assert answer.status_code == 200
    assert "It would be refused:" in said
    assert complaint in said


async def test_a_form_of_another_page_is_refused(console: Served, catalogue: App, nats_server: NatsServer) -> None:
    async with harness(catalogue, server=nats_server.url), console.client() as client:
        await shown(client, PAGE, "Try it")
        answers = [
            await client.post(PAGE, data=tried(step=1), headers={"sec-fetch-site": "cross-site"}),
            await client.post(PAGE, json={}),
            await client.post(PAGE, data={"payload": "x" * 70_000}),
        ]
    assert [answer.status_code for answer in answers] == [403, 415, 413]


async def test_a_record_without_a_document_says_so(console: Served, catalogue: App, nats_server: NatsServer) -> None:
    schema = catalogue.config.notification_schema
    await declarations.record(
        console.admin, app="catalogue", declared=catalogue, schema=schema, agents=catalogue.agents
    )
    async with console.client() as client:
        await shown(client, PAGE, "No worker has recorded the AsyncAPI document of this app")
        assert "No worker has recorded" in await shown(client, f"{PAGE}?as=asyncapi", "Try it")
        bucket = await consumer_records.bucket(console.admin)
        why = msgspec.json.encode({asyncapi.LEFT_OUT: "it has 200,000 bytes"})
        await bucket.put(declarations.document_key("catalogue"), why)
        await shown(client, PAGE, "The AsyncAPI document of this app is not recorded: it has 200,000 bytes")


async def test_outputs_and_causes_lead_to_each_other(
    console: Served, catalogue: App, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with harness(catalogue, server=nats_server.url) as t, console.client() as client:
        await publish(catalogue, 3, 1, 2, payload=FIELD)
        await t.settle()
        await shown(client, PAGE, "AsyncAPI document as a worker")
        cause = await client.get("/notification?name=mars@2")
        none = text_of((await client.get("/notification?name=mars@1")).text)
        output = await client.get("/notification?name=INDEXED@1")
        monkeypatch.setattr(notification_trail, "MAX_SCANNED", 1)
        cut = text_of((await client.get("/notification?name=mars@2")).text)
    assert re.findall(r'href="/notification\?name=(INDEXED[^"]*)"', cause.text) == ["INDEXED%401"]
    assert "INDEXED@1 catalogue/index indexed." in text_of(cause.text)
    assert "Nothing is found in the streams to which" in none
    assert 'href="/notification?name=MARS%402"' in output.text
    assert "1 notifications since then were looked at, and there may be more." in cut


async def test_an_output_with_a_message_id_of_its_author_is_found_by_its_trace(
    console: Served, catalogue: App, nats_server: NatsServer
) -> None:
    headers = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    indexed = {"expver": "0001", "step": 9}
    async with harness(catalogue, server=nats_server.url) as t, console.client() as client:
        await catalogue.notify_many(
            [
                Notify("mars", mars(step=9), FIELD, headers=headers),
                Notify("indexed", indexed, message_id="mine", headers=headers),
                Notify("indexed", {**indexed, "step": 10}, message_id="another"),
            ]
        )
        await t.settle()
        await shown(client, PAGE, "AsyncAPI document as a worker")
        page = await shown(client, "/notification?name=mars@1", "INDEXED@1 not known, in the same trace indexed.")
    assert "INDEXED@2" not in page


async def test_outputs_that_are_not_recorded_are_said_to_be_unknown(
    console: Served, app: App, running: Harness
) -> None:
    await publish(app, 1)
    await running.settle()
    async with console.client() as client:

        async def read() -> str:
            return text_of((await client.get("/notification?name=mars@1")).text)

        await shown(client, "/agents", "3 of 3 agents.")
        bucket = await consumer_records.bucket(console.admin)
        with anyio.fail_after(PATIENCE_SECONDS):
            while "What the agents of field-index publish is not recorded." not in await read():
                await bucket.put(declarations.document_key("field-index"), b"{}")  # a worker may write its own after it
                await anyio.sleep(0.1)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"properties": {"path": {"pattern": "^(a+)+$"}}}, "fits its JSON Schema"),
        ({"properties": {"path": {"pattern": r"^\p{L}+$"}}}, "fits its JSON Schema"),
        ({"properties": {"path": {"pattern": "^b", "maxLength": 3}}}, "does not fit: $.path: "),
        ({"patternProperties": {"^p": {"type": "integer"}}, "additionalProperties": False}, "fits its JSON Schema"),
        ({"properties": {"pattern": {"type": "string"}}, "required": ["pattern"]}, "does not fit: $: "),
        ({"$ref": "http://127.0.0.1:9/another.json"}, "its JSON Schema cannot be used: "),
        ({"type": "no type"}, "its JSON Schema cannot be used: "),
    ],
)
def test_a_schema_cannot_hold_up_the_console_or_have_it_fetch_anything(schema: dict[str, Any], says: str) -> None:
    message = {"$ref": "#/components/messages/of-index"}
    operation = {"action": "receive", "title": "agent index", "messages": [message]}
    document = {
        "operations": {"index": operation},
        "components": {"messages": {"of-index": {"payload": schema}}, "schemas": {}},
    }
    assert trial._fit(document, "index", b'{"path": "' + b"a" * 40 + b'!"}').startswith(says)
