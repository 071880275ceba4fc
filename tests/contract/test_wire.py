"""The wire, byte for byte, against a plain NATS client that does what an aviso-server does."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import nats
import pytest
import yaml
from msgspec.structs import replace
from nats.aio.client import Client, ServerVersion
from nats.js.api import StreamConfig

from aviso_workers import App, Notification
from aviso_workers.aviso.literals import rfc3339
from aviso_workers.errors import RefusedError
from aviso_workers.jetstream.identities import MARK
from aviso_workers.jetstream.specs import ConsumerSpec
from aviso_workers.server import NatsServer
from tests.contract.settings import app_config, mars
from tests.waits import PATIENCE_SECONDS, flushed

pytestmark = pytest.mark.anyio

DOCS = Path(__file__).parents[2] / "docs"

SQUARE = "(52.5,13.4,52.6,13.4,52.6,13.5,52.5,13.5,52.5,13.4)"


@pytest.fixture
async def client(server: NatsServer) -> AsyncGenerator[Client, None]:
    client = await nats.connect(server.url)
    yield client
    await client.close()


@pytest.fixture
async def app(client: Client, server: NatsServer) -> AsyncGenerator[App, None]:
    async with App("wire", config=app_config("jetstream", server.url)) as app:
        yield app


async def test_an_agent_sees_what_an_aviso_server_stores(app: App, client: Client) -> None:
    """Created and published as aviso-server 0.7.1 does: no message id, no headers, the payload alone as body."""
    context = client.jetstream()
    await context.add_stream(StreamConfig(name="MARS", subjects=["mars.>"], max_msgs_per_subject=1))
    await context.publish("mars.od.0001.g.20261120.0000.a%2Eb.12", b'{"location":"here","n":1.0}')
    seen: list[Notification[Any]] = []
    stop = anyio.Event()

    @app.agent("mars", where={"stream": "a.b"})
    async def collect(notification: Notification[Any]) -> None:
        seen.append(notification)
        stop.set()

    with anyio.fail_after(PATIENCE_SECONDS):
        await app._work(stop)
    assert seen[0].identifier == mars(stream="a.b")
    assert seen[0].payload == {"location": "here", "n": 1.0}


async def test_what_we_store_is_what_an_aviso_server_stores(app: App, client: Client) -> None:
    await app.notify(
        "mars", mars(stream="a.b%2Ec*>", step="0012"), {"z": [1, 2.5, None], "a": "é", "m": {"y": 1, "x": 2}}
    )
    stored = await client.jetstream().get_last_msg("MARS", "mars.>")
    assert stored.subject == "mars.od.0001.g.20261120.0000.a%2Eb%252Ec%2A%3E.12"
    assert stored.data == '{"a":"é","m":{"x":2,"y":1},"z":[1,2.5,null]}'.encode()
    assert {name for name in stored.headers or {} if not name.startswith("Nats-")} == set()


async def test_a_polygon_travels_in_its_two_headers(app: App, client: Client) -> None:
    await app.notify("area", {"date": "2026-11-20", "polygon": SQUARE})
    stored = await client.jetstream().get_last_msg("AREA", "area.>")
    assert (stored.subject, stored.data) == ("area.20261120", b"null")
    assert stored.headers is not None
    assert stored.headers["spatial_bbox"] == "52.5,13.4,52.6,13.5"
    assert stored.headers["spatial_geometry"] == SQUARE


async def test_a_stored_polygon_of_an_aviso_server_is_read(app: App, client: Client) -> None:
    context = client.jetstream()
    await context.add_stream(StreamConfig(name="AREA", subjects=["area.>"], max_msgs_per_subject=1))
    headers = {"spatial_bbox": "52.5,13.4,52.6,13.5", "spatial_geometry": SQUARE}
    await context.publish("area.20261120", b"null", headers=headers)
    (found,) = [notification async for notification in app.replay("area", {"point": "52.55,13.45"})]
    assert found.identifier == {"date": "20261120", "polygon": SQUARE}


async def test_the_stream_is_the_one_that_an_aviso_server_creates(app: App, client: Client) -> None:
    await app.notify("mars", mars(), {})
    found = (await client.jetstream().stream_info("MARS")).config
    assert (found.subjects, found.max_msgs_per_subject) == (["mars.>"], 1)
    assert (found.max_msgs, found.max_bytes, found.max_age) == (-1, -1, 0)
    assert (found.storage, found.retention, found.discard, found.num_replicas) == ("file", "limits", "old", 1)


async def test_an_unchanged_stream_gets_no_update_and_a_changed_one_gets_one(
    server: NatsServer, client: Client
) -> None:
    updates: list[str] = []

    async def count(message: Any) -> None:
        updates.append(message.subject)

    await client.subscribe("$JS.EVENT.ADVISORY.STREAM.UPDATED.MARS", cb=count)
    for retention in (None, "1h", "1h", "1h"):
        changed = {"retention_time": retention} if retention else {}
        async with App("wire", config=app_config("jetstream", server.url, **changed)) as app:
            await app.notify("mars", mars(), {})
            await app.notify("mars", mars(), {})
    await flushed(client)
    assert len(updates) == 1, updates


AVISO_PERMISSIONS = """
authorization { users: [
  { user: operator, password: o }
  { user: aviso, password: a, permissions: { publish: { allow: [%s] } } }
] }
"""


async def test_an_aviso_server_that_wipes_all_can_be_kept_from_our_own_streams(
    tmp_path: Path,
) -> None:
    """With the permissions that docs/aviso.md gives, it can do all that it needs, and purge its streams alone."""
    document = yaml.safe_load((DOCS / "aviso.md").read_text().split("```yaml\n")[1].split("```")[0])
    allowed = document["server"]["accounts"]["notifications"]["users"]["aviso"]["permissions"]["publish"]["allow"]
    text = AVISO_PERMISSIONS % ", ".join(map(json.dumps, allowed))
    with NatsServer.start(store_dir=tmp_path, config=text) as server:
        operator = app_config("jetstream", server.url, user="operator", password="o")
        async with App("wire", config=operator) as app:
            await (await app.key_value("tables")).put("key", b"value")
        as_aviso = app_config("jetstream", server.url, user="aviso", password="a")
        async with App("aviso", config=as_aviso) as app:
            await app.notify("mars", mars(), {"n": 1})
            assert [found.payload async for found in app.replay("mars")] == [{"n": 1}]
        client = await nats.connect(server.url, user="aviso", password="a", error_cb=ignore)
        try:
            context = client.jetstream(timeout=0.5)
            await context.purge_stream("MARS")
            with pytest.raises(nats.errors.TimeoutError):
                await context.purge_stream("KV_tables")
            assert (await context.stream_info("MARS")).state.messages == 0
            assert (await context.stream_info("KV_tables")).state.messages == 1
        finally:
            await client.close()


async def ignore(error: Exception) -> None:
    """Permissions that are violated are what the test is about."""


async def test_a_payload_that_is_no_json_comes_as_its_text_or_its_bytes(app: App, client: Client) -> None:
    context = client.jetstream()
    await context.add_stream(StreamConfig(name="MARS", subjects=["mars.>"]))
    for step, body in enumerate([b"", b"plain text", b"\xff\xfe"]):
        await context.publish(f"mars.od.0001.g.20261120.0000.oper.{step}", body)
    found = [notification.payload async for notification in app.replay("mars")]
    assert found == [None, "plain text", b"\xff\xfe"]


async def test_cloud_events_are_those_of_an_aviso_server(app: App) -> None:
    receipt = await app.notify("mars", mars(), {"location": "here"})
    (found,) = [notification async for notification in app.replay("mars")]
    event = found.cloud_event("https://aviso.example")
    assert event.pop("time") == rfc3339(found.time_ns)
    assert found.time_ns // 1000 == (found.time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    assert event == {
        "specversion": "1.0",
        "id": f"mars@{receipt.sequence}",
        "source": "https://aviso.example",
        "type": "int.ecmwf.aviso.mars",
        "datacontenttype": "application/json",
        "dataschema": "https://aviso.example/schema/mars",
        "data": {"identifier": mars(), "payload": {"location": "here"}},
    }


@pytest.mark.parametrize("text", ["(0,1.5,0,2,1,2,0,1.5)", "[[0,1.5],[0,2],[1,2],[0,1.5]]"])
def test_cloud_events_have_a_polygon_as_an_array_where_that_is_asked_for(text: str) -> None:
    """As an aviso-server from 0.10 on sends it, whichever form is stored; older ones send the text."""
    found = Notification(event_type="area", identifier={"date": "20261120", "polygon": text}, payload=None)
    assert found.cloud_event("")["data"]["identifier"]["polygon"] == text
    identifier = found.cloud_event("", spatial_arrays=True)["data"]["identifier"]
    assert identifier == {"date": "20261120", "polygon": [[0, 1.5], [0, 2], [1, 2], [0, 1.5]]}


def test_cloud_events_have_a_point_cloud_as_an_array_where_that_is_asked_for() -> None:
    found = Notification(event_type="cloud", identifier={"point_cloud": "[[1.0,2.0],[3.0,4.5]]"}, payload=None)
    identifier = found.cloud_event("", spatial_arrays=True)["data"]["identifier"]
    assert identifier == {"point_cloud": [[1, 2], [3, 4.5]]}


def test_a_spatial_text_that_cannot_be_read_stays_a_text() -> None:
    found = Notification(event_type="area", identifier={"polygon": "north", "point_cloud": "[]"}, payload=None)
    assert found.cloud_event("", spatial_arrays=True)["data"]["identifier"] == found.identifier


async def test_a_consumer_with_one_filter_is_not_updated_for_the_way_in_which_it_is_reported(
    app: App, client: Client
) -> None:
    context = client.jetstream()
    await context.add_stream(StreamConfig(name="MARS", subjects=["mars.>"]))
    found = {"filter_subject": "mars.od.>", "ack_policy": "explicit", "ack_wait": 10_000_000_000, "max_ack_pending": 9}
    await ask(
        client,
        "CONSUMER.CREATE.MARS.agent.mars.od.>",
        config={"durable_name": "agent", "metadata": {MARK: "1"}, **found},
    )
    updates = await client.subscribe("$JS.API.CONSUMER.CREATE.MARS.agent")
    await flushed(client)
    spec = ConsumerSpec(
        durable_name="agent", filter_subjects=("mars.od.>",), ack_wait=10_000_000_000, max_ack_pending=9
    )
    backend = app.session.backend
    await backend.ensure_consumer("MARS", spec)
    two = ["mars.od.>", "mars.rd.>"]
    info = await backend.ensure_consumer("MARS", replace(spec, filter_subjects=tuple(two)))
    assert info.config.filters == two
    update = json.loads((await updates.next_msg(timeout=PATIENCE_SECONDS)).data)
    assert update["config"]["filter_subjects"] == two, "the first look found nothing to update"


@pytest.mark.parametrize(
    ("version", "act", "complaint"),
    [
        ("2.10.29", "pause_consumer", "to pause a consumer, nats-server 2.11 or newer is needed; this one is 2.10"),
        ("2.12.1", "reset_consumer", "to reset a consumer, nats-server 2.14 or newer is needed; this one is 2.12"),
    ],
)
async def test_a_server_that_is_too_old_is_told_and_not_waited_for(
    app: App, monkeypatch: pytest.MonkeyPatch, version: str, act: str, complaint: str
) -> None:
    monkeypatch.setattr(Client, "connected_server_version", property(lambda _: ServerVersion(version)))
    backend, detail = app.session.admin, {"until": None} if act == "pause_consumer" else {"sequence": 1}
    with pytest.raises(RefusedError, match=complaint), anyio.fail_after(PATIENCE_SECONDS):
        await getattr(backend, act)("MARS", "agent", **detail)


async def test_a_ttl_needs_a_newer_server(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = await app.key_value("leases")
    monkeypatch.setattr(Client, "connected_server_version", property(lambda _: ServerVersion("2.10.29")))
    with pytest.raises(RefusedError, match=r"nats-server 2\.11 or newer is needed; this one is 2\.10"):
        await bucket.put("owner", b"1", ttl_seconds=1)


async def ask(client: Client, subject: str, **request: Any) -> None:
    body = json.dumps({"stream_name": "MARS", "action": "create", **request}).encode()
    answer = json.loads((await client.request(f"$JS.API.{subject}", body)).data)
    assert "error" not in answer, answer
