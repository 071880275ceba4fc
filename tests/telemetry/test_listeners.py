"""What is asked for beside an app's agents, in virtual time, and what makes it ready."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from aviso_workers.clocks import VirtualClock
from aviso_workers.events import (
    AgentDisturbed,
    AgentStarted,
    ConnectionChanged,
    LeadershipHindered,
    LeadershipUnhindered,
    NotReadAgain,
    ReadAgain,
)
from aviso_workers.state import own_streams
from aviso_workers.telemetry import listeners
from aviso_workers.telemetry.listeners import MissedLog, Readiness
from aviso_workers.telemetry.logs import log
from aviso_workers.telemetry.metrics import Missed

RETRIES = own_streams.of_app(own_streams.RETRIES, "fields")

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("agents", "asked"), [(1, 60), (10, 600), (500, 4800)])
async def test_the_lag_of_all_agents_is_asked_for_in_turn_and_not_too_often(agents: int, asked: int) -> None:
    clock = VirtualClock()
    found: list[Any] = []

    async def consumer_info(agent: Any) -> Any:
        found.append(agent.name)
        return None

    known: Any = [SimpleNamespace(name=f"agent-{number}") for number in range(agents)]
    session: Any = SimpleNamespace(consumer_info=consumer_info, backend=SimpleNamespace(clock=clock))
    metrics: Any = SimpleNamespace(lag=lambda agent, info: None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listeners._measure_lag, known, session, metrics, MissedLog((), clock))
        await clock.advance(119.999)
        tasks.cancel_scope.cancel()

    assert len(found) == pytest.approx(asked, abs=1)
    assert set(found) == {agent.name for agent in known}


async def test_missed_notifications_are_logged_at_most_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[tuple[str, str, int, str]] = []

    def warning(event: str, *, agent: str, missed: int, among_sequences: str, cure: str) -> None:
        lines.append((event, agent, missed, among_sequences))

    monkeypatch.setattr(log, "warning", warning)
    clock = VirtualClock()
    missed = MissedLog({"newest"}, clock)

    missed.observe("index", None)
    missed.observe("newest", Missed(count=100, first=1, last=100))
    assert lines == []
    missed.observe("index", Missed(count=100, first=1, last=200))
    missed.observe("index", Missed(count=2, first=203, last=205))
    assert lines == [("notifications.missed", "index", 100, "1 to 200")]
    missed.observe("index", Missed(count=1, first=210, last=210))
    await clock.advance(60)
    missed.observe("index", None)
    missed.observe("index", None)
    assert lines[1:] == [("notifications.missed", "index", 3, "203 to 210")]


def unready(readiness: Readiness) -> list[str]:
    """Return why it is not ready. Since when is said of each reason, and left out here."""
    said = [line.partition(" (since 20") for line in readiness.health.unready]
    assert all(since.endswith("Z)") for _, _, since in said)
    return [reason for reason, _, _ in said]


def test_a_reason_that_is_said_with_other_words_keeps_its_time() -> None:
    readiness = Readiness([])
    (first,) = readiness.health.unready
    readiness.observe(ConnectionChanged(connected=False, reason="refused"))
    (then,) = readiness.health.unready
    assert then == first.replace("not connected yet", "not connected: refused")


def test_what_keeps_a_worker_from_its_work_makes_it_unready_until_it_is_over() -> None:
    readiness = Readiness([])
    readiness.observe(ConnectionChanged(connected=True, reason=""))
    assert unready(readiness) == []
    readiness.observe(NotReadAgain(agent="index", stream="MARS", sequence=7, error=ValueError("denied")))
    readiness.observe(LeadershipHindered(bucket="fields__leases", error=ValueError("denied")))
    assert unready(readiness) == [
        "cannot lead, for lack of bucket fields__leases: denied",
        "agent index: sequence 7, which waits, cannot be read again: denied",
    ]
    readiness.observe(ReadAgain(agent="index", stream="MARS"))
    readiness.observe(LeadershipUnhindered(bucket="fields__leases"))
    assert unready(readiness) == []


def test_a_worker_is_ready_when_its_agents_read_their_own_streams() -> None:
    agents: Any = [SimpleNamespace(name="index")]
    readiness = Readiness(agents)
    readiness.observe(ConnectionChanged(connected=True, reason=""))
    readiness.observe(AgentStarted(agent="index", stream=RETRIES, consumer="fields__index"))
    assert unready(readiness) == ["agent index: has not started"]
    denied = ValueError("denied")
    readiness.observe(AgentDisturbed(agent="index", stream="MARS", error=denied, again_in_seconds=0.1))
    assert unready(readiness) == ["agent index: denied"]
    readiness.observe(AgentStarted(agent="index", stream="MARS", consumer="fields__index"))
    assert unready(readiness) == []
