"""Where an agent begins that has never run, and what is said when that is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from aviso_workers import App, Notification, Notify
from aviso_workers.aviso.positions import Position
from aviso_workers.events import AgentStarted, ConsumerDiffers
from aviso_workers.ops import agent_control
from tests.contract.settings import app_config, mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


@pytest.fixture
async def app(kind: str, nats_url: str) -> Any:
    async with App("contract", config=app_config(kind, nats_url)) as app:
        yield app


@pytest.fixture
def differences(app: App) -> list[str]:
    found: list[str] = []
    app.events.listen(lambda fact: found.extend(fact.differences), ConsumerDiffers)
    return found


@pytest.fixture
def run(app: App) -> Callable[..., Any]:
    """`await run("new")`: the steps that an agent of this start sees, with 99 published when it reads."""
    reading: list[anyio.Event] = []
    app.events.listen(lambda fact: reading[-1].set() if fact.stream == "MARS" else None, AgentStarted)

    async def run(start: Any) -> list[int]:
        seen: list[int] = []
        stop = anyio.Event()
        reading.append(anyio.Event())
        app.agents.clear()

        @app.agent("mars", start=start)
        async def index(notification: Notification[Any]) -> None:
            seen.append(int(notification.identifier["step"]))
            if seen[-1] == 99:
                stop.set()

        async def publish() -> None:
            await reading[-1].wait()
            await app.notify("mars", mars(step=99), {})

        with anyio.fail_after(PATIENCE_SECONDS):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(publish)
                await app._work(stop)
        return seen

    return run


@pytest.fixture
async def stored(app: App) -> list[Notification[Any]]:
    """Steps 0 to 4, the last two a little later."""
    await app.notify_many(Notify("mars", mars(step=step), {}) for step in range(3))
    await anyio.sleep(0.05)
    await app.notify_many(Notify("mars", mars(step=step), {}) for step in (3, 4))
    return [notification async for notification in app.replay("mars")]


@pytest.mark.parametrize(
    ("start", "seen"), [("all", [0, 1, 2, 3, 4, 99]), ("new", [99]), (4, [3, 4, 99]), ("0", [0, 1, 2, 3, 4, 99])]
)
async def test_an_agent_begins_where_it_says(run: Any, stored: Any, start: object, seen: list[int]) -> None:
    assert await run(start) == seen


async def test_an_agent_begins_at_a_time(run: Any, stored: list[Notification[Any]]) -> None:
    assert await run(stored[3].time) == [3, 4, 99]


async def test_an_agent_that_has_run_goes_on_where_it_is_and_says_so(
    run: Any, stored: Any, differences: list[str]
) -> None:
    await run("new")
    assert await run("all") == [99]
    assert differences == ["start: new -> all"]


async def test_a_reset_takes_it_there_and_ends_the_matter(
    app: App, run: Any, stored: Any, differences: list[str]
) -> None:
    await run("new")
    index = agent_control.declared(app, app.config, "index")
    await agent_control.reset(
        app.session.admin, await agent_control.plan_reset(app.session.admin, index, Position(sequence=4))
    )
    assert await run("all") == [3, 4, 99]
    assert differences == []
    await run("new")
    assert differences == ["start: all -> new"]


async def test_where_a_new_agent_begins_is_known_when_its_consumer_is_created(app: App, run: Any, stored: Any) -> None:
    """And not when a cluster has elected the consumer's leader: what is published until then is the agent's."""
    await run("new")
    config = (await app.session.admin.consumer_info("MARS", "contract__index")).config
    assert (config["deliver_policy"], config["opt_start_seq"]) == ("by_start_sequence", 6)
