"""A worker publishes and dies before it has acknowledged what that came from; another one does it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aviso_workers import App
from tests.contract.settings import app_config
from tests.stories.processes import Record, Server, Worker, until

pytestmark = pytest.mark.anyio


async def test_what_a_killed_worker_has_published_is_stored_once(
    server: Server, run_worker: Callable[..., Worker], publish: Callable[..., Any], record: Record
) -> None:
    first = run_worker(app="outputs")
    await publish([7], seconds=1.0)
    await until(lambda: record.of("published"), what=lambda: first.log)
    first.kill()
    assert not record.of("done")

    second = run_worker(app="outputs")
    await until(lambda: record.of("done"), what=lambda: second.log)
    assert len(record.of("begun", 7)) == 2, "it was delivered once only"
    async with App("reader", config=app_config("jetstream", server.url)) as reader:
        info = await reader.session.backend.stream_info("PLAIN")
        assert (info.messages, info.last_sequence) == (2, 2)
