"""Publishing: tried again while that may help, under one message id, and refused before a byte where it cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import anyio
import pytest
from msgspec import structs

from aviso_workers import Notify, config
from aviso_workers.aviso.schema import EventType, PayloadRule, StringHandler, Topic
from aviso_workers.backends import Message, Outgoing, OutgoingChunk, PubAck, StreamInfo
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.engine.publisher import CHUNK, CHUNKS_UNDER_WAY
from aviso_workers.errors import (
    BackendError,
    ConflictError,
    FullError,
    InvalidIdentifierError,
    InvalidNotificationError,
    InvalidPayloadError,
    OutcomeUnknownError,
    RefusedError,
    UnavailableError,
    UnknownEventTypeError,
)
from aviso_workers.events import Published
from aviso_workers.sessions.session import Session
from tests.engine.conftest import MARS, Facts, Stored, config_with
from tests.presence import present

pytestmark = pytest.mark.anyio


class FlakyBackend(InMemoryBackend):
    """Fails as it is told: `unavailable` or `refused` before it stores, `unanswered` after it has stored."""

    def __init__(self, *failures: str) -> None:
        super().__init__(config.InMemory(max_history_per_topic=1000))
        self.failures = list(failures)
        self.tries: list[tuple[float, str]] = []
        """When, and under which message id."""
        self.looks = 0
        self.under_way = self.most_under_way = 0

    async def publish(self, message: Message, *, message_id: str, **stated: Any) -> PubAck:
        self.tries.append((anyio.current_time(), message_id))
        failure = self.failures.pop(0) if self.failures else ""
        if failure == "unavailable":
            raise UnavailableError("no leader")
        if failure == "refused":
            raise RefusedError("not here")
        ack = await super().publish(message, message_id=message_id, **stated)
        if failure == "unanswered":
            raise OutcomeUnknownError("no answer")
        return ack

    async def publish_together(self, outgoing: Sequence[Outgoing], **stated: Any) -> PubAck:
        failure = self.failures.pop(0) if self.failures else ""
        if failure == "refused":
            raise RefusedError("not here")
        ack = await super().publish_together(outgoing, **stated)
        if failure == "unanswered":
            raise OutcomeUnknownError("no answer")
        return ack

    async def publish_chunk(self, stream: str, chunk: OutgoingChunk, **stated: Any) -> int:
        unanswered = self.failures[:1] == ["unanswered"]
        stored = await super().publish_chunk(stream, chunk, **stated)
        if unanswered:
            raise OutcomeUnknownError("no answer")
        return stored

    async def publish_many(self, outgoing: Sequence[Outgoing], **stated: Any) -> list[PubAck | BackendError]:
        self.under_way += len(outgoing)
        self.most_under_way = max(self.most_under_way, self.under_way)
        results = await super().publish_many(outgoing, **stated)
        self.under_way -= len(outgoing)
        return results

    async def stream_info(self, stream: str, **stated: Any) -> StreamInfo:
        self.looks += 1
        return await super().stream_info(stream, **stated)


STEP_6 = Notify("mars", {"class": "od", "step": 6}, {"location": "here"})


def session_on(backend: InMemoryBackend, facts: Facts, **stated: Any) -> Session:
    return Session(backend, app="tests", config=config_with(**stated), events=facts.events)


async def test_a_receipt_says_where_it_is_stored(session: Session, stored: Stored, facts: Facts) -> None:
    receipt = await session.publisher.notify(STEP_6)
    assert (receipt.stream, receipt.sequence, receipt.duplicate) == ("MARS", 1, False)
    (message,) = await stored("MARS")
    assert (message.subject, message.data) == ("mars.od.6", b'{"location":"here"}')
    assert facts.of(Published) == [Published(event_type="mars", outcome="stored", attempts=1)]


async def test_two_notifications_have_two_message_ids(session: Session, stored: Stored) -> None:
    for _ in range(2):
        assert not (await session.publisher.notify(STEP_6)).duplicate
    ids = {present(message.headers)["Nats-Msg-Id"] for message in await stored("MARS")}
    assert len(ids) == 2


async def test_a_message_id_of_ones_own_is_stored_once(session: Session, stored: Stored, facts: Facts) -> None:
    mine = structs.replace(STEP_6, message_id="mine")
    assert [(await session.publisher.notify(mine)).duplicate for _ in range(2)] == [False, True]
    assert len(await stored("MARS")) == 1
    assert [event.outcome for event in facts.of(Published)] == ["stored", "duplicate"]


async def test_what_is_unavailable_is_tried_again_under_the_same_id(facts: Facts) -> None:
    async with FlakyBackend("unavailable", "unavailable") as backend:
        receipt = await session_on(backend, facts).publisher.notify(STEP_6)
    assert (receipt.sequence, receipt.duplicate) == (1, False)
    assert len({message_id for _, message_id in backend.tries}) == 1
    assert facts.of(Published) == [Published(event_type="mars", outcome="stored", attempts=3)]


async def test_what_was_stored_without_an_answer_is_not_stored_twice(facts: Facts) -> None:
    async with FlakyBackend("unanswered", "unanswered") as backend:
        receipt = await session_on(backend, facts).publisher.notify(STEP_6)
        assert (await backend.stream_info("MARS")).messages == 1
    assert (receipt.sequence, receipt.duplicate) == (1, True)
    assert facts.of(Published) == [Published(event_type="mars", outcome="duplicate", attempts=3)]


async def test_a_connection_that_comes_back_in_time_costs_nothing_but_time(
    session: Session, backend: InMemoryBackend
) -> None:
    backend.disconnect()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.publisher.notify, STEP_6)
        await anyio.sleep(20.0)
        backend.reconnect()
    assert (await backend.stream_info("MARS")).messages == 1


async def test_the_waits_double_up_to_a_second(facts: Facts) -> None:
    async with FlakyBackend(*["unavailable"] * 6) as backend:
        await session_on(backend, facts).publisher.notify(STEP_6)
    times = [time for time, _ in backend.tries]
    waits = [round(later - earlier, 3) for earlier, later in pairwise(times)]
    assert waits == [0.15, 0.3, 0.6, 1.0, 1.0, 1.0]


async def test_a_stream_that_may_be_gone_is_looked_at_again(facts: Facts) -> None:
    async with FlakyBackend("unanswered", "unavailable") as backend:
        publisher = session_on(backend, facts).publisher
        await publisher.notify(STEP_6)
        looks_with_a_failure = backend.looks
        await publisher.notify(STEP_6)
    assert (looks_with_a_failure, backend.looks) == (3, 3)  # before and after creating, and after being unavailable


async def test_the_deadline_ends_it_and_the_error_says_after_how_many_attempts(facts: Facts) -> None:
    async with FlakyBackend(*["unavailable"] * 1000) as backend:
        publisher = session_on(backend, facts, publish_deadline_seconds=10.0).publisher
        with pytest.raises(UnavailableError, match=r"no leader; tried 12 times"):
            await publisher.notify(STEP_6)
    assert 9.0 <= backend.tries[-1][0] - backend.tries[0][0] <= 10.0
    assert facts.of(Published) == [Published(event_type="mars", outcome="failed", attempts=12)]


async def test_the_documented_attempts_are_made_even_beyond_the_deadline(facts: Facts) -> None:
    async with FlakyBackend(*["unavailable"] * 1000) as backend:
        publisher = session_on(backend, facts, publish_deadline_seconds=0.01, publish_retry_attempts=4).publisher
        with pytest.raises(UnavailableError, match="tried 4 times"):
            await publisher.notify(STEP_6)


async def test_after_one_unanswered_attempt_it_may_be_stored(facts: Facts) -> None:
    async with FlakyBackend("unanswered", *["unavailable"] * 1000) as backend:
        publisher = session_on(backend, facts, publish_deadline_seconds=1.0).publisher
        with pytest.raises(OutcomeUnknownError, match="no leader; tried"):
            await publisher.notify(STEP_6)
        assert (await backend.stream_info("MARS")).messages == 1


async def test_what_is_refused_is_not_tried_again(facts: Facts) -> None:
    async with FlakyBackend("refused") as backend:
        with pytest.raises(RefusedError, match="not here"):
            await session_on(backend, facts).publisher.notify(STEP_6)
    assert len(backend.tries) == 1
    assert facts.of(Published)[-1] == Published(event_type="mars", outcome="failed", attempts=1)


async def test_what_may_be_stored_is_not_told_as_refused_by_a_later_attempt(facts: Facts) -> None:
    async with FlakyBackend("unanswered", "refused") as backend:
        with pytest.raises(OutcomeUnknownError, match="not here; the answer to an earlier attempt was lost"):
            await session_on(backend, facts).publisher.notify(STEP_6)
        assert (await backend.stream_info("MARS")).messages == 1
    assert facts.of(Published)[-1] == Published(event_type="mars", outcome="failed", attempts=2)


async def test_a_delayed_notification_that_may_wait_is_not_told_as_refused(facts: Facts) -> None:
    async with FlakyBackend("unanswered", "refused") as backend:
        with pytest.raises(OutcomeUnknownError, match="not here"):
            await session_on(backend, facts).publisher.notify(structs.replace(STEP_6, due=60))
        assert (await backend.stream_info("aviso_workers_schedule__MARS")).messages == 1


async def test_a_doubt_is_over_when_the_notification_is_acknowledged(facts: Facts) -> None:
    """The first of two was in doubt and is stored; the second was refused and never in doubt."""
    async with FlakyBackend("unanswered", "unavailable", "", "refused") as backend:
        with pytest.raises(RefusedError, match="not here"):
            await session_on(backend, facts).publisher.notify_many([STEP_6, STEP_6])


async def test_publishers_wait_until_a_full_stream_has_room_again(facts: Facts) -> None:
    async with FlakyBackend() as backend:
        publisher = session_on(backend, facts, max_messages=1, discard_policy="new").publisher
        await publisher.notify(STEP_6)
        async with anyio.create_task_group() as publishing:
            publishing.start_soon(publisher.notify, STEP_6)
            await anyio.sleep(10)
            await backend.purge_stream("MARS")
        assert (await backend.stream_info("MARS")).last_sequence == 2
    assert facts.of(Published)[-1].outcome == "stored"


async def test_a_stream_that_stays_full_is_told_when_the_deadline_is_over(facts: Facts) -> None:
    async with FlakyBackend() as backend:
        stated = {"max_messages": 1, "discard_policy": "new", "publish_deadline_seconds": 30.0}
        publisher = session_on(backend, facts, **stated).publisher
        await publisher.notify(STEP_6)
        began = anyio.current_time()
        with pytest.raises(FullError, match="is full: maximum messages exceeded; tried"):
            await publisher.notify(STEP_6)
        assert 28 < anyio.current_time() - began < 31
    assert len({message_id for _, message_id in backend.tries}) == 2
    assert facts.of(Published)[-1].outcome == "failed"


STRICT = structs.replace(MARS, payload=PayloadRule(required=True))
TWO_LONG_FIELDS = EventType(
    topic=Topic(base="mars", key_order=("class", "step")),
    identifier={"class": StringHandler(required=True), "step": StringHandler(required=True)},
)


@pytest.mark.parametrize(
    ("wanted", "event_type", "error", "complaint"),
    [
        (
            Notify("marsh", {}),
            MARS,
            UnknownEventTypeError,
            "unknown event type 'marsh'; event types: mars; did you mean 'mars'",
        ),
        (Notify("waves", {}), MARS, UnknownEventTypeError, "unknown event type 'waves'; event types: mars$"),
        (Notify("mars", {"class": "od"}), MARS, InvalidIdentifierError, "'step' is missing"),
        (Notify("mars", {"class": "od", "step": 1001}), MARS, InvalidIdentifierError, "'step' must be within"),
        (Notify("mars", {"class": "o d", "step": 1}), MARS, InvalidIdentifierError, "'class' must not"),
        (Notify("mars", {"class": "od", "step": 1, "stop": 1}), MARS, InvalidIdentifierError, "did you mean 'step'"),
        (Notify("mars", {"class": "od", "step": 1}), STRICT, InvalidPayloadError, "a payload is required"),
        (Notify("mars", {"class": "od", "step": 1}, {1, object()}), MARS, InvalidPayloadError, "is not JSON"),
        (
            Notify("mars", {"class": "od", "step": 1}, "x" * 2**20),
            MARS,
            InvalidPayloadError,
            "mars: the notification has 1048578 bytes, the server takes 1036288 and its headers",
        ),
        (
            Notify("mars", {"class": "é" * 1000, "step": "y" * 2000}),
            TWO_LONG_FIELDS,
            InvalidNotificationError,
            "mars: the identifier makes a subject of 4006 bytes, at most 3900 can be sent",
        ),
    ],
)
async def test_what_is_wrong_is_refused_before_anything_is_sent(
    backend: InMemoryBackend,
    facts: Facts,
    wanted: Notify,
    event_type: EventType,
    error: type[Exception],
    complaint: str,
) -> None:
    publisher = session_on(backend, facts, event_type=event_type).publisher
    with pytest.raises(error, match=complaint):
        await publisher.notify(wanted)
    assert await backend.stream_names() == []


class TestMany:
    async def test_are_all_stored_some_at_a_time(self, facts: Facts) -> None:
        async with FlakyBackend() as backend:
            wanted = (structs.replace(STEP_6, payload=number) for number in range(5000))
            assert await session_on(backend, facts).publisher.notify_many(wanted) == 5000
            assert (await backend.stream_info("MARS")).last_sequence == 5000
        assert 1 < backend.most_under_way <= CHUNK * CHUNKS_UNDER_WAY
        assert sum(event.count for event in facts.of(Published) if event.outcome == "stored") == 5000

    async def test_are_few_at_a_time_where_they_are_large(self, facts: Facts) -> None:
        async with FlakyBackend() as backend:
            wanted = (structs.replace(STEP_6, payload="x" * 600_000) for _ in range(20))
            assert await session_on(backend, facts).publisher.notify_many(wanted) == 20
        assert backend.most_under_way == 2 * CHUNKS_UNDER_WAY

    async def test_are_tried_again_as_one_by_one(self, facts: Facts) -> None:
        async with FlakyBackend("unavailable", "", "unanswered", "unavailable") as backend:
            wanted = (structs.replace(STEP_6, payload=number) for number in range(3))
            assert await session_on(backend, facts).publisher.notify_many(wanted) == 3
            assert (await backend.stream_info("MARS")).messages == 3
        assert [(event.outcome, event.attempts, event.count) for event in facts.of(Published)] == [
            ("stored", 1, 1),
            ("duplicate", 2, 1),
            ("stored", 3, 1),
        ]

    async def test_one_that_may_be_stored_is_not_told_as_refused(self, facts: Facts) -> None:
        async with FlakyBackend("", "unanswered", "", "refused") as backend:
            with pytest.raises(OutcomeUnknownError, match="not here"):
                await session_on(backend, facts).publisher.notify_many([STEP_6] * 3)
            assert (await backend.stream_info("MARS")).messages == 3

    async def test_stored_together_are_not_told_as_refused_where_they_may_be_stored(self, facts: Facts) -> None:
        async with FlakyBackend("unanswered", "refused") as backend:
            with pytest.raises(OutcomeUnknownError, match="not here"):
                await session_on(backend, facts).publisher.notify_together([STEP_6] * 2, message_id="mine")
            assert (await backend.stream_info("MARS")).messages == 2

    async def test_are_none_where_there_are_none(self, session: Session) -> None:
        assert await session.publisher.notify_many([]) == 0

    async def test_end_at_the_first_that_fails(self, session: Session, backend: InMemoryBackend) -> None:
        def wanted() -> Iterator[Notify]:
            for step in range(2000):
                yield Notify("mars", {"class": "od", "step": step})

        with pytest.raises(InvalidIdentifierError, match="'step' must be within"):
            await session.publisher.notify_many(wanted())
        assert (await backend.stream_info("MARS")).messages <= 1001

    async def test_end_with_the_error_of_the_iterable(self, session: Session) -> None:
        def wanted() -> Iterator[Notify]:
            yield STEP_6
            raise OSError("the disk is gone")

        with pytest.raises(OSError, match="the disk is gone"):
            await session.publisher.notify_many(wanted())


class TestAChunk:
    """Messages that were made elsewhere, by column."""

    async def test_is_stored_some_at_a_time(self, facts: Facts) -> None:
        async with FlakyBackend() as backend:
            assert await session_on(backend, facts).publisher.store_chunk("mars", chunk(5000)) == 5000
            assert (await backend.stream_info("MARS")).last_sequence == 5000
        assert 1 < backend.most_under_way <= CHUNK * CHUNKS_UNDER_WAY
        assert sum(event.count for event in facts.of(Published) if event.outcome == "stored") == 5000

    async def test_is_stored_few_at_a_time_where_its_messages_are_large(self, facts: Facts) -> None:
        async with FlakyBackend() as backend:
            large = chunk(20, data=b'"%s"' % (b"x" * 600_000))
            assert await session_on(backend, facts).publisher.store_chunk("mars", large) == 20
        assert backend.most_under_way == 2 * CHUNKS_UNDER_WAY

    @pytest.mark.parametrize("method", ["store_chunk", "store_answered"])
    async def test_is_not_told_as_refused_where_it_may_be_stored(self, facts: Facts, method: str) -> None:
        async with FlakyBackend("unanswered", "refused") as backend:
            store = getattr(session_on(backend, facts).publisher, method)
            with pytest.raises(OutcomeUnknownError, match="not here"):
                await store("mars", chunk(1))
            assert (await backend.stream_info("MARS")).messages == 1

    async def test_is_told_as_refused_where_nothing_of_it_is_stored(self, facts: Facts) -> None:
        async with FlakyBackend("refused", "refused") as backend:
            with pytest.raises(RefusedError, match="not here"):
                await session_on(backend, facts).publisher.store_chunk("mars", chunk(1))

    async def test_is_tried_again_where_something_of_it_was_not_stored(self, facts: Facts) -> None:
        async with FlakyBackend("", "unavailable", "unanswered", "", "unavailable") as backend:
            assert await session_on(backend, facts).publisher.store_chunk("mars", chunk(4)) == 4
            assert (await backend.stream_info("MARS")).messages == 4
        assert {message_id for _, message_id in backend.tries} == {"0", "1", "2", "3"}
        assert Counter(event.outcome for event in facts.of(Published) for _ in range(event.count)) == {
            "stored": 2,
            "duplicate": 2,
        }

    async def test_is_answered_for_each_message_where_that_is_asked_for(self, facts: Facts) -> None:
        async with FlakyBackend("", "unavailable") as backend:
            publisher = session_on(backend, facts).publisher
            await publisher.store_answered("mars", chunk(600))

            acks = await publisher.store_answered("mars", chunk(700))

        stored = [ack for ack in acks if isinstance(ack, PubAck)]
        assert [ack.duplicate for ack in stored] == [True] * 600 + [False] * 100
        assert len({ack.sequence for ack in stored}) == 700

    async def test_is_answered_by_a_refusal_where_another_state_of_the_stream_is_expected(self, facts: Facts) -> None:
        expecting = structs.replace(chunk(2), headers=[{"Nats-Expected-Last-Subject-Sequence": "7"}, None])
        async with FlakyBackend() as backend:
            refused, stored = await session_on(backend, facts).publisher.store_answered("mars", expecting)

        assert isinstance(refused, ConflictError)
        assert isinstance(stored, PubAck)
        assert stored.sequence == 1

    async def test_tells_which_of_two_under_one_id_was_stored(self, facts: Facts) -> None:
        twice = structs.replace(chunk(4), message_ids=["a", "b", "a", "b"])
        async with FlakyBackend() as backend:
            acks = await session_on(backend, facts).publisher.store_answered("mars", twice)
        assert [(ack.sequence, ack.duplicate) for ack in acks if isinstance(ack, PubAck)] == [
            (1, False),
            (2, False),
            (1, True),
            (2, True),
        ]

    async def test_is_refused_before_it_is_sent_where_a_message_is_too_large(self, facts: Facts) -> None:
        async with FlakyBackend() as backend:
            with pytest.raises(InvalidPayloadError, match="mars: the notification has 2000000 bytes"):
                await session_on(backend, facts).publisher.store_chunk("mars", chunk(3, data=b"x" * 2_000_000))
        assert backend.tries == []

    async def test_may_be_empty(self, session: Session) -> None:
        assert await session.publisher.store_chunk("mars", chunk(0)) == 0


def chunk(count: int, *, data: bytes = b"null") -> OutgoingChunk:
    return OutgoingChunk(
        subjects=[f"mars.od.{number}" for number in range(count)],
        data=[data] * count,
        headers=[None] * count,
        message_ids=[str(number) for number in range(count)],
    )
