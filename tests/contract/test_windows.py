"""Windows: what is counted, when they close, and what is published of them, on either backend."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import msgspec
import pytest

from aviso_workers import Ack, Agent, App, Notification, Notify, Reject, Retry, RetryPolicy, Router, Window, Windowing
from aviso_workers.clocks import LoopClock
from aviso_workers.declare import seen, windows
from aviso_workers.engine.dead_letter_store import DeadLetterStore
from aviso_workers.engine.key_value import RetryingKeyValue
from aviso_workers.errors import DeclarationError, LateError, RefusedError, UndecodableError
from aviso_workers.events import AgentDisturbed, Event, Published, Unreadable, WindowDone
from aviso_workers.features import seen as pages
from aviso_workers.features import windows as handler
from aviso_workers.features.windows import WindowHandler
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters
from aviso_workers.state import window_records
from aviso_workers.testing import Harness, harness
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

SIX = datetime(2026, 11, 20, 6, tzinfo=UTC)
STEPS = itertools.count()
PROMPT = RetryPolicy(first=0.05, factor=1, attempts=3, jitter=0)


class Field(msgspec.Struct, frozen=True):
    minute: float
    """When it happened, after six o'clock."""
    size: int = 1


def happened(notification: Notification[Field]) -> datetime:
    return SIX + timedelta(minutes=notification.payload.minute)


def add(total: int, notification: Notification[Field]) -> int:
    return total + notification.payload.size


def class_of(notification: Notification[Field]) -> str:
    return notification.identifier["class"]


def hourly(**stated: Any) -> Windowing[int, Field]:
    return Windowing(**{"size": "1h", "fold": add, "initial": 0, "time": happened, **stated})


def result(window: Window[int]) -> Notify:
    minutes = [int((time - SIX).total_seconds() / 60) for time in (window.start, window.end)]
    return Notify("plain", {"a": f"{minutes[0]}-{minutes[1]}", "b": window.key or "all"}, window.value)


@pytest.fixture
def declare(app: App) -> Callable[..., Any]:
    """`declare(hourly(), concurrency=2)`: an agent that publishes the sums of windows."""

    def declare(window: Windowing[int, Field], **policy: Any) -> Any:
        @app.agent("mars", window=window, **{"retry": PROMPT, **policy})
        async def sums(window: Window[int]) -> Notify:
            return result(window)

        return sums

    return declare


async def notify(t: Harness, *minutes: float, size: int = 1, of: str = "od") -> None:
    for minute in minutes:
        identifier = mars(step=next(STEPS), **{"class": of})  # the stream keeps one notification of each topic
        await t.notify("mars", identifier, {"minute": minute, "size": size})


def sums(t: Harness) -> dict[str, int]:
    """What was published, by window. None is published twice."""
    found = [one for one in t.published if one.event_type == "plain"]
    by_window = {f"{one.identifier['a']} {one.identifier['b']}": one.payload for one in found}
    assert len(by_window) == len(found), f"published twice: {found}"
    return by_window


async def test_a_window_is_published_when_a_notification_of_after_its_end_has_come(
    app: App, url: str | None, declare: Callable[..., Agent[Any, Any]]
) -> None:
    agent = declare(hourly())
    async with harness(app, server=url) as t:
        await notify(t, 0, 10, 59.9)
        await t.settle()
        assert sums(t) == {}
        await notify(t, 60)
        await t.settle()
        assert sums(t) == {"0-60 all": 3}
        await notify(t, 200)
        await t.settle()
        assert sums(t) == {"0-60 all": 3, "60-120 all": 1}
        assert [(done.start, done.error) for done in t.windows(agent)] == [
            (SIX, None),
            (SIX + timedelta(hours=1), None),
        ]


async def test_hopping_windows_overlap(app: App, url: str | None, declare: Callable[..., Agent[Any, Any]]) -> None:
    declare(hourly(every="30m"))
    async with harness(app, server=url) as t:
        await notify(t, 0, 40, 70, 150)
        await t.settle()
        assert sums(t) == {"-30-30 all": 1, "0-60 all": 2, "30-90 all": 2, "60-120 all": 1}


async def test_each_key_has_windows_and_all_close_together(
    app: App, url: str | None, declare: Callable[..., Agent[Any, Any]]
) -> None:
    declare(hourly(key=class_of))
    async with harness(app, server=url) as t:
        await notify(t, 1, 2, of="od")
        await notify(t, 3, of="rd")
        await notify(t, 61, of="od")
        await t.settle()
        assert sums(t) == {"0-60 od": 2, "0-60 rd": 1}


@pytest.mark.parametrize("key", [None, 0, 5, b"od"])
async def test_a_key_that_is_not_a_text_fails_the_call(app: App, declare: Callable[..., Any], key: Any) -> None:
    agent = declare(hourly(key=lambda notification: key), retry=RetryPolicy(attempts=1))
    async with harness(app) as t:
        await notify(t, 1)
        await t.settle()
        (settled,) = t.settled(agent)
        assert str(settled.error).startswith(f"Windowing: key must return a text, returned {key!r}")


