"""What a backend promises about durable consumers: who gets what, how often, and what settling does."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta

import anyio
import pytest

from aviso_workers.backends import Admin, Consumer, Delivery
from aviso_workers.errors import BackendError, NotFoundError, RefusedError
from aviso_workers.jetstream import metadata
from aviso_workers.jetstream.specs import ConsumerSpec
from tests.contract.conftest import Create, Elapse, Ensure, Eventually, Inbox, Publish, Stored
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

ACK_WAIT = 0.5

After = Callable[[float], datetime]
OpenReader = Callable[..., AbstractAsyncContextManager[Consumer]]
NextAfter = Callable[..., Awaitable[Delivery]]


@pytest.fixture
def open_reader(backend: Admin) -> OpenReader:
    """`async with open_reader(inbox) as reader`: one reader of the consumer `agent` of MARS, or another."""

    def open_reader(inbox: Inbox, consumer: str = "agent") -> AbstractAsyncContextManager[Consumer]:
        return backend.consume("MARS", consumer, deliver=inbox.deliver, capacity=inbox.capacity)

    return open_reader


@pytest.fixture
def next_after(backend: Admin, inbox: Inbox, elapse: Elapse) -> NextAfter:
    """`await next_after(since, 0.5)`: the next delivery, which comes so long after that time of the backend's clock."""

    async def next_after(since: float, seconds: float, of: Inbox = inbox) -> Delivery:
        with anyio.move_on_after(PATIENCE_SECONDS):
            while not of.waiting:
                await elapse(0.05)
        assert backend.clock.monotonic() - since > seconds - 0.05
        return await of.next()

    return next_after


async def settle(reader: Consumer, deliveries: list[Delivery]) -> None:
    for delivery in deliveries:
        delivery.ack()
    await reader.settled()


class TestTheConsumer:
    async def test_is_created_with_what_was_stated(self, create: Create, publish: Publish, ensure: Ensure) -> None:
        await create()
        await publish("mars.od")

        info = await ensure(ack_wait_seconds=2.0, max_ack_pending=7)

        assert info.config["ack_wait"] == 2_000_000_000
        assert info.config["max_ack_pending"] == 7
        assert (info.num_pending, info.num_ack_pending, info.num_redelivered, info.ack_floor) == (1, 0, 0, 0)

    @pytest.mark.covers("001-40", "002-26")
    async def test_is_found_again(self, create: Create, ensure: Ensure, backend: Admin) -> None:
        await create()
        created = await ensure()

        assert (await ensure()).config == created.config
        assert (await backend.consumer_info("MARS", "agent")).config == created.config

    async def test_is_updated_where_it_differs(
        self, create: Create, publish: Publish, ensure: Ensure, backend: Admin
    ) -> None:
        await create()
        await publish("mars.od.an")
        await publish("mars.rd.fc")
        await ensure(ack_wait_seconds=1.0, max_ack_pending=5, max_deliver=3)

        await ensure(ack_wait_seconds=2.0, max_ack_pending=6, max_deliver=4, filter_subjects=("mars.od.>", "mars.te.>"))

        info = await backend.consumer_info("MARS", "agent")
        assert {name: info.config[name] for name in ("ack_wait", "max_ack_pending", "max_deliver")} == {
            "ack_wait": 2_000_000_000,
            "max_ack_pending": 6,
            "max_deliver": 4,
        }
        assert info.num_pending == 1

    async def test_keeps_what_cannot_be_updated(self, create: Create, ensure: Ensure) -> None:
        await create()
        await ensure(deliver_policy="all")

        assert (await ensure(deliver_policy="new")).config["deliver_policy"] == "all"

    async def test_needs_its_stream(self, ensure: Ensure, backend: Admin) -> None:
        with pytest.raises(NotFoundError):
            await ensure()
        with pytest.raises(NotFoundError):
            await backend.consumer_info("MARS", "agent")

    async def test_must_exist_to_be_asked_about(self, create: Create, backend: Admin) -> None:
        await create()

        with pytest.raises(NotFoundError) as missing:
            await backend.consumer_info("MARS", "agent")
        assert missing.value.code == 10014

    async def test_must_exist_to_be_read(self, create: Create, open_reader: OpenReader, inbox: Inbox) -> None:
        await create()

        with pytest.raises(BackendError), anyio.fail_after(PATIENCE_SECONDS):
            async with open_reader(inbox) as reader:
                await reader.lost()

    @pytest.mark.parametrize(
        "filters",
        [
            ("mars.od.an", "mars.od.>"),
            ("mars.*.an", "mars.od.an"),
            ("mars.*", "mars.>"),
            ("mars.od", "mars.od"),
        ],
    )
    async def test_cannot_have_a_filter_within_another(
        self, create: Create, ensure: Ensure, filters: tuple[str, ...]
    ) -> None:
        await create()

        with pytest.raises(RefusedError) as refused:
            await ensure(filter_subjects=filters)
        assert refused.value.code == 10138


