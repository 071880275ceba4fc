"""The courier when a stream does not answer: it tries again, under the same message id, for as long as it takes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest
from msgspec import structs

from aviso_workers.aviso.codec import store_time
from aviso_workers.backends import Message, Outgoing, PubAck
from aviso_workers.clocks import SKEW
from aviso_workers.errors import BackendError, NotFoundError, RefusedError
from aviso_workers.events import NotRemoved, Overdue, Published, Unreadable
from aviso_workers.features import delayed_delivery
from aviso_workers.sessions.session import Session
from aviso_workers.state import delayed_messages
from tests.engine.conftest import Facts, Stored, config_with
from tests.engine.test_publisher import STEP_6, FlakyBackend
from tests.presence import present

pytestmark = pytest.mark.anyio

DELAYED, DUE = delayed_messages.stream_of("MARS"), delayed_messages.due_subject("MARS")


@pytest.fixture
async def backend() -> AsyncGenerator[FlakyBackend, None]:
    """What is due meets its failures."""
    async with FlakyBackend() as backend:
        yield backend


@pytest.fixture
async def session(backend: FlakyBackend, facts: Facts) -> AsyncGenerator[Session, None]:
    """With a courier at work."""
    session, stop = Session(backend, app="tests", config=config_with(), events=facts.events), anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.run_delayed_delivery, stop)
        yield session
        stop.set()


async def test_one_that_was_stored_without_an_answer_is_stored_once(
    session: Session, backend: FlakyBackend, facts: Facts, stored: Stored
) -> None:
    await session.publisher.notify(structs.replace(STEP_6, due=60, message_id="mine"))
    backend.failures = ["unanswered"]
    scheduled, brought = await facts.wait_for(Published, 2)
    assert (scheduled.outcome, brought.outcome, brought.attempts) == ("scheduled", "duplicate", 2)
    assert [(late.stream, late.message_id) for late in facts.of(Overdue)] == [("MARS", "mine")]
    assert [present(message.headers)["Nats-Msg-Id"] for message in await stored("MARS")] == ["mine"]


async def test_one_that_was_stored_by_a_server_whose_clock_is_behind_is_stored_once(
    session: Session, backend: FlakyBackend, facts: Facts, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream and the stream of what waits may have their leaders on two servers."""
    monkeypatch.setattr(delayed_delivery, "store_time", lambda message: store_time(message) + SKEW / 2)
    await session.publisher.notify(structs.replace(STEP_6, due=60, message_id="mine"))
    backend.tries.clear()
    backend.failures = ["unanswered"]
    await facts.wait_for(Published, 2)
    assert [message_id for _, message_id in backend.tries] == ["mine"], "it is found in its stream"
    assert len(await stored("MARS")) == 1


async def test_the_stream_of_what_waits_is_made_anew_where_it_was_deleted(
    backend: FlakyBackend, facts: Facts, stored: Stored
) -> None:
    publisher = Session(backend, app="tests", config=config_with(), events=facts.events).publisher
    await publisher.notify(structs.replace(STEP_6, due=60))
    await backend.delete_stream(DELAYED)
    await publisher.notify(structs.replace(STEP_6, due=60))
    assert len(await stored(DELAYED)) == 1


async def test_one_whose_stream_is_away_is_tried_again_more_and_more_rarely(
    session: Session, backend: FlakyBackend, facts: Facts
) -> None:
    await session.publisher.notify(structs.replace(STEP_6, due=60))
    backend.failures = ["unavailable"] * 9
    *_, brought = await facts.wait_for(Published, 2)
    assert (brought.outcome, brought.attempts) == ("stored", 10)
    waits = [late.again_in_seconds for late in facts.of(Overdue)]
    assert waits == [pytest.approx(seconds, rel=0.11) for seconds in (1, 2, 4, 8, 16, 32, 60, 60, 60)]


DENIED = RefusedError("permissions violation for publish to $JS.API.STREAM.MSG.DELETE.aviso_workers_schedule__MARS")


