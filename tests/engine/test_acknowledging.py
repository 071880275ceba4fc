"""How long settlements take where what they need does not answer, and while their worker is cancelled."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import anyio
import pytest

from aviso_workers import Batch, Batching, Notification, RetryPolicy, Router, config
from aviso_workers.backends import Message, PubAck
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.config import Config
from aviso_workers.engine import acknowledging, attempts, shields
from aviso_workers.errors import BackendError, RefusedError, UnavailableError
from aviso_workers.events import Acked, FailuresNotStored, Settled
from aviso_workers.jetstream import error_codes
from aviso_workers.sessions.session import Session
from aviso_workers.state import own_streams
from tests.engine.conftest import Facts, NotifyStep, Stored, Working, config_with

DEAD_LETTERS = own_streams.of_app(own_streams.DEAD_LETTERS, "tests")

pytestmark = pytest.mark.anyio

COUNT = 20
ANSWER_SECONDS = 30.0
DRAIN_SECONDS = 2.0
LATER = RetryPolicy(first=3600.0, factor=1.0, attempts=5, jitter=0.0)


class Silent(InMemoryBackend):
    """Answers no publish on a stream whose name ends like this."""

    def __init__(self) -> None:
        super().__init__(config.InMemory(max_history_per_topic=1000))
        self.silent = "_failures"
        self.error: BackendError = UnavailableError("no answer")
        self.asked = 0

    async def publish(self, message: Message, *, stream: str, **stated: Any) -> PubAck:
        if self.silent and stream.endswith(self.silent):
            self.asked += 1
            await anyio.sleep(ANSWER_SECONDS)
            raise self.error
        return await super().publish(message, stream=stream, **stated)


@pytest.fixture
async def backend() -> AsyncGenerator[Silent, None]:
    async with Silent() as backend:
        yield backend


@pytest.fixture
def settings() -> Config:
    return config_with(drain_timeout_seconds=DRAIN_SECONDS)


def failing_batches(router: Router, *, retry: RetryPolicy = LATER) -> Any:
    @router.agent("mars", batch=Batching(size=COUNT, within=0.1), retry=retry)
    async def load(batch: Batch[Any]) -> None:
        raise RuntimeError("the table is full")

    return load


@pytest.mark.parametrize("error", [UnavailableError("no answer"), RefusedError("you may not publish there")])
async def test_a_batch_that_failed_asks_a_bucket_that_does_not_answer_once(
    error: BackendError,
    backend: Silent,
    session: Session,
    router: Router,
    notify: NotifyStep,
    working: Working,
    facts: Facts,
) -> None:
    backend.error = error
    for step in range(COUNT):
        await notify(step)
    async with working(failing_batches(router)):
        began = anyio.current_time()
        await facts.wait_for(Settled, COUNT)
        assert anyio.current_time() - began < 2 * ANSWER_SECONDS
        assert backend.asked == 1
        assert len(facts.of(FailuresNotStored)) == 1


async def test_what_succeeds_in_one_turn_of_the_loop_is_one_fact(
    router: Router, notify: NotifyStep, working: Working, facts: Facts
) -> None:
    @router.agent("mars", concurrency=COUNT)
    async def index(notification: Notification[Any]) -> None: ...

    for step in range(COUNT):
        await notify(step)
    async with working(index):
        settled = await facts.wait_for(Settled, COUNT)
        await facts.wait_for(Acked)
    acked = facts.of(Acked)
    assert len(acked) < COUNT
    for field in ("seconds", "waited_seconds"):
        assert [seconds for each in acked for seconds in getattr(each, field)] == [
            getattr(one, field) for one in settled
        ]
    assert {(each.agent, each.event_type, each.redelivered) for each in acked} == {("index", "mars", 0)}


async def test_a_bucket_that_did_not_answer_is_asked_again_after_a_while(
    backend: Silent,
    session: Session,
    router: Router,
    notify: NotifyStep,
    working: Working,
    facts: Facts,
    stored: Stored,
) -> None:
    @router.agent("mars", retry=RetryPolicy(first=attempts.UNUSED_SECONDS + 1.0, factor=1.0, attempts=5, jitter=0.0))
    async def index(notification: Notification[Any]) -> None:
        raise RuntimeError

    await notify(6)
    async with working(index):
        await facts.wait_for(Settled, 1)
        backend.silent = ""
        await facts.wait_for(Settled, 2)
        assert [message.data for message in await stored("KV_tests__failures")] == [b"2"]


async def test_a_worker_that_is_cancelled_settles_for_seconds_and_no_longer(
    backend: Silent, session: Session, router: Router, notify: NotifyStep, facts: Facts
) -> None:
    """However many settlements wait for an answer, one after another."""
    backend.silent = DEAD_LETTERS
    agent = failing_batches(router, retry=RetryPolicy(attempts=1))
    for step in range(COUNT):
        await notify(step)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.run_agent, agent, anyio.Event())
        await anyio.sleep(1.0)
        assert backend.asked == 1
        cancelled_at = anyio.current_time()
        tasks.cancel_scope.cancel()
    assert anyio.current_time() - cancelled_at == pytest.approx(shields.SHIELDED_SECONDS)
    assert facts.of(Settled) == []

    backend.silent = ""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.run_agent, agent, anyio.Event())
        settled = await facts.wait_for(Settled, COUNT)
        tasks.cancel_scope.cancel()
    assert {event.outcome for event in settled} == {"dead_lettered"}


async def test_a_worker_whose_drain_timeout_is_over_settles_for_seconds_and_no_longer(
    backend: Silent, session: Session, router: Router, notify: NotifyStep, working: Working
) -> None:
    backend.silent = DEAD_LETTERS
    for step in range(COUNT):
        await notify(step)
    async with working(failing_batches(router, retry=RetryPolicy(attempts=1))) as stop:
        await anyio.sleep(1.0)
        stopped_at = anyio.current_time()
        stop.set()
    assert anyio.current_time() - stopped_at == pytest.approx(DRAIN_SECONDS + shields.SHIELDED_SECONDS)


async def test_what_succeeds_does_not_wait_until_failures_are_counted(
    backend: Silent, session: Session, router: Router, notify: NotifyStep, working: Working, facts: Facts
) -> None:
    """Of two slots one waits for the bucket, for all that fails meanwhile."""

    @router.agent("mars", concurrency=2, retry=LATER)
    async def index(notification: Notification[Any]) -> None:
        if int(notification.identifier["step"]) < 3:
            raise RuntimeError

    for step in range(6):
        await notify(step)
    async with working(index):
        with anyio.move_on_after(ANSWER_SECONDS / 2):
            await facts.wait_for(Settled, 3)
        assert [event.outcome for event in facts.of(Settled)] == ["acked"] * 3, "after half the time of an answer"
        settled = await facts.wait_for(Settled, 6)
        assert [event.outcome for event in settled[3:]] == ["retried"] * 3


async def test_failures_that_nobody_counts_keep_a_cancelled_worker_for_seconds_and_no_longer(
    backend: Silent, session: Session, router: Router, notify: NotifyStep
) -> None:
    @router.agent("mars", concurrency=2, retry=LATER)
    async def index(notification: Notification[Any]) -> None:
        raise RuntimeError

    for step in range(COUNT):
        await notify(step)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.run_agent, index, anyio.Event())
        await anyio.sleep(1.0)
        cancelled_at = anyio.current_time()
        tasks.cancel_scope.cancel()
    assert anyio.current_time() - cancelled_at == pytest.approx(shields.SHIELDED_SECONDS)


async def test_one_that_is_too_large_for_a_dead_letter_keeps_no_other_from_becoming_one(
    session: Session,
    backend: Silent,
    router: Router,
    notify: NotifyStep,
    working: Working,
    facts: Facts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish = backend.publish

    async def publish_what_is_small(message: Message, *, stream: str, **stated: Any) -> PubAck:
        if stream == DEAD_LETTERS and b"large" in message.data:
            raise RefusedError("it does not fit", code=error_codes.MESSAGE_TOO_LARGE)
        return await publish(message, stream=stream, **stated)

    monkeypatch.setattr(backend, "publish", publish_what_is_small)

    @router.agent("mars", retry=RetryPolicy(attempts=1))
    async def load(notification: Notification[str]) -> None:
        raise RuntimeError("the table is full")

    await notify(1, "large")
    await notify(2, "small")
    async with working(load):
        first, second = await facts.wait_for(Settled, 2)

    assert (first.reason, first.again_in_seconds) == ("dead_letter_failed", acknowledging.STORE_AGAIN.max)
    assert (second.outcome, second.sequence) == ("dead_lettered", 2)
