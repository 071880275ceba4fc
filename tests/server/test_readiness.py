"""How long a server that starts is waited for."""

from __future__ import annotations

from itertools import count

import pytest

from aviso_workers import server


class Clock:
    """Time that passes while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(server, "time", clock)
    return clock


def test_a_server_that_works_is_waited_for_however_long_it_takes(clock: Clock) -> None:
    steps = count()
    told: list[str] = []
    assert server.wait_while_it_works(lambda: clock.now > 3600, progress=lambda: next(steps), tell=told.append)
    assert told[:3] == ["5 s", "10 s", "16 s"]
    assert len(told) > 600


def test_a_server_that_does_nothing_is_given_up(clock: Clock) -> None:
    assert not server.wait_while_it_works(lambda: False, progress=lambda: min(clock.now, 60), tell=lambda _: None)
    assert 60 + server.STANDSTILL_SECONDS <= clock.now < 62 + server.STANDSTILL_SECONDS
