"""Functions of `outgoing`, which see and change what an app is about to publish. On either backend."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from aviso_workers import App, GivenUp, Notification, Notify, Reject, RetryPolicy, Router
from aviso_workers.errors import InvalidNotificationError
from aviso_workers.testing import harness
from tests.contract.settings import mars

pytestmark = pytest.mark.anyio

PROMPT = RetryPolicy(first=0.05, factor=1, attempts=3, jitter=0)


def plain(step: object, text: str = "x") -> Notify:
    return Notify("plain", {"a": step, "b": text})


async def stored(app: App) -> list[Notification[Any]]:
    return [found async for found in app.replay("plain")]


async def test_whatever_publishes_what_is_stored_is_what_it_returned(app: App, url: str | None) -> None:
    @app.outgoing
    def correlate(notify: Notify) -> Notify:
        return replace(notify, payload={"id": notify.identifier.get("a", 0)}, headers={"Correlation": "7"})

    @app.agent("mars")
    async def derive(notification: Notification[Any]) -> AsyncIterator[Notify]:
        yield plain("yielded")

    @app.agent("mars")
    def derive_in_a_thread(notification: Notification[Any]) -> list[Notify]:
        app.sync(app.notify, "plain", {"a": "sync", "b": "x"})
        return [plain("returned")]

    @app.agent("mars", name="refuse")
    async def refuse(notification: Notification[Any]) -> None:
        raise Reject("no such field")

    @refuse.on_dead_letter
    async def compensate(given_up: GivenUp[Any]) -> Notify:
        return plain("undone")

    async with harness(app, server=url) as t:
        await app.notify("plain", {"a": "one", "b": "x"})
        await app.notify_many([plain("many"), plain("more")])
        await app.notify_together([plain("together"), plain("all")])
        await t.notify("mars", mars(), {})
        await t.settle()
        found = await stored(app)
    names = ["all", "many", "more", "one", "returned", "sync", "together", "undone", "yielded"]
    assert sorted(one.identifier["a"] for one in found) == names
    assert all(one.payload == {"id": one.identifier["a"]} for one in found)
    assert all(one.headers["Correlation"] == "7" for one in found)


async def test_they_are_asked_in_order_before_anything_is_checked(app: App, url: str | None) -> None:
    router = Router("tracing")

    @app.outgoing
    def complete(notify: Notify) -> Notify:
        return replace(notify, identifier={**notify.identifier, "b": "1"})

    @router.outgoing
    def look(notify: Notify) -> None:
        seen.append(notify.identifier["b"])

    app.include(router, prefix="first")
    app.include(router, prefix="second")

    @app.outgoing
    def complete_again(notify: Notify) -> Notify:
        return replace(notify, identifier={**notify.identifier, "b": f"{notify.identifier['b']}2"})

    seen: list[str] = []
    async with harness(app, server=url):
        app.check(Notify("plain", {"a": 0}))
        await app.notify("plain", {"a": 0})
        assert seen == ["1", "1"]
        assert [one.identifier["b"] for one in await stored(app)] == ["12"]


async def test_one_that_is_declared_when_the_app_is_connected_is_asked(app: App, url: str | None) -> None:
    router = Router("tracing")
    app.include(router)
    async with harness(app, server=url):

        @router.outgoing
        def complete(notify: Notify) -> Notify:
            return replace(notify, payload="changed")

        await app.notify_many([plain(0)])
        assert [one.payload for one in await stored(app)] == ["changed"]


@pytest.mark.parametrize("returned", [ValueError("no id"), 3])
async def test_one_that_raises_refuses_the_notification(app: App, url: str | None, returned: Any) -> None:
    @app.outgoing
    def correlate(notify: Notify) -> Any:
        if notify.event_type == "plain":
            if isinstance(returned, ValueError):
                raise returned
            return returned
        return None

    @app.agent("mars")
    async def derive(notification: Notification[Any]) -> list[Notify]:
        return [plain(1), plain(2)]

    complaint = "plain: correlate, a function of outgoing, (raised ValueError: no id|returned 3: return a Notify, or)"
    async with harness(app, server=url) as t:
        await app.notify("mars", mars(), {})
        await t.settle()
        assert [dead_letter.reason for dead_letter in t.dead_letters] == ["invalid_notification"]
        with pytest.raises(InvalidNotificationError, match=complaint):
            await app.notify("plain", {"a": 0, "b": "x"})
        with pytest.raises(InvalidNotificationError, match=complaint):
            await app.notify_many([plain(0)])
        with pytest.raises(InvalidNotificationError, match=complaint):
            await app.notify_together([plain(0)])
        with pytest.raises(InvalidNotificationError, match=complaint):
            await asyncio.to_thread(app.sync, app.notify, "plain", {"a": 0, "b": "x"})
        with pytest.raises(InvalidNotificationError, match=complaint):
            app.check(plain(0))
        with pytest.raises(InvalidNotificationError, match="must be a Notify"):
            await app.notify_many([3])  # type: ignore[list-item]
        assert [one for one in t.published if one.event_type == "plain"] == []


async def test_it_is_asked_where_the_app_is_not_connected(app: App, url: str | None) -> None:
    @app.outgoing
    def refuse(notify: Notify) -> None:
        raise ValueError("no id")

    with pytest.raises(InvalidNotificationError, match="raised ValueError: no id"):
        await asyncio.to_thread(app.sync, app.notify, "plain", {"a": 0, "b": "x"})


@pytest.mark.parametrize("together", [False, True])
async def test_what_a_handler_publishes_again_is_stored_once_although_it_is_changed_in_another_way(
    app: App, url: str | None, together: bool
) -> None:
    traces = itertools.count()
    tries: list[int] = []

    @app.outgoing
    def trace(notify: Notify) -> Notify:
        return replace(notify, payload={"trace": next(traces)}, headers={"Trace": str(next(traces))})

    @app.agent("mars", retry=PROMPT)
    async def derive(notification: Notification[Any]) -> list[Notify]:
        tries.append(1)
        if together:
            await app.notify_together([plain(1), plain(2)])
        else:
            await app.notify_many([plain(1), plain(1)])
        if len(tries) < 3:
            raise ConnectionError
        return []

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        assert t.outcomes(derive) == ["retried", "retried", "acked"]
        found = [one.identifier["a"] for one in t.published if one.event_type == "plain"]
        assert found == (["1", "2"] if together else ["1", "1"])


async def test_a_message_id_of_its_own_stays(app: App, url: str | None) -> None:
    @app.outgoing
    def rebuild(notify: Notify) -> Notify:
        return Notify(notify.event_type, notify.identifier, "changed")

    async with harness(app, server=url):
        for _ in range(2):
            await app.notify("plain", {"a": 0, "b": "x"}, message_id="mine")
        assert [one.headers["Nats-Msg-Id"] for one in await stored(app)] == ["mine"]


@pytest.mark.needs_server(2, 12)
async def test_what_is_delivered_later_is_changed_when_it_is_given(app: App, url: str | None) -> None:
    seen: list[str] = []

    @app.outgoing
    def look(notify: Notify) -> Notify:
        seen.append(notify.event_type)
        return replace(notify, payload=len(seen))

    async with harness(app, server=url) as t:
        receipt = await app.notify("plain", {"a": 0, "b": "x"}, due=3600)
        assert receipt.due is not None
        assert await app.cancel("plain", receipt.message_id)
        await app.notify("plain", {"a": 0, "b": "x"}, due="0s")
        await t.settle()
        assert seen == ["plain", "plain"]
        assert [one.payload for one in await stored(app)] == [2]
