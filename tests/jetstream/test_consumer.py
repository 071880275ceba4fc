"""Settlements on their way: which are confirmed, and what happens to those that are not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import anyio
import pytest

from aviso_workers._fast import stored
from aviso_workers.aviso.codec import Message
from aviso_workers.backends import Delivery
from aviso_workers.backends.jetstream import consumer
from aviso_workers.backends.jetstream.consumer import Outbox, PinnedDelivery, PullConsumer
from aviso_workers.backends.jetstream.wire import Wire
from aviso_workers.jetstream.identities import Identity
from tests.jetstream.conftest import PlayedConnection
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


@pytest.fixture
async def outbox(played: PlayedConnection) -> Outbox:
    outbox = Outbox(played.connection)
    await outbox.open()
    return outbox


async def test_a_settlement_is_sent_and_not_waited_for(played: PlayedConnection, outbox: Outbox) -> None:
    outbox.put(b"$JS.ACK.1", b"+ACK")
    await outbox.flush()

    assert played.sent == [("$JS.ACK.1", b"+ACK", "")]


async def test_a_server_that_is_gone_is_not_waited_for_where_all_is_settled(
    played: PlayedConnection, outbox: Outbox
) -> None:
    outbox.put(b"$JS.ACK.1", b"+ACK")
    await outbox.flush()
    played.flush = anyio.sleep_forever  # type: ignore[method-assign]

    with anyio.fail_after(PATIENCE_SECONDS):
        await outbox.flush()
    outbox.put(b"$JS.ACK.2", b"+ACK")
    with anyio.move_on_after(0.01) as waiting:
        await outbox.flush()
    assert waiting.cancelled_caught


async def test_a_settlement_that_is_to_be_confirmed_is_waited_for(played: PlayedConnection, outbox: Outbox) -> None:
    outbox.put(b"$JS.ACK.1", b"+ACK", confirmed=True)
    outbox.put(b"$JS.ACK.2", b"-NAK", confirmed=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.flush)
        await anyio.wait_all_tasks_blocked()
        for _, _, answer in tuple(played.sent):
            assert tasks.cancel_scope.cancel_called is False
            played.say(answer)

    assert [sent[:2] for sent in played.sent] == [("$JS.ACK.1", b"+ACK"), ("$JS.ACK.2", b"-NAK")]


async def test_what_nobody_confirms_is_sent_again_until_somebody_does(
    played: PlayedConnection, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "CONFIRM_SECONDS", 0.01)
    outbox.put(b"$JS.ACK.1", b"+ACK", confirmed=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.flush)
        while len(played.sent) < 3:
            await anyio.sleep(0.01)
            played.say(played.sent[0][2], status="503")
        played.say(played.sent[0][2])

    assert set(played.sent) == {("$JS.ACK.1", b"+ACK", played.sent[0][2])}


async def test_what_was_sent_again_is_not_sent_once_more_before_it_can_be_confirmed(
    played: PlayedConnection, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader asks for repeats whenever something happens, which may be many times in that while."""
    outbox.put(b"$JS.ACK.1", b"+ACK", confirmed=True)
    loop = asyncio.get_running_loop()
    later = loop.time() + consumer.CONFIRM_SECONDS
    with monkeypatch.context() as stopped:
        stopped.setattr(loop, "time", lambda: later)
        for _ in range(3):
            outbox.repeat()

    assert played.sent == [("$JS.ACK.1", b"+ACK", played.sent[0][2])] * 2


async def test_what_is_to_be_confirmed_is_confirmed_at_another_inbox_where_ours_has_changed(
    played: PlayedConnection, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "CONFIRM_SECONDS", 0.0)
    outbox.put(b"$JS.ACK.1", b"+ACK", confirmed=True)
    await outbox._inbox.open(cast(Wire, played), "_INBOX_mars")
    outbox.repeat()
    (_, _, first), (_, _, second) = played.sent
    assert (first.partition(".")[0], second.partition(".")[0]) == ("_INBOX", "_INBOX_mars")

    played.say(second)
    with anyio.fail_after(PATIENCE_SECONDS):
        await outbox.flush()


MORNING = Identity(created="this morning", mark="1", deliveries=0, resets=0)
EVENING = Identity(created="this evening", mark="2", deliveries=0, resets=0)


class Reader:
    """A reader of the consumer `agent` of MARS, and what it delivers."""

    def __init__(self, played: PlayedConnection, outbox: Outbox, *, capacity: int = 1) -> None:
        self.deliveries: list[Delivery] = []
        self.made = {("MARS", "agent"): MORNING}
        """Which one the consumer is, as was last seen."""
        self.consumer = PullConsumer(
            played.connection,
            outbox,
            stream="MARS",
            consumer="agent",
            made=self.made,
            deliver=self.deliveries.extend,
            capacity=lambda: capacity,
            priority=0,
        )
        self.consumer._opened = MORNING
        self.consumer._pulls._received_at = asyncio.get_running_loop().time()

    def deliver(self, number: int) -> Delivery:
        reply = b"$JS.ACK.MARS.agent.1.%d.%d.1.0" % (number, number)
        self.consumer._on_messages(stored([(b"mars.od", reply, b"", b"{}")], b"$JS.ACK.MARS.agent."))
        return self.deliveries[-1]