class TestWhatIsDelivered:
    @pytest.mark.covers("002-67")
    async def test_is_what_was_stored_and_then_what_comes(
        self, create: Create, publish: Publish, ensure: Ensure, open_reader: OpenReader, inbox: Inbox
    ) -> None:
        await create()
        await ensure()
        await publish("mars.0", b"0", headers={"traceparent": "00-1-2-03"})
        await publish("mars.1")
        async with open_reader(inbox):
            first, second = await inbox.take(2)
            await publish("mars.2")
            third = await inbox.next()

        assert [delivery.message.sequence for delivery in (first, second, third)] == [1, 2, 3]
        assert (first.message.subject, first.message.data) == ("mars.0", b"0")
        assert first.message.headers is not None
        assert first.message.headers["traceparent"] == "00-1-2-03"
        assert first.message.timestamp_ns > 0

    async def test_says_how_often_it_was_delivered(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        eventually: Eventually,
    ) -> None:
        await create()
        await ensure()
        for number in range(3):
            await publish(f"mars.{number}")
        await eventually(num_pending=3)
        async with open_reader(inbox):
            deliveries = await inbox.take(3)

        assert [delivery.num_delivered for delivery in deliveries] == [1, 1, 1]

    async def test_comes_on_the_thread_of_the_loop(
        self, create: Create, publish: Publish, ensure: Ensure, backend: Admin, inbox: Inbox
    ) -> None:
        await create()
        await ensure()
        await publish("mars.od")
        threads = []

        def deliver(deliveries: Sequence[Delivery]) -> None:
            threads.append(threading.get_ident())
            inbox.deliver(deliveries)

        async with backend.consume("MARS", "agent", deliver=deliver, capacity=inbox.capacity):
            await inbox.next()

        assert threads == [threading.get_ident()]

    @pytest.mark.covers("001-22", "002-30")
    @pytest.mark.parametrize(
        ("filters", "expected"),
        [
            ((), ["mars.od", "mars.od.an", "mars.od.an.0", "mars.od.fc", "mars.rd.an"]),
            (("mars.>",), ["mars.od", "mars.od.an", "mars.od.an.0", "mars.od.fc", "mars.rd.an"]),
            (("mars.od.>",), ["mars.od.an", "mars.od.an.0", "mars.od.fc"]),
            (("mars.*.an",), ["mars.od.an", "mars.rd.an"]),
            (("mars.od",), ["mars.od"]),
            (("mars.*",), ["mars.od"]),
            (("mars.od.fc", "mars.rd.>"), ["mars.od.fc", "mars.rd.an"]),
            pytest.param(
                ("mars.od.*", "mars.*.an"),
                ["mars.od.an", "mars.od.fc", "mars.rd.an"],
                marks=pytest.mark.needs_server(2, 12),
            ),
            (("mars.o.>",), []),
        ],
    )
    async def test_matches_the_filters(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        elapse: Elapse,
        filters: tuple[str, ...],
        expected: list[str],
    ) -> None:
        await create()
        info = await ensure(filter_subjects=filters)
        assert info.num_pending == 0
        for subject in ("mars.od", "mars.od.an", "mars.od.an.0", "mars.od.fc", "mars.rd.an"):
            await publish(subject)

        async with open_reader(inbox):
            await elapse(0.1)

        assert inbox.subjects == expected

    @pytest.mark.covers("003-20")
    async def test_goes_to_every_consumer(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        inbox_of: Callable[[int], Inbox],
    ) -> None:
        await create()
        await ensure("agent")
        await ensure("other")
        other = inbox_of(10)
        async with open_reader(inbox, "agent"), open_reader(other, "other"):
            await publish("mars.od")

            assert (await inbox.next()).message.sequence == 1
            assert (await other.next()).message.sequence == 1

    async def test_is_only_what_comes_where_the_policy_is_new(
        self, create: Create, publish: Publish, ensure: Ensure, open_reader: OpenReader, inbox: Inbox
    ) -> None:
        await create()
        await publish("mars.0")
        info = await ensure(deliver_policy="new")
        assert info.num_pending == 0
        async with open_reader(inbox):
            await publish("mars.1")

            assert (await inbox.next()).message.subject == "mars.1"

    @pytest.mark.covers("001-18")
    async def test_is_no_more_than_there_is_room_for(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox_of: Callable[[int], Inbox],
        elapse: Elapse,
    ) -> None:
        await create()
        await ensure()
        for number in range(5):
            await publish(f"mars.{number}")
        inbox = inbox_of(2)
        async with open_reader(inbox) as reader:
            await elapse(0.2)
            assert inbox.subjects == ["mars.0", "mars.1"]

            inbox.size = 4
            reader.refill()
            await elapse(0.2)
            assert inbox.subjects == ["mars.0", "mars.1", "mars.2", "mars.3"]

    async def test_may_be_nothing_until_there_is_room(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox_of: Callable[[int], Inbox],
        elapse: Elapse,
    ) -> None:
        await create()
        await ensure()
        await publish("mars.od")
        inbox = inbox_of(0)
        async with open_reader(inbox) as reader:
            await elapse(0.2)
            assert inbox.subjects == []

            inbox.size = 1
            reader.refill()
            assert (await inbox.next()).message.sequence == 1

    async def test_is_no_more_than_may_be_unsettled(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        elapse: Elapse,
        eventually: Eventually,
    ) -> None:
        await create()
        await ensure(max_ack_pending=2)
        for number in range(5):
            await publish(f"mars.{number}")
        async with open_reader(inbox):
            first, _ = await inbox.take(2)
            await elapse(0.2)
            assert inbox.subjects == []
            await eventually(num_pending=3, num_ack_pending=2)

            first.ack()
            assert (await inbox.next()).message.subject == "mars.2"

    @pytest.mark.covers("003-18")
    async def test_is_shared_by_the_readers_of_one_consumer(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        eventually: Eventually,
    ) -> None:
        await create()
        await ensure()
        async with open_reader(inbox) as reader, open_reader(inbox):
            for number in range(50):
                await publish(f"mars.{number}")
            deliveries = await inbox.take(50)
            await settle(reader, deliveries)
            await eventually(num_pending=0, num_ack_pending=0, ack_floor=50)

        assert sorted(delivery.message.sequence for delivery in deliveries) == list(range(1, 51))
        assert inbox.subjects == []

    async def test_goes_to_the_reader_that_has_room(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        inbox_of: Callable[[int], Inbox],
    ) -> None:
        await create()
        await ensure()
        full, also_full = inbox_of(0), inbox_of(0)
        async with open_reader(full), open_reader(inbox), open_reader(also_full):
            for number in range(5):
                await publish(f"mars.{number}")

            assert len(await inbox.take(5)) == 5
            assert full.subjects == also_full.subjects == []


