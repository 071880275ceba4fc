"""Decisions of persons about retried notifications, at one worker: when it looks for them, and what it does."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import anyio
import pytest

from aviso_workers import config
from aviso_workers.backends import Message, PubAck
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.clocks import VirtualClock
from aviso_workers.engine import decisions as decisions_
from aviso_workers.engine.decisions import Decisions
from aviso_workers.engine.flow import Flow
from aviso_workers.errors import DeniedError, UnavailableError
from aviso_workers.state import failure_counts, orders
from aviso_workers.state.failure_counts import Taken
from aviso_workers.state.orders import Decides, Decision
from tests.deliveries import UnsettledDelivery
from tests.presence import present

pytestmark = pytest.mark.anyio

AT = datetime(2026, 11, 20, tzinfo=UTC)


class Counting(InMemoryBackend):
    """Counts what is asked for, and fails where it is told to."""

    asked = 0
    failure: Exception | None = None

    async def message(self, stream: str, sequence: int = 0, **which: str) -> Message | None:
        self.asked += 1
        if self.failure is not None:
            raise self.failure
        return await super().message(stream, sequence, **which)

    async def publish(self, message: Message, **stated: Any) -> PubAck:
        if self.failure is not None:
            raise self.failure
        return await super().publish(message, **stated)


class Retried(UnsettledDelivery):
    """A delivery that notes how often it was asked for again."""

    def __init__(self, sequence: int) -> None:
        self.message = Message(subject=f"mars.{sequence}", data=b"null", sequence=sequence, timestamp_ns=sequence)
        self.redelivered = 0

    def redeliver(self) -> None:
        self.redelivered += 1


class Worker:
    """What a worker has of one agent that decisions need."""

    def __init__(self, backend: Counting, *, ordered: bool = False) -> None:
        self.backend = backend
        self.flow = Flow(backend.clock, workers=1, least=10, key=str if ordered else None)
        self.decisions = Decisions(backend, app="fields", agent="index", stream="MARS", flow=self.flow)

    def give_back(self, sequence: int, *, after_seconds: float) -> Retried:
        delivery = Retried(sequence)
        self.decisions.note_retried(delivery, kept=False, after_seconds=after_seconds)
        return delivery

    async def decide(self, sequence: int, decides: Decides = "retry") -> None:
        key = failure_counts.key_of("index", "MARS", sequence, sequence)
        bucket = await orders.bucket(self.backend, "fields")
        self.order = await orders.decide(bucket, key, Decision(decides=decides, at=AT))

    async def taken(self, sequence: int) -> Taken | None:
        """Return what workers have recorded of the last decision."""
        key = failure_counts.key_of("index", "MARS", sequence, sequence)
        bucket = await self.backend.key_value("fields__failures", own=True)
        return failure_counts.taken(await bucket.get(f"{key}.decided"), order=self.order)

    async def pass_time(self, seconds: float) -> int:
        """Let time pass, and return how many requests were made."""
        assert isinstance(self.backend.clock, VirtualClock)
        before = self.backend.asked
        await self.backend.clock.advance(seconds)
        return self.backend.asked - before

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.decisions.work)
            yield
            tasks.cancel_scope.cancel()


@pytest.fixture
async def backend() -> AsyncGenerator[Counting, None]:
    async with Counting(config.InMemory(), clock=VirtualClock()) as backend:
        await orders.bucket(backend, "fields")
        yield backend


@pytest.fixture
def worker(backend: Counting) -> Worker:
    return Worker(backend)


async def test_who_retries_nothing_asks_for_nothing(worker: Worker) -> None:
    async with worker.working():
        assert await worker.pass_time(60) == 0
        worker.give_back(1, after_seconds=10)
        worker.give_back(2, after_seconds=20)
        assert 18 <= await worker.pass_time(20) <= 21, "one request a second for all"
        assert await worker.pass_time(60) <= 1


async def test_one_that_was_given_back_is_asked_for_once(worker: Worker) -> None:
    async with worker.working():
        delivery, other = worker.give_back(1, after_seconds=600), worker.give_back(2, after_seconds=600)
        await worker.pass_time(5)
        await worker.decide(1)
        await worker.pass_time(1.5)
        assert (delivery.redelivered, other.redelivered) == (1, 0)
        assert await worker.taken(1) == Taken(order=worker.order)
        await worker.pass_time(30)
        assert delivery.redelivered == 1
        assert delivery.message.data == b"", "its body is not kept"


async def test_one_that_is_due_soon_comes_by_itself(worker: Worker) -> None:
    """The server may have delivered it by then, and would deliver it once more beside whoever handles it."""
    async with worker.working():
        delivery = worker.give_back(1, after_seconds=1.9)
        await worker.decide(1)
        await worker.pass_time(5)
        assert delivery.redelivered == 0
        assert await worker.taken(1) is None


async def test_of_two_workers_one_asks_for_it(backend: Counting, worker: Worker) -> None:
    other = Worker(backend)
    async with worker.working(), other.working():
        first = worker.give_back(1, after_seconds=1.5)
        await worker.pass_time(2)
        second = other.give_back(1, after_seconds=600)
        await worker.decide(1)
        await worker.pass_time(2)
    assert (first.redelivered, second.redelivered) == (0, 1)


async def test_one_that_is_kept_begins_at_once(backend: Counting) -> None:
    worker = Worker(backend, ordered=True)
    delivery = Retried(1)
    async with worker.working():
        worker.flow.put(delivery)
        assert await worker.flow.take() is delivery
        worker.flow.retry_later(delivery, after_seconds=600)
        worker.decisions.note_retried(delivery, kept=True, after_seconds=600)
        assert delivery.message.data == b"null"
        await worker.decide(1)
        await worker.pass_time(1.5)
        assert worker.flow.take_now() or await worker.flow.take() is delivery
        await worker.pass_time(700)
        assert not worker.flow.dispatch.may_begin(), "its former wait does not end a second time"


async def test_one_that_others_were_given_is_not_asked_for(backend: Counting) -> None:
    worker = Worker(backend, ordered=True)
    delivery = Retried(1)
    async with worker.working():
        worker.flow.put(delivery)
        assert await worker.flow.take() is delivery
        worker.flow.retry_later(delivery, after_seconds=600)
        worker.decisions.note_retried(delivery, kept=True, after_seconds=600)
        worker.flow.lapse()
        await worker.decide(1)
        await worker.pass_time(3)
        assert await worker.taken(1) is None
        assert await worker.pass_time(10) == 0


@pytest.mark.parametrize("decides", ["retry", "skip"])
async def test_a_decision_about_one_that_has_just_succeeded_is_answered(worker: Worker, decides: Decides) -> None:
    async with worker.working():
        worker.give_back(1, after_seconds=1.0)
        await worker.pass_time(1.0)
        delivery = Retried(1)
        worker.flow.put(delivery)
        assert worker.decisions.pending(delivery) is None
        await worker.decide(1, decides)
        worker.flow.finish(delivery)
        worker.decisions.note_end(delivery, "handled")
        await worker.pass_time(2)
        assert present(await worker.taken(1)).outcome == "handled"


async def test_what_cannot_be_written_is_written_later(backend: Counting, worker: Worker) -> None:
    async with worker.working():
        worker.give_back(1, after_seconds=600)
        await worker.decide(1)
        await worker.pass_time(1.5)
        delivery = Retried(1)
        worker.flow.put(delivery)
        assert present(worker.decisions.pending(delivery)).decides == "retry"
        backend.failure = UnavailableError("away")
        worker.decisions.note_retried(delivery, kept=False, after_seconds=600)
        worker.decisions.note_end(delivery, "failed", error=ValueError("no field"), again_in_seconds=600)
        await worker.pass_time(10)
        backend.failure = None
        await worker.pass_time(3)
        found = present(await worker.taken(1))
        assert (found.outcome, found.error, delivery.redelivered) == ("failed", "ValueError: no field", 0)
        await worker.pass_time(3)
        assert delivery.redelivered == 0, "it is carried out once"


async def test_one_that_could_not_be_skipped_is_skipped_later(worker: Worker) -> None:
    async with worker.working():
        worker.give_back(1, after_seconds=600)
        await worker.decide(1, "skip")
        await worker.pass_time(1.5)
        delivery = Retried(1)
        worker.flow.put(delivery)
        assert present(worker.decisions.pending(delivery)).decides == "skip"
        worker.flow.finish(delivery)
        worker.decisions.note_retried(delivery, kept=False, after_seconds=20)
        worker.decisions.note_end(delivery, "failed", error=ValueError("the stream is full"), again_in_seconds=20)
        assert present(worker.decisions.pending(Retried(1))).decides == "skip", "also before that is stored"
        worker.decisions.note_retried(delivery, kept=False, after_seconds=20)
        await worker.pass_time(10)
        found = present(await worker.taken(1))
        assert (found.outcome, found.error) == ("", "ValueError: the stream is full")
        assert delivery.redelivered == 0, "its dead letter cannot be stored before"


async def test_a_worker_that_may_not_read_decisions_asks_seldom(backend: Counting, worker: Worker) -> None:
    backend.failure = DeniedError("no right")
    async with worker.working():
        worker.give_back(1, after_seconds=600)
        assert await worker.pass_time(590) <= 590 / decisions_.DENIED_SECONDS + 1


async def test_many_are_known_at_most(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions_, "MAX_KNOWN", 10)
    for sequence in range(1, 30):
        worker.give_back(sequence, after_seconds=600)
    assert len(worker.decisions._known) == 10
