"""Every shape in which a function may return or yield: all of it is published, it is nothing, or the call fails.

The same shapes are the table of docs/agents/publishing.md.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, NewType, TypeVar, cast

import pytest

from aviso_workers import Ack, App, Batch, Notification, Notify, Receipt, Reject, Retry, RetryPolicy
from aviso_workers.declare import outputs
from aviso_workers.testing import Harness, harness
from tests.contract.settings import app_config, mars
from tests.documented import PROJECT

pytestmark = pytest.mark.anyio

ONCE = RetryPolicy(attempts=1)
MADE: list[Coroutine[Any, Any, Notify]] = []
RECEIPT = Receipt(stream="PLAIN", sequence=1, message_id="1")


def plain(a: object) -> Notify:
    return Notify("plain", {"a": a, "b": "x"})


async def made() -> Notify:
    return plain(1)


def later() -> Coroutine[Any, Any, Notify]:
    coroutine = made()
    MADE.append(coroutine)
    return coroutine


@pytest.fixture
def in_memory() -> App:
    return App("contract", config=app_config("in_memory", ""))


@pytest.fixture(autouse=True)
def none_waits() -> Iterator[None]:
    """Close the coroutines that nobody has awaited, of which Python would warn."""
    yield
    while MADE:
        MADE.pop().close()


def returning(last: object) -> Generator[Notify, None, object]:
    yield plain(1)
    return last


def failing() -> Iterator[Notify]:
    yield plain(1)
    raise RuntimeError("the catalogue is closed")


SHAPES: dict[str, tuple[Callable[[], object], object]] = {
    "a `Notify`": (lambda: plain(1), ["1"]),
    "a list or tuple": (lambda: [plain(1), plain(2)], ["1", "2"]),
    "a tuple": (lambda: (plain(1), plain(2)), ["1", "2"]),
    "lists in lists": (lambda: [[plain(1)], [plain(2)]], ["1", "2"]),
    "lists in a tuple": (lambda: ([plain(1)], [plain(2)]), ["1", "2"]),
    "lists and notifications": (lambda: [[plain(1)], plain(2)], ["1", "2"]),
    "`dict.values()`": (lambda: {"a": plain(1)}.values(), ["1"]),
    "`map`": (lambda: map(plain, [1, 2]), ["1", "2"]),
    "`filter`": (lambda: filter(None, [plain(1)]), ["1"]),
    "`itertools.chain`": (lambda: itertools.chain([plain(1)], [plain(2)]), ["1", "2"]),
    "an iterator": (lambda: iter([plain(1)]), ["1"]),
    "a `deque`": (lambda: deque([plain(1)]), ["1"]),
    "a generator": (lambda: (plain(a) for a in (1, 2)), ["1", "2"]),
    "a generator that returns a notification": (lambda: returning(plain(2)), ["1", "2"]),
    "a generator that returns a text": (lambda: returning("done"), "invalid_notification"),
    "an empty list": (list, []),
    "None": (lambda: None, []),
    "`Ack()`": (Ack, []),
    "a `Receipt`": (lambda: RECEIPT, []),
    "a list of them": (lambda: [RECEIPT, RECEIPT], []),
    "a dict": (lambda: {"a": plain(1)}, "invalid_notification"),
    "a dict of lists": (lambda: {"a": [plain(1)]}, "invalid_notification"),
    "a list of dicts": (lambda: [{"id": 1}], "invalid_notification"),
    "a set": (lambda: {"a": 1}.keys(), "invalid_notification"),
    "a text": (lambda: "done", "invalid_notification"),
    "a number": (lambda: 3, "invalid_notification"),
    "a truth value": (lambda: False, "invalid_notification"),
    "bytes": (lambda: b"x", "invalid_notification"),
    "a payload": (lambda: {"x": 1}, "invalid_notification"),
    "None in a list": (lambda: [plain(1), None], "invalid_notification"),
    "a number in a list": (lambda: [plain(1), 3], "invalid_notification"),
    "the class": (lambda: Notify, "invalid_notification"),
    "the class in a list": (lambda: [Notify], "invalid_notification"),
    "`Ack()` in a list": (lambda: [Ack()], "invalid_notification"),
    "`Retry()` in a list": (lambda: [Retry()], "invalid_notification"),
    "`Reject` in a tuple": (lambda: (Reject("x"), "why"), "invalid_notification"),
    "a function": (lambda: made, "invalid_notification"),
    "a coroutine": (later, "DeclarationError"),
    "a list of coroutines": (lambda: [later()], "DeclarationError"),
    "a task": (lambda: asyncio.ensure_future(made()), "DeclarationError"),
    "an exception": (lambda: ValueError("x"), "ValueError"),
    "an exception in a list": (lambda: [plain(1), ValueError("lost")], "ValueError"),
    "an iterator that fails": (failing, "RuntimeError"),
}


def published(t: Harness) -> list[str]:
    return [one.identifier["a"] for one in t.published if one.event_type == "plain"]


async def outcome(t: Harness, agent: Any) -> object:
    """Return what was published, or where the call failed its reason; of an exception its type."""
    await t.notify("mars", mars(), {})
    await t.settle()
    (settled,) = t.settled(agent)
    if settled.outcome == "acked":
        return published(t)
    assert not published(t)
    return settled.reason if settled.reason == "invalid_notification" else type(settled.error).__name__


@pytest.mark.parametrize("shape", SHAPES)
class TestWhateverIsReturned:
    async def test_by_an_async_function(self, app: App, url: str | None, shape: str) -> None:
        make, expected = SHAPES[shape]

        @app.agent("mars", retry=ONCE)
        async def derive(notification: Notification[Any]) -> Any:
            return make()

        async with harness(app, server=url) as t:
            assert await outcome(t, derive) == expected

    async def test_by_a_plain_function(self, in_memory: App, shape: str) -> None:
        make, expected = SHAPES[shape]
        if shape == "a task":
            pytest.skip("a thread has no event loop that could run a task")

        @in_memory.agent("mars", retry=ONCE)
        def derive(notification: Notification[Any]) -> Any:
            return make()

        async with harness(in_memory) as t:
            assert await outcome(t, derive) == expected

    async def test_for_a_batch(self, in_memory: App, shape: str) -> None:
        make, expected = SHAPES[shape]

        @in_memory.agent("mars", retry=ONCE)
        async def derive(batch: Batch[Any]) -> Any:
            return make()

        async with harness(in_memory) as t:
            assert await outcome(t, derive) == expected

    async def test_when_it_is_yielded(self, in_memory: App, shape: str) -> None:
        make, expected = SHAPES[shape]

        @in_memory.agent("mars", retry=ONCE)
        async def derive(notification: Notification[Any]) -> AsyncIterator[Any]:
            yield make()

        async with harness(in_memory) as t:
            assert await outcome(t, derive) == expected


def test_the_documentation_names_every_shape() -> None:
    text = (PROJECT / "docs/agents/publishing.md").read_text()
    table = text.partition("## What a function may return")[2].partition("\n## ")[0]
    assert [shape for shape in SHAPES if shape.removeprefix("a ").removeprefix("an ") not in table] == []


async def test_the_lazy_output_of_a_plain_function_is_computed_in_its_thread(in_memory: App) -> None:
    threads: list[bool] = []

    def derived(a: int) -> Notify:
        threads.append(threading.current_thread() is threading.main_thread())
        return plain(a)

    @in_memory.agent("mars")
    def derive(notification: Notification[Any]) -> Iterable[Notify]:
        return map(derived, [1, 2])

    async with harness(in_memory) as t:
        assert await outcome(t, derive) == ["1", "2"]
        assert threads == [False, False]


Wrapped = NewType("Wrapped", list[Notify])
Some = TypeVar("Some")


@pytest.mark.parametrize(
    ("annotation", "refused"),
    [
        *((each, "") for each in (Notify, None, Any, object, Some, Wrapped, Annotated[Notify, "x"])),
        *((each, "") for each in (list, list[Notify], list[Any], list[list[Notify]], tuple[Notify, ...], Receipt)),
        *((each, "") for each in (tuple[Notify, list[Notify]], Iterable[Notify], Iterator[Notify], map, filter)),
        *((each, "") for each in (Sequence[Notify | Wrapped], deque[Notify], Generator[Notify, int, None], Ack)),
        (Generator[Notify, None, Notify], ""),
        *((each, "") for each in (Notify | None, list[Notify] | Retry | Reject | None, list[Receipt], ValueError)),
        *((each, "") for each in (list[Receipt | BaseException], Notify | list[Notify])),
        (int, "int"),
        (bool | None, "bool"),
        (str, "str"),
        (dict[str, Notify], "dict[str, aviso_workers.aviso.notifications.Notify]"),
        (set[Notify], "set[aviso_workers.aviso.notifications.Notify]"),
        (list[int], "list[int]"),
        (list[list[int]] | None, "list[list[int]]"),
        (list[Notify | None], "list[aviso_workers.aviso.notifications.Notify | None]"),
        (Generator[Notify, int, str], "collections.abc.Generator[aviso_workers.aviso.notifications.Notify, int, str]"),
        (list[Retry], "list[aviso_workers.declare.verdicts.Retry]"),
        (type[Notify], "type[aviso_workers.aviso.notifications.Notify]"),
        (Literal["done"], "Literal['done']"),
        (asyncio.Task[Notify], "_asyncio.Task[aviso_workers.aviso.notifications.Notify]"),
        (AsyncIterator[Notify], "collections.abc.AsyncIterator[aviso_workers.aviso.notifications.Notify]"),
        (Callable[[], Notify], "collections.abc.Callable[[], aviso_workers.aviso.notifications.Notify]"),
    ],
)
def test_the_annotation_is_judged_by_the_same_rules(in_memory: App, annotation: Any, refused: str) -> None:
    async def derive(notification: Notification[Any]) -> Any: ...

    async def derive_each(notification: Notification[Any]) -> Any:
        yield

    derive.__annotations__["return"] = annotation
    derive_each.__annotations__["return"] = AsyncIterator[annotation]
    assert outputs.refused_return(in_memory.agent("mars")(derive)) == refused
    assert outputs.refused_return(in_memory.agent("mars")(derive_each)) == refused
    told = [found for found in in_memory.mistakes() if "its annotation says that it returns" in found]
    assert len(told) == (2 if refused else 0)
    in_memory.agents[0].dead_letter_functions.append(cast("Any", derive))
    told = [found for found in in_memory.mistakes() if "on_dead_letter: its annotation says" in found]
    assert len(told) == (1 if refused else 0)


LOST: dict[str, tuple[Callable[[], object], str]] = {
    "a notification": (lambda: plain(1), "returned a Notify, and nothing is published of it"),
    "a list": (lambda: [plain(1)], "returned a Notify, and nothing is published of it"),
    "lists in lists": (lambda: [[plain(1)]], "returned a Notify, and nothing is published of it"),
    "a dict": (lambda: {"a": plain(1)}, "returned a Notify, and nothing is published of it"),
    "values of a dict": (lambda: {"a": plain(1)}.values(), "returned a Notify, and nothing is published of it"),
    "a map": (lambda: map(plain, [1]), "returned a map, and nobody iterates over it"),
    "a generator": (lambda: (plain(a) for a in (1, 2)), "returned a generator, and nobody iterates over it"),
    "a coroutine": (later, "of which nothing has run: await it"),
    "a list of coroutines": (lambda: [later()], "of which nothing has run: await it"),
    "a retry": (Retry, "which only an agent may return"),
    "an exception": (lambda: ValueError("the catalogue is away"), "the catalogue is away"),
}
"""What a timer or a task must not return: nothing would become of it."""


@pytest.mark.parametrize("shape", LOST)
async def test_a_tick_that_returns_what_would_be_lost_has_failed(in_memory: App, shape: str) -> None:
    make, told = LOST[shape]

    @in_memory.every("5s", singleton=False)
    async def remind() -> object:
        return make()

    async with harness(in_memory) as t:
        await t.advance(5)
        (tick, *_) = t.ticks(remind)
        assert told in str(tick.error)


@pytest.mark.parametrize("shape", LOST)
async def test_a_task_that_returns_what_would_be_lost_has_failed(in_memory: App, shape: str) -> None:
    make, told = LOST[shape]

    @in_memory.task
    async def remind() -> Any:
        return make()

    with pytest.raises(Exception, match=told):
        async with harness(in_memory) as t:
            await t.advance(5)


@pytest.mark.parametrize("value", [None, RECEIPT, [RECEIPT], 3, "done", {"removed": 3}], ids=str)
async def test_a_tick_may_return_what_means_nothing(app: App, value: object) -> None:
    @app.every("5s", singleton=False)
    async def prune() -> object:
        return value

    async with harness(app) as t:
        await t.advance(5)
        assert [tick.error for tick in t.ticks(prune)][:1] == [None]