@pytest.mark.parametrize("time", [None, 1_763_000_000.0, "2026-11-20T06:00:00Z"])
async def test_a_time_that_is_not_a_datetime_fails_the_call(app: App, declare: Callable[..., Any], time: Any) -> None:
    agent = declare(hourly(time=lambda notification: time), retry=RetryPolicy(attempts=1))
    async with harness(app) as t:
        await notify(t, 1)
        await t.settle()
        (settled,) = t.settled(agent)
        assert str(settled.error) == f"Windowing: time must return a datetime with a time zone, returned {time!r}"


class TestOpenWindows:
    async def test_have_what_was_counted_so_far(
        self, app: App, url: str | None, declare: Callable[..., Agent[Any, Any]]
    ) -> None:
        sums = declare(hourly(key=class_of, lateness="30m"))
        async with harness(app, server=url, workers=2) as t:
            assert await app.open_windows(sums, "od") == []
            await notify(t, 1, 2, 61, of="od")
            await notify(t, 3, size=5, of="rd")
            await t.settle()
            hour = timedelta(hours=1)
            assert await app.open_windows(sums, "od") == [
                Window(key="od", start=SIX, end=SIX + hour, value=2),
                Window(key="od", start=SIX + hour, end=SIX + 2 * hour, value=1),
            ]
            assert [window.value for window in await app.open_windows(sums, "rd")] == [5]
            assert await app.open_windows(sums, "none") == []

    async def test_are_read_where_no_worker_runs_and_nothing_is_changed_by_it(
        self, app: App, url: str | None, declare: Callable[..., Agent[Any, Any]]
    ) -> None:
        sums = declare(hourly(every="30m"))
        async with harness(app, server=url) as t:
            assert await app.open_windows(sums) == []
            await notify(t, 40)
            await t.settle()
            await t.stop()
            before = (await app.session.admin.stream_info("KV_contract__windows__sums")).last_sequence
            assert [window.start.minute for window in await app.open_windows(sums)] == [0, 30]
            assert (await app.session.admin.stream_info("KV_contract__windows__sums")).last_sequence == before

    async def test_make_no_bucket(self, app: App, declare: Callable[..., Agent[Any, Any]]) -> None:
        sums = declare(hourly())
        async with app:
            assert await app.open_windows(sums) == []
            assert await app.session.admin.stream_names() == []

    async def test_that_are_over_are_not_among_them_although_their_function_fails(
        self, app: App, url: str | None
    ) -> None:
        @app.agent("mars", window=hourly(key=class_of), retry=RetryPolicy(first=600, jitter=0))
        async def sums(window: Window[int]) -> None:
            raise RuntimeError("no table")

        async with harness(app, server=url) as t:
            await notify(t, 10, of="od")
            await notify(t, 70, of="rd")
            with anyio.fail_after(PATIENCE_SECONDS):
                while not t.windows(sums):
                    await t.advance(0.5)
            assert await app.open_windows(sums, "od") == []
            assert [window.start.hour for window in await app.open_windows(sums, "rd")] == [7]

    async def test_are_asked_of_the_routers_agent_and_of_no_other(self, app: App, url: str | None) -> None:
        router = Router("theirs")

        @router.agent("mars", window=hourly())
        async def sums(window: Window[int]) -> None: ...

        @router.agent("mars")
        async def index(notification: Notification[Any]) -> None: ...

        app.include(router, prefix="our")
        async with harness(app, server=url) as t:
            await notify(t, 10, 20)
            await t.settle()
            assert [window.value for window in await app.open_windows(sums)] == [2]
            with pytest.raises(DeclarationError, match="agent 'our_index' has no windows"):
                await app.open_windows(index)  # type: ignore[arg-type]
            other = Router("other").agent("mars", window=hourly())(sums.function)
            with pytest.raises(DeclarationError, match="'contract', whose agents of windows are: our_sums"):
                await app.open_windows(other)


async def test_what_somebody_else_wrote_keeps_no_window_open(
    app: App, url: str | None, declare: Callable[..., Agent[Any, Any]]
) -> None:
    declare(hourly(key=class_of))
    unreadable: list[Unreadable] = []
    app.events.listen(unreadable.append, Unreadable)
    async with harness(app, server=url) as t:
        await notify(t, 1, of="od")
        await t.settle()
        bucket = await app.session.backend.key_value(window_records.bucket_of("contract", "sums"))
        for key, garbage in {
            "rd": b"\xff",
            "xx": b"[" * 100_000,
            "yy": b'{"open":{"%d":5},"closed":%d}' % (2**62, 2**63),
            "=counted.7": b"{}",
            "=counted.x": b"",
        }.items():
            await bucket.put(key, garbage)
        await notify(t, 61, of="od")
        with anyio.fail_after(PATIENCE_SECONDS):
            while not sums(t):
                await t.advance(0.2)
        assert sums(t) == {"0-60 od": 1}
    assert {event.stream for event in unreadable} == {"KV_contract__windows__sums"}


async def test_a_key_may_be_any_text(app: App, url: str | None) -> None:
    keys: list[str] = []

    @app.agent("mars", window=hourly(key=lambda one: "größe / *"))
    async def note(window: Window[int]) -> None:
        keys.append(window.key)

    async with harness(app, server=url) as t:
        await notify(t, 1, 61)
        await t.settle()
    assert keys == ["größe / *"]


