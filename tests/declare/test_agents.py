"""What a declaration may look like, and what is refused at the line that declares it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, TypedDict

import pytest
from msgspec import Struct

from aviso_workers import (
    App,
    Batch,
    Batching,
    GivenUp,
    Notification,
    Retry,
    RetryPolicy,
    Router,
    Stream,
    Window,
    Windowing,
)
from aviso_workers.errors import DeclarationError
from aviso_workers.testing import harness
from tests.contract.settings import app_config, mars


class Field(Struct, frozen=True):
    location: str


@dataclass
class Row:
    location: str


class Entry(TypedDict):
    location: str


class Ordinary:
    """A class that msgspec knows nothing of."""


class Page(TypedDict):
    rest: object


class Book(Struct):
    """Holds itself."""

    parts: list[Book]
    pages: tuple[Page, ...]


class Noted(Struct):
    note: object = None


class Ordered(Struct):
    other: list[Ordinary]


@dataclass
class Prepared:
    """No body has the field of a class that msgspec does not know."""

    location: str
    other: Ordinary = field(default_factory=Ordinary)
    another: Ordinary | None = None
    others: list[Ordinary] = field(default_factory=list)


class Left(Struct):
    location: str


class Right(Struct):
    location: str


@pytest.fixture
def router() -> Router:
    return Router("tests")


async def index(notification: Notification[Field]) -> str:
    """Index a field."""
    return f"{notification.identifier['step']} {notification.payload.location}"


class TestAnAgent:
    def test_is_named_after_its_function(self, router: Router) -> None:
        agent = router.agent("mars")(index)
        assert (agent.name, agent.event_type, agent.__doc__) == ("index", "mars", "Index a field.")
        assert router.agents == [agent]

    def test_may_have_another_name(self, router: Router) -> None:
        assert router.agent("mars", name="field-index")(index).name == "field-index"

    def test_has_a_durable_consumer_per_app(self, router: Router) -> None:
        assert router.agent("mars")(index).durable_name("field-index") == "field-index__index"

    def test_has_defaults_that_anybody_can_live_with(self, router: Router) -> None:
        agent = router.agent("mars")(index)
        policy = agent.policy
        assert (agent.where, policy.concurrency, policy.retry, policy.ack_wait) == ({}, 1, RetryPolicy(), 20.0)
        assert (policy.timeout, policy.limits, policy.order_by) == (None, (), ())

    def test_keeps_its_own_copy_of_the_filter(self, router: Router) -> None:
        where = {"class": "od"}
        agent = router.agent("mars", where=where)(index)
        where["class"] = "rd"
        assert agent.where == {"class": "od"}

    @pytest.mark.anyio
    async def test_called_in_a_unit_test_it_is_the_authors_function(self, router: Router) -> None:
        agent = router.agent("mars")(index)
        notification = Notification(event_type="mars", identifier={"step": "6"}, payload=Field(location="here"))
        assert await agent(notification) == "6 here"

    def test_may_be_a_method_of_an_object(self, router: Router) -> None:
        class Index:
            async def add(self, notification: Notification[Field]) -> None: ...

        assert router.agent("mars")(Index().add).payload_type is Field


@pytest.mark.parametrize(
    "payload", [Any, int, dict[str, int], Field, Row, Entry, Prepared, Field | None, list[Row] | str, bytes]
)
def test_a_payload_type_is_taken_from_the_annotation(router: Router, payload: Any) -> None:
    async def handle(notification: Any) -> None: ...

    handle.__annotations__["notification"] = Notification[payload]
    assert router.agent("mars")(handle).payload_type == payload


def test_with_a_decoder_a_payload_may_be_of_any_type(router: Router) -> None:
    async def handle(notification: Notification[Ordinary]) -> None: ...

    handle.__annotations__["notification"] = Notification[Ordinary]
    agent = router.agent("mars", decode=lambda data: Ordinary())(handle)
    assert agent.payload_type is Ordinary


async def decoded_later(data: bytes) -> Field:
    return Field(location="here")


@pytest.mark.parametrize("decode", ["json", decoded_later])
def test_a_decoder_that_is_no_plain_function_is_refused(router: Router, decode: Any) -> None:
    with pytest.raises(DeclarationError, match="agent 'index': decode= must be a plain function of the body's bytes"):
        router.agent("mars", decode=decode)(index)


class Key(Struct):
    step: int


class TestTheKey:
    def test_is_of_the_second_type(self, router: Router) -> None:
        async def one(notification: Notification[Field, Key]) -> None: ...
        async def many(batch: Batch[Any, Key]) -> None: ...
        async def follow(stream: Stream[Field, Key]) -> None: ...
        def fold(total: int, notification: Notification[Field, Key]) -> int: ...  # type: ignore[empty-body]
        async def sums(window: Window[int]) -> None: ...

        agents = [router.agent("mars")(function) for function in (one, many, follow)]
        agents.append(router.agent("mars", window=Windowing(size="1h", fold=fold, initial=0))(sums))
        assert [(agent.payload_type, agent.key_type) for agent in agents] == [
            (Field, Key),
            (Any, Key),
            (Field, Key),
            (Field, Key),
        ]

    def test_is_of_none_without_it(self, router: Router) -> None:
        assert router.agent("mars")(index).key_type is Any

    def test_must_be_one_that_identifiers_can_be_read_as(self, router: Router) -> None:
        async def handle(notification: Notification[Field, int]) -> None: ...

        with pytest.raises(
            DeclarationError,
            match=r"agent 'handle': no identifier can be read as int: it must be a msgspec.Struct, a dataclass or",
        ):
            router.agent("mars")(handle)


def test_a_bare_notification_has_any_payload(router: Router) -> None:
    async def handle(notification: Notification) -> None: ...

    assert router.agent("mars")(handle).payload_type is Any


def synchronous(notification: Notification[Field]) -> None: ...


async def batched(batch: Batch[Field]) -> None: ...


async def streamed(stream: Stream[Field]) -> None: ...


def streamed_in_a_thread(stream: Stream[Field]) -> None: ...


@pytest.mark.parametrize(
    ("function", "form", "in_thread"),
    [
        (index, Notification, False),
        (synchronous, Notification, True),
        (batched, Batch, False),
        (streamed, Stream, False),
    ],
)
def test_the_annotation_chooses_the_call_form(
    router: Router, function: Callable[..., Any], form: type, in_thread: bool
) -> None:
    agent = router.agent("mars")(function)
    assert (agent.form, agent.payload_type, agent.in_thread) == (form, Field, in_thread)


@pytest.mark.parametrize(
    ("function", "stated", "complaint"),
    [
        (batched, {"order_by": ["step"]}, "order_by= is for a function of a Notification"),
        (streamed, {"order_by": ["step"]}, "order_by= is for a function of a Notification"),
        (streamed, {"timeout": 5.0}, "timeout= is for a function of a Notification or a Batch"),
        (streamed_in_a_thread, {}, "a function of a Stream must be async"),
    ],
)
def test_what_does_not_go_with_a_call_form_is_refused(
    router: Router, function: Callable[..., Any], stated: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(DeclarationError, match=complaint):
        router.agent("mars", **stated)(function)


async def returning_a_class(notification: Notification[Field]) -> type[Retry] | None: ...


async def windowed(window: Window[int]) -> None: ...


def add(total: int, notification: Notification[Field]) -> int:
    return total + 1


def hourly(**stated: Any) -> Windowing[Any, Any]:
    return Windowing(**{"size": "1h", "fold": add, "initial": 0, **stated})


class TestAnAgentOfAWindow:
    def test_has_the_payload_type_of_what_it_folds(self, router: Router) -> None:
        agent = router.agent("mars", window=hourly())(windowed)
        assert (agent.form, agent.argument_type, agent.payload_type) == (Window, int, Field)

    def test_folds_any_payload_where_it_does_not_say(self, router: Router) -> None:
        agent = router.agent("mars", window=hourly(fold=lambda total, _: total + 1))(windowed)
        assert agent.payload_type is Any

    @pytest.mark.parametrize(
        ("function", "stated", "complaint"),
        [
            (index, {"window": hourly()}, "window= is for a function of a Window"),
            (windowed, {}, r"a function of a Window needs window=Windowing\(...\)"),
            (windowed, {"window": hourly(), "order_by": ["step"]}, "order_by= is for a function of a Notification"),
            (returning_a_class, {}, r"annotated to return the class Retry or Reject: return Retry\(\) or Reject"),
            (windowed, {"window": hourly(initial="none")}, "initial= is not a value of its Window: Expected `int`"),
            (windowed, {"window": hourly(fold=lambda total: total)}, "fold= must be a function of a value and"),
            (windowed, {"window": hourly(fold=max)}, "fold= must be a function of a value and .*, found <built-in"),
        ],
    )
    def test_is_refused_where_it_makes_no_sense(
        self, router: Router, function: Callable[..., Any], stated: dict[str, Any], complaint: str
    ) -> None:
        with pytest.raises(DeclarationError, match=complaint):
            router.agent("mars", **stated)(function)


def test_what_exceptions_mean_is_declared_on_the_agent(router: Router) -> None:
    agent = router.agent("mars")(index)

    @agent.on_error(ConnectionError, TimeoutError)
    def later(error: Exception) -> Retry:
        return Retry(after=60)

    assert agent.classifiers == [(ConnectionError, later), (TimeoutError, later)]


@pytest.mark.parametrize(
    ("declare", "complaint"),
    [
        (
            lambda app: app.agent(index),
            r'agent: event_type must be .*, as in @app.agent\("mars"\), found <function index',
        ),
        (
            lambda app: app.every(index, singleton=False),
            r'every: interval must be .*, as in @app.every\("30s", singleton=True\), found <function index',
        ),
        (
            lambda app: app.cron(index, singleton=False),
            r'cron: expression must be .*, as in @app.cron\("0 6 \* \* \*", singleton=True\), found <function',
        ),
        (lambda app: app.task("poll"), "task: must be an async function below @app.task, found 'poll'"),
        (lambda app: app.counter(index), "counter name <function index"),
        (lambda app: app.include("tests"), "include: the first argument must be a Router, found 'tests'"),
        (lambda app: app.agent("mars", where="class=od"), "where= must be a mapping of identifier fields.*'class=od'"),
        (lambda app: app.agent("mars", order_by=None), "order_by= must be a list of identifier fields.*found None"),
        (
            lambda app: app.agent("mars", order_by="class"),
            "order_by= must be a list of identifier fields.*found 'class'",
        ),
        (lambda app: app.agent("mars", order_by=[5]), r"order_by= must be a list of identifier fields.*found \[5\]"),
    ],
)
def test_what_a_decorator_cannot_take_is_refused_at_its_line(declare: Callable[[App], Any], complaint: str) -> None:
    with pytest.raises(DeclarationError, match=complaint):
        declare(App("tests"))


async def later_async(error: Exception) -> Retry: ...  # type: ignore[empty-body]


def of_nothing() -> None: ...


def of_two(error: Exception, more: object) -> None: ...


@pytest.mark.parametrize(
    ("kinds", "function", "complaint"),
    [
        (
            ["ValueError"],
            print,
            r"types of exceptions, as in @index.on_error\(ValueError, OSError\), found 'ValueError'",
        ),
        ([(ValueError, OSError)], print, "types of exceptions, .*, found \\(<class 'ValueError'>"),
        ([int], print, "types of exceptions, .*, found <class 'int'>"),
        ([of_nothing], print, "types of exceptions, .*, found <function of_nothing"),
        ([], print, "types of exceptions, .*, found none"),
        ([ValueError], "later", "must be a plain one that takes the exception, found 'later'"),
        ([ValueError], later_async, "must be a plain one .* found an async function or one that yields"),
        ([ValueError], of_nothing, "must be a plain one that takes the exception, and nothing else"),
        ([ValueError], of_two, "must be a plain one that takes the exception, and nothing else"),
    ],
)
def test_on_error_refuses_what_could_not_be_asked(
    router: Router, kinds: list[Any], function: Any, complaint: str
) -> None:
    agent = router.agent("mars")(index)
    with pytest.raises(DeclarationError, match=f"agent 'index': .*{complaint}"):
        agent.on_error(*kinds)(function)


async def of_dead_letters(given_up: GivenUp[Any]) -> None: ...


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (3, "needs a function that takes one GivenUp and no resources, found 3"),
        (of_nothing, "and nothing else; found <function of_nothing"),
        (of_two, "and nothing else; found <function of_two"),
        (lambda given_up: (yield), "one that yields must be async"),
    ],
)
def test_on_dead_letter_refuses_what_could_not_be_called(router: Router, function: Any, complaint: str) -> None:
    agent = router.agent("mars")(index)
    with pytest.raises(DeclarationError, match=f"agent 'index': on_dead_letter .*{complaint}"):
        agent.on_dead_letter(function)


def test_an_agent_has_one_function_of_on_dead_letter_with_all_that_its_function_was_declared_as(router: Router) -> None:
    agent = router.agent("mars")(index)
    other = router.agent("diss", name="other")(agent)
    assert other.on_dead_letter(of_dead_letters) is of_dead_letters
    assert agent.dead_letter_functions == [of_dead_letters]
    with pytest.raises(
        DeclarationError, match="agent 'index' has a function of on_dead_letter already: <function of_d"
    ):
        agent.on_dead_letter(of_dead_letters)


@pytest.mark.parametrize("function", [3, later_async, of_nothing, of_two, lambda notify: (yield)])
def test_outgoing_refuses_what_could_not_be_asked(router: Router, function: Any) -> None:
    with pytest.raises(DeclarationError, match="outgoing: must be a plain function that takes a Notify, "):
        router.outgoing(function)


class Indexer:
    """An object that handles notifications, by a method or itself."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, object]] = []

    async def method(self, notification: Notification[Field]) -> None:
        self.seen.append(("method", notification.payload))

    async def annotated(self: Indexer, notification: Notification[Field]) -> None: ...

    async def __call__(self, notification: Notification[Field]) -> None:
        self.seen.append(("object", notification.payload))


