"""Two workers count in windows, and both are killed in the middle, so that one was who closes windows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from aviso_workers import App, Notify
from aviso_workers.state import own_streams
from tests.contract.settings import app_config, mars
from tests.stories.agents import LATENESS_SECONDS, WINDOW_SECONDS
from tests.stories.processes import Record, Server, Worker, until

pytestmark = pytest.mark.anyio

KEYS = ("0001", "0002")
STARTS = range(0, 1000, WINDOW_SECONDS)
NUMBERS = range(STARTS.stop + LATENESS_SECONDS + 1)
"""The last one closes the last window."""


@pytest.mark.slow
async def test_every_sum_is_exact_and_published_once_although_workers_are_killed(
    server: Server, run_worker: Callable[..., Worker], record: Record
) -> None:
    workers = [run_worker(app="windows") for _ in range(2)]
    for worker in workers:
        await worker.ready()
    async with App("publisher", config=app_config("jetstream", server.url)) as publisher:
        await publisher.notify_many(
            Notify("mars", mars(step=number, expver=key), {"n": number}) for number in NUMBERS for key in KEYS
        )
    total = len(KEYS) * len(NUMBERS)

    def are_counted(count: int) -> bool:
        return len(record.of("counted")) >= count

    for worker, counted in zip(workers[:2], (total // 5, total // 2), strict=True):
        await until(partial(are_counted, counted), what=lambda: workers[-1].log)
        worker.kill()
        workers.append(run_worker(app="windows"))

    await until(
        lambda: set(record.numbers("published")) == set(STARTS) and min(record.numbers("published").values()) > 1,
        what=lambda: f"{record.numbers('published')}\n{workers[-1].log}",
    )
    async with App("reader", config=app_config("jetstream", server.url)) as reader:
        found = [one async for one in reader.replay("plain")]
        streams = await reader.session.admin.stream_names()
    assert sorted((one.identifier["b"], int(one.identifier["a"]), one.payload) for one in found) == [
        (key, start, sum(range(start, start + WINDOW_SECONDS))) for key in KEYS for start in STARTS
    ]
    assert not any(name.startswith(own_streams.DEAD_LETTERS) for name in streams), "something was late"
    assert len(record.of("counted")) > total, "nothing was counted anew, so that nothing was tried"