async def test_what_is_out_of_order_is_waited_for_by_the_lateness(
    app: App, url: str | None, declare: Callable[..., Agent[Any, Any]]
) -> None:
    declare(hourly(lateness="15m"))
    async with harness(app, server=url) as t:
        await notify(t, 70, 10, 74, 59)
        await t.settle()
        await t.advance(2 * handler.CHECK_SECONDS)
        await notify(t, 58)
        await t.settle()
        assert sums(t) == {}
        await notify(t, 75)
        await t.settle()
        assert sums(t) == {"0-60 all": 3}


async def test_while_nothing_comes_nothing_is_stored(
    app: App, url: str | None, declare: Callable[..., Agent[Any, Any]]
) -> None:
    declare(hourly())
    async with harness(app, server=url) as t:
        await notify(t, 10)
        await t.settle()
        await t.advance(2 * handler.CHECK_SECONDS)
        bucket = await app.key_value("contract__windows__sums")
        revision = await bucket.revision()
        await t.advance(2 * handler.CHECK_SECONDS)
        assert await bucket.revision() == revision


async def test_what_is_late_is_a_dead_letter(
    app: App, url: str | None, declare: Callable[..., Agent[Any, Any]]
) -> None:
    agent = declare(hourly())
    async with harness(app, server=url) as t:
        await notify(t, 10, 70)
        await t.settle()
        await notify(t, 20)
        await t.settle()
        assert t.outcomes(agent) == ["acked", "acked", "dead_lettered"]
        (dead_letter,) = t.dead_letters
        assert dead_letter.reason == "late"
        assert dead_letter.error == "LateError: all of its windows have closed, the last at 2026-11-20T07:00:00+00:00"
        assert sums(t) == {"0-60 all": 1}


async def test_what_is_late_for_one_of_its_windows_counts_in_the_others(
    app: App, url: str | None, declare: Callable[..., Agent[Any, Any]]
) -> None:
    declare(hourly(every="30m"))
    async with harness(app, server=url) as t:
        await notify(t, 10, 65)
        await t.settle()
        await notify(t, 40)
        await t.settle()
        (dead_letter,) = t.dead_letters
        assert (dead_letter.reason, dead_letter.error) == (
            "late",
            "LateError: one of its windows had closed; it was counted in the others",
        )
        await notify(t, 300)
        await t.settle()
        assert sums(t) == {"-30-30 all": 1, "0-60 all": 1, "30-90 all": 2, "60-120 all": 1}


async def test_what_is_late_is_late_for_every_key(
    app: App, url: str | None, declare: Callable[..., Agent[Any, Any]]
) -> None:
    declare(hourly(key=class_of))
    async with harness(app, server=url) as t:
        await notify(t, 10, 70, of="od")
        await t.settle()
        await notify(t, 20, 80, of="rd")
        await t.settle()
        await notify(t, 130, of="od")
        await t.settle()
        assert [dead_letter.reason for dead_letter in t.dead_letters] == ["late"]
        assert sums(t) == {"0-60 od": 1, "60-120 od": 1, "60-120 rd": 1}


async def test_an_author_may_say_what_becomes_of_what_is_late(
    app: App, url: str | None, declare: Callable[..., Agent[Any, Any]]
) -> None:
    agent = declare(hourly())
    late: list[Exception] = []

    @agent.on_error(LateError)
    def let_it_go(error: Exception) -> Ack:
        late.append(error)
        return Ack()

    async with harness(app, server=url) as t:
        await notify(t, 70)
        await t.settle()
        await notify(t, 130)
        await t.settle()
        await notify(t, 10, 125)
        await t.settle()
        assert (t.outcomes(agent), len(late), t.dead_letters) == (["acked"] * 4, 1, [])


