"""Task groups whose exceptions callers can catch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

__all__ = ["task_group"]


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
