"""Writes of many callers, made as one request."""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import pytest

from aviso_workers.engine.grouped_writes import GroupedWrites
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


class Bucket:
    """Answers a request when it is told to."""

    def __init__(self) -> None:
        self.requests: list[dict[str, bytes | None]] = []
        self.answer = anyio.Event()
        self.asked = anyio.Event()

    async def write(self, values: Mapping[str, bytes | None]) -> bool:
        self.requests.append(dict(values))
        self.asked.set()
        await self.answer.wait()
        return b"refused" not in values.values()


async def test_those_who_ask_at_once_share_a_request() -> None:
    bucket, stored = Bucket(), []
    writes = GroupedWrites(bucket.write)

    async def write(number: int) -> None:
        stored.append(await writes.write(f"key{number}", b"1"))

    async with anyio.create_task_group() as tasks:
        for number in range(50):
            tasks.start_soon(write, number)
        bucket.answer.set()

    assert bucket.requests == [{f"key{number}": b"1" for number in range(50)}]
    assert stored == [True] * 50


async def test_those_who_ask_while_a_request_is_under_way_share_the_next_one() -> None:
    bucket, stored = Bucket(), {}
    writes = GroupedWrites(bucket.write)

    async def write(key: str, value: bytes | None) -> None:
        stored[key] = await writes.write(key, value)

    with anyio.fail_after(PATIENCE_SECONDS):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write, "first", b"1")
            await bucket.asked.wait()
            tasks.start_soon(write, "second", b"refused")
            tasks.start_soon(write, "third", None)
            await anyio.wait_all_tasks_blocked()
            bucket.answer.set()

    assert bucket.requests == [{"first": b"1"}, {"second": b"refused", "third": None}]
    assert stored == {"first": True, "second": False, "third": False}


@pytest.mark.parametrize("under_way", [True, False], ids=["while it writes", "while it waits for its turn"])
async def test_nobody_waits_for_one_who_was_cancelled(under_way: bool) -> None:
    """Who is first of a group writes for the others. They are told that nothing is known to be stored."""
    bucket, stored = Bucket(), {}
    writes = GroupedWrites(bucket.write)

    async def write(key: str, scope: anyio.CancelScope) -> None:
        with scope:
            stored[key] = await writes.write(key, b"1")

    with anyio.fail_after(PATIENCE_SECONDS):
        async with anyio.create_task_group() as tasks:
            first, leader = anyio.CancelScope(), anyio.CancelScope()
            if not under_way:
                tasks.start_soon(write, "earlier", first)
                await bucket.asked.wait()
            tasks.start_soon(write, "leader", leader)
            tasks.start_soon(write, "other", anyio.CancelScope())
            await anyio.wait_all_tasks_blocked()
            leader.cancel()
            await anyio.wait_all_tasks_blocked()
            assert stored == {"other": False}
            bucket.answer.set()
            tasks.start_soon(write, "later", anyio.CancelScope())

    assert stored["later"]
