"""Notifications with a time to live, on either backend."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import anyio
import msgspec
import pytest
from nats.aio.client import Client, ServerVersion

from aviso_workers import App, Batch, Batching, Notification, Notify, Stream, Window, Windowing
from aviso_workers.aviso.literals import Duration
from aviso_workers.backends import Admin, Message, Outgoing
from aviso_workers.errors import InvalidNotificationError, RefusedError
from aviso_workers.jetstream.fields import DeclaredStream
from aviso_workers.testing import harness
from tests.contract.conftest import Create, Elapse, Stored
from tests.contract.settings import app_config
from tests.presence import present
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


class Payload(msgspec.Struct):
    n: int


@pytest.fixture
async def app(kind: str, nats_url: str) -> AsyncGenerator[App, None]:
    async with App("contract", config=app_config(kind, nats_url)) as app:
        await app.notify("plain", {"a": 0, "b": "x"})
        yield app


@pytest.mark.covers("002-07")
@pytest.mark.parametrize("together", [False, True])
async def test_a_message_is_forgotten_after_its_time_and_no_other_is(
    backend: Admin, create: Create, stored: Stored, elapse: Elapse, together: bool
) -> None:
    info = await create()
    await backend.update_stream({**info.config, "allow_msg_ttl": True})
    messages = [
        Outgoing(Message(subject=f"mars.{number}", data=b"null", headers=headers), f"id-{number}", "MARS")
        for number, headers in enumerate([{"Nats-TTL": "1s"}, None, {"Nats-TTL": "3600s"}])
    ]
    if together:
        await backend.publish_together(messages, timeout_seconds=PATIENCE_SECONDS)
    else:
        await backend.publish_many(messages, timeout_seconds=PATIENCE_SECONDS)
    assert [present(message.headers).get("Nats-TTL") for message in await stored()] == ["1s", None, "3600s"]
    await elapse(2.5)
    assert [message.subject for message in await stored()] == ["mars.1", "mars.2"]


@pytest.mark.parametrize("wrong", [0, -1, 0.5, "1", True])
async def test_a_time_that_is_none_is_refused(app: App, wrong: Any) -> None:
    with pytest.raises(InvalidNotificationError, match="plain: ttl must be a duration of whole seconds"):
        await app.notify("plain", {"a": 1, "b": "x"}, ttl=wrong)


@pytest.mark.parametrize("many", [1, 30])  # a server is given as many as these in two ways
async def test_a_stream_that_does_not_take_it_is_named(app: App, many: int) -> None:
    with pytest.raises(RefusedError, match="stream PLAIN does not take it, switch on its allow_msg_ttl"):
        await app.notify_many([Notify("plain", {"a": number, "b": "x"}, ttl=5) for number in range(many)])
    assert (await app.session.backend.stream_info("PLAIN")).last_sequence == 1


async def test_an_older_server_is_named(app: App, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "in_memory":
        pytest.skip("there is no server")
    monkeypatch.setattr(Client, "connected_server_version", property(lambda _: ServerVersion("2.10.4")))
    with pytest.raises(RefusedError, match=r"to publish with a ttl, nats-server 2.11 or newer is needed"):
        await app.notify("plain", {"a": 1, "b": "x"}, ttl=5)


@pytest.mark.slow
async def test_what_the_server_notes_in_place_of_a_notification_is_none(kind: str, nats_url: str) -> None:
    config = App("contract", config=app_config(kind, nats_url)).config
    plain = DeclaredStream(allow_msg_ttl=True, allow_rollup_hdrs=True, subject_delete_marker_ttl=Duration(3600))
    app = App("contract", config=msgspec.structs.replace(config, streams={"PLAIN": plain}))
    handled: list[tuple[str, int]] = []

    @app.agent("plain")
    async def typed(notification: Notification[Payload]) -> None:
        handled.append(("typed", notification.sequence))

    @app.agent("plain", batch=Batching(size=10, within=0.1))
    async def batches(batch: Batch[Any]) -> None:
        handled.extend(("batches", notification.sequence) for notification in batch)

    @app.agent("plain")
    async def streams(stream: Stream[Any]) -> None:
        async for notification in stream:
            handled.append(("streams", notification.sequence))

    async def closed(window: Window[int]) -> None:
        handled.append(("windows", window.value))

    app.agent("plain", window=Windowing(size="1h", fold=lambda total, _: total + 1, initial=0))(closed)

    async with harness(app, server=nats_url or None) as t:
        await app.notify("plain", {"a": 1, "b": "x"}, {"n": 1}, ttl=5)  # all agents have handled it by then
        with anyio.fail_after(PATIENCE_SECONDS):
            while (await app.session.backend.stream_info("PLAIN")).last_sequence < 2:
                await t.advance(0.1)
        await app.notify("plain", {"a": 2, "b": "x"}, {"n": 3})
        await t.settle()

        reading = app.session.backend.read("PLAIN", filter_subjects=(), last_sequence=2)
        assert [(message.sequence, message.data) async for message in reading] == [(2, b"")]
        assert [notification.sequence async for notification in app.replay("plain", from_id=1)] == [3]
        async with aclosing(app.watch("plain", from_id=2)) as watching:
            assert (await anext(watching)).sequence == 3
        for agent in ("typed", "batches", "streams"):
            assert [sequence for name, sequence in handled if name == agent] == [1, 3]
            assert t.outcomes(agent) == ["acked", "acked"]
        assert t.outcomes("closed") == ["acked", "acked"]
        assert t.dead_letters == []
