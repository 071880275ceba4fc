"""Notifications with a time to live, on either backend."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from nats.aio.client import Client, ServerVersion

from aviso_workers import App, Notify
from aviso_workers.backends import Backend, Message, Outgoing
from aviso_workers.errors import InvalidNotificationError, RefusedError
from tests.contract.settings import app_config

pytestmark = pytest.mark.anyio


@pytest.fixture
async def app(kind: str, nats_url: str) -> AsyncGenerator[App, None]:
    async with App("contract", config=app_config(kind, nats_url)) as app:
        await app.notify("plain", {"a": 0, "b": "x"})
        yield app


@pytest.mark.covers("002-07")
@pytest.mark.parametrize("together", [False, True])
async def test_a_message_is_forgotten_after_its_time_and_no_other_is(
    backend: Backend, create, stored, elapse, together: bool
) -> None:
    info = await create()
    await backend.update_stream({**info.config, "allow_msg_ttl": True})
    messages = [
        Outgoing(Message(subject=f"mars.{number}", data=b"null", headers=headers), f"id-{number}", "MARS")
        for number, headers in enumerate([{"Nats-TTL": "1s"}, None, {"Nats-TTL": "3600s"}])
    ]
    if together:
        await backend.publish_together(messages, timeout_seconds=5)
    else:
        await backend.publish_many(messages, timeout_seconds=5)
    assert [message.headers.get("Nats-TTL") for message in await stored()] == ["1s", None, "3600s"]
    await elapse(2.5)
    assert [message.subject for message in await stored()] == ["mars.1", "mars.2"]


@pytest.mark.parametrize("wrong", [0, -1, 0.5, "1s"])
async def test_a_time_that_is_none_is_refused(app: App, wrong: Any) -> None:
    with pytest.raises(InvalidNotificationError, match="plain: ttl must be whole seconds from 1, found"):
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
