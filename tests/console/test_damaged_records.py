"""What a console says of stored records that are damaged, or of another version."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aviso_workers import App
from aviso_workers.ops import timer_control
from aviso_workers.state import consumer_records, declarations, orders, timer_requests
from aviso_workers.testing import Harness
from tests.console.conftest import Served, publish, shown

pytestmark = pytest.mark.anyio

PAGE = "/apps/field-index"
OPERATION = {"action": "receive", "title": "agent index", "channel": {"$ref": "#/channels/mars"}, "messages": []}
WHOLE = {"channels": {"mars": {"title": "mars"}}, "operations": {}, "components": {"messages": {}, "schemas": {}}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "stored",
    [
        b"\xff garbage",
        b"[" * 5000,
        b"[]",
        b"{}",
        {**WHOLE, "operations": None},
        {**WHOLE, "channels": {"mars": {}}},
        {**WHOLE, "components": {"messages": {}, "schemas": None}},
        {**WHOLE, "operations": {"index": {**OPERATION, "messages": [{}]}}},
        {**WHOLE, "operations": {"index": {**OPERATION, "messages": [{"$ref": "nowhere"}]}}},
        {**WHOLE, "operations": {"index": {**OPERATION, "channel": {"$ref": "nowhere"}}}},
        {"a": "x" * 1_000_000},
    ],
    ids=lambda stored: str(stored)[:60],
)
async def test_an_asyncapi_document_that_cannot_be_read_is_said_to_be_none(
    console: Served, app: App, running: Harness, stored: bytes | dict[str, Any]
) -> None:
    await publish(app, 1)
    await running.settle()
    async with console.client() as client:
        await shown(client, PAGE, "AsyncAPI document As a worker")
        bucket = await consumer_records.bucket(console.admin, "field-index")
        value = stored if isinstance(stored, bytes) else json.dumps(stored).encode()
        await bucket.put(declarations.document_key("field-index"), value)
        await shown(client, PAGE, "is not recorded: what is recorded cannot be read by this version")
        await shown(client, "/notification?name=mars@1", "What the agents of field-index publish is not recorded.")


@pytest.mark.slow
async def test_what_a_newer_version_adds_to_a_document_is_left_alone(
    console: Served, app: App, running: Harness
) -> None:
    newer = {**WHOLE, "operations": {"index": {**OPERATION, "x-new": 1}}, "x-new": {}}
    async with console.client() as client:
        await shown(client, PAGE, "AsyncAPI document As a worker")
        bucket = await consumer_records.bucket(console.admin, "field-index")
        await bucket.put(declarations.document_key("field-index"), json.dumps(newer).encode())
        assert (await client.get(f"{PAGE}?as=asyncapi")).json() == newer


@pytest.mark.slow
@pytest.mark.parametrize("time", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-12:00"])
async def test_a_time_that_utc_does_not_have_is_shown_as_it_is(
    console: Served, app: App, running: Harness, time: str
) -> None:
    deploy = {"time": time, "version": "9", "fingerprint": "f", "changed": ["agent odd: added"]}
    async with console.client() as client:
        await shown(client, PAGE, "AsyncAPI document As a worker")
        bucket = await consumer_records.bucket(console.admin, "field-index")
        await bucket.put("field-index/deploys", json.dumps([deploy]).encode())
        await shown(client, f"{PAGE}?times=exact", "agent odd: added", time)


@pytest.mark.slow
async def test_a_time_without_a_zone_makes_a_record_unreadable_and_that_is_told(
    console: Served, app: App, running: Harness
) -> None:
    async with console.client() as client:
        await shown(client, "/apps", "field-index")
        bucket = await consumer_records.bucket(console.admin, "field-index")
        entry = await bucket.get("field-index/declared")
        assert entry is not None
        declared = json.loads(entry.value)
        changed = {"naive": {"time": "2026-11-20T00:00:00"}, "newer": {"x-new": 1}}
        for name, value in ((name, declared | change) for name, change in changed.items()):
            other = await consumer_records.bucket(console.admin, name)
            await other.put(f"{name}/declared", json.dumps(value).encode())
        why = "What app naive declares is left out, because its record cannot be read: "
        await shown(client, "/apps", "newer", why)


async def test_a_pause_until_the_end_of_time_has_no_next_ticks(console: Served, app: App, running: Harness) -> None:
    pause = {"since": "0001-01-01T00:00:00+14:00", "until": "9999-12-31T23:59:59-12:00", "by": "x"}
    bucket = await orders.bucket(console.admin, "field-index")
    await bucket.put(timer_requests.pause_key("field-index", "report"), json.dumps(pause).encode())
    (row,) = await timer_control.rows(console.admin, "field-index", app.timers, ticks=2)
    assert row.next == ()
    assert row.paused is not None
    async with console.client() as client:
        await shown(client, "/timers", "field-index/report", "Paused until 9999-12-31T23:59:59-12:00")
