"""Payloads of bytes, and of an author's own kind: each byte arrives, wherever the notification waits. On either
backend."""

from __future__ import annotations

import struct
from contextlib import aclosing
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel

from aviso_workers import App, Batch, Batching, Notification, Notify, Reject, RetryPolicy, Stream, Window, Windowing
from aviso_workers.backends import Message
from aviso_workers.events import Skipped
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters, document
from aviso_workers.state import dead_letter_records
from aviso_workers.testing import harness
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

IDENTIFIER = {"a": 1, "b": "x"}
RAW = bytes(range(256))
BODIES = [RAW, b"", b"null", b'{"a": 12}', b"plain text"]


class Point(NamedTuple):
    x: int
    y: int

    @classmethod
    def from_bytes(cls, data: bytes) -> Point:
        return cls(*struct.unpack("<ii", data))

    def to_bytes(self) -> bytes:
        return struct.pack("<ii", *self)


class Walk(BaseModel):
    steps: int


async def test_a_body_arrives_as_it_was_published_however_it_was(app: App, url: str | None) -> None:
    seen: list[bytes] = []

    @app.agent("plain")
    async def index(notification: Notification[bytes]) -> None:
        seen.append(notification.payload)

    @app.agent("mars")
    async def derive(notification: Notification[bytes]) -> Notify:
        return Notify("plain", {"a": 100, "b": "x"}, notification.payload)

    def numbered(first: int) -> list[Notify]:
        return [Notify("plain", {"a": first + number, "b": "x"}, body) for number, body in enumerate(BODIES)]

    async with harness(app, server=url) as t:
        for wanted in numbered(0):
            await app.notify(wanted.event_type, wanted.identifier, wanted.payload)
        assert await app.notify_many(numbered(10)) == len(BODIES)
        await app.notify_together(numbered(20))
        await app.notify("mars", mars(), RAW)
        await t.settle()
        assert sorted(seen) == sorted([*BODIES * 3, RAW])
        assert sum(found.payload == RAW for found in t.published) == 5


async def test_without_a_type_it_is_what_an_aviso_server_reads_or_its_bytes(app: App, url: str | None) -> None:
    async with harness(app, server=url) as t:
        for number, body in enumerate(BODIES):
            await t.notify("plain", {"a": number, "b": "x"}, body)
        assert [found.payload async for found in app.replay("plain")] == [RAW, None, None, {"a": 12}, "plain text"]
        assert [found.payload for found in t.published] == [RAW, b"", None, {"a": 12}, b"plain text"]


async def test_a_replay_and_a_watch_decode_as_they_are_told(app: App, url: str | None) -> None:
    skipped: list[Skipped] = []
    app.events.listen(skipped.append, Skipped)
    async with harness(app, server=url) as t:
        for number, body in enumerate([*BODIES, Point(1, 2).to_bytes()]):
            await t.notify("plain", {"a": number, "b": "x"}, body)
        bodies = [found.payload async for found in app.replay("plain", decode=bytes)]
        assert bodies == [*BODIES, Point(1, 2).to_bytes()]
        assert [found.payload async for found in app.replay("plain", decode=Point.from_bytes)] == [Point(1, 2)]
        assert len(skipped) == len(BODIES)
        assert "the payload cannot be decoded: error: unpack requires" in str(skipped[0].error)
        async with aclosing(app.watch("plain", from_id=6, decode=Point.from_bytes)) as watching:
            assert (await anext(watching)).payload == Point(1, 2)


async def test_each_try_and_the_dead_letter_that_is_tried_again_have_it(app: App, url: str | None) -> None:
    seen: list[bytes] = []

    @app.agent("plain", retry=RetryPolicy(first=0.01, attempts=5))
    async def index(notification: Notification[bytes]) -> None:
        seen.append(notification.payload)
        if len(seen) == 1:
            raise ValueError("again")
        if len(seen) == 2:
            raise Reject("keep it")

    async with harness(app, server=url) as t:
        stored = StoredDeadLetters(app.session.admin, events=app.events)
        await app.notify("plain", IDENTIFIER, RAW)
        await t.settle()
        [dead_letter] = [each async for each in stored.select(Selection())]
        assert dead_letter.original.data == RAW
        assert document(dead_letter)["original"]["data"].startswith("AAECAwQF")
        await stored.retry(dead_letter)
        await t.settle()
    assert seen == [RAW] * 3


async def test_one_that_is_stored_compressed_comes_back_whole(app: App, url: str | None) -> None:
    seen: list[bytes] = []

    @app.agent("plain", where={"a": 1})
    async def index(notification: Notification[bytes]) -> None:
        seen.append(notification.payload)
        if len(seen) == 1:
            raise Reject("keep it")

    async with harness(app, server=url) as t:
        stored = StoredDeadLetters(app.session.admin, events=app.events)
        admin = app.session.admin
        await app.notify("plain", {"a": 0, "b": "x"})  # so that there is a stream
        large = (RAW * 4096)[: admin.connection.max_payload - 150]
        other = Message(subject="plain.1.x", data=large)
        await admin.publish(other, message_id="large", stream="PLAIN", timeout_seconds=PATIENCE_SECONDS)
        await t.settle()
        [dead_letter] = [each async for each in stored.select(Selection())]
        assert (dead_letter.stored.headers or {})[dead_letter_records.COMPRESSED] == "zlib"
        await stored.retry(dead_letter)
        await t.settle()
    assert [len(each) for each in seen] == [len(large)] * 2
    assert seen == [large] * 2