class TestSettling:
    @pytest.mark.covers("002-29", "002-31")
    async def test_an_acked_message_does_not_come_again(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        elapse: Elapse,
        eventually: Eventually,
    ) -> None:
        await create()
        await ensure(ack_wait_seconds=ACK_WAIT)
        for number in range(3):
            await publish(f"mars.{number}")
        async with open_reader(inbox) as reader:
            await settle(reader, await inbox.take(3))
            await eventually(num_pending=0, num_ack_pending=0, num_redelivered=0, ack_floor=3)

            await elapse(ACK_WAIT * 2)
            assert inbox.subjects == []

    async def test_acks_may_come_in_any_order(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        eventually: Eventually,
    ) -> None:
        await create()
        await ensure()
        for number in range(3):
            await publish(f"mars.{number}")
        async with open_reader(inbox) as reader:
            first, second, third = await inbox.take(3)
            await settle(reader, [third])
            await eventually(num_ack_pending=2, ack_floor=0)
            await settle(reader, [first])
            await eventually(num_ack_pending=1, ack_floor=1)
            await settle(reader, [second])
            await eventually(num_ack_pending=0, ack_floor=3)

    @pytest.mark.covers("002-29")
    async def test_what_is_not_settled_in_time_comes_again(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        backend: Admin,
        next_after: NextAfter,
        eventually: Eventually,
    ) -> None:
        await create()
        await ensure(ack_wait_seconds=ACK_WAIT)
        await publish("mars.0")
        await publish("mars.1")
        since = backend.clock.monotonic()
        async with open_reader(inbox) as reader:
            first, second = await inbox.take(2)
            await settle(reader, [second])
            again = await next_after(since, ACK_WAIT)
            assert (again.message.sequence, again.num_delivered) == (first.message.sequence, 2)
            assert again.message == first.message
            await eventually(num_pending=0, num_ack_pending=1, num_redelivered=1)

            await settle(reader, [again])
            await eventually(num_ack_pending=0, num_redelivered=0, ack_floor=2)

    async def test_it_comes_again_and_again(
        self, create: Create, publish: Publish, ensure: Ensure, open_reader: OpenReader, inbox: Inbox, elapse: Elapse
    ) -> None:
        await create()
        await ensure(ack_wait_seconds=0.2)
        await publish("mars.od")
        counts = []
        async with open_reader(inbox):
            for _ in range(4):
                counts.append((await inbox.next()).num_delivered)
                await elapse(0.2)

        assert counts == [1, 2, 3, 4]

    async def test_a_late_ack_counts(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        elapse: Elapse,
        eventually: Eventually,
    ) -> None:
        await create()
        await ensure(ack_wait_seconds=ACK_WAIT)
        await publish("mars.od")
        async with open_reader(inbox) as reader:
            first = await inbox.next()
            await elapse(ACK_WAIT)
            await inbox.next()

            await settle(reader, [first])
            await eventually(num_ack_pending=0)
            inbox.waiting.clear()  # what came before the ack
            await elapse(ACK_WAIT * 2)
            assert inbox.subjects == []

    async def test_progress_postpones_the_redelivery(
        self,
        backend: Admin,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        elapse: Elapse,
        next_after: NextAfter,
    ) -> None:
        await create()
        await ensure(ack_wait_seconds=3.0)  # longer than a busy machine needs until it says so
        await publish("mars.od")
        async with open_reader(inbox) as reader:
            delivery = await inbox.next()
            await elapse(0.6)
            since = backend.clock.monotonic()
            delivery.in_progress()
            await reader.settled()
            assert (await next_after(since, 3.0)).num_delivered == 2

    async def test_a_naked_message_comes_again_at_once(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        eventually: Eventually,
    ) -> None:
        await create()
        await ensure()
        await publish("mars.od")
        async with open_reader(inbox) as reader:
            (await inbox.next()).nak()
            again = await inbox.next()
            assert (again.message.sequence, again.num_delivered) == (1, 2)

            await settle(reader, [again])
            await eventually(num_ack_pending=0)

    async def test_a_naked_message_does_not_come_before_its_delay(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        backend: Admin,
        next_after: NextAfter,
    ) -> None:
        await create()
        await ensure()
        await publish("mars.0")
        async with open_reader(inbox) as reader:
            delivery, since = await inbox.next(), backend.clock.monotonic()
            delivery.nak(delay_seconds=1.0)
            await publish("mars.1")
            await settle(reader, [await inbox.next()])
            again = await next_after(since, 1.0)
            assert (again.message.subject, again.num_delivered) == ("mars.0", 2)

    async def test_a_delay_may_be_longer_than_ack_wait(
        self,
        backend: Admin,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        next_after: NextAfter,
    ) -> None:
        await create()
        await ensure(ack_wait_seconds=2.5)  # longer than a busy machine needs until it says so
        await publish("mars.od")
        async with open_reader(inbox):
            delivery, since = await inbox.next(), backend.clock.monotonic()
            delivery.nak(delay_seconds=3.5)
            assert (await next_after(since, 3.5)).num_delivered == 2

    async def test_a_delay_may_be_ended(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        inbox_of: Callable[[int], Inbox],
        elapse: Elapse,
        eventually: Eventually,
    ) -> None:
        await create()
        await ensure(ack_wait_seconds=30.0)
        await publish("mars.od")
        async with open_reader(inbox) as reader:
            delivery = await inbox.next()
            delivery.nak(delay_seconds=600.0)
            await reader.settled()
            await elapse(0.5)
            assert not inbox.waiting
            delivery.redeliver()
            again = await inbox.next()
            assert (again.message, again.num_delivered) == (delivery.message, 2)
            await elapse(0.5)
            assert not inbox.waiting, "it comes once"
            delivery.redeliver()
            beside = await inbox.next()
            assert beside.num_delivered == 3, "which is why nobody asks for what is due"
            await settle(reader, [again])
            await eventually(num_ack_pending=0, ack_floor=1)
            beside.redeliver()
            await reader.settled()
            await elapse(0.5)
            assert not inbox.waiting, "what is settled does not come again"

    async def test_a_terminated_message_never_comes_again(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        elapse: Elapse,
        eventually: Eventually,
        stored: Stored,
    ) -> None:
        await create()
        await ensure(ack_wait_seconds=ACK_WAIT)
        await publish("mars.od")
        async with open_reader(inbox) as reader:
            (await inbox.next()).term("it is not a notification")
            await reader.settled()
            await eventually(num_ack_pending=0, ack_floor=1)

            await elapse(ACK_WAIT * 2)
            assert inbox.subjects == []
        assert [message.sequence for message in await stored()] == [1]

    async def test_a_message_comes_as_often_as_allowed(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        elapse: Elapse,
        eventually: Eventually,
    ) -> None:
        await create()
        await ensure(ack_wait_seconds=0.2, max_deliver=2)
        await publish("mars.od")
        async with open_reader(inbox):
            await inbox.next()
            await elapse(0.2)
            assert (await inbox.next()).num_delivered == 2

            await elapse(1.0)
            assert inbox.subjects == []
            await eventually(num_pending=0, num_ack_pending=0)

    async def test_what_is_due_again_comes_before_what_is_new(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox_of: Callable[[int], Inbox],
        elapse: Elapse,
    ) -> None:
        await create()
        await ensure()
        for number in range(3):
            await publish(f"mars.{number}")
        inbox = inbox_of(1)
        async with open_reader(inbox) as reader:
            delivery = await inbox.next()
            inbox.size = 0  # nothing new is asked for meanwhile
            delivery.nak()
            await reader.settled()
            await elapse(0.1)
            inbox.size = 1
            reader.refill()

            assert (await inbox.next()).message.subject == "mars.0"


