"""Calls without an `await`, of which nothing would run: `check`, a worker's start and the harness refuse them."""

# mypy: disable-error-code="unused-coroutine"
from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aviso_workers import App, Notification
from aviso_workers.errors import ConfigError
from aviso_workers.testing import harness

app = App("shop")
app.event_type("order", key=["id"])
counts = app.table("counts", int, default=0)
volume = app.counter("volume")


async def save(number: int) -> None: ...


def background(number: int) -> None: ...


@app.agent("order")
async def every_call_is_awaited(order: Notification) -> None:
    await counts.put("all", 1)
    saving = asyncio.create_task(save(2))
    written = save(1)
    await written
    await saving
    background(3)
    counts.items()  # an async generator, which says nothing about what is to be done

    async def later() -> None:
        await save(1)

    await later()
    print("done")


def told(function: Any) -> list[str]:
    """Return what is told of a function, without its lines."""
    other = App("other")
    other.event_type("order", key=["id"])
    other.agent("order", name="made")(function)
    return [mistake.partition(": line ")[2].partition(": ")[2] for mistake in other.mistakes()]


def test_what_is_awaited_is_no_mistake() -> None:
    assert app.mistakes() == []


def test_a_table_a_counter_and_a_notification() -> None:
    async def index(order: Notification) -> None:
        counts.put("all", 1)
        if order.payload:
            volume.add("all")
        app.notify("order", {"id": 1})

    assert told(index) == [
        "nothing of `counts.put(...)` runs, because it is not awaited: `await counts.put(...)`",
        "nothing of `volume.add(...)` runs, because it is not awaited: `await volume.add(...)`",
        "nothing of `app.notify(...)` runs, because it is not awaited: `await app.notify(...)`",
    ]


def test_the_authors_own_functions() -> None:
    async def write(number: int) -> None: ...

    async def index(order: Notification) -> None:
        save(1)
        write(2)
        asyncio.sleep(1)
        every_call_is_awaited(order)

    assert [mistake.split("`")[1] for mistake in told(index)] == [
        "save(...)",
        "write(...)",
        "asyncio.sleep(...)",
        "every_call_is_awaited(...)",
    ]


def test_a_plain_function_is_told_what_waits() -> None:
    def index(order: Notification) -> None:
        counts.put("all", 1)
        save(1)

    assert told(index) == [
        "nothing of `counts.put(...)` runs, because it is not awaited: `counts.put_sync(...)`",
        "nothing of `save(...)` runs, because it is not awaited: make the function `async def`, and `await save(...)`",
    ]


def test_names_that_are_local_are_left_alone() -> None:
    async def index(order: Notification, save: Any = background) -> None:
        counts = {"put": background}
        save(1)
        counts["put"](1)

    assert not [mistake for mistake in told(index) if "awaited" in mistake]


def test_timers_and_tasks() -> None:
    other = App("other")
    other.event_type("order", key=["id"])

    @other.every("5m")
    async def tick() -> None:
        save(1)

    @other.task
    async def watch() -> None:
        save(1)

    timer, task = other.mistakes()
    assert timer.startswith("timer 'tick': line ")
    assert task.startswith("task 'watch': line ")


@pytest.mark.anyio
async def test_the_harness_refuses_it_with_its_line() -> None:
    other = App("other")
    other.event_type("order", key=["id"])

    async def index(order: Notification) -> None:
        save(1)

    other.agent("order")(index)
    line = index.__code__.co_firstlineno + 1
    with pytest.raises(ConfigError, match=rf"agent 'index': line {line}: nothing of `save\(...\)` runs"):
        async with harness(other):
            pass
