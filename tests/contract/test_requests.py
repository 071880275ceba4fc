"""A request and its reply over two event types, on either backend."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import anyio
import msgspec
import pytest

from aviso_workers import App, Notification, Notify
from aviso_workers.errors import DeclarationError, NoReplyError, UndecodableError, UnknownEventTypeError
from aviso_workers.testing import harness
from tests.contract.settings import app_config
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


class Answer(msgspec.Struct):
    size: int


def declared(kind: str, nats_url: str) -> App:
    app = App("contract", config=app_config(kind, nats_url))
    for name in ("ask", "answer"):
        app.event_type(name, key=["request", "field"])
    return app


def answering(app: App) -> App:
    @app.agent("ask")
    async def answer(notification: Notification[int]) -> Notify:
        return Notify("answer", notification.identifier, {"size": notification.payload})

    return app


@pytest.fixture
async def app(kind: str, nats_url: str) -> AsyncGenerator[App, None]:
    async with declared(kind, nats_url) as app:
        yield app


def field(request: object = 1, name: str = "t") -> dict[str, Any]:
    return {"request": request, "field": name}


async def test_an_agent_of_the_same_harness_replies(kind: str, nats_url: str) -> None:
    async with harness(answering(declared(kind, nats_url)), server=nats_url or None) as t:
        found = await t.app.request("ask", field(), 7, reply="answer", reply_type=Answer)
        assert (found.payload, found.identifier) == (Answer(7), {"request": "1", "field": "t"})
        assert (await t.app.request("ask", field(2), 8, reply="answer")).payload == {"size": 8}


async def test_a_handler_may_request(kind: str, nats_url: str) -> None:
    app = answering(declared(kind, nats_url))
    found: list[Any] = []

    @app.agent("plain")
    async def relay(notification: Notification) -> None:
        reply = await app.request("ask", field(notification.identifier["a"]), 5, reply="answer", reply_type=Answer)
        found.append(reply.payload)

    async with harness(app, server=nats_url or None) as t:
        await t.notify("plain", {"a": "x", "b": "y"})
        await t.settle()
        assert (found, t.outcomes(relay)) == ([Answer(5)], ["acked"])


async def test_a_handler_that_runs_again_finds_the_reply_to_its_first_request(kind: str, nats_url: str) -> None:
    app = answering(declared(kind, nats_url))
    found: list[Any] = []

    @app.agent("plain")
    async def relay(notification: Notification) -> None:
        reply = await app.request("ask", field(), 5, reply="answer")
        found.append(reply.sequence)
        if len(found) == 1:
            raise ConnectionError

    async with harness(app, server=nats_url or None) as t:
        await t.notify("plain", {"a": "x", "b": "y"})
        await t.settle()
        assert found == [1, 1]
        assert [each.event_type for each in t.published].count("ask") == 1


async def test_each_of_many_that_wait_gets_its_own_reply(kind: str, nats_url: str) -> None:
    asking = answering(declared(kind, nats_url))
    found: dict[int, Any] = {}

    async def ask(number: int) -> None:
        found[number] = (await asking.request("ask", field(number), number, reply="answer")).payload["size"]

    async with harness(asking, server=nats_url or None), anyio.create_task_group() as tasks:
        for number in range(10):
            tasks.start_soon(ask, number)
    assert found == {number: number for number in range(10)}


async def test_where_says_which_reply_is_meant(app: App) -> None:
    async with anyio.create_task_group() as tasks:

        async def answer() -> None:
            async for _ in app.watch("ask", from_id=1):
                await app.notify("answer", field(9, "other"), {"size": 1})
                await app.notify("answer", field(9, "meant"), {"size": 2})
                return

        tasks.start_soon(answer)
        with anyio.fail_after(PATIENCE_SECONDS):
            found = await app.request("ask", field(1), reply="answer", where={"field": "meant"}, reply_type=Answer)
    assert found.payload == Answer(2)


async def test_a_former_reply_is_none_to_this_request(app: App) -> None:
    await app.notify("answer", field(), {"size": 0})
    with pytest.raises(NoReplyError, match=r"no reply came within 0\.2 s: the request is stored in ASK .* sequence 1"):
        await app.request("ask", field(), reply="answer", timeout=0.2)


async def test_after_a_timeout_the_same_message_id_finds_the_late_reply(app: App) -> None:
    with pytest.raises(NoReplyError) as raised:
        await app.request("ask", field(), reply="answer", timeout=0.2, message_id="one")
    assert (raised.value.sequence, raised.value.message_id) == (1, "one")
    await app.notify("answer", field(), {"size": 3})
    found = await app.request("ask", field(), reply="answer", reply_type=Answer, message_id="one")
    assert found.payload == Answer(3)
    assert [each.sequence async for each in app.replay("ask")] == [1]


async def test_a_reply_of_another_type_is_an_error_at_once(kind: str, nats_url: str) -> None:
    app = answering(declared(kind, nats_url))
    async with harness(app, server=nats_url or None) as t:
        with pytest.raises(UndecodableError, match=r"reply answer@1: the payload does not fit: Expected `int`"):
            await t.app.request("ask", field(), 7, reply="answer", reply_type=int)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"reply": "nothing"}, UnknownEventTypeError),
        ({"reply": "ask"}, DeclarationError),
        ({"reply": "plain"}, DeclarationError),
        ({"reply": "answer", "where": {}}, DeclarationError),
        ({"reply": "answer", "timeout": "soon"}, DeclarationError),
        ({"reply": "answer", "reply_type": AsyncGenerator}, DeclarationError),
    ],
)
async def test_what_cannot_be_answered_is_not_published(
    app: App, wrong: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        await app.request("ask", field(), **wrong)
    assert (await app.notify("ask", field())).sequence == 1
