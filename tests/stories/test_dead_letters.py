"""`dead-letters retry` of many that is killed while it is at work, and repeated: each is handled once more."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import pytest

from aviso_workers import App, Notification, Notify, Reject
from aviso_workers.events import Event, Settled
from aviso_workers.server import NatsServer
from aviso_workers.state import own_streams
from tests.commands import Command
from tests.waits import PATIENCE_SECONDS

DEAD_LETTERS = own_streams.of_app(own_streams.DEAD_LETTERS, "field")
RETRIES = own_streams.of_app(own_streams.RETRIES, "field")

pytestmark = pytest.mark.anyio

LETTERS = 2000
KILLS = 6
LONGEST_DELAY_SECONDS = 0.2
"""About as long as some hundred dead letters take to be copied and deleted."""


@pytest.fixture
def config(nats_server: NatsServer, write_config: Callable[..., Path]) -> Path:
    return write_config(nats_server.url)


@pytest.mark.slow
async def test_a_retry_that_is_killed_again_and_again_loses_and_doubles_nothing(
    config: Path, start: Callable[..., Command]
) -> None:
    async with App("tests", config=config) as app:
        await app.notify_many(Notify("mars", {"class": "od", "step": 0}, {"n": n}) for n in range(LETTERS))
        assert sorted(await work(config, broken=True)) == list(range(LETTERS))
        assert await stored(app, DEAD_LETTERS) == LETTERS

        chance = random.Random(17)
        for copies in sorted(chance.sample(range(1, LETTERS - 500), KILLS)):
            command = start("dead-letters", "retry", "--all", "--yes", "--config", config)
            await until_stored(app, RETRIES, copies)
            await anyio.sleep(chance.uniform(0, LONGEST_DELAY_SECONDS))
            assert command.end(signal.SIGKILL) == -signal.SIGKILL, "it was to be killed while it was at work"
            assert await stored(app, DEAD_LETTERS) + await stored(app, RETRIES) >= LETTERS, "none is in neither of them"

        assert start("dead-letters", "retry", "--all", "--yes", "--config", config).end() == 0
        assert (await stored(app, DEAD_LETTERS), await stored(app, RETRIES)) == (0, LETTERS)

        handled = Counter(await work(config, broken=False))
        assert handled == Counter(range(LETTERS))


async def work(config: Path, *, broken: bool) -> list[int]:
    """Run a worker until it has settled all; returns what its agent was called with."""
    app, stop, handled, left = App("field", config=config), anyio.Event(), list[int](), [LETTERS]

    @app.agent("mars", concurrency=64)
    async def index(notification: Notification[dict[str, Any]]) -> None:
        handled.append(notification.payload["n"])
        if broken:
            raise Reject("not today")

    def note(event: Event) -> None:
        left[0] -= isinstance(event, Settled)
        if left[0] == 0:
            stop.set()

    app.events.listen(note)
    with anyio.fail_after(PATIENCE_SECONDS):
        async with app:
            await app._work(stop)
    return handled


async def stored(app: App, stream: str) -> int:
    return (await app.session.backend.stream_info(stream)).messages


async def until_stored(app: App, stream: str, sequence: int) -> None:
    with anyio.fail_after(PATIENCE_SECONDS):
        async with aclosing(app.session.backend.read(stream, filter_subjects=(), start_sequence=sequence)) as messages:
            async for _ in messages:
                return
