"""What tables and counters promise, on either backend."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import timedelta
from functools import partial
from typing import Any

import anyio
import msgspec
import pytest

from aviso_workers import App, Change, Delete, Table
from aviso_workers.aviso.literals import AnyDuration
from aviso_workers.errors import DeclarationError, InvalidKeyError, NotFoundError, RefusedError, UndecodableError
from aviso_workers.testing import harness
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

KEYS = ["od", "größe", "a b", "a.b", ".", "..", "a..b", ".a.", "*", ">", "a/b=c", "=41", "$KV.x", "\n", "🌍", "k" * 512]


class Seen(msgspec.Struct, frozen=True):
    count: int
    steps: list[int] = []


@pytest.fixture(params=[False, True], ids=["", "cached"])
async def counts(app: App, request: pytest.FixtureRequest) -> AsyncGenerator[Table[int], None]:
    counts = app.table("counts", int, default=0, cached=request.param)
    async with app:
        yield counts


async def reads(table: Table[Any], key: str, value: object) -> None:
    """Wait until the table tells so."""
    found = await table.get(key)
    with anyio.move_on_after(PATIENCE_SECONDS):
        while found != value:
            await anyio.sleep(0.01)
            found = await table.get(key)
    assert found == value


async def test_a_value_is_read_as_it_was_put(app: App) -> None:
    seen = app.table("seen", Seen)
    async with app:
        await seen.put("od", Seen(2, [1, 2]))
        assert await seen.get("od") == Seen(2, [1, 2])
        assert await seen.get("rd") is None


async def test_a_key_without_a_value_reads_as_the_default(counts: Table[int]) -> None:
    assert await counts.get("od") == 0
    await counts.put("od", 3)
    assert await counts.get("od") == 3
    await counts.delete("od")
    assert await counts.get("od") == 0


async def test_a_default_belongs_to_nobody(app: App) -> None:
    steps = app.table("steps", list[int], default=[])
    async with app:
        (await steps.get("od")).append(1)
        assert await steps.get("od") == []


@pytest.mark.parametrize("key", KEYS)
async def test_any_text_is_a_key(counts: Table[int], key: str) -> None:
    await counts.put(key, 1)
    await counts.put("other", 2)
    assert await counts.get(key) == 1
    assert await counts.items() == {key: 1, "other": 2}
    await counts.delete(key)
    assert await counts.get(key) == 0


@pytest.mark.parametrize("key", ["", "k" * 513, "ö" * 200, "\ud800"])
async def test_what_is_no_key_is_refused(counts: Table[int], key: str) -> None:
    with pytest.raises(InvalidKeyError, match="key "):
        await counts.put(key, 1)


async def test_an_update_stores_what_the_function_makes_of_the_value(counts: Table[int]) -> None:
    assert await counts.update("od", lambda count: count + 1) == 1
    assert await counts.update("od", lambda count: count + 1) == 2
    assert await counts.get("od") == 2


async def test_an_update_deletes_the_key_where_its_function_says_so(counts: Table[int]) -> None:
    await counts.put("od", 1)
    assert await counts.update("od", lambda count: Delete()) == Delete()
    assert await counts.get("od") == 0
    assert await counts.update("od", lambda count: Delete()) == Delete()
    assert await counts.update("od", lambda count: count + 5) == 5


async def test_an_update_whose_function_forgets_to_return_changes_nothing(app: App) -> None:
    steps = app.table("steps", list[int], default=[])

    async def add(found: list[int]) -> list[int]:
        return [*found, 2]

    async with app:
        await steps.put("od", [1])
        with pytest.raises(DeclarationError, match=r"the function of update returned None.* or Delete\(\)"):
            await steps.update("od", lambda found: found.append(2))  # type: ignore[arg-type, return-value]
        with pytest.raises(DeclarationError, match="table 'steps': the function of update is async"):
            await steps.update("od", add)  # type: ignore[arg-type]
        assert await steps.get("od") == [1]


async def test_no_update_is_lost_among_many(counts: Table[int]) -> None:
    async def add() -> None:
        for _ in range(10):
            await counts.update("od", lambda count: count + 1)

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(add)
    assert await counts.get("od") == 80


async def test_updates_of_one_process_take_turns_and_are_each_made_once(counts: Table[int]) -> None:
    made = 0

    def one_more(count: int) -> int:
        nonlocal made
        made += 1
        return count + 1

    async with anyio.create_task_group() as updating:
        for _ in range(32):
            updating.start_soon(counts.update, "od", one_more)
    assert made == 32
    assert await counts.get("od") == 32


async def test_an_update_that_somebody_else_was_faster_than_is_made_again(counts: Table[int], app: App) -> None:
    bucket = await app.key_value("contract__table__counts")
    await counts.put("od", 1)
    await bucket.put("od", b"10")
    assert await counts.update("od", lambda count: count + 1) == 11


async def test_a_table_is_shared_by_apps_of_the_same_name(counts: Table[int], app: App, kind: str) -> None:
    if kind == "in_memory":
        pytest.skip("every app in memory has a backend of its own")
    other = App("contract", config=app.config)
    theirs = other.table("counts", int, default=0, cached=True)
    async with other:
        await theirs.put("od", 4)
        await reads(counts, "od", 4)
        await counts.update("od", lambda count: count + 1)
        await reads(theirs, "od", 5)
        await counts.delete("od")
        await reads(theirs, "od", 0)


async def test_items_are_those_that_have_a_value(counts: Table[int]) -> None:
    for key, value in (("a", 1), ("b", 2), ("c", 3), ("a", 4)):
        await counts.put(key, value)
    await counts.delete("c")
    assert list((await counts.items()).items()) == [("b", 2), ("a", 4)]


async def test_the_history_of_a_key(app: App) -> None:
    counts = app.table("counts", int, history=3)
    async with app:
        for value in range(5):
            await counts.put("od", value)
        history = await counts.history("od")
        assert [change.value for change in history] == [2, 3, 4]
        assert history[0].revision < history[1].revision
        assert history[0].time <= history[1].time
        assert await counts.history("rd") == []


async def test_a_watch_tells_what_there_is_and_what_becomes_of_it(counts: Table[int]) -> None:
    await counts.put("od", 1)
    async with aclosing(counts.watch()) as changes:
        next_change = partial(anext, changes)
        assert told(await next_change()) == ("od", 1)
        await counts.put("rd", 2)
        assert told(await next_change()) == ("rd", 2)
        await counts.delete("od")
        assert told(await next_change()) == ("od", None)
    async with aclosing(counts.watch("rd")) as changes:
        assert told(await anext(changes)) == ("rd", 2)


async def test_a_watch_ends_with_its_table_and_goes_on_in_no_other(app: App, counts: Table[int]) -> None:
    for number in range(5):
        await counts.put("od", number)
    async with aclosing(counts.watch()) as changes:
        assert told(await anext(changes)) == ("od", 4)
        await app.session.admin.delete_stream(f"KV_{app.name}__table__counts")
        await app.session.backend.key_value(f"{app.name}__table__counts")
        await counts.put("rd", 1)
        with anyio.fail_after(PATIENCE_SECONDS), pytest.raises(NotFoundError, match="deleted and recreated"):
            await anext(changes)


def told(change: Change[int]) -> tuple[str, int | None]:
    return change.key, change.value


async def test_a_value_is_forgotten_after_its_ttl(counts: Table[int], elapse: Callable[..., Any], kind: str) -> None:
    if kind == "in_memory":
        pytest.skip("an app in memory lives in real time, which test_testing moves")
    await counts.put("od", 1, ttl=1)
    assert await counts.get("od") == 1
    await elapse(1)
    await reads(counts, "od", 0)


@pytest.mark.parametrize("cached", [False, True])
async def test_an_update_keeps_when_a_value_expires(app: App, url: str | None, cached: bool) -> None:
    counts = app.table("counts", int, default=0, cached=cached)
    async with harness(app, server=url) as t:
        await counts.put("od", 1, ttl=2)
        await t.advance(0.8)
        for _ in range(2):
            await counts.update("od", lambda count: count + 1)
        assert await counts.get("od") == 3
        await t.advance(1.3)
        await reads(counts, "od", 0)


@pytest.mark.parametrize("ttl", [1, "1s", timedelta(seconds=1)], ids=str)
async def test_an_update_with_a_ttl_begins_its_time_anew(app: App, url: str | None, ttl: AnyDuration) -> None:
    counts = app.table("counts", int, default=0)
    async with harness(app, server=url) as t:
        await counts.put("od", 1, ttl="1h")
        await counts.put("rd", 1, ttl=ttl)
        await counts.update("od", lambda count: count + 1, ttl=ttl)
        await counts.update("rd", lambda count: count + 1, ttl=3600)
        await t.advance(1.2)
        await reads(counts, "od", 0)
        assert await counts.get("rd") == 2


async def test_a_ttl_that_is_no_duration_is_refused(app: App) -> None:
    counts = app.table("counts", int, default=0)
    async with app:
        for ttl in ("soon", True, float("nan")):
            with pytest.raises(DeclarationError, match="table 'counts': ttl: "):
                await counts.put("od", 1, ttl=ttl)
        with pytest.raises(RefusedError, match=r"ttl must be 1 s or more, found 0\.5"):
            await counts.put("od", 1, ttl=timedelta(milliseconds=500))


async def test_a_table_with_a_history_has_no_ttl(app: App) -> None:
    counts = app.table("counts", int, history=2)
    async with app:
        with pytest.raises(RefusedError, match="knows no ttl"):
            await counts.put("od", 1, ttl=1)


async def test_a_value_of_another_type_is_not_stored(counts: Table[int]) -> None:
    with pytest.raises(msgspec.ValidationError, match="table 'counts': 'many' does not fit: Expected `int`, got `str`"):
        await counts.put("od", "many")  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match="None is not a value: delete the key instead"):
        await counts.put("od", None)  # type: ignore[arg-type]
    assert await counts.get("od") == 0


async def test_delete_is_never_stored_as_a_value(app: App) -> None:
    texts, values = app.table("texts", str), app.table("values", Any)
    async with app:
        for table in (texts, values):
            with pytest.raises(DeclarationError, match=r"`await table\.delete\(key\)` instead"):
                await table.put("od", Delete())  # type: ignore[arg-type]
            with pytest.raises(TypeError, match=f"table {table.name!r}: "):
                await table.put("od", {"a": [Delete()]})  # type: ignore[arg-type]
            assert await table.get("od") is None


@pytest.mark.parametrize("key", [5, None, b"od", ("od", 1)])
async def test_a_key_is_a_text(app: App, key: Any) -> None:
    counts, volume = app.table("counts", int), app.counter("volume")
    async with app:
        with pytest.raises(InvalidKeyError, match="it must be a text, found"):
            await counts.put(key, 1)
        with pytest.raises(InvalidKeyError, match="it must be a text, found"):
            await counts.get(key)
        with pytest.raises(InvalidKeyError, match="it must be a text, found"):
            await volume.add(key)


async def test_once_takes_a_notification(counts: Table[int]) -> None:
    with pytest.raises(DeclarationError, match="the notification that an agent handles now, found 'mars@1'"):
        await counts.update("od", lambda count: count + 1, once="mars@1")  # type: ignore[call-overload]


async def test_what_does_not_fit_is_told_with_its_key(app: App) -> None:
    counts = app.table("counts", int)
    async with app:
        await (await app.key_value("contract__table__counts")).put("a=20b", b'"many"')
        with pytest.raises(UndecodableError, match=r"table 'counts', key 'a b': what is stored does not fit"):
            await counts.get("a b")


async def test_a_table_needs_a_connected_app(app: App) -> None:
    counts = app.table("counts", int)
    with pytest.raises(DeclarationError, match="table 'counts' is not connected: declare it before `async with app:`"):
        await counts.get("od")
    async with app:
        await counts.get("od")
        other = App("other", config=app.config)
        other.include(app)
        with pytest.raises(DeclarationError, match="table 'counts' is in use by another app"):
            async with other:
                pytest.fail("it connected")
        await counts.get("od")
    async with app:
        await counts.get("od")


async def test_a_counter_adds_up(app: App) -> None:
    sizes, other = app.counter("sizes"), app.counter("other")
    async with app:
        assert await sizes.get("od") == 0
        assert [await sizes.add("od", amount) for amount in (5, -7, 0)] == [5, -2, -2]
        assert await sizes.add("größe") == 1
        await other.add("od", 100)
        assert await sizes.items() == {"od": -2, "größe": 1}
        assert await sizes.get("od") == -2


async def test_a_repeat_of_a_message_id_counts_once(app: App) -> None:
    sizes = app.counter("sizes")
    async with app:
        assert [await sizes.add("od", 5, message_id="mars@1") for _ in range(3)] == [5, 5, 5]
        assert await sizes.add("rd", 5, message_id="mars@1") == 5
        assert await sizes.add("od", 5, message_id="mars@2") == 10


@pytest.mark.parametrize("amount", [True, 1.5, "2", None])
async def test_a_counter_adds_whole_numbers_only(app: App, amount: Any) -> None:
    volume = app.counter("volume")
    async with app:
        with pytest.raises(DeclarationError, match="counter 'volume': the amount must be a whole number, found"):
            await volume.add("od", amount)
        assert await volume.get("od") == 0