async def unannotated(notification) -> None: ...  # type: ignore[no-untyped-def]


async def misannotated(notification: Field) -> None: ...


async def unresolvable(notification: Notification[Missing]) -> None: ...  # type: ignore[name-defined]  # noqa: F821


async def mistyped(notification: Notification[pytest.Missing]) -> None: ...  # type: ignore[name-defined]


async def without_argument() -> None: ...


async def with_two_arguments(notification: Notification[Field], other) -> None: ...  # type: ignore[no-untyped-def]


async def with_a_named_argument(*, notification: Notification[Field]) -> None: ...


async def with_all_arguments(*notifications: Notification[Field]) -> None: ...


async def with_a_nameless_resource(notification: Notification[Field], other: int, /) -> None: ...


async def with_a_foreign_payload(notification: Notification[Ordinary]) -> None: ...


async def with_objects(notification: Notification[dict[str, object]]) -> None: ...


async def with_an_object_deep_inside(notification: Notification[list[Book]]) -> None: ...


async def with_an_optional_object(notification: Notification[Noted]) -> None: ...


async def with_a_list_of_foreign_ones(notification: Notification[Ordered]) -> None: ...


async def with_an_ambiguous_payload(notification: Notification[Left | Right]) -> None: ...


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (unannotated, "must be a function whose first argument.*found no annotation of 'notification'"),
        (misannotated, "must be a function whose first argument.*found Field of 'notification'"),
        (without_argument, "must be a function whose first argument.*found no argument"),
        (with_two_arguments, "agent 'with_two_arguments': annotate other with the type that a resource gives"),
        (with_a_named_argument, "its first argument is given by position, which 'notification: .*' cannot take"),
        (with_all_arguments, r"its first argument is given by position, which '\*notifications: .*' cannot take"),
        (with_a_nameless_resource, "resources are given by the names of arguments: leave out other: "),
        (
            Indexer.method,
            "agent 'method': a method in a class has no object yet.*: declare it where .*, as self.method",
        ),
        (Indexer.annotated, "agent 'annotated': a method in a class has no object yet"),
        (Indexer, "agent of the class Indexer: give an object of it"),
        (unresolvable, "cannot be resolved.*'Missing'.*declare the payload type at module level, before the agent"),
        (mistyped, "cannot be resolved.*'Missing'"),
        (
            with_a_foreign_payload,
            "cannot be read: msgspec does not know .*Ordinary.*use a msgspec.Struct, a dataclass",
        ),
        (with_objects, "cannot be read: msgspec does not know <class 'object'>: use Any"),
        (with_an_object_deep_inside, r"msgspec does not know <class 'object'> - at `\$\.pages\.rest`: use Any"),
        (with_an_optional_object, r"msgspec does not know <class 'object'> - at `\$\.note`: use Any"),
        (with_a_list_of_foreign_ones, r"msgspec does not know .*Ordinary'> - at `\$\.other`; use a msgspec.Struct"),
        (with_an_ambiguous_payload, "its payload type cannot be read: .*all Struct types must be tagged"),
    ],
)
def test_a_function_that_cannot_be_an_agent_is_refused(
    router: Router, function: Callable[..., Any], complaint: str
) -> None:
    with pytest.raises(DeclarationError, match=complaint):
        router.agent("mars")(function)
    assert router.agents == []


