"""Who listens, to what, and what a listener that fails does to the others: nothing."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from aviso_workers.errors import UnavailableError
from aviso_workers.events import (
    ConnectionChanged,
    Event,
    Events,
    Published,
    Skipped,
    StartNotReached,
    StreamGone,
    StreamMadeAgain,
    StreamNotRead,
    StreamProvisioned,
    all_kinds,
    unheard,
)
from aviso_workers.sessions import worker_recorder
from aviso_workers.telemetry import logs, metrics

UP = ConnectionChanged(connected=True, reason="")
STORED = Published(event_type="mars", outcome="stored", attempts=1)


def test_listeners_hear_all_facts_or_those_of_the_kinds_that_they_named() -> None:
    events = Events()
    everything: list[Event] = []
    changes: list[Event] = []
    events.listen(everything.append)
    events.listen(changes.append, ConnectionChanged)

    events.emit(UP)
    events.emit(STORED)

    assert (everything, changes) == ([UP, STORED], [UP])


def test_each_class_of_facts_says_how_it_is_logged() -> None:
    """`logged`, `only_counted`, `unheard` or a method: a class that says nothing is one that somebody has forgotten."""
    assert [kind.__name__ for kind in all_kinds() if "lines" not in vars(kind)] == []


def test_each_class_of_facts_is_listened_to_by_a_worker_unless_it_says_that_it_is_not() -> None:
    heard = {*logs.OBSERVED, *logs.COUNTED, *metrics.OBSERVED, *worker_recorder.OBSERVED}
    unheard_ones = {kind for kind in all_kinds() if kind.lines is unheard}
    assert {*all_kinds()} - heard == unheard_ones


@pytest.mark.parametrize("kind", all_kinds())
def test_what_a_class_of_facts_says_of_its_fields_is_true(kind: type[Event]) -> None:
    """A class names the fields that are logged in texts, which mypy does not read."""
    hints = get_type_hints(kind)
    fact = kind(**{name: example(hints[name]) for name in kind.__struct_fields__})

    for line in fact.lines():
        assert line.event.count(".") == 1
    fact.hindrance()
    fact.warning()
    assert {*(kind.many.alike if kind.many else ())} <= {*kind.__struct_fields__}


def example(hint: Any) -> Any:
    """A value of the type of a field."""
    if get_origin(hint) in (Union, types.UnionType):
        return example(get_args(hint)[0])
    match get_origin(hint) or hint:
        case builtin if builtin in (str, int, float, bool, tuple):
            return builtin()
        case error if error in (Exception, BaseException):
            return error("boom")
        case origin if origin is Literal:
            return get_args(hint)[0]
        case origin if origin is Sequence:
            return []
        case origin if origin is Mapping:
            return {}
        case origin if origin is datetime:
            return datetime(2026, 11, 27, tzinfo=UTC)
    return None


def test_who_listens_for_a_while_hears_nothing_afterwards() -> None:
    events = Events()
    meanwhile: list[Event] = []
    always: list[Event] = []
    events.listen(always.append)

    with events.heard_by(meanwhile.append, ConnectionChanged), events.heard_by(meanwhile.append, Published):
        events.emit(UP)
        events.emit(STORED)
    events.emit(UP)
    events.emit(STORED)

    assert (meanwhile, always) == ([UP, STORED], [UP, STORED, UP, STORED])


def test_a_listener_that_fails_is_logged_and_the_others_hear_it(caplog: pytest.LogCaptureFixture) -> None:
    events = Events()
    heard: list[Event] = []

    def fail(event: Event) -> None:
        raise ValueError("broken gauge")

    events.listen(fail)
    events.listen(heard.append)

    events.emit(UP)

    assert heard == [UP]
    assert "broken gauge" in caplog.text


def test_a_warning_that_nobody_listens_to_is_logged_and_nothing_else_is(caplog: pytest.LogCaptureFixture) -> None:
    events = Events()
    kept = StreamProvisioned(stream="MARS", action="kept", differences=("max_msgs: 5 -> 1",), refused="not allowed")
    skipped = Skipped(event_type="mars", sequence=7, error=ValueError("no \x1b[2J JSON"))

    gone = StreamGone(stream="MARS")
    not_reached = StartNotReached(stream="MARS", sequence=43, last_sequence=7)
    made_again = StreamMadeAgain(stream="MARS", next_sequence=43, last_sequence=7)

    lost = ConnectionChanged(connected=False, reason="EOF", opened=True)
    again = ConnectionChanged(connected=True, reason="", opened=True)
    never = ConnectionChanged(connected=False, reason="refused")

    for event in (
        UP,
        STORED,
        lost,
        again,
        never,
        kept,
        skipped,
        gone,
        not_reached,
        made_again,
        StreamNotRead(stream="MARS", error=UnavailableError("no answer")),
        StreamProvisioned(stream="MARS", action="created"),
    ):
        events.emit(event)

    assert [record.getMessage() for record in caplog.records] == [
        "the connection was lost, and is tried again: EOF",
        "connected again",
        "there is no connection yet, and it is tried again: refused",
        "stream MARS is used as it is (max_msgs: 5 -> 1): not allowed",
        "mars@7 is left out: no \\x1b[2J JSON",
        "there is no stream MARS: waiting for it to be created",
        "there is no 43 to begin at: MARS ends at 7; either it was deleted and recreated, or the id is wrong; "
        "beginning at its first message",
        "stream MARS was deleted and recreated, or set back: its last sequence is 7, and 43 was to be read next; "
        "going on at its first message",
        "stream MARS cannot be read for the moment, and is asked again: no answer",
    ]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_a_warning_that_somebody_listens_to_is_theirs(caplog: pytest.LogCaptureFixture) -> None:
    events = Events()
    heard: list[Event] = []
    events.listen(heard.append, Skipped)

    events.emit(Skipped(event_type="mars", sequence=7, error=ValueError("no JSON")))

    assert (len(heard), caplog.records) == (1, [])
