"""The page of one app: what its code declares, and what its outputs lead to."""

from __future__ import annotations

import re
from typing import Any

import anyio
import msgspec
import pytest
from msgspec import Struct

from aviso_workers import App, Notification, Notify
from aviso_workers.config import Config
from aviso_workers.ops import story
from aviso_workers.server import NatsServer
from aviso_workers.state import asyncapi, consumer_records, declarations
from aviso_workers.testing import Harness, harness
from tests.console.conftest import FORM, READER, Served, publish, shown, text_of
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


@pytest.mark.slow
async def test_it_shows_what_the_code_declares(console: Served, catalogue: App, nats_server: NatsServer) -> None:
    async with harness(catalogue, server=nats_server.url), console.client(READER) as client:
        page = await shown(client, PAGE, "AsyncAPI document As a worker")
        found = await client.get(f"{PAGE}?as=asyncapi")
        missing = await client.get("/apps/other")
    assert "agent index publishes to indexed" in page
    assert "catalogue/index mars Notification[Field]" in page
    assert "expver (StringHandler), step (StringHandler)" in page
    assert '"title": "Field"' in page
    assert found.json() == asyncapi.document(catalogue.config, catalogue, version="0.0.0")
    assert (missing.status_code, "no worker has recorded" in text_of(missing.text)) == (404, True)


async def test_what_a_worker_has_declared_of_a_stream_is_shown_and_not_applied(
    console: Served, catalogue: App, nats_server: NatsServer
) -> None:
    """Whoever runs a worker could have the messages of a stream removed, by a declaration that keeps fewer of them."""
    async with harness(catalogue, server=nats_server.url), console.client() as client:
        info = await console.admin.stream_info("INDEXED")
        await console.admin.update_stream({**info.config, "max_msgs_per_subject": 7})
        page = await shown(client, "/streams", "INDEXED : max_msgs_per_subject: 7 -&gt; unlimited")
        answer = await client.post("/actions/apply-streams", content="", headers=FORM)
        assert (await console.admin.stream_info("INDEXED")).config.max_msgs_per_subject == 7
    assert "Not as workers have declared" in page
    assert "Not as configured" not in page
    assert answer.status_code == 200, "other streams are to be created"
    assert "INDEXED" not in text_of(answer.text)


async def test_a_record_without_a_document_says_so(console: Served, catalogue: App, nats_server: NatsServer) -> None:
    schema = catalogue.config.notification_schema
    await declarations.record(
        console.admin, app="catalogue", declared=catalogue, schema=schema, agents=catalogue.agents
    )
    async with console.client() as client:
        await shown(client, PAGE, "No worker has recorded the AsyncAPI document of this app")
        assert "No worker has recorded" in await shown(client, f"{PAGE}?as=asyncapi", "Last deploys")
        bucket = await consumer_records.bucket(console.admin, "catalogue")
        why = msgspec.json.encode({asyncapi.LEFT_OUT: "it has 200,000 bytes"})
        await bucket.put(declarations.document_key("catalogue"), why)
        await shown(client, PAGE, "The AsyncAPI document of this app is not recorded: it has 200,000 bytes")


@pytest.mark.slow
async def test_outputs_and_causes_lead_to_each_other(
    console: Served, catalogue: App, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with harness(catalogue, server=nats_server.url) as t, console.client() as client:
        await publish(catalogue, 3, 1, 2, payload=FIELD)
        await t.settle()
        await shown(client, PAGE, "AsyncAPI document As a worker")
        cause = await client.get("/notification?name=mars@2")
        none = text_of((await client.get("/notification?name=mars@1")).text)
        output = await client.get("/notification?name=INDEXED@1")
        monkeypatch.setattr(story, "MAX_SCANNED", 1)
        cut = text_of((await client.get("/notification?name=mars@2")).text)
    assert re.findall(r'href="/notification\?name=(INDEXED[^"]*)"', cause.text) == ["INDEXED%401"]
    assert "catalogue/index published INDEXED@1 while it handled it: indexed." in text_of(cause.text)
    assert "INDEXED" not in none
    assert 'href="/notification?name=MARS%402"' in output.text
    assert "1 notifications since then were looked at, and there may be more." in cut


@pytest.mark.slow
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
        await shown(client, PAGE, "AsyncAPI document As a worker")
        page = await shown(
            client, "/notification?name=mars@1", "somebody published INDEXED@1 in the same trace: indexed."
        )
    assert "INDEXED@2" not in page


@pytest.mark.slow
async def test_outputs_that_are_not_recorded_are_said_to_be_unknown(
    console: Served, app: App, running: Harness
) -> None:
    await publish(app, 1)
    await running.settle()
    async with console.client() as client:

        async def read() -> str:
            return text_of((await client.get("/notification?name=mars@1")).text)

        await shown(client, "/agents", "field-index/index")
        bucket = await consumer_records.bucket(console.admin, "field-index")
        with anyio.fail_after(PATIENCE_SECONDS):
            while "What the agents of field-index publish is not recorded." not in await read():
                await bucket.put(declarations.document_key("field-index"), b"{}")  # a worker may write its own after it
                await anyio.sleep(0.1)
