"""Task groups whose exceptions callers can catch."""

from __future__ import annotations

import anyio
import pytest

from aviso_workers.task_groups import task_group

pytestmark = pytest.mark.anyio


async def fail() -> None:
    try:
        raise KeyError("first")
    except KeyError as error:
        raise OSError("of a task") from error


async def test_the_exception_of_a_task_arrives_as_itself() -> None:
    async def run() -> None:
        async with task_group() as tasks:
            tasks.start_soon(fail)
            await anyio.sleep_forever()

    with pytest.raises(OSError, match="of a task") as caught:
        await run()
    assert isinstance(caught.value.__cause__, KeyError)


async def test_the_exception_of_an_inner_group_arrives_as_itself() -> None:
    with pytest.raises(OSError, match="of a task"):
        async with task_group(), anyio.create_task_group() as inner:
            inner.start_soon(fail)


async def test_the_exception_of_the_block_arrives_as_itself_and_ends_the_tasks() -> None:
    async def run() -> None:
        async with task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            raise ValueError("of the block")

    with pytest.raises(ValueError, match="of the block"):
        await run()


async def test_what_is_cancelled_raises_nothing() -> None:
    with anyio.CancelScope() as scope:
        async with task_group():
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