@pytest.mark.parametrize("hold_seconds", [None, 60.0], ids=["", "pinned"])
async def test_what_came_from_a_consumer_that_was_recreated_since_is_not_settled(
    played: PlayedConnection, outbox: Outbox, hold_seconds: float | None
) -> None:
    """The new one counts from 1 again, and would take it for one of its own."""
    reader = Reader(played, outbox)
    reader.consumer._hold_seconds = hold_seconds
    first, second = reader.deliver(1), reader.deliver(2)
    first.ack()
    assert [sent[:2] for sent in played.sent] == [("$JS.ACK.MARS.agent.1.1.1.1.0", b"+ACK")]

    reader.made["MARS", "agent"] = EVENING
    second.ack()
    second.nak()
    second.term("no")
    assert len(played.sent) == 1


async def test_who_leaves_has_settlements_confirmed_and_no_sign_that_a_handler_still_runs(
    played: PlayedConnection, outbox: Outbox
) -> None:
    reader = Reader(played, outbox)
    delivery = reader.deliver(1)
    reader.consumer._stopped = True
    delivery.in_progress()
    delivery.ack()
    assert [(body, bool(answer)) for _, body, answer in played.sent] == [(b"+WPI", False), (b"+ACK", True)]


@pytest.mark.parametrize(("hold_seconds", "requests"), [(None, 2), (60.0, 1)], ids=["", "pinned"])
async def test_a_pinned_reader_has_one_request_at_a_time(
    played: PlayedConnection, outbox: Outbox, hold_seconds: float | None, requests: int
) -> None:
    """So that it is known for which request a message came, from when on it is held."""
    reader = Reader(played, outbox, capacity=10)
    reader.consumer._hold_seconds = hold_seconds
    reader.consumer.refill()
    reader.consumer._pulls.outstanding = 2
    reader.consumer.refill()
    assert len(played.sent) == requests


@pytest.mark.parametrize(("outstanding", "requests"), [(4, 1), (5, 1), (6, 0), (10, 0)])
async def test_a_request_asks_for_at_least_as_much_as_is_outstanding(
    played: PlayedConnection, outbox: Outbox, outstanding: int, requests: int
) -> None:
    reader = Reader(played, outbox, capacity=10)
    reader.consumer._pulls.outstanding = outstanding
    reader.consumer.refill()
    assert len(played.sent) == requests


class TestADeliveryOfAPinnedReader:
    @pytest.fixture
    def clock(self) -> SimpleNamespace:
        return SimpleNamespace(seconds=100.0, pinned=True)

    @pytest.fixture
    def delivery(self, outbox: Outbox, clock: SimpleNamespace) -> PinnedDelivery:
        return PinnedDelivery(
            Message(subject="mars.od", data=b"{}", sequence=7),
            1,
            0,
            b"$JS.ACK.7",
            lambda reply, body, held: outbox.put(reply, body, confirmed=True, held=held),
            outbox,
            lambda: clock.seconds,
            lambda: clock.pinned,
            10.0,
            105.0,
        )

    async def test_is_held_for_as_long_as_the_request_for_it_is_young(
        self, delivery: PinnedDelivery, clock: SimpleNamespace
    ) -> None:
        clock.seconds = 104.9
        assert delivery.held
        clock.seconds = 105.0
        assert not delivery.held

    async def test_is_lost_with_the_pin(
        self, played: PlayedConnection, delivery: PinnedDelivery, clock: SimpleNamespace
    ) -> None:
        clock.pinned = False
        delivery.ack()
        assert not delivery.held
        assert played.sent == []

    async def test_is_held_for_longer_when_signs_of_life_are_confirmed_in_time(
        self, played: PlayedConnection, delivery: PinnedDelivery, clock: SimpleNamespace
    ) -> None:
        for seconds in (104.0, 113.0, 122.0):
            clock.seconds = seconds
            delivery.in_progress()
            assert played.sent[-1][:2] == ("$JS.ACK.7", b"+WPI")
            played.say(played.sent[-1][2])
        clock.seconds = 131.0
        assert delivery.held

    @pytest.mark.parametrize("too_late", [105.0, 300.0])
    async def test_is_lost_for_good_when_a_confirmation_comes_too_late(
        self, played: PlayedConnection, delivery: PinnedDelivery, clock: SimpleNamespace, too_late: float
    ) -> None:
        clock.seconds = 104.0
        delivery.in_progress()
        clock.seconds = too_late
        played.say(played.sent[-1][2])
        assert not delivery.held

    async def test_is_not_held_by_signs_that_nobody_confirms(
        self, played: PlayedConnection, delivery: PinnedDelivery, clock: SimpleNamespace
    ) -> None:
        clock.seconds = 104.0
        delivery.in_progress()
        unheard = played.sent[-1][2]
        played.say(unheard, status="503")
        delivery.in_progress()
        clock.seconds = 104.5
        played.say(unheard)
        clock.seconds = 106.0
        assert not delivery.held

    async def test_cannot_be_settled_any_more_when_it_is_lost(
        self, played: PlayedConnection, delivery: PinnedDelivery, clock: SimpleNamespace
    ) -> None:
        delivery.nak(delay_seconds=1)
        clock.seconds = 105.0
        for settle in (delivery.ack, delivery.nak, lambda: delivery.term("too late")):
            settle()
        assert [body for _, body, _ in played.sent] == [b'-NAK {"delay":1000000000}']

    async def test_sends_its_settlement_again_only_while_it_is_held(
        self,
        played: PlayedConnection,
        outbox: Outbox,
        delivery: PinnedDelivery,
        clock: SimpleNamespace,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(consumer, "CONFIRM_SECONDS", 0.0)
        delivery.ack()
        outbox.repeat()
        clock.seconds = 105.0
        outbox.repeat()
        await outbox.flush()
        assert [body for _, body, _ in played.sent] == [b"+ACK", b"+ACK"]
