"""What a worker remembers of what it has settled: how much, and for how long."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from aviso_workers.backends import ConsumerInfo, Message
from aviso_workers.engine import acknowledging
from aviso_workers.engine.repeats import MAX_REMEMBERED, Repeats
from aviso_workers.errors import UnavailableError
from aviso_workers.jetstream import metadata
from aviso_workers.jetstream.info import ConsumerConfig
from tests.deliveries import UnsettledDelivery

pytestmark = pytest.mark.anyio

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Delivery(UnsettledDelivery):
    def __init__(self, sequence: int, *, num_delivered: int = 1, stored_at: int = 1) -> None:
        self.message = Message(subject="mars.od", data=b"", sequence=sequence, timestamp_ns=stored_at)
        self.num_delivered = num_delivered
        self.became = ""

    def ack(self) -> None:
        self.became = "acked"

    def nak(self, *, delay_seconds: float = 0.0) -> None:
        self.became = "given back"


class Backend:
    """Says what the consumer is, or that it is not known now."""

    def __init__(self) -> None:
        self.consumer: ConsumerInfo | None = consumer()

    async def consumer_info(self, stream: str, name: str) -> ConsumerInfo:
        if self.consumer is None:
            raise UnavailableError("no answer")
        return self.consumer


def consumer(*, created: datetime = NOW, deliveries: int = 10, metadata: Any = None) -> ConsumerInfo:
    return ConsumerInfo(
        name="index", config=ConsumerConfig(metadata=metadata or {}), time=NOW, created=created, deliveries=deliveries
    )


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def repeats(backend: Backend) -> Repeats:
    """Of a worker that has settled the sequence 1."""
    repeats = Repeats(backend, stream="MARS", consumer="index")  # type: ignore[arg-type]
    repeats.opened(consumer())
    repeats.note(Delivery(1))
    return repeats


async def settled(repeats: Repeats, delivery: Delivery) -> str:
    """What becomes of a delivery that was settled before."""
    assert repeats.includes(delivery)
    repeats.add(delivery)
    [found], settlement = await repeats.judge()
    assert found is delivery
    if settlement is None:
        return "handled"
    acknowledging.settle(delivery, settlement)
    return delivery.became


def test_it_remembers_the_latest_and_no_more(repeats: Repeats) -> None:
    last = 3 * MAX_REMEMBERED
    for sequence in range(1, last + 1):
        repeats.note(Delivery(sequence))
        assert len(repeats) <= MAX_REMEMBERED
    assert repeats.includes(Delivery(last, num_delivered=2))
    assert repeats.includes(Delivery(last - MAX_REMEMBERED // 2 + 1, num_delivered=2))
    assert not repeats.includes(Delivery(1, num_delivered=2))


def test_a_stream_that_was_made_anew_has_other_notifications_under_the_same_sequences(repeats: Repeats) -> None:
    assert not repeats.includes(Delivery(1, num_delivered=2, stored_at=2))


def test_a_dead_letter_that_was_handed_back_is_none_of_them(repeats: Repeats) -> None:
    dead_letter = Delivery(2)
    dead_letter.can_be_read_again = False
    repeats.note(dead_letter)
    assert not repeats.includes(Delivery(2, num_delivered=2))


def test_what_comes_as_for_the_first_time_shows_that_the_consumer_was_taken_back(repeats: Repeats) -> None:
    repeats.note(Delivery(2))
    assert not repeats.includes(Delivery(1))
    assert not repeats.includes(Delivery(2, num_delivered=2)), "another worker was given it first"


async def test_what_comes_again_is_acknowledged_again(repeats: Repeats) -> None:
    assert await settled(repeats, Delivery(1, num_delivered=2)) == "acked"
    assert await settled(repeats, Delivery(1, num_delivered=3)) == "acked"


@pytest.mark.parametrize(
    "other",
    [
        consumer(metadata=metadata.after_reset({})),
        consumer(created=NOW + timedelta(seconds=1)),
        consumer(deliveries=3),
    ],
    ids=["by the command", "recreated", "by another program"],
)
async def test_what_comes_again_of_a_consumer_that_was_taken_back_is_handled(
    repeats: Repeats, backend: Backend, other: ConsumerInfo
) -> None:
    repeats.note(Delivery(2))
    backend.consumer = other
    assert await settled(repeats, Delivery(1, num_delivered=2)) == "handled"
    assert not repeats.includes(Delivery(2, num_delivered=2)), "all is forgotten"


async def test_what_comes_again_waits_where_the_consumer_is_not_known(repeats: Repeats, backend: Backend) -> None:
    backend.consumer = None
    assert await settled(repeats, Delivery(1, num_delivered=2)) == "given back"
    backend.consumer = consumer()
    assert await settled(repeats, Delivery(1, num_delivered=3)) == "acked"
