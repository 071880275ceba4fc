"""What is the in-memory backend's own: its clock, its two settings, and the connection that a test may take away.

What it shares with every backend is in tests/contract.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aviso_workers import config
from aviso_workers.backends import Delivery, Message
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.backends.in_memory.stream import Durable
from aviso_workers.clocks import VirtualClock
from aviso_workers.errors import RefusedError, UnavailableError
from aviso_workers.jetstream.specs import ConsumerSpec, StreamSpec
from aviso_workers.jetstream.subjects import matcher, overlap, pattern, within
from tests.waits import PATIENCE_SECONDS

SECOND = 1_000_000_000


def backend_of(clock: VirtualClock | None = None, **stated: Any) -> InMemoryBackend:
    return InMemoryBackend(config.InMemory(**stated), clock=clock)


async def publish(backend: InMemoryBackend, *subjects: str, stream: str = "MARS") -> None:
    for subject in subjects:
        count = (await backend.stream_info(stream)).last_sequence
        await backend.publish(
            Message(subject=subject, data=b"null"),
            message_id=f"{stream} {count}",
            stream=stream,
            timeout_seconds=1.0,
        )


async def subjects_of(backend: InMemoryBackend, stream: str = "MARS") -> list[str]:
    last = (await backend.stream_info(stream)).last_sequence
    return [message.subject async for message in backend.read(stream, filter_subjects=(), last_sequence=last)]


def stream_of(base: str, **stated: Any) -> StreamSpec:
    return StreamSpec(name=base.upper(), subjects=(f"{base}.>",), **({"max_msgs_per_subject": 1} | stated))


def agent(**stated: Any) -> ConsumerSpec:
    ack_wait = int(stated.pop("ack_wait_seconds", 10.0) * SECOND)
    default: dict[str, Any] = {"durable_name": "agent", "filter_subjects": ("mars.>",), "max_ack_pending": 100}
    return ConsumerSpec(**default | stated, ack_wait=ack_wait)


class TestVirtualTime:
    pytestmark = pytest.mark.anyio

    async def test_stands_still_until_it_is_moved(self) -> None:
        clock = VirtualClock()
        before = (clock.monotonic(), clock.time_ns())
        await anyio.sleep(0.01)
        assert (clock.monotonic(), clock.time_ns()) == before

        await clock.advance(1.5)

        assert (clock.monotonic(), clock.time_ns()) == (before[0] + 1.5, before[1] + 1_500_000_000)

    async def test_makes_each_call_at_its_second(self) -> None:
        clock = VirtualClock()
        calls: list[tuple[str, float]] = []

        def note(name: str) -> Callable[[], None]:
            return lambda: calls.append((name, clock.monotonic()))

        clock.call_at(2.0, note("second"))
        clock.call_at(1.0, note("first"))
        clock.call_at(3.0, note("cancelled")).cancel()
        clock.call_at(4.0, note("later"))

        await clock.advance(3.5)

        assert calls == [("first", 1.0), ("second", 2.0)]

    async def test_goes_on_when_what_was_set_going_has_come_to_rest(self) -> None:
        clock = VirtualClock()
        seen: list[float] = []
        due = anyio.Event()

        async def work() -> None:
            await due.wait()
            for _ in range(30):
                await anyio.lowlevel.checkpoint()
            seen.append(clock.monotonic())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            clock.call_at(1.0, due.set)
            clock.call_at(5.0, lambda: None)
            await clock.advance(10.0)

        assert seen == [1.0]

    async def test_redelivers_for_an_hour_in_no_time(self) -> None:
        clock, counts = VirtualClock(), []
        async with backend_of(clock) as backend:
            await backend.create_stream(stream_of("mars"))
            await backend.ensure_consumer("MARS", agent(ack_wait_seconds=60.0))
            await publish(backend, "mars.od")

            def deliver(deliveries: Sequence[Delivery]) -> None:
                (delivery,) = deliveries
                counts.append(delivery.num_delivered)

            async with backend.consume("MARS", "agent", deliver=deliver, capacity=lambda: 1):
                await clock.advance(3600.0)

        assert counts == list(range(1, 62))


class TestRealTime:
    pytestmark = pytest.mark.anyio

    async def test_is_the_default(self) -> None:
        arrived, counts = anyio.Event(), []
        async with backend_of() as backend:
            await backend.create_stream(stream_of("mars"))
            await backend.ensure_consumer("MARS", agent(ack_wait_seconds=0.05))
            await publish(backend, "mars.od")

            def deliver(deliveries: Sequence[Delivery]) -> None:
                (delivery,) = deliveries
                counts.append(delivery.num_delivered)
                if delivery.num_delivered == 2:
                    delivery.ack()
                    arrived.set()

            async with backend.consume("MARS", "agent", deliver=deliver, capacity=lambda: 1):
                with anyio.fail_after(PATIENCE_SECONDS):
                    await arrived.wait()

        assert counts == [1, 2]


class TestItsSettings:
    pytestmark = pytest.mark.anyio

    async def test_a_topic_keeps_its_history(self) -> None:
        async with backend_of(max_history_per_topic=2) as backend:
            await backend.create_stream(stream_of("mars"))
            await publish(backend, "mars.a", "mars.a", "mars.b", "mars.a")

            assert await subjects_of(backend) == ["mars.a", "mars.b", "mars.a"]

    async def test_the_topic_that_was_quiet_for_longest_gives_way(self) -> None:
        async with backend_of(VirtualClock(), max_topics=3) as backend:
            await backend.create_stream(stream_of("mars"))
            await backend.create_stream(stream_of("diss"))
            await publish(backend, "mars.a", "mars.b")
            await publish(backend, "diss.a", stream="DISS")
            await publish(backend, "mars.a", "mars.c")

            assert await subjects_of(backend) == ["mars.a", "mars.c"]
            assert await subjects_of(backend, "DISS") == ["diss.a"]

            await publish(backend, "mars.d")
            assert await subjects_of(backend, "DISS") == []

    async def test_streams_that_are_no_topics_keep_everything(self) -> None:
        async with backend_of(max_topics=1) as backend:
            await backend.create_stream(stream_of("mars"))
            await backend.create_stream(stream_of("letters", max_msgs_per_subject=-1))
            bucket = await backend.key_value("leases")
            for key in ("one", "two"):
                await bucket.put(key, b"")
            await publish(backend, "mars.a")
            await publish(backend, "letters.a", "letters.b", "letters.b", stream="LETTERS")

            assert await bucket.keys() == ["one", "two"]
            assert await subjects_of(backend, "LETTERS") == ["letters.a", "letters.b", "letters.b"]
            assert await subjects_of(backend) == ["mars.a"]


class TestWhatItDoesNotOffer:
    pytestmark = pytest.mark.anyio

    async def test_retention_by_anything_but_limits(self) -> None:
        async with backend_of() as backend:
            with pytest.raises(RefusedError, match="retention limits, found workqueue"):
                await backend.create_stream(stream_of("mars", retention="workqueue"))

    @pytest.mark.parametrize("schedule", ["@every 1m", "@at 2026-01-01T00:00:00", "@at noon", "2026-01-01T00:00:00Z"])
    async def test_schedules_that_come_again_or_at_no_time(self, schedule: str) -> None:
        async with backend_of() as backend:
            await backend.create_stream(stream_of("mars", allow_msg_schedules=True))
            headers = {"Nats-Schedule": schedule, "Nats-Schedule-Target": "mars.due"}
            with pytest.raises(RefusedError, match="no schedule"):
                await backend.publish(
                    Message(subject="mars.a", data=b"null", headers=headers),
                    message_id="1",
                    stream="MARS",
                    timeout_seconds=1.0,
                )

    @pytest.mark.parametrize("stated", [{"ack_policy": "none"}, {"deliver_policy": "last_per_subject"}])
    async def test_other_policies_of_a_consumer(self, stated: dict[str, Any]) -> None:
        async with backend_of() as backend:
            await backend.create_stream(stream_of("mars"))
            with pytest.raises(RefusedError, match=next(iter(stated.values()))):
                await backend.ensure_consumer("MARS", agent(**stated))


class TestALostConnection:
    pytestmark = pytest.mark.anyio

    async def test_is_told_and_comes_back(self) -> None:
        told: list[tuple[bool, str]] = []

        def listen(*, connected: bool, reason: str, denied: str = "", foreign: str = "", times: int = 0) -> None:
            told.append((connected, reason))

        async with InMemoryBackend(config.InMemory(), on_connection=listen) as backend:
            backend.disconnect("the cable")
            assert not backend.connection.ready
            backend.reconnect()
            assert backend.connection.ready

        assert told == [(True, ""), (False, "the cable"), (True, "")]

    async def test_fails_every_request_and_keeps_what_was_stored(self) -> None:
        async with backend_of() as backend:
            await backend.create_stream(stream_of("mars"))
            await publish(backend, "mars.a")
            bucket = await backend.key_value("leases")
            backend.disconnect("the cable")

            for request in (
                backend.stream_info("MARS"),
                backend.ensure_consumer("MARS", agent()),
                backend.publish(
                    Message(subject="mars.b", data=b""), message_id="b", stream="MARS", timeout_seconds=1.0
                ),
                anext(backend.read("MARS", filter_subjects=())),
                bucket.get("owner"),
            ):
                with pytest.raises(UnavailableError, match="the cable"):
                    await request

            backend.reconnect()
            assert await subjects_of(backend) == ["mars.a"]

    async def test_ends_a_reading(self) -> None:
        async with backend_of() as backend:
            await backend.create_stream(stream_of("mars"))
            await publish(backend, "mars.a")
            messages = backend.read("MARS", filter_subjects=())
            assert (await anext(messages)).sequence == 1

            async def disconnect() -> None:
                backend.disconnect()
                backend.reconnect()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(disconnect)
                with pytest.raises(UnavailableError):
                    await anext(messages)

    async def test_loses_settlements_and_stops_deliveries(self) -> None:
        clock = VirtualClock()
        deliveries: list[Delivery] = []
        async with backend_of(clock) as backend:
            await backend.create_stream(stream_of("mars"))
            await backend.ensure_consumer("MARS", agent(ack_wait_seconds=10.0))
            await publish(backend, "mars.a")
            async with backend.consume("MARS", "agent", deliver=deliveries.extend, capacity=lambda: 10) as reader:
                await clock.advance(1.0)
                backend.disconnect()
                deliveries[0].ack()
                with pytest.raises(UnavailableError):
                    await reader.settled()
                await clock.advance(30.0)
                assert len(deliveries) == 1

                backend.reconnect()
                with pytest.raises(UnavailableError, match="1 settlement"):
                    await reader.settled()
                await clock.advance(0.0)

        assert [delivery.num_delivered for delivery in deliveries] == [1, 2]


tokens = st.sampled_from(["a", "b", "c"])
subjects = st.lists(tokens, min_size=1, max_size=4)
filters = st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=4).flatmap(
    lambda start: st.sampled_from([start, [*start, ">"]])
)


def takes(filter_tokens: list[str], subject_tokens: list[str]) -> bool:
    """NATS' rule, word for word: `*` is one token, `>` is one or more at the end."""
    if filter_tokens == [">"]:
        return len(subject_tokens) > 0
    if not filter_tokens or not subject_tokens:
        return filter_tokens == subject_tokens
    return filter_tokens[0] in ("*", subject_tokens[0]) and takes(filter_tokens[1:], subject_tokens[1:])


