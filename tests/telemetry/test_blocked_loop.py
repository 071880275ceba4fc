"""A blocked event loop is told of, with the agent that blocks it."""

from __future__ import annotations

import inspect
import time
from typing import Any

import pytest
import structlog

from aviso_workers import App, Notification
from aviso_workers.telemetry import listeners
from aviso_workers.telemetry.status import Health

pytestmark = pytest.mark.anyio

app = App("blocking")


@app.agent("mars")
async def block(notification: Notification[Any]) -> None:
    _block()


def _block() -> None:
    time.sleep(0.5)  # it is what the test is about


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "BLOCKED_SECONDS", 0.1)
    monkeypatch.setattr(listeners, "LOOK_SECONDS", 0.02)


async def logged_of(call: Any) -> list[dict[str, Any]]:
    """What is logged of a loop in which this is called."""
    health = Health()
    with structlog.testing.capture_logs() as logged, listeners.loop_watched(health, app.agents):
        health.turned(next_in_seconds=0)
        await call()
        health.turned(next_in_seconds=60)
    return [dict(line) for line in logged if line["event"] == "loop.blocked"]


async def test_an_agent_that_blocks_is_named_once_with_its_line() -> None:
    (told,) = await logged_of(lambda: block(Notification(event_type="mars", identifier={}, payload=None)))
    _, first = inspect.getsourcelines(inspect.unwrap(block.function))
    assert (told["agent"], told["line"]) == ("block", f"{__file__}:{first + 2}")
    assert told["seconds"] >= 0.1


async def test_what_is_no_agents_is_told_with_the_line_that_runs() -> None:
    async def other() -> None:
        _block()

    (told,) = await logged_of(other)
    assert ("agent" in told, told["line"].partition(":")[0]) == (False, __file__)
