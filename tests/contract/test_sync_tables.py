"""Tables and counters in a plain `def`: methods that wait, and an error where nobody awaits the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import pytest

from aviso_workers import DELETE, App, Counter, Notification, RetryPolicy, Table
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
        counts.put_sync("od", 1)
        found.append(counts.update_sync("od", lambda count: count + 1))
        found.append(counts.get_sync("od"))
        found.append([change.value for change in counts.history_sync("od")])
        counts.put_sync("rd", 7)
        found.append(counts.items_sync())
        counts.delete_sync("rd")
        found.append(counts.update_sync("od", lambda _: DELETE))
        found.append(counts.items_sync())
        found.append(volume.add_sync("od", 3))
        found.append(volume.get_sync("od"))
        found.append(volume.items_sync())

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        assert t.outcomes(index) == ["acked"]
        assert found == [2, 2, [1, 2], [("od", 2), ("rd", 7)], DELETE, [], 3, 3, {"od": 3}]


async def test_an_update_from_a_thread_may_expire(app: App, url: str | None) -> None:
    counts = app.table("counts", int, default=0)

    @app.agent("mars", retry=RetryPolicy(attempts=1))
    def index(notification: Notification[Any]) -> None:
        counts.put_sync("od", 1, ttl="1h")
        counts.update_sync("od", lambda count: count + 1, ttl=1)
        counts.update_sync("rd", lambda count: count + 1, once=notification, ttl="1h")

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
        counts.update_sync("od", lambda count: count + 1, once=notification)
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
        assert "call items_sync" in dead_letter.error


async def test_the_error_names_the_method_that_waits(app: App) -> None:
    counts = app.table("counts", int)
    async with app:
        with pytest.raises(
            DeclarationError, match=r"Table\.get has to be awaited .*, as in a plain `def`: call get_sync"
        ):
            _ = await anyio.to_thread.run_sync(counts.get, "od")
        with pytest.raises(DeclarationError, match=r"App\.notify_many has to be awaited .*: make it `async def`"):
            _ = await anyio.to_thread.run_sync(app.notify_many, [])


async def test_in_an_event_loop_the_form_that_waits_is_refused(app: App) -> None:
    counts, volume = app.table("counts", int), app.counter("volume")
    async with app:
        with pytest.raises(
            DeclarationError, match=r"get_sync would stop the event loop that runs here: `await table\.get"
        ):
            counts.get_sync("od")
        with pytest.raises(DeclarationError, match=r"add_sync would stop the event loop .*: `await counter.add"):
            volume.add_sync("od")


async def test_in_another_event_loop_a_table_is_refused(app: App) -> None:
    counts, volume = app.table("counts", int), app.counter("volume")

    async def elsewhere() -> None:
        with pytest.raises(DeclarationError, match=r"table 'counts' is connected in another event loop: .* _sync"):
            await counts.get("od")
        with pytest.raises(DeclarationError, match=r"counter 'volume' is connected in another event loop: .* _sync"):
            await volume.get("od")
        assert await asyncio.to_thread(counts.get_sync, "od") is None

    async with app:
        await anyio.to_thread.run_sync(asyncio.run, elsewhere())


async def test_a_table_that_is_not_connected_is_refused_in_a_thread_as_well(app: App) -> None:
    counts = app.table("counts", int)
    with pytest.raises(DeclarationError, match="table 'counts' is not connected: declare it before `async with app:`"):
        await anyio.to_thread.run_sync(counts.get_sync, "od")


async def test_an_app_that_closes_waits_for_the_calls_of_threads(app: App) -> None:
    counts = app.table("counts", int, default=0)
    begun, found = anyio.Event(), list[int]()

    def change(count: int) -> int:
        begun.set()
        return count + 1

    async def update() -> None:
        found.append(await anyio.to_thread.run_sync(counts.update_sync, "od", change))

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
            await anyio.to_thread.run_sync(counts.update_sync, "od", lambda count: count + 1)
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