async def test_one_that_may_not_be_removed_is_stored_once_and_the_missing_right_is_told(
    session: Session, backend: FlakyBackend, facts: Facts, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deny(stream: str, sequence: int, *, overwrite: bool = True) -> None:
        raise DENIED

    with monkeypatch.context() as denied:
        denied.setattr(backend, "delete_message", deny)
        await session.publisher.notify(structs.replace(STEP_6, due=60))
        [kept] = await facts.wait_for(NotRemoved)
        assert (kept.stream, kept.message_id, kept.error) == (DELAYED, kept.message_id, DENIED)
        await anyio.sleep(1000)  # some duplicate windows
        assert len(await stored("MARS")) == 1
        assert len(facts.of(NotRemoved)) == 1
        assert await backend.subject_counts(DELAYED) == {DUE: 1}
    await anyio.sleep(delayed_delivery.REMOVE_SECONDS)
    assert await backend.subject_counts(DELAYED) == {}, "it may be removed now"
    assert len(await stored("MARS")) == 1


async def test_what_is_not_stored_yet_is_not_removed_with_what_is(
    session: Session, backend: FlakyBackend, facts: Facts, stored: Stored
) -> None:
    await session.publisher.notify(structs.replace(STEP_6, due=60, message_id="first"))
    await facts.wait_for(Published, 2)
    await session.publisher.notify(structs.replace(STEP_6, due=60, message_id="second"))
    backend.failures = ["unavailable"] * 40
    began = anyio.current_time()
    await facts.wait_for(Published, 4)
    assert anyio.current_time() - began > 2 * delayed_delivery.REMOVE_SECONDS
    assert [present(message.headers)["Nats-Msg-Id"] for message in await stored("MARS")] == ["first", "second"]


async def test_what_somebody_else_has_put_there_is_kept_for_whoever_looks_for_it(
    session: Session, backend: FlakyBackend, facts: Facts
) -> None:
    await session.publisher.notify(structs.replace(STEP_6, due=60))
    foreign = Message(subject=DUE, data=b"")
    await backend.publish(foreign, message_id="1", stream=DELAYED, timeout_seconds=1.0)
    await facts.wait_for(Published, 2)
    await anyio.sleep(2 * delayed_delivery.REMOVE_SECONDS)
    assert await backend.subject_counts(DELAYED) == {DUE: 1}


async def test_the_stream_of_what_waits_is_made_anew_where_it_is_deleted_between_two_attempts(
    backend: FlakyBackend, facts: Facts, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_many = backend.publish_many

    async def publish_after_a_deletion(outgoing: Sequence[Outgoing], **stated: Any) -> list[PubAck | BackendError]:
        monkeypatch.setattr(backend, "publish_many", publish_many)
        await backend.delete_stream(DELAYED)
        return await publish_many(outgoing, **stated)

    monkeypatch.setattr(backend, "publish_many", publish_after_a_deletion)
    publisher = Session(backend, app="tests", config=config_with(), events=facts.events).publisher
    await publisher.notify(structs.replace(STEP_6, due=60))
    assert len(await stored(DELAYED)) == 1


async def test_one_that_comes_for_the_first_time_is_not_looked_for(
    session: Session, backend: FlakyBackend, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look is a reading of its stream: too dear for each."""
    read, looked_for = backend.read, list[str]()

    def read_and_note(stream: str, **stated: Any) -> AsyncGenerator[Message, None]:
        looked_for.append(stream)
        return read(stream, **stated)

    monkeypatch.setattr(backend, "read", read_and_note)
    await session.publisher.notify(structs.replace(STEP_6, due=60))
    await facts.wait_for(Published, 2)
    assert "MARS" not in looked_for


async def test_one_under_a_base_that_only_shares_a_stream_with_an_event_type_is_delivered_nowhere(
    session: Session, backend: FlakyBackend, facts: Facts, stored: Stored
) -> None:
    """Bases that differ in case have streams of one name."""
    await session.publisher.notify(STEP_6)
    foreign = Outgoing(Message(subject="Mars.od.7", data=b"{}"), "theirs", "MARS")
    due = datetime.now(UTC) + timedelta(seconds=60)
    waits = delayed_messages.schedule(foreign, due, event_type="mars", message_id="schedule")
    await session.publisher.notify(structs.replace(STEP_6, due=60))
    await backend.publish(waits.message, message_id="schedule", stream=waits.stream, timeout_seconds=1.0)
    [unreadable] = await facts.wait_for(Unreadable)
    assert str(unreadable.error) == "Mars.od.7 is not a subject of event type mars"
    assert "Mars.od.7" not in [message.subject for message in await stored("MARS")]


async def test_others_are_removed_where_another_worker_was_faster_with_one(
    session: Session, backend: FlakyBackend, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete, denied = backend.delete_message, [True]

    async def delete_unless_gone(stream: str, sequence: int, **stated: Any) -> None:
        if denied:
            raise DENIED
        if await backend.message(stream, sequence) is not None:
            await delete(stream, sequence, **stated)
        raise NotFoundError("no such message")  # another worker has deleted it just now

    monkeypatch.setattr(backend, "delete_message", delete_unless_gone)
    for number in range(3):
        await session.publisher.notify(structs.replace(STEP_6, due=60, message_id=str(number)))
    await facts.wait_for(NotRemoved, 3)
    denied.clear()
    await anyio.sleep(delayed_delivery.REMOVE_SECONDS)
    assert await backend.subject_counts(DELAYED) == {}