class TestAReaderThatLeaves:
    async def test_gets_nothing_more(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        elapse: Elapse,
        eventually: Eventually,
    ) -> None:
        await create()
        await ensure()
        async with open_reader(inbox) as reader:
            await publish("mars.0")
            await settle(reader, [await inbox.next()])
            await reader.stop()
            await publish("mars.1")
            reader.refill()
            await elapse(0.2)
        await publish("mars.2")
        await elapse(0.2)

        assert inbox.subjects == []
        await eventually(num_ack_pending=0)

    async def test_may_settle_what_it_has(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        eventually: Eventually,
    ) -> None:
        await create()
        await ensure()
        await publish("mars.0")
        await publish("mars.1")
        async with open_reader(inbox) as reader:
            deliveries = await inbox.take(2)
            await reader.stop()
            await settle(reader, deliveries)

        await eventually(num_ack_pending=0, ack_floor=2)

    async def test_may_give_back_what_it_has(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        inbox_of: Callable[[int], Inbox],
    ) -> None:
        await create()
        await ensure()
        await publish("mars.od")
        async with open_reader(inbox) as reader:
            delivery = await inbox.next()
            await reader.stop()
            delivery.nak()
            await reader.settled()

        other = inbox_of(10)
        async with open_reader(other):
            assert (await other.next()).num_delivered == 2

    async def test_leaves_what_it_did_not_settle_to_others(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        inbox_of: Callable[[int], Inbox],
        backend: Admin,
        next_after: NextAfter,
    ) -> None:
        await create()
        await ensure(ack_wait_seconds=ACK_WAIT)
        await publish("mars.od")
        since = backend.clock.monotonic()
        async with open_reader(inbox):
            await inbox.next()

        other = inbox_of(10)
        async with open_reader(other):
            assert (await next_after(since, ACK_WAIT, of=other)).num_delivered == 2

    async def test_is_followed_by_one_that_goes_on(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox_of: Callable[[int], Inbox],
    ) -> None:
        await create()
        await ensure()
        for number in range(4):
            await publish(f"mars.{number}")
        seen = []
        for _ in range(2):
            inbox = inbox_of(2)
            async with open_reader(inbox) as reader:
                deliveries = await inbox.take(2)
                await reader.stop()
                await settle(reader, deliveries)
            seen += [delivery.message.sequence for delivery in deliveries]

        assert seen == [1, 2, 3, 4]

    async def test_may_stop_twice(self, create: Create, ensure: Ensure, open_reader: OpenReader, inbox: Inbox) -> None:
        await create()
        await ensure()
        async with open_reader(inbox) as reader:
            await reader.stop()
            await reader.stop()


