"""Timers as they are declared, and when they tick."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aviso_workers import App, Router, Tick
from aviso_workers.declare import timers
from aviso_workers.declare.timers import Schedule, next_tick
from aviso_workers.errors import DeclarationError

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
MINUTELY = timers.every("1m")
SCHEDULES = [timers.every("7s"), timers.cron("30 2 * * *", "Europe/Berlin"), timers.cron("*/7 1-3 * * *", "UTC")]


def at(text: str) -> datetime:
    """A time of day of November 21st, or of another day, UTC."""
    return datetime.fromisoformat(text if "-" in text else f"2026-11-21T{text}").replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("interval", "after", "tick"),
    [
        ("5m", "12:00:00", "12:05:00"),
        ("5m", "11:59:59.999999", "12:00:00"),
        ("1d", "12:00:00", "2026-11-22T00:00:00"),
        ("7s", "12:00:00", "12:00:06"),
    ],
)
def test_an_interval_is_counted_from_1970(interval: str, after: str, tick: str) -> None:
    assert timers.every(interval).after(at(after)) == at(tick)


@pytest.mark.parametrize(
    ("expression", "zone", "after", "tick"),
    [
        ("0 6 * * *", "UTC", "12:00", "2026-11-22T06:00"),
        ("0 6 * * *", "UTC", "2026-11-22T06:00", "2026-11-23T06:00"),
        ("*/15 * * * *", "UTC", "12:00", "12:15"),
        ("0 6 * * MON", "Europe/Berlin", "12:00", "2026-11-23T05:00"),
        ("*/10 * * * * *", "UTC", "12:00:01", "12:00:10"),
        # 02:30 is left out on March 29th, and comes twice on October 25th.
        ("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00", "2026-03-29T01:00"),
        ("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00", "2026-10-25T00:30"),
        ("30 2 * * *", "Europe/Berlin", "2026-10-25T00:30", "2026-10-26T01:30"),
        ("30 2 * * *", "Europe/Berlin", "2026-10-25T01:10", "2026-10-26T01:30"),
    ],
)
def test_cron_is_read_in_its_time_zone(expression: str, zone: str, after: str, tick: str) -> None:
    assert timers.cron(expression, zone).after(at(after)) == at(tick)


@given(
    st.sampled_from(
        [timers.every("7s"), timers.cron("30 2 * * *", "Europe/Berlin"), timers.cron("*/7 1-3 * * *", "UTC")]
    ),
    st.datetimes(min_value=datetime(2020, 1, 1), max_value=datetime(2030, 1, 1)),
)
def test_ticks_are_the_same_from_wherever_they_are_counted(schedule: Schedule, time: datetime) -> None:
    time = time.replace(tzinfo=UTC)
    first = schedule.after(time)
    second = schedule.after(first)
    assert time < first < second
    assert schedule.after(first - timedelta(seconds=1)) == first
    assert schedule.after(second - timedelta(microseconds=1)) == second


class TestTheNextTick:
    def test_is_the_one_after_the_last(self) -> None:
        assert next_tick(MINUTELY, NOON, now=NOON, catch_up=False) == at("12:01")

    def test_is_run_although_it_is_a_little_late(self) -> None:
        assert next_tick(MINUTELY, NOON, now=at("12:01:30"), catch_up=False) == at("12:01")

    def test_of_several_that_are_late_is_the_newest(self) -> None:
        assert next_tick(timers.every("10s"), NOON, now=at("12:05:05"), catch_up=False) == at("12:05:00")

    def test_is_the_coming_one_after_one_that_was_missed(self) -> None:
        assert next_tick(timers.every("1h"), NOON, now=at("13:01:01"), catch_up=False) == at("14:00")

    def test_is_the_oldest_where_all_are_caught_up(self) -> None:
        assert next_tick(MINUTELY, NOON, now=at("2026-12-01T00:00"), catch_up=True) == at("12:01")


class TestATimer:
    async def tick(self, tick: Tick) -> None: ...

    def test_is_named_after_its_function_and_called_like_it(self) -> None:
        router = Router("r")

        @router.every("5m", singleton=True)
        async def sweep() -> None:
            """Tidies."""

        @router.cron("0 6 * * *", name="daily", timezone="Europe/Berlin", catch_up=True, singleton=False)
        async def report(tick: Tick) -> None: ...

        assert [timer.name for timer in router.timers] == ["sweep", "daily"]
        assert (sweep.singleton, sweep.catch_up, sweep.__doc__) == (True, False, "Tidies.")
        assert report.schedule == timers.Cron("0 6 * * *", ZoneInfo("Europe/Berlin"))
        report(Tick(timer="daily", time=NOON)).close()

    def test_comes_along_with_its_router(self) -> None:
        router, app = Router("r"), App("a")
        router.every("5m", name="one", singleton=False)(self.tick)
        app.include(router)
        assert [timer.name for timer in app.timers] == ["one"]

    @pytest.mark.parametrize(
        ("interval", "problem"),
        [
            ("5", "duration must include a unit suffix"),
            ("0s", "longer than 0 seconds"),
            ("1.5h", "unit must be one of"),
        ],
    )
    def test_of_no_interval_is_refused(self, interval: str, problem: str) -> None:
        with pytest.raises(DeclarationError, match=f"timer 'tick': .*{problem}"):
            Router("r").every(interval, singleton=False)(self.tick)

    @pytest.mark.parametrize(
        ("stated", "problem"),
        [
            (("61 * * * *",), "cron '61 \\* \\* \\* \\*': Bad minute"),
            (("* * *",), "Wrong number of fields"),
            (("0 0 31 2 *",), "Bad day-of-month"),
        ],
    )
    def test_of_no_cron_is_refused(self, stated: Any, problem: str) -> None:
        with pytest.raises(DeclarationError, match=problem):
            Router("r").cron(*stated, singleton=False)(self.tick)

    @pytest.mark.parametrize("zone", ["Europe/Atlantis", "", "../etc", "Europe"])
    def test_of_no_time_zone_is_refused(self, zone: str) -> None:
        with pytest.raises(DeclarationError, match=f"timer 'tick': no time zone '{zone}'; say one such as"):
            Router("r").cron("0 6 * * *", timezone=zone, singleton=False)(self.tick)

    def test_that_is_no_async_function_is_refused(self) -> None:
        with pytest.raises(DeclarationError, match="timer 'sweep': must be an async function"):

            @Router("r").every("5m", singleton=False)
            def sweep() -> None: ...

        with pytest.raises(DeclarationError, match="timer 'sweep': annotate other with the type"):

            @Router("r").every("5m", name="sweep", singleton=False)
            async def two(one: Tick, other) -> None: ...  # type: ignore[no-untyped-def]

    def test_that_says_neither_true_nor_false_is_refused(self) -> None:
        with pytest.raises(DeclarationError, match="timer 'tick': singleton= must be True or False, found 'no'"):
            Router("r").every("5m", singleton="no")(self.tick)  # type: ignore[arg-type]

    def test_with_the_old_word_is_told_the_new_one(self) -> None:
        with pytest.raises(DeclarationError, match="every: leader= is gone: say singleton=True or False"):
            Router("r").every("5m", leader=True)(self.tick)  # type: ignore[call-arg]

    def test_of_a_name_that_is_taken_is_refused(self) -> None:
        router = Router("r")
        router.every("5m", singleton=False)(self.tick)
        with pytest.raises(DeclarationError, match="timer 'tick' is declared twice"):
            router.cron("0 6 * * *", singleton=False)(self.tick)
