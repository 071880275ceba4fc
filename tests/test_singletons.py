"""Singletons under test, in virtual time: who handles, who follows, and what comes of those that come too late."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from aviso_workers import App, Notification, Notify, Reject, RetryPolicy
from aviso_workers.errors import TakenOverError
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters
from aviso_workers.testing import harness

pytestmark = pytest.mark.anyio

CONFIG = """
notification_backend: {kind: in_memory}
notification_schema:
  mars:
    topic: {base: mars, key_order: [step]}
    identifier: {step: {type: IntHandler, required: true}}
  derived:
    topic: {base: derived, key_order: [step]}
    identifier: {step: {type: IntHandler, required: true}}
"""
ACK_WAIT = 6.0


class Worker:
    """Which of the workers it is, in the order in which they were started."""

    started = 0

    def __init__(self) -> None:
        self.number = Worker.started
        Worker.started += 1


@pytest.fixture
def app(tmp_path: Path) -> App:
    path = tmp_path / "aviso.yaml"
    path.write_text(CONFIG)
    app = App("tested", config=path)
    Worker.started = 0

    @app.resource
    async def worker() -> AsyncIterator[Worker]:
        yield Worker()

    return app


async def test_one_worker_handles_everything_in_order(app: App) -> None:
    seen: list[tuple[int, int]] = []

    @app.agent("mars", singleton=True, ack_wait=ACK_WAIT)
    async def write(notification: Notification[Any], worker: Worker) -> None:
        await anyio.lowlevel.checkpoint()
        seen.append((worker.number, int(notification.identifier["step"])))

    async with harness(app, workers=3) as t:
        for step in range(20):
            await t.notify("mars", {"step": step})
        await t.settle()
        assert [step for _, step in seen] == list(range(20))
        assert len({number for number, _ in seen}) == 1


async def test_what_fails_is_tried_again_before_anything_that_follows(app: App) -> None:
    seen: list[int] = []

    @app.agent("mars", singleton=True, ack_wait=ACK_WAIT, retry=RetryPolicy(first=60, jitter=0))
    async def write(notification: Notification[Any]) -> None:
        seen.append(int(notification.identifier["step"]))

    async with harness(app, workers=2) as t:
        t.fail(write, ValueError("not now"), times=2)
        for step in range(3):
            await t.notify("mars", {"step": step})
        await t.settle()
        assert seen == [0, 1, 2]
        assert t.outcomes(write) == ["retried", "retried", "acked", "acked", "acked"]


async def test_another_worker_goes_on_within_ack_wait_when_the_one_dies(app: App) -> None:
    begun: list[tuple[int, int]] = []

    @app.agent("mars", singleton=True, ack_wait=ACK_WAIT)
    async def write(notification: Notification[Any], worker: Worker) -> None:
        begun.append((worker.number, int(notification.identifier["step"])))
        await t.clock.sleep(30)

    async with harness(app, workers=2) as t:
        for step in range(2):
            await t.notify("mars", {"step": step})
        await t.advance(3 * ACK_WAIT)
        [(dead, _)] = begun
        await t.crash(dead)
        await t.advance(ACK_WAIT)
        (_, (follower, step)) = begun
        assert follower != dead
        assert step == 0
        await t.settle()
        assert begun[2:] == [(follower, 1)]


class TestAWorkerThatIsCutOff:
    async def test_is_followed_by_another_and_neither_completes_nor_publishes_anything(self, app: App) -> None:
        begun: list[tuple[int, int]] = []
        ended: list[tuple[int, type[BaseException] | None]] = []

        @app.agent("mars", singleton=True, ack_wait=ACK_WAIT)
        async def write(notification: Notification[Any], worker: Worker) -> Notify:
            step = int(notification.identifier["step"])
            begun.append((worker.number, step))
            try:
                await t.clock.sleep(20)
            except BaseException as error:
                ended.append((worker.number, type(error)))
                raise
            ended.append((worker.number, None))
            return Notify("derived", {"step": step}, {"by": worker.number})

        async with harness(app, workers=2) as t:
            for step in range(3):
                await t.notify("mars", {"step": step})
            await t.advance(1)
            [(paused, _)] = begun
            t.disconnect(paused)
            await t.advance(2 * ACK_WAIT)
            t.reconnect()
            await t.settle()

            other = 1 - paused
            assert begun == [(paused, 0), (other, 0), (other, 1), (other, 2)]
            assert ended[0][0] == paused
            assert ended[0][1] is not None, "its call was cancelled"
            made = [
                (int(note.identifier["step"]), note.payload) for note in t.published if note.event_type == "derived"
            ]
            assert made == [(step, {"by": other}) for step in range(3)]
            late = [fact for fact in t.settled(write) if fact.outcome != "acked"]
            assert [(fact.sequence, fact.outcome, fact.reason) for fact in late] == [(1, "retried", "taken_over")]
            assert t.dead_letters == []

    async def test_is_told_when_it_publishes_or_writes_late(self, app: App) -> None:
        table = app.table("seen", int, default=0)
        refused: list[str] = []

        @app.agent("mars", singleton=True, ack_wait=ACK_WAIT)
        async def write(notification: Notification[Any], worker: Worker) -> None:
            if refused or worker.number != paused:
                return
            with anyio.CancelScope(shield=True):  # as a function in a thread is, which cannot be cancelled
                await t.clock.sleep(20)
                for act in (app.notify("derived", {"step": 1}), table.put("key", 1)):
                    try:
                        await act
                    except TakenOverError as error:
                        refused.append(str(error))

        paused = -1
        async with harness(app, workers=2) as t:
            await t.notify("mars", {"step": 0})
            await t.settle()
            [paused] = [n for n, worker in enumerate(t._workers) if worker.session.runs["write"].flow.pinned("MARS")]
            await t.notify("mars", {"step": 1})
            await t.advance(1)
            t.disconnect(paused)
            await t.advance(2 * ACK_WAIT)
            t.reconnect()
            await t.settle()
            assert len(refused) == 2
            assert "another worker may have taken over" in refused[0]
            assert await table.get("key") == 0


async def test_a_dead_letter_that_is_handed_back_is_handled_by_the_same_worker(app: App) -> None:
    seen: list[tuple[int, int]] = []

    @app.agent("mars", singleton=True, ack_wait=ACK_WAIT)
    async def write(notification: Notification[Any], worker: Worker) -> None:
        seen.append((worker.number, int(notification.identifier["step"])))

    async with harness(app, workers=3) as t:
        for attempt in range(3):
            t.fail(write, Reject("not yet"))
            await t.notify("mars", {"step": attempt})
            await t.settle()
        await t.notify("mars", {"step": 3})
        stored = StoredDeadLetters(app.session.admin, events=app.events)
        async with aclosing(stored.select(Selection())) as dead_letters:
            async for dead_letter in dead_letters:
                await stored.retry(dead_letter)
        await t.settle()
        assert sorted(step for _, step in seen) == [0, 1, 2, 3]
        assert len({number for number, _ in seen}) == 1
