"""Who listens, to what, and what a listener that fails does to the others: nothing."""

from __future__ import annotations

import pytest

from aviso_workers.events import ConnectionChanged, Event, Events, Published

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
