"""Tasks of an app: what they are given, and that a test hears of their errors. On either backend."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

from aviso_workers import App, Router
from aviso_workers.errors import UnavailableError
from aviso_workers.testing import harness
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


class Database:
    """What a task works with."""


class Session:
    """What is opened for each call."""


async def test_a_task_is_given_what_its_annotations_ask_for(app: App, url: str | None) -> None:
    found: list[object] = []
    done = anyio.Event()
    router = Router("r")

    @router.resource
    async def database() -> AsyncIterator[Database]:
        yield Database()

    @router.task
    async def without() -> None:
        found.append("without")

    @router.task
    async def look(app: App, database: Database) -> None:
        found.append((type(database), app.name))
        done.set()

    app.include(router, prefix="theirs")
    assert (app.mistakes(), [task.name for task in app.tasks]) == ([], ["theirs_without", "theirs_look"])
    async with harness(app, server=url):
        with anyio.fail_after(PATIENCE_SECONDS):
            await done.wait()
    assert found == ["without", (Database, "contract")]


async def test_a_task_of_an_own_kind_of_app_is_given_it(app: App) -> None:
    class OwnApp(App):
        """An app with more."""

    own = OwnApp("own", config=app.config)
    found: list[App] = []

    @own.task
    async def look(app: App) -> None:
        found.append(app)

    async with harness(own) as t:
        await t.advance(0)
    assert found == [own]


def test_what_no_resource_gives_is_a_mistake(app: App) -> None:
    @app.resource(scope="call")
    def session() -> Session:
        return Session()

    @app.task
    async def look(database: Database, session: Session) -> None: ...

    nobody, for_each_call = app.mistakes()
    assert nobody == "task 'look': no resource gives its argument database: Database; there are: Session"
    assert for_each_call.startswith("task 'look': resource 'session' is opened for each call, and a task runs as long")


async def test_the_error_of_a_task_ends_the_test(app: App, url: str | None) -> None:
    @app.task
    async def look() -> None:
        raise ValueError("nothing to look at")

    with pytest.raises(ValueError, match="nothing to look at"):
        async with harness(app, server=url):
            await anyio.sleep(PATIENCE_SECONDS)


async def test_a_task_that_cannot_reach_the_server_starts_again(app: App) -> None:
    runs: list[int] = []

    @app.task
    async def look() -> None:
        runs.append(1)
        if len(runs) < 3:
            raise UnavailableError("no server")

    async with harness(app) as t:
        await t.advance(1)
    assert len(runs) == 3
