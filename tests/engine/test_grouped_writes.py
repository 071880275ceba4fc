"""Writes of many callers, made as one request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import anyio
import pytest

from aviso_workers.clocks import LoopClock
from aviso_workers.engine.attempts import GroupedWrites
from aviso_workers.engine.shields import Shield
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


class Callers:
    """Those who have something written, and what they were told of it."""

    def __init__(self, bucket: Bucket) -> None:
        self._writes = GroupedWrites(bucket.write, shield=Shield(LoopClock()))
        self.told: dict[str, bool] = {}

    async def write(self, key: str, value: bytes | None = b"1") -> None:
        await self._writes.write(key, value, then=lambda stored: self.told.update({key: stored}))


async def test_those_who_ask_at_once_share_a_request() -> None:
    bucket = Bucket()
    callers, keys = Callers(bucket), [f"key{number}" for number in range(50)]
    bucket.answer.set()

    async with anyio.create_task_group() as tasks:
        for key in keys:
            tasks.start_soon(callers.write, key)

    assert bucket.requests == [dict.fromkeys(keys, b"1")]
    assert callers.told == dict.fromkeys(keys, True)


async def test_those_who_ask_while_a_request_is_under_way_go_on_and_share_the_next_one() -> None:
    bucket = Bucket()
    callers = Callers(bucket)

    with anyio.fail_after(PATIENCE_SECONDS):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(callers.write, "first")
            await bucket.asked.wait()
            await callers.write("second", b"refused")
            await callers.write("third", None)
            assert callers.told == {}, "nobody is told before it is known"
            bucket.answer.set()

    assert bucket.requests == [{"first": b"1"}, {"second": b"refused", "third": None}]
    assert callers.told == {"first": True, "second": False, "third": False}


async def test_who_asks_while_too_much_waits_waits_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aviso_workers.engine.attempts.MAX_WAITING", 2)
    bucket = Bucket()
    callers = Callers(bucket)

    with anyio.fail_after(PATIENCE_SECONDS):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(callers.write, "first")
            await bucket.asked.wait()
            await callers.write("second")
            third = asyncio.create_task(callers.write("third"))
            await anyio.wait_all_tasks_blocked()
            assert not third.done()
            bucket.answer.set()
            await third

    assert bucket.requests == [{"first": b"1"}, {"second": b"1", "third": b"1"}]
    assert callers.told == dict.fromkeys(["first", "second", "third"], True)


@pytest.mark.parametrize("under_way", [True, False], ids=["while it writes", "before it writes"])
async def test_everybody_is_told_although_the_one_who_writes_is_cancelled(under_way: bool) -> None:
    """As by an author's `asyncio.timeout`, which no shield keeps out. Nothing is known to be stored then."""
    bucket = Bucket()
    callers = Callers(bucket)

    with anyio.fail_after(PATIENCE_SECONDS):
        writing = asyncio.create_task(callers.write("first"))
        if under_way:
            await bucket.asked.wait()
            await callers.write("second")
        else:
            await asyncio.sleep(0)
            await callers.write("second")
        writing.cancel()
        await asyncio.wait([writing])
        assert callers.told == {"first": False, "second": False}

        bucket.answer.set()
        await callers.write("later")
    assert callers.told["later"]