class TestSubjects:
    @given(filters, subjects)
    def test_a_filter_takes_what_nats_says(self, filter_tokens: list[str], subject_tokens: list[str]) -> None:
        matched = pattern([".".join(filter_tokens)]).fullmatch(".".join(subject_tokens)) is not None
        assert matched == takes(filter_tokens, subject_tokens)

    @given(st.lists(filters, max_size=3), subjects)
    def test_the_fast_way_says_the_same(self, filter_lists: list[list[str]], subject_tokens: list[str]) -> None:
        written, subject = [".".join(each) for each in filter_lists], ".".join(subject_tokens)
        assert bool(matcher(written)(subject)) == (pattern(written).fullmatch(subject) is not None)

    @given(st.lists(filters, min_size=1, max_size=4), st.lists(filters, min_size=1, max_size=4), subjects)
    def test_filters_within_others_take_no_subject_that_those_do_not(
        self, narrow: list[list[str]], wide: list[list[str]], subject_tokens: list[str]
    ) -> None:
        all_within = within([".".join(each) for each in narrow], [".".join(each) for each in wide])
        taken = any(takes(each, subject_tokens) for each in narrow)
        assert not (all_within and taken) or any(takes(each, subject_tokens) for each in wide)

    @given(st.lists(filters, min_size=1, max_size=4), st.lists(filters, max_size=4))
    def test_filters_are_within_themselves_and_more(self, narrow: list[list[str]], others: list[list[str]]) -> None:
        own = [".".join(each) for each in narrow]
        assert within(own, [*own, *(".".join(each) for each in others)])
        assert within(own, ())
        assert within((), [">"])

    @given(filters, filters, subjects)
    def test_filters_overlap_where_both_take_a_subject(
        self, left: list[str], right: list[str], subject_tokens: list[str]
    ) -> None:
        if takes(left, subject_tokens) and takes(right, subject_tokens):
            assert overlap(".".join(left), ".".join(right))

    @given(filters, filters)
    def test_filters_overlap_only_where_such_a_subject_exists(self, left: list[str], right: list[str]) -> None:
        a, b = ".".join(left), ".".join(right)
        depth = max(len(left), len(right)) + 1
        candidates: list[list[str]] = [[]]
        found = False
        for _ in range(depth):
            candidates = [[*tokens, token] for tokens in candidates for token in ("a", "b")]
            found = found or any(takes(left, tokens) and takes(right, tokens) for tokens in candidates)
        assert overlap(a, b) == overlap(b, a) == found


