"""What is asked for beside an app's agents, in virtual time, and what makes it ready."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from aviso_workers.clocks import VirtualClock
from aviso_workers.events import (
    ConnectionChanged,
    LeadershipHindered,
    LeadershipUnhindered,
    NotReadAgain,
    ReadAgain,
)
from aviso_workers.telemetry import listeners
from aviso_workers.telemetry.readiness import Readiness

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
        tasks.start_soon(listeners._measure_lag, known, session, metrics)
        await clock.advance(119.999)
        tasks.cancel_scope.cancel()

    assert len(found) == pytest.approx(asked, abs=1)
    assert set(found) == {agent.name for agent in known}


def test_what_keeps_a_worker_from_its_work_makes_it_unready_until_it_is_over() -> None:
    readiness = Readiness([])
    readiness.observe(ConnectionChanged(connected=True, reason=""))
    assert readiness.health.unready == []
    readiness.observe(NotReadAgain(agent="index", stream="MARS", sequence=7, error=ValueError("denied")))
    readiness.observe(LeadershipHindered(bucket="fields_leases", error=ValueError("denied")))
    assert readiness.health.unready == [
        "cannot lead, for lack of bucket fields_leases: denied",
        "agent index: sequence 7, which waits, cannot be read again: denied",
    ]
    readiness.observe(ReadAgain(agent="index", stream="MARS"))
    readiness.observe(LeadershipUnhindered(bucket="fields_leases"))
    assert readiness.health.unready == []
