"""Context variables that an author's code sets: they hold for its call, and not for the next one. On either backend."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

import pytest

from aviso_workers import App, Batch, Batching, Notification, Notify, RetryPolicy, Stream, Tick, Window, Windowing
from aviso_workers.testing import harness
from tests.contract.settings import mars

pytestmark = pytest.mark.anyio

TENANT: ContextVar[str] = ContextVar("tenant", default="public")
UNLIKE_ANY: ContextVar[object] = ContextVar("unlike any")
PROMPT = RetryPolicy(first=0.01, factor=1, attempts=3, jitter=0)


class UnlikeAny:
    """A value that cannot be compared, as an array of NumPy."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value is ambiguous")

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture
def seen() -> list[str]:
    """The tenant that each call found, in order."""
    return []


def enter(seen: list[str], tenant: object) -> None:
    seen.append(TENANT.get())
    UNLIKE_ANY.set(UnlikeAny())
    TENANT.set(str(tenant))


async def handle(app: App, url: str | None, *steps: int) -> None:
    async with harness(app, server=url) as t:
        for step in steps:
            await t.notify("mars", mars(step=step), {})
        await t.settle()


async def test_a_call_does_not_find_what_the_one_before_has_set(app: App, url: str | None, seen: list[str]) -> None:
    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        enter(seen, notification.identifier["step"])

    await handle(app, url, 1, 2, 3)
    assert seen == ["public"] * 3


async def test_nor_does_a_call_find_what_a_failed_attempt_has_set(app: App, url: str | None, seen: list[str]) -> None:
    @app.agent("mars", retry=PROMPT)
    async def index(notification: Notification[Any]) -> None:
        enter(seen, notification.identifier["step"])
        if len(seen) < 3:
            raise ValueError

    await handle(app, url, 1)
    assert seen == ["public"] * 3


async def test_a_plain_function_a_batch_a_stream_and_outputs_as_well(
    app: App, url: str | None, seen: list[str]
) -> None:
    @app.agent("mars")
    def plain(notification: Notification[Any]) -> None:
        enter(seen, "plain")

    @app.agent("mars", batch=Batching(size=1, within=0))
    async def batch(batch: Batch[Any]) -> None:
        enter(seen, "batch")

    @app.agent("mars")
    async def stream(stream: Stream[Any]) -> None:
        enter(seen, "stream")
        async for _ in stream:
            return

    @app.agent("mars", where={"step": [1, 2]})
    async def outputs(notification: Notification[Any]) -> AsyncIterator[Notify]:
        enter(seen, "outputs")
        yield Notify("mars", mars(step=int(notification.identifier["step"]) + 10))

    await handle(app, url, 1, 2)
    assert seen == ["public"] * len(seen)
    assert len(seen) >= 4 * 2


async def test_a_tick_and_a_window_as_well(app: App, url: str | None, seen: list[str]) -> None:
    @app.every("1s", singleton=False)
    async def tick(tick: Tick) -> None:
        enter(seen, "tick")

    hourly: Windowing[int, Any] = Windowing(
        size="1h", fold=lambda total, one: total + 1, initial=0, lateness="0s", idle="1s"
    )

    @app.agent("mars", window=hourly)
    async def sum_up(window: Window[int]) -> None:
        enter(seen, "window")

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        while not t.windows(sum_up):
            await t.advance(0.5)
        await t.advance(2)
    assert seen == ["public"] * len(seen)
    assert len(seen) >= 3


async def test_what_is_around_a_call_sets_holds_for_the_call(app: App, url: str | None, seen: list[str]) -> None:
    @app.around
    async def bind(notification: Notification[Any]) -> AsyncIterator[None]:
        seen.append(TENANT.get())
        token = TENANT.set(f"tenant {notification.identifier['step']}")
        yield
        TENANT.reset(token)

    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        seen.append(TENANT.get())
        TENANT.set("of the handler")

    await handle(app, url, 1, 2)
    assert seen == ["public", "tenant 1", "public", "tenant 2"]


async def test_what_the_program_has_set_is_seen(app: App, url: str | None, seen: list[str]) -> None:
    TENANT.set("of the program")

    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        enter(seen, notification.identifier["step"])

    await handle(app, url, 1, 2)
    assert seen == ["of the program"] * 2
