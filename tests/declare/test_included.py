"""What a router declares after an app has included it, and one function that is declared as several agents."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from aviso_workers import Ack, App, Notification, RetryPolicy, Router
from aviso_workers.errors import DeclarationError
from aviso_workers.testing import harness

pytestmark = pytest.mark.anyio

TWICE = RetryPolicy(attempts=2, first=0.1, jitter=0)


class Database:
    """What agents work with."""


@pytest.fixture
def app() -> App:
    app = App("late")
    for name in ("job", "other"):
        app.event_type(name, key=["id"])
    return app


@pytest.mark.parametrize("prefix", ["", "theirs"])
async def test_what_a_router_declares_after_its_inclusion_counts(app: App, prefix: str) -> None:
    router = Router("r")
    app.include(router, prefix=prefix)
    handled: list[object] = []

    @router.resource
    async def database() -> AsyncIterator[Database]:
        yield Database()

    router.event_type("later", key=["id"])
    counts = router.table("counts", int, default=0)
    volume = router.counter("volume")

    @router.agent("later", retry=TWICE)
    async def index(notification: Notification[Any], database: Database) -> None:
        await counts.update("all", lambda count: count + 1)
        await volume.add("all")
        handled.append(type(database))
        raise FileExistsError

    @index.on_error(FileExistsError)
    def done(error: FileExistsError) -> Ack:
        return Ack()

    @router.every("1s", singleton=False)
    async def look() -> None:
        handled.append("tick")

    @router.task
    async def run() -> None:
        handled.append("task")

    assert (app.mistakes(), app._nothing_to_run()) == ([], "")
    async with harness(app) as t:
        await t.notify("later", {"id": 1})
        await t.settle()
        await t.advance(1)
        assert t.outcomes(index) == ["acked"]
        assert (await counts.get("all"), await volume.get("all")) == (1, 1)
    assert sorted(map(str, handled)) == sorted(map(str, ["task", Database, "tick"]))


def test_a_router_in_a_router_that_is_included_counts_as_well(app: App) -> None:
    inner, outer = Router("inner"), App("outer")
    outer.include(inner, prefix="one")
    app.include(outer, prefix="two")

    @inner.agent("job")
    async def index(notification: Notification[Any]) -> None: ...

    assert [agent.name for agent in app.agents] == ["two_one_index"]


def test_a_name_that_the_app_has_is_refused_where_it_is_declared(app: App) -> None:
    router = Router("r")
    app.include(router)

    @app.agent("job")
    async def index(notification: Notification[Any]) -> None: ...

    with pytest.raises(DeclarationError, match="agent 'index' is declared twice in 'late'"):
        router.agent("other")(index.function)


async def test_what_on_error_says_of_a_function_holds_for_each_of_its_agents(app: App) -> None:
    @app.agent("job", name="index_job", retry=TWICE)
    @app.agent("other", name="index_other", retry=TWICE)
    async def index(notification: Notification[Any]) -> None:
        raise FileExistsError

    @index.on_error(FileExistsError)
    def done(error: FileExistsError) -> Ack:
        return Ack()

    async with harness(app) as t:
        for event_type in ("job", "other"):
            await t.notify(event_type, {"id": 1})
        await t.settle()
        assert {agent.name: t.outcomes(agent) for agent in app.agents} == {
            "index_job": ["acked"],
            "index_other": ["acked"],
        }


async def test_an_agent_of_several_is_found_by_its_own_declaration(app: App) -> None:
    router = Router("r")

    @router.agent("job", name="index_job")
    @router.agent("other", name="index_other")
    async def index(notification: Notification[Any]) -> None: ...

    app.include(router, prefix="theirs")
    async with harness(app) as t:
        await t.notify("job", {"id": 1})
        await t.settle()
        assert t.outcomes(index) == ["acked"]


def test_on_error_after_an_inclusion_with_a_prefix_holds(app: App) -> None:
    router = Router("r")

    @router.agent("job")
    async def index(notification: Notification[Any]) -> None: ...

    app.include(router, prefix="theirs")

    @index.on_error(ValueError)
    def done(error: ValueError) -> Ack:
        return Ack()

    (agent,) = app.agents
    assert agent.classifiers == [(ValueError, done)]
