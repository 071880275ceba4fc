"""What is kept of failures, and of handlers that began, beyond the worker that stored it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from aviso_workers import config
from aviso_workers.backends import Message, PubAck
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.declare.verdicts import PriorRecord
from aviso_workers.engine.attempts import Failures
from aviso_workers.engine.shields import Shield
from aviso_workers.errors import RefusedError
from aviso_workers.events import FailuresNotStored, Unreadable
from tests.engine.conftest import Facts

pytestmark = pytest.mark.anyio

BUCKET = "tests__failures"


class Guard(InMemoryBackend):
    """Stores nothing while `closed`."""

    closed = False
    asked = 0

    async def message(self, stream: str, sequence: int = 0, **which: str) -> Message | None:
        self.asked += 1
        return await super().message(stream, sequence, **which)

    async def publish(self, message: Message, **stated: Any) -> PubAck:
        if self.closed:
            raise RefusedError("you may not publish there")
        return await super().publish(message, **stated)


class Redelivered:
    """A delivery of which a record says that its handler begins."""

    message = Message(subject="mars", data=b"", sequence=1, timestamp_ns=1)
    num_delivered = 3


def delivered(number: int) -> Any:
    """The notification, when it is delivered for this time."""
    return SimpleNamespace(message=Redelivered.message, num_delivered=number)


@pytest.fixture
async def backend() -> AsyncGenerator[Guard, None]:
    async with Guard(config.InMemory()) as backend:
        yield backend


@pytest.fixture
def worker(backend: Guard, facts: Facts) -> Callable[[], Any]:
    """`worker()`: what another worker makes of the same failures."""
    return lambda: Failures(
        backend, app="tests", agent="index", stream="MARS", shield=Shield(backend.clock), events=facts.events
    )


async def add(
    failures: Failures,
    delivery: Any,
    *,
    before: int | PriorRecord = 0,
    kept: bool = False,
    worker_died: bool = False,
) -> PriorRecord:
    """Return the record when one more failure is counted, after so many that each ended their delivery."""
    record = before if isinstance(before, PriorRecord) else PriorRecord(failures=before, ended=before)
    counted: list[PriorRecord] = []
    await failures.add(
        delivery, before=record, again_in_seconds=1.0, kept=kept, worker_died=worker_died, then=counted.append
    )
    while not counted:
        await anyio.lowlevel.checkpoint()
    return counted[0]


ENDS: dict[str, Callable[[Failures, Any], Awaitable[object]]] = {
    "it was not run": lambda failures, delivery: failures.clear(delivery),
    "it was cancelled": lambda failures, delivery: failures.clear_all(),
    "it failed": lambda failures, delivery: add(failures, delivery, before=0),
    "it is settled": lambda failures, delivery: failures.forget(delivery, PriorRecord()),
}


async def test_of_many_that_were_cancelled_the_first_whose_record_stays_is_the_last_that_is_tried(
    backend: Guard, worker: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that does not answer would keep a worker from leaving, once for each."""
    here = worker()
    for sequence in range(1, 6):
        message = Message(subject="mars", data=b"", sequence=sequence, timestamp_ns=1)
        await here.begin(SimpleNamespace(message=message, num_delivered=3), alone=False)
    publish, tried = backend.publish, list[str]()

    async def refuse(message: Message, **stated: Any) -> PubAck:
        tried.append(message.subject)
        raise RefusedError("you may not publish there")

    monkeypatch.setattr(backend, "publish", refuse)
    await here.clear_all()
    assert len(tried) == 1
    monkeypatch.setattr(backend, "publish", publish)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("end", ENDS)
async def test_a_handler_that_began_and_did_not_end_its_worker_leaves_no_record_of_that(
    worker: Callable[[], Any], alone: bool, end: str
) -> None:
    here = worker()
    await here.begin(Redelivered(), alone=alone)
    assert (await worker().read(Redelivered())).began == ("alone" if alone else "beside_others")
    await ENDS[end](here, Redelivered())
    assert (await worker().read(Redelivered())).began is None


@pytest.mark.parametrize("end", ["it was not run", "it failed", "it is settled"])
async def test_the_record_of_a_worker_that_ended_is_removed_by_the_next(worker: Callable[[], Any], end: str) -> None:
    here = worker()
    await worker().begin(Redelivered(), alone=False)
    await here.read(Redelivered())
    await ENDS[end](here, Redelivered())
    assert (await worker().read(Redelivered())).began is None


async def test_what_ended_its_worker_is_run_alone_the_next_time_as_well(worker: Callable[[], Any]) -> None:
    here = worker()
    await worker().begin(Redelivered(), alone=True)
    await here.read(Redelivered())
    await add(here, Redelivered(), before=0, worker_died=True)
    await here.clear_all()
    record = await worker().read(Redelivered())
    assert (record.failures, record.began) == (1, "beside_others")


async def test_what_ended_its_worker_is_asked_for_also_where_it_comes_back_to_the_worker_that_counted_it(
    worker: Callable[[], Any],
) -> None:
    here = worker()
    await add(here, delivered(3), worker_died=True)
    assert here.recall(delivered(4)) is None
    assert (await here.read(delivered(4))).began == "beside_others"


