"""Schedules and pages without a Spark."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from html.parser import HTMLParser
from typing import Any

import pytest

from aviso_workers.aviso.schema import DateHandler, EventType, IntHandler, StringHandler, TimeHandler
from aviso_workers.errors import PipelineError
from aviso_workers.spark import pages, schedules

EVENT = EventType(
    identifier={
        "class": StringHandler(required=True),
        "day": DateHandler(required=True),
        "time": TimeHandler(required=True),
        "step": IntHandler(required=True, range=(0, 240)),
    }
)
TEXT = """
cycles:
  - name: oper
    times: ["00", "12:00"]
    identifier: {class: [od, rd], step: {from: 0, to: 12, by: 6}}
    due: 6h
"""
START = datetime(2026, 11, 20, tzinfo=UTC)


def expand(text: str) -> list[schedules.Expected]:
    return list(schedules.expand(schedules.parse(text), EVENT, first=date(2026, 11, 20), last=date(2026, 11, 21)))


class TestSchedules:
    def test_each_value_is_combined_with_each(self) -> None:
        expected = expand(TEXT)

        assert len(expected) == 2 * 2 * 2 * 3
        assert expected[0] == schedules.Expected(
            cycle="oper/2026-11-20/0000",
            start=START,
            due=START + timedelta(hours=6),
            identifier={"day": "2026-11-20", "time": "0000", "class": "od", "step": "0"},
        )
        assert expected[-1].cycle == "oper/2026-11-21/1200"
        assert expected[-1].identifier == {"day": "2026-11-21", "time": "1200", "class": "rd", "step": "12"}

    @pytest.mark.parametrize(
        ("old", "new", "said"),
        [
            ('["00", "12:00"]', "[0600]", r"Expected `str`, got `int`.*times are text, in quotes"),
            ('["00", "12:00"]', '["25"]', "cycle 'oper' of the schedule: time must be a time such as"),
            ("6h", "soon", "cycle 'oper' of the schedule: due: "),
            ("step:", "stepp:", "the schedule speaks of 'stepp'; there are: class, day, time, step"),
            ("to: 12", "to: 246", "step must be within"),
            ("due:", "until:", "missing required field `due`|unknown field `until`"),
            ("cycles:", "cycles: [", "the schedule cannot be read"),
            ("class: [od, rd]", "class: 2026-02-30", "the schedule cannot be read: day is out of range"),
            ("6h", "9999999w", "cycle .oper. of the schedule: due: "),
        ],
    )
    def test_a_mistake_is_named(self, old: str, new: str, said: str) -> None:
        with pytest.raises(PipelineError, match=said):
            expand(TEXT.replace(old, new))

    def test_every_cycle_speaks_of_the_same_fields(self) -> None:
        other = TEXT + TEXT.replace("cycles:", "").replace("class: [od, rd], ", "").replace("oper", "wave")

        with pytest.raises(PipelineError, match="cycle 'wave' of the schedule says nothing of 'class'"):
            expand(other)


class TestTables:
    TEXT = "cycle,due,class,day,step\na,2026-11-20T12:00:00Z,od,20261120,06\n"

    def parse(self, text: str) -> list[schedules.Expected]:
        return list(schedules.parse_table(text, EVENT))

    def test_values_are_spelled_as_in_notifications(self) -> None:
        due = START + timedelta(hours=12)

        assert self.parse(self.TEXT) == [
            schedules.Expected(
                cycle="a", start=due, due=due, identifier={"class": "od", "day": "2026-11-20", "step": "6"}
            )
        ]

    @pytest.mark.parametrize(
        ("old", "new", "said"),
        [
            (",06", ",notanumber", "line 2: step must be a whole number of 64 bits, not 'notanumber'"),
            (",06", ",250", "line 2: step must be within"),
            (",06", "", "line 2 has another number of values than there are columns"),
            (",06", ",06,7", "line 2 has another number of values than there are columns"),
            (",06", ',"06', "line 2: unexpected end of data"),
            ("2026-11-20T12:00:00Z", "noon", "line 2: due must be a date with a time, such as .*, not 'noon'"),
            ("due,", "until,", "the schedule has no column 'due'"),
            ("step", "stepp", "the schedule has the column 'stepp', which is not an identifier field"),
            (TEXT, "", "the schedule has no column 'cycle'"),
        ],
    )
    def test_a_mistake_is_named_with_its_line_and_column(self, old: str, new: str, said: str) -> None:
        with pytest.raises(PipelineError, match=said):
            self.parse(self.TEXT.replace(old, new))


def cycle(name: str, **changes: Any) -> dict[str, Any]:
    numbers = {"expected": 10, "arrived": 10, "in_time": 10, "missing": 0}
    times = {"start": START, "due": START + timedelta(hours=6), "last_arrival": START + timedelta(hours=5)}
    judged = {"latency_seconds": [60.0, 120.0, 18000.0], "cycle_complete": True, "cycle_late": False}
    return {"cycle": name, **numbers, **times, **judged, **changes}


def content(**changes: Any) -> pages.Content:
    given = {"cycles": [], "hours": [], "absent": [], "latency": [], **changes}
    return pages.Content(event="mars", made=START, **given)


class Balanced(HTMLParser):
    """Raises where a tag is closed that is not open."""

    VOID = ("meta", "rect", "line", "circle")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in self.VOID or (tag == "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


class TestPage:
    def test_it_needs_nothing_from_elsewhere_and_is_well_formed(self) -> None:
        hours = [{"hour": START, "notifications": 4}, {"hour": START + timedelta(hours=5), "notifications": 1}]
        absent = [{"cycle": "b", "step": 6, "start": START, "due": START, "arrival": None, "latency_seconds": None}]
        late = cycle("b", arrived=3, in_time=2, missing=7, cycle_complete=False, cycle_late=True)
        page = pages.page(content(cycles=[cycle("a"), late], hours=hours, absent=absent, latency=[1, 2, 3]))

        parser = Balanced()
        parser.feed(page)
        assert parser.open == []
        assert not re.search(r"https?://|src=|url\(|<script|<link", page)

    def test_names_are_only_text(self) -> None:
        page = pages.page(content(cycles=[cycle("<script>alert(1)</script>")]))

        assert "<script" not in page
        assert "&lt;script&gt;" in page

    def test_there_may_be_nothing_to_show(self) -> None:
        page = pages.page(content(cycles=[cycle("a", arrived=0, in_time=0, latency_seconds=None)]))

        assert "Nothing came yet." in page
        assert "Nothing that is due is missing." in page

    @pytest.mark.parametrize(
        ("seconds", "text"),
        [
            (0, "0 s"),
            (0.25, "0.2 s"),
            (-90, "−1 min 30 s"),
            (3600, "1 h"),
            (7500, "2 h 05 min"),
            (3 * 86400, "3 d"),
        ],
    )
    def test_times_are_short(self, seconds: float, text: str) -> None:
        assert pages.span(seconds) == text
