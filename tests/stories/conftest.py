from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from aviso_workers import App, Notify
from tests.contract.settings import app_config, mars
from tests.stories.processes import Record, Server, Worker

RunWorker = Callable[..., Worker]
Publish = Callable[..., Any]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "streams") as server:
        yield server


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path / "record")


@pytest.fixture
def run_worker(server: Server, record: Record, tmp_path: Path) -> Iterator[RunWorker]:
    """`run_worker(app="lanes", settings={...})`: a worker process on the server, or on another `url`."""
    with ExitStack() as running:

        def run_worker(**over: Any) -> Worker:
            return running.enter_context(Worker(**{"url": server.url, "record": record, "directory": tmp_path, **over}))

        yield run_worker


@pytest.fixture
def publish(server: Server) -> Publish:
    """`await publish(range(5), seconds=0.1)`: notifications of these numbers, and what their handler is to do."""

    async def publish(numbers: Any, *, url: str = server.url, expver: str = "0001", **deed: Any) -> None:
        async with App("publisher", config=app_config("jetstream", url)) as app:
            await app.notify_many(
                Notify("mars", mars(step=number, expver=expver), {"n": number, **deed}) for number in numbers
            )

    return publish
