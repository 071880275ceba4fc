"""What an operator does with the `nats` command line to the consumer or the stream of an agent that works."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from aviso_workers import App, Notification
from aviso_workers.engine import shared_filters
from aviso_workers.events import ConsumerEdited, ConsumerResumed, Event, FilterHides
from aviso_workers.server import NatsServer
from tests.interop.nats_cli import Shell, successful
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

CONSUMER = ("MARS", "field__index")
EACH = 40
"""How many notifications are published before what is done, and again after it."""


class Worker:
    """A worker at work, what its agent handled, and what it stated."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.handled = Counter[str]()
        self.stated: list[Event] = []
        self._changed = anyio.Event()
        app.events.listen(self.stated.append)

    def note(self, step: object) -> None:
        self.handled[str(step)] += 1
        self._changed.set()

    async def publish(self, first: int) -> None:
        for step in range(first, first + EACH):
            await self.app.notify("mars", {"class": "od", "step": step}, {"n": step})

    async def until_handled(self, steps: int) -> None:
        with anyio.fail_after(PATIENCE_SECONDS):
            while len(self.handled) < steps:
                self._changed = anyio.Event()
                await self._changed.wait()


@asynccontextmanager
async def working(config: Path) -> AsyncIterator[Worker]:
    app, stop = App("field", config=config), anyio.Event()
    worker = Worker(app)

    @app.agent("mars", concurrency=4)
    async def index(notification: Notification[dict[str, int]]) -> None:
        assert notification.payload == {"n": int(str(notification.identifier["step"]))}, "the body as published"
        worker.note(notification.identifier["step"])

    async with app, anyio.create_task_group() as tasks:
        tasks.start_soon(app._work, stop)
        yield worker
        stop.set()


Done = tuple[str, Sequence[str], type[Event] | None, int]
DONE: list[Done] = [
    ("a filter that hides everything", ("consumer", "edit", *CONSUMER, "--filter=mars.rd.>", "-f"), FilterHides, EACH),
    ("another ack wait", ("consumer", "edit", *CONSUMER, "--wait=2s", "-f"), None, 0),
    ("one delivery only", ("consumer", "edit", *CONSUMER, "--max-deliver=1", "-f"), ConsumerEdited, 0),
    ("no bodies", ("consumer", "edit", *CONSUMER, "--headers-only", "-f"), ConsumerEdited, 0),
    ("a removed consumer", ("consumer", "rm", *CONSUMER, "-f"), ConsumerResumed, EACH),
    ("a purge of what was handled", ("stream", "purge", "MARS", "-f"), None, 0),
]
"""What is done, the command, what the worker states of it, and how many notifications may be handled twice."""


@pytest.mark.parametrize(("command", "stated", "twice"), [each[1:] for each in DONE], ids=[each[0] for each in DONE])
async def test_nothing_is_lost_and_what_was_done_is_stated(
    nats_server: NatsServer,
    write_config: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Sequence[str],
    stated: type[Event] | None,
    twice: int,
) -> None:
    monkeypatch.setattr(shared_filters, "CHECK_SECONDS", 0.5)
    shell = Shell(tmp_path)
    async with working(write_config(nats_server.url)) as worker:
        await worker.publish(0)
        await worker.until_handled(EACH)

        run = partial(shell.nats, *command, "--server", nats_server.url)
        successful(await anyio.to_thread.run_sync(run))

        await worker.publish(EACH)
        await worker.until_handled(2 * EACH)
        if stated is not None:
            with anyio.fail_after(PATIENCE_SECONDS):
                while not any(isinstance(event, stated) for event in worker.stated):
                    await worker.app.session.backend.clock.sleep(0.05)
    again = sum(times - 1 for times in worker.handled.values())
    assert again <= twice, worker.handled
    assert worker.handled.keys() == {str(step) for step in range(2 * EACH)}


async def test_a_pause_holds_back_and_its_end_lets_go_on(
    nats_server: NatsServer, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    shell = Shell(tmp_path)
    server = ("--server", nats_server.url)
    async with working(write_config(nats_server.url)) as worker:
        await worker.publish(0)
        await worker.until_handled(EACH)
        pause = partial(shell.nats, "consumer", "pause", *CONSUMER, "1h", "-f", *server)
        successful(await anyio.to_thread.run_sync(pause))
        await worker.publish(EACH)
        told = await anyio.to_thread.run_sync(
            partial(shell.ours, "agents", "ls", "--seconds", "0.1", "--config", tmp_path / "config.yaml")
        )
        assert "paused: until" in told.stdout or "half paused" in told.stdout, told
        assert len(worker.handled) == EACH
        resume = partial(shell.nats, "consumer", "resume", *CONSUMER, "-f", *server)
        successful(await anyio.to_thread.run_sync(resume))
        await worker.until_handled(2 * EACH)
    assert set(worker.handled.values()) == {1}
