"""What a worker process asks for beside its agents' work, in virtual time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from aviso_workers import serve
from aviso_workers.clocks import VirtualClock

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("agents", "asked"), [(1, 60), (10, 600), (500, 4800)])
async def test_the_lag_of_all_agents_is_asked_for_in_turn_and_not_too_often(agents: int, asked: int) -> None:
    clock = VirtualClock()
    found: list[Any] = []

    async def consumer_info(agent: Any) -> Any:
        found.append(agent.name)
        return None

    app: Any = SimpleNamespace(
        agents=[SimpleNamespace(name=f"agent-{number}") for number in range(agents)],
        session=SimpleNamespace(consumer_info=consumer_info, backend=SimpleNamespace(clock=clock)),
    )
    metrics: Any = SimpleNamespace(lag=lambda agent, info: None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve._measure_lag, app, metrics)
        await clock.advance(119.999)
        tasks.cancel_scope.cancel()

    assert len(found) == pytest.approx(asked, abs=1)
    assert set(found) == {agent.name for agent in app.agents}