@pytest.mark.parametrize("made", [partial(index), Indexer(), lambda notification: None])
def test_a_function_without_a_name_needs_one(router: Router, made: Any) -> None:
    with pytest.raises(DeclarationError, match="has no name of its own: give it name="):
        router.agent("mars")(made)


async def with_a_prefix(notification: Notification[Field], prefix: str, seen: list[tuple[str, object]]) -> None:
    seen.append((prefix, notification.payload))


@pytest.mark.anyio
async def test_methods_objects_and_partials_are_agents() -> None:
    app = App("callables", config=app_config("in_memory", ""))
    indexer = Indexer()
    app.agent("mars")(indexer.method)
    app.agent("mars", name="itself")(indexer)
    app.agent("mars", name="partly")(partial(with_a_prefix, prefix="partial", seen=indexer.seen))
    assert app.mistakes() == []
    assert not any("partly" in warning and "returns" in warning for warning in app.warnings())
    async with harness(app) as t:
        await t.notify("mars", mars(), {"location": "x"})
        await t.settle()
    assert sorted(name for name, _ in indexer.seen) == ["method", "object", "partial"]
    assert {type(payload) for _, payload in indexer.seen} == {Field}


@pytest.mark.anyio
async def test_one_function_is_an_agent_of_several_event_types() -> None:
    app, seen = App("several", config=app_config("in_memory", "")), list[str]()

    @app.agent("mars", name="of_mars")
    @app.agent("plain", name="of_plain", concurrency=2)
    async def index(notification: Notification) -> None:
        seen.append(notification.event_type)

    assert [(agent.name, agent.event_type, agent.policy.concurrency) for agent in app.agents] == [
        ("of_plain", "plain", 2),
        ("of_mars", "mars", 1),
    ]
    async with harness(app) as t:
        await t.notify("mars", mars(), {})
        await t.notify("plain", {"a": 1, "b": 2})
        await t.settle()
    assert sorted(seen) == ["mars", "plain"]


