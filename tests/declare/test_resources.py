"""Resources as they are declared, and given to the agents, timers and resources that ask for them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any, Generic, NewType, Protocol, TypeVar

import pytest

from aviso_workers import App, Batch, Notification, Notify, Router, Stream
from aviso_workers.errors import ConfigError, DeclarationError, ResourceError
from aviso_workers.testing import harness
from tests.contract.settings import app_config, mars

pytestmark = pytest.mark.anyio


T = TypeVar("T")


class Settings:
    def __init__(self, name: str) -> None:
        self.name = name


class Database:
    def __init__(self, url: str) -> None:
        self.url = url
        self.rows: list[str] = []


class Broken: ...


class Cache:
    def __init__(self, database: Database) -> None:
        self.database = database


@pytest.fixture
def told() -> list[str]:
    """What was opened and closed, in order."""
    return []


@pytest.fixture
def app() -> App:
    return App("resources", config=app_config("in_memory", ""))


def declare_all(router: Router, told: list[str]) -> None:
    """Those that need others first."""

    @router.resource
    async def cache(database: Database) -> AsyncIterator[Cache]:
        told.append("cache")
        try:
            yield Cache(database)
        finally:
            told.append("cache closed")

    @router.resource
    async def database(settings: Settings, app: App) -> AsyncGenerator[Database, None]:
        told.append("database")
        try:
            yield Database(f"{settings.name}/{app.name}")
        finally:
            told.append("database closed")

    @router.resource
    async def settings() -> AsyncIterator[Settings]:
        told.append("settings")
        try:
            yield Settings("db")
        finally:
            told.append("settings closed")


async def test_each_worker_opens_them_once_in_the_order_in_which_they_need_each_other(
    app: App, told: list[str]
) -> None:
    declare_all(app, told)
    assert app.mistakes() == []
    async with harness(app, workers=2) as t:
        assert told == ["settings", "database", "cache"] * 2
        await t.stop()
    assert told[6:] == ["cache closed", "database closed", "settings closed"] * 2


async def test_everybody_is_given_what_it_asks_for(app: App, told: list[str]) -> None:
    declare_all(app, told)
    seen: list[object] = []

    @app.agent("mars")
    async def one(notification: Notification[Any], cache: Cache, app: App) -> None:
        seen.append(("one", cache.database.url, app.name))

    @app.agent("mars")
    async def many(batch: Batch[Any], database: Database) -> None:
        seen.append(("many", database.url))

    @app.agent("mars")
    async def stream(notifications: Stream[Any], database: Database) -> None:
        async for _ in notifications:
            seen.append(("stream", database.url))

    @app.agent("mars")
    def in_thread(notification: Notification[Any], database: Database) -> None:
        seen.append(("in_thread", database.url))

    @app.every("1m", singleton=False)
    async def timer(database: Database) -> None:
        seen.append(("timer", database.url))

    async with harness(app) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        await t.advance(60)
        assert [t.outcomes(agent) for agent in (one, many, stream, in_thread)] == [["acked"]] * 4
        assert {fact.error for fact in t.ticks(timer)} == {None}, "two ticks where a minute ended before"
    url = "db/resources"
    assert set(seen) == {
        ("one", url, "resources"),
        *((name, url) for name in ("many", "stream", "in_thread", "timer")),
    }


async def test_what_is_made_of_a_resource_is_returned_or_yielded(app: App, told: list[str]) -> None:
    declare_all(app, told)

    def made_by(name: str, database: Database) -> Notify:
        return Notify("plain", {"a": name, "b": database.url.replace("/", "-")})

    @app.agent("mars")
    async def one(notification: Notification[Any], database: Database) -> Notify:
        return made_by("one", database)

    @app.agent("mars")
    def in_thread(notification: Notification[Any], database: Database) -> Notify:
        return made_by("in_thread", database)

    @app.agent("mars")
    async def many(batch: Batch[Any], database: Database) -> AsyncIterator[Notify]:
        yield made_by("many", database)

    @app.agent("mars")
    async def stream(notifications: Stream[Any], database: Database) -> AsyncIterator[Notify]:
        async for _ in notifications:
            yield made_by("stream", database)

    async with harness(app) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        assert [t.outcomes(agent) for agent in (one, in_thread, many, stream)] == [["acked"]] * 4
        published = {(made.identifier["a"], made.identifier["b"]) for made in t.published[1:]}
    assert published == {(name, "db-resources") for name in ("one", "in_thread", "many", "stream")}


async def test_a_unit_test_gives_its_own(app: App) -> None:
    @app.agent("mars")
    async def one(notification: Notification[Any], database: Database) -> str:
        return database.url

    assert await one(None, Database("mine")) == "mine"  # type: ignore[arg-type]


async def test_one_that_cannot_be_opened_is_named_and_what_was_open_is_closed(app: App, told: list[str]) -> None:
    declare_all(app, told)

    @app.resource
    async def broken(cache: Cache) -> AsyncIterator[Broken]:
        raise ConnectionError("no such host")
        yield

    with pytest.raises(ResourceError, match="resource 'broken' cannot be opened: ConnectionError: no such host"):
        async with harness(app):
            pytest.fail("it began")
    assert told[3:] == ["cache closed", "database closed", "settings closed"]


async def test_what_nobody_gives_is_told_at_start(app: App) -> None:
    @app.resource
    async def settings() -> AsyncIterator[Settings]:
        yield Settings("db")

    @app.agent("mars")
    async def index(notification: Notification[Any], database: Database) -> None: ...

    @app.every("5m", singleton=False)
    async def look(cache: Cache, settings: Settings) -> None: ...

    assert app.mistakes() == [
        "agent 'index': no resource gives its argument database: Database; there are: Settings",
        "timer 'look': no resource gives its argument cache: Cache; there are: Settings",
    ]
    with pytest.raises(ConfigError):
        async with harness(app):
            pytest.fail("it began")


def test_resources_that_need_each_other_are_told(app: App) -> None:
    @app.resource
    async def cache(database: Database) -> AsyncIterator[Cache]:
        yield Cache(database)

    @app.resource
    async def database(cache: Cache) -> AsyncIterator[Database]:
        yield cache.database

    (mistake,) = app.mistakes()
    assert mistake in (
        "resources need each other: cache needs database needs cache",
        "resources need each other: database needs cache needs database",
    )


async def unannotated():  # type: ignore[no-untyped-def]
    yield 1


async def that_yields_and_says_that_it_returns() -> Database:  # type: ignore[misc]
    yield Database("")


async def of_nothing() -> None: ...


async def needing_nothing_in_particular(something) -> AsyncIterator[Database]:  # type: ignore[no-untyped-def]
    yield Database("")


class Connecting:
    async def method(self) -> AsyncIterator[Database]:
        yield Database("")


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (
            Connecting.method,
            "resource 'method': a method in a class has no object yet.*: declare it .*, as self.method",
        ),
        (
            unannotated,
            "annotated `-> AsyncIterator\\[Type\\]`, or one that returns, annotated `-> Type`, found no annotation",
        ),
        (that_yields_and_says_that_it_returns, "annotated `-> Type`, found Database"),
        (of_nothing, "annotated `-> Type`, found NoneType"),
        (needing_nothing_in_particular, "annotate something with the type that a resource gives"),
    ],
)
def test_what_is_no_resource_is_refused(function: Any, problem: str) -> None:
    with pytest.raises(DeclarationError, match=problem):
        Router("r").resource(function)


Reading = NewType("Reading", Database)


class Pool(Generic[T]):
    def __init__(self, *held: T) -> None:
        self.held = held


class Clock(Protocol):
    def now(self) -> str: ...


class Noon:
    def now(self) -> str:
        return "noon"


async def test_a_resource_is_of_any_type_and_made_by_any_function(app: App, told: list[str]) -> None:
    @app.resource
    async def database() -> Database:
        return Database("writing")

    @app.resource
    def reading(pool: Pool[str]) -> Reading:
        return Reading(Database(f"reading {pool.held}"))

    @app.resource
    def pool() -> Iterator[Pool[str]]:
        try:
            yield Pool("a", "b")
        finally:
            told.append("the pool is closed")

    @app.resource
    async def numbers() -> AsyncIterator[Pool[int]]:
        yield Pool(1)

    @app.resource
    def clock() -> Clock:
        return Noon()

    @app.agent("mars")
    async def index(
        notification: Notification, database: Database, reading: Reading, pool: Pool[int], clock: Clock
    ) -> None:
        told.append(f"{database.url}, {reading.url}, {pool.held}, {clock.now()}")

    assert app.mistakes() == []
    async with harness(app) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
    assert told == ["writing, reading ('a', 'b'), (1,), noon", "the pool is closed"]


def test_a_type_that_nobody_gives_is_named_as_it_is_written(app: App) -> None:
    @app.agent("mars")
    async def index(notification: Notification, pool: Pool[str], reading: Reading) -> None: ...

    assert app.mistakes() == [
        f"agent 'index': no resource gives its argument pool: {__name__}.Pool[str]; there are: none",
        "agent 'index': no resource gives its argument reading: Reading; there are: none",
    ]


def test_two_of_one_type_are_refused(app: App, told: list[str]) -> None:
    declare_all(app, told)
    with pytest.raises(DeclarationError, match="resources 'cache' and 'cache' of 'resources' both give Cache"):
        declare_all(app, told)


class TestARouterWithAPrefix:
    async def test_has_names_of_its_own(self, app: App, told: list[str]) -> None:
        router = Router("theirs")
        declare_all(router, told)
        names = router.table("names", str)
        sizes = router.counter("sizes")

        @router.agent("mars")
        async def index(notification: Notification[Any], database: Database) -> None:
            await names.put("url", database.url)
            await sizes.add("all")

        @router.every("1m", singleton=False)
        async def look() -> None: ...

        @app.agent("mars")
        async def index_too(notification: Notification[Any]) -> None: ...

        app.table("names", int)
        app.include(router, prefix="theirs")
        assert [agent.name for agent in app.agents] == ["index_too", "theirs_index"]
        assert [timer.name for timer in app.timers] == ["theirs_look"]
        assert sorted(app.tables) == ["names", "theirs_names", "theirs_sizes"]
        assert [agent.name for agent in router.agents] == ["index"]
        async with harness(app) as t:
            await t.notify("mars", mars(), {})
            await t.settle()
            assert t.outcomes("theirs_index") == ["acked"]
            assert await names.get("url") == "db/resources"
            assert await sizes.items() == {"all": 1}
            assert await (await app.key_value("resources__table__theirs_names")).keys() == ["url"]

    def test_that_is_no_name_is_refused(self, app: App) -> None:
        router = Router("theirs")

        @router.agent("mars")
        async def index(notification: Notification[Any]) -> None: ...

        with pytest.raises(DeclarationError, match="use 1 to 64 letters"):
            app.include(router, prefix="a.b")
