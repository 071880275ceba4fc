"""Who listens, to what, and what a listener that fails does to the others: nothing."""

from __future__ import annotations

from typing import get_args

import pytest
from msgspec import Struct

from aviso_workers import events
from aviso_workers.errors import UnavailableError
from aviso_workers.events import (
    ConnectionChanged,
    Event,
    Events,
    Passed,
    Published,
    Settled,
    Skipped,
    StartNotReached,
    StreamGone,
    StreamMadeAgain,
    StreamNotRead,
    StreamProvisioned,
)
from aviso_workers.jetstream.identities import Identity
from aviso_workers.telemetry import logs, metrics, readiness

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


def test_each_class_of_facts_can_be_stated_and_is_listened_to() -> None:
    """mypy says which listener of the package does not handle one. Of `Settled`, a worker needs what is `Failed`."""
    defined = {each for each in vars(events).values() if isinstance(each, type) and issubclass(each, Struct)}
    stated = {*get_args(Event)}
    listened = {*logs.OBSERVED, *metrics.OBSERVED, *readiness.OBSERVED}
    assert (stated, listened) == (defined - {Struct, Identity, Passed}, stated - {Settled})


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