@pytest.mark.parametrize("name", ["a.b", "a b", "a*", "é", "a" * 65, "a/b", "a\n"])
def test_a_name_that_a_consumer_cannot_carry_is_refused(router: Router, name: str) -> None:
    with pytest.raises(DeclarationError, match="use 1 to 64 letters, digits, '-' and '_'"):
        router.agent("mars", name=name)(index)
    with pytest.raises(DeclarationError, match="router name"):
        Router(name)
    with pytest.raises(DeclarationError, match="app name"):
        App(name)


@pytest.mark.parametrize(
    ("stated", "complaint"),
    [
        ({"concurrency": 0}, "agent 'index': concurrency must be above 0 and at most 10000, found 0"),
        ({"concurrency": 10**9}, "agent 'index': concurrency must be above 0 and at most 10000, found 1000000000"),
        ({"ack_wait": 0.0}, "agent 'index': ack_wait must be above 0 and at most 31622400, found 0"),
        ({"ack_wait": math.inf}, "agent 'index': ack_wait=: a duration is .* found inf"),
        ({"retry": 0}, "agent 'index': retry= takes a RetryPolicy, found 0"),
        ({"batch": 0}, "agent 'index': batch= takes a Batching, found 0"),
        ({"timeout": -1.0}, "agent 'index': timeout must be above 0 and at most 31622400, found -1"),
        ({"batch": Batching(size=5)}, "agent 'index': batch= is for a function of a Batch"),
    ],
)
def test_a_policy_that_cannot_work_is_refused(router: Router, stated: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DeclarationError, match=complaint):
        router.agent("mars", **stated)(index)


