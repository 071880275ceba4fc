"""The causes of dead letters, and what their notifications have in common."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from msgspec import structs

from aviso_workers.aviso.codec import Message
from aviso_workers.config import load
from aviso_workers.console import dead_letters
from aviso_workers.console.dead_letters import Cause, Causes, Values
from aviso_workers.ops.dead_letters import Selection
from aviso_workers.state.dead_letter_records import DeadLetter
from tests.contract.settings import app_config


def dead_letter(
    subject: str = "mars.od.0001.g.20261120.0000.oper.3", *, error: str = "", at: str = "", minute: int = 0
) -> DeadLetter:
    original = Message(subject=subject, data=b"", sequence=1)
    return DeadLetter(
        sequence=1,
        time=datetime(2026, 11, 20, tzinfo=UTC) + timedelta(minutes=minute),
        app="field",
        agent="index",
        reason="rejected",
        error=error,
        traceback=f"calls.py:1 call > {at} index" if at else "",
        attempts=1,
        stream="MARS",
        original=original,
        stored=original,
    )


def collected(*dead_letters: DeadLetter) -> list[Cause]:
    found = Causes(load(app_config("jetstream", "")))
    for each in dead_letters:
        found.add(each)
    return found.largest_first()


@pytest.mark.parametrize(
    ("values", "text", "many"),
    [
        (["od", "od"], "od", "1 values"),
        (["240", "6", "12"], "6 to 240", "3 values"),
        (["0012", "0007"], "0007 to 0012", "2 values"),
        (["od", "rd"], "od, rd", "2 values"),
        (["a", "b", "c", "d", "1"], "5 values", "5 values"),
        (["\u0661", "2"], "2, \u0661", "2 values"),
        (["9" * 5000, "2"], f"2, {'9' * 5000}", "2 values"),
    ],
)
def test_values_are_told_as_one_a_range_or_how_many(values: list[str], text: str, many: str) -> None:
    found = Values()
    for value in values:
        found.add(value)
    assert (found.text, found.many) == (text, many)


def test_so_many_values_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "MOST_VALUES", 2)
    found = Values()
    for value in ("1", "2", "2", "3"):
        found.add(value)
    assert (found.text, found.single, found.count) == ("more than 2 values", "", 4)


def test_those_of_one_cause_say_what_they_have_in_common() -> None:
    (cause,) = collected(
        dead_letter("mars.od.0001.g.20261120.0000.oper.3", error="Reject: an empty field"),
        dead_letter("mars.od.0001.g.20261120.0000.oper.12", error="Reject: another"),
        dead_letter("mars.too.short", error="Reject: an empty field"),
        dead_letter("foreign.%ff", error="Reject: an empty field"),
    )
    assert cause.common == "class=od expver=0001 domain=g date=20261120 time=0000 stream=oper, step 3 to 12"
    assert (cause.group.count, cause.identifier["class"].count, cause.differs) == (4, 2, True)


def test_a_reason_that_nobody_of_us_has_written_is_told_as_it_is() -> None:
    (cause,) = collected(structs.replace(dead_letter(), reason="<b>{0}{x:>3000000}</b>"))
    assert cause.told("it") == "gave up it (<b>{0}{x:>3000000}</b>)"


def test_bars_show_when_there_were_how_many() -> None:
    (cause,) = collected(*[dead_letter(minute=minute) for minute in (0, 1, 43, 43, 43, 43)])
    assert cause.bars == [0.5, *[0.0] * (dead_letters.BARS - 2), 1.0]
    (short,) = collected(dead_letter(), dead_letter(minute=dead_letters.BARS - 1))
    assert short.bars == [], "in so short a time they would show nothing"


def test_a_cause_without_a_line_is_selected_without_those_that_have_one() -> None:
    with_a_line, without = dead_letter(error="Reject: x", at="agents.py:76"), dead_letter(error="Reject: x")
    of_each = collected(with_a_line, without)
    assert [each.told("them") for each in of_each] == ["rejected them at agents.py:76", "rejected them"]
    selections = [msgspec.convert(each.filters, Selection) for each in of_each]
    assert [[each.takes(one) for one in (with_a_line, without)] for each in selections] == [
        [True, False],
        [False, True],
    ]
