"""Headers that an author gives a notification: they arrive, and stay with it wherever it waits. On either backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from aviso_workers import App, Notification, Notify, Reject, RetryPolicy
from aviso_workers.aviso.codec import is_reserved
from aviso_workers.errors import InvalidNotificationError
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters
from aviso_workers.testing import harness
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

IDENTIFIER = {"a": 1, "b": "x"}
HEADERS = {"Traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "Tenant": "é 1"}


def own(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if not is_reserved(name)}


async def test_agents_replays_and_tests_see_them(app: App, url: str | None) -> None:
    seen: list[dict[str, str]] = []

    @app.agent("plain")
    async def index(notification: Notification[Any]) -> None:
        seen.append(own(notification.headers))

    async with harness(app, server=url) as t:
        await app.notify("plain", IDENTIFIER, {"n": 1}, headers=HEADERS)
        await app.notify_many(
            [Notify("plain", {"a": 2, "b": "x"}, headers=HEADERS), Notify("plain", {"a": 3, "b": "x"})]
        )
        await t.settle()
        assert sorted(seen, key=len) == [{}, HEADERS, HEADERS]
        assert {found.identifier["a"]: own(found.headers) async for found in app.replay("plain")} == {
            "1": HEADERS,
            "2": HEADERS,
            "3": {},
        }
        assert sum(found.headers == HEADERS for found in t.published) == 2


async def test_each_try_and_the_dead_letter_that_is_tried_again_have_them(app: App, url: str | None) -> None:
    seen: list[dict[str, str]] = []

    @app.agent("plain", retry=RetryPolicy(first=0.01, attempts=5))
    async def index(notification: Notification[Any]) -> None:
        seen.append(own(notification.headers))
        if len(seen) == 1:
            raise ValueError("again")
        if len(seen) == 2:
            raise Reject("keep it")

    async with harness(app, server=url) as t:
        stored = StoredDeadLetters(app.session.admin, events=app.events)
        await app.notify("plain", IDENTIFIER, headers=HEADERS)
        await t.settle()
        [dead_letter] = [each async for each in stored.select(Selection())]
        assert own(dead_letter.original.headers or {}) == HEADERS
        await stored.retry(dead_letter)
        await t.settle()
    assert seen == [HEADERS] * 3


async def test_what_is_delivered_later_has_them(app: App, url: str | None) -> None:
    async with harness(app, server=url) as t:
        await app.notify("plain", IDENTIFIER, due=0.5, headers=HEADERS)
        with anyio.fail_after(PATIENCE_SECONDS):
            while not t.published:
                await t.advance(0.1)
        [found] = [one async for one in app.replay("plain")]
        assert own(found.headers) == HEADERS


async def test_what_a_handler_publishes_with_other_headers_is_another_notification(app: App, url: str | None) -> None:
    @app.agent("mars")
    async def derive(notification: Notification[Any]) -> list[Notify]:
        return [Notify("plain", IDENTIFIER, headers={"Part": part}) for part in ("1", "2")]

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        published = [found.headers for found in t.published if found.event_type == "plain"]
        assert published == [{"Part": "1"}, {"Part": "2"}]


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        (
            {"Nats-TTL": "1s"},
            "plain: header 'Nats-TTL': names that begin with Aviso-, Nats- or spatial_ have a meaning",
        ),
        ({"nats-msg-id": "1"}, "plain: header 'nats-msg-id': names that begin with"),
        ({"Aviso-Retried": "1"}, "plain: header 'Aviso-Retried': names that begin with"),
        ({"spatial_bbox": "1"}, "plain: header 'spatial_bbox': names that begin with"),
        ({"Two words": "1"}, "plain: header 'Two words': a name is made of letters"),
        ({"A:": "1"}, "plain: header 'A:': a name is made of letters"),
        ({"": "1"}, "plain: header '': a name is made of letters"),
        ({1: "1"}, "plain: header 1: a name is made of letters"),
        ({"A": 1}, "plain: header 'A': its value must be printable text without spaces at its ends, found 1"),
        ({"A": "1\r\nNats-TTL: 1s"}, "plain: header 'A': its value must be printable text"),
        ({"A": " 1"}, "plain: header 'A': its value must be printable text"),
        ({"A": "\ud800"}, "plain: header 'A': its value must be printable text"),
    ],
)
async def test_what_would_be_read_as_something_else_is_refused(
    app: App, url: str | None, headers: Any, message: str
) -> None:
    async with harness(app, server=url) as t:
        with pytest.raises(InvalidNotificationError) as found:
            await app.notify("plain", IDENTIFIER, headers=headers)
        assert str(found.value).startswith(message)
        with pytest.raises(InvalidNotificationError):
            app.check(Notify("plain", IDENTIFIER, headers=headers))
        assert t.published == []