class TestWhatIsGone:
    async def test_before_it_was_delivered_is_not_delivered(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        backend: Admin,
        eventually: Eventually,
    ) -> None:
        await create(max_msgs_per_subject=1)
        await ensure()
        for subject in ("mars.0", "mars.1", "mars.0", "mars.2"):
            await publish(subject)
        await backend.delete_message("MARS", 4)
        await eventually(num_pending=2)
        async with open_reader(inbox):
            deliveries = await inbox.take(2)

        assert [delivery.message.sequence for delivery in deliveries] == [2, 3]
        assert inbox.subjects == []

    @pytest.mark.parametrize("how", ["replaced", "erased", "purged"])
    async def test_while_it_was_unsettled_is_not_delivered_again(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        backend: Admin,
        elapse: Elapse,
        eventually: Eventually,
        how: str,
    ) -> None:
        await create(max_msgs_per_subject=1)
        await ensure(ack_wait_seconds=ACK_WAIT)
        await publish("mars.od")
        async with open_reader(inbox) as reader:
            delivery = await inbox.next()
            match how:
                case "replaced":
                    await publish("mars.od")
                    while (other := await inbox.next()).message.sequence == 1:
                        """On a busy machine, the first one may have come again."""
                    await settle(reader, [other])
                case "erased":
                    await backend.delete_message("MARS", 1)
                case "purged":
                    await backend.purge_stream("MARS")
            await eventually(num_pending=0, num_ack_pending=0)
            inbox.waiting.clear()  # what came again before it was removed
            await elapse(ACK_WAIT * 2)
            assert inbox.subjects == []

            delivery.ack()
            await reader.settled()
            await publish("mars.rd")
            assert (await inbox.next()).message.subject == "mars.rd"

    async def test_makes_room_for_what_may_be_unsettled(
        self, create: Create, publish: Publish, ensure: Ensure, open_reader: OpenReader, inbox: Inbox, backend: Admin
    ) -> None:
        await create()
        await ensure(max_ack_pending=1)
        await publish("mars.0")
        await publish("mars.1")
        async with open_reader(inbox):
            await inbox.next()
            await backend.delete_message("MARS", 1)

            assert (await inbox.next()).message.subject == "mars.1"


