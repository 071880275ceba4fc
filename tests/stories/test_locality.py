"""Workers near the data and far from it: the far one gets what the near ones do not ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.stories.processes import Record, Worker, until

pytestmark = pytest.mark.anyio

FAR = {"workers.priority": 1}


@pytest.mark.slow
async def test_a_far_worker_gets_what_near_ones_are_too_busy_for_and_everything_when_there_is_none(
    record: Record, run_worker: Callable[..., Worker], publish: Callable[..., Any]
) -> None:
    async def handled(count: int) -> list[int]:
        """Who has begun what was begun, in order, once all is done."""
        await until(lambda: len(record.of("done")) >= count, what=lambda: record.acts)
        return [act.pid for act in record.of("begun")]

    far = run_worker(settings=FAR)
    await far.ready()
    near = run_worker()
    await near.ready()

    for number in range(20):
        await publish([number])
        assert (await handled(number + 1))[-1] == near.pid

    await publish(range(20, 60), seconds=0.3)
    assert set((await handled(60))[20:]) == {near.pid, far.pid}, "the near one has room for some of them"

    near.terminate()
    assert await near.ended() == 0
    await publish(range(60, 65))
    assert set((await handled(65))[60:]) == {far.pid}

    returned = run_worker()
    await returned.ready()
    for number in range(65, 70):
        await publish([number])
        assert (await handled(number + 1))[-1] == returned.pid