@pytest.mark.parametrize(("kept", "worker_died", "ended"), [(False, False, 2), (True, False, 1), (True, True, 2)])
async def test_a_failure_says_whether_it_ended_a_delivery(
    worker: Callable[[], Any], kept: bool, worker_died: bool, ended: int
) -> None:
    """A death has ended the delivery before, also where its notification is kept now."""
    record = await add(
        worker(), delivered(3), before=PriorRecord(failures=2, ended=1), kept=kept, worker_died=worker_died
    )
    assert (record.failures, record.ended) == (3, ended)
    stored = await worker().read(delivered(4))
    assert (stored.failures, stored.ended) == (3, ended)


async def test_what_is_given_back_without_a_try_comes_again_without_suspicion(worker: Callable[[], Any]) -> None:
    here = worker()
    here.note_postponed(delivered(2), PriorRecord(failures=1, ended=1))
    record = here.recall(delivered(3))
    assert (record.failures, record.ended, record.handed_over(3)) == (1, 2, 2)


async def test_a_failure_that_could_not_be_stored_is_forgotten_when_its_notification_is_settled(
    backend: Guard, worker: Callable[[], Any]
) -> None:
    here = worker()
    backend.closed = True
    record = await add(here, Redelivered())
    backend.closed = False
    await here.forget(Redelivered(), record)
    assert (await here.read(Redelivered())).failures == 0


async def test_a_failure_that_could_not_be_stored_counts_for_less_than_what_others_have_stored_since(
    backend: Guard, worker: Callable[[], Any]
) -> None:
    here = worker()
    backend.closed = True
    await add(here, Redelivered())
    backend.closed = False
    await add(worker(), Redelivered(), before=2)
    assert (await here.read(Redelivered())).failures == 3


async def test_a_failure_that_could_not_be_stored_counts_here_although_fewer_are_stored(
    backend: Guard, worker: Callable[[], Any]
) -> None:
    here = worker()
    await add(here, Redelivered(), before=0)
    backend.closed = True
    await add(here, Redelivered(), before=1)
    backend.closed = False
    assert (await here.read(Redelivered())).failures == 2
    assert (await worker().read(Redelivered())).failures == 1


@pytest.mark.parametrize("garbage", [b"\xff\xfe", b"", b"x", b"-1", b"9" * 5000, "٣".encode()])
async def test_what_somebody_else_wrote_as_a_count_counts_as_none(
    backend: Guard, worker: Callable[[], Any], facts: Facts, garbage: bytes
) -> None:
    await add(worker(), Redelivered(), before=0)
    bucket = await backend.key_value(BUCKET)
    [key] = await bucket.keys()
    await bucket.put(key, garbage)

    assert (await worker().read(Redelivered())).failures == 0
    assert [unreadable.stream for unreadable in facts.of(Unreadable)] == [f"KV_{BUCKET}"]


async def test_each_time_that_failures_cannot_be_stored_any_more_is_told(
    backend: Guard, worker: Callable[[], Any], facts: Facts
) -> None:
    here = worker()
    for closed in (True, True, False, True):
        backend.closed = closed
        await add(here, Redelivered(), before=0)
        assert (await here.read(Redelivered())).stored != closed
    assert len(facts.of(FailuresNotStored)) == 2


async def test_failures_are_stored_again_after_their_bucket_was_deleted(
    backend: Guard, worker: Callable[[], Any]
) -> None:
    here = worker()
    await add(here, Redelivered(), before=0)
    await backend.delete_stream(f"KV_{BUCKET}")
    for before in (1, 2):  # the first of them finds that the bucket is gone
        await add(here, Redelivered(), before=before)
    assert (await worker().read(Redelivered())).failures == 3


async def test_what_comes_back_to_the_worker_where_it_failed_is_not_asked_for(
    backend: Guard, worker: Callable[[], Any]
) -> None:
    here = worker()
    await add(here, delivered(1), before=0)
    record = here.recall(delivered(2))
    assert record is not None
    assert record.failures == 1
    assert backend.asked == 0


async def test_what_comes_back_after_another_worker_had_it_is_asked_for(worker: Callable[[], Any]) -> None:
    here, other = worker(), worker()
    await add(here, delivered(1), before=0)
    await other.read(delivered(2))
    await add(other, delivered(2), before=1)
    assert here.recall(delivered(3)) is None
    assert (await here.read(delivered(3))).failures == 2
    await other.begin(delivered(3), alone=False)
    assert (await here.read(delivered(4))).began == "beside_others"


async def test_the_failures_of_many_are_stored_with_few_requests(backend: Guard, worker: Callable[[], Any]) -> None:
    here, requests = worker(), []
    publish_many = backend.publish_many

    async def counted(outgoing: Any, **stated: Any) -> Any:
        requests.append(len(outgoing))
        return await publish_many(outgoing, **stated)

    backend.publish_many = counted  # type: ignore[method-assign]
    deliveries = [
        SimpleNamespace(message=Message(subject="mars", data=b"", sequence=number, timestamp_ns=1), num_delivered=1)
        for number in range(1, 65)
    ]

    async with anyio.create_task_group() as tasks:
        for delivery in deliveries:
            tasks.start_soon(partial(add, here, delivery, before=0))

    assert requests == [64]
    delivery = SimpleNamespace(message=deliveries[-1].message, num_delivered=2)
    assert (await worker().read(delivery)).failures == 1