@pytest.mark.parametrize(
    ("stated", "complaint"),
    [
        ({"size": 0}, "Batching: size must be a whole number of 1 or more, found 0"),
        ({"within": -0.5}, r"Batching: within must be a duration from 0 seconds, .* found -0\.5"),
        ({"within": float("nan")}, "Batching: within must be a duration from 0 seconds, .* found nan"),
    ],
)
def test_batches_that_cannot_be_collected_are_refused(stated: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DeclarationError, match=complaint):
        Batching(**stated)


def test_two_agents_of_one_name_are_refused(router: Router) -> None:
    router.agent("mars")(index)
    with pytest.raises(DeclarationError, match="agent 'index' is declared twice in 'tests': give one another name"):
        router.agent("dissemination")(index)


class TestATask:
    def test_is_an_async_function_of_the_app(self, router: Router) -> None:
        @router.task
        async def tail(app: App) -> None: ...

        assert [(task.name, task.function) for task in router.tasks] == [("tail", tail)]

    def test_may_take_nothing(self, router: Router) -> None:
        @router.task
        async def tail() -> None: ...

        assert [task.needs for task in router.tasks] == [{}]

    def test_is_refused_where_an_argument_says_no_type(self, router: Router) -> None:
        async def tail(app) -> None: ...  # type: ignore[no-untyped-def]

        with pytest.raises(DeclarationError, match="task 'tail': annotate app with the type that a resource gives"):
            router.task(tail)

    def test_is_refused_where_it_is_synchronous(self, router: Router) -> None:
        def tail(app: App) -> None: ...

        with pytest.raises(DeclarationError, match="task 'tail': must be an async function"):
            router.task(tail)  # type: ignore[arg-type]

    def test_is_refused_where_its_name_is_taken(self, router: Router) -> None:
        async def tail(app: App) -> None: ...

        router.task(tail)
        with pytest.raises(DeclarationError, match="task 'tail' is declared twice"):
            router.task(tail)


