"""Tables and counters in a plain `def`: methods that wait, and an error where nobody awaits the others."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import pytest

from aviso_workers import App, Counter, Delete, Notification, RetryPolicy, Table
from aviso_workers.errors import DeclarationError, OutcomeUnknownError
from aviso_workers.testing import harness
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

PROMPT = RetryPolicy(first=0.05, factor=1, attempts=3, jitter=0)


async def test_a_plain_function_reads_and_writes(app: App, url: str | None) -> None:
    counts, volume = app.table("counts", int, default=0, history=3), app.counter("volume")
    found: list[object] = []

    @app.agent("mars", retry=RetryPolicy(attempts=1))
    def index(notification: Notification[Any]) -> None:
        app.sync(counts.put, "od", 1)
        found.append(app.sync(counts.update, "od", lambda count: count + 1))
        found.append(app.sync(counts.get, "od"))
        found.append([change.value for change in app.sync(counts.history, "od")])
        app.sync(counts.put, "rd", 7)
        found.append(app.sync(counts.items))
        app.sync(counts.delete, "rd")
        found.append(app.sync(counts.update, "od", lambda _: Delete()))
        found.append(app.sync(counts.items))
        found.append(app.sync(volume.add, "od", 3))
        found.append(app.sync(volume.get, "od"))
        found.append(app.sync(volume.items))

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        assert t.outcomes(index) == ["acked"]
        assert found == [2, 2, [1, 2], {"od": 2, "rd": 7}, Delete(), {}, 3, 3, {"od": 3}]


async def test_an_update_from_a_thread_may_expire(app: App, url: str | None) -> None:
    counts = app.table("counts", int, default=0)

    @app.agent("mars", retry=RetryPolicy(attempts=1))
    def index(notification: Notification[Any]) -> None:
        app.sync(counts.put, "od", 1, ttl="1h")
        app.sync(counts.update, "od", lambda count: count + 1, ttl=1)
        app.sync(counts.update, "rd", lambda count: count + 1, once=notification, ttl="1h")

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        assert t.outcomes(index) == ["acked"]
        with anyio.fail_after(PATIENCE_SECONDS):
            while await counts.get("od"):
                await t.advance(0.2)
        assert await counts.get("rd") == 1


async def test_once_counts_once_from_a_thread(app: App, url: str | None) -> None:
    counts = app.table("counts", int, default=0)
    tries: list[int] = []

    @app.agent("mars", retry=PROMPT)
    def index(notification: Notification[Any]) -> None:
        app.sync(counts.update, "od", lambda count: count + 1, once=notification)
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        assert (t.outcomes(index), await counts.get("od")) == (["retried", "retried", "acked"], 1)


AWAITED: dict[str, Callable[[App, Table[int], Counter], object]] = {
    "get": lambda app, table, counter: table.get("od"),
    "put": lambda app, table, counter: table.put("od", 1),
    "update": lambda app, table, counter: table.update("od", lambda count: count + 1),
    "delete": lambda app, table, counter: table.delete("od"),
    "history": lambda app, table, counter: table.history("od"),
    "add": lambda app, table, counter: counter.add("od"),
    "get of a counter": lambda app, table, counter: counter.get("od"),
    "items": lambda app, table, counter: counter.items(),
    "notify": lambda app, table, counter: app.notify("plain", {"a": 1, "b": 2}),
    "notify_many": lambda app, table, counter: app.notify_many([]),
    "notify_together": lambda app, table, counter: app.notify_together([]),
    "open_windows": lambda app, table, counter: app.open_windows(app.agents[0]),
    "key_value": lambda app, table, counter: app.key_value("bucket"),
    "cancel": lambda app, table, counter: app.cancel("plain", "1"),
}


@pytest.mark.parametrize("call", AWAITED.values(), ids=AWAITED)
@pytest.mark.parametrize("run", [False, True], ids=["forgotten", "asyncio.run"])
async def test_what_has_to_be_awaited_fails_the_call_of_a_plain_function(
    app: App, url: str | None, call: Callable[[App, Table[int], Counter], Any], run: bool
) -> None:
    counts, volume = app.table("counts", int, default=0), app.counter("volume")

    @app.agent("mars", retry=RetryPolicy(attempts=1))
    def index(notification: Notification[Any]) -> None:
        made = call(app, counts, volume)
        if run:
            asyncio.run(made)

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        (dead_letter,) = t.dead_letters
        assert "has to be awaited in the event loop of the app, and none runs in this thread" in dead_letter.error


async def test_an_exit_of_what_is_called_from_a_thread_is_a_failure_of_this_call_alone(
    app: App, url: str | None
) -> None:
    counts = app.table("counts", int, default=0)

    async def leave() -> None:
        sys.exit(3)

    async def await_what_is_cancelled() -> None:
        awaited = asyncio.get_running_loop().create_future()
        awaited.cancel()
        await awaited

    @app.agent("mars", retry=RetryPolicy(attempts=1))
    def index(notification: Notification[Any]) -> None:
        if app.sync(counts.update, "calls", lambda calls: calls + 1) == 1:
            app.sync(leave)
        app.sync(await_what_is_cancelled)

    async with harness(app, server=url) as t:
        for step in ("1", "2"):
            await t.notify("mars", mars(step=step), {})
            await t.settle()
        assert await counts.get("calls") == 2
        assert [letter.error for letter in t.dead_letters] == [
            "SystemExit: 3",
            "RuntimeError: cancelled from within: something that it awaited was cancelled",
        ]


async def test_a_call_of_a_thread_goes_on_while_the_block_of_the_app_ends(app: App) -> None:
    begun, go = anyio.Event(), anyio.Event()

    async def twice() -> list[int]:
        begun.set()
        await go.wait()
        return [(await app.notify("plain", {"a": 1, "b": 2})).sequence for _ in range(2)]

    async with anyio.create_task_group() as tasks, app:
        found: list[list[int]] = []

        async def call() -> None:
            found.append(await anyio.to_thread.run_sync(app.sync, twice))

        tasks.start_soon(call)
        with anyio.fail_after(PATIENCE_SECONDS):
            await begun.wait()
        asyncio.get_running_loop().call_later(0.1, go.set)
    assert [len(sequences) for sequences in found] == [2]


async def test_a_loop_over_items_in_a_plain_function_is_told_what_waits(app: App, url: str | None) -> None:
    counts = app.table("counts", int, default=0)

    @app.agent("mars", retry=RetryPolicy(attempts=1))
    def index(notification: Notification[Any]) -> None:
        for _ in counts.items():  # type: ignore[attr-defined]
            pass

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        (dead_letter,) = t.dead_letters
        assert "call it by `app.sync(....items, ...)`" in dead_letter.error


async def test_the_error_names_the_method_that_waits(app: App) -> None:
    counts = app.table("counts", int)
    async with app:
        with pytest.raises(
            DeclarationError, match=r"Table\.get has to be awaited .*, as in a plain `def`: call it by `app\.sync\("
        ):
            _ = await anyio.to_thread.run_sync(counts.get, "od")
        with pytest.raises(DeclarationError, match=r"App\.notify_many has to be awaited .* or make it `async def`"):
            _ = await anyio.to_thread.run_sync(app.notify_many, [])


async def test_in_an_event_loop_the_form_that_waits_is_refused(app: App) -> None:
    counts, volume = app.table("counts", int), app.counter("volume")
    async with app:
        with pytest.raises(
            DeclarationError, match=r"app\.sync would stop the event loop that runs here: `await Table\.get"
        ):
            app.sync(counts.get, "od")
        with pytest.raises(DeclarationError, match=r"app\.sync would stop the event loop .*: `await Counter\.add"):
            app.sync(volume.add, "od")


async def test_in_another_event_loop_a_table_is_refused(app: App) -> None:
    counts, volume = app.table("counts", int), app.counter("volume")

    async def elsewhere() -> None:
        with pytest.raises(DeclarationError, match=r"table 'counts' is connected in another event loop: .* by `app"):
            await counts.get("od")
        with pytest.raises(DeclarationError, match=r"counter 'volume' is connected in another event loop: .* by `app"):
            await volume.get("od")
        assert await asyncio.to_thread(app.sync, counts.get, "od") is None

    async with app:
        await anyio.to_thread.run_sync(asyncio.run, elsewhere())


async def test_a_table_that_is_not_connected_is_refused_in_a_thread_as_well(app: App) -> None:
    counts = app.table("counts", int)
    with pytest.raises(DeclarationError, match="table 'counts' is not connected: declare it before `async with app:`"):
        await anyio.to_thread.run_sync(app.sync, counts.get, "od")


async def test_an_app_that_closes_waits_for_the_calls_of_threads(app: App) -> None:
    counts = app.table("counts", int, default=0)
    begun, found = anyio.Event(), list[int]()

    def change(count: int) -> int:
        begun.set()
        return count + 1

    async def update() -> None:
        found.append(await anyio.to_thread.run_sync(app.sync, counts.update, "od", change))

    async with anyio.create_task_group() as tasks, app:
        tasks.start_soon(update)
        with anyio.fail_after(PATIENCE_SECONDS):
            await begun.wait()
    assert found == [1]


async def test_an_app_that_is_cancelled_ends_the_calls_of_threads(app: App) -> None:
    counts, begun = app.table("counts", int, default=0), anyio.Event()
    failures: list[BaseException] = []

    async def update() -> None:
        try:
            await anyio.to_thread.run_sync(app.sync, counts.update, "od", lambda count: count + 1)
        except BaseException as error:
            failures.append(error)

    async def store(*_: object) -> None:
        begun.set()
        await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as scope:
            async with app:
                counts._store = store  # type: ignore[method-assign, assignment]
                tasks.start_soon(update)
                await begun.wait()
                scope.cancel()
    assert [type(error) for error in failures] == [OutcomeUnknownError]
    async with app:
        assert await counts.get("od") == 0
