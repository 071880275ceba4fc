"""All else that an app is made of, and what a program does with it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

import msgspec

from aviso_workers import (
    App,
    Change,
    Counter,
    Delete,
    KeyValue,
    Notification,
    Notify,
    Receipt,
    Router,
    Table,
    Tick,
    Timer,
)
from aviso_workers.pytest_plugin import AvisoHarness
from aviso_workers.testing import DeadLetter, Harness, harness


class Row(msgspec.Struct):
    location: str


class Cache:
    size = 0


class Limits(msgspec.Struct, frozen=True):
    days: int = 30


app = App("typed-apps")
limited = App("limited", settings=Limits)
assert_type(limited, App[Limits])
rows = app.table("rows", Row)
seen = app.table("seen", int, default=0, history=5)
lists = app.table("lists", list[str], default=[])
counts = app.counter("counts")
numbers = app.table("numbers", int | None)
assert_type(rows, Table[Row | None])
assert_type(seen, Table[int])
assert_type(counts, Counter)
app.event_type("plain", key=("vendor",))
app.event_type(
    "ride",
    key=["vendor", "n"],
    identifier={
        "n": {"type": "IntHandler", "range": [0, 10], "required": True},
        "polygon": {"type": "PolygonHandler", "required": False},
    },
    payload={"required": True},
    storage_policy={"allow_duplicates": True, "retention_time": "30d"},
    base="rides",
)


@app.resource
async def cache() -> AsyncIterator[Cache]:
    yield Cache()


@app.every("30s", singleton=True)
async def tidy(tick: Tick, cache: Cache) -> None:
    assert_type(tick.token, int | None)
    await seen.put("last", cache.size)


@app.cron("0 6 * * mon", timezone="Europe/Berlin", catch_up=True, singleton=False)
async def report() -> None:
    await app.notify_many([Notify("reports", {"day": 1})])


@app.outgoing
def trace(notify: Notify) -> Notify:
    return msgspec.structs.replace(notify, headers={"Traceparent": "00-1-1-01"})


@app.outgoing
def look(notify: Notify) -> None:
    assert_type(notify.identifier, Mapping[str, Any])


@app.outgoing  # type: ignore[type-var]
def something_else(notify: Notify) -> str:  # pyright: ignore
    return notify.event_type


@app.task
async def tail(app: App) -> None:
    async for notification in app.watch("mars", {"class": "od"}, from_id=1):
        assert_type(notification, Notification[Any])


def one_more(number: int) -> int:
    return number + 1


def less(number: int) -> int | Delete:
    return number - 1 if number > 1 else Delete()


def use_tables_in_a_thread() -> None:
    assert_type(app.sync(rows.get, "a"), Row | None)
    app.sync(rows.put, "a", Row(location="here"), ttl=timedelta(minutes=1))
    assert_type(app.sync(seen.update, "a", one_more), int)
    assert_type(app.sync(seen.update, "a", less), int | Delete)
    assert_type(app.sync(seen.items), dict[str, int])
    assert_type(app.sync(seen.history, "a"), list[Change[int]])
    app.sync(seen.delete, "a")
    assert_type(app.sync(counts.add, "a", 2), int)
    assert_type(app.sync(counts.get, "a"), int)
    assert_type(app.sync(counts.items), dict[str, int])


async def use_tables() -> None:
    assert_type(await rows.get("a"), Row | None)
    await rows.put("a", Row(location="here"), ttl=60)
    assert_type(await seen.get("a"), int)
    assert_type(await seen.update("a", one_more), int)
    assert_type(await seen.update("a", lambda number: number + 1), int)
    assert_type(await seen.update("a", lambda number: number or Delete(), ttl="10m"), int | Delete)
    assert_type(await seen.update("a", less), int | Delete)
    await lists.update("a", lambda found: [*found, "x"])
    await seen.update("a", lambda number: None)  # type: ignore[arg-type, return-value]  # pyright: ignore
    await lists.update("a", lambda found: found.append("x"))  # type: ignore[arg-type, return-value]  # pyright: ignore
    total: int = await seen.update("a", lambda number: number + 1)
    assert total
    assert_type(await seen.history("a"), list[Change[int]])
    for key, number in (await seen.items()).items():
        assert_type(key, str)
        assert_type(number, int)
    async for changed in seen.watch():
        assert_type(changed, Change[int])
    assert_type(await counts.add("a", 2), int)
    assert_type(await counts.get("a"), int)
    assert_type(await counts.items(), dict[str, int])


async def publish() -> None:
    async with app as connected:
        assert_type(connected, App)
        assert_type(await app.notify("mars", {"class": "od", "step": 6}, {"n": 1}, due=60), Receipt)
        assert_type(await app.cancel("mars", "mine"), bool)
        assert_type(await app.notify_many(Notify("mars", {"step": number}) for number in range(3)), int)
        assert_type(await app.notify_together([Notify("mars", {"step": 1})], message_id="all"), Receipt)
        assert_type([one async for one in app.replay("mars", from_id=1, to_id=9)], list[Notification[Any]])
        assert_type(await app.key_value("mine"), KeyValue)


async def embed() -> None:
    async with app.running(status_port=9464) as running:
        assert_type(running, App)
        assert_type(await running.notify("mars", {"class": "od"}), Receipt)


def publish_from_a_thread() -> None:
    stored = app.sync(
        app.notify, "mars", {"class": "od"}, {"n": 1}, message_id="mine", ttl=60, headers={"Source": "cron"}
    )
    assert_type(stored, Receipt)


async def try_out() -> None:
    async with harness(app, workers=2) as t:
        assert_type(t, Harness)
        assert_type(await t.notify("mars", {"class": "od"}, {"n": 1}), Receipt)
        await t.settle()
        await t.advance(60)
        assert_type(t.published, list[Notify])
        assert_type([dead_letter.reason for dead_letter in t.dead_letters], list[str])
        assert_type(t.ticks(tidy)[0].timer, str)
        assert_type(await t.retry_dead_letters(), list[DeadLetter])
        assert_type(await t.retry_dead_letters(*t.dead_letters), list[DeadLetter])
        assert_type(await t.pause("index"), None)
        assert_type(await t.pause("index", seconds=60), None)
        assert_type(await t.resume("index"), None)
        assert_type(await t.pause(tidy, seconds=60), None)
        assert_type(await t.resume(tidy), None)
        caught_up = await t.catch_up(tidy, datetime(2026, 11, 20, tzinfo=UTC), datetime(2026, 11, 21, tzinfo=UTC))
        assert_type(caught_up[0].timer, str)
        assert_type(await t.deploy(App("fields")), None)
        assert_type(await t.deploy(App("fields"), beside=True), None)
    async with harness(app, start=datetime(2026, 11, 20, tzinfo=UTC)) as t:
        assert_type(t.clock.time_ns(), int)


async def try_the_fixture(aviso_harness: AvisoHarness) -> None:
    async with aviso_harness(app, workers=2, start=datetime(2026, 11, 20, tzinfo=UTC)) as t:
        assert_type(t, Harness)


assert_type(report.name, str)
timers: list[Timer[Any, Any]] = [tidy, report]


async def ask() -> None:
    assert_type(await app.request("mars", {"class": "od"}, reply="done"), Notification[Any])
    typed = await app.request("mars", {"class": "od"}, 1, reply="done", where={"step": [1, 2]}, reply_type=Row)
    assert_type(typed, Notification[Row])
    assert_type(typed.payload, Row)


def settings_of(router: Router[Limits]) -> None:
    assert_type(limited.settings(), Limits)
    assert_type(limited.settings(limited), Limits)
    assert_type(limited.settings(router), Limits)
    assert_type(app.settings(), Any)