@pytest.mark.needs_server(2, 12)
async def test_what_is_delivered_later_has_it(app: App, url: str | None) -> None:
    seen: list[bytes] = []

    @app.agent("plain")
    async def index(notification: Notification[bytes]) -> None:
        seen.append(notification.payload)

    async with harness(app, server=url) as t:
        await app.notify("plain", IDENTIFIER, RAW, due=0.5)
        await t.advance(2)
        await t.settle()
        assert seen == [RAW]


@pytest.mark.needs_server(2, 12)
async def test_bodies_that_are_parted_elsewhere_are_other_notifications(app: App, url: str | None) -> None:
    tries = iter([(b"a\nb", b"c"), (b"a", b"b\nc")])

    @app.agent("mars", retry=RetryPolicy(first=0.01))
    async def derive(notification: Notification[Any]) -> None:
        await app.notify_together([Notify("plain", IDENTIFIER, part) for part in next(tries)])
        if notification.num_delivered == 1:
            raise ValueError("again")

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        assert t.outcomes(derive) == ["retried", "acked"]
        stored = [found.payload for found in t.published if found.event_type == "plain"]
        assert stored == [b"a\nb", b"c", b"a", b"b\nc"]


async def test_an_author_may_say_how_a_body_is_decoded_in_every_call_form(app: App, url: str | None) -> None:
    seen: list[tuple[str, Any]] = []

    @app.agent("plain", decode=Point.from_bytes)
    async def index(notification: Notification[Point]) -> None:
        seen.append(("one", notification.payload))

    @app.agent("plain", decode=Point.from_bytes, batch=Batching(size=2, within=0.1))
    async def load(batch: Batch[Point]) -> None:
        seen.extend(("batch", each.payload) for each in batch)

    @app.agent("plain", decode=Point.from_bytes)
    async def follow(stream: Stream[Point]) -> None:
        async for notification in stream:
            seen.append(("stream", notification.payload))

    def add(total: int, notification: Notification[Point]) -> int:
        return total + notification.payload.x

    @app.agent("plain", decode=Point.from_bytes, window=Windowing(size="1h", fold=add, initial=0, idle="1s"))
    async def sums(window: Window[int]) -> None:
        seen.append(("window", window.value))

    async with harness(app, server=url) as t:
        await t.notify("plain", IDENTIFIER, Point(1, 2).to_bytes())
        await t.settle()
        await t.advance(5)
        await t.settle()
    assert sorted(seen) == [
        ("batch", Point(1, 2)),
        ("one", Point(1, 2)),
        ("stream", Point(1, 2)),
        ("window", 1),
    ]


async def test_what_cannot_be_decoded_is_a_dead_letter_that_says_why_and_comes_back(app: App, url: str | None) -> None:
    broken = True
    seen: list[Point] = []

    def decode(data: bytes) -> Point:
        if broken:
            raise ValueError("wire type 7\nis unknown")
        return Point.from_bytes(data)

    @app.agent("plain", decode=decode)
    async def index(notification: Notification[Point]) -> None:
        seen.append(notification.payload)

    async with harness(app, server=url) as t:
        stored = StoredDeadLetters(app.session.admin, events=app.events)
        await t.notify("plain", IDENTIFIER, Point(1, -1).to_bytes())
        await t.settle()
        [dead_letter] = [each async for each in stored.select(Selection())]
        assert dead_letter.reason == "undecodable"
        assert dead_letter.error.endswith("the payload cannot be decoded: ValueError: wire type 7 is unknown")
        broken = False
        await stored.retry(dead_letter)
        await t.settle()
    assert seen == [Point(1, -1)]


async def test_pydantic_models_are_handled_published_and_kept(app: App, url: str | None) -> None:
    table = app.table("walks", Walk)
    seen: list[Walk] = []

    def longest(before: Walk, notification: Notification[Walk]) -> Walk:
        return max(before, notification.payload, key=lambda walk: walk.steps)

    @app.agent("plain")
    async def index(notification: Notification[Walk]) -> Notify:
        await table.update("longest", lambda before: longest(before or Walk(steps=0), notification), once=notification)
        return Notify("mars", mars(), {"walks": [notification.payload]})

    @app.agent("plain", window=Windowing(size="1h", fold=longest, initial=Walk(steps=0), idle="1s"))
    async def daily(window: Window[Walk]) -> None:
        seen.append(window.value)

    async with harness(app, server=url) as t:
        await t.notify("plain", {"a": 1, "b": "x"}, Walk(steps=7))
        await t.notify("plain", {"a": 2, "b": "x"}, {"steps": "many"})
        await t.settle()
        assert [found.payload for found in t.published if found.event_type == "mars"] == [{"walks": [{"steps": 7}]}]
        assert await table.get("longest") == Walk(steps=7)
        assert {letter.reason for letter in t.dead_letters} == {"undecodable"}
        assert {letter.agent for letter in t.dead_letters} == {"index", "daily"}
        assert all("at `$.steps`" in letter.error for letter in t.dead_letters)
        await t.advance(5)
        await t.settle()
    assert seen == [Walk(steps=7)]
