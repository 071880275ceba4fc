"""What runs around agents as it is declared: which agents it is around, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from aviso_workers import App, Batch, Notification, Router, Stream, Window, Windowing
from aviso_workers.errors import DeclarationError
from tests.contract.settings import app_config


class Field(msgspec.Struct):
    location: str


class Row(msgspec.Struct):
    number: int


class Database: ...


class Session: ...


@pytest.fixture
def app() -> App:
    return App("fields", config=app_config("in_memory", ""))


async def one(notification: Notification[Any]) -> AsyncIterator[None]:
    yield


async def many(batch: Batch) -> AsyncIterator[None]:
    yield


async def hourly(window: Window[Any]) -> AsyncIterator[None]:
    yield


def declare_agents(router: Router) -> None:
    @router.agent("mars")
    async def index(notification: Notification[Field]) -> None: ...

    @router.agent("mars")
    def index_in_thread(notification: Notification) -> None: ...

    @router.agent("mars")
    async def load(batch: Batch[Field]) -> None: ...

    @router.agent("mars")
    async def follow(stream: Stream[Field]) -> None: ...

    @router.agent("mars", window=Windowing(size="1h", fold=lambda total, one: total + 1, initial=0))
    async def sum_up(window: Window[int]) -> None: ...


def around(app: App) -> dict[str, list[str]]:
    """By agent that has any, the names of what is around it, the outermost first."""
    return {agent.name: [each.name for each in agent.around] for agent in app._agents_at_work() if agent.around}


def test_it_is_around_the_agents_that_take_what_it_takes(app: App) -> None:
    app.around(one)
    declare_agents(app)
    app.around(many)
    app.around(hourly)
    assert around(app) == {"index": ["one"], "index_in_thread": ["one"], "load": ["many"], "sum_up": ["hourly"]}
    assert app.mistakes() == []


def test_a_method_of_an_object_is_around_them_as_well(app: App) -> None:
    declare_agents(app)
    app.around(agents=["index"])(Measuring().measure)
    assert around(app) == {"index": ["measure"]}


def test_it_is_around_the_agents_that_it_names(app: App) -> None:
    declare_agents(app)
    assert app.around(agents=["index_in_thread"])(one) is one
    assert around(app) == {"index_in_thread": ["one"]}
    assert app.mistakes() == []


@pytest.mark.parametrize("prefix", ["", "theirs"])
def test_a_routers_is_around_its_own_agents_and_inside_of_the_apps(app: App, prefix: str) -> None:
    router = Router("catalogue")
    declare_agents(router)

    @router.around(agents=["index", "index_in_thread"])
    async def named(notification: Notification[Any]) -> AsyncIterator[None]:
        yield

    @app.agent("mars")
    async def ours(notification: Notification) -> None: ...

    @app.around
    async def outer(notification: Notification[Any]) -> AsyncIterator[None]:
        yield

    app.include(router, prefix=prefix)
    router.around(one)
    app.around(agents=[f"{prefix}_index" if prefix else "index"])(outer)
    begin = f"{prefix}_" if prefix else ""
    assert around(app) == {
        "ours": ["outer"],
        f"{begin}index": ["outer", "outer", "named", "one"],
        f"{begin}index_in_thread": ["outer", "named", "one"],
    }
    assert app.mistakes() == []
    assert [agent.around for agent in router.agents] == [()] * 5, "what is included elsewhere is as it was"


class TestMistakes:
    def test_a_name_that_no_agent_has(self, app: App) -> None:
        declare_agents(app)
        app.around(agents=["indx", "index"])(one)
        app.around(agents=["nothing_like_it"])(one)
        assert app.mistakes() == [
            "around 'one': no agent 'indx' in 'fields'; did you mean 'index'?",
            "around 'one': no agent 'nothing_like_it' in 'fields'; "
            "there are: follow, index, index_in_thread, load, sum_up",
        ]

    def test_in_a_router_the_name_is_the_routers(self, app: App) -> None:
        router = Router("catalogue")
        declare_agents(router)
        router.around(agents=["theirs_index"])(one)
        app.include(router, prefix="theirs")
        assert app.mistakes() == [
            "around 'one': no agent 'theirs_index' in 'catalogue'; "
            "there are: follow, index, index_in_thread, load, sum_up"
        ]

    def test_an_agent_that_takes_something_else(self, app: App) -> None:
        declare_agents(app)
        app.around(agents=["load", "follow"])(one)
        assert app.mistakes() == [
            "around 'one' takes a Notification, and agent 'load' a Batch: take it out of agents=, and declare another "
            "one that takes a Batch[Any]",
            "around 'one' takes a Notification, and agent 'follow' a Stream, which is not called for each "
            "notification: take it out of agents=, and put into its loop what is to run around each",
        ]

    def test_an_agent_with_another_payload(self, app: App) -> None:
        declare_agents(app)

        @app.agent("mars")
        async def rows(notification: Notification[Row]) -> None: ...

        @app.around(agents=["index"])
        async def of_fields(notification: Notification[Field]) -> AsyncIterator[None]:
            yield

        assert app.mistakes() == []

        @app.around(agents=["index", "rows"])
        async def of_rows(notification: Notification[Row]) -> AsyncIterator[None]:
            yield

        assert app.mistakes() == [
            "around 'of_rows' takes a Notification[Row], and agent 'index' a Notification[Field]: annotate it "
            "Notification[Any], or name other agents in agents="
        ]

    def test_an_argument_that_no_resource_gives(self, app: App) -> None:
        @app.around
        async def log(notification: Notification[Any], database: Database) -> AsyncIterator[None]:
            yield

        assert app.mistakes() == [
            "around 'log': no resource gives its argument database: Database; there are: none",
        ]


async def of_a_stream(stream: Stream[Any]) -> AsyncIterator[None]:
    yield


async def of_something_else(notification: Database) -> AsyncIterator[None]:
    yield


async def of_nothing() -> AsyncIterator[None]:
    yield


async def unannotated(notification) -> AsyncIterator[None]:  # type: ignore[no-untyped-def]
    yield


class Measuring:
    async def measure(self, notification: Notification[Any]) -> AsyncIterator[None]:
        yield


async def that_does_not_yield(notification: Notification[Any]) -> None: ...


MUST_BE = "must be an async generator function whose first argument is annotated Notification\\[Any\\], .*, found "


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (of_a_stream, "around 'of_a_stream': a function of a Stream is not called .* put it into the loop, or let"),
        (of_something_else, f"{MUST_BE}Database"),
        (of_nothing, f"{MUST_BE}none"),
        (unannotated, f"{MUST_BE}notification, which is not annotated"),
        (Measuring.measure, "around 'measure': a method in a class has no object yet, .*, as self.measure"),
        (that_does_not_yield, f"{MUST_BE}<function that_does_not_yield"),
        ("measure", f"{MUST_BE}'measure'"),
    ],
)
def test_what_cannot_run_around_a_call_is_refused(function: Any, problem: str) -> None:
    with pytest.raises(DeclarationError, match=problem):
        Router("r").around(function)


def test_one_name_is_no_list_of_names() -> None:
    with pytest.raises(DeclarationError, match="around 'one': agents= is a list of names, found 'index'"):
        Router("r").around(agents="index")(one)


class TestResourcesOfCalls:
    def test_are_not_what_a_worker_opens_once_can_need(self, app: App) -> None:
        @app.resource(scope="call")
        def session() -> Session:
            return Session()

        @app.resource
        def database(session: Session) -> Database:
            return Database()

        assert app.mistakes() == [
            "resource 'database': a worker opens it once, and its argument session is opened for each call: give it "
            'scope="call" as well'
        ]

    def test_are_not_opened_for_a_stream(self, app: App) -> None:
        @app.resource(scope="call")
        def session() -> Session:
            return Session()

        @app.agent("mars")
        async def follow(stream: Stream[Field], session: Session) -> None: ...

        assert app.mistakes() == [
            "agent 'follow': resource 'session' is opened for each call, and a function of a Stream is not called for "
            "each notification: open it inside of the loop, or let the agent take a Notification[T]"
        ]

    def test_have_the_notification_of_a_call_that_has_one(self, app: App) -> None:
        @app.resource(scope="call")
        def session(notification: Notification[Any]) -> Session:
            return Session()

        @app.resource(scope="call")
        def database(session: Session) -> Database:
            return Database()

        @app.agent("mars")
        async def index(notification: Notification[Field], database: Database) -> None: ...

        assert app.mistakes() == []

        @app.agent("mars")
        async def load(batch: Batch[Field], database: Database) -> None: ...

        @app.every("5m", singleton=False)
        async def look(session: Session) -> None: ...

        assert app.mistakes() == [
            "agent 'load': resource 'session' needs the Notification of its call, and there is none: let it do without",
            "timer 'look': resource 'session' needs the Notification of its call, and there is none: let it do without",
        ]

    def test_of_a_worker_have_no_notification(self, app: App) -> None:
        @app.resource
        def session(notification: Notification) -> Session:
            return Session()

        assert app.mistakes() == [
            "resource 'session': no resource gives its argument notification: Notification; there are: Session"
        ]

    def test_that_need_each_other_are_told(self, app: App) -> None:
        @app.resource(scope="call")
        def session(database: Database) -> Session:
            return Session()

        @app.resource(scope="call")
        def database(session: Session) -> Database:
            return Database()

        @app.agent("mars")
        async def index(notification: Notification[Field], database: Database) -> None: ...

        (mistake,) = app.mistakes()
        assert mistake.startswith("resources need each other: ")

    def test_have_a_scope_that_there_is(self) -> None:
        scope: Any = "notification"
        with pytest.raises(DeclarationError, match="'session': scope must be 'worker' or 'call', found 'notification'"):

            @Router("r").resource(scope=scope)
            def session() -> Session:
                return Session()
