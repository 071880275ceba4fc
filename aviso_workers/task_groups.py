"""Task groups whose exceptions callers can catch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

T = TypeVar("T")
AT_ONCE = 32
"""Requests that are under way at the same time, unless the caller wants fewer."""


@asynccontextmanager
async def task_group() -> AsyncIterator[TaskGroup]:
    """Run a task group that raises the first exception of its tasks or of its block as itself, and not in a group."""
    error: BaseException | None = None
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        error = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
    if error is not None:
        raise error  # outside of `except`, so that it keeps its own context


async def asked_of_each(
    names: Iterable[str], ask: Callable[[str], Awaitable[T]], *, at_once: int = AT_ONCE
) -> dict[str, T]:
    """Return what `ask` answers for each name, in the order of the names; so many are asked at once. Raises the first
    error of them.
    """
    answers: dict[str, T] = {}
    names = list(names)
    limiter = anyio.CapacityLimiter(at_once)

    async def put(name: str) -> None:
        async with limiter:
            answers[name] = await ask(name)

    async with task_group() as asking:
        for name in names:
            asking.start_soon(put, name)
    return {name: answers[name] for name in names}