class TestAPause:
    @pytest.fixture
    def after(self, backend: Admin) -> After:
        """`after(seconds)`: that time from now, by the backend's clock."""

        def after(seconds: float) -> datetime:
            return datetime.fromtimestamp(backend.clock.time_ns() / 1e9 + seconds, UTC)

        return after

    @pytest.mark.slow
    async def test_holds_back_what_comes_until_it_is_lifted(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        backend: Admin,
        elapse: Elapse,
        after: After,
    ) -> None:
        await create()
        await ensure()
        until = after(3600)
        async with open_reader(inbox):
            assert 3590 < await backend.pause_consumer("MARS", "agent", until=until) <= 3600
            await publish("mars.0")
            await elapse(ACK_WAIT)
            info = await backend.consumer_info("MARS", "agent")
            assert (inbox.subjects, info.num_pending, info.paused) == ([], 1, True)
            assert info.paused_until is not None
            assert abs(info.paused_until - until) < timedelta(milliseconds=1)

            assert await backend.pause_consumer("MARS", "agent", until=None) == 0
            assert (await inbox.next()).message.subject == "mars.0"
            assert (await backend.consumer_info("MARS", "agent")).paused_until is None

    async def test_ends_by_itself(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        backend: Admin,
        next_after: NextAfter,
        after: After,
    ) -> None:
        await create()
        await ensure()
        await publish("mars.0")
        since = backend.clock.monotonic()
        await backend.pause_consumer("MARS", "agent", until=after(ACK_WAIT))
        async with open_reader(inbox):
            assert (await next_after(since, ACK_WAIT)).num_delivered == 1
        assert not (await backend.consumer_info("MARS", "agent")).paused

    @pytest.mark.slow
    async def test_may_be_made_longer_and_shorter(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        backend: Admin,
        elapse: Elapse,
        after: After,
    ) -> None:
        await create()
        await ensure()
        await publish("mars.0")
        await backend.pause_consumer("MARS", "agent", until=after(ACK_WAIT))
        await backend.pause_consumer("MARS", "agent", until=after(3600))
        async with open_reader(inbox):
            await elapse(ACK_WAIT * 2)
            assert inbox.subjects == []
            assert await backend.pause_consumer("MARS", "agent", until=after(-1)) == 0
            assert (await inbox.next()).message.subject == "mars.0"

    @pytest.mark.slow
    async def test_holds_back_what_comes_again_and_lets_settle(
        self,
        create: Create,
        publish: Publish,
        ensure: Ensure,
        open_reader: OpenReader,
        inbox: Inbox,
        backend: Admin,
        elapse: Elapse,
        after: After,
        eventually: Eventually,
    ) -> None:
        await create()
        await ensure(ack_wait_seconds=ACK_WAIT)
        await publish("mars.0")
        await publish("mars.1")
        async with open_reader(inbox) as reader:
            first, _ = await inbox.take(2)
            await backend.pause_consumer("MARS", "agent", until=after(3600))
            await settle(reader, [first])
            await eventually(num_ack_pending=1)
            inbox.waiting.clear()  # what came again before the pause
            await elapse(ACK_WAIT * 2)
            assert inbox.subjects == []

            await backend.pause_consumer("MARS", "agent", until=None)
            again = await inbox.next()
            assert (again.message.subject, again.num_delivered > 1) == ("mars.1", True)

    async def test_outlives_an_update(self, create: Create, ensure: Ensure, backend: Admin, after: After) -> None:
        await create()
        await ensure()
        await backend.pause_consumer("MARS", "agent", until=after(3600))
        assert (await ensure(max_ack_pending=7)).paused

    async def test_needs_a_consumer(self, create: Create, backend: Admin) -> None:
        await create()
        with pytest.raises(NotFoundError) as missing:
            await backend.pause_consumer("MARS", "agent", until=None)
        assert missing.value.code == 10014


