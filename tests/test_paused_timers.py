"""Timers that are paused, resumed and caught up, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from aviso_workers import App, Tick
from aviso_workers.errors import DeclarationError
from aviso_workers.testing import harness
from tests import forgeries
from tests.contract.settings import app_config

pytestmark = pytest.mark.anyio

START = datetime(2026, 1, 1, tzinfo=UTC)
LEADERS = pytest.mark.parametrize("leader", [False, True])


class Client: ...


def at(*minutes: int) -> list[datetime]:
    return [START + timedelta(minutes=each) for each in minutes]


@pytest.fixture
def app() -> App:
    return App("paused", config=app_config("in_memory", ""))


@pytest.mark.slow
@LEADERS
async def test_a_pause_ends_by_itself_and_its_ticks_are_missed(app: App, leader: bool) -> None:
    @app.every("10m", singleton=leader)
    async def look() -> None: ...

    async with harness(app, start=START) as t:
        await t.advance("15m")
        await t.pause(look, seconds=1500)
        await t.advance("45m")
        assert [tick.time for tick in t.ticks(look)] == at(10, 40, 50, 60)


@pytest.mark.slow
async def test_the_ticks_of_a_pause_are_caught_up_by_a_timer_that_does(app: App) -> None:
    @app.every("10m", singleton=True, catch_up=True)
    async def look() -> None: ...

    async with harness(app, start=START) as t:
        await t.advance("15m")
        await t.pause(look)
        await t.advance("20m")
        assert [tick.time for tick in t.ticks(look)] == at(10)
        assert await t.catch_up(look, *at(0, 35)) == [], "its leader runs them"
        await t.resume(look)
        await t.advance(10)
        assert [tick.time for tick in t.ticks(look)] == at(10, 20, 30)


@pytest.mark.slow
async def test_a_pause_holds_where_a_server_has_stored_an_answer_in_its_place(app: App) -> None:
    @app.every("10m", singleton=False)
    async def look() -> None: ...

    async with harness(app, start=START) as t:
        await t.pause(look, seconds=2700)
        await t.advance("15m")
        forgeries.store(app.session.backend, "KV_paused__orders", "$KV.paused__orders.paused/timers/look/pause")
        await t.advance("45m")
        assert [tick.time for tick in t.ticks(look)] == at(50, 60)


@pytest.mark.slow
@LEADERS
async def test_a_pause_holds_while_the_server_is_away(app: App, leader: bool) -> None:
    @app.every("10m", singleton=leader)
    async def look() -> None: ...

    async with harness(app, start=START) as t:
        await t.advance("5m")
        await t.pause(look, seconds=1200)
        await t.advance("1m")
        t.disconnect()
        await t.advance("10m")
        t.reconnect()
        assert t.ticks(look) == []
        await t.advance("20m")
        assert [tick.time for tick in t.ticks(look)] == at(30)


@pytest.mark.parametrize("value", [b"\xff", b"{}", b'{"since":"2026-01-01T00:00:00","until":"2026-01-02","by":""}'])
async def test_what_is_no_pause_pauses_nothing(app: App, value: bytes) -> None:
    @app.every("1m", singleton=False)
    async def look() -> None: ...

    async with harness(app, start=START) as t:
        bucket = await app.session.backend.key_value("paused__orders")
        await bucket.put("paused/timers/look/pause", value)
        await t.advance(61)
        assert [tick.time for tick in t.ticks(look)] == at(1)


@pytest.mark.slow
async def test_missed_ticks_are_run_in_order_and_none_that_a_leader_has_begun(app: App) -> None:
    seen: list[Tick] = []

    @app.every("10m", singleton=True)
    async def look(tick: Tick) -> None:
        seen.append(tick)

    async with harness(app, start=START) as t:
        await t.advance("25m")
        await t.pause(look)
        await t.advance("30m")
        await t.resume(look)
        await t.advance("20m")
        assert [tick.time for tick in seen] == at(10, 20, 60, 70)
        seen.clear()
        ran = await t.catch_up(look, *at(10, 70))
        assert [(tick.time, tick.token) for tick in seen] == [(time, None) for time in at(30, 40, 50)]
        assert [ticked.time for ticked in ran] == at(30, 40, 50)
        assert [ticked.time for ticked in await t.catch_up(look, *at(60, 70), again=True)] == at(60, 70)
        before = START - timedelta(hours=1)
        assert await t.catch_up(look, before, START) == [], "only the last gap is known"
        assert len(await t.catch_up(look, before, START, again=True)) == 7


@pytest.mark.slow
async def test_what_came_before_the_first_leader_was_begun_by_none(app: App) -> None:
    @app.every("10m", singleton=True)
    async def look() -> None: ...

    async with harness(app, start=START + timedelta(minutes=35)) as t:
        await t.advance("20m")
        assert [ticked.time for ticked in await t.catch_up(look, *at(10, 50))] == at(10, 20, 30)


@pytest.mark.slow
async def test_a_new_leader_knows_which_ticks_were_missed(app: App) -> None:
    @app.every("10m", singleton=True)
    async def look() -> None: ...

    async with harness(app, start=START) as t:
        await t.advance("15m")
        await t.stop()
        await t.advance("22m")
        await t.start()
        await t.advance("20m")
        await t.crash()
        await t.advance("10m")
        assert [tick.time for tick in t.ticks(look)] == at(10, 40, 50, 60)
        assert [ticked.time for ticked in await t.catch_up(look, *at(0, 67))] == at(20, 30)


async def test_what_an_older_version_has_claimed_is_not_known_to_be_missed(app: App) -> None:
    @app.every("10m", singleton=True)
    async def look() -> None: ...

    async with harness(app, start=START + timedelta(minutes=35)) as t:
        await t.stop()
        bucket = await app.session.backend.key_value("paused__timers")
        await bucket.put("look", b'{"time":"2026-01-01T00:20:00Z","token":1,"schedule":"every 600s"}')
        assert [ticked.time for ticked in await t.catch_up(look, *at(0, 34))] == at(30)
        assert [ticked.time for ticked in await t.catch_up(look, *at(0, 34), again=True)] == at(0, 10, 20, 30)


async def test_the_first_tick_that_fails_is_the_last(app: App) -> None:
    @app.every("10m", singleton=False)
    async def look(tick: Tick) -> None:
        if tick.time == at(20)[0]:
            raise ValueError("no data")

    async with harness(app, start=START + timedelta(hours=1)) as t:
        ran = await t.catch_up(look, *at(0, 40))
        assert [(ticked.time, ticked.error is None) for ticked in ran] == [
            (each, each != at(20)[0]) for each in at(0, 10, 20)
        ]


async def test_resources_are_given_to_each(app: App) -> None:
    opened: list[Any] = []

    @app.resource(scope="call")
    async def client() -> AsyncIterator[Client]:
        opened.append("opened")
        yield Client()

    @app.every("10m", singleton=False)
    async def look(client: Client) -> None:
        opened.append(type(client))

    async with harness(app, start=START + timedelta(hours=1)) as t:
        await t.catch_up(look, *at(0, 10))
        assert opened == ["opened", Client] * 2


@pytest.mark.parametrize(
    ("first", "last", "complaint"),
    [(20, 10, "must end after it begins"), (0, 70, "and by now"), (-60 * 24 * 365, 0, "more than 10000 ticks")],
)
async def test_a_range_must_be_over_and_short(app: App, first: int, last: int, complaint: str) -> None:
    @app.every("10m", singleton=False)
    async def look() -> None: ...

    async with harness(app, start=START + timedelta(hours=1)) as t:
        with pytest.raises(DeclarationError, match=complaint):
            await t.catch_up(look, *at(first, last))
