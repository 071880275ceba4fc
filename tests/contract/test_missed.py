"""Notifications that a newer one of their subject replaced before their agent came to them, and how they count."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import pytest
from msgspec import structs

from aviso_workers import App, Notification
from aviso_workers.backends import ConsumerInfo, Message
from aviso_workers.events import AgentStarted, Settled
from aviso_workers.jetstream.specs import ConsumerSpec
from aviso_workers.telemetry.listeners import Listeners
from aviso_workers.telemetry.logs import log
from aviso_workers.telemetry.metrics import OBSERVED, Metrics
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

Working = Callable[[int], AbstractAsyncContextManager[Metrics]]


@pytest.fixture
def working(app: App) -> Working:
    """`async with working(2) as metrics`: a new worker, entered when its agent reads and has done so many."""

    @asynccontextmanager
    async def working(count: int) -> AsyncIterator[Metrics]:
        metrics = Metrics(app, ready=lambda: True, loop_lag_seconds=lambda: 0.0)
        app.events.listen(metrics.observe, *OBSERVED)
        started, handled = anyio.Event(), anyio.Semaphore(0)
        app.events.listen(lambda fact: started.set() if fact.stream == "MARS" else None, AgentStarted)
        app.events.listen(lambda _: handled.release(), Settled)
        stop = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(app._work, stop)
            with anyio.fail_after(PATIENCE_SECONDS):
                await started.wait()
                for _ in range(count):
                    await handled.acquire()
            yield metrics
            stop.set()

    return working


async def missed(app: App, metrics: Metrics, agent: Any) -> str:
    metrics.lag(agent.name, await app.session.consumer_info(agent))
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith("aviso_worker_missed_total{")]
    return lines[0].split()[-1] if lines else "not known"


async def publish(app: App, *steps: int) -> None:
    for step in steps:
        await app.notify("mars", mars(step=step), {})


async def test_what_was_replaced_while_no_worker_ran_is_counted(app: App, working: Working) -> None:
    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None: ...

    async with app:
        await publish(app, 1)
        async with working(1) as metrics:
            assert await missed(app, metrics, index) == "0.0"
        await publish(app, 2, 2, 2, 3)
        async with working(2) as metrics:
            assert await missed(app, metrics, index) == "2.0"


async def test_what_was_replaced_before_there_was_the_agent_is_not(app: App, working: Working) -> None:
    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None: ...

    async with app:
        await publish(app, 1, 2, 2, 2, 1)
        async with working(2) as metrics:
            assert await missed(app, metrics, index) == "0.0"


async def test_what_a_new_consumer_begins_after_is_not(
    app: App, working: Working, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster may answer right after it has created the consumer that this is at 0 and has nothing to do."""

    @app.agent("mars", start="new")
    async def index(notification: Notification[Any]) -> None: ...

    async with app:
        await publish(app, 1, 2, 3)
        ensure = app.session.backend.ensure_consumer

        async def early(stream: str, spec: ConsumerSpec) -> ConsumerInfo:
            return structs.replace(await ensure(stream, spec), position=0, ack_floor=0, num_pending=0)

        monkeypatch.setattr(app.session.backend, "ensure_consumer", early)
        async with working(0) as metrics:
            handled = anyio.Event()
            app.events.listen(lambda _: handled.set(), Settled)
            await publish(app, 4)
            with anyio.fail_after(PATIENCE_SECONDS):
                await handled.wait()
            assert await missed(app, metrics, index) == "0.0"


async def test_what_a_filter_leaves_out_is_not_taken_for_missed(app: App, working: Working) -> None:
    @app.agent("mars", where={"step": 2})
    async def index(notification: Notification[Any]) -> None: ...

    async with app:
        await publish(app, 1, 2, 3, 3)
        async with working(1) as metrics:
            assert await missed(app, metrics, index) == "not known"


async def test_what_is_of_a_subject_that_others_have_added_is_not(app: App, working: Working) -> None:
    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None: ...

    async with app:
        await publish(app, 1)
        backend = app.session.backend
        stream = (await backend.stream_info("MARS")).config
        await backend.update_stream({**stream, "subjects": ["mars.>", "others.>"]})
        async with working(1) as metrics:
            for number in range(3):
                message = Message(subject="others.a", data=b"1")
                await backend.publish(
                    message, message_id=f"a.{number}", stream="MARS", timeout_seconds=PATIENCE_SECONDS
                )
            await publish(app, 2)
            assert await missed(app, metrics, index) == "not known"


async def test_a_worker_logs_what_its_agent_has_missed(
    app: App, working: Working, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None: ...

    told = anyio.Event()
    lines: list[tuple[str, Any, Any]] = []

    def warning(event: str, **fields: Any) -> None:
        lines.append((event, fields.get("missed"), fields.get("among_sequences")))
        told.set()

    monkeypatch.setattr(log, "warning", warning)
    listeners = Listeners(app, measured=True)
    assert listeners.metrics is not None
    app.events.listen(listeners.metrics.observe)
    async with app:
        await publish(app, 1)
        async with working(1):
            pass
        await publish(app, 2, 2, 2, 3)
        async with working(2), anyio.create_task_group() as beside:
            beside.start_soon(listeners.measure_lag, app.session)
            with anyio.fail_after(PATIENCE_SECONDS):
                await told.wait()
            beside.cancel_scope.cancel()
    assert lines == [("notifications.missed", 2, "2 to 5")]
