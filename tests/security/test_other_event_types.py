"""What is stored beside the notifications of an event type: users whose roles are for another one do not reach it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import nats
import pytest
from nats.aio.client import Client

from aviso_workers import App
from aviso_workers.errors import NotFoundError
from aviso_workers.ops import permissions
from aviso_workers.server import NatsServer
from aviso_workers.state import bucket_names, delayed_messages
from tests.conftest import write_mars_config
from tests.security.test_roles import EVERYTHING, NOWHERE, granted, user
from tests.server.test_publisher_accounts import write
from tests.waits import PATIENCE_SECONDS, flushed

pytestmark = pytest.mark.anyio

OWN, OTHER = (delayed_messages.stream_of(stream) for stream in ("MARS", "MARS_EXTRA"))
OWN_BUCKET, OTHER_BUCKET = (bucket_names.of_queries(stream) for stream in ("MARS", "MARS_EXTRA"))


@asynccontextmanager
async def attacking(role: permissions.Role, tmp_path: Path) -> AsyncGenerator[tuple[App, Client], None]:
    """A server with an app that may do everything with two event types, and a user whose role is for mars alone."""
    rights = granted(role, write_mars_config(tmp_path / "role.yaml", NOWHERE, user="role", password="role"))
    users = f"accounts: {{ DATA: {{ jetstream: enabled, users: [{user('role', rights)}, {EVERYTHING}] }} }}\n"

    async def ignore(_: Exception) -> None:
        """What is denied is no error of the test."""

    with NatsServer.start(store_dir=tmp_path / "store", config=users) as server:
        owner = write(tmp_path / "owner.yaml", server.url, user="everything", password="everything")
        client = await nats.connect(server.url, user="role", password="role", error_cb=ignore)
        async with App("owner", config=owner) as app:
            yield app, client
        await client.close()


async def stored(app: App, stream: str) -> dict[int, tuple[str, bytes]]:
    """The messages of a stream, by sequence."""
    backend = app.session.backend
    try:
        last = (await backend.stream_info(stream)).last_sequence
    except NotFoundError:
        return {}
    reading = backend.read(stream, filter_subjects=(), last_sequence=last)
    return {message.sequence: (message.subject, message.data) async for message in reading}


async def until_emptied(app: App, stream: str) -> None:
    """Return when the last attack is over, which empties a stream that the attacker may write to."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while len(await stored(app, stream)) > 1:
            await app.session.backend.clock.sleep(0.02)


@pytest.mark.needs_server(2, 12)
@pytest.mark.parametrize("role", ["publisher", "worker", "bridge", "spark"])
async def test_what_is_delayed_for_another_event_type_is_neither_removed_nor_written(
    role: permissions.Role, tmp_path: Path
) -> None:
    theirs, mine = delayed_messages.waiting("MARS_EXTRA", "theirs"), delayed_messages.waiting("MARS", "mine")
    requests = {
        f"STREAM.PURGE.{OTHER}": {},
        f"STREAM.MSG.DELETE.{OTHER}": {"seq": 1},
        f"STREAM.DELETE.{OTHER}": {},
        f"CONSUMER.DELETE.{OTHER}.{delayed_messages.DURABLE}": {},
        f"CONSUMER.PAUSE.{OTHER}.{delayed_messages.DURABLE}": {"pause_until": "2200-01-01T00:00:00Z"},
    }
    schedule = {"Nats-Schedule": "@at 2000-01-01T00:00:00Z"}
    published: list[tuple[str, Mapping[str, str]]] = [
        (theirs, {}),
        (theirs, {"Nats-Rollup": "sub"}),
        (delayed_messages.due_subject("MARS_EXTRA"), {}),
        (mine, {**schedule, "Nats-Schedule-Target": delayed_messages.due_subject("MARS_EXTRA")}),
        (mine, {**schedule, "Nats-Schedule-Target": theirs}),
    ]
    async with attacking(role, tmp_path) as (app, client):
        for number in range(3):
            await app.notify("mars", {"class": "od", "step": number}, due=3600)
        await app.notify("mars_extra", {"class": "od", "step": 1}, due=3600, message_id="theirs")
        stop = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(app._work, stop)
            with anyio.fail_after(PATIENCE_SECONDS):
                while not await app.session.admin.consumers(OTHER):
                    await app.session.backend.clock.sleep(0.02)
            stop.set()
        before = await stored(app, OTHER), [each.config for each in await app.session.admin.consumers(OTHER)]
        assert [subject for subject, _ in before[0].values()] == [theirs]

        for request, body in requests.items():
            await client.publish(f"$JS.API.{request}", json.dumps(body).encode())
        for subject, headers in published:
            await client.publish(subject, b"forged", headers=dict(headers))
        await client.publish(mine, b"forged", headers={"Nats-Rollup": "all"})
        await client.publish(f"$JS.API.STREAM.PURGE.{OWN}", b"")
        await flushed(client)
        if role != "spark":  # which delays nothing
            await until_emptied(app, OWN)

        after = await stored(app, OTHER), [each.config for each in await app.session.admin.consumers(OTHER)]
        assert after == before
        assert await stored(app, "MARS_EXTRA") == {}


async def test_the_records_of_queries_of_another_stream_are_neither_removed_nor_written(tmp_path: Path) -> None:
    key = bucket_names.key_of_query("copy")
    async with attacking("spark", tmp_path) as (app, client):
        for bucket in (OWN_BUCKET, OTHER_BUCKET):
            for each in (key, bucket_names.key_of_query("another")):
                await (await app.session.backend.key_value(bucket)).put(each, b"now")
        before = await stored(app, f"KV_{OTHER_BUCKET}")

        await client.publish(f"$JS.API.STREAM.PURGE.KV_{OTHER_BUCKET}", b"")
        await client.publish(f"$KV.{OTHER_BUCKET}.{key}", b"forged", headers={"Nats-Rollup": "all"})
        await client.publish(f"$KV.{OWN_BUCKET}.{key}", b"forged", headers={"Nats-Rollup": "all"})
        await flushed(client)

        assert len(await stored(app, f"KV_{OWN_BUCKET}")) == 2, "no message replaces others in a bucket"
        assert len(before) == 2
        assert await stored(app, f"KV_{OTHER_BUCKET}") == before


@pytest.mark.parametrize("role", ["publisher", "worker", "bridge", "spark"])
def test_a_role_names_the_streams_of_its_event_types_alone(role: permissions.Role, tmp_path: Path) -> None:
    lines = granted(role, write_mars_config(tmp_path / "config.yaml", NOWHERE)).publish.allow
    tokens = {token.removeprefix("KV_") for line in lines for token in line.split(".")}
    named = {token for token in tokens if token.startswith(("aviso_workers_schedule__", "aviso_workers_spark__"))}
    assert named == ({OWN_BUCKET} if role == "spark" else {OWN})


def test_the_name_of_the_stream_of_what_waits_leads_back_to_the_event_stream() -> None:
    assert [delayed_messages.event_stream_of(name) for name in (OWN, OTHER, "MARS", "aviso_workers_retries")] == [
        *("MARS", "MARS_EXTRA"),
        *("", ""),
    ]
