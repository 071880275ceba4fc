"""A thousand notifications wait to be delivered, and the worker that brings them is killed in the middle."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from statistics import median

import anyio
import pytest

from aviso_workers import App, Notify
from tests.contract.settings import app_config
from tests.stories.processes import Server, Worker
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

COUNT = 1000
AHEAD_SECONDS, SPREAD_SECONDS = 2.0, 8.0


@pytest.mark.slow
async def test_each_is_stored_once_and_in_time_though_the_worker_is_killed(
    server: Server, run_worker: Callable[..., Worker]
) -> None:
    first = run_worker(app="ticking")  # any app's, also one without agents
    await first.ready()
    async with App("publisher", config=app_config("jetstream", server.url)) as app:
        begin = datetime.now(UTC) + timedelta(seconds=AHEAD_SECONDS)
        due = {str(n): begin + timedelta(seconds=n * SPREAD_SECONDS / COUNT) for n in range(COUNT)}
        await app.notify_many(Notify("plain", {"a": n, "b": "x"}, due=time) for n, time in due.items())

        lateness: dict[str, timedelta] = {}
        with anyio.move_on_after(AHEAD_SECONDS + SPREAD_SECONDS + PATIENCE_SECONDS):
            async for found in app.watch("plain", from_id=1):
                n = found.identifier["a"]
                assert n not in lateness, f"{n} was stored twice"
                lateness[n] = found.time - due[n]
                if len(lateness) == COUNT // 2:
                    first.kill()
                    second = run_worker(app="ticking")
                if len(lateness) == COUNT:
                    break
        assert len(lateness) == COUNT, f"{COUNT - len(lateness)} were not stored; {second.log}"
        assert (await app.session.backend.stream_info("PLAIN")).last_sequence == COUNT

    late = [each.total_seconds() for each in lateness.values()]
    assert min(late) >= 0, "one came before its time"
    assert median(late[: COUNT // 2]) < SPREAD_SECONDS / 2, "those before the kill came in time"