class DurableConsumer(RuleBasedStateMachine):
    """Whatever happens: what is stored and not settled waits, is out, or is due again; all of it ends settled."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: dict[int, Message] = {}
        self.durable = Durable(agent(ack_wait_seconds=10.0, max_ack_pending=3), self.messages, last_sequence=0)
        self.now = 0.0
        self.last = 0
        self.settled: set[int] = set()
        self.deliveries: Counter[int] = Counter()
        self.held_until: dict[int, float] = {}

    @rule()
    def publish(self) -> None:
        self.last += 1
        message = Message(subject=f"mars.{self.last}", data=b"", sequence=self.last)
        self.messages[self.last] = message
        self.durable.offer(message)

    @rule()
    def take(self) -> None:
        taken = self.durable.take(self.now)
        if taken is None:
            return
        sequence, num_delivered = taken[0].sequence, taken[1]
        assert sequence not in self.settled
        assert self.held_until.get(sequence, 0.0) <= self.now, "somebody else holds it"
        self.deliveries[sequence] += 1
        assert num_delivered == self.deliveries[sequence]
        self.held_until[sequence] = self.now + 10.0

    @precondition(lambda self: self.held_until)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        self.settle(data.draw(st.sampled_from(sorted(self.held_until))))

    @precondition(lambda self: self.held_until)
    @rule(data=st.data(), delay=st.sampled_from([0.0, 5.0, 20.0]))
    def nak(self, data: st.DataObject, delay: float) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.held_until)))
        self.durable.give_back(sequence, not_before=self.now + delay, now=self.now)
        self.held_until[sequence] = self.now + delay

    @precondition(lambda self: any(until > self.now for until in self.held_until.values()))
    @rule(data=st.data())
    def progress(self, data: st.DataObject) -> None:
        held = sorted(sequence for sequence, until in self.held_until.items() if until > self.now)
        sequence = data.draw(st.sampled_from(held))
        self.durable.in_progress(sequence, self.now)
        self.held_until[sequence] = self.now + 10.0

    @precondition(lambda self: self.messages)
    @rule(data=st.data())
    def erase(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.messages)))
        del self.messages[sequence]
        self.durable.forget(sequence)
        self.settled.add(sequence)
        self.held_until.pop(sequence, None)

    @rule(seconds=st.integers(1, 15))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.durable.collect_overdue(self.now)

    @invariant()
    def nothing_is_lost(self) -> None:
        info = self.durable.info(now_ns=0)
        assert info.num_ack_pending == len(self.held_until) <= 3
        assert info.num_pending + info.num_ack_pending == self.last - len(self.settled)

    def teardown(self) -> None:
        while len(self.settled) < self.last:
            self.wait(20)
            self.take()
            for sequence in tuple(self.held_until):
                self.settle(sequence)
        self.nothing_is_lost()

    def settle(self, sequence: int) -> None:
        self.durable.settle(sequence)
        self.settled.add(sequence)
        del self.held_until[sequence]


TestADurableConsumer = DurableConsumer.TestCase
