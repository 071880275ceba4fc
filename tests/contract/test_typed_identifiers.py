"""Identifiers as an author's own type, in each call form. On either backend."""

from __future__ import annotations

from datetime import date, datetime, time
from typing import Any, TypedDict

import msgspec
import pytest

from aviso_workers import App, Batch, Batching, Notification, Stream, Window, Windowing
from aviso_workers.testing import harness
from tests.contract.settings import mars

pytestmark = pytest.mark.anyio


class FieldKey(msgspec.Struct, frozen=True):
    class_: str = msgspec.field(name="class")
    date: date
    time: time
    step: int

    @property
    def valid_hour(self) -> int:
        return datetime.combine(self.date, self.time).hour + self.step


class Numbered(TypedDict):
    a: int


KEY = FieldKey(class_="od", date=date(2026, 11, 20), time=time(12), step=6)


async def test_agents_are_given_them_in_every_call_form(app: App, url: str | None) -> None:
    seen: list[tuple[str, Any]] = []

    @app.agent("mars")
    async def index(notification: Notification[Any, FieldKey]) -> None:
        assert notification.key.valid_hour == 18
        seen.append(("one", notification.key))

    @app.agent("mars", batch=Batching(size=1))
    async def load(batch: Batch[Any, FieldKey]) -> None:
        seen.extend(("batch", each.key) for each in batch)

    @app.agent("mars")
    async def follow(stream: Stream[Any, FieldKey]) -> None:
        async for notification in stream:
            seen.append(("stream", notification.key))

    def add(total: int, notification: Notification[Any, FieldKey]) -> int:
        return total + notification.key.step

    @app.agent("mars", window=Windowing(size="1h", fold=add, initial=0, idle="1s"))
    async def sums(window: Window[int]) -> None:
        seen.append(("window", window.value))

    @app.agent("mars")
    async def plain(notification: Notification[Any]) -> None:
        assert notification.identifier["time"] == "1200"
        seen.append(("plain", notification.key))

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(step=6, time="12"), {})
        await t.settle()
        await t.advance(5)
        await t.settle()
    assert dict(seen) == {"one": KEY, "batch": KEY, "stream": KEY, "window": 6, "plain": None}


async def test_one_that_does_not_fit_is_a_dead_letter_that_names_the_field(app: App, url: str | None) -> None:
    seen: list[int] = []

    @app.agent("plain")
    async def index(notification: Notification[Any, Numbered]) -> None:
        seen.append(notification.key["a"] + 1)

    async with harness(app, server=url) as t:
        await t.notify("plain", {"a": 1, "b": "x"})
        await t.notify("plain", {"a": "one", "b": "x"})
        await t.settle()
        [dead_letter] = t.dead_letters
        assert dead_letter.reason == "undecodable"
        assert dead_letter.error.endswith(
            "is not a Numbered: it must be a whole number of 64 bits, not 'one' - at `$.a`"
        )
    assert seen == [2]