async def test_a_notification_that_comes_again_counts_once(
    app: App, url: str | None, declare: Callable[..., Agent[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a worker dies between counting and acknowledging."""
    count = WindowHandler._count
    failed: list[Notification[Field]] = []

    async def count_and_fail(self: WindowHandler, notification: Notification[Field]) -> None:
        await count(self, notification)
        if len(failed) < 2:
            failed.append(notification)
            raise ConnectionError("the worker dies here")

    monkeypatch.setattr(WindowHandler, "_count", count_and_fail)
    agent = declare(hourly())
    async with harness(app, server=url) as t:
        await notify(t, 10, size=5)
        await notify(t, 70)
        await t.settle()
        assert t.outcomes(agent).count("retried") == 2
        assert sums(t) == {"0-60 all": 5}


async def test_a_window_waits_for_what_is_tried_again(app: App, url: str | None) -> None:
    tries: list[int] = []

    def add_at_the_second_try(total: int, notification: Notification[Field]) -> int:
        if notification.payload.size == 7:
            tries.append(1)
            if len(tries) == 1:
                raise ConnectionError
        return total + notification.payload.size

    @app.agent("mars", window=hourly(fold=add_at_the_second_try), retry=RetryPolicy(first=2.5, jitter=0))
    async def sums_of_all(window: Window[int]) -> Notify:
        return result(window)

    async with harness(app, server=url) as t:
        await notify(t, 10, size=7)
        await notify(t, 70, 71)
        await t.settle()
        assert (sums(t), t.dead_letters) == ({"0-60 all": 7}, [])


@pytest.mark.parametrize("since", [0, 20])
async def test_a_dead_letter_that_is_tried_again_counts_once(
    app: App, url: str | None, declare: Callable[..., Agent[Any, Any]], monkeypatch: pytest.MonkeyPatch, since: int
) -> None:
    monkeypatch.setattr(windows, "LISTED", 4)
    broken = [True]

    def add_if_it_works(total: int, notification: Notification[Field]) -> int:
        if broken and notification.payload.size == 7:
            raise Reject("not yet")
        return total + notification.payload.size

    agent = declare(hourly(fold=add_if_it_works))
    async with harness(app, server=url) as t:
        await notify(t, 10, size=7)
        await notify(t, 11)
        await t.settle()
        await many(app, since)
        await t.settle()
        await t.advance(1.5)  # it is noted that all of this is settled
        await many(app, since)
        await t.settle()
        broken.clear()
        stored = StoredDeadLetters(app.session.admin, events=app.events)
        (dead_letter,) = [dead_letter async for dead_letter in stored.select(Selection())]
        await stored.retry(dead_letter)
        await t.settle()
        await notify(t, 61)
        await t.settle()
        assert t.outcomes(agent) == ["dead_lettered", *["acked"] * (3 + 2 * since)]
        assert sums(t) == {"0-60 all": 8 + 2 * since}


async def test_an_agent_that_is_reset_does_not_count_again_what_it_has_counted(
    app: App, url: str | None, declare: Callable[..., Agent[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "LISTED", 2)  # so that what is settled is left out soon
    agent = declare(hourly())
    async with harness(app, server=url) as t:
        await notify(t, *range(10))
        await t.settle()
        await t.advance(0.2)
        await notify(t, 11)
        await t.settle()
        await app.session.admin.reset_consumer("MARS", agent.durable_name(app.name), sequence=1)
        await notify(t, 12)
        await t.settle()
        assert t.outcomes(agent) == ["acked"] * 23
        await notify(t, 60)
        await t.settle()
        assert sums(t) == {"0-60 all": 12}


async def test_a_function_that_fails_is_run_again_and_publishes_once(app: App, url: str | None) -> None:
    tries: list[int] = []

    @app.agent("mars", window=hourly(), retry=RetryPolicy(first=0.05, factor=1, attempts=3, jitter=0))
    async def sums_at_the_third_try(window: Window[int]) -> None:
        tries.append(window.value)
        one = result(window)
        await app.notify(one.event_type, one.identifier, one.payload)
        if len(tries) < 3:
            raise RuntimeError("no table")

    async with harness(app, server=url) as t:
        await notify(t, 10, 70)
        await t.settle()
        assert (tries, sums(t)) == ([1, 1, 1], {"0-60 all": 1})
        errors = [repr(done.error) for done in t.windows(sums_at_the_third_try)]
        assert errors == ["RuntimeError('no table')"] * 2 + ["None"]
        assert t.outcomes(sums_at_the_third_try) == ["acked", "acked"]


async def test_a_window_that_fails_as_often_as_it_may_is_a_dead_letter_that_can_be_tried_again(
    app: App, url: str | None
) -> None:
    broken = True

    @app.agent("mars", window=hourly(key=class_of), retry=RetryPolicy(first=0.05, factor=1, attempts=2, jitter=0))
    async def totals(window: Window[int]) -> Notify:
        if broken and window.key == "rd":
            raise RuntimeError("no table")
        return result(window)

    async with harness(app, server=url) as t:
        await notify(t, 1, 2, of="od")
        await notify(t, 3, 4, 5, of="rd")
        await notify(t, 61, of="od")
        await t.settle()
        assert sums(t) == {"0-60 od": 2}
        stored = StoredDeadLetters(app.session.admin, events=app.events)
        (dead_letter,) = [dead_letter async for dead_letter in stored.select(Selection())]
        assert (dead_letter.agent, dead_letter.reason, dead_letter.attempts) == ("totals", "attempts_exhausted", 2)
        assert dead_letter.error == "RuntimeError: no table"
        start = int(SIX.timestamp())
        kept = msgspec.json.decode(dead_letter.original.data)
        assert (kept["start"], kept["end"], kept["value"]) == (start, start + 3600, 3)
        assert [done.dead_lettered for done in t.windows(totals) if done.key == "rd"] == ["", "attempts_exhausted"]

        broken = False
        await stored.retry(dead_letter)
        await t.settle()
        assert sums(t) == {"0-60 od": 2, "0-60 rd": 3}
        assert [dead_letter async for dead_letter in stored.select(Selection())] == []


async def test_a_window_whose_dead_letter_is_not_stored_is_run_again(
    app: App, url: str | None, declare: Callable[..., Agent[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [RefusedError("full")] * 2
    dead_letter = DeadLetterStore.dead_letter

    async def refuse(*given: Any, **stated: Any) -> None:
        if refusals:
            raise refusals.pop()
        await dead_letter(*given, **stated)

    monkeypatch.setattr(DeadLetterStore, "dead_letter", refuse)
    agent = declare(hourly(), retry=RetryPolicy(first=0.05, factor=1, attempts=1, jitter=0))
    async with harness(app, server=url) as t:
        t.fail(agent, RuntimeError("no table"), times=3)
        await notify(t, 10, 70)
        await t.settle()
        assert [done.dead_lettered for done in t.windows(agent)] == ["", "", "attempts_exhausted"]
        assert len(t.dead_letters) == 1


async def test_settle_tells_of_a_window_that_fails(
    app: App, url: str | None, declare: Callable[..., Agent[Any, Any]]
) -> None:
    agent = declare(hourly(), retry=RetryPolicy(first=0.05, factor=1, attempts=10_000, jitter=0))
    async with harness(app, server=url) as t:
        t.fail(agent, RuntimeError("no table"), times=1000)
        await notify(t, 10, 70)
        with pytest.raises(AssertionError, match=r"1 windows over and not done.*no table"):
            await t.settle(within_seconds=3)


async def test_windows_outlive_their_workers(
    app: App, url: str | None, declare: Callable[..., Agent[Any, Any]]
) -> None:
    declare(hourly())
    async with harness(app, server=url) as t:
        t.fail("sums", ConnectionError(), times=1)
        await notify(t, 10, 11, 70)
        await anyio.sleep(0.1)
        await t.stop()
        await t.start()
        await t.settle()
        assert sums(t) == {"0-60 all": 2}


@pytest.mark.parametrize("concurrency", [1, 8])
async def test_workers_count_together(
    app: App, url: str | None, declare: Callable[..., Agent[Any, Any]], concurrency: int
) -> None:
    declare(hourly(key=class_of), concurrency=concurrency)
    async with harness(app, server=url, workers=3) as t:
        for minute in range(60):
            await notify(t, minute, size=minute, of=("od", "rd")[minute % 2])
        await notify(t, 60)
        await t.settle()
        assert sums(t) == {"0-60 od": sum(range(0, 60, 2)), "0-60 rd": sum(range(1, 60, 2))}


async def test_windows_close_when_nothing_comes_any_more(
    app: App, url: str | None, declare: Callable[..., Agent[Any, Any]]
) -> None:
    declare(hourly(idle="3s"))
    async with harness(app, server=url) as t:
        await notify(t, 10, 70)
        await t.settle()
        assert sums(t) == {"0-60 all": 1}
        await t.advance(4.5)
        assert sums(t) == {"0-60 all": 1, "60-120 all": 1}


async def test_while_something_is_tried_again_nothing_is_idle(app: App, url: str | None) -> None:
    tries: list[int] = []

    def add_at_the_second_try(total: int, notification: Notification[Field]) -> int:
        if notification.payload.size == 7:
            tries.append(1)
            if len(tries) == 1:
                raise Retry(after=5)
        return total + notification.payload.size

    @app.agent("mars", window=hourly(fold=add_at_the_second_try, idle="1s"))
    async def sums_of_all(window: Window[int]) -> Notify:
        return result(window)

    async with harness(app, server=url) as t:
        await notify(t, 10)
        await notify(t, 11, size=7)
        await t.advance(4)
        assert sums(t) == {}
        await t.advance(6)
        assert (sums(t), t.dead_letters) == ({"0-60 all": 8}, [])


async def test_a_window_whose_function_is_throttled_uses_no_attempt(app: App, url: str | None) -> None:
    tries: list[int] = []

    @app.agent("mars", window=hourly(), retry=RetryPolicy(attempts=1))
    async def sums_of_all(window: Window[int]) -> Notify | Retry:
        tries.append(1)
        return Retry(after=1, counts=False) if len(tries) < 4 else result(window)

    async with harness(app, server=url) as t:
        await notify(t, 10, 61)
        with anyio.fail_after(PATIENCE_SECONDS):
            while not sums(t):
                await t.advance(0.5)
        assert (sums(t), t.dead_letters) == ({"0-60 all": 1}, [])
    assert len(tries) == 4


async def test_while_something_was_not_delivered_nothing_is_idle(
    app: App, url: str | None, declare: Callable[..., Agent[Any, Any]]
) -> None:
    declare(hourly(idle="2s"))
    async with harness(app, server=url) as t:
        await notify(t, 10)
        await t.settle()
        backend, consumer = app.session.admin, "contract__sums"
        await backend.pause_consumer("MARS", consumer, until=datetime(2100, 1, 1, tzinfo=UTC))
        await notify(t, 12)
        await t.advance(5)
        assert sums(t) == {}
        await backend.pause_consumer("MARS", consumer, until=None)
        with anyio.fail_after(PATIENCE_SECONDS):
            while not sums(t):
                await t.advance(0.5)
        assert (sums(t), t.dead_letters) == ({"0-60 all": 2}, [])


class FastClock(LoopClock):
    """Ten minutes ahead of the server's."""

    def time_ns(self) -> int:
        return super().time_ns() + 600_000_000_000


async def test_a_worker_whose_clock_is_ahead_closes_no_window_early(app: App, kind: str) -> None:
    if kind == "in_memory":
        pytest.skip("there is one clock")

    @app.agent("mars", window=hourly(idle="5m"))
    async def patient(window: Window[int]) -> None: ...

    @app.agent("mars", window=hourly(idle="2s"))
    async def prompt(window: Window[int]) -> None: ...

    closed: list[WindowDone] = []
    over = anyio.Event()

    def note(event: Event) -> None:
        if isinstance(event, WindowDone):
            closed.append(event)
            over.set()

    app.events.listen(note)
    stop = anyio.Event()
    async with app, anyio.create_task_group() as tasks:
        app.session.backend.clock = FastClock()  # type: ignore[misc]
        tasks.start_soon(app._work, stop)
        await app.notify("mars", mars(step=1), {"minute": 1})
        with anyio.fail_after(PATIENCE_SECONDS):
            await over.wait()
        stop.set()
    assert [done.agent for done in closed] == ["prompt"]
    assert closed[0].error is None


async def test_by_default_a_notification_happened_when_it_was_stored(app: App, url: str | None) -> None:
    @app.agent("mars", window=Windowing(size="1s", fold=lambda total, one: total + 1, initial=0))
    async def counts(window: Window[int]) -> Notify:
        return Notify("plain", {"a": window.start.isoformat(), "b": "x"}, window.value)

    async with harness(app, server=url) as t:
        await notify(t, 0)
        await t.advance(1.1)
        await notify(t, 0)
        await t.settle()
        (first,) = [one for one in t.published if one.event_type == "plain"]
        assert first.payload == 1


async def test_a_time_without_a_zone_is_refused(
    app: App, url: str | None, declare: Callable[..., Agent[Any, Any]]
) -> None:
    declare(hourly(time=lambda one: datetime(2026, 11, 20)))
    async with harness(app, server=url) as t:
        await notify(t, 0)
        await t.settle()
        (dead_letter,) = t.dead_letters
        assert "the time of a notification needs a zone" in dead_letter.error


async def test_a_fold_that_returns_something_else_stores_nothing(
    app: App, url: str | None, declare: Callable[..., Agent[Any, Any]]
) -> None:
    def say(total: int, notification: Notification[Field]) -> str:
        return str(total)

    declare(hourly(fold=say))
    async with harness(app, server=url) as t:
        await notify(t, 0)
        await t.settle()
        (dead_letter,) = t.dead_letters
        assert "agent 'sums': fold returned what is not a <class 'int'>: Expected `int`, got `str`" in dead_letter.error


async def test_a_fold_that_returns_none_fails_its_call(app: App, url: str | None) -> None:
    found: list[Any] = []

    forgetful: Windowing[Any, Any] = Windowing(size="1h", fold=lambda steps, _: steps.append(1), initial=[])

    @app.agent("mars", window=forgetful, retry=RetryPolicy(attempts=1))
    async def gathered(window: Window[Any]) -> None:
        found.append(window.value)

    async with harness(app, server=url) as t:
        await notify(t, 0)
        await t.settle()
        (dead_letter,) = t.dead_letters
        assert "fold returned None, as `list.append` does" in dead_letter.error
    assert found == []


async def test_values_of_another_type_are_told_with_the_cure(
    app: App, url: str | None, declare: Callable[..., Agent[Any, Any]]
) -> None:
    sums = declare(hourly())
    disturbed: list[AgentDisturbed] = []
    app.events.listen(disturbed.append, AgentDisturbed)
    async with harness(app, server=url) as t:
        bucket = await app.key_value("contract__windows__sums")
        await bucket.put("=", b'{"open": {"0": "one"}}')
        with pytest.raises(UndecodableError, match=r"hold is not a <class 'int'>.*give the agent another name"):
            await app.open_windows(sums)
        await notify(t, 0)
        with anyio.fail_after(PATIENCE_SECONDS):
            while not disturbed:
                await t.advance(0.1)
        assert "let the version that opened them close them, or give the agent another name" in str(disturbed[0].error)
        outcomes = {(settled.outcome, settled.reason) for settled in t.settled("sums")}
        assert outcomes <= {("retried", "other_version")}, "it waits for a worker that can count it"
        assert not t.dead_letters


async def test_who_meets_windows_of_another_size_counts_nothing_until_they_have_its_own_again(
    app: App, url: str | None, declare: Callable[..., Agent[Any, Any]]
) -> None:
    """As where the bucket was deleted under a worker, and a worker of another version made it anew."""
    declare(hourly())
    disturbed: list[AgentDisturbed] = []
    app.events.listen(disturbed.append, AgentDisturbed)
    async with harness(app, server=url) as t:
        await notify(t, 1)
        await t.settle()
        bucket = await app.session.backend.key_value(window_records.bucket_of("contract", "sums"))
        progress = window_records.read_progress(await bucket.get(window_records.PROGRESS))
        assert (progress.size, progress.every) == (3600, 3600)
        other = msgspec.structs.replace(progress, every=600)
        await bucket.put(window_records.PROGRESS, msgspec.json.encode(other))
        await notify(t, 2)
        with anyio.fail_after(PATIENCE_SECONDS):
            while not disturbed:
                await t.advance(0.1)
        assert "agent 'sums' has windows of size 1h and every 10m, and the code states" in str(disturbed[0].error)
        assert {settled.reason for settled in t.settled("sums")} <= {"", "other_version"}
        await bucket.put(window_records.PROGRESS, msgspec.json.encode(progress))
        await notify(t, 61)
        await t.settle()
        assert (sums(t), t.dead_letters) == ({"0-60 all": 2}, [])


async def test_a_value_may_be_made_of_parts(app: App, url: str | None) -> None:
    def gather(minutes: list[float], notification: Notification[Field]) -> list[float]:
        minutes.append(notification.payload.minute)
        return minutes

    @app.agent("mars", window=hourly(fold=gather, initial=[]))
    async def minutes(window: Window[list[float]]) -> Notify:
        return Notify("plain", {"a": "x", "b": window.start.hour}, window.value)

    async with harness(app, server=url) as t:
        await notify(t, 1, 2, 61, 121)
        await t.settle()
        assert [one.payload for one in t.published if one.event_type == "plain"] == [[1, 2], [61]]


async def test_a_server_that_is_too_old_is_told_before_anything_runs(
    app: App, declare: Callable[..., Agent[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(hourly())

    def refuse(major: int, minor: int, *, to: str) -> None:
        raise RefusedError(f"nats-server {major}.{minor} is needed to {to}")

    async with app:
        monkeypatch.setattr(app.session.admin.connection, "require_server", refuse)
        with pytest.raises(RefusedError, match=r"nats-server 2\.11 is needed to keep the windows of agent 'sums'"):
            await app._work(anyio.Event())


async def test_what_dies_after_publishing_is_published_once(app: App) -> None:
    published = anyio.Event()

    @app.agent("mars", window=hourly())
    async def sums_and_dies(window: Window[int]) -> None:
        one = result(window)
        await app.notify(one.event_type, one.identifier, one.payload)
        if not published.is_set():
            published.set()
            await anyio.sleep_forever()

    async with harness(app, workers=2) as t:
        await notify(t, 10, 70)
        with anyio.fail_after(PATIENCE_SECONDS):
            while not published.is_set():
                await t.advance(0.5)
        for worker in (0, 1):
            await t.crash(worker)
        await t.settle()
        assert sums(t) == {"0-60 all": 1}


@pytest.fixture
def stuck(app: App, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An agent of hourly sums whose notification of size 7 is tried again and again, until `stuck.clear()`."""
    monkeypatch.setattr(windows, "LISTED", 16)
    monkeypatch.setattr(seen, "PAGE_SEQUENCES", 64)
    stuck = [True]

    def add_later(total: int, notification: Notification[Field]) -> int:
        if stuck and notification.payload.size == 7:
            raise Retry(after=0.5)
        return total + notification.payload.size

    @app.agent("mars", window=hourly(fold=add_later, every="30m"), concurrency=4, retry=RetryPolicy(attempts=1000))
    async def sums(window: Window[int]) -> Notify:
        return result(window)

    return stuck


async def test_while_one_is_tried_again_every_entry_stays_small(app: App, url: str | None, stuck: list[bool]) -> None:
    async with harness(app, server=url) as t:
        await notify(t, 1, size=7)
        await many(app, 300)
        await counted(t, 300)
        entries = await (await app.key_value("contract__windows__sums")).entries()
        (key,) = [msgspec.json.decode(entry.value) for entry in entries if entry.key == "="]
        assert len(key["counted"]["newest"]) < 16, "it lists all that was ever counted"
        assert max(len(entry.value) for entry in entries) < 1000
        stuck.clear()
        await notify(t, 91)
        await t.settle()
        assert sums(t) == {"-30-30 all": 307, "0-60 all": 307}


async def test_what_comes_again_counts_once_however_much_was_counted_since(
    app: App, url: str | None, stuck: list[bool]
) -> None:
    async with harness(app, server=url) as t:
        await notify(t, 1, size=7)
        await many(app, 150)
        await counted(t, 150)
        await app.session.admin.reset_consumer("MARS", "contract__sums", sequence=1)
        await counted(t, 300)
        stuck.clear()
        await notify(t, 91)
        await t.settle()
        assert sums(t) == {"-30-30 all": 157, "0-60 all": 157}


async def test_what_was_late_for_a_window_is_still_told_when_much_was_counted_since(
    app: App, url: str | None, stuck: list[bool]
) -> None:
    async with harness(app, server=url) as t:
        await notify(t, 31, 65)  # the first one's first window closes
        await t.settle()
        await notify(t, 40, size=7)
        await notify(t, 40)
        await many(app, 100, minute=66)
        await counted(t, 103)
        await app.session.admin.reset_consumer("MARS", "contract__sums", sequence=1)
        await counted(t, 206)
        assert t.outcomes("sums").count("dead_lettered") == 2, "once before the reset and once after it"
        assert {dead_letter.reason for dead_letter in t.dead_letters} == {"late"}
        stuck.clear()
        await t.settle()


async def test_nothing_is_kept_of_what_is_settled(app: App, url: str | None, stuck: list[bool]) -> None:
    async with harness(app, server=url) as t:
        await notify(t, 1, size=7)
        await many(app, 200)
        await counted(t, 200)
        bucket = await app.key_value("contract__windows__sums")
        assert [key for key in await bucket.keys() if key.startswith("=counted.")]
        stuck.clear()
        await t.settle()
        await notify(t, 2)
        with anyio.fail_after(PATIENCE_SECONDS):
            while await bucket.get("=counted.0"):
                await t.advance(0.5)
        await app.session.admin.reset_consumer("MARS", "contract__sums", sequence=1)
        await notify(t, 91)
        await t.settle()
        assert sums(t) == {"-30-30 all": 208, "0-60 all": 208}


async def test_a_page_that_another_worker_has_added_to_meanwhile_is_not_removed(
    app: App, url: str | None, stuck: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    delete, tries = RetryingKeyValue.delete, list[str]()

    async def delete_too_late(bucket: RetryingKeyValue, key: str, **stated: Any) -> int:
        if key == "=counted.0" and not tries:
            tries.append(key)
            entry = await bucket.get(key)
            assert entry is not None
            page = msgspec.json.decode(entry.value, type=seen.SeenPage)
            await bucket.put(key, msgspec.json.encode(page.plus([(50, 9e9)], created=0.0)))  # it is not settled
        return await delete(bucket, key, **stated)

    monkeypatch.setattr(RetryingKeyValue, "delete", delete_too_late)
    async with harness(app, server=url) as t:
        await notify(t, 1, size=7)
        await many(app, 200)
        await counted(t, 200)
        stuck.clear()
        await t.settle()
        await notify(t, 2)
        with anyio.fail_after(PATIENCE_SECONDS):
            while not tries:
                await t.advance(0.5)
        await t.advance(3)
        entry = await (await app.key_value("contract__windows__sums")).get("=counted.0")
        assert entry is not None
        assert msgspec.json.decode(entry.value, type=seen.SeenPage).find((50, 9e9)) is False


async def test_what_is_counted_of_a_restored_stream_counts_once(
    app: App, url: str | None, stuck: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its notifications are older than the stream, as those of a promoted mirror are."""

    async def created(*_: Any) -> float:
        return 9e9

    monkeypatch.setattr(pages, "_created", created)
    async with harness(app, server=url) as t:
        await notify(t, 1, size=7)
        await many(app, 150)
        await counted(t, 150)
        await app.session.admin.reset_consumer("MARS", "contract__sums", sequence=1)
        await counted(t, 300)
        bucket = await app.key_value("contract__windows__sums")
        (key,) = [msgspec.json.decode(entry.value) for entry in await bucket.entries() if entry.key == "="]
        assert len(key["counted"]["newest"]) < 16
        stuck.clear()
        await notify(t, 91)
        await t.settle()
        assert sums(t) == {"-30-30 all": 157, "0-60 all": 157}


async def test_nothing_is_kept_of_what_is_settled_of_a_stream_that_was_recreated(
    app: App, url: str | None, stuck: list[bool]
) -> None:
    """It counts from 1 again, and has not come as far as the one before."""
    async with harness(app, server=url) as t:
        await many(app, 120)
        await t.settle()
        await t.advance(1.5)  # it is noted that all of this is settled
        await t.stop()
        await app.session.admin.delete_stream("MARS")
        await t.start()
        await notify(t, 1, size=7)
        await many(app, 80)
        await counted(t, 200)
        bucket = await app.key_value("contract__windows__sums")
        assert await bucket.get("=counted.0")
        stuck.clear()
        await t.settle()
        await notify(t, 2)
        deadline = t.clock.monotonic() + 10
        while await bucket.get("=counted.0") and t.clock.monotonic() < deadline:
            await t.advance(0.5)
        assert await bucket.get("=counted.0") is None


async def many(app: App, count: int, *, minute: float = 1) -> None:
    await app.notify_many(Notify("mars", mars(step=next(STEPS)), {"minute": minute, "size": 1}) for _ in range(count))


async def counted(t: Harness, count: int) -> None:
    """Wait until so many were settled in a way, what is tried again left out."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while sum(outcome != "retried" for outcome in t.outcomes("sums")) < count:
            await t.advance(0.1)


async def test_a_function_that_fails_is_run_again_after_the_wait_of_its_policy(app: App, url: str | None) -> None:
    tries: list[int] = []

    @app.agent("mars", window=hourly(), retry=RetryPolicy(first=4, factor=1, jitter=0))
    async def sums(window: Window[int]) -> None:
        tries.append(window.value)
        raise RuntimeError("no table")

    async with harness(app, server=url) as t:
        await notify(t, 10, 70)
        with anyio.fail_after(PATIENCE_SECONDS):
            while not t.windows(sums):
                await t.advance(0.5)
        await t.advance(2.5)  # it is looked at more often than that
        assert tries == [1]
        await t.advance(3)
        assert tries == [1, 1]


async def test_what_windows_of_two_keys_publish_alike_is_stored_for_each(app: App, url: str | None) -> None:
    @app.agent("mars", window=hourly(key=class_of))
    async def tell(window: Window[int]) -> Notify:
        return Notify("plain", {"a": 0, "b": "x"}, window.value)

    outcomes: list[str] = []
    app.events.listen(lambda event: outcomes.append(event.outcome) if event.event_type == "plain" else None, Published)
    async with harness(app, server=url) as t:
        await notify(t, 1, of="od")
        await notify(t, 1, 61, of="rd")
        await t.settle()
        assert outcomes == ["stored", "stored"]


async def test_a_key_is_forgotten_after_its_last_window_and_not_before(
    app: App, url: str | None, declare: Callable[..., Agent[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler, "FORGOTTEN_AFTER_SECONDS", 1.0)
    declare(hourly(key=class_of))
    async with harness(app, server=url) as t:
        await notify(t, 10, of="od")
        await t.settle()
        await t.advance(2.5)
        await notify(t, 70, of="rd")
        await t.settle()
        assert sums(t) == {"0-60 od": 1}
        bucket = await app.key_value("contract__windows__sums")
        await t.advance(2.5)
        assert sorted(await bucket.keys()) == ["=passed", "rd"]