class TestAReset:
    @pytest.fixture
    async def five(self, create: Create, publish: Publish, ensure: Ensure) -> None:
        """The subjects mars.1 to mars.5, at the sequences 1 to 5."""
        await create()
        await ensure()
        for number in range(1, 6):
            await publish(f"mars.{number}")

    async def test_goes_back_and_delivers_anew(
        self,
        five: None,
        backend: Admin,
        open_reader: OpenReader,
        inbox: Inbox,
        inbox_of: Callable[[int], Inbox],
        eventually: Eventually,
    ) -> None:
        async with open_reader(inbox) as reader:
            await settle(reader, await inbox.take(5))
        await eventually(ack_floor=5)

        info = await backend.reset_consumer("MARS", "agent", sequence=3)

        assert (info.num_pending, info.num_ack_pending, info.ack_floor) == (3, 0, 2)
        again = inbox_of(10)
        async with open_reader(again):
            deliveries = await again.take(3)
        assert [(delivery.message.sequence, delivery.num_delivered) for delivery in deliveries] == [
            (3, 1),
            (4, 1),
            (5, 1),
        ]

    async def test_goes_forward_and_passes_over(
        self, five: None, backend: Admin, open_reader: OpenReader, inbox: Inbox
    ) -> None:
        info = await backend.reset_consumer("MARS", "agent", sequence=5)

        assert (info.num_pending, info.ack_floor) == (1, 4)
        async with open_reader(inbox):
            assert (await inbox.next()).message.sequence == 5

    async def test_reaches_an_open_reader(
        self, five: None, backend: Admin, open_reader: OpenReader, inbox: Inbox
    ) -> None:
        async with open_reader(inbox) as reader:
            await settle(reader, await inbox.take(5))
            await backend.reset_consumer("MARS", "agent", sequence=5)
            assert (await inbox.next()).message.sequence == 5

    async def test_forgets_what_is_out(
        self, five: None, backend: Admin, open_reader: OpenReader, inbox: Inbox, elapse: Elapse, eventually: Eventually
    ) -> None:
        await backend.ensure_consumer(
            "MARS",
            ConsumerSpec(durable_name="agent", filter_subjects=("mars.>",), ack_wait=500_000_000, max_ack_pending=100),
        )
        async with open_reader(inbox) as reader:
            deliveries = await inbox.take(5)
            await backend.reset_consumer("MARS", "agent", sequence=6)
            inbox.waiting.clear()  # what came again before the reset
            await elapse(ACK_WAIT * 2)
            assert inbox.subjects == []

            await settle(reader, deliveries)
            await eventually(num_pending=0, num_ack_pending=0, ack_floor=5)

    async def test_a_delivery_of_before_settles_the_one_of_after(
        self, five: None, backend: Admin, open_reader: OpenReader, inbox: Inbox, eventually: Eventually
    ) -> None:
        async with open_reader(inbox) as reader:
            *_, before = await inbox.take(5)
            await backend.reset_consumer("MARS", "agent", sequence=5)
            await inbox.next()
            await settle(reader, [before])
            await eventually(num_pending=0, num_ack_pending=0)

    async def test_beyond_the_end_waits_until_the_stream_is_there(
        self, five: None, publish: Publish, backend: Admin, open_reader: OpenReader, inbox: Inbox, elapse: Elapse
    ) -> None:
        await backend.reset_consumer("MARS", "agent", sequence=7)
        async with open_reader(inbox):
            await publish("mars.6")
            await elapse(0.1)
            assert inbox.subjects == []
            await publish("mars.7")
            assert (await inbox.next()).message.subject == "mars.7"

    async def test_needs_a_consumer(self, create: Create, backend: Admin) -> None:
        await create()
        with pytest.raises(NotFoundError) as missing, anyio.fail_after(PATIENCE_SECONDS):
            await backend.reset_consumer("MARS", "agent", sequence=1)
        assert missing.value.code == 10014

    @pytest.mark.parametrize("start", ["new", "3", "2100-01-01T00:00:00+00:00"])
    async def test_goes_further_back_than_where_the_consumer_began(
        self,
        create: Create,
        ensure: Ensure,
        publish: Publish,
        backend: Admin,
        open_reader: OpenReader,
        inbox: Inbox,
        start: str,
    ) -> None:
        await create()
        for step in range(4):
            await publish(f"mars.{step}")
        await ensure(**metadata.starting(start))
        info = await backend.reset_consumer("MARS", "agent", sequence=2)
        assert info.num_pending == 3
        async with open_reader(inbox):
            assert [each.message.sequence for each in await inbox.take(3)] == [2, 3, 4]