@pytest.mark.parametrize(
    ("start", "read"),
    [
        ("all", "all"),
        ("new", "new"),
        (12, "12"),
        ("0012", "12"),
        ("2026-11-20T06:00:00Z", "2026-11-20T06:00:00+00:00"),
        (datetime(2026, 11, 20, 6), "2026-11-20T06:00:00+00:00"),
    ],
)
def test_an_agent_may_start_elsewhere(router: Router, start: Any, read: str) -> None:
    assert router.agent("mars", start=start)(index).policy.start == read


@pytest.mark.parametrize("start", ["", "old", -1, "2026-11-20"])
def test_a_start_that_is_none_is_refused(router: Router, start: Any) -> None:
    with pytest.raises(DeclarationError, match="agent 'index': start must be `all`, `new`, a sequence, or a time such"):
        router.agent("mars", start=start)(index)


def test_all_mistakes_are_told_at_once(router: Router) -> None:
    with pytest.raises(DeclarationError) as raised:
        router.agent("mars", concurrency=0, timeout=-1.0, batch=Batching(size=5))(index)

    assert str(raised.value).splitlines() == [
        "agent 'index': concurrency must be above 0 and at most 10000, found 0",
        "agent 'index': timeout must be above 0 and at most 31622400, found -1",
        "agent 'index': batch= is for a function of a Batch",
    ]


@pytest.mark.parametrize("stated", [{"concurrency": 2}, {"order_by": ["date"]}])
def test_a_singleton_handles_one_at_a_time(router: Router, stated: dict[str, Any]) -> None:
    assert router.agent("mars", singleton=True, name="one")(index).policy.singleton
    with pytest.raises(DeclarationError, match="agent 'index': singleton= is for a function of a Notification without"):
        router.agent("mars", singleton=True, **stated)(index)


def test_a_singleton_is_no_function_of_several(router: Router) -> None:
    async def load(batch: Batch[Any]) -> None: ...

    with pytest.raises(DeclarationError, match="it handles one at a time, in order"):
        router.agent("mars", singleton=True)(load)
