"""Ids and dates as an aviso-server reads them."""

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aviso_workers.aviso.positions import Position, parse_date, parse_id, parse_moment, position
from aviso_workers.errors import InvalidPositionError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2025-06-09T13:15:00+02:00", datetime(2025, 6, 9, 11, 15, tzinfo=UTC)),
        ("2025-06-09T13:15:00Z", datetime(2025, 6, 9, 13, 15, tzinfo=UTC)),
        ("2025-06-09 13:15:00+00:00", datetime(2025, 6, 9, 13, 15, tzinfo=UTC)),
        ("2025-06-09 13:15:00", datetime(2025, 6, 9, 13, 15, tzinfo=UTC)),
        (" 2025-06-09T13:15:00 ", datetime(2025, 6, 9, 13, 15, tzinfo=UTC)),
        ("2025-06-09 13:15:00.123", datetime(2025, 6, 9, 13, 15, 0, 123000, tzinfo=UTC)),
        ("2025-06-09T13:15:00.123456789Z", datetime(2025, 6, 9, 13, 15, 0, 123456, tzinfo=UTC)),
        ("1740509903", datetime(2025, 2, 25, 18, 58, 23, tzinfo=UTC)),
        ("+1740509903", datetime(2025, 2, 25, 18, 58, 23, tzinfo=UTC)),
        ("1740509903710", datetime(2025, 2, 25, 18, 58, 23, 710000, tzinfo=UTC)),
        ("09000000000", datetime(2255, 3, 14, 16, 0, tzinfo=UTC)),
        ("10000000000", datetime(2262, 1, 1, tzinfo=UTC)),
        ("9999-12-31T23:59:59Z", datetime(2262, 1, 1, tzinfo=UTC)),
        ("1600-01-01T00:00:00Z", datetime(1678, 1, 1, tzinfo=UTC)),
        ("0001-01-01T00:00:00Z", datetime(1678, 1, 1, tzinfo=UTC)),
        (1740509903, datetime(2025, 2, 25, 18, 58, 23, tzinfo=UTC)),
        (datetime(1093, 1, 1, tzinfo=UTC), datetime(1678, 1, 1, tzinfo=UTC)),
        ("1000000000000", datetime(2001, 9, 9, 1, 46, 40, tzinfo=UTC)),
        ("946684800000", datetime(2000, 1, 1, tzinfo=UTC)),
        ("00000000001740509903", datetime(2025, 2, 25, 18, 58, 23, tzinfo=UTC)),
    ],
)
def test_a_date_is_read_in_every_documented_form(text: datetime | int | str, expected: datetime) -> None:
    assert parse_date(text) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("-1", "negative unix timestamps are not supported"),
        ("2026-02-25", "must be a date with a time"),
        ("not-a-date", "must be a date with a time"),
        ("  ", "must be a date with a time"),
        ("2026-02-30T00:00:00Z", "no such time"),
        ("9" * 30, "no such time"),
        (1.5, "must be a datetime, a text, or whole seconds since 1970, found 1.5"),
        (True, "must be a datetime, a text, or whole seconds since 1970, found True"),
    ],
)
def test_a_date_that_is_none_is_refused(text: Any, complaint: str) -> None:
    with pytest.raises(InvalidPositionError, match=complaint):
        parse_date(text)


NOW = datetime(2026, 11, 28, 22, 57, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("today", datetime(2026, 11, 28, tzinfo=UTC)),
        (" Yesterday ", datetime(2026, 11, 27, tzinfo=UTC)),
        ("2026-11-20", datetime(2026, 11, 20, tzinfo=UTC)),
        ("2026-11-20T06:00Z", datetime(2026, 11, 20, 6, tzinfo=UTC)),
        ("2026-11-20 06:00", datetime(2026, 11, 20, 6, tzinfo=UTC)),
        ("2026-11-20t06:00+02:00", datetime(2026, 11, 20, 4, tzinfo=UTC)),
        ("1h", NOW - timedelta(hours=1)),
        ("2D", NOW - timedelta(days=2)),
        ("9223372036s", NOW - timedelta(seconds=9223372036)),
        ("2026-11-20T06:00:00Z", datetime(2026, 11, 20, 6, tzinfo=UTC)),
        ("1740509903", datetime(2025, 2, 25, 18, 58, 23, tzinfo=UTC)),
    ],
)
def test_a_time_is_read_as_people_type_it(text: str, expected: datetime) -> None:
    assert parse_moment(text, name="since", now=NOW) == expected


@pytest.mark.parametrize("text", ["", "noon", "2026-02-30", "2026-11-20Z", "2026-11-20T25:00", "2h ago", "-2h"])
def test_a_time_that_nobody_means_is_refused(text: str) -> None:
    with pytest.raises(InvalidPositionError, match=f"since must be a day such as .*found {text!r}"):
        parse_moment(text, name="since", now=NOW)


@pytest.mark.parametrize(("text", "expected"), [("0", 0), ("+7", 7), ("0042", 42), (str(2**64 - 1), 2**64 - 1), (5, 5)])
def test_an_id_is_a_sequence(text: int | str, expected: int) -> None:
    assert parse_id(text) == expected


@pytest.mark.parametrize("text", ["", " 1", "-1", "1.0", "abc", "१", str(2**64), "9" * 6000])
def test_an_id_that_is_no_sequence_is_refused(text: str) -> None:
    with pytest.raises(InvalidPositionError, match="from_id"):
        parse_id(text)


def test_both_an_id_and_a_date_are_refused() -> None:
    with pytest.raises(InvalidPositionError, match="cannot specify both from_id and from_date"):
        position("1", "2026-11-20T06:00:00Z")


def test_neither_is_no_position() -> None:
    assert position(None, None) == Position()


@given(st.text())
def test_no_text_raises_anything_but_our_error(text: str) -> None:
    for parse in (parse_id, parse_date, lambda text: parse_moment(text, name="since", now=NOW)):
        with suppress(InvalidPositionError):
            parse(text)
